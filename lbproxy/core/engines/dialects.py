# SPDX-License-Identifier: Apache-2.0
"""The metric names of each engine, as data: one `EngineTable` each, built in or from the settings.

A table lists for each signal the specs to try in order, since engines rename their families. An engine with other names
needs another table, not other code. `core.engines.readings` turns samples into load by these specs; this module also
says where an engine's page usually is, and which engine a page is from. Invariants:

- The engines of the settings come before the built-in ones, so that of two that match equally well the user's is taken.
- At the endpoint's own port every engine is recognised, on any path. At another port only the engine that usually has
  its page there is: what responds on a neighbouring port may be another server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lbproxy.config.sections.engines import LBPROXY, LM_STUDIO, OLLAMA, EngineSettings, MetricRatio, MetricSpec, Signal
from lbproxy.core.engines.exposition import Scanner

SIGNALS = ("waiting", "running", "kv_utilization", "block_size_tokens", "kv_blocks")
"""The signals that routing uses; fields of `LoadMetrics`. An engine's table says which of them it has."""

OTHER_SIGNALS = ("also_waiting", "deferred", "kv_tokens", "slots", "awake", "work", "lora")
"""What else is read, where it is."""


class MetricsLocation(NamedTuple):
    """Where an engine's metrics usually are."""

    path: str = "/metrics"
    port: int | None = None
    """None = the endpoint's own port."""


DEFAULT_LOCATION = MetricsLocation()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTable:
    """Where one engine exposes its load."""

    location: MetricsLocation = DEFAULT_LOCATION
    only_at_location: bool = False
    """The place is configured: a page elsewhere is not from this engine."""
    waiting: Signal = ()
    running: Signal = ()
    kv_utilization: Signal = ()
    block_size_tokens: Signal = ()
    kv_blocks: Signal = ()
    each_series_is_total: bool = False
    """Every series of `kv_blocks` is the total of the endpoint: the largest counts, not the sum."""
    kv_tokens: Signal = ()
    """The size of the cache of each rank in tokens, beside blocks: see `LoadMetrics.kv_tokens`. Not in `SIGNALS`, nor
    are those that follow: they are optional."""
    also_waiting: Signal = ()
    """Requests that wait before those of `waiting`, and are not among them."""
    deferred: Signal = ()
    """Requests that wait for something else than room: see `LoadMetrics.deferred`."""
    slots: Signal = ()
    """How many requests it runs at once."""
    awake: Signal = ()
    """0 while it sleeps: see `core.engines.server_info`."""
    work: Signal = ()
    """A counter of steps or tokens that changes while requests run, not only when they end: see
    `core.endpoints.progress`."""
    lora: Signal = ()
    """An endpoint without adapters does not expose it, and misses nothing."""
    load_reports: bool = False
    """Its responses carry its load in a header on demand: see `core.engines.orca`."""
    reports_one_rank: bool = False
    """Each such report is about one process and one rank: not requested where a page shows that there are more."""
    rank_label: str | None = None
    """The label that tells its data-parallel ranks apart; None = it has none, or they cannot be chosen."""
    is_detected: bool = True
    """False = an endpoint is of this engine only if the settings say so: it is believed what no model server is."""
    prefix: str | None = None
    """The common prefix of its families: identifies the engine when it exposes no load at all."""

    def wants_load_reports(self, *, is_single: bool) -> bool:
        """Whether to request load reports. `is_single`: one process with one rank responds, as far as known."""
        return self.load_reports and (is_single or not self.reports_one_rank)

    def signals(self) -> Mapping[str, Signal]:
        """The specs of each of `SIGNALS`, in their order; empty if the engine does not have the signal."""
        return {name: getattr(self, name) for name in SIGNALS}

    def others(self) -> Mapping[str, Signal]:
        """The specs of what is optional, in their order."""
        return {name: getattr(self, name) for name in OTHER_SIGNALS}

    def families(self) -> frozenset[str]:
        """All families that the specs use."""
        specs = (spec for signal in (*self.signals().values(), *self.others().values()) for spec in signal)
        return frozenset(one.family for spec in specs for one in _parts(spec))


def _parts(spec: MetricSpec | MetricRatio) -> tuple[MetricSpec, ...]:
    return (spec.used, spec.capacity) if isinstance(spec, MetricRatio) else (spec,)


def _signal(*texts: str, label: str | None = None) -> Signal:
    return tuple(MetricSpec.parse(text, value_label=label) for text in texts)


_TRITON_BLOCKS = "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=%s}"

ENGINES: Mapping[str, EngineTable] = {
    "vllm": EngineTable(
        # Deferred ones wait for an adapter's place, the KV of a prefill or a grammar.
        waiting=_signal("vllm:num_requests_waiting_by_reason{reason=capacity}", "vllm:num_requests_waiting"),
        deferred=_signal("vllm:num_requests_waiting_by_reason{reason=deferred}"),
        running=_signal("vllm:num_requests_running"),
        awake=_signal("vllm:engine_sleep_state{sleep_state=awake}"),
        # A share 0..1 in spite of its name; older versions (0.8.5) have gpu_cache_usage_perc.
        kv_utilization=_signal("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        block_size_tokens=_signal("vllm:cache_config_info", label="block_size"),
        kv_blocks=_signal("vllm:cache_config_info", label="num_gpu_blocks"),
        # Each data-parallel rank's series has the sum over all ranks (v1/engine/core_client.py adds them up before the
        # metrics are made; recorded: two ranks of 60 blocks both report 120), so these must not be added again.
        each_series_is_total=True,
        # Of each rank: what fits of requests of the greatest length. Of hybrid models block_size is the least of
        # several groups of layers, and a token takes blocks of each.
        kv_tokens=_signal("vllm:cache_config_info", label="kv_cache_size_tokens"),
        work=_signal("vllm:iteration_tokens_total_sum", "vllm:generation_tokens_total"),
        lora=_signal("vllm:lora_requests_info"),
        # From 0.11 on; older versions ignore the request. With data-parallel ranks 0.11 reports the first, later
        # versions all under one name; of several API servers each reports what it saw
        # (entrypoints/openai/orca_metrics.py).
        load_reports=True,
        reports_one_rank=True,
        # The header X-data-parallel-rank is an index among the ranks of this address (v1/engine/input_processor.py of
        # 0.33): in hybrid mode the position of the label, which is the rank among all nodes.
        rank_label="engine",
        prefix="vllm:",
    ),
    "sglang": EngineTable(
        waiting=_signal("sglang:num_queue_reqs"),
        running=_signal("sglang:num_running_reqs"),
        # token_usage is the greatest of all pools: of hybrid models often that of sliding windows, or of Mamba.
        kv_utilization=(
            MetricRatio(MetricSpec.parse("sglang:kv_used_tokens"), MetricSpec.parse("sglang:max_total_num_tokens")),
            *_signal("sglang:token_usage"),
        ),
        kv_tokens=_signal("sglang:max_total_num_tokens"),
        # Gauges since 0.5.11, labels in 0.5.9 and 0.5.10.
        block_size_tokens=_signal("sglang:page_size") + _signal("sglang:cache_config_info", label="page_size"),
        kv_blocks=_signal("sglang:num_pages") + _signal("sglang:cache_config_info", label="num_pages"),
        # Updated every 40 decoding steps, and with each batch of prompts; generation_tokens_total only when a request
        # ends.
        work=_signal("sglang:realtime_tokens_total", "sglang:num_used_tokens"),
        # Only with ranks. The same header, on chat and completions (entrypoints/openai/serving_base.py of 0.5.23).
        rank_label="dp_rank",
        prefix="sglang:",
    ),
    "trtllm-serve": EngineTable(
        location=MetricsLocation("/prometheus/metrics"),  # its /metrics is JSON
        waiting=_signal("trtllm_num_requests_waiting"),
        running=_signal("trtllm_num_requests_running"),
        kv_utilization=_signal("trtllm_kv_cache_utilization"),
        block_size_tokens=_signal("trtllm_kv_cache_tokens_per_block"),
        kv_blocks=_signal("trtllm_kv_cache_max_blocks"),
        slots=_signal("trtllm_max_num_active_requests"),
        prefix="trtllm_",
    ),
    "triton-tensorrt-llm": EngineTable(
        location=MetricsLocation(port=8002),
        waiting=_signal("nv_trt_llm_request_metrics{request_type=waiting}"),
        running=_signal("nv_trt_llm_request_metrics{request_type=scheduled}"),
        # When the backend lacks a statistic, the others move up under wrong labels: a value above 1 is not a fraction.
        kv_utilization=(
            MetricSpec.parse(_TRITON_BLOCKS % "fraction", above_one="ignore"),
            MetricRatio(MetricSpec.parse(_TRITON_BLOCKS % "used"), MetricSpec.parse(_TRITON_BLOCKS % "max")),
        ),
        block_size_tokens=_signal(_TRITON_BLOCKS % "tokens_per"),
        kv_blocks=_signal(_TRITON_BLOCKS % "max"),
        slots=_signal("nv_trt_llm_request_metrics{request_type=max}"),
        prefix="nv_trt_llm_",
    ),
    "llamacpp": EngineTable(
        waiting=_signal("llamacpp:requests_deferred"),
        running=_signal("llamacpp:requests_processing"),
        work=_signal("llamacpp:n_decode_total"),  # each step; its counters of tokens move only when requests end
        prefix="llamacpp:",  # it exposes nothing of its cache any more
    ),
    "lmdeploy": EngineTable(
        waiting=_signal("lmdeploy:num_requests_waiting"),
        also_waiting=_signal("lmdeploy:num_api_requests_waiting"),  # in its API server, before the engine has them
        running=_signal("lmdeploy:num_requests_running"),
        kv_utilization=_signal("lmdeploy:gpu_cache_usage_perc"),
        work=_signal("lmdeploy:iteration_tokens_total_sum", "lmdeploy:generation_tokens_total"),
        prefix="lmdeploy:",
    ),
    LBPROXY: EngineTable(  # another one behind this one; on its admin listener, so by default it is not scraped
        waiting=_signal("lbproxy_waiting_requests"),
        running=_signal("lbproxy_endpoint_in_flight"),
        is_detected=False,
    ),
    OLLAMA: EngineTable(is_detected=False),  # show no load: they are known by their API
    LM_STUDIO: EngineTable(is_detected=False),
}
"""By the name in the settings. The order decides between engines that have equally many families on a page."""


class _Tables(dict[str, EngineTable]):
    """An engine that a reload took away while a file of endpoints still names it shows nothing."""

    def __missing__(self, engine: str) -> EngineTable:
        return EngineTable()


class Engines:
    """The engines of one settings tree."""

    def __init__(self, own: Mapping[str, EngineSettings] | None = None) -> None:
        made = {
            name: _with_settings(ENGINES.get(name, EngineTable()), settings) for name, settings in (own or {}).items()
        }
        self.tables: Mapping[str, EngineTable] = _Tables(made | {n: t for n, t in ENGINES.items() if n not in made})
        """The engines of the settings first."""
        self._scanner = Scanner(family for table in self.tables.values() for family in table.families())

    def locations(self, engine: str) -> Sequence[MetricsLocation]:
        """Where an engine's page usually is; for `auto`, where any engine's may be, the most usual place first."""
        if engine != "auto":
            return [self.tables[engine].location]
        return list(dict.fromkeys([DEFAULT_LOCATION, *(table.location for table in self.tables.values())]))

    def detect(self, page: bytes, location: MetricsLocation | None = None) -> str | None:
        """Return the engine that a page is from: the one with most of its families on it, else the one with the prefix
        of its families.

        None if the engine cannot be at `location`. `location` None: a configured place, where any engine may be.
        """
        at_location = {
            name: table for name, table in self.tables.items() if table.is_detected and _may_be_at(table, location)
        }
        shown = self._scanner.scan(page).keys()
        counts = {name: len(table.families() & shown) for name, table in at_location.items()}
        best = max(counts, key=lambda name: counts[name], default=None)
        if best is not None and counts[best]:
            return best
        return next((name for name, table in at_location.items() if _has_prefix(page, table.prefix)), None)


def _may_be_at(table: EngineTable, location: MetricsLocation | None) -> bool:
    return location in (None, table.location) or (
        location is not None and location.port is None and not table.only_at_location
    )


def _with_settings(base: EngineTable, settings: EngineSettings) -> EngineTable:
    """A built-in table, or an empty one, with the settings applied."""
    location = base.location
    if settings.metrics_path is not None:
        location = location._replace(path=settings.metrics_path)
    if settings.metrics_port is not None:
        location = location._replace(port=settings.metrics_port)
    return replace(
        base,
        location=location,
        only_at_location=settings.metrics_path is not None or settings.metrics_port is not None,
        waiting=_configured_or(settings.queued, base.waiting),
        running=_configured_or(settings.running, base.running),
        kv_utilization=_configured_or(settings.kv_utilization, base.kv_utilization),
        block_size_tokens=_configured_or(settings.block_size_tokens, base.block_size_tokens),
        kv_blocks=_configured_or(settings.kv_blocks, base.kv_blocks),
        kv_tokens=base.kv_tokens if settings.kv_blocks is None and settings.block_size_tokens is None else (),
        also_waiting=base.also_waiting if settings.queued is None else (),
        deferred=base.deferred if settings.queued is None else (),
        work=_configured_or(settings.work, base.work),
        lora=_configured_or(settings.lora, base.lora),
        load_reports=base.load_reports if settings.load_reports is None else settings.load_reports,
        reports_one_rank=base.reports_one_rank and settings.load_reports is None,
    )


def _configured_or(configured: Signal | None, built_in: Signal) -> Signal:
    """`()` is configured too: the engine does not have the signal."""
    return built_in if configured is None else configured


def _has_prefix(page: bytes, prefix: str | None) -> bool:
    if prefix is None:
        return False
    text = prefix.encode()
    return page.startswith(text) or b"\n" + text in page
