# SPDX-License-Identifier: Apache-2.0
"""The work at one endpoint, as our own requests show it: what is placed, what is not prefilled yet, what grows.

An engine prefills in the order of arrival, so the requests without a first byte (`pending`) are its queue, measured in
uncached tokens. A non-streaming request shows no first byte. It counts as prefilled at the predicted time (`expire`),
or when a stream that was placed after it begins.

Invariants: `pending_tokens` is the sum over `pending`; `in_flight`, `context_tokens` and `live_tokens` are those of the
placements that have not ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from lbproxy.core.knowledge.placement import FREED_S, NEVER, Placement
from lbproxy.core.knowledge.speed import Speed

STALLED_S: Final = 0.6
"""More than twice the time between two reports of progress, and many times that between two tokens."""
RECENT_S: Final = 180.0
"""The time constant of `Work.recent_tokens`."""


class Work:
    """The work of one endpoint. Times are seconds, durations milliseconds, work tokens."""

    def __init__(self) -> None:
        self.pending: dict[Placement, None] = {}
        """Placed and not prefilled, in order."""
        self.pending_tokens = 0.0
        """Their prefill work."""
        self.head_tokens = 0.0
        """The prefill work of the first of them."""
        self.prefill_since = 0.0
        """Since when the first of them is being prefilled."""
        self.due_at = NEVER
        """The earliest `due_at` in `pending`."""
        self.prefilled_ms = 0.0
        """The total time of finished prefills, as predicted when they were done."""
        self.in_flight = 0
        self.context_tokens = 0.0
        """Prompts and streamed tokens of all requests in flight."""
        self.live_tokens = 0.0
        """Streamed tokens of all requests in flight."""
        self.freed = (0.0, 0.0)
        """Cache space that became free recently, in tokens, and as of when."""
        self._recent = self._recent_at = 0.0
        self._streams: dict[Placement, None] = {}
        """Streams with progress, in the order of their latest progress."""
        self._streamed_at = 0.0
        """The latest progress of all."""
        self._steps = (0.0, 0.0)
        """The first progress in the latest step of the engine, and in the one before. A step begins when a stream has
        progress that had some in the one before, or long after that."""

    # Reading

    def pending_uncached(self) -> float:
        """Uncached tokens of the pending requests, as the rules of other routers count them. O(pending)."""
        return sum(one.uncached_tokens for one in self.pending)

    def recent_tokens(self, now: float) -> float:
        """Prefill work placed here recently, with a time constant of three minutes."""
        return self._recent * math.exp((self._recent_at - now) / RECENT_S)

    def non_streaming_before(self, placement: Placement) -> list[Placement]:
        """Non-streaming requests that are pending before `placement`."""
        before = takewhile(lambda one: one is not placement, self.pending)
        return [one for one in before if one.due_at < NEVER]

    def silent(self) -> int:
        """Requests that are prefilled, as predicted or shown, and have no progress: most do not stream, and may
        still wait in the engine.
        """
        return self.in_flight - len(self.pending) - len(self._streams)

    @property
    def streams(self) -> int:
        """Streams that had progress."""
        return len(self._streams)

    def streaming(self, now: float) -> int:
        """Streams that had progress just now: the engine runs them. O(their number)."""
        since = now - STALLED_S
        return sum(1 for _ in takewhile(lambda one: one.reported_at >= since, reversed(self._streams)))

    def stalled(self) -> int:
        """Streams without progress for `STALLED_S` while others had some, in more than one step: at the end of a long
        one, all but those whose tokens are here already seem to stall. O(their number).
        """
        before = min(self._streamed_at - STALLED_S, self._steps[1])
        stalled = 0
        for stream in self._streams:
            if stream.reported_at >= before:
                break
            stalled += 1
        return stalled

    # Changes

    def place(self, placement: Placement, now: float) -> None:
        """Count one more request."""
        if not placement.request.stream:
            self.due_at = min(self.due_at, placement.due_at)
        if not self.pending:
            self.prefill_since = now
            self.head_tokens = placement.work
        self.pending[placement] = None
        self.pending_tokens += placement.work
        self._recent = self.recent_tokens(now) + placement.uncached_tokens
        self._recent_at = now
        self.in_flight += 1
        self.context_tokens += placement.prompt_tokens

    def receive(self, placement: Placement) -> None:
        """Count one more request, whose prompt was computed elsewhere."""
        self.in_flight += 1
        self.context_tokens += placement.prompt_tokens

    def streamed(self, placement: Placement, tokens: int, now: float) -> None:
        """Count `tokens` more of its response."""
        self._streams.pop(placement, None)
        self._streams[placement] = None
        is_in_it = self._steps[0] <= placement.reported_at < NEVER
        if is_in_it or now > self._steps[0] + STALLED_S:
            self._steps = now, self._steps[0]
        self._streamed_at = now
        self.context_tokens += tokens
        self.live_tokens += tokens
        placement.streamed_tokens += tokens

    def end(self, placement: Placement) -> None:
        """Count one request fewer. It must not be pending any more."""
        self._streams.pop(placement, None)
        self.in_flight -= 1
        self.context_tokens -= placement.prompt_tokens + placement.streamed_tokens
        self.live_tokens -= placement.streamed_tokens
        if not self.in_flight:  # clears rounding errors
            self.context_tokens = self.live_tokens = 0.0

    def free(self, tokens: float, now: float) -> None:
        """Note that cache space became free."""
        before, at = self.freed
        self.freed = before * math.exp((at - now) / FREED_S) + tokens, now

    def expire(self, now: float, speed: Speed) -> None:
        """Count non-streaming requests as prefilled whose time has come."""
        due = [one for one in self.pending if one.due_at <= now]
        self.prefilled(due, max([self.prefill_since, *(one.due_at for one in due)]), speed)

    def prefilled(self, placements: Sequence[Placement], now: float, speed: Speed) -> None:
        """Remove requests from `pending`; the first of those that remain is being prefilled from `now` on."""
        for placement in placements:
            del self.pending[placement]
            self.pending_tokens -= placement.work
            self.prefilled_ms += speed.prefill_ms(placement.work)
        self.prefill_since = now
        if self.pending:
            self.head_tokens = next(iter(self.pending)).work
            if self.due_at < NEVER:
                self.due_at = self._first_due()
        else:
            self.pending_tokens = self.head_tokens = 0.0
            self.due_at = NEVER

    def _first_due(self) -> float:
        """The earliest `due_at`, or that of the first pending request: later ones are hardly ever due before it."""
        first = next(iter(self.pending)).due_at
        return first if first < NEVER else min(one.due_at for one in self.pending)
