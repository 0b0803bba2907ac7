# SPDX-License-Identifier: Apache-2.0
"""What the simulated server shows of itself: /metrics and load reports in headers in the words of vLLM, its models, and
how SGLang and llama.cpp describe themselves, as far as somebody reads it: their cache and how many requests they run.

Of metrics only families that somebody reads: load, cache, progress. The names changed between versions, so there are
two dialects; `num_requests_waiting_by_reason` is there because a reader must not take it for `num_requests_waiting`.
One family is not vLLM's: how late the simulation itself ran, without which nobody can trust a figure measured against
it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import orjson

from lbproxy.core.engines.orca import KV_UTILIZATION, WAITING
from lbproxy.sim.engine.engine import EngineGauges
from lbproxy.sim.engine.presets import BLOCK_TOKENS
from lbproxy.sim.mock.apis.fields import Json

Labels: TypeAlias = Mapping[str, str]
CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"
DESCRIPTIONS: Mapping[str, tuple[str, ...]] = {
    "sglang": ("/server_info", "/get_server_info"),
    "llamacpp": ("/props",),
}
"""Where, by the engine."""


@dataclass(frozen=True, slots=True)
class Page:
    """What a page says."""

    model: str
    kv_blocks: int
    ranks: Sequence[EngineGauges]
    """The gauges of each data-parallel rank; of a server without, one."""
    finished: Mapping[str, int] = field(default_factory=dict)
    """Requests that ended, by finish reason."""
    lag_max_s: float = 0.0
    lag_p99_s: float = 0.0
    max_loras: int = 0
    """Adapters that may run together."""
    adapters: Mapping[str, float] = field(default_factory=dict)
    """Which ran together, joined by commas, and until which Unix time; empty = nothing is said of adapters."""
    started_at: float | None = None
    """Unix time at which the server was started; None: nothing is said about it."""
    prefix_cache: bool = True
    old_names: bool = False
    """As in vLLM 0.8: the cache families start with `gpu_`, and there is no `engine` label."""


def render(page: Page) -> bytes:
    """The page as Prometheus text."""
    old = page.old_names
    who = {"model_name": page.model}
    names = [who if old else {"engine": str(number), **who} for number in range(len(page.ranks))]
    usage, prefix = ("gpu_cache_usage_perc", "gpu_prefix_cache") if old else ("kv_cache_usage_perc", "prefix_cache")
    # Like vLLM: each rank shows the blocks of all ranks together.
    facts = {"block_size": str(BLOCK_TOKENS), "num_gpu_blocks": str(page.kv_blocks)}
    facts |= {"enable_prefix_caching": str(page.prefix_cache), "num_cpu_blocks": "None"}
    ranks = [*zip(names, page.ranks, strict=True)]
    reasons = ("stop", "length", "abort")
    lines = [
        *family("num_requests_running", "gauge", "Requests being computed.", [(n, g.running) for n, g in ranks]),
        *family(
            "num_requests_waiting", "gauge", "Requests waiting to be computed.", [(n, g.waiting) for n, g in ranks]
        ),
        *([] if old else _by_reason(ranks)),
        *family(usage, "gauge", "KV cache in use by requests; 1 is all of it.", [(n, g.kv_usage) for n, g in ranks]),
        *family(
            f"{prefix}_queries_total",
            "counter",
            "Prefix cache lookups, tokens.",
            [(n, g.prefix_queries) for n, g in ranks],
        ),
        *family(
            f"{prefix}_hits_total", "counter", "Prefix cache hits, tokens.", [(n, g.prefix_hits) for n, g in ranks]
        ),
        *family("num_preemptions_total", "counter", "Requests preempted.", [(n, g.preemptions) for n, g in ranks]),
        *family("prompt_tokens_total", "counter", "Prompt tokens processed.", [(n, g.prompt_tokens) for n, g in ranks]),
        *family(
            "generation_tokens_total", "counter", "Tokens generated.", [(n, g.generation_tokens) for n, g in ranks]
        ),
        *family(
            "request_success_total",
            "counter",
            "Requests finished.",
            [({**names[0], "finished_reason": reason}, page.finished.get(reason, 0)) for reason in reasons],
        ),
        *family("cache_config_info", "gauge", "The cache's settings, in labels.", [({**n, **facts}, 1) for n in names]),
        *_adapters(page),
        *_started(page),
        *head("lbproxy_mock_step_lag_seconds", "gauge", "How late the tokens of a step left, over the last minute."),
        sample("lbproxy_mock_step_lag_seconds", {"stat": "max"}, page.lag_max_s),
        sample("lbproxy_mock_step_lag_seconds", {"stat": "p99"}, page.lag_p99_s),
    ]
    return "".join(lines).encode()


def _by_reason(ranks: Iterable[tuple[Labels, EngineGauges]]) -> Iterable[str]:
    samples = [
        ({**name, "reason": reason}, value)
        for name, gauges in ranks
        for reason, value in (("capacity", gauges.waiting - gauges.deferred), ("deferred", gauges.deferred))
    ]
    return family("num_requests_waiting_by_reason", "gauge", "Waiting requests by what they wait for.", samples)


def _adapters(page: Page) -> Iterable[str]:
    if not page.adapters:
        return
    yield from head("vllm:lora_requests_info", "gauge", "Adapters of running and waiting requests; when, as value.")
    for running, at in page.adapters.items():
        # vLLM, too, says the same under both labels.
        labels = {"max_lora": str(page.max_loras), "running_lora_adapters": running, "waiting_lora_adapters": running}
        yield sample("vllm:lora_requests_info", labels, at)


def _started(page: Page) -> Iterable[str]:
    if page.started_at is not None:
        yield from head("process_start_time_seconds", "gauge", "Start time of the process; Unix time.")
        yield sample("process_start_time_seconds", {}, page.started_at)


def load_report(form: str, gauges: EngineGauges) -> str | None:
    """What vLLM writes into `endpoint-load-metrics` when it is asked in this form; None: it does not know the form."""
    named = {WAITING: float(gauges.waiting), KV_UTILIZATION: float(gauges.kv_usage)}
    match form.lower():
        case "text":
            return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
        case "json":
            return f"JSON {json.dumps({'named_metrics': named})}"
        case _:
            return None


def family(stem: str, kind: str, about: str, samples: Iterable[tuple[Labels, float]]) -> Iterable[str]:
    """A vLLM family: its samples, each with its labels."""
    yield from head(f"vllm:{stem}", kind, about)
    for labels, value in samples:
        yield sample(f"vllm:{stem}", labels, value)


def head(name: str, kind: str, about: str) -> Iterable[str]:
    """What goes before the samples of a family."""
    yield f"# HELP {name} {about}\n"
    yield f"# TYPE {name} {kind}\n"


def sample(name: str, labels: Labels, value: float) -> str:
    """One line."""
    inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{inside}}} {float(value)}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def describe(engine: str, kv_tokens: int, slots: int, *, role: str = "both", bootstrap_port: int = 8998) -> bytes:
    """The page of an engine whose cache holds `kv_tokens` and that runs `slots` requests at a time. llama.cpp says how
    many tokens each of these has, rounded down. SGLang's says what `role` it has, if not both.
    """
    pages: Mapping[str, Mapping[str, object]] = {
        "sglang": {
            "max_running_requests": None,
            "max_total_num_tokens": kv_tokens,
            "dp_size": 1,
            "disaggregation_mode": "null" if role == "both" else role,
            "disaggregation_bootstrap_port": bootstrap_port,
            "disaggregation_transfer_backend": "mooncake",
            "disaggregation_decode_enable_radix_cache": False,
            "internal_states": [{"effective_max_running_requests_per_dp": slots}],
        },
        "llamacpp": {"total_slots": slots, "default_generation_settings": {"n_ctx": kv_tokens // slots}},
    }
    return orjson.dumps(pages[engine])


def models_body(
    model: str, *, created: int, max_model_len: int, engine: str = "vllm", adapters: Sequence[Json] = ()
) -> bytes:
    """The body of /v1/models. `adapters`: their entries; of Ollama and LM Studio they are models like the first."""
    card = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": {"ollama": "library", "lmstudio": "organization_owner"}.get(engine, engine),
        "root": model,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [],
    }
    if engine in ("ollama", "lmstudio"):
        adapters = [card | {"id": one["id"], "root": one["id"]} for one in adapters]
    return orjson.dumps({"object": "list", "data": [card, *adapters]})
