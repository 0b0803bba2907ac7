# SPDX-License-Identifier: Apache-2.0
"""What /metrics says of tiers and limits; nothing, where there are none."""

from __future__ import annotations

from dataclasses import replace

from lbproxy.core.endpoints.state import EndpointSnapshot
from lbproxy.core.queue.ticket import Overflow
from tests.control.telemetry.test_telemetry import read, record, seen, telemetry

FAMILIES = ("overflow_requests", "endpoint_tier", "endpoint_limit_used_ratio")


def tiered() -> tuple[EndpointSnapshot, EndpointSnapshot]:
    there = seen(2, "m", limits_used=(("requests_per_minute", 0.5), ("tokens_per_day", 1.25)))
    return seen(1, "m"), replace(there, endpoint=replace(there.endpoint, tier=2))


def test_without_tiers_there_is_none_of_these_families() -> None:
    with telemetry(seen(1, "m"), seen(2, "m")) as (made, _):
        made.ended([record(1), record(2)])
        assert not [name for name in read(made) if name.startswith(tuple(f"lbproxy_{one}" for one in FAMILIES))]


def test_requests_count_by_tier_and_reason() -> None:
    with telemetry(*tiered()) as (made, _):
        before = read(made)["lbproxy_overflow_requests_total"]
        assert before == {(one.value, "2"): 0 for one in Overflow}, "series exist before the first"
        made.ended(
            [
                record(1, endpoint="e2", tier=2, overflow="wait"),
                record(2, endpoint="e2", tier=2, overflow="wait"),
                record(3, endpoint="e2", tier=2, overflow=None),
                record(4),
            ]
        )
        page = read(made)
    assert {key: count for key, count in page["lbproxy_overflow_requests_total"].items() if count} == {("wait", "2"): 2}
    assert page["lbproxy_endpoint_tier"] == {("e1",): 1, ("e2",): 2}
    assert page["lbproxy_endpoint_limit_used_ratio"] == {
        ("e2", "requests_per_minute"): 0.5,
        ("e2", "tokens_per_day"): 1.25,
    }
