# SPDX-License-Identifier: Apache-2.0
"""What the durations of whole responses show of an engine that does not report what it does.

A response that does not stream shows one time: its end. It
took the time of its tokens, and waited in the engine for others to end:

    took = base + tokens * gap + waited,      waited = (in flight before it + 1 - limit) / rate, if above 0

`base` is known from its prefill, `rate` from ends; the limit is estimated. The duration less the wait that the current
limit predicts is regressed on the tokens. The slope is the gap, whatever it is. The intercept above `base` is the error
of the predicted wait, so the limit is wrong by that error times the rate. Each response is compared with what was in
flight when it was placed, so the limit does not go on falling while the requests that were placed too early end.

If all responses are equally long, there is no slope. The gap is then assumed to be at most `MAX_SLOWDOWN` times the
smallest ever seen, which is plausible for decode in a full batch.
"""

from __future__ import annotations

from math import inf
from typing import Final

from lbproxy.core.capacity.regression import Regression

RESPONSES: Final = 48.0
"""Responses over which means are taken."""
MIN_RESPONSES: Final = 16
"""Responses before anything is concluded."""
MIN_VARIATION: Final = 0.15
"""Lengths vary if their deviation is more than this share of their mean."""
MAX_SLOWDOWN: Final = 2.0
GAP_GROWTH: Final = 1.0005
"""The smallest gap grows by this factor with each response, as servers change."""


class ResponseTimes:
    """The durations of one endpoint's responses."""

    def __init__(self) -> None:
        self._line = Regression(RESPONSES)
        """Of the seconds beyond base and predicted wait, over tokens."""
        self._gap = inf
        """The smallest time per token, in seconds."""

    def learn(self, excess_s: float, tokens: int) -> None:
        """Learn from a response of `tokens` tokens that took `excess_s` in addition to its base and predicted wait."""
        self._line.learn(tokens, excess_s)
        self._gap = min(self._gap * GAP_GROWTH, max(0.0, excess_s) / tokens if excess_s > 0.0 else inf)

    def unexplained_s(self) -> float | None:
        """How long responses wait beyond the prediction, in seconds; below 0: less long. None: not known yet, or
        perhaps no wait.
        """
        line = self._line
        if line.count < MIN_RESPONSES:
            return None
        if self._are_equally_long():
            return self._beyond_slowest()
        return line.mean_y - max(0.0, line.slope()) * line.mean_x

    def beyond_s(self, excess_s: float, tokens: int) -> float | None:
        """What of `excess_s` the `tokens` of a response do not explain; None: not known yet. All of it, if all
        responses are equally long.
        """
        if self._line.count < MIN_RESPONSES:
            return None
        if self._are_equally_long():
            return excess_s
        return excess_s - max(0.0, self._line.slope()) * tokens

    def _are_equally_long(self) -> bool:
        return self._line.xx < (MIN_VARIATION * self._line.mean_x) ** 2

    def _beyond_slowest(self) -> float | None:
        if self._gap == inf:
            return None
        over = self._line.mean_y - MAX_SLOWDOWN * self._gap * self._line.mean_x
        return over if over > 0.0 else None

    def forget(self) -> None:
        """Start again: earlier predictions were made with another limit."""
        self._line.forget()

    def shift(self, by_s: float) -> None:
        """Shift the predicted waits of the remembered responses."""
        self._line.mean_y -= by_s
