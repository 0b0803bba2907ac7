"""Notices that an endpoint lost its prefix cache, by what its responses say was cached: a restart that no probe saw.

A prompt whose beginning was computed there before, and that no request in flight shares, is expected in the cache. One
that is not there was evicted, maybe: what was used longer ago than anything that was ever found there says
nothing. Several others in a row, each nearly all gone, are another process (or a flushed cache). Prefixes that requests
in flight share say nothing either: an engine that starts two of them in one step computes both.
"""

from __future__ import annotations

from typing import Final

from lbproxy.core.requests.request import Usage

EXPECTED_TOKENS: Final = 1024.0
"""Less is no sign: engines cache whole blocks, and some leave the last of them out."""
GONE: Final = 0.2
"""A smaller share of what was expected counts as gone."""
IN_A_ROW: Final = 5


class Recall:
    """Of one endpoint."""

    __slots__ = ("_gone", "_reports_cached")

    def __init__(self) -> None:
        self._gone = 0
        """Prompts in a row whose cached beginning was gone."""
        self._reports_cached = False
        """Its responses say what was cached. vLLM's say nothing instead of 0."""

    def learn(self, expected_tokens: float, usage: Usage) -> bool:
        """A prompt was computed of which so much was expected in the cache. Returns whether the cache was lost."""
        if usage.cached_tokens is not None:
            self._reports_cached = True
        if not self._reports_cached or expected_tokens < EXPECTED_TOKENS:
            return False
        self._gone = self._gone + 1 if (usage.cached_tokens or 0) < GONE * expected_tokens else 0
        if self._gone < IN_A_ROW:
            return False
        self._gone = 0
        return True
