# SPDX-License-Identifier: Apache-2.0
"""The targets: what each is measured by, and what must be reached. Ours is computed, the thresholds are the project's.

A ratio to another proxy is of the same section, so of one interleaved run. Requests/s per core are 1 s by the CPU per
request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.overhead.figures import added_ms, cpu_us, middle, windows
from benchmarks.overhead.load import DEFAULTS, Figures
from benchmarks.overhead.results import Results

OURS = "lbproxy"
RUST = ("sglang-router", "vllm-router", "smg")
AT_DEFAULTS = tuple(f"{name}{DEFAULTS}" for name in RUST)
LLM_D = 130.0
"""Requests/s with prompts of 220 KB at which llm-d's picker levels off, by its own published load test."""
Seen = dict[str, list[Figures]]


@dataclass(frozen=True, slots=True)
class Goal:
    """A measure of lbproxy, and its limits."""

    what: str
    ours: Callable[[Results], float | None]
    must: float | None
    stretch: float | None = None
    at_least: bool = False
    """Whether more is better."""
    digits: int = 2

    def met(self, ours: float, limit: float) -> bool:
        """Whether the limit is kept."""
        return ours >= limit if self.at_least else ours <= limit

    def said(self, limit: float | None) -> str:
        """A limit in words."""
        return "" if limit is None else f"{'≥' if self.at_least else '≤'} {limit:,g}"


def goals(results: Results) -> Iterator[tuple[Goal, float | None]]:
    """All targets, with our figure; None = not measured."""
    for goal in GOALS:
        yield goal, goal.ours(results)


def _seen(results: Results, section: str) -> Seen:
    found = results["workloads"].get(section)
    return {} if found is None else windows(found)


def _cpu(seen: Seen, name: str, unit: str) -> float | None:
    return middle(seen.get(name, []), cpu_us(unit))


def _divided(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None or other <= 0 else one / other


def times_faster(section: str, peer: str) -> Callable[[Results], float | None]:
    """Our requests/s per core by the peer's."""

    def of(results: Results) -> float | None:
        seen = _seen(results, section)
        return _divided(_cpu(seen, peer, "request"), _cpu(seen, OURS, "request"))

    return of


def cpu_ratio(section: str, *peers: str, unit: str = "event") -> Callable[[Results], float | None]:
    """Our CPU per event, or request, by the best of the peers; None unless all were measured."""

    def of(results: Results) -> float | None:
        seen = _seen(results, section)
        known = [one for peer in peers if (one := _cpu(seen, peer, unit)) is not None]
        return _divided(_cpu(seen, OURS, unit), min(known)) if len(known) == len(peers) else None

    return of


def added(results: Results) -> float | None:
    """Milliseconds that lbproxy adds to the median time to the first event."""
    return added_ms(_seen(results, "ttft"), OURS)


def added_ratio(peer: str) -> Callable[[Results], float | None]:
    """By what the peer adds."""

    def of(results: Results) -> float | None:
        seen = _seen(results, "ttft")
        return _divided(added_ms(seen, OURS), added_ms(seen, peer))

    return of


def delay(section: str) -> Callable[[Results], float | None]:
    """The 99th percentile of an event's delay."""

    def of(results: Results) -> float | None:
        return middle(_seen(results, section).get(OURS, []), lambda one: one["delay_ms"]["p99"])

    return of


def delay_ratio(*peers: str) -> Callable[[Results], float | None]:
    """By the best of the peers; None unless all were measured."""

    def of(results: Results) -> float | None:
        seen = _seen(results, "streams")
        theirs = [middle(seen.get(peer, []), lambda one: one["delay_ms"]["p99"]) for peer in peers]
        known = [one for one in theirs if one is not None]
        return _divided(delay("streams")(results), min(known)) if len(known) == len(peers) else None

    return of


def idle_mb(results: Results) -> float | None:
    """Resident memory after the start and a hundred requests."""
    found = results["workloads"].get("streams")
    size = found["idle_rss_bytes"].get(OURS) if found else None
    return None if size is None else size / 1e6


def peak_mb(section: str) -> Callable[[Results], float | None]:
    """The most resident memory that was seen."""

    def of(results: Results) -> float | None:
        sizes = [one["proxy_rss_bytes"] or 0 for one in _seen(results, section).get(OURS, [])]
        return max(sizes) / 1e6 if sizes else None

    return of


def long_prompts(results: Results) -> float | None:
    """Requests/s per core with 220 KB, by llm-d's: the least of the three loads; None unless all were measured."""
    used = [_cpu(_seen(results, f"220k-{n}"), OURS, "request") for n in (20, 100, 200)]
    known = [one for one in used if one]
    return 1e6 / max(known) / LLM_D if len(known) == len(used) else None


def errors(section: str) -> Callable[[Results], float | None]:
    """Failed requests; a subject that gave up has failed."""

    def of(results: Results) -> float | None:
        some = _seen(results, section).get(OURS, [])
        return float(sum(one["errors"] for one in some)) if some else None

    return of


def other(section: str, figure: str) -> Callable[[Results], float | None]:
    """What another benchmark says."""

    def of(results: Results) -> float | None:
        found = results["others"].get(section)
        return None if found is None else found["figures"].get(figure)

    return of


def _faster(section: str, what: str, peer: str, must: float | None, stretch: float | None = None) -> Goal:
    return Goal(f"{what}: requests/s per core, x {peer}", times_faster(section, peer), must, stretch, at_least=True)


GOALS = (
    _faster("1k", "1 KB, 64 connections", "sglang-router", 1.5, 2.2),
    _faster("1k", "1 KB, 64 connections", "vllm-router", 1.2),
    _faster("1k", "1 KB, 64 connections", "smg", 2.5),
    _faster("1k", "1 KB, 64 connections", "litellm", 100),
    _faster("1k", "1 KB, 64 connections", "envoy", None, 1.1),
    Goal("1 KB, 64 connections: CPU per request, x nginx", cpu_ratio("1k", "nginx", unit="request"), None, 1.7),
    _faster("32k", "32 KB prompts", "sglang-router", 1.3),
    _faster("32k", "32 KB prompts", "envoy", 0.7, 1.0),
    *(
        Goal(
            f"{what} of an agent: CPU per request, x the best Rust router",
            cpu_ratio(key, *AT_DEFAULTS, unit="request"),
            1.0,
        )
        for key, what in (("256k", "256 KB"), ("1m", "1 MB"), ("4m", "4 MB"))
    ),
    Goal("500 streams x 20 ms: CPU per event, x sglang-router", cpu_ratio("sse", "sglang-router"), 1.0),
    Goal("500 streams x 20 ms: CPU per event, x envoy", cpu_ratio("sse", "envoy"), 0.95),
    Goal("500 streams x 20 ms: CPU per event, x nginx", cpu_ratio("sse", "nginx"), None, 1.15),
    Goal("500 streams x 20 ms: CPU per event, x the best Rust router", cpu_ratio("sse", *RUST), None, 0.9),
    Goal("2,000 streams x 50 ms: CPU per event, x nginx", cpu_ratio("streams", "nginx"), None, 1.15),
    Goal("2,000 streams x 50 ms: CPU per event, x the best Rust router", cpu_ratio("streams", *RUST), None, 0.9),
    Goal("low load: TTFT p50 over direct, ms", added, 0.25, digits=3),
    Goal("low load: TTFT p50 over direct, x envoy", added_ratio("envoy"), 1.0),
    Goal("low load: TTFT p50 over direct, x nginx", added_ratio("nginx"), None, 1.7),
    Goal("2,000 streams x 50 ms: event delay p99, ms", delay("streams"), 10),
    Goal("2,000 streams x 50 ms: event delay p99, x the best Rust router", delay_ratio(*RUST), 1.0),
    Goal("2,000 streams x 50 ms: event delay p99, x nginx", delay_ratio("nginx"), None, 1.2),
    Goal("RSS idle, MB", idle_mb, 70, 55, digits=0),
    Goal("RSS at 2,000 streams, MB", peak_mb("streams"), 110, 80, digits=0),
    Goal("one decision over 100 endpoints, 32 KB prompt, us", other("decision", "us"), 150, 60, digits=0),
    Goal("scraping 100 endpoints each 200 ms, cores", other("scrape", "cores"), 0.25, 0.1, digits=3),
    Goal("220 KB prompts: requests/s per core, x llm-d's 130", long_prompts, 5, 10, at_least=True, digits=1),
    Goal("8,900 streams x 1 s: failed requests", errors("held"), 0, digits=0),
    Goal("start to the first answer, ms", other("start", "first_answer_ms"), 500, 300, digits=0),
)
