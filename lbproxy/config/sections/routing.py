# SPDX-License-Identifier: Apache-2.0
"""Settings of where a request goes, how long it waits for that, where it goes when that fails, and what is kept of what
was learned."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import ValidationInfo, field_validator

from lbproxy.config.section import Section
from lbproxy.config.values import Quantity, SplitRule, Timeout, count, duration, expected, size

PolicyName: TypeAlias = Literal[
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
    """How an endpoint is chosen for a request."""

    policy: PolicyName = "adaptive"
    """The routing policy. adaptive predicts the cost of a request on each endpoint; least-request counts requests."""
    scorers: dict[ScorerName, Weight] | None = None
    """Only with policy `weighted`: scorer -> weight above 0. Only the proportions of the weights matter."""
    split: SplitRule = "priced"  # type: ignore[assignment]  # read like what a file says
    """Where prefill and decode are apart: `priced` = a request is split where that costs less, under policy adaptive,
    and always under others; `always`; `never`; or a number: if more tokens of its prompt are cached nowhere."""
    prefix_memory: Annotated[int, size("1MiB", "1024GiB")] = 600 * 1024**2
    """Memory for the index of the endpoints' prefix caches, for policies that use it: at most 600 bytes for each block
    of 1 KiB of prompts, a tenth of that where they are long. When it is full, the oldest entries are removed."""

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
    """Requests that may wait; one more gets 429. 0 = no queue."""
    queue_bytes: Annotated[int, size("0", "1024GiB")] = 256 * 1024**2
    """Bytes of the bodies of all waiting requests: long prompts fill memory before they reach the limit of requests."""
    queue_timeout: Timeout = 30.0
    """Seconds that a request may wait before it gets 429: by then most clients have given up."""
    max_in_flight_per_endpoint: Annotated[int, count("1", "1000000")] | None = None
    """Requests in flight at one endpoint; more wait in the queue. null = no fixed limit."""
    hold: bool | None = None
    """Hold a request in the queue while its best endpoint is full (docs/routing.md, Room), and place it when there is
    room. For policy adaptive. null = true, but false with order fcfs."""
    order: Literal["shortest", "fcfs"] = "shortest"
    """The order of waiting requests: least prefill work first, where age counts too (if the policy knows the work), or
    first come, first served. A higher priority goes before both."""


class OverflowSettings(Section):
    """When requests go to endpoints of a higher tier (docs/overflow.md)."""

    after: Annotated[float, duration("0s", "1h")] | None = None
    """A request goes to a higher tier if it would wait longer than this for a lower one, as predicted, or has waited so
    long. null = only if no endpoint of a lower tier can take it: all are down, or it would be refused."""


class RetrySettings(Section):
    """Retries after an endpoint fails a request before the first byte of the response."""

    attempts: Annotated[int, count("1", "10")] = 3
    """Attempts in total, each on another endpoint. Client libraries multiply this by their own three."""
    budget_ratio: Annotated[float, Quantity("0", "10", "a ratio", whole=False)] = 0.2
    """Retry budget: retries per request of the last 10 s, for the whole pool. Retries after a failed connect are
    free."""
    budget_per_second: Annotated[float, Quantity("0", "100000", "a rate", whole=False)] = 10.0
    """Additional retries per second, so that a pool with few requests can retry too."""


class StateSettings(Section):
    """What survives a restart of lbproxy, in a file: what was learned (by policies that learn, such as adaptive), what
    was used of endpoints' limits per minute and day, and how long servers take to wake."""

    file: str | None = None
    """The file: read at the start, written regularly and at the end; its folder must be writable. If it is lost,
    lbproxy starts as new. null = nothing is kept."""
    prefixes: bool = True
    """Keep which prompts each endpoint has cached too, as hashes; for 5 minutes. Some 12 MB if `prefix_memory` is full
    of long prompts, at most 100 MB."""
    interval: Annotated[float, duration("1s", "1h")] = 30.0
    """Seconds between two writes."""

    @field_validator("file", mode="after")
    @classmethod
    def _check_path(cls, value: str | None) -> str | None:
        if value is not None and (not value or "\0" in value or value.endswith("/")):
            raise expected("the path of a file")
        return value
