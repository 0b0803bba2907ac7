# SPDX-License-Identifier: Apache-2.0
"""What an engine reports of its load, the same for all engines. `None` means not reported, and never 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DERIVED_SHARE: Final = 0.05
"""vLLM derives the tokens of its cache from requests of the greatest length, of which each may lose a part of a block:
this much with 20 blocks."""


@dataclass(frozen=True)
class LoraMetrics:
    """What one scrape reported of LoRA adapters.

    vLLM names only adapters with live requests, the same names under both labels. Idle adapters in memory are not
    named, so an adapter that is missing from both sets may still be loaded.
    """

    running: frozenset[str] = frozenset()
    """Adapters whose requests are being computed."""
    waiting: frozenset[str] = frozenset()
    """Adapters whose requests wait."""
    max_lora: int | None = None
    """How many adapters can be loaded at a time."""


@dataclass(frozen=True, kw_only=True)
class LoadMetrics:
    """What one scrape reported. A field is None when the page did not have it."""

    scraped_at: float
    """When the scrape was *sent*: the gauges cannot be newer. Or when a later load report arrived."""
    waiting: float | None = None
    """Requests queued in the engine for room, summed over its series."""
    running: float | None = None
    """Requests that the engine is computing, summed over its series."""
    kv_utilization: float | None = None
    """Share of the KV cache in use by requests, 0..1."""
    block_size_tokens: int | None = None
    kv_blocks: int | None = None
    stated_tokens: int | None = None
    """The size of the KV cache in tokens, as the page states it beside blocks."""
    deferred: float | None = None
    """Requests that wait for something else than room, and are not in `waiting`: an adapter's place, the KV of their
    prompt."""
    slots: int | None = None
    """How many requests it runs at once."""
    asleep: bool = False
    """Its engine says that it sleeps, whoever put it to sleep."""
    work: float | None = None
    """Steps or tokens computed so far: a number that changes while requests run. It is only compared with itself."""
    lora: LoraMetrics | None = None
    """None also before vLLM's first request for an adapter."""
    started_at: float | None = None
    """When the engine process started by its own wall clock (`process_start_time_seconds`). Only compared with itself:
    another value means another process, whose caches are empty."""

    @property
    def requests(self) -> float | None:
        """All requests that it has, running or waiting for whatever."""
        if self.waiting is None and self.running is None:
            return None
        return (self.waiting or 0.0) + (self.running or 0.0) + (self.deferred or 0.0)

    @property
    def counted_tokens(self) -> int | None:
        """The size of the KV cache in tokens by its blocks."""
        return self.kv_blocks * self.block_size_tokens if self.kv_blocks and self.block_size_tokens else None

    @property
    def kv_tokens(self) -> int | None:
        """The size of the KV cache in tokens: that of its blocks, unless the page states another one."""
        counted, stated = self.counted_tokens, self.stated_tokens
        if counted is None or stated is None:
            return stated if counted is None else counted
        return counted if abs(counted - stated) <= DERIVED_SHARE * counted else stated
