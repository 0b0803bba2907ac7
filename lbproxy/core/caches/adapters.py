"""Which LoRA adapters an endpoint has loaded, and what it costs to ask it for one that it has not.

An engine computes at most `slots` distinct adapters together (vLLM's `max_loras`). One that nobody uses stays loaded
until another needs its slot, the least recently used going first; a request for one that finds every slot in use waits,
while those behind it go ahead. This table is that rule, played with what we know: our own requests, exactly and at
once, and of what others send what a scrape shows. vLLM lists only adapters with live requests, so what left its labels
is not unloaded, and what is in them may be ours.

Invariants: `_active` counts our own requests in flight, by adapter; each of these adapters is in `_loaded`, in
`_waiting`, or was there when the endpoint restarted. `_loaded` holds at most `slots` adapters.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from enum import Enum
from typing import Final, NamedTuple

DEFAULT_SLOTS: Final = 4
"""Adapters in one batch when the engine does not say (`max_loras`); vLLM's own default of 1 is rarely kept."""
MAX_REMEMBERED: Final = 256
"""Adapters remembered per endpoint besides those with a slot, most recently used."""
STALLED: Final = 16
"""Streams that a load holds up, as far as they count."""
DEMAND_S: Final = 30.0
"""For how long it counts what requests for an adapter found: the time in which that falls to 1/e."""
SOON_S: Final = 10.0
"""An idle adapter that is asked for within this time, and lost its slot, has to be loaded again."""
NEVER: Final = float("-inf")


class Arrival(Enum):
    """What a request finds when it comes to an endpoint."""

    LOADED = "loaded"
    """Its adapter, ready."""
    LOADS = "loads"
    """A slot for it: it is loaded for this request, as it was here before."""
    FIRST = "first"
    """The same, for the first time: it comes from disk."""
    WAITS = "waits"
    """Every slot in use by others."""


class LoadTimes(NamedTuple):
    """How long an endpoint takes to load an adapter, in ms."""

    again: float = 60.0
    first: float = 500.0

    def learned(self, arrival: Arrival, sample_ms: float) -> LoadTimes:
        """A little nearer to a sample."""
        if arrival is Arrival.FIRST:
            return self._replace(first=_nearer(self.first, sample_ms))
        return self._replace(again=_nearer(self.again, sample_ms))


def _nearer(load_ms: float, sample_ms: float) -> float:
    return min(10_000.0, max(1.0, load_ms * math.exp(math.copysign(0.05, sample_ms - load_ms))))


class _Demand:
    """What requests for an adapter found at an endpoint of late; each counts less with time (`DEMAND_S`)."""

    __slots__ = ("_at", "_reloads", "_uses", "_waits")

    def __init__(self, now: float) -> None:
        self._at = now
        self._uses = 0.0
        self._reloads = 0.0
        self._waits = 0.0

    def note(self, arrival: Arrival, now: float) -> None:
        """One more request, and what it found."""
        kept = self._kept(now)
        self._at = max(self._at, now)
        self._uses = self._uses * kept + 1.0
        self._reloads = self._reloads * kept + (1.0 if arrival is Arrival.LOADS else 0.0)
        self._waits = self._waits * kept + (1.0 if arrival is Arrival.WAITS else 0.0)

    def lost_ms(self, *, again_ms: float, answer_ms: float, now: float) -> float:
        """What these requests paid because the adapter has no slot of its own: reloads, and waits for a slot."""
        return (self._reloads * again_ms + 0.5 * self._waits * answer_ms) * self._kept(now)

    def soon(self, now: float) -> float:
        """The chance that it is asked for within `SOON_S`, between 0 and 1."""
        return 1.0 - math.exp(-self._uses * self._kept(now) * SOON_S / DEMAND_S)

    def _kept(self, now: float) -> float:
        return math.exp((self._at - now) / DEMAND_S) if now > self._at else 1.0


class AdapterTable:
    """The adapters of one endpoint."""

    __slots__ = ("_active", "_asked", "_known", "_loaded", "_others", "_others_until", "_ours", "_waiting", "slots")

    def __init__(self) -> None:
        self.slots = DEFAULT_SLOTS
        """How many may be active at a time."""
        self._active: dict[str, int] = {}
        self._loaded: OrderedDict[str, None] = OrderedDict()
        """With a slot; of those that nobody uses, the least recently used first."""
        self._waiting: OrderedDict[str, None] = OrderedDict()
        """Of our requests, without a slot, in the order in which they came."""
        self._known: OrderedDict[str, None] = OrderedDict()
        """Loaded there before, so that the next time is quicker: engines keep them in host memory."""
        self._asked: OrderedDict[str, _Demand] = OrderedDict()
        """What was asked for there of late, most recently asked last."""
        self._others: frozenset[str] = frozenset()
        """Used there by others, as far as a scrape showed it."""
        self._others_until = NEVER
        self._ours: set[str] = set()
        """Used by us since the last scrape: what it shows of these is no news."""

    # Our own requests

    def placed(self, adapter: str, now: float) -> Arrival:
        """A request for it goes there."""
        arrival = self._placed(adapter, now)
        demand = self._asked.get(adapter)
        if demand is None:
            demand = self._asked[adapter] = _Demand(now)
            if len(self._asked) > MAX_REMEMBERED:
                self._asked.popitem(last=False)
        else:
            self._asked.move_to_end(adapter)
        demand.note(arrival, now)
        return arrival

    def _placed(self, adapter: str, now: float) -> Arrival:
        self._active[adapter] = self._active.get(adapter, 0) + 1
        self._ours.add(adapter)
        if adapter in self._loaded:
            self._loaded.move_to_end(adapter)
            return Arrival.LOADED
        if adapter not in self._waiting:
            arrival = Arrival.LOADS if adapter in self._known else Arrival.FIRST
            if self._load(adapter, now):
                return arrival
            self._waiting[adapter] = None
        return Arrival.WAITS

    def closed(self, adapter: str, now: float) -> None:
        """That request is over."""
        left = self._active[adapter] - 1
        if left:
            self._active[adapter] = left
            return
        del self._active[adapter]
        self._waiting.pop(adapter, None)
        if adapter in self._loaded:
            self._loaded.move_to_end(adapter)
        while len(self._loaded) > self.slots and self._evict(now):
            pass
        while self._waiting and self._load(next(iter(self._waiting)), now):
            self._waiting.popitem(last=False)

    # What the endpoint says

    def report(self, adapters: Collection[str], slots: int | None, *, now: float, until: float) -> None:
        """What a scrape said: the adapters in use there, how many may be at a time (None: it did not say), and until
        when that may be believed.
        """
        if slots is not None and slots > 0:
            self.slots = slots
            while len(self._loaded) > slots and self._evict(now):
                pass
        self._others = frozenset(adapters) - self._ours
        self._others_until = until
        self._ours = set(self._active)
        for adapter in self._others:
            if adapter in self._loaded:
                self._loaded.move_to_end(adapter)
            else:
                self._load(adapter, now)

    def keep(self, listed: Collection[str]) -> None:
        """The endpoint serves these and no others: it has unloaded what is not among them."""
        for names in (self._loaded, self._known):
            for adapter in [name for name in names if name not in listed and name not in self._active]:
                del names[adapter]

    def forget(self) -> None:
        """The endpoint restarted: nothing is loaded."""
        self._loaded.clear()
        self._waiting.clear()
        self._known.clear()
        self._others = frozenset()

    # Reading

    def is_loaded(self, adapter: str, now: float) -> bool:
        """Whether it can be computed there at once: it has a slot, or others use it."""
        return adapter in self._loaded or (adapter in self._others and now <= self._others_until)

    def waiting_requests(self) -> int:
        """How many requests of ours wait there for a slot for their adapter."""
        return sum([self._active.get(adapter, 0) for adapter in self._waiting])

    def is_waiting(self, adapter: str) -> bool:
        """Whether requests of ours wait there for a slot for it."""
        return adapter in self._waiting

    def has_room(self, now: float) -> bool:
        """Whether one more may be active."""
        return len(self._loaded) < self.slots or any(not self._is_used(one, now) for one in self._loaded)

    def lost_ms(self, adapter: str, *, again_ms: float, answer_ms: float, now: float) -> float:
        """What requests for it paid there of late because it had no slot: see `prices_ms`."""
        demand = self._asked.get(adapter)
        return 0.0 if demand is None else demand.lost_ms(again_ms=again_ms, answer_ms=answer_ms, now=now)

    def load_ms(self, adapter: str, *, times: LoadTimes, in_flight: float, lost_ms: float, now: float) -> float:
        """What loading it there costs, the streams that it holds up included, if a slot can be had.

        Those are counted up to `STALLED`: a second home is paid for once and used by many, and with all of them counted
        a busy fleet had too few homes (decision 15). Of a first load, what requests lost for the lack of a home is
        paid already. If an idle adapter loses its slot by it: that may have to be loaded again.
        """
        ms = times.again
        if adapter not in self._known:
            ms = max(ms, times.first - lost_ms)
        if len(self._loaded) >= self.slots:
            ms += times.again * self._next_needed(now)
        return ms * (1.0 + 0.3 * min(in_flight, STALLED))

    def slot_wait_ms(self, adapter: str, answer_ms: float) -> float:
        """How long until a slot becomes free there for an adapter that has none, every slot being in use. `answer_ms`:
        how long one non-streaming response takes to decode.

        Half a response, and more the more requests keep even the least used one there; and as long again for each other
        adapter that waits before it.
        """
        ahead = 0
        for waiting in self._waiting:
            if waiting == adapter:
                break
            ahead += 1
        least = min([self._active.get(one, 1) for one in self._loaded], default=1)
        return 0.5 * answer_ms * (1.0 + math.log(1.0 + least)) * (1.0 + ahead)

    # Slots

    def _load(self, adapter: str, now: float) -> bool:
        """Give it a slot, if there is one that nobody uses."""
        if len(self._loaded) >= self.slots and not self._evict(now):
            return False
        self._loaded[adapter] = None
        self._known[adapter] = None
        self._known.move_to_end(adapter)
        if len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)
        return True

    def _evict(self, now: float) -> bool:
        for adapter in self._loaded:
            if not self._is_used(adapter, now):
                del self._loaded[adapter]
                return True
        return False

    def _is_used(self, adapter: str, now: float) -> bool:
        return adapter in self._active or (adapter in self._others and now <= self._others_until)

    def _next_needed(self, now: float) -> float:
        """The chance that the idle adapter which is the next to lose its slot is soon asked for there."""
        for adapter in self._loaded:
            if not self._is_used(adapter, now):
                demand = self._asked.get(adapter)
                return 0.0 if demand is None else demand.soon(now)
        return 0.0


def prices_ms(
    adapter: str,
    tables: Sequence[AdapterTable],
    *,
    times: LoadTimes,
    in_flight: Sequence[float],
    answer_ms: Sequence[float],
    now: float,
) -> list[float]:
    """What a request waits for its adapter, and has others wait for, at each of these endpoints, in ms.

    Loaded: nothing. A slot can be had: the load. Every slot in use by others: the wait for one and the load, but never
    less than where a slot can be had. Where requests of ours wait for the same adapter: the wait alone, with the same
    bound, since they pay for the load.

    A first load is invested in when demand lasts: what requests for the adapter lost of late, at all these endpoints,
    to loading it again and again or to waiting for a slot, is taken off its price. So it is made once they have paid
    for it, as one who rents buys once the rents come to the price. What is asked for rarely never gets there.
    """
    lost_ms = 0.0
    for table, answer in zip(tables, answer_ms, strict=True):
        lost_ms += table.lost_ms(adapter, again_ms=times.again, answer_ms=answer, now=now)
    prices: list[float] = []
    full: list[int] = []
    free_ms = math.inf
    for number, table in enumerate(tables):
        if table.is_loaded(adapter, now):
            prices.append(0.0)
            continue
        if not (waiting := table.is_waiting(adapter)):
            load_ms = table.load_ms(adapter, times=times, in_flight=in_flight[number], lost_ms=lost_ms, now=now)
            if table.has_room(now):
                prices.append(load_ms)
                free_ms = min(free_ms, load_ms)
                continue
        wait_ms = table.slot_wait_ms(adapter, answer_ms[number])
        prices.append(wait_ms if waiting else wait_ms + load_ms)
        full.append(number)
    if free_ms < math.inf:
        for number in full:
            prices[number] = max(prices[number], free_ms)
    return prices
