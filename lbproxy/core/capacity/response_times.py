"""How many requests an engine runs at once, seen from the times of whole responses alone.

A response that is not streamed shows one time: its end. It took what its tokens took, and what it waited in the engine
for others to end:

    took = base + tokens * gap + waited,      waited = (in flight before it + 1 - limit) / rate, if above 0

`base` is known from its prefill, `rate` from ends, the limit is looked for. What is left after the wait that today's
limit predicts is regressed on the tokens: the slope is the gap, which may be any, and the intercept beyond `base` is
the error of the predicted wait, so that the limit is wrong by that times the rate. Each response is judged by what was
before it when it was placed, so the limit does not go on falling while those that were placed too early come home.

Where all responses are equally long, there is no slope to see; the gap is then taken to be at most `SLOWED` times the
smallest that was ever seen, which decode in a full batch may well be.
"""

from __future__ import annotations

from math import inf
from typing import Final

MEMORY: Final = 48.0
"""Responses over which means are taken."""
LEAST: Final = 16
"""Responses before anything is concluded."""
VARIED: Final = 0.15
"""Lengths vary if their deviation is more than this share of their mean."""
SLOWED: Final = 2.0
FORGET: Final = 1.0005
"""By which the smallest gap grows with each response: servers change."""


class ResponseTimes:
    """One endpoint's."""

    __slots__ = ("_cov", "_gap", "_mean_left", "_mean_tokens", "_n", "_square")

    def __init__(self) -> None:
        self._n = 0
        self._mean_tokens = self._mean_left = 0.0
        self._square = self._cov = 0.0
        self._gap = inf
        """The smallest time a token took, in seconds."""

    def learn(self, left_s: float, tokens: int) -> None:
        """A response of so many tokens took `left_s` beside its base and the wait that was predicted for it."""
        self._n += 1
        weight = max(1.0 / MEMORY, 1.0 / self._n)
        off_tokens, off_left = tokens - self._mean_tokens, left_s - self._mean_left
        self._mean_tokens += weight * off_tokens
        self._mean_left += weight * off_left
        self._square = (1.0 - weight) * (self._square + weight * off_tokens * off_tokens)
        self._cov = (1.0 - weight) * (self._cov + weight * off_tokens * off_left)
        self._gap = min(self._gap * FORGET, max(0.0, left_s) / tokens if left_s > 0.0 else inf)

    def unexplained_s(self) -> float | None:
        """How long responses wait beyond what was predicted; below 0: less long. None: it cannot be told yet, or the
        wait may be none.
        """
        if self._n < LEAST:
            return None
        if self._square < (VARIED * self._mean_tokens) ** 2:
            return self._beyond_slowest()
        slope = max(0.0, self._cov / self._square)
        return self._mean_left - slope * self._mean_tokens

    def _beyond_slowest(self) -> float | None:
        if self._gap == inf:
            return None
        over = self._mean_left - SLOWED * self._gap * self._mean_tokens
        return over if over > 0.0 else None

    def forget(self) -> None:
        """Begin anew: what was predicted meanwhile has nothing to do with what is."""
        self._n = 0
        self._square = self._cov = 0.0

    def shift(self, by_s: float) -> None:
        """The predicted waits of those that are remembered change by so much."""
        self._mean_left -= by_s
