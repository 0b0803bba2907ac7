# SPDX-License-Identifier: Apache-2.0
"""The LoRA adapters of one server: which have a slot on the GPU, and what it costs to give one to another.

As in vLLM V1: the requests that run together use at most `slots` distinct adapters. An adapter that nobody runs keeps
its slot until another one needs it, least recently used first. Loading holds up the whole step in which the adapter
is first used: from disk the first time, afterwards from host memory, which is taken to hold every adapter.

Invariant: running adapters are always among those with a slot, so a slot can be found for every adapter that `fits`.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict

DISK_LOAD_MS = (300.0, 1000.0)
HOST_LOAD_MS = (10.0, 30.0)
"""How long loading takes: uniform within, or always the middle if nothing is random."""
STEP_SHARE = 0.02
"""How much slower each distinct adapter makes a step: its matrices are read and multiplied beside the model's."""


class LoraSlots:
    """`slots` = vLLM's `max_loras`; 0 = the server takes no adapters. `rng` makes loading times vary."""

    def __init__(self, slots: int, rng: random.Random | None = None) -> None:
        self._slots = slots
        self._rng = rng
        self._loaded: OrderedDict[str, None] = OrderedDict()
        """On the GPU, least recently used first, as far as nobody runs them."""
        self._seen: set[str] = set()
        """In host memory."""
        self._running: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()

    @property
    def slots(self) -> int:
        """How many distinct adapters may run together."""
        return self._slots

    @property
    def running(self) -> tuple[str, ...]:
        """Distinct adapters of running requests."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Distinct adapters of waiting requests."""
        return tuple(self._waiting)

    def forget(self, adapter: str) -> None:
        """It is served no more: nothing of it is kept, but what runs runs on."""
        self._seen.discard(adapter)
        if adapter not in self._running:
            self._loaded.pop(adapter, None)

    @property
    def slowdown(self) -> float:
        """What the running adapters multiply a step's time by."""
        return 1.0 + STEP_SHARE * len(self._running)

    def fits(self, adapter: str | None) -> bool:
        """Whether a request with this adapter can run beside those that do."""
        return adapter is None or adapter in self._running or len(self._running) < self._slots

    def load_ms(self, adapter: str | None) -> float:
        """What loading it would take now, on average."""
        if adapter is None or adapter in self._loaded:
            return 0.0
        return sum(HOST_LOAD_MS if adapter in self._seen else DISK_LOAD_MS) / 2

    def queued(self, adapter: str | None) -> None:
        """A request began to wait."""
        if adapter is not None:
            self._waiting[adapter] += 1

    def unqueued(self, adapter: str | None) -> None:
        """A request stopped waiting."""
        if adapter is not None:
            _drop(self._waiting, adapter)

    def started(self, adapter: str | None) -> float:
        """A request that `fits` begins to run; returns the ms that loading its adapter takes."""
        if adapter is None:
            return 0.0
        self._running[adapter] += 1
        if adapter in self._loaded:
            self._loaded.move_to_end(adapter)
            return 0.0
        if len(self._loaded) >= self._slots:
            del self._loaded[next(name for name in self._loaded if name not in self._running)]
        self._loaded[adapter] = None
        low, high = HOST_LOAD_MS if adapter in self._seen else DISK_LOAD_MS
        self._seen.add(adapter)
        return (low + high) / 2 if self._rng is None else self._rng.uniform(low, high)

    def stopped(self, adapter: str | None) -> None:
        """A running request ended, or was preempted."""
        if adapter is not None:
            _drop(self._running, adapter)
            if adapter not in self._running:
                self._loaded.move_to_end(adapter)


def _drop(counts: Counter[str], adapter: str) -> None:
    counts[adapter] -= 1
    if not counts[adapter]:
        del counts[adapter]
