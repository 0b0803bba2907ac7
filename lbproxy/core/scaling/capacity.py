# SPDX-License-Identifier: Apache-2.0
"""How many endpoints a load needs: the formula, without memory (docs/autoscaling.md has it in words).

Of each second of an endpoint a part goes to prefills, the rest to steps that give each running request one token. With
`x` requests a second there, of `work` tokens to prefill and `output` tokens to generate, it runs

    prefill = x * work * prefill_s
    running = x * output * step_s / (1 - prefill - x * output * token_s)  +  x * other_s

requests. These are at most `max_running`, by slots or by cache space. What waits is a queue before `n` servers (for
prefills) and one before `n * max_running` (for slots), by Sakasegawa's approximation (An approximation formula
Lq = a * rho^b / (1 - rho), 1977): the 95th percentile of both waits together must be within the target.
"""

from __future__ import annotations

from math import inf, log, sqrt
from typing import Final, NamedTuple

MAX_ENDPOINTS: Final = 1000
"""More are never recommended."""
MAX_SHARE: Final = 0.95
"""The most of prefill, decode and slots that is used: what is learned is not exact, and a queue without end follows."""
LATE: Final = 0.05
"""The share of requests that may wait longer than the target."""


class Load(NamedTuple):
    """What clients ask of a model, all endpoints together."""

    rate: float
    """Requests a second."""
    work: float
    """Tokens to prefill of each, without what is cached."""
    output: float
    """Tokens to generate of each."""


class Capacity(NamedTuple):
    """What one endpoint does, the mean of them."""

    prefill_s: float
    """For each token of work."""
    step_s: float
    """From token to token if one request runs."""
    token_s: float
    """What each further token in a step adds."""
    other_s: float
    """For which each request is there besides, whatever else runs."""
    max_running: float
    """Requests; infinite: not known."""


class EndpointUse(NamedTuple):
    """What one of `n` endpoints is used for under a load. Shares may exceed 1: then the load is too much."""

    prefill: float
    """Share of its time."""
    decode: float
    """Share of the rest that does not depend on how many run."""
    running: float
    """Requests, on average; infinite: they only grow."""
    slots: float
    """Share of `max_running`."""


def use_of(load: Load, capacity: Capacity, endpoints: float) -> EndpointUse:
    rate = load.rate / endpoints
    prefill = rate * load.work * capacity.prefill_s
    tokens = rate * load.output
    free = 1.0 - prefill
    decode = tokens * capacity.token_s / free if free > 0.0 else inf
    running = inf
    if decode < 1.0:
        running = tokens * capacity.step_s / (free * (1.0 - decode)) + rate * capacity.other_s
    return EndpointUse(prefill, decode, running, running / capacity.max_running if running < inf else inf)


def wait_p95_s(load: Load, capacity: Capacity, endpoints: float) -> float:
    """The 95th percentile of how long requests wait; infinite: longer and longer."""
    use = use_of(load, capacity, endpoints)
    if max(use.prefill, use.decode, use.slots) >= MAX_SHARE:
        return inf
    wait_s = _queue_p95_s(use.prefill, endpoints, load.work * capacity.prefill_s)
    if capacity.max_running < inf and load.rate:
        wait_s += _queue_p95_s(use.slots, endpoints * capacity.max_running, use.running * endpoints / load.rate)
    return wait_s


def _queue_p95_s(share: float, servers: float, service_s: float) -> float:
    """Of a queue before so many servers, which are busy for this share of their time."""
    if share <= 0.0:
        return 0.0
    waits = share ** (sqrt(2.0 * (servers + 1.0)) - 1.0)  # the share of requests that wait at all
    return log(waits / LATE) * service_s / (servers * (1.0 - share)) if waits > LATE else 0.0


def endpoints_for(load: Load, capacity: Capacity, target_s: float) -> int:
    """The least number of endpoints under which the wait is within the target; 0 without load, at most
    `MAX_ENDPOINTS`.
    """
    if load.rate <= 0.0:
        return 0
    least, most = 1, MAX_ENDPOINTS
    while least < most:  # more endpoints never wait longer
        middle = (least + most) // 2
        if wait_p95_s(load, capacity, middle) <= target_s:
            most = middle
        else:
            least = middle + 1
    return least
