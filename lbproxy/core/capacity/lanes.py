# SPDX-License-Identifier: Apache-2.0
"""How the first bytes of one endpoint compare with the prediction by a serial prefill queue.

Each first byte, whose request was placed with a prediction, teaches two things:

- The delay that does not depend on work: the mean and spread of what requests took in addition to the prediction when
  none of ours was before them. From these follows when a first byte is late (as for TCP's retransmission timer, RFC
  6298: the mean and four times the mean deviation).
- Lanes: how many prefills the engine computes in parallel, as data-parallel ranks behind one address do. The model
  predicts how long a request waits for earlier prefills. Where requests repeatedly wait less than half of that, there
  are more lanes; where they wait longer, fewer.

A reported queue shows more. If repeatedly no request waits while the model says that ours must, the model is wrong
(`learn_lanes`), unless first bytes arrive as predicted: prefills that share a step do not wait either. As an engine
that computes one long prompt reports the same whether it would take another one or not, one more request is placed to
find out, unless that was observed recently.

Where no queue is reported, `core.capacity.trends` takes the place of that count, requests are placed to find out
while much work is held (`may_explore`), and all first bytes show how much they vary
(docs/decisions/0051-without-reports.md).

Invariant: `lanes` is at least 1. It stays 1 until the requests that showed more lanes exceed the others by
`MIN_EVIDENCE`, until `MIN_REPORTS` reports in a row show more, or until a trend does.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Final

from lbproxy.core.capacity.trends import MIDDLE, MIN_WAIT_S, WaitTrend

LATE_S: Final = 0.25
"""A first byte is not late if it arrives at most this much after its prediction."""
FIXED_S: Final = 0.5
"""A delay that no step of an engine explains."""
MIN_EVIDENCE: Final = 5
MIN_REPORTS: Final = 5
SERIAL_S: Final = 600.0
"""After an engine was seen to compute prefills one after the other, no request is placed to test that for this long."""
PARALLEL_S: Final = 30.0
"""The same where it does compute some in parallel, but was seen not to compute more."""
MEAN_OF: Final = 16
"""First bytes over which the mean of what they take beyond the prediction is taken."""
MAX_DECREASE: Final = 2.0
"""One trend divides the lanes by at most this: behind noise a slope may be far too high."""


class Lanes:
    """The delay and the lanes of one endpoint."""

    __slots__ = (
        "_beyond_s",
        "_deviation_s",
        "_evidence",
        "_first_bytes",
        "_grows",
        "_reports",
        "_response_trend",
        "_serial_until",
        "_trend",
        "delay_known",
        "delay_s",
        "lanes",
        "spread_s",
    )

    def __init__(self) -> None:
        self.lanes = 1.0
        """Parallel prefills."""
        self.delay_s = 0.0
        """What a first byte takes in addition to the prediction when no request is before it."""
        self.spread_s = 0.0
        """Mean deviation of that."""
        self.delay_known = False
        """The delay was measured. Before that no first byte is late."""
        self._evidence = self._reports = 0
        self._serial_until = -inf
        self._trend = WaitTrend()
        """Without reports, like all of the following."""
        self._response_trend = WaitTrend()
        """Of non-streaming responses."""
        self._beyond_s = 0.0
        """How much longer than predicted the last first bytes took."""
        self._deviation_s = 0.0
        """Its mean deviation while slots were free."""
        self._first_bytes = 0
        """How many of them are in that mean."""
        self._grows = False
        """First bytes showed more lanes, and nothing fewer since."""

    def save(self) -> dict[str, float]:
        """What is known, for `restore`; empty before the delay is."""
        if not self.delay_known:
            return {}
        return {"lanes": self.lanes, "delay_s": self.delay_s, "spread_s": self.spread_s}

    def restore(self, saved: Mapping[str, float]) -> None:
        """Start with what `save` returned."""
        if saved:
            self.lanes, self.delay_s, self.spread_s = saved["lanes"], saved["delay_s"], saved["spread_s"]
            self.delay_known = True

    @property
    def counts_unseen(self) -> bool:
        """Whether requests that a report does not contain yet count like those that it does. Not, if the engine's step
        explains that; but first bytes may show parallel prefills, as some engines count what is in prefill nowhere, or
        take long for another reason, such as what is before the engine.
        """
        return self._evidence > 0 or self.delay_s > FIXED_S

    def may_test(self, pending: int, now: float) -> bool:
        """Whether one more request may be placed although prefills are queued, to test whether it is computed in
        parallel.
        """
        return self.delay_known and self._evidence >= 0 and pending < 2 and now > self._serial_until

    @property
    def fixed_s(self) -> float:
        """What first bytes take for another reason than prefills, where the engine does not report its queue: the delay
        without requests before them, as far as those with some have it too. One slow start shows nothing.
        """
        return min(self.delay_s, self._beyond_s) if self._first_bytes >= MIN_EVIDENCE else 0.0

    def may_explore(self, pending: int, now: float) -> bool:
        """Whether one more request may be placed where the engine does not report its queue, so that only first bytes
        show how many prefills it computes in parallel: one more than is known, and twice as many while these show no
        wait.
        """
        if now <= self._serial_until:
            return False
        return pending < (2.0 * self.lanes if self._grows else self.lanes + 1.0)

    def learn_first_byte(
        self, predicted_s: float, waited_s: float, before: int, now: float, *, slots_free: bool
    ) -> None:
        """Learn from a first byte of an engine that does not report its queue. `predicted_s`, `waited_s` and `before`:
        see `WaitTrend.learn`. `slots_free`: it hardly waited for a slot.
        """
        self._first_bytes = min(MEAN_OF, self._first_bytes + 1)
        off_s = waited_s - predicted_s - self._beyond_s
        self._beyond_s += off_s / self._first_bytes
        if slots_free:
            self._deviation_s += (abs(off_s) - self._deviation_s) / self._first_bytes
        self._learn_trend(self._trend, predicted_s, waited_s, before, now)

    def learn_response(self, predicted_s: float, waited_s: float, before: int, now: float) -> None:
        """The same of a non-streaming response, whose `waited_s` is what its length does not explain."""
        self._learn_trend(self._response_trend, predicted_s, waited_s, before, now)

    def _learn_trend(self, trend: WaitTrend, predicted_s: float, waited_s: float, before: int, now: float) -> None:
        trend.learn(predicted_s, waited_s, before)
        slope = trend.certain_slope()
        if slope is None:
            return
        if slope > MIDDLE:
            self._grows = False
            self.lanes = max(1.0, self.lanes / min(MAX_DECREASE, max(1.0, slope)))
            self._serial_until = now + (SERIAL_S if self.lanes == 1.0 else PARALLEL_S)
        elif trend.most >= self.lanes:
            self._grows = True
            self.lanes = trend.most + 1.0
            self._serial_until = -inf
        trend.forget()

    def learn_lanes(self, waiting: float, pending: int, *, full: bool, at: float) -> None:
        """Note the reported queue, while `pending` requests of ours have no first byte. `full`: the model predicts a
        long wait for the last of these.
        """
        if waiting >= 1.0:
            self._reports = 0
            if pending >= 1:
                self._serial_until = at + SERIAL_S
            self.lanes = max(1.0, min(self.lanes, pending - waiting))
        elif full and pending >= 2 and self.delay_known and self._evidence >= 0:
            self._reports += 1
            if self._reports >= MIN_REPORTS:
                self.lanes = max(self.lanes, 2.0 * pending)
                self._reports = 0
                self._serial_until = -inf
        else:
            self._reports = 0

    def late_after_s(self, predicted_s: float, *, reported: bool) -> float:
        """After how many seconds a first byte is late that is predicted in `predicted_s`. `reported`: the engine
        reports its queue.
        """
        spread_s = self.spread_s
        if not reported and self._first_bytes >= MIN_EVIDENCE:
            spread_s = max(spread_s, self._deviation_s)
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

    def learn_wait(self, predicted_s: float, waited_s: float, before: int) -> None:
        """Learn from a request that waited `waited_s` for the `before` prefills before it; `predicted_s` was
        predicted.
        """
        if predicted_s < max(MIN_WAIT_S, self.spread_s):
            return
        if waited_s < 0.5 * predicted_s:
            self._evidence = min(MIN_EVIDENCE, self._evidence + 1)
            if self._evidence == MIN_EVIDENCE and self.lanes <= before:
                self.lanes += 1.0
        else:
            self._evidence = max(-MIN_EVIDENCE, self._evidence - 2)
            if self.lanes > 1.0 and waited_s > 1.5 * predicted_s:
                self.lanes -= 1.0
