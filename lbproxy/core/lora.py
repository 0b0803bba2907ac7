"""Which LoRA adapters an endpoint has loaded, and what it costs to ask it for one that it has not.

Known from our own requests, which is fresher than what engines say: vLLM lists only adapters with live requests. What a
scrape says only adds what others use there. Invariant: an adapter is active on an endpoint exactly while a request of
ours for it is in flight there.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable

DEFAULT_SLOTS = 4
"""Adapters in one batch when the engine does not say (`max_loras`); vLLM's own default of 1 is rarely kept."""
MAX_REMEMBERED = 256
"""Adapters remembered per endpoint, most recently used; more than any engine holds in GPU memory."""


class AdapterTable:
    """The adapters of one endpoint."""

    __slots__ = ("_active", "_recent", "_reported", "slots")

    def __init__(self) -> None:
        self.slots = DEFAULT_SLOTS
        """How many may be active at a time."""
        self._active: dict[str, int] = {}
        self._recent: OrderedDict[str, None] = OrderedDict()
        self._reported: frozenset[str] = frozenset()

    def placed(self, adapter: str) -> bool:
        """A request for it goes there. True if the endpoint has to load it, as far as we know."""
        cold = not self.is_active(adapter) and not self._is_loaded(adapter)
        self._active[adapter] = self._active.get(adapter, 0) + 1
        self._recent[adapter] = None
        self._recent.move_to_end(adapter)
        if len(self._recent) > MAX_REMEMBERED:
            self._recent.popitem(last=False)
        return cold

    def closed(self, adapter: str) -> None:
        """That request is over."""
        left = self._active[adapter] - 1
        if left:
            self._active[adapter] = left
        else:
            del self._active[adapter]

    def report(self, adapters: Iterable[str], slots: int | None) -> None:
        """What a scrape said: the adapters in use there, and how many may be at a time (None: it did not say)."""
        self._reported = frozenset(adapters)
        if slots is not None and slots > 0:
            self.slots = slots

    def forget(self) -> None:
        """The endpoint restarted: nothing is loaded but what requests in flight asked for."""
        self._recent.clear()
        self._reported = frozenset()

    def is_active(self, adapter: str) -> bool:
        """Whether requests for it are in flight there, ours or others'."""
        return adapter in self._active or adapter in self._reported

    def has_room(self) -> bool:
        """Whether one more may be active."""
        return self._count_active() < self.slots

    def price_ms(self, adapter: str, *, load_ms: float, in_flight: float, answer_ms: float) -> float:
        """What the request waits there for its adapter. `answer_ms`: how long one whole answer takes to decode.

        With all slots taken by others: half an answer, and more the more requests keep even the least used one there.
        Not among those loaded last: the load, which also holds up the streams there.
        """
        if self.is_active(adapter):
            return 0.0
        if not self.has_room():
            return 0.5 * answer_ms * (1.0 + math.log(1.0 + min(self._active.values(), default=1)))
        return 0.0 if self._is_loaded(adapter) else load_ms * (1.0 + 0.3 * in_flight)

    def _count_active(self) -> int:
        return len(self._active) + sum(name not in self._active for name in self._reported)

    def _is_loaded(self, adapter: str) -> bool:
        """Whether it is among the `slots` most recently used."""
        if adapter not in self._recent:
            return False
        for rank, name in enumerate(reversed(self._recent)):
            if name == adapter:
                return True
            if rank + 1 >= self.slots:
                break
        return False
