# SPDX-License-Identifier: Apache-2.0
"""What limits leave of an endpoint, or of a flow: requests and tokens a minute, tokens a day, requests in flight.

The one account of both. `core.queue.limits` says what a request uses, and writes it here. Each of several replicas
counts the requests of all.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

from lbproxy.core.capacity.bucket import MINUTE_S, Bucket, Day, Spent, resized

FIRST_GUESS_TOKENS: Final = 200.0
"""The assumed length of a response, before there was one."""
STEP: Final = 0.1

Rate: TypeAlias = tuple[float, float, float]
"""A limit per minute: its size, what is left of it (below 0: more was used), and in how many seconds all of it is."""
Rates: TypeAlias = tuple[Rate | None, Rate | None]
"""Of requests and of tokens; None: there is no such limit."""


class Bounds(NamedTuple):
    """The limits in the settings; None = no limit."""

    max_in_flight: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None


class Use(NamedTuple):
    """What was used of the limits per time."""

    at: float
    requests: float
    """What is missing to a full minute at `at`, as `tokens`; 0 or more."""
    tokens: float
    day: Spent | None
    """None: there is no limit per day."""

    @property
    def is_nothing(self) -> bool:
        return not (self.requests or self.tokens or (self.day is not None and any(self.day.amounts)))


class Claim:
    """What is kept of an endpoint's limits for a request that waits for them, so that no later one takes it away."""

    def __init__(self, allowance: Allowance, uid: int, tokens: float, priority: int) -> None:
        self.allowance: Final = allowance
        self.uid: Final = uid
        self.tokens: Final = tokens
        self.priority: Final = priority
        """Requests of a higher one do not wait for it."""

    @property
    def holds(self) -> bool:
        """Whether no other one took its place."""
        return self.allowance.claim is self


class Reached(NamedTuple):
    """The limit that keeps a request out, of several the one that lasts longest."""

    wait_s: float
    """Until it is within it; above 0."""
    key: str
    """In the settings."""
    size: float


class Allowance:
    """What is left of the limits of one endpoint or flow."""

    def __init__(self, bounds: Bounds, now: float) -> None:
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._day: Day | None = None
        self.mean_response_tokens = FIRST_GUESS_TOKENS
        """Of the lengths that were reported."""
        self.claim: Claim | None = None
        self.max_in_flight: int | None = None
        self.reconfigure(bounds, now)

    def reconfigure(self, bounds: Bounds, now: float) -> None:
        """Use other limits. What was used stays used."""
        self.max_in_flight = bounds.max_in_flight
        self._requests = resized(self._requests, bounds.requests_per_minute, now)
        self._tokens = resized(self._tokens, bounds.tokens_per_minute, now)
        if bounds.tokens_per_day is None:
            self._day = None
        elif self._day is None:
            self._day = Day(bounds.tokens_per_day, now)
        else:
            self._day.size = float(bounds.tokens_per_day)

    @property
    def is_timed(self) -> bool:
        """Whether there are limits per time."""
        return self._requests is not None or self._tokens is not None or self._day is not None

    def wait_s(self, requests: float, tokens: float, now: float) -> float:
        """In how many seconds so many more are within the limits per time; 0 = now."""
        wait = 0.0
        if self._requests is not None:
            wait = max(wait, self._requests.wait_s(requests, now))
        if self._tokens is not None:
            wait = max(wait, self._tokens.wait_s(tokens, now))
        if self._day is not None:
            wait = max(wait, self._day.wait_s(tokens, now))
        return wait

    def reached(self, now: float) -> Reached | None:
        """The limit per minute that keeps one more request out, which finds all of it used; None: none does."""
        found: Reached | None = None
        for key, bucket in (("requests_per_minute", self._requests), ("tokens_per_minute", self._tokens)):
            wait_s = 0.0 if bucket is None else bucket.wait_s(1.0, now)
            if bucket is not None and wait_s > (0.0 if found is None else found.wait_s):
                found = Reached(wait_s, key, bucket.size)
        return found

    def take(self, requests: float, tokens: float, now: float, at: float | None = None) -> None:
        """Count so many, whether they are left or not. Negative ones are returned. `at`: when they were used; None:
        now.
        """
        at = now if at is None else at
        if requests and self._requests is not None:
            self._requests.take(requests, at)
        if tokens and self._tokens is not None:
            self._tokens.take(tokens, at)
        if tokens and self._day is not None:
            self._day.take(tokens, now)

    def responded(self, tokens: int) -> None:
        self.mean_response_tokens += STEP * (tokens - self.mean_response_tokens)

    def use(self, now: float) -> Use:
        requests = 0.0 if self._requests is None else self._requests.used(now)
        tokens = 0.0 if self._tokens is None else self._tokens.used(now)
        return Use(now, requests, tokens, None if self._day is None else self._day.spent(now))

    def resume(self, use: Use, now: float) -> None:
        """Count what was used before, of the limits that there are now."""
        age_s = max(0.0, now - use.at)
        if self._requests is not None:
            self._requests.resume(use.requests, age_s, now)
        if self._tokens is not None:
            self._tokens.resume(use.tokens, age_s, now)
        if self._day is not None and use.day is not None:
            self._day.resume(use.day, now)

    def used_elsewhere(self, use: Use, now: float) -> None:
        """Another replica knows of this use. What is known here is part of it, or the other way round."""
        for bucket, used in ((self._requests, use.requests), (self._tokens, use.tokens)):
            if bucket is not None:
                bucket.take(max(0.0, min(used, bucket.size) - bucket.used(now)), now)
        if self._day is not None and use.day is not None:
            self._day.at_least(use.day, now)

    def rates(self, now: float) -> Rates:
        """What is left of the limits per minute."""
        return _rate(self._requests, now), _rate(self._tokens, now)

    def used(self, in_flight: int, now: float) -> tuple[tuple[str, float], ...]:
        """The used share of each limit that there is, 0 or more, by the name of its key in the settings."""
        shares: list[tuple[str, float]] = []
        if self.max_in_flight is not None:
            shares.append(("max_in_flight", in_flight / self.max_in_flight))
        if self._requests is not None:
            shares.append(("requests_per_minute", self._requests.used(now) / self._requests.size))
        if self._tokens is not None:
            shares.append(("tokens_per_minute", self._tokens.used(now) / self._tokens.size))
        if self._day is not None:
            shares.append(("tokens_per_day", self._day.used(now) / self._day.size))
        return tuple(shares)


def _rate(bucket: Bucket | None, now: float) -> Rate | None:
    if bucket is None:
        return None
    wait_s = bucket.wait_s(bucket.size, now)
    return bucket.size, bucket.size * (1.0 - wait_s / MINUTE_S), wait_s
