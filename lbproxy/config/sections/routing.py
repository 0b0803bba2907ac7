"""Settings of where a request goes, how long it waits for that, and where it goes when that fails."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import ValidationInfo, field_validator

from lbproxy.config.section import Section
from lbproxy.config.values import Quantity, Timeout, count, expected, size

Policy: TypeAlias = Literal[
    "adaptive",
    "least-request",
    "round-robin",
    "random",
    "p2c",
    "gie",
    "gie-tree",
    "llm-d",
    "cache-aware",
    "prefix-hash",
    "preble",
    "dynamo",
    "lmetric",
    "min-ttft",
    "weighted",
]
ScorerName: TypeAlias = Literal["queue", "kv-utilization", "in-flight", "prefix", "lora"]
Weight: TypeAlias = Annotated[float, Quantity("0.000001", "1000000", "a weight", whole=False)]


class RoutingSettings(Section):
    """Which endpoint a request goes to."""

    policy: Policy = "adaptive"
    """How endpoints are compared. adaptive predicts what a request costs on each; least-request counts requests."""
    scorers: dict[ScorerName, Weight] | None = None
    """With policy `weighted`, and only then: scorer -> weight above 0. Only the weights' proportions matter."""
    prefix_memory: Annotated[int, size("1MiB", "1024GiB")] = 600 * 1024**2
    """What may be remembered of the endpoints' prefix caches, for policies that go by them: at most 600 bytes for
    each block of 1 KiB of prompts, a tenth of that where they are long. When it is full, the oldest is forgotten."""

    @field_validator("scorers", mode="after")
    @classmethod
    def _belong_to_weighted(cls, value: object, info: ValidationInfo) -> object:
        policy = info.data.get("policy")
        if policy == "weighted" and not value:
            raise expected("scorer names with weights, because policy is weighted")
        if policy not in (None, "weighted") and value is not None:
            raise expected("nothing: scorers are for policy weighted only")
        return value


class AdmissionSettings(Section):
    """The queue of requests that no endpoint has room for."""

    queue_requests: Annotated[int, count("0", "1000000")] = 1024
    """Requests that may wait; one more is answered 429. 0 = nobody waits."""
    queue_bytes: Annotated[int, size("0", "1024GiB")] = 256 * 1024**2
    """Bytes of the bodies that wait, all together: long prompts fill memory before they fill the count."""
    queue_timeout: Timeout = 30.0
    """Seconds a request may wait before it is answered 429: by then most callers have given up."""
    max_in_flight_per_endpoint: Annotated[int, count("1", "1000000")] | None = None
    """Requests that one endpoint gets at a time; more wait here. null = no limit: engines queue by themselves."""
    hold: bool | None = None
    """Keep requests here while the endpoint that is best for them is full (docs/routing.md), and place them when it has
    room. For policy adaptive. null = true, but false with order fcfs."""
    order: Literal["shortest", "fcfs"] = "shortest"
    """Who goes first among those that wait: the least prefill work, less with age (if the policy knows it), or first
    come, first served. A higher priority goes before both."""


class RetrySettings(Section):
    """What happens when an endpoint fails a request before the first byte of the answer."""

    attempts: Annotated[int, count("1", "10")] = 3
    """Tries in all, each on another endpoint. Client libraries multiply this by their own three."""
    budget_ratio: Annotated[float, Quantity("0", "10", "a ratio", whole=False)] = 0.2
    """Retries per request of the last 10 s, over the whole pool. Retries after a failed connect are free."""
    budget_per_second: Annotated[float, Quantity("0", "100000", "a rate", whole=False)] = 10.0
    """And so many a second besides, so that a quiet pool can retry too."""
