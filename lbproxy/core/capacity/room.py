"""How much more may go to one endpoint now, and how long a request waits there: one answer for price, deadlines,
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
from typing import TYPE_CHECKING, Final

from lbproxy.core.capacity.lanes import Lanes
from lbproxy.core.capacity.line import Line
from lbproxy.core.capacity.others import Mean, Others
from lbproxy.core.capacity.response_times import ResponseTimes
from lbproxy.core.capacity.slots import QUEUE_S, Slots
from lbproxy.core.capacity.unread import Unread

if TYPE_CHECKING:
    from lbproxy.core.knowledge.load_model import LoadModel

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

    def wait_ms(self, load: LoadModel, now: float) -> float:
        """How long a request that is placed there now waits before its own prefill begins."""
        return max(load.prefill_ms(now), self.slots.wait_ms(load.in_flight + self.others.requests(now), now))

    def is_full(self, load: LoadModel, now: float) -> bool:
        """Whether no request should be placed there now. What is overdue counts from here on."""
        slots, silent = self.slots, False
        if load.pending:
            head = next(iter(load.pending))
            silent = not head.request.stream
            if head.late_at <= now:
                slots.overdue(head.late_at, load.in_flight - len(load.pending), now)
        if self._lacks(load, now) is not None:
            return True
        if load.prefill_ms(now) <= HOLD_MS:
            return False
        pending = len(load.pending)
        if silent and pending <= SILENT:
            return False
        return not (slots.is_idle(now) and self.lanes.may_try(pending, now))

    def full_by(self, load: LoadModel, now: float) -> str | None:
        """Why no request should be placed there now; None: one may. Changes nothing."""
        return self._lacks(load, now) or ("prefill" if load.prefill_ms(now) > HOLD_MS else None)

    def opens_in_s(self, load: LoadModel, now: float) -> float:
        """In how many seconds it has room without anything happening there; infinite: it does not."""
        if self._lacks(load, now) is not None:
            return inf
        return max(0.0, load.prefill_ms(now) - HOLD_MS) / 1000.0

    def _lacks(self, load: LoadModel, now: float) -> str | None:
        """What does not come by itself, if it is full for want of that."""
        if load.in_flight < OURS:
            return None
        slots, in_flight = self.slots, load.in_flight + self.others.requests(now)
        if slots.is_full(in_flight, now):
            return "space" if slots.by_space else "requests"
        if not slots.by_space:
            return None
        return "space" if slots.lacks_space(in_flight, load.growth(), now, overloaded=load.pool.overloaded) else None
