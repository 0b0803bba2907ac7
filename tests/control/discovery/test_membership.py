# SPDX-License-Identifier: Apache-2.0
"""Many endpoints that join together do so in several turns of the event loop."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from lbproxy.control.discovery import membership
from lbproxy.control.discovery.membership import APART_S, JOINED_AT_ONCE, MAX_REST_S, REST_S, Membership, Watches
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.endpoints.endpoint_set import EndpointChanges
from lbproxy.driver.runtime import Runtime
from tests.support.aio import run, until
from tests.support.pool import make_balancer, spec

MANY = [spec(n) for n in range(1, 3 * JOINED_AT_ONCE)]


class Followed(Watches):
    """Keeps what it is to follow."""

    def __init__(self) -> None:
        self.changes: list[EndpointChanges] = []

    def follow(self, changes: EndpointChanges) -> None:
        self.changes.append(changes)


def names(runtime: Runtime) -> list[str]:
    return [one.endpoint.name for one in runtime.snapshot().endpoints]


def test_of_many_new_endpoints_the_last_join_later() -> None:
    async def main() -> None:
        runtime, watches = Runtime(make_balancer()), Followed()
        members, changes = Membership(runtime, watches), watches.changes
        members.adopt(MANY[:3])
        assert [len(one.added) for one in changes] == [3]
        members.adopt(MANY[1:])
        assert len(names(runtime)) == 3
        await asyncio.sleep(0)
        assert len(names(runtime)) == 2 + JOINED_AT_ONCE, "those that were there stay"
        assert [len(one.removed) for one in changes] == [0, 1]
        await until(lambda: len(names(runtime)) == len(MANY) - 1)
        assert names(runtime) == [one.name for one in MANY[1:]], "in their order"
        assert max(len(one.added) for one in changes) == JOINED_AT_ONCE
        assert sum(len(one.added) for one in changes) == len(MANY)

    run(main())


def test_what_comes_meanwhile_counts_instead() -> None:
    async def main() -> None:
        runtime = Runtime(make_balancer())
        members = Membership(runtime, Followed())
        members.adopt(MANY)
        await asyncio.sleep(0)
        assert len(names(runtime)) == JOINED_AT_ONCE
        members.adopt(MANY[-2:])
        assert len(names(runtime)) == 2
        await asyncio.sleep(3 * APART_S)
        assert names(runtime) == [one.name for one in MANY[-2:]]

    run(main())


def test_of_a_large_set_changes_that_come_fast_are_made_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes time for each endpoint: of 1,000, ten in a second took a twentieth of a processor."""

    async def main() -> None:
        runtime, watches = Runtime(make_balancer()), Followed()
        members, changes = Membership(runtime, watches), watches.changes
        members.begin(MANY[:150])
        asked = there = 0

        def complete() -> list[EndpointSpec]:
            nonlocal asked
            asked += 1
            return MANY[:there]

        for there in range(151, 171):  # noqa: B007 - `complete` reads it
            members.adopt_soon(complete)
        assert (asked, len(changes)) == (1, 2), "the first at once; the others were not even looked at"
        await until(lambda: len(changes) == 3)
        assert (asked, len(names(runtime))) == (2, 170)
        there = 160
        members.adopt_soon(complete)
        members.adopt(MANY[:155])
        members.adopt_soon(complete)
        members.found_ranks(changes[0].added[0], 2)
        assert (asked, len(names(runtime))) == (2, 155), "a reload counts at once, and instead"
        await until(lambda: len(changes) == 5)
        assert (asked, len(names(runtime))) == (3, 161), "and nothing is lost"
        members.adopt(MANY[:100])
        for there in range(90, 60, -1):  # noqa: B007 - as above
            members.adopt_soon(complete)
        assert len(names(runtime)) == 62, "of a small set each at once"

    run(main())


def test_a_server_whose_ranks_change_for_ever_gets_few_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ends up to 64 endpoints with all that is known of them, and begins as many: half a core was gone for it."""
    clock = [1000.0]

    def changes(watches: Followed) -> int:
        return sum(bool(one.added) for one in watches.changes)

    async def main() -> None:
        runtime, watches = Runtime(make_balancer()), Followed()
        monkeypatch.setattr(runtime, "now", lambda: clock[0])
        members = Membership(runtime, watches)
        members.begin([spec(1), spec(2)])
        endpoint = next(one.endpoint for one in runtime.snapshot().endpoints if one.endpoint.name == "e1")
        begun = changes(watches)
        for n in range(3600):
            members.found_ranks(endpoint, 64 if n % 2 else 2)
            clock[0] += 1.0
        assert 3 <= changes(watches) - begun <= 12, "in an hour"
        clock[0] += 3 * MAX_REST_S
        members.found_ranks(endpoint, 8)
        assert len(names(runtime)) == 9, "after a long rest it is believed at once"
        members.found_ranks(endpoint, 4)
        clock[0] += REST_S
        members.found_ranks(endpoint, 4)
        assert len(names(runtime)) == 5, "and again soon after"

    run(main())


def test_ranks_of_the_settings_and_of_the_metrics_are_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "REST_S", 0.0)

    async def main() -> None:
        runtime, watches = Runtime(make_balancer()), Followed()
        members = Membership(runtime, watches)
        members.begin([replace(spec(1), ranks=2), spec(2), replace(spec(3), ranks=1)])
        assert names(runtime) == ["e1#0", "e1#1", "e2", "e3"]
        assert [one.endpoint.rank for one in runtime.snapshot().endpoints] == [0, 1, None, None]
        e2 = next(one.endpoint for one in runtime.snapshot().endpoints if one.endpoint.name == "e2")
        members.found_ranks(e2, 3)
        assert names(runtime) == ["e1#0", "e1#1", "e2#0", "e2#1", "e2#2", "e3"]
        assert [(len(one.added), len(one.removed)) for one in watches.changes] == [(4, 0), (3, 1)], "the rest stays"
        members.found_ranks(replace(e2, rank=0), 2)
        assert names(runtime) == ["e1#0", "e1#1", "e2#0", "e2#1", "e3"]
        members.adopt([spec(2), spec(4)])
        assert names(runtime) == ["e2#0", "e2#1", "e4"], "what its metrics show outlives other settings"
        members.adopt([spec(4)])
        members.adopt([spec(2), spec(4)])
        assert names(runtime) == ["e2", "e4"], "and nothing is kept of what left"

    run(main())


def test_the_ranks_of_a_drained_server_are_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "REST_S", 0.0)

    async def main() -> None:
        runtime = Runtime(make_balancer())
        members = Membership(runtime, Followed())
        members.begin([spec(1)])
        (whole,) = runtime.snapshot().endpoints
        runtime.drain(whole.endpoint.uid)
        members.found_ranks(whole.endpoint, 2)
        first, second = runtime.snapshot().endpoints
        assert (first.draining, second.draining) == (True, True)
        runtime.drain(first.endpoint.uid, draining=False)
        members.found_ranks(first.endpoint, 3)
        assert [one.draining for one in runtime.snapshot().endpoints] == [False, True, False]

    run(main())
