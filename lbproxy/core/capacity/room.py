"""How much more may go to one endpoint now, and how long a request waits there: one response for price, deadlines,
overload and whoever asks why.

An endpoint is full in one of three ways, each with an owner of its own:

- requests: it runs so many at once (`core.capacity.slots`); what the KV cache has no space for shows there as well;
- prefill: what is queued before a request takes longer than `HOLD_MS`, at the speed that it showed, over the prefills
  that it computes side by side (`core.capacity.lanes`);
- settings: `max_in_flight_per_endpoint`, which `core.queue.choice` applies, as it holds under every policy.

What the engine reports overrules what is predicted. Requests that find an endpoint full wait for it in the Balancer
with a reservation (`core.capacity.line`).
"""

from __future__ import annotations

from math import inf
from typing import Final

from lbproxy.core.capacity.lanes import Lanes
from lbproxy.core.capacity.line import Line
from lbproxy.core.capacity.others import Mean, Others
from lbproxy.core.capacity.response_times import ResponseTimes
from lbproxy.core.capacity.slots import QUEUE_S, Slots
from lbproxy.core.capacity.unread import Unread

HOLD_MS: Final = 250.0
"""An endpoint with more prefill work than this gets no more. Less starves the engines; more binds too early, and puts
before a request what comes after it by its priority or flow. From 250 to 1,000 the mean time to the first token hardly
changes (docs/decisions/0030-room.md)."""
SILENT: Final = 2
"""Where responses are not streamed, nothing shows that a prefill is done, and the engine must not run dry while one is
taken to go on: so many may be queued, however long they take."""
OURS: Final = 2
"""So many requests of ours may be at any endpoint: where others fill the engine's queue, holding ours back only lets
more of theirs in."""
LIMIT_STEP: Final = 0.15
"""Share of a limit's error that one whole response corrects."""


class Room:
    """One endpoint's."""

    __slots__ = ("lanes", "line", "others", "response_times", "slots", "unread")

    def __init__(self, mean: Mean) -> None:
        self.slots = Slots()
        self.lanes = Lanes()
        self.line = Line()
        self.others = Others(mean)
        self.response_times = ResponseTimes()
        self.unread = Unread()

    def completed(self, took_s: float, base_s: float, tokens: int | None, before: int, now: float) -> None:
        """A whole response came: after `took_s`, of which `base_s` are explained by its prefill, with so many tokens
        (None: nobody knows); `before` of ours were in flight when it was placed.
        """
        slots = self.slots
        slots.started(now)
        slots.finished(took_s)
        if now <= slots.reported_until or not tokens:
            return
        in_flight = before + self.others.requests(now)
        predicted_s = slots.wait_ms(in_flight, now) / 1000.0
        times = self.response_times
        times.learn(took_s - base_s - predicted_s, tokens)
        unexplained_s = times.unexplained_s()
        if unexplained_s is None:
            if in_flight >= slots.limit:
                slots.limit += LIMIT_STEP
            return
        rate, error_s = slots.rate(now), unexplained_s - 0.5 * QUEUE_S  # a short queue is wanted
        if slots.limit == inf:
            if error_s * rate > slots.allowance(now):
                slots.estimated(in_flight + 1.0 - error_s * rate)
                times.forget()
        elif error_s < 0.0 and in_flight < slots.limit - 1.0:
            return  # nothing waits: the limit is not what was seen
        else:
            slots.estimated(slots.limit - LIMIT_STEP * error_s * rate)
            times.shift(LIMIT_STEP * error_s)

    # Reading

    def may_start(self, pending: int, now: float, *, silent: bool) -> bool:
        """Whether another request is placed here although the prefill work before it is enough, to see whether it
        starts at once. `pending`: requests without a first byte, `silent`: of which the first does not stream.
        """
        if silent and pending <= SILENT:
            return True
        return self.slots.is_idle(now) and self.lanes.may_try(pending, now)

    def lacks(self, in_flight: int, now: float, *, growth: float, overloaded: bool) -> str | None:
        """What there is no room for, if that does not come by itself; None: nothing. `in_flight`: of ours; `growth`:
        the share of the cache that these will take besides.
        """
        if in_flight < OURS:
            return None
        slots, requests = self.slots, in_flight + self.others.requests(now)
        if slots.is_full(requests, now):
            return "space" if slots.by_space else "requests"
        if not slots.by_space:
            return None
        return "space" if slots.lacks_space(requests, growth, now, overloaded=overloaded) else None
