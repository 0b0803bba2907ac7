# SPDX-License-Identifier: Apache-2.0
"""Which LoRA adapters an endpoint has loaded, and what a request for another one costs.

An engine computes at most `slots` distinct adapters together (vLLM's `max_loras`). An adapter without requests stays
loaded until another needs its slot; the least recently used one is unloaded first. A request that finds every slot in
use waits, while the requests behind it are served. This table simulates that rule with what is known: our own requests,
exactly and at once, and requests of others as far as a scrape shows them. vLLM lists only adapters with live requests,
so an adapter that is no longer listed may still be loaded, and a listed one may be ours.

Invariants: `_active` counts our own requests in flight, by adapter; each of these adapters is in `_loaded` or
`_waiting`, or was there when the endpoint restarted. `_loaded` holds at most `slots` adapters.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from enum import Enum
from typing import Final, NamedTuple

DEFAULT_SLOTS: Final = 4
"""Adapters in one batch when the engine does not report it (`max_loras`); vLLM's own default of 1 is rarely kept."""
MAX_REMEMBERED: Final = 256
"""Adapters remembered per endpoint in addition to those with a slot, most recently used."""
MAX_STALLED_STREAMS: Final = 16
"""A load holds up the running streams; at most this many are counted."""
DEMAND_S: Final = 30.0
"""Time constant for the demand for an adapter: after it a request counts 1/e."""
REUSE_S: Final = 10.0
"""An idle adapter that is requested within this time after it lost its slot has to be loaded again."""
NEVER: Final = float("-inf")


class Arrival(Enum):
    """What a request finds at an endpoint on arrival."""

    LOADED = "loaded"
    """Its adapter is loaded."""
    RELOAD = "loads"
    """A free slot: the adapter is loaded for this request, and was loaded here before."""
    FIRST_LOAD = "first"
    """A free slot: the adapter is loaded here for the first time, from disk."""
    NO_SLOT = "waits"
    """All slots are in use by other adapters."""


class LoadTimes(NamedTuple):
    """How long an endpoint takes to load an adapter, in milliseconds."""

    again: float = 60.0
    first: float = 500.0

    def learned(self, arrival: Arrival, sample_ms: float) -> LoadTimes:
        """Return the times with one of them moved a little towards a sample."""
        if arrival is Arrival.FIRST_LOAD:
            return self._replace(first=_nearer(self.first, sample_ms))
        return self._replace(again=_nearer(self.again, sample_ms))


def _nearer(load_ms: float, sample_ms: float) -> float:
    return min(10_000.0, max(1.0, load_ms * math.exp(math.copysign(0.05, sample_ms - load_ms))))


class _Demand:
    """What recent requests for an adapter found at an endpoint; each counts less with time (`DEMAND_S`)."""

    def __init__(self, now: float) -> None:
        self._at = now
        self._uses = 0.0
        self._reloads = 0.0
        self._waits = 0.0

    def note(self, arrival: Arrival, now: float) -> None:
        """Count one more request, and what it found."""
        kept = self._kept(now)
        self._at = max(self._at, now)
        self._uses = self._uses * kept + 1.0
        self._reloads = self._reloads * kept + (1.0 if arrival is Arrival.RELOAD else 0.0)
        self._waits = self._waits * kept + (1.0 if arrival is Arrival.NO_SLOT else 0.0)

    def lost_ms(self, *, again_ms: float, response_ms: float, now: float) -> float:
        """Milliseconds that these requests lost because the adapter had no slot of its own: reloads, and waits for a
        slot.
        """
        return (self._reloads * again_ms + 0.5 * self._waits * response_ms) * self._kept(now)

    def reuse_chance(self, now: float) -> float:
        """The probability that the adapter is requested within `REUSE_S`."""
        return 1.0 - math.exp(-self._uses * self._kept(now) * REUSE_S / DEMAND_S)

    def _kept(self, now: float) -> float:
        return math.exp((self._at - now) / DEMAND_S) if now > self._at else 1.0


class AdapterTable:
    """The adapters of one endpoint."""

    def __init__(self) -> None:
        self.slots = DEFAULT_SLOTS
        """How many adapters may be active at a time."""
        self._active: dict[str, int] = {}
        self._loaded: OrderedDict[str, None] = OrderedDict()
        """Adapters with a slot; idle ones in the order of their last use, oldest first."""
        self._waiting: OrderedDict[str, None] = OrderedDict()
        """Adapters of our requests that wait for a slot, in the order of arrival."""
        self._known: OrderedDict[str, None] = OrderedDict()
        """Adapters that were loaded here before, so that the next load is faster: engines keep them in host memory."""
        self._demand: OrderedDict[str, _Demand] = OrderedDict()
        """Recent demand by adapter, the latest requested last."""
        self._others: frozenset[str] = frozenset()
        """Adapters that others use, as far as a scrape showed it."""
        self._others_until = NEVER
        self._own: set[str] = set()
        """Adapters that we used since the last scrape: that the scrape lists them is no information."""

    # Our own requests

    def placed(self, adapter: str, now: float) -> Arrival:
        """Count a request for the adapter that is placed here. Returns what it finds."""
        arrival = self._placed(adapter, now)
        demand = self._demand.get(adapter)
        if demand is None:
            demand = self._demand[adapter] = _Demand(now)
            if len(self._demand) > MAX_REMEMBERED:
                self._demand.popitem(last=False)
        else:
            self._demand.move_to_end(adapter)
        demand.note(arrival, now)
        return arrival

    def _placed(self, adapter: str, now: float) -> Arrival:
        self._active[adapter] = self._active.get(adapter, 0) + 1
        self._own.add(adapter)
        if adapter in self._loaded:
            self._loaded.move_to_end(adapter)
            return Arrival.LOADED
        if adapter not in self._waiting:
            arrival = Arrival.RELOAD if adapter in self._known else Arrival.FIRST_LOAD
            if self._load(adapter, now):
                return arrival
            self._waiting[adapter] = None
        return Arrival.NO_SLOT

    def closed(self, adapter: str, now: float) -> None:
        """Count the end of such a request."""
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

    # Reports of the endpoint

    def report(self, adapters: Collection[str], slots: int | None, *, now: float, until: float) -> None:
        """Note a scrape: the adapters in use, how many may be active (None: not reported), and until when that is
        fresh.
        """
        if slots is not None and slots > 0:
            self.slots = slots
            while len(self._loaded) > slots and self._evict(now):
                pass
        self._others = frozenset(adapters) - self._own
        self._others_until = until
        self._own = set(self._active)
        for adapter in self._others:
            if adapter in self._loaded:
                self._loaded.move_to_end(adapter)
            else:
                self._load(adapter, now)

    def retain(self, listed: Collection[str]) -> None:
        """The endpoint serves these models only: forget adapters that are not among them."""
        for names in (self._loaded, self._known):
            for adapter in [name for name in names if name not in listed and name not in self._active]:
                del names[adapter]

    def forget(self) -> None:
        """The endpoint restarted: nothing is loaded."""
        self._loaded.clear()
        self._waiting.clear()
        self._known.clear()
        self._others = frozenset()

    # Over a restart of lbproxy

    def save(self) -> tuple[list[str], list[str]]:
        """The adapters that have a slot, the least recently used first, and those that were loaded before."""
        return list(self._loaded), list(self._known)

    def restore(self, loaded: Sequence[str], known: Sequence[str]) -> None:
        """Start with what `save` returned, as far as nothing newer is known. At most `slots` and `MAX_REMEMBERED` are
        used.
        """
        if self._loaded or self._known or self._active:
            return
        self._loaded.update(dict.fromkeys(loaded[-self.slots :]))
        self._known.update(dict.fromkeys(known[-MAX_REMEMBERED:]))

    # Reading

    def is_loaded(self, adapter: str, now: float) -> bool:
        """Whether requests for the adapter can be computed at once: it has a slot, or others use it."""
        return adapter in self._loaded or (adapter in self._others and now <= self._others_until)

    def waiting_requests(self) -> int:
        """How many of our requests wait there for a slot for their adapter."""
        return sum([self._active.get(adapter, 0) for adapter in self._waiting])

    def is_waiting(self, adapter: str) -> bool:
        """Whether requests of ours wait there for a slot for this adapter."""
        return adapter in self._waiting

    def has_room(self, now: float) -> bool:
        """Whether one more adapter can become active."""
        return len(self._loaded) < self.slots or any(not self._is_used(one, now) for one in self._loaded)

    def lost_ms(self, adapter: str, *, again_ms: float, response_ms: float, now: float) -> float:
        """Milliseconds that recent requests for the adapter lost there because it had no slot: see `prices_ms`."""
        demand = self._demand.get(adapter)
        return 0.0 if demand is None else demand.lost_ms(again_ms=again_ms, response_ms=response_ms, now=now)

    def load_ms(self, adapter: str, *, times: LoadTimes, in_flight: float, lost_ms: float, now: float) -> float:
        """What loading the adapter there costs in milliseconds, if there is a slot, with the delay of the running
        streams.

        At most `MAX_STALLED_STREAMS` are counted: a second endpoint with the adapter is paid for once and used by many
        requests, and with all streams counted a busy fleet had too few of them (decision 15). What requests lost
        without the adapter is deducted from the cost of a first load. If an idle adapter loses its slot, the cost of
        its reload is added, weighted by the probability that it is requested soon.
        """
        ms = times.again
        if adapter not in self._known:
            ms = max(ms, times.first - lost_ms)
        if len(self._loaded) >= self.slots:
            ms += times.again * self._next_reuse_chance(now)
        return ms * (1.0 + 0.3 * min(in_flight, MAX_STALLED_STREAMS))

    def slot_wait_ms(self, adapter: str, response_ms: float) -> float:
        """How long a request waits there for a slot, in milliseconds, when every slot is in use. `response_ms`: how
        long one non-streaming response takes to decode.

        Half a response, longer the more requests even the least used adapter has there; and as long again for each
        other adapter that waits before this one.
        """
        ahead = 0
        for waiting in self._waiting:
            if waiting == adapter:
                break
            ahead += 1
        least = min([self._active.get(one, 1) for one in self._loaded], default=1)
        return 0.5 * response_ms * (1.0 + math.log(1.0 + least)) * (1.0 + ahead)

    # Slots

    def _load(self, adapter: str, now: float) -> bool:
        """Give the adapter a slot, if there is one without requests."""
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

    def _next_reuse_chance(self, now: float) -> float:
        """The probability that the next adapter to be unloaded is requested soon."""
        for adapter in self._loaded:
            if not self._is_used(adapter, now):
                demand = self._demand.get(adapter)
                return 0.0 if demand is None else demand.reuse_chance(now)
        return 0.0


def prices_ms(
    adapter: str,
    tables: Sequence[AdapterTable],
    *,
    times: LoadTimes,
    in_flight: Sequence[float],
    response_ms: Sequence[float],
    now: float,
) -> list[float]:
    """What a request waits for its adapter, and makes others wait, at each of these endpoints, in milliseconds.

    Adapter loaded: 0. A free slot: the load. Every slot in use by others: the wait for a slot and the load, but at
    least as much as the cheapest endpoint with a free slot. Requests of ours already wait for the same adapter: the
    wait alone, with the same bound, since they pay for the load.

    A first load is an investment that pays if the demand lasts. What recent requests for the adapter lost at all these
    endpoints, by reloads and waits for a slot, is deducted from its price. So the load is made once they have paid for
    it (as in the rent-or-buy problem). An adapter that is rarely requested never gets there.
    """
    lost_ms = 0.0
    for table, response in zip(tables, response_ms, strict=True):
        lost_ms += table.lost_ms(adapter, again_ms=times.again, response_ms=response, now=now)
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
        wait_ms = table.slot_wait_ms(adapter, response_ms[number])
        prices.append(wait_ms if waiting else wait_ms + load_ms)
        full.append(number)
    if free_ms < math.inf:
        for number in full:
            prices[number] = max(prices[number], free_ms)
    return prices
