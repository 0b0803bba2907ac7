# SPDX-License-Identifier: Apache-2.0
"""How many requests an engine runs at once, estimated from the durations of non-streaming responses alone.

A non-streaming response shows one time: its end. It took the time of its tokens, and waited in the engine for others to
end:

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

MEMORY: Final = 48.0
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

    __slots__ = ("_cov", "_gap", "_mean_excess", "_mean_tokens", "_n", "_square")

    def __init__(self) -> None:
        self._n = 0
        self._mean_tokens = self._mean_excess = 0.0
        self._square = self._cov = 0.0
        self._gap = inf
        """The smallest time per token, in seconds."""

    def learn(self, excess_s: float, tokens: int) -> None:
        """Learn from a response of `tokens` tokens that took `excess_s` in addition to its base and predicted wait."""
        self._n += 1
        weight = max(1.0 / MEMORY, 1.0 / self._n)
        off_tokens, off_excess = tokens - self._mean_tokens, excess_s - self._mean_excess
        self._mean_tokens += weight * off_tokens
        self._mean_excess += weight * off_excess
        self._square = (1.0 - weight) * (self._square + weight * off_tokens * off_tokens)
        self._cov = (1.0 - weight) * (self._cov + weight * off_tokens * off_excess)
        self._gap = min(self._gap * GAP_GROWTH, max(0.0, excess_s) / tokens if excess_s > 0.0 else inf)

    def unexplained_s(self) -> float | None:
        """How long responses wait beyond the prediction, in seconds; below 0: less long. None: not known yet, or
        perhaps no wait.
        """
        if self._n < MIN_RESPONSES:
            return None
        if self._square < (MIN_VARIATION * self._mean_tokens) ** 2:
            return self._beyond_slowest()
        slope = max(0.0, self._cov / self._square)
        return self._mean_excess - slope * self._mean_tokens

    def beyond_s(self, excess_s: float, tokens: int) -> float | None:
        """What of `excess_s` the `tokens` of a response do not explain; None: not known yet. All of it, if all
        responses are equally long.
        """
        if self._n < MIN_RESPONSES:
            return None
        if self._square < (MIN_VARIATION * self._mean_tokens) ** 2:
            return excess_s
        return excess_s - max(0.0, self._cov / self._square) * tokens

    def _beyond_slowest(self) -> float | None:
        if self._gap == inf:
            return None
        over = self._mean_excess - MAX_SLOWDOWN * self._gap * self._mean_tokens
        return over if over > 0.0 else None

    def forget(self) -> None:
        """Start again: earlier predictions were made with another limit."""
        self._n = 0
        self._square = self._cov = 0.0

    def shift(self, by_s: float) -> None:
        """Shift the predicted waits of the remembered responses."""
        self._mean_excess -= by_s
