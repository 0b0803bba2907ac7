# SPDX-License-Identifier: Apache-2.0
"""How long a second leg takes to its first byte: learned for all endpoints together.

A line through what was seen: a fixed part, and one for each token of the prompt that the second endpoint had not
cached, whose KV is transferred. Recent legs count more. Until some were seen, a guess counts as one of them: a tenth of
the time that it takes to compute the prompt.
"""

from __future__ import annotations

from typing import Final

KEEP: Final = 0.98
"""The weight of an observation after one more."""
GUESS_WEIGHT: Final = 0.5
GUESS_FIXED_MS: Final = 20.0
GUESS_SHARE: Final = 0.1
"""Of the time that prefill takes."""
GUESS_SHORT: Final = 100.0
GUESS_LONG: Final = 8000.0
"""The tokens of two prompts, through whose times the guess is a line."""
MAX_FACTOR: Final = 10.0
"""One observation counts at most this many times what was predicted: it may have waited for something else."""


class Transfer:
    """The time of a transfer."""

    def __init__(self, prefill_token_ms: float) -> None:
        """`prefill_token_ms`: what prefill takes for a token."""
        self.seen = 0
        """Observations."""
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._guessed_token_ms = 0.0
        self.fixed_ms = GUESS_FIXED_MS
        self.token_ms = GUESS_SHARE * prefill_token_ms
        self._guess(prefill_token_ms)

    def _guess(self, prefill_token_ms: float) -> None:
        self._guessed_token_ms = prefill_token_ms
        for tokens in [GUESS_SHORT, GUESS_LONG]:
            self._add(tokens, GUESS_FIXED_MS + GUESS_SHARE * prefill_token_ms * tokens, GUESS_WEIGHT)
        self._fit()

    def ms(self, tokens: float, prefill_token_ms: float) -> float:
        """The predicted time for so many tokens, in milliseconds. `prefill_token_ms`: as known now."""
        if not self.seen and prefill_token_ms != self._guessed_token_ms:
            self._n = self._x = self._y = self._xx = self._xy = 0.0
            self._guess(prefill_token_ms)
        return self.fixed_ms + self.token_ms * tokens

    def learn(self, tokens: float, took_ms: float) -> None:
        """Learn from one second leg: `took_ms` from its placement to its first byte."""
        self._n, self._x, self._y = KEEP * self._n, KEEP * self._x, KEEP * self._y
        self._xx, self._xy = KEEP * self._xx, KEEP * self._xy
        most = MAX_FACTOR * (self.fixed_ms + self.token_ms * tokens)
        self._add(tokens, min(max(took_ms, 0.0), most), 1.0)
        self.seen += 1
        self._fit()

    def _add(self, tokens: float, ms: float, weight: float) -> None:
        self._n += weight
        self._x += weight * tokens
        self._y += weight * ms
        self._xx += weight * tokens * tokens
        self._xy += weight * tokens * ms

    def _fit(self) -> None:
        """The line of least squares; neither of its parts is below 0."""
        n, x, y = self._n, self._x, self._y
        spread = n * self._xx - x * x
        slope = (n * self._xy - x * y) / spread if spread > 1e-9 * n * self._xx else 0.0
        slope = max(0.0, slope)
        fixed = (y - slope * x) / n
        if fixed < 0.0:
            fixed, slope = 0.0, self._xy / self._xx if self._xx > 0.0 else 0.0
        self.fixed_ms, self.token_ms = fixed, slope
