# SPDX-License-Identifier: Apache-2.0
"""The last minutes in steps of five seconds: requests, errors, latency, what ran and waited. For whoever looks later.

It samples what telemetry counts anyway, so it costs nothing for each request.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from lbproxy.control.families.common import RequestTotals
from lbproxy.control.families.requests import FIRST_BYTE_BUCKETS
from lbproxy.control.telemetry.access_line import stamp
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.observed.learned import QueueSnapshot

STEP_S = 5.0
STEPS = 120
"""Ten minutes."""


class History:
    """`run` it as a loop; `points` says what it saw."""

    def __init__(
        self,
        totals: Callable[[], RequestTotals],
        endpoints: Callable[[], Iterable[EndpointState]],
        queue: Callable[[], QueueSnapshot],
    ) -> None:
        """`endpoints`: all that have requests of ours, those that are leaving too."""
        self._totals = totals
        self._endpoints = endpoints
        self._queue = queue
        self._before = totals()
        self._streamed: dict[EndpointUid, int] = {}
        """Tokens of streams of each endpoint, until now."""
        self._points: deque[dict[str, object]] = deque(maxlen=STEPS)

    @property
    def points(self) -> Sequence[dict[str, object]]:
        """The oldest first."""
        return list(self._points)

    async def run(self) -> None:
        """Until cancelled: a loop for `supervise`."""
        while True:
            began_at = time.monotonic()
            await asyncio.sleep(STEP_S)
            self.sample(time.monotonic() - began_at)

    def sample(self, seconds: float) -> None:
        """One more point, about the last so many seconds."""
        before, after, queue, endpoints = self._before, self._totals(), self._queue(), list(self._endpoints())
        self._before = after
        first_bytes = [new - old for old, new in zip(before.first_bytes, after.first_bytes, strict=True)]
        self._points.append(
            {
                "at": stamp(time.time()),
                "seconds": round(seconds, 3),
                "requests": after.requests - before.requests,
                "errors": after.errors - before.errors,
                "rejected": after.rejected - before.rejected,
                "completion_tokens": after.tokens - before.tokens + self._newly_streamed(endpoints),
                "prompt_tokens": after.prompt_tokens - before.prompt_tokens,
                "cached_tokens": after.cached_tokens - before.cached_tokens,
                "first_byte_ms": {"p50": quantile_ms(first_bytes, 0.5), "p95": quantile_ms(first_bytes, 0.95)},
                "in_flight": sum(one.in_flight for one in endpoints),
                "waiting": queue.waiting,
                "waiting_by_reason": queue.by_reason,
            }
        )

    def _newly_streamed(self, endpoints: Iterable[EndpointState]) -> int:
        """Tokens of streams since the last point: as they come, whether or not a usage follows them."""
        before = self._streamed
        self._streamed = {one.endpoint.uid: one.standing.progress.tokens_streamed for one in endpoints}
        return sum(tokens - before.get(uid, 0) for uid, tokens in self._streamed.items())


def quantile_ms(counts: Sequence[int], share: float) -> float | None:
    """A quantile from a histogram, linear within its bucket; the last bound for what is above all. None: no values."""
    wanted = share * sum(counts)
    if not wanted:
        return None
    seen, low = 0, 0.0
    for count, high in zip(counts, FIRST_BYTE_BUCKETS, strict=False):
        if seen + count >= wanted:
            return round(1000.0 * (low + (high - low) * (wanted - seen) / count), 3)
        seen, low = seen + count, high
    return 1000.0 * low
