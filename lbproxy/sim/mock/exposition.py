"""The simulated server's /metrics page, and its load reports in headers, in the words of vLLM.

Only families that somebody reads: load, cache, progress. The names changed between versions, so there are two dialects;
`num_requests_waiting_by_reason` is there because a reader must not take it for `num_requests_waiting`. One family is
not vLLM's: how late the simulation itself ran, without which nobody can trust a figure measured against it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lbproxy.core.engines.orca import KV_UTILIZATION, WAITING
from lbproxy.sim.engine.engine import Gauges
from lbproxy.sim.engine.presets import BLOCK_TOKENS

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Page:
    """What a page says."""

    model: str
    kv_blocks: int
    gauges: Gauges
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
    old_names: bool = False
    """As in vLLM 0.8: the cache families start with `gpu_`, and there is no `engine` label."""


def render(page: Page) -> bytes:
    """The page as Prometheus text."""
    gauges = page.gauges
    who = {"model_name": page.model} if page.old_names else {"engine": "0", "model_name": page.model}
    usage, prefix = (
        ("gpu_cache_usage_perc", "gpu_prefix_cache") if page.old_names else ("kv_cache_usage_perc", "prefix_cache")
    )
    config = {**who, "block_size": str(BLOCK_TOKENS), "num_gpu_blocks": str(page.kv_blocks)}
    config |= {"enable_prefix_caching": "True", "num_cpu_blocks": "None"}
    lines = [
        *_family("num_requests_running", "gauge", "Requests being computed.", who, gauges.running),
        *_family("num_requests_waiting", "gauge", "Requests waiting to be computed.", who, gauges.waiting),
        *_by_reason(who, gauges.waiting, page.old_names),
        *_family(usage, "gauge", "KV cache in use by requests; 1 is all of it.", who, gauges.kv_usage),
        *_family(f"{prefix}_queries_total", "counter", "Prefix cache lookups, tokens.", who, gauges.prefix_queries),
        *_family(f"{prefix}_hits_total", "counter", "Prefix cache hits, tokens.", who, gauges.prefix_hits),
        *_family("num_preemptions_total", "counter", "Requests preempted.", who, gauges.preemptions),
        *_family("prompt_tokens_total", "counter", "Prompt tokens processed.", who, gauges.prompt_tokens),
        *_family("generation_tokens_total", "counter", "Tokens generated.", who, gauges.generation_tokens),
        *_head("vllm:request_success_total", "counter", "Requests finished."),
        *(
            _sample("vllm:request_success_total", {**who, "finished_reason": reason}, page.finished.get(reason, 0))
            for reason in ("stop", "length", "abort")
        ),
        *_family("cache_config_info", "gauge", "The cache's settings, in labels.", config, 1),
        *_adapters(page),
        *_started(page),
        *_head("lbproxy_mock_step_lag_seconds", "gauge", "How late the tokens of a step left, over the last minute."),
        _sample("lbproxy_mock_step_lag_seconds", {"stat": "max"}, page.lag_max_s),
        _sample("lbproxy_mock_step_lag_seconds", {"stat": "p99"}, page.lag_p99_s),
    ]
    return "".join(lines).encode()


def _by_reason(who: Mapping[str, str], waiting: int, old_names: bool) -> Iterable[str]:
    if old_names:
        return
    name = "vllm:num_requests_waiting_by_reason"
    yield from _head(name, "gauge", "Waiting requests by what they wait for.")
    yield _sample(name, {**who, "reason": "capacity"}, waiting)
    yield _sample(name, {**who, "reason": "deferred"}, 0)


def _adapters(page: Page) -> Iterable[str]:
    if not page.adapters:
        return
    yield from _head("vllm:lora_requests_info", "gauge", "Adapters of running and waiting requests; when, as value.")
    for running, at in page.adapters.items():
        # vLLM, too, says the same under both labels.
        labels = {"max_lora": str(page.max_loras), "running_lora_adapters": running, "waiting_lora_adapters": running}
        yield _sample("vllm:lora_requests_info", labels, at)


def _started(page: Page) -> Iterable[str]:
    if page.started_at is not None:
        yield from _head("process_start_time_seconds", "gauge", "Start time of the process; Unix time.")
        yield _sample("process_start_time_seconds", {}, page.started_at)


def load_report(form: str, gauges: Gauges) -> str | None:
    """What vLLM writes into `endpoint-load-metrics` when it is asked in this form; None: it does not know the form."""
    named = {WAITING: float(gauges.waiting), KV_UTILIZATION: float(gauges.kv_usage)}
    match form.lower():
        case "text":
            return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
        case "json":
            return f"JSON {json.dumps({'named_metrics': named})}"
        case _:
            return None


def _family(stem: str, kind: str, about: str, labels: Mapping[str, str], value: float) -> Iterable[str]:
    """A vLLM family of one sample."""
    yield from _head(f"vllm:{stem}", kind, about)
    yield _sample(f"vllm:{stem}", labels, value)


def _head(name: str, kind: str, about: str) -> Iterable[str]:
    yield f"# HELP {name} {about}\n"
    yield f"# TYPE {name} {kind}\n"


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{inside}}} {float(value)}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
