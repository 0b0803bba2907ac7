"""The work at one endpoint, as our own requests there show it: what is placed, what is not prefilled yet, what grows.

An engine prefills in the order of arrival, so the requests without a first byte (`pending`) are its queue, measured in
uncached tokens. A request that does not stream shows no first byte; it is taken for prefilled at the time predicted for
it (`expire`), or when a stream placed after it begins.

Invariants: `pending_tokens` is the sum over `pending`; `in_flight`, `context_tokens` and `live_tokens` are those of the
placements not ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from lbproxy.core.knowledge.placement import FREED_S, NEVER, Placement
from lbproxy.core.knowledge.speed import Speed

RECENT_S: Final = 180.0
"""The time constant of `Work.recent_tokens`."""


class Work:
    """Of one endpoint. Times are seconds, durations milliseconds, work tokens."""

    __slots__ = (
        "_recent",
        "_recent_at",
        "context_tokens",
        "due_at",
        "freed",
        "head_tokens",
        "in_flight",
        "live_tokens",
        "pending",
        "pending_tokens",
        "prefilled_ms",
        "since_at",
    )

    def __init__(self) -> None:
        self.pending: dict[Placement, None] = {}
        """Placed and not prefilled, in order."""
        self.pending_tokens = 0.0
        """Their prefill work (Upend)."""
        self.head_tokens = 0.0
        """That of the first of them."""
        self.since_at = 0.0
        """Since when that one is being prefilled (tref)."""
        self.due_at = NEVER
        """The earliest `due_at` in `pending`."""
        self.prefilled_ms = 0.0
        """How long prompts took to prefill in all, as predicted when they were done."""
        self.in_flight = 0
        self.context_tokens = 0.0
        """Prompts and streamed tokens of all in flight (C)."""
        self.live_tokens = 0.0
        """Streamed tokens of all in flight."""
        self.freed = (0.0, 0.0)
        """Cache space that became free of late, in tokens, and as of when."""
        self._recent = self._recent_at = 0.0

    # Reading

    def pending_uncached(self) -> float:
        """Uncached tokens of what is pending, as the rules of other routers count them. O(pending)."""
        return sum(one.uncached for one in self.pending)

    def recent_tokens(self, now: float) -> float:
        """Prefill work placed here, with a memory of three minutes."""
        return self._recent * math.exp((self._recent_at - now) / RECENT_S)

    def silent_before(self, placement: Placement) -> list[Placement]:
        """Those pending before it that show no first byte."""
        before = takewhile(lambda one: one is not placement, self.pending)
        return [one for one in before if one.due_at < NEVER]

    # Changes

    def place(self, placement: Placement, now: float) -> None:
        """One more."""
        if not placement.request.stream:
            self.due_at = min(self.due_at, placement.due_at)
        if not self.pending:
            self.since_at = now
            self.head_tokens = placement.work
        self.pending[placement] = None
        self.pending_tokens += placement.work
        self._recent = self.recent_tokens(now) + placement.uncached
        self._recent_at = now
        self.in_flight += 1
        self.context_tokens += placement.prompt_tokens

    def streamed(self, placement: Placement, tokens: int) -> None:
        """So many more tokens of its response came."""
        self.context_tokens += tokens
        self.live_tokens += tokens
        placement.streamed += tokens

    def end(self, placement: Placement) -> None:
        """One fewer. It is not pending any more."""
        self.in_flight -= 1
        self.context_tokens -= placement.prompt_tokens + placement.streamed
        self.live_tokens -= placement.streamed
        if not self.in_flight:  # rounding ends here
            self.context_tokens = self.live_tokens = 0.0

    def free(self, tokens: float, now: float) -> None:
        """So much cache space became free."""
        before, at = self.freed
        self.freed = before * math.exp((at - now) / FREED_S) + tokens, now

    def expire(self, now: float, speed: Speed) -> None:
        """Requests that do not stream and should be prefilled by now are taken to be."""
        due = [one for one in self.pending if one.due_at <= now]
        self.prefilled(due, max([self.since_at, *(one.due_at for one in due)]), speed)

    def prefilled(self, placements: Sequence[Placement], now: float, speed: Speed) -> None:
        """They leave `pending`; the first of those that remain is being prefilled from now."""
        for placement in placements:
            del self.pending[placement]
            self.pending_tokens -= placement.work
            self.prefilled_ms += speed.prefill_ms(placement.work)
        self.since_at = now
        if self.pending:
            self.head_tokens = next(iter(self.pending)).work
            if self.due_at < NEVER:
                self.due_at = self._first_due()
        else:
            self.pending_tokens = self.head_tokens = 0.0
            self.due_at = NEVER

    def _first_due(self) -> float:
        """The earliest `due_at`, or that of the first in line: those behind it are hardly ever due before it."""
        first = next(iter(self.pending)).due_at
        return first if first < NEVER else min(one.due_at for one in self.pending)
