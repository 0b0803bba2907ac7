# SPDX-License-Identifier: Apache-2.0
"""One flow: its limits and what is left of them, its position in the order of service, its figures. See `flows`."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Final, NamedTuple

from lbproxy.config.sections.flows import FlowSettings
from lbproxy.core.capacity.allowance import Use
from lbproxy.core.capacity.bucket import Bucket, resized

ANONYMOUS: Final = "anonymous"
"""The flow of requests that name no flow and have no key."""
FIRST_GUESS_TOKENS: Final = 200.0
"""The assumed length of a response, before a flow had any."""
MAX_RETRY_AFTER_S: Final = 60.0


class Refusal(NamedTuple):
    """The limit of its flow by which a request was refused."""

    flow: str
    limit: str
    """In words, with its value and its key in the settings."""
    retry_after_s: float | None
    """When the limit would admit it; None: that depends on when other requests end."""

    @property
    def message(self) -> str:
        """For the client. It contains the name of the flow, which is never the key."""
        text = f"Flow `{self.flow}` has reached its limit of {self.limit}."
        return text if self.retry_after_s is None else f"{text} Try again in {ceil(self.retry_after_s)} s."


class Flow:
    """One flow. Written by `Flows` and, as to `active`, by the Balancer."""

    __slots__ = (
        "active",
        "admitted",
        "elsewhere",
        "in_flight",
        "limit",
        "limited",
        "mean_response_tokens",
        "name",
        "refused",
        "requests",
        "served_tokens",
        "tokens",
        "virtual_finish",
        "virtual_finish_at",
        "weight",
    )

    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.weight = 1.0
        self.limit: int | None = None
        """The limit of `active`."""
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.limited = False
        """It has any limit."""
        self.active = 0
        """Tickets that are placed, or wait and are not parked."""
        self.in_flight = 0
        """Those of them that are placed."""
        self.elsewhere = 0
        """`active` of all other replicas together, as far as is known (`core.replicas`)."""
        self.admitted = 0
        """Requests that its limits per minute admitted here."""
        self.virtual_finish = 0.0
        """The virtual finish time of everything it was charged, as of `virtual_finish_at`."""
        self.virtual_finish_at = now
        self.mean_response_tokens = FIRST_GUESS_TOKENS
        """Mean length of its responses."""
        self.served_tokens = 0.0
        """The total that it was charged."""
        self.refused = 0
        """Requests that were refused by one of the limits per minute."""

    @property
    def is_full(self) -> bool:
        """One more request must be parked."""
        return self.limit is not None and self.active + self.elsewhere >= self.limit

    def used(self, now: float) -> tuple[float, float]:
        """What is used of its requests and of its tokens per minute; 0 = all is left, or there is no such limit."""
        requests, tokens = self.requests, self.tokens
        return 0.0 if requests is None else requests.used(now), 0.0 if tokens is None else tokens.used(now)

    def resume(self, use: Use, now: float) -> None:
        """Count what was used before a restart."""
        for bucket, used in ((self.requests, use.requests), (self.tokens, use.tokens)):
            if bucket is not None:
                bucket.resume(used, max(0.0, now - use.at))

    def used_elsewhere(self, requests: float, tokens: float, now: float) -> None:
        """Another replica knows of this use. What is known here is part of it, or the other way round."""
        for bucket, used in ((self.requests, requests), (self.tokens, tokens)):
            if bucket is not None:
                bucket.take(max(0.0, min(used, bucket.size) - bucket.used(now)))

    def admitted_elsewhere(self, requests: int) -> None:
        """Other replicas admitted so many requests more."""
        if self.requests is not None:
            self.requests.take(float(requests))

    def concurrency_refusal(self) -> Refusal:
        """The refusal of a request that was parked until it had to end."""
        return Refusal(
            self.name, f"requests at a time, {self.limit} (`in_flight`), and this one could wait no longer", None
        )

    def reconfigure(self, rule: FlowSettings, now: float) -> None:
        """Apply this rule from now on."""
        self.weight, self.limit = rule.weight, rule.in_flight
        self.requests = resized(self.requests, rule.requests_per_minute, now)
        self.tokens = resized(self.tokens, rule.tokens_per_minute, now)
        self.limited = any(one is not None for one in (self.limit, self.requests, self.tokens))


@dataclass(frozen=True)
class FlowSnapshot:
    """One flow at one moment."""

    name: str
    weight: float
    waiting: int
    in_flight: int
    served_tokens: float
    """The total since it is known: uncached prompt tokens, and response tokens times `OUTPUT_COST`."""
    refused: int
