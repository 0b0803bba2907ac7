# SPDX-License-Identifier: Apache-2.0
"""What an endpoint's own limits leave of it: requests and tokens a minute, tokens a day, requests in flight.

Limits of a provider, or a budget. A request reserves its estimated tokens when it is placed, and what it used is
settled at its end. Each lbproxy counts its own requests only. Invariant: what a request reserved is settled once.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from lbproxy.core.capacity.bucket import Bucket, Day, Spent, resized
from lbproxy.core.requests.request import BYTES_PER_TOKEN, DECODE, InferenceRequest, Usage

FIRST_GUESS_TOKENS: Final = 200.0
"""The assumed length of a response, before there was one."""
STEP: Final = 0.1


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


class Allowance:
    """What is left of one endpoint's limits."""

    __slots__ = ("_day", "_mean_response_tokens", "_requests", "_tokens", "max_in_flight")

    def __init__(self, bounds: Bounds, now: float) -> None:
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._day: Day | None = None
        self._mean_response_tokens = FIRST_GUESS_TOKENS
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

    def expected_tokens(self, request: InferenceRequest) -> float:
        """The tokens that a request is expected to use there."""
        response, most = self._mean_response_tokens, request.max_tokens
        if most is not None and most < response:
            response = float(most)
        return _prompt_tokens(request) + response

    def wait_s(self, tokens: float, now: float) -> float:
        """In how many seconds one more request of so many tokens is within the limits per time; 0 = now."""
        wait = 0.0
        if self._requests is not None:
            wait = max(wait, self._requests.wait_s(1.0, now))
        if self._tokens is not None:
            wait = max(wait, self._tokens.wait_s(tokens, now))
        if self._day is not None:
            wait = max(wait, self._day.wait_s(tokens, now))
        return wait

    def reserve(self, request: InferenceRequest, now: float, *, counted: int | None = None) -> float:
        """Count a request that is placed there. `counted`: that was done before, with so many tokens of its response;
        None = it was not. Returns the tokens that it reserves, for `settle`.
        """
        tokens = self.expected_tokens(request)
        if counted is not None:
            return max(tokens, _prompt_tokens(request) + counted)
        if self._requests is not None:
            self._requests.take(1.0)
        self._take(tokens, now)
        return tokens

    def written(self, request: InferenceRequest, reserved: float, tokens: int, now: float) -> float:
        """Count what an unfinished response has beyond what its request reserved. `tokens`: of the response so far.
        Returns what is reserved now.
        """
        used = _prompt_tokens(request) + tokens
        if used <= reserved:
            return reserved
        self._take(used - reserved, now)
        return used

    def settle(self, reserved: float, used: float, usage: Usage | None, now: float) -> None:
        """Correct what a request reserved, by what it used: tokens of the prompt and the response. `usage`: as the
        endpoint reported it.
        """
        if usage is not None and usage.completion_tokens is not None:
            self._mean_response_tokens += STEP * (usage.completion_tokens - self._mean_response_tokens)
        self._take(used - reserved, now)

    def _take(self, tokens: float, now: float) -> None:
        if self._tokens is not None:
            self._tokens.take(tokens)
        if self._day is not None:
            self._day.take(tokens, now)

    @property
    def is_timed(self) -> bool:
        """Whether there are limits per time."""
        return self._requests is not None or self._tokens is not None or self._day is not None

    def use(self, now: float) -> Use:
        """What was used, for `resume`."""
        requests = 0.0 if self._requests is None else self._requests.used(now)
        tokens = 0.0 if self._tokens is None else self._tokens.used(now)
        return Use(now, requests, tokens, None if self._day is None else self._day.spent(now))

    def resume(self, use: Use, now: float) -> None:
        """Count what was used before, of the limits that there are now."""
        age_s = max(0.0, now - use.at)
        if self._requests is not None:
            self._requests.resume(use.requests, age_s)
        if self._tokens is not None:
            self._tokens.resume(use.tokens, age_s)
        if self._day is not None and use.day is not None:
            self._day.resume(use.day, now)

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


def _prompt_tokens(request: InferenceRequest) -> float:
    """About how many tokens the prompt has. That of a second leg was counted with the first."""
    return 0.0 if request.leg == DECODE else (request.prompt_bytes or request.body_bytes) / BYTES_PER_TOKEN
