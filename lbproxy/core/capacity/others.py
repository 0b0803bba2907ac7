# SPDX-License-Identifier: Apache-2.0
"""What other clients use at an endpoint: requests and cache space that its reports contain and that are not ours.

Gauges lag behind our own counts, and the lag looks like load of others. So a small difference does not count, and a
larger one only if two scrapes in a row show it; but a queue that was reported with a response is current. An endpoint
without fresh reports is not idle: it is assumed to have as much load of others as the reporting endpoints on average.
"""

from __future__ import annotations

from math import inf
from typing import Final

MIN_REQUESTS: Final = 2.0
MIN_SHARE: Final = 0.1
"""As a share of our own requests in flight, or of the cache: the load of others must exceed this to count."""


class MeanOthers:
    """The mean load of others over the endpoints that report it."""

    def __init__(self) -> None:
        self.requests = 0.0
        self.until = -inf

    def learn(self, requests: float, until: float, endpoints: int) -> None:
        """Note the report of one of `endpoints` endpoints."""
        self.requests += (requests - self.requests) / max(1, endpoints)
        self.until = max(self.until, until)


class Others:
    """The load of others at one endpoint."""

    def __init__(self, mean: MeanOthers) -> None:
        self._mean = mean
        self.count = 0.0
        """Requests in flight."""
        self.waiting = 0.0
        """Those of them that wait."""
        self.cache_tokens = 0.0
        self.until = -inf
        """Until when these values are fresh."""
        self._last = 0.0

    def requests(self, now: float) -> float:
        if now <= self.until:
            return self.count
        return self._mean.requests if now <= self._mean.until else 0.0

    def queued(self, now: float) -> float:
        """Requests of others that wait in the engine."""
        return self.waiting if now <= self.until else 0.0

    def space(self, now: float) -> float:
        """Tokens of the cache that others use."""
        return self.cache_tokens if now <= self.until else 0.0

    @property
    def scraped(self) -> bool:
        """Whether the last scrape had requests of others: a load report only has the queue, in which ours may be."""
        return self._last >= MIN_REQUESTS

    def learn(self, seen: float, queued: float, in_flight: int, *, until: float, reported: bool) -> None:
        """Learn from a scrape or a load report: `seen` requests that are not ours, `queued` of them waiting, and
        `in_flight` of ours.
        """
        count = max(queued, min(seen, self.count)) if reported else min(seen, self._last)
        self._last = self._last if reported else seen
        self.count = count if count >= MIN_REQUESTS + MIN_SHARE * in_flight else 0.0
        self.waiting = min(self.count, queued)
        self.until = until

    def learn_space(self, used_tokens: float, own_tokens: float, capacity_tokens: float) -> None:
        """Learn from a scrape that reports how much of the cache is in use, ours included."""
        over = used_tokens - own_tokens
        self.cache_tokens = over if over > MIN_SHARE * capacity_tokens else 0.0
