# SPDX-License-Identifier: Apache-2.0
"""What a registration leaves alone: it is no reload."""

from __future__ import annotations

import asyncio

import pytest

from lbproxy.config.parse import parse
from lbproxy.control.discovery import membership
from lbproxy.net.listening.inherit import Inherited
from lbproxy.net.listening.notify import Notifier
from lbproxy.processes.app import Orders, Proxy
from tests.support.aio import run

SETTINGS = "\n".join(
    [
        "listen: 127.0.0.1:0",
        "admin: 127.0.0.1:0",
        "endpoints: [{url: 'dns+http://localhost:9', health: null, metrics: null}]",
        "drain: {lame_duck: 0s, deadline: 1s}",
    ]
)


def entry(n: int) -> dict[str, object]:
    return {"url": f"http://127.0.0.1:{n}", "name": f"gpu{n}", "health": None, "metrics": None}


def test_a_registration_reads_no_file_and_no_name_and_restarts_no_loop() -> None:
    """As a reload it took 30 ms beside 1,000 leases, and each had every name resolved again."""

    async def main() -> None:
        proxy, orders, ready = Proxy(parse(SETTINGS, environ={}), Notifier(None)), Orders(), asyncio.Event()
        told: list[int] = []
        orders.overlaid = lambda: told.append(len(proxy.overlay.added))
        running = asyncio.create_task(proxy.run(Inherited(), orders, lambda _: ready.set()))
        await ready.wait()
        left_alone = proxy.discovery, [*proxy.sources], proxy.plane, proxy.scraping, proxy.runtime.balancer
        for n in (1, 2, 3):
            assert await proxy.register_endpoint(entry(n), ttl_s=60.0) == (f"gpu{n}", True)
        assert await proxy.register_endpoint(entry(1), ttl_s=60.0) == ("gpu1", False)
        assert await proxy.register_endpoint(entry(2) | {"url": "http://127.0.0.1:9000"}, ttl_s=60.0) == ("gpu2", False)
        assert await proxy.remove_endpoint("gpu1") is False
        urls = {one.endpoint.base_url for one in proxy.runtime.snapshot().endpoints if not one.removed}
        assert urls >= {"http://127.0.0.1:3", "http://127.0.0.1:9000"}
        assert urls.isdisjoint({"http://127.0.0.1:1", "http://127.0.0.1:2"})
        assert (proxy.discovery, proxy.sources, proxy.plane, proxy.scraping, proxy.runtime.balancer) == left_alone
        assert not any(one.done() for one in proxy.sources)
        assert told == [1, 2, 3, 3, 2], "a renewal changes nothing"
        name = {"url": "dns+http://localhost:10", "name": "name", "health": None, "metrics": None}
        assert await proxy.register_endpoint(name, ttl_s=60.0) == ("name", True)
        assert len(proxy.sources) == len(left_alone[1]) + 1, "and one that is a name is followed"
        orders.hurry.set()
        orders.stop.set()
        await running
        await proxy.close()

    run(main())


def test_a_server_that_leaves_a_large_set_gets_nothing_any_more_once_it_was_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stops then, though changes of a large set are made together."""
    monkeypatch.setattr(membership, "MANY", 1)
    monkeypatch.setattr(membership, "PAUSE_S", 0.1)

    async def main() -> None:
        proxy, orders, ready = Proxy(parse(SETTINGS, environ={}), Notifier(None)), Orders(), asyncio.Event()
        running = asyncio.create_task(proxy.run(Inherited(), orders, lambda _: ready.set()))
        await ready.wait()

        def names() -> set[str]:
            return {one.endpoint.name for one in proxy.runtime.snapshot().endpoints if not one.removed}

        for n in (1, 2, 3):
            await proxy.register_endpoint(entry(n), ttl_s=60.0)
        assert "gpu3" not in names(), "soon"
        await proxy.remove_endpoint("gpu1", registered_by="http://127.0.0.1:1")
        assert names() >= {"gpu2", "gpu3"}
        assert "gpu1" not in names()
        orders.hurry.set()
        orders.stop.set()
        await running
        await proxy.close()

    run(main())
