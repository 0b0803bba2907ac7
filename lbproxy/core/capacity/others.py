"""What others have at an endpoint: requests and cache space that its reports show and that are not ours.

Gauges lag behind our own counts, and what lags looks like others' load. So a little of it does not count, and the rest
when two scrapes in a row say so; but a queue that was reported with a response is of this moment. An endpoint whose
reports are missing or old is not idle: it is taken to have as much of others as those that report have on average.
"""

from __future__ import annotations

from math import inf
from typing import Final

LEAST: Final = 2.0
LEAST_SHARE: Final = 0.1
"""Of our own requests in flight, or of the cache: what others have must be more than this to count."""


class Mean:
    """What others have at an endpoint on average, of those that report it."""

    __slots__ = ("requests", "until")

    def __init__(self) -> None:
        self.requests = 0.0
        self.until = -inf

    def learn(self, requests: float, until: float, endpoints: int) -> None:
        """A report of one of so many endpoints."""
        self.requests += (requests - self.requests) / max(1, endpoints)
        self.until = max(self.until, until)


class Others:
    """At one endpoint."""

    __slots__ = ("_last", "_mean", "cache_tokens", "count", "until", "waiting")

    def __init__(self, mean: Mean) -> None:
        self._mean = mean
        self.count = 0.0
        """Requests in flight."""
        self.waiting = 0.0
        """Those of them that wait."""
        self.cache_tokens = 0.0
        """Cache space in use by them."""
        self.until = -inf
        """Until when these count."""
        self._last = 0.0

    def requests(self, now: float) -> float:
        """How many requests of others are there."""
        if now <= self.until:
            return self.count
        return self._mean.requests if now <= self._mean.until else 0.0

    def queued(self, now: float) -> float:
        """How many of them wait in the engine."""
        return self.waiting if now <= self.until else 0.0

    def space(self, now: float) -> float:
        """Tokens of the cache that they use."""
        return self.cache_tokens if now <= self.until else 0.0

    def learn(self, seen: float, queued: float, in_flight: int, *, until: float, reported: bool) -> None:
        """A scrape, or a report with a response: `seen` requests that are not ours, `queued` of them waiting, beside
        so many of ours.
        """
        count = max(queued, min(seen, self.count)) if reported else min(seen, self._last)
        self._last = self._last if reported else seen
        self.count = count if count >= LEAST + LEAST_SHARE * in_flight else 0.0
        self.waiting = min(self.count, queued)
        self.until = until

    def learn_space(self, used_tokens: float, own_tokens: float, capacity_tokens: float) -> None:
        """A scrape says how much of the cache is in use, ours included."""
        over = used_tokens - own_tokens
        self.cache_tokens = over if over > LEAST_SHARE * capacity_tokens else 0.0
