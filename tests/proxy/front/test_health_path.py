# SPDX-License-Identifier: Apache-2.0
"""GET /health where clients connect: load generators, SDKs and load balancers in front ask a model server there."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256

import pytest

from lbproxy.proxy.request.keys import KeyRing
from tests.support.aio import run, until
from tests.support.endpoint import OK, ScriptedEndpoint
from tests.support.rig import Reply, rig


def code(reply: Reply) -> str:
    found: str = json.loads(reply.body)["error"]["code"]
    return found


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def test_health_is_lbproxys_own_and_says_whether_requests_find_an_endpoint() -> None:
    """guidellm begins with it, and gives up at a 404."""

    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            reply = await it.ask(get("/health"))
            assert (reply.status, json.loads(reply.body)) == (200, {"status": "ok"})
            client = await it.connect()
            client.send(get("/health", "HEAD") + get("/health"))
            assert (await client.reply(bodiless=True)).status == 200
            assert (await client.reply()).status == 200
            assert not endpoint.requests
            assert {record.route for record in it.records.requests} == {"health"}
        async with rig("http://127.0.0.1:9", up=False) as it:
            reply = await it.ask(get("/health"))
            assert (reply.status, code(reply)) == (503, "no_endpoints")

    run(main())


@pytest.mark.parametrize("method", ["POST", "OPTIONS", "DELETE"])
def test_nothing_else_passes_without_a_key_on_that_path(method: str) -> None:
    """A check in front has no key. What is not a check would reach an endpoint with it."""

    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            it.front.requests.keys = KeyRing({sha256(b"sk-0123456789abcdef").digest(): "a"})
            assert (await it.ask(get("/health"))).status == 200
            assert (await it.ask(get("/health", method))).status == 405
            for path in ("/health/", "//health", "/%68ealth", "/health_generate", "/v1/health"):
                assert (await it.ask(get(path))).status == 401
            assert not endpoint.requests

    run(main())


def test_a_lame_duck_is_not_healthy_but_serves() -> None:
    """A load balancer in front has to see it before connections are refused."""

    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            leaving = asyncio.ensure_future(it.front.lame_duck(30.0, accepting=True))
            await until(lambda: it.front.draining)
            reply = await it.ask(get("/health"))
            assert (reply.status, code(reply)) == (503, "lb_draining")
            assert (await it.ask(get("/v1/models"))).status == 200
            leaving.cancel()

    run(main())
