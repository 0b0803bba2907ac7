"""What each engine calls its load, as data: one `EngineTable` each, built in or from the settings.

A table lists for each signal the specs to try in order, since engines rename their families. An engine with other names
is another table, not other code. How specs become load is `core.engines.readings`'s; this module also says where an
engine's page usually stands, and which engine a page is of. Invariants:

- The settings' own engines come before built-in ones, so that of two that fit equally well the user's is taken.
- At the endpoint's own port every engine is recognised, whatever the path. At another port only the one that usually
  stands there is: what answers on a neighbouring port may be another server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lbproxy.config.sections.engines import EngineSettings, MetricRatio, MetricSpec, Signal
from lbproxy.core.engines.exposition import Scanner

SIGNALS = ("waiting", "running", "kv_utilization", "block_size_tokens", "kv_blocks")
"""What routing would know of each endpoint; fields of `LoadMetrics`. Which of these an engine has is in its table."""


class Place(NamedTuple):
    """Where an engine's metrics usually stand."""

    path: str = "/metrics"
    port: int | None = None
    """None = the endpoint's own."""


USUAL_PLACE = Place()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTable:
    """Where one engine shows its load."""

    place: Place = USUAL_PLACE
    only_there: bool = False
    """The settings say the place: a page elsewhere is not this engine's."""
    waiting: Signal = ()
    running: Signal = ()
    kv_utilization: Signal = ()
    block_size_tokens: Signal = ()
    kv_blocks: Signal = ()
    each_says_all_blocks: bool = False
    """Every series of `kv_blocks` speaks for the whole endpoint: the largest counts, not the sum."""
    work: Signal = ()
    """A counter of steps or tokens that moves while requests run, not only when they end: see
    `core.endpoints.progress`. Nothing is missing where there is none, as with the next."""
    lora: Signal = ()
    """Not among `SIGNALS`: an endpoint without adapters does not show it, and lacks nothing."""
    load_reports: bool = False
    """Its responses say its load in a header if they are asked to: see `core.engines.orca`."""
    reports_one_rank: bool = False
    """And each such report is of one process and one rank: not asked for where a page shows that there are more."""
    prefix: str | None = None
    """What the names of all its families begin with: tells the engine when it shows no load at all."""

    def asks_load(self, *, is_single: bool) -> bool:
        """Whether to ask for load reports. `is_single`: one process with one rank answers, as far as is known."""
        return self.load_reports and (is_single or not self.reports_one_rank)

    def signals(self) -> Mapping[str, Signal]:
        """Where each of `SIGNALS` is, in their order; empty if the engine does not have it."""
        return {name: getattr(self, name) for name in SIGNALS}

    def families(self) -> frozenset[str]:
        """Every family that some spec wants."""
        specs = (spec for signal in (*self.signals().values(), self.work, self.lora) for spec in signal)
        return frozenset(one.family for spec in specs for one in _parts(spec))


def _parts(spec: MetricSpec | MetricRatio) -> tuple[MetricSpec, ...]:
    return (spec.used, spec.capacity) if isinstance(spec, MetricRatio) else (spec,)


def _signal(*texts: str, label: str | None = None) -> Signal:
    return tuple(MetricSpec.parse(text, value_label=label) for text in texts)


_TRITON_BLOCKS = "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=%s}"

ENGINES: Mapping[str, EngineTable] = {
    "vllm": EngineTable(
        waiting=_signal("vllm:num_requests_waiting"),
        running=_signal("vllm:num_requests_running"),
        # A share 0..1 in spite of its name; older versions (0.8.5) say gpu_cache_usage_perc.
        kv_utilization=_signal("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        block_size_tokens=_signal("vllm:cache_config_info", label="block_size"),
        kv_blocks=_signal("vllm:cache_config_info", label="num_gpu_blocks"),
        # Each data-parallel rank's series says the sum over all ranks (v1/engine/core_client.py adds them up before
        # the metrics are made; recorded: two ranks of 60 blocks both say 120), so these must not be added again.
        each_says_all_blocks=True,
        work=_signal("vllm:iteration_tokens_total_sum", "vllm:generation_tokens_total"),
        lora=_signal("vllm:lora_requests_info"),
        # From 0.11 on; older ones do not mind being asked. Of data-parallel ranks 0.11 reports the first, later ones
        # all by the same name; of several API servers each reports what it saw (entrypoints/openai/orca_metrics.py).
        load_reports=True,
        reports_one_rank=True,
        prefix="vllm:",
    ),
    "sglang": EngineTable(
        waiting=_signal("sglang:num_queue_reqs"),
        running=_signal("sglang:num_running_reqs"),
        kv_utilization=_signal("sglang:token_usage"),
        # Gauges since 0.5.11, labels in 0.5.9 and 0.5.10.
        block_size_tokens=_signal("sglang:page_size") + _signal("sglang:cache_config_info", label="page_size"),
        kv_blocks=_signal("sglang:num_pages") + _signal("sglang:cache_config_info", label="num_pages"),
        # Written every 40 decoding steps, and with each batch of prompts; its generation_tokens_total only at an end.
        work=_signal("sglang:realtime_tokens_total", "sglang:num_used_tokens"),
        prefix="sglang:",
    ),
    "trtllm-serve": EngineTable(
        place=Place("/prometheus/metrics"),  # its /metrics is JSON
        waiting=_signal("trtllm_num_requests_waiting"),
        running=_signal("trtllm_num_requests_running"),
        kv_utilization=_signal("trtllm_kv_cache_utilization"),
        block_size_tokens=_signal("trtllm_kv_cache_tokens_per_block"),
        kv_blocks=_signal("trtllm_kv_cache_max_blocks"),
        prefix="trtllm_",
    ),
    "triton-tensorrt-llm": EngineTable(
        place=Place(port=8002),
        waiting=_signal("nv_trt_llm_request_metrics{request_type=waiting}"),
        running=_signal("nv_trt_llm_request_metrics{request_type=scheduled}"),
        # When the backend lacks a statistic, the others move up under wrong labels: above 1 this is no fraction.
        kv_utilization=(
            MetricSpec.parse(_TRITON_BLOCKS % "fraction", above_one="ignore"),
            MetricRatio(MetricSpec.parse(_TRITON_BLOCKS % "used"), MetricSpec.parse(_TRITON_BLOCKS % "max")),
        ),
        block_size_tokens=_signal(_TRITON_BLOCKS % "tokens_per"),
        kv_blocks=_signal(_TRITON_BLOCKS % "max"),
        prefix="nv_trt_llm_",
    ),
    "llamacpp": EngineTable(
        waiting=_signal("llamacpp:requests_deferred"),
        running=_signal("llamacpp:requests_processing"),
        work=_signal("llamacpp:n_decode_total"),  # each step; its counters of tokens move only when requests end
        prefix="llamacpp:",  # it shows nothing of its cache any more
    ),
}
"""By the name that the settings use. The order decides between engines of which a page shows as many families."""


class Engines:
    """The engines that one set of settings knows."""

    def __init__(self, own: Mapping[str, EngineSettings] | None = None) -> None:
        made = {name: _made(ENGINES.get(name, EngineTable()), settings) for name, settings in (own or {}).items()}
        self.tables: Mapping[str, EngineTable] = {**made, **{n: t for n, t in ENGINES.items() if n not in made}}
        """The settings' own first."""
        self._scanner = Scanner(family for table in self.tables.values() for family in table.families())

    def places(self, engine: str) -> Sequence[Place]:
        """Where an engine's page usually stands; of `auto`, where any engine's may, the most usual place first."""
        if engine != "auto":
            return [self.tables[engine].place]
        return list(dict.fromkeys([USUAL_PLACE, *(table.place for table in self.tables.values())]))

    def detect(self, page: bytes, place: Place | None = None) -> str | None:
        """The engine that the page is of: the one with most of its families there, else the one whose names it has.

        None if it is none that may stand at `place`; None there = a place that the settings say, where any may stand.
        """
        at_place = {name: table for name, table in self.tables.items() if _may_stand(table, place)}
        shown = self._scanner.scan(page).keys()
        counts = {name: len(table.families() & shown) for name, table in at_place.items()}
        best = max(counts, key=lambda name: counts[name], default=None)
        if best is not None and counts[best]:
            return best
        return next((name for name, table in at_place.items() if _has_prefix(page, table.prefix)), None)


def _may_stand(table: EngineTable, place: Place | None) -> bool:
    return place in (None, table.place) or (place is not None and place.port is None and not table.only_there)


def _made(base: EngineTable, settings: EngineSettings) -> EngineTable:
    """A built-in table, or an empty one, with what the settings say."""
    place = base.place
    if settings.metrics_path is not None:
        place = place._replace(path=settings.metrics_path)
    if settings.metrics_port is not None:
        place = place._replace(port=settings.metrics_port)
    return replace(
        base,
        place=place,
        only_there=settings.metrics_path is not None or settings.metrics_port is not None,
        waiting=_said(settings.queued, base.waiting),
        running=_said(settings.running, base.running),
        kv_utilization=_said(settings.kv_utilization, base.kv_utilization),
        block_size_tokens=_said(settings.block_size_tokens, base.block_size_tokens),
        kv_blocks=_said(settings.kv_blocks, base.kv_blocks),
        work=_said(settings.work, base.work),
        lora=_said(settings.lora, base.lora),
        load_reports=base.load_reports if settings.load_reports is None else settings.load_reports,
        reports_one_rank=base.reports_one_rank and settings.load_reports is None,
    )


def _said(said: Signal | None, built_in: Signal) -> Signal:
    """`()` is said too: that there is none."""
    return built_in if said is None else said


def _has_prefix(page: bytes, prefix: str | None) -> bool:
    if prefix is None:
        return False
    text = prefix.encode()
    return page.startswith(text) or b"\n" + text in page
