"""Many endpoints that join together do so in several turns of the event loop."""

from __future__ import annotations

import asyncio

from lbproxy.control.discovery.membership import JOINED_AT_ONCE, Membership
from lbproxy.control.discovery.watch import APART_S, Watches
from lbproxy.core.endpoints.endpoint_set import EndpointChanges
from lbproxy.runtime import Runtime
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
