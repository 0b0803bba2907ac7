# SPDX-License-Identifier: Apache-2.0
"""Whether prefix caches save time: a model of what is cached is of use only as far as it was right.

What prefills took is regressed on the work that is expected to be left, and on the work that caches should have saved:

    took = a * left + b * saved

Where caches work, b is 0; where there is none, whatever the engine says or does not say, b is a. All endpoints together
show it: believed one by one, the last that is believed would get everything.
"""

from __future__ import annotations

from typing import Final

MEMORY: Final = 256.0
"""Prefills over which the sums are taken."""
ENOUGH: Final = 32.0
"""Prefills before anything is concluded."""
LEAST_APART: Final = 0.05
"""Left and saved work must not be proportional: 1 less the square of their correlation."""
DOUBT: Final = 0.25
"""A cache that saves this share of what it should is believed: the rest may be what it evicted. With a half, engines
that restarted with a quarter of their cache had first bytes 1.23 and 1.31 times as late, instead of 1.13 and 1.08
(`tests/benchmarks/test_restarted_fleet.py`)."""


class Savings:
    """What the prefix caches of one pool save."""

    def __init__(self) -> None:
        self.share = 1.0
        """The share that counts of what is expected in caches: 1, or less than `DOUBT`."""
        self.is_reported = False
        """Some response reported how much of its prompt was cached."""
        self._count = self._ll = self._ls = self._ss = self._lt = self._st = 0.0

    def learn(self, left: float, saved: float, took_ms: float) -> None:
        """Learn from a prefill, or those of one step. `left`, `saved`: work in tokens."""
        rest = 1.0 - 1.0 / MEMORY
        self._count = rest * self._count + 1.0
        self._ll = rest * self._ll + left * left
        self._ls = rest * self._ls + left * saved
        self._ss = rest * self._ss + saved * saved
        self._lt = rest * self._lt + left * took_ms
        self._st = rest * self._st + saved * took_ms
        both = self._ll * self._ss - self._ls * self._ls
        if self._count < ENOUGH or both <= LEAST_APART * self._ll * self._ss:
            return
        of_left = (self._lt * self._ss - self._st * self._ls) / both
        of_saved = (self._st * self._ll - self._lt * self._ls) / both
        share = 1.0 - of_saved / of_left if of_left > 0.0 else 0.0
        self.share = 1.0 if share >= DOUBT else max(0.0, share)
