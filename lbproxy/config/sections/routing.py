# SPDX-License-Identifier: Apache-2.0
"""Settings of where a request goes, how long it waits for that, where it goes when that fails, and what is kept of what
was learned."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from lbproxy.config.section import Section
from lbproxy.config.values import Quantity, SplitRule, Timeout, count, duration, rule, size

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
    """adaptive predicts the cost of a request on each endpoint. All of them: docs/routing.md."""
    scorers: dict[ScorerName, Weight] | None = None
    """Only with policy `weighted`: scorers and weights, of which only proportions matter."""
    split: SplitRule = "priced"  # type: ignore[assignment]  # read like what a file says
    """Whether prefill and decode are apart: `priced` = where that costs less (policy adaptive; others always); a
    number: if more tokens of the prompt are cached nowhere."""
    prefix_memory: Annotated[int, size("1MiB", "1024GiB")] = 600 * 1024**2
    """For the index of the endpoints' prefix caches, at most 600 bytes for each 1 KiB of prompts. When it is full, the
    oldest entries go."""

    _names_some = rule(
        "scorers",
        "scorer names with weights, because policy is weighted",
        lambda scorers, other: other("policy") == "weighted" and not scorers,
    )
    _belong_to_weighted = rule(
        "scorers",
        "nothing: scorers are for policy weighted only",
        lambda scorers, other: other("policy", "weighted") != "weighted" and scorers is not None,
    )


class AdmissionSettings(Section):
    """The queue of requests that no endpoint has room for."""

    queue_requests: Annotated[int, count("0", "1000000")] = 1024
    """Requests that may wait; one more gets 429. 0 = no queue."""
    queue_bytes: Annotated[int, size("0", "1024GiB")] = 256 * 1024**2
    """Of the bodies of all waiting requests."""
    queue_timeout: Timeout = 30.0
    """A request that waited this long gets 429: by then most clients have given up."""
    max_in_flight_per_endpoint: Annotated[int, count("1", "1000000")] | None = None
    """More wait in the queue. null = no fixed limit."""
    hold: bool | None = None
    """Hold a request while its best endpoint is full (docs/routing.md, Room). For policy adaptive. null = true, but
    false with order fcfs."""
    order: Literal["shortest", "fcfs"] = "shortest"
    """Least prefill work first, where age counts too (if the policy knows the work), or first come, first served. A
    higher priority goes before both."""


class OverflowSettings(Section):
    """When requests go to endpoints of a higher tier (docs/overflow.md)."""

    after: Annotated[float, duration("0s", "1h")] | None = None
    """A request goes to a higher tier if it would wait, or has waited, longer than this. null = only if no endpoint of
    a lower tier can take it."""


class RetrySettings(Section):
    """Retries after an endpoint fails a request before the first byte of the response."""

    attempts: Annotated[int, count("1", "10")] = 3
    """In total, each on another endpoint. Client libraries multiply this by their own three."""
    budget_ratio: Annotated[float, Quantity("0", "10", "a ratio", whole=False)] = 0.2
    """Retries per request of the last 10 s, for the whole pool. After a failed connect they are free."""
    budget_per_second: Annotated[float, Quantity("0", "100000", "a rate", whole=False)] = 10.0
    """Additional retries per second, for pools with few requests."""


class StateSettings(Section):
    """What survives a restart of lbproxy, in a file: what was learned (by policies that learn, such as adaptive), what
    was used of endpoints' limits per minute and day, how long servers take to wake, and who used how many tokens today;
    in `FILE.usage` beside it on the 400 days before."""

    file: str | None = None
    """Read at the start, written regularly and at the end, in a writable folder. null = nothing is kept."""
    prefixes: bool = True
    """Keep hashes of the prompts that each endpoint has cached, for 5 minutes: some 12 MB, at most 100."""
    interval: Annotated[float, duration("1s", "1h")] = 30.0
    """Between two writes."""

    _check_path = rule(
        "file",
        "the path of a file",
        lambda path, _: path is not None and (not path or "\0" in path or path.endswith("/")),
    )
