# SPDX-License-Identifier: Apache-2.0
"""How much more may be sent to one endpoint now, and how long a request waits there: one result for prices, deadlines,
overload and explanations.

An endpoint is full for one of four reasons, each in a module of its own:

- requests: it runs only so many at once (`core.capacity.slots`); a lack of KV cache space that the engine reports is
  there as well;
- space, where an engine reports nothing: streams that stall show it (`core.capacity.space`);
- prefill: what is queued before a request takes longer than `HOLD_MS`, at the measured speed and with the parallel
  prefills of the endpoint (`core.capacity.lanes`);
- settings: `max_in_flight_per_endpoint`, which `core.queue.choice` applies, as it holds under every policy.

Reported values overrule predictions. Where others wait in the engine, some of ours may always wait with them
(`Room.competes`). Requests that find an endpoint full wait for it in the Balancer with a reservation
(`core.capacity.reservations`).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, sqrt
from typing import Final

from lbproxy.core.capacity.lanes import Lanes
from lbproxy.core.capacity.opaque import OpaqueTimes
from lbproxy.core.capacity.others import MeanOthers, Others
from lbproxy.core.capacity.reservations import Reservations
from lbproxy.core.capacity.slots import QUEUE_S, Slots
from lbproxy.core.capacity.space import Space
from lbproxy.core.capacity.trends import ResponseTimes

HOLD_MS: Final = 250.0
"""An endpoint with more prefill work than this gets no more. A lower limit starves the engines; a higher one decides
too early, and lets a request precede others that come later but have a higher priority or share. From 250 to 1,000 the
mean time to the first token hardly changes (docs/decisions/0030-room.md)."""
NON_STREAMING_QUEUE: Final = 2
"""With non-streaming responses nothing shows that a prefill is done, and the engine must not run idle while a prefill
is assumed to continue: this many requests may be queued, however long they take."""
MIN_OWN_REQUESTS: Final = 2
"""This many requests of ours may be at any endpoint: where others fill the engine's queue, holding ours back only
admits more of theirs."""
LIMIT_STEP: Final = 0.15
"""The share of a limit's error that one non-streaming response corrects."""


class Room:
    """The room of one endpoint."""

    def __init__(self, mean: MeanOthers) -> None:
        self.slots = Slots()
        self.space = Space()
        self.lanes = Lanes()
        self.reservations = Reservations()
        self.others = Others(mean)
        self.response_times = ResponseTimes()
        self.opaque = OpaqueTimes()

    def save(self) -> dict[str, dict[str, float]]:
        return {"slots": self.slots.save(), "space": self.space.save(), "lanes": self.lanes.save()}

    def restore(self, saved: Mapping[str, Mapping[str, float]]) -> None:
        self.slots.restore(saved["slots"])
        self.space.restore(saved["space"])
        self.lanes.restore(saved["lanes"])

    def forget(self) -> None:
        """The engine is not the one whose limits were restored. Reservations stay."""
        self.slots.forget()
        self.space, self.lanes, self.response_times = Space(), Lanes(), ResponseTimes()

    def completed(self, took_s: float, base_s: float, tokens: int | None, before: int, now: float) -> float | None:
        """Learn from a non-streaming response that took `took_s`, of which its prefill explains `base_s`. `tokens`: its
        length; None: unknown. `before`: our requests in flight when it was placed. Returns how much of the time neither
        prefill, nor length, nor the wait for a slot explains; None: not known, or the engine reports its queue.
        """
        slots = self.slots
        slots.started(now)
        slots.finished(took_s)
        if now <= slots.reported_until or not tokens:
            return None
        in_flight = before + self.others.requests(now)
        excess_s = took_s - base_s - slots.wait_ms(in_flight, now) / 1000.0
        times = self.response_times
        times.learn(excess_s, tokens)
        beyond_s = times.beyond_s(excess_s, tokens)
        if beyond_s is not None:
            slots.response(in_flight, beyond_s + slots.wait_ms(in_flight, now) / 1000.0, now)
        self._learn_limit(in_flight, now)
        return beyond_s

    def _learn_limit(self, in_flight: float, now: float) -> None:
        """Correct the limit by what the durations of non-streaming responses show. `in_flight`: requests when the last
        of them was placed.
        """
        slots, times = self.slots, self.response_times
        unexplained_s = times.unexplained_s()
        if unexplained_s is None:
            if in_flight >= slots.limit:
                slots.limit_reached(LIMIT_STEP)
            return
        rate, error_s = slots.rate(now), unexplained_s - 0.5 * QUEUE_S  # a short queue is wanted
        if slots.limit == inf:
            if error_s * rate > slots.allowance(now):
                slots.limit_estimated(in_flight + 1.0 - error_s * rate)
                times.forget()
        elif error_s < 0.0 and in_flight < slots.limit - 1.0:
            return  # nothing waits: the limit was not reached
        else:
            slots.limit_estimated(slots.limit - LIMIT_STEP * error_s * rate)
            times.shift(LIMIT_STEP * error_s)

    def waited(self, waited_s: float, before: int, now: float) -> None:
        """Note how much longer a request took than its own and earlier prefills explain. `before`: our requests in
        flight when it was placed.
        """
        if self.is_last_slot(before, now):
            self.slots.waited(waited_s, now)

    # Reading

    def longest_wait_s(self, in_flight: int, now: float) -> float:
        """How long one more request may have to wait for a slot; 0 if there is certainly one."""
        return self.slots.longest_wait_s(now) if self.is_last_slot(in_flight, now) else 0.0

    def is_last_slot(self, in_flight: int, now: float) -> bool:
        """Whether none may be left for one more request: a learned limit grows by one as a test."""
        return in_flight + self.others.requests(now) >= self.slots.limit - 1.0

    def may_start(self, pending: int, now: float, *, non_streaming: bool) -> bool:
        """Whether another request is placed here although enough prefill work is queued, to find out whether it waits.
        `pending`: requests without a first byte. `non_streaming`: the first of them does not stream.
        """
        if non_streaming and pending <= NON_STREAMING_QUEUE:
            return True
        is_queue_reported = now <= self.slots.reported_until and not self.slots.is_idle(now)
        return not is_queue_reported and self.lanes.may_grow(pending, now)

    def competes(self, in_flight: int, pending: int, silent: int, now: float) -> bool:
        """Whether one more request is placed here because others wait in the engine. Of our requests `in_flight`,
        `pending` are not prefilled yet, and `silent` are but show no progress.

        An engine serves in order of arrival: a request that is held here loses its turn to the next of theirs. The
        number of ours that may wait there grows with theirs, but less than in proportion: several lbproxies that do not
        know of each other would drive each other up (docs/decisions/0050-beside-others.md).
        """
        theirs = self.others.queued(now)
        if theirs <= 0.0:
            return False
        if self.slots.is_cache_full(now) and not self.others.scraped:
            return False  # they may be ours, which the engine returned to its queue
        waiting_share = max(0.0, 1.0 - self.slots.limit / (in_flight + self.others.requests(now)))
        return pending + silent * waiting_share < max(sqrt(2.0 * theirs), self.slots.allowance(now))

    def shortage(
        self,
        in_flight: int,
        now: float,
        *,
        context_tokens: float,
        growth_tokens: float,
        cache_tokens: float,
        overloaded: bool,
    ) -> str | None:
        """What the endpoint lacks for another request, if time alone does not provide it; None: nothing.

        `in_flight`: our requests, `context_tokens`: of all of these, `growth_tokens`: what they are expected to add.
        `cache_tokens`: the size of the KV cache. `overloaded`: requests have been arriving faster than they are served,
        for a while.
        """
        if in_flight < MIN_OWN_REQUESTS:
            return None
        slots, requests = self.slots, in_flight + self.others.requests(now)
        if slots.is_full(requests, now):
            return "space" if slots.limited_by_space else "requests"
        if now > slots.reported_until:
            lacks_space = self.space.is_full(context_tokens, growth_tokens)
        elif slots.limited_by_space:
            lacks_space = slots.lacks_space(requests, growth_tokens / cache_tokens, now, overloaded=overloaded)
        else:
            return None
        return "space" if lacks_space else None
