"""How much more may go to one endpoint now, and how long a request waits there: one answer for price, deadlines,
overload and whoever asks why.

An endpoint is full in one of three ways, each with an owner of its own:

- requests: it runs so many at once (`core.slots`); what the KV cache has no space for shows there as well;
- prefill: what is queued before a request takes longer than `HOLD_MS`, at the speed that it showed, over the prefills
  that it computes side by side (`core.lanes`);
- settings: `max_in_flight_per_endpoint`, which `core.choice` applies, as it holds under every policy.

What the engine reports overrules what is predicted. Requests that find an endpoint full wait for it in the Balancer
with a reservation (`core.line`).
"""

from __future__ import annotations

from typing import Final

from lbproxy.core.lanes import Lanes
from lbproxy.core.line import Line
from lbproxy.core.others import Mean, Others
from lbproxy.core.response_times import ResponseTimes
from lbproxy.core.slots import QUEUE_S, Slots
from lbproxy.core.unread import Unread

HOLD_MS: Final = 250.0
"""An endpoint with more prefill work than this gets no more. Less starves the engines; more binds too early, and puts
before a request what comes after it by its priority or flow. From 250 to 1,000 the mean time to the first token hardly
changes (docs/decisions/0030-room.md)."""
LIMIT_STEP: Final = 0.25
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
        error_s = times.unexplained_s()
        if error_s is not None:
            error_s -= QUEUE_S  # a short queue is wanted
        if error_s is None:
            if in_flight >= slots.limit:
                slots.limit += LIMIT_STEP
            return
        rate = slots.rate(now)
        if slots.limit == float("inf"):
            if error_s * rate > slots.allowance(now):
                slots.estimated(in_flight + 1.0 - error_s * rate)
                times.forget()
        elif error_s < 0.0 and in_flight < slots.limit - 1.0:
            return  # nothing waits: the limit is not what was seen
        else:
            slots.estimated(slots.limit - LIMIT_STEP * error_s * rate)
            times.shift(LIMIT_STEP * error_s)
