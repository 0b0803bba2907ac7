"""What an engine reports of its load, whichever engine it is. `None` means that it did not report it, never 0."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoraMetrics:
    """What one scrape said of LoRA adapters.

    vLLM names adapters that have live requests only, and under both labels alike: what is resident and idle is not
    here, so an adapter that is missing from both sets may still be loaded.
    """

    running: frozenset[str] = frozenset()
    """Adapters with requests that are computed."""
    waiting: frozenset[str] = frozenset()
    """Adapters with requests that wait."""
    max_lora: int | None = None
    """Adapters that can be resident at a time."""


@dataclass(frozen=True, kw_only=True)
class LoadMetrics:
    """What one scrape said. A field is None when the page did not say it."""

    scraped_at: float
    """When the scrape was *sent*: the gauges cannot be younger than that. Or when a load report came since."""
    waiting: float | None = None
    """Requests queued in the engine, summed over its series."""
    running: float | None = None
    """Requests that the engine is computing, summed over its series."""
    kv_utilization: float | None = None
    """Share of the KV cache in use by requests, 0..1."""
    block_size_tokens: int | None = None
    kv_blocks: int | None = None
    work: float | None = None
    """Steps or tokens computed since some time: a figure that changes while requests run, compared only with itself."""
    lora: LoraMetrics | None = None
    """None also before vLLM's first request for an adapter."""
    started_at: float | None = None
    """The engine process's own word on when it started (`process_start_time_seconds`, its wall clock). Only ever
    compared with itself: another value means another process, whose caches are empty."""
