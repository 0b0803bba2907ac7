# SPDX-License-Identifier: Apache-2.0
"""What /metrics says of requests that were placed in a special way: split, or above the lowest tier of endpoints.

Where all endpoints are of one tier and have no limits of their own there are no families of tiers; where none has a
role, none of split requests. Labels are names of endpoints, numbers of tiers, words of the core and of this module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from prometheus_client.core import Metric

from lbproxy.control.families.common import add_to, counter, counters, gauges, histogram, keep
from lbproxy.control.families.endpoints import one_per_name
from lbproxy.control.families.histogram import Histogram
from lbproxy.core.endpoints.state import EndpointSnapshot
from lbproxy.core.engines.handover import Role
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.observed.snapshot import PoolSnapshot
from lbproxy.core.queue.ticket import Overflow

FIRST_LEG_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Seconds. A short prompt that is cached takes some 10 ms, 100,000 tokens take about 10 s."""
RESULTS: Final = ("completed", "failed", "refused")
"""Results of a first leg: see `RequestRecord.first_legs`."""


class PlacementCounts:
    """Counts requests that were split, and those that overflowed: once per request, as in `telemetry.telemetry`."""

    def __init__(self) -> None:
        self._overflow: defaultdict[tuple[int, str], int] = defaultdict(int)
        """Requests above tier 1, by the tier of the last attempt, and the reason."""
        self._split: defaultdict[str, int] = defaultdict(int)
        """Split requests, by the prefill endpoint of the last attempt."""
        self._total = 0
        """Split requests, those of endpoints that are gone too."""
        self._first_legs: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._times = Histogram(FIRST_LEG_BUCKETS)

    def count(self, record: RequestRecord) -> None:
        """Count a request with a first leg, or that was placed above tier 1."""
        if record.overflow is not None and record.placed_at is not None:
            self._overflow[record.tier, record.overflow] += 1
        for leg in record.first_legs:
            self._first_legs[leg] += 1
        if record.prefill is not None:
            self._total += 1
            self._split[record.prefill] += 1
            if record.prefill_s is not None:
                self._times.observe(record.prefill_s)

    def forget_the_gone(self, names: Collection[str]) -> None:
        keep(self._split, lambda name: name in names)
        keep(self._first_legs, lambda key: key[0] in names)

    def families(self, pool: PoolSnapshot, placed: int) -> Iterator[Metric]:
        """Nothing, where there is nothing special. `placed`: requests that were, split or not."""
        endpoints = one_per_name(pool.endpoints)
        if self._total or any(one.handover.role is not Role.BOTH for one in pool.endpoints):
            yield from self._split_families(pool, endpoints, placed)
        tiers = sorted({one.endpoint.tier for one in endpoints})
        if len(tiers) > 1 or self._overflow:
            counts = {(tier, one.value): 0 for tier in tiers[1:] for one in Overflow} | self._overflow
            text = "Requests whose last attempt was above the lowest tier that serves their model"
            rows = [((str(tier), reason), count) for (tier, reason), count in counts.items()]
            yield counters("overflow_requests", text, ("tier", "reason"), rows)
            text = "Tier of the endpoint"
            yield gauges(
                "endpoint_tier", text, ("endpoint",), [((e.endpoint.name,), e.endpoint.tier) for e in endpoints]
            )
        used = [((one.endpoint.name, limit), share) for one in endpoints for limit, share in one.limits_used]
        if used:
            text = "Used share of each of the endpoint's own limits, 0 or more"
            yield gauges("endpoint_limit_used_ratio", text, ("endpoint", "limit"), used)

    def _split_families(
        self, pool: PoolSnapshot, endpoints: Sequence[EndpointSnapshot], placed: int
    ) -> Iterator[Metric]:
        """Where some endpoint has a role, or had."""
        parts = [((one.endpoint.name, one.handover.role.value, one.handover.connector or ""), 1.0) for one in endpoints]
        text = "Always 1; prefill, decode or both; an unknown connector is empty"
        yield gauges("endpoint_role", text, ("endpoint", "role", "connector"), parts)
        text = "Requests whose last attempt was split, by the endpoint that computed their prompt"
        prefills = [one.endpoint.name for one in endpoints if one.handover.role is Role.PREFILL]
        split = dict.fromkeys(prefills, 0) | self._split
        yield counters("split_requests", text, ("endpoint",), [((name,), count) for name, count in split.items()])
        text = "Requests whose last attempt was not split, since the start"
        yield counter("whole_requests", text, placed - self._total)
        text = "First legs of split requests, by result"
        legs = {(name, result): 0 for name in prefills for result in RESULTS} | self._first_legs
        yield counters("prefill_legs", text, ("endpoint", "result"), legs.items())
        times = histogram(
            "prefill_leg_seconds", "How long the first legs of split requests took, from their placement", ()
        )
        add_to(times, [], self._times)
        yield times
        learned = pool.transfer
        text = "Learned time from the placement of a second leg to its first byte: the constant part"
        fixed = None if learned is None else learned.fixed_ms / 1000.0
        yield gauges("transfer_fixed_seconds", text, (), [((), fixed)])
        text = "Learned time from the placement of a second leg to its first byte, for each transferred token"
        token = None if learned is None else learned.ms_per_token / 1000.0
        yield gauges("transfer_token_seconds", text, (), [((), token)])
