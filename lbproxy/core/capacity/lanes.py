"""How first bytes of one endpoint come beside what the model of a serial prefill queue predicts.

Two things are learned from each first byte, whose request was placed with a prediction:

- The delay that has nothing to do with work: mean and spread of what requests took beyond the prediction that found
  nothing of ours before them. From these follows when a first byte is late (as TCP's retransmission timer does it,
  RFC 6298: mean and four times the mean deviation).
- Lanes: how many prefills the engine computes side by side, as data-parallel ranks behind one address do. The model
  says how long a request waits for the prefills before it; where requests again and again wait less than half of that,
  there are more lanes; where they wait longer, fewer.

An engine that reports its queue says more: where none of it waits while the model says that requests of ours must,
again and again, the model is wrong (`reported`), unless first bytes come as it says: prefills that share a step do not
wait either. As an engine that computes one long prompt reports the same whether it would take another one or not, one
more is let through to see, unless it was seen lately.

Invariant: `lanes` is at least 1, and 1 until `SURE` more requests showed more lanes than showed none, or `SURE_REPORTS`
reports in a row.
"""

from __future__ import annotations

from math import inf
from typing import Final

LATE_S: Final = 0.25
"""A first byte that comes so long after its prediction is not late yet."""
SURE: Final = 5
SURE_REPORTS: Final = 5
SEEN_S: Final = 600.0
"""For so long an engine that was seen to compute one prefill after the other gets no request to see whether it does."""
TELLING_S: Final = 0.1
"""A wait that is predicted to be shorter shows nothing."""


class Lanes:
    """One endpoint's."""

    __slots__ = ("_reports", "_serial_until", "_sure", "delay_s", "lanes", "seen", "spread_s")

    def __init__(self) -> None:
        self.lanes = 1.0
        """Prefills side by side."""
        self.delay_s = 0.0
        """What a first byte takes beyond the prediction though nothing is before it."""
        self.spread_s = 0.0
        """Mean deviation of that."""
        self.seen = False
        """The delay is known: before that no first byte is late, as nobody knows what is usual here."""
        self._sure = self._reports = 0
        self._serial_until = -inf

    def may_try(self, pending: int, now: float) -> bool:
        """Whether one more may go there though prefills are queued, to see whether it is computed beside them."""
        return self.seen and self._sure >= 0 and pending < 2 and now > self._serial_until

    def reported(self, waiting: float, pending: int, *, full: bool, at: float) -> None:
        """The engine says how many requests wait, while so many of ours have no first byte. `full`: the model says that
        the last of these waits for long.
        """
        if waiting >= 1.0:
            self._reports = 0
            if pending >= 1:
                self._serial_until = at + SEEN_S
            self.lanes = max(1.0, min(self.lanes, pending - waiting))
        elif full and pending >= 2 and self.seen and self._sure >= 0:
            self._reports += 1
            if self._reports >= SURE_REPORTS:
                self.lanes = max(self.lanes, 2.0 * pending)
                self._serial_until = -inf
        else:
            self._reports = 0

    def patience_s(self, predicted_s: float) -> float:
        """A first byte that is predicted in `predicted_s` is late after this."""
        return predicted_s + self.delay_s + max(LATE_S, predicted_s, 4.0 * self.spread_s)

    def alone(self, beyond_s: float) -> None:
        """A first byte came so long after its prediction; nothing of ours was before it."""
        if not self.seen:
            self.seen = True
            self.delay_s, self.spread_s = beyond_s, abs(beyond_s) / 2.0
            return
        self.spread_s += (abs(beyond_s - self.delay_s) - self.spread_s) / 4.0
        self.delay_s += (beyond_s - self.delay_s) / 8.0

    def behind(self, predicted_s: float, waited_s: float, before: int) -> None:
        """A request waited so long for the `before` prefills before it, beside what was predicted."""
        if predicted_s < max(TELLING_S, self.spread_s):
            return
        if waited_s < 0.5 * predicted_s:
            self._sure = min(SURE, self._sure + 1)
            if self._sure == SURE and self.lanes <= before:
                self.lanes += 1.0
        else:
            self._sure = max(-SURE, self._sure - 2)
            if self.lanes > 1.0 and waited_s > 1.5 * predicted_s:
                self.lanes -= 1.0
