# SPDX-License-Identifier: Apache-2.0
"""What /metrics says of requests that were placed in a special way: split, or above the lowest tier of endpoints.

Where all endpoints are of one tier and have no limits of their own there are no families of tiers. Labels are names of
endpoints, numbers of tiers and words of the core.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from prometheus_client.core import Metric

from lbproxy.control.families.common import counters, gauges
from lbproxy.control.families.endpoints import one_per_name
from lbproxy.control.families.splits import SplitCounts
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.observed.snapshot import PoolSnapshot
from lbproxy.core.queue.ticket import Overflow


class PlacementCounts:
    """Counts requests that were split, and those that overflowed."""

    def __init__(self) -> None:
        self._split = SplitCounts()
        self._overflow: defaultdict[tuple[int, str], int] = defaultdict(int)
        """Requests above tier 1, by the tier of the last attempt, and the reason."""

    def count(self, record: RequestRecord) -> None:
        """Count a request with a first leg, or that was placed above tier 1."""
        if record.overflow is not None and record.placed_at is not None:
            self._overflow[record.tier, record.overflow] += 1
        if record.prefill is not None or record.first_legs:
            self._split.count(record)

    def forget_the_gone(self, names: Collection[str]) -> None:
        self._split.forget_the_gone(names)

    def families(self, pool: PoolSnapshot, placed: int) -> Iterator[Metric]:
        """Nothing, where there is nothing special. `placed`: requests that were."""
        yield from self._split.families(pool, placed)
        endpoints = one_per_name(pool.endpoints)
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
