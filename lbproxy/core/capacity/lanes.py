# SPDX-License-Identifier: Apache-2.0
"""How many prefills one endpoint computes at a time, and how long a first byte takes without any before it.

A prediction assumes that an engine computes one prefill after the other. What contradicts it is a law and no opinion:
an engine cannot finish more seconds of prefill in a second than it computes at a time. So the finished work, in seconds
as predicted, over the time in which any was pending is a lower bound of that number (`lanes`), however much first bytes
vary: data-parallel ranks behind one address compute several, and an engine whose times do not depend on prompts seems
to compute many.

What first bytes took is compared with what was predicted as well: the slope of the wait that they had over the wait for
the prefills before them is 1 where these are computed one after the other, and 0 where none waits, whatever all
requests take. The prediction counts until it is certainly wrong. Requests that are held for an engine cannot show that
they would have been computed at once, so where nothing showed a wait lately, more are placed than the prediction allows
(`may_grow`).

When a first byte is late follows from the delay that requests had with none before them: the mean and four times the
mean deviation, as for TCP's retransmission timer (RFC 6298).

Invariant: `lanes` is at least 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Final

from lbproxy.core.capacity.regression import Regression

LATE_S: Final = 0.25
"""A first byte is not late if it arrives at most this much after its prediction."""
MEMORY: Final = 16.0
"""Finished prefills over which the sums are taken."""
CLEARLY: Final = 1.5
"""By this factor the work that is done must exceed that of one prefill at a time to be no chance."""
WAITS: Final = 32.0
"""First bytes that show whether requests wait for one another."""
MIN_SPREAD_S: Final = 0.1
"""The predicted waits must differ by this much: short ones show nothing, as prefills that share a step do not wait."""
ERRORS: Final = 3.0
"""So many standard errors make it certain."""
MIDDLE: Final = 0.5
"""A slope between that of no wait at all and that of the wait that was predicted."""
LEAST_SLOPE: Final = 0.01
AGAIN_S: Final = 60.0
"""After requests were seen to wait for one another, no more are placed than the prediction allows for this long."""


class Lanes:
    """The delay and the lanes of one endpoint."""

    def __init__(self) -> None:
        self.lanes = 1.0
        """Parallel prefills."""
        self.delay_s = 0.0
        """What a first byte takes in addition to the prediction when no request is before it."""
        self.spread_s = 0.0
        """Mean deviation of that."""
        self.delay_known = False
        """The delay was measured. Before that no first byte is late."""
        self._done_s = self._busy_s = self._pending = self._count = self._at = 0.0
        """Of the last prefills: their work in seconds, the time in which any was pending, how many were, how
        many prefills they are, and until when that time is counted."""
        self._waits = Regression(WAITS)
        """Seconds that first bytes waited, over those for the prefills before them."""
        self._off_s = 0.0
        """By how much first bytes were off their prediction, on average."""
        self._waits_until = -inf

    def save(self) -> dict[str, float]:
        """What is known, for `restore`; empty before the delay is."""
        if not self.delay_known:
            return {}
        return {"lanes": self.lanes, "delay_s": self.delay_s, "spread_s": self.spread_s}

    def restore(self, saved: Mapping[str, float]) -> None:
        if saved:
            self.lanes, self.delay_s, self.spread_s = saved["lanes"], saved["delay_s"], saved["spread_s"]
            self.delay_known = True

    def may_grow(self, pending: int, now: float) -> bool:
        """Whether one more request may be placed beyond what the prediction allows, to find out whether it waits."""
        return self._busy_s > 0.0 and now >= self._waits_until and pending < 2.0 * max(1.0, self._pending)

    def begins(self, now: float) -> None:
        """Note that a request is pending, and none was before."""
        self._at = now

    def prefilled(self, prefill_s: float, pending: int, now: float) -> None:
        """Note that a prefill ended that takes `prefill_s` by itself. `pending`: requests that were, with this one."""
        rest = 1.0 - 1.0 / MEMORY
        self._done_s = rest * self._done_s + prefill_s
        self._busy_s = rest * self._busy_s + (now - self._at)
        self._count = rest * self._count + 1.0
        self._pending += (pending - self._pending) / 4.0
        self._at = now
        is_more = self._count > MEMORY / 4.0 and 0.0 < CLEARLY * self._busy_s < self._done_s
        self.lanes = self._done_s / self._busy_s if is_more else 1.0

    def waited(self, predicted_s: float, waited_s: float, now: float, *, slots_free: bool) -> None:
        """Note that a first byte came `waited_s` later than it does alone, where `predicted_s` are the time for the
        prefills before it, one after the other. `slots_free`: it hardly waited for a slot. To be called after
        `prefilled`.
        """
        if slots_free:
            self._off_s += (abs(waited_s - predicted_s) - self._off_s) / MEMORY
        line = self._waits
        line.learn(predicted_s, waited_s)
        if line.xx <= MIN_SPREAD_S * MIN_SPREAD_S:
            return
        over, error = line.slope() - MIDDLE, ERRORS * line.slope_error()
        if over > error:
            self._waits_until = now + AGAIN_S
        elif -over > error:
            self.lanes = max(self.lanes, 1.0 / max(line.slope(), LEAST_SLOPE))

    def queue_reported(self, waiting: float, pending: int, at: float) -> None:
        """Note the reported queue, while `pending` requests of ours have no first byte."""
        if waiting >= 1.0 and pending:
            self._waits_until = at + AGAIN_S
            self.lanes = max(1.0, min(self.lanes, pending - waiting))

    def late_after_s(self, predicted_s: float, *, reported: bool) -> float:
        """After how many seconds a first byte is late that is predicted in `predicted_s`. `reported`: the engine
        reports its queue; else all first bytes show how much they vary.
        """
        spread_s = self.spread_s if reported else max(self.spread_s, self._off_s)
        margin_s = max(LATE_S, predicted_s)  # max() of three is a call of Python's, 2,000 instructions
        return predicted_s + self.delay_s + max(margin_s, 4.0 * spread_s)

    def learn_delay(self, beyond_s: float) -> None:
        """Learn from a first byte that arrived `beyond_s` after its prediction, when no request of ours was
        before it.
        """
        if not self.delay_known:
            self.delay_known = True
            self.delay_s, self.spread_s = beyond_s, abs(beyond_s) / 2.0
            return
        self.spread_s += (abs(beyond_s - self.delay_s) - self.spread_s) / 4.0
        self.delay_s += (beyond_s - self.delay_s) / 8.0
