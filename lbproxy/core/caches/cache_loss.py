# SPDX-License-Identifier: Apache-2.0
"""Detects that an endpoint lost its prefix cache, from the reported `cached_tokens`: a restart that no probe saw.

A prompt is expected in the cache if its prefix was computed there before and no request in flight shares it. If it is
not there, it may have been evicted: a prefix that was used longer ago than anything that was ever found there does not
count. Several others in a row, each nearly completely missing, mean another process (or a flushed cache). Prefixes that
requests in flight share do not count either: an engine that starts two of them in one step computes both.
"""

from __future__ import annotations

from typing import Final

from lbproxy.core.requests.request import Usage

EXPECTED_TOKENS: Final = 1024.0
"""A shorter prefix does not count: engines cache whole blocks, and some leave the last one out."""
LOST_SHARE: Final = 0.2
"""Less than this share of the expected tokens in the cache counts as lost."""
LOST_IN_ROW: Final = 5
DOUBTFUL_IN_ROW: Final = 2
"""Of a cache whose content was restored after a restart of lbproxy, and of which nothing was found yet: usage comes
with the end of a response only, and until then requests are sent there for nothing."""


class LossDetector:
    """Detects cache losses of one endpoint."""

    def __init__(self) -> None:
        self._lost_in_row = 0
        """Prompts in a row whose cached prefix was missing."""
        self._reports_cached = False
        """The endpoint reports cached tokens. vLLM omits the field instead of reporting 0."""

    def learn(self, expected_tokens: float, usage: Usage, *, doubtful: bool = False) -> bool:
        """Note a prompt of which `expected_tokens` were expected in the cache. Returns whether the cache was lost.
        `doubtful`: see `DOUBTFUL_IN_ROW`.
        """
        if usage.cached_tokens is not None:
            self._reports_cached = True
        if not self._reports_cached or expected_tokens < EXPECTED_TOKENS:
            return False
        self._lost_in_row = self._lost_in_row + 1 if (usage.cached_tokens or 0) < LOST_SHARE * expected_tokens else 0
        if self._lost_in_row < (DOUBTFUL_IN_ROW if doubtful else LOST_IN_ROW):
            return False
        self._lost_in_row = 0
        return True
