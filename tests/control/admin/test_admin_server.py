# SPDX-License-Identifier: Apache-2.0
"""The admin listener, asked by a client that is not ours."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import AbstractAsyncContextManager

import httpx
import pytest

from lbproxy.control.admin.server import Admin
from lbproxy.core.endpoints.endpoint_set import EndpointSet
from lbproxy.core.requests.request import InferenceRequest
from tests.control.rig import Rig, admin_site, rig
from tests.support.aio import run
from tests.support.pool import submit


class FakeFront:
    draining = False
    url: str | None = "http://127.0.0.1:8080"


class FakePages:
    def __init__(self) -> None:
        self.broken = False

    async def page(self) -> tuple[bytes, str]:
        if self.broken:
            raise RuntimeError("a defect")
        return b"lbproxy_up 1\n", "text/plain; version=0.0.4; charset=utf-8"


class Site:
    def __init__(self, pool: Rig) -> None:
        self.rig = pool
        self.front = FakeFront()
        self.pages = FakePages()
        self.admin = Admin(pool.runtime, self.front, self.pages)


def site() -> AbstractAsyncContextManager[tuple[Site, httpx.AsyncClient]]:
    return admin_site(Site)


def test_it_lives() -> None:
    async def main() -> None:
        async with site() as (_, client):
            answer = await client.get("/healthz")
            assert (answer.status_code, answer.text) == (200, "ok")
            assert answer.headers["server"] == "lbproxy"

    run(main())


@pytest.mark.parametrize(
    "data", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nX A: 1\r\n\r\n", b"\x16\x03\x01\r\n\r\n"]
)
def test_what_is_no_request_is_refused_in_the_shape_of_all_errors(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with site() as (made, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", made.admin.port)
            writer.write(data)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            assert head[:13] in {b"HTTP/1.0 400 ", b"HTTP/1.1 400 "}
            assert b"\r\nx-lbproxy-reason: bad_request\r\n" in head + b"\r\n"
            assert b"\r\nServer: lbproxy" in head
            assert json.loads(body)["error"]["code"] == "bad_request"
            assert not caplog.records

    run(main())


def test_errors_say_why_in_a_field() -> None:
    async def main() -> None:
        async with site() as (made, client):
            made.pages.broken = True
            for method, path, reason in (
                ("GET", "/nowhere", "unknown_url"),
                ("POST", "/healthz", "method_not_allowed"),
                ("GET", "/metrics", "internal_error"),
            ):
                answer = await client.request(method, path)
                assert answer.headers["x-lbproxy-reason"] == reason == answer.json()["error"]["code"]
            refused = await client.get("/admin/state", headers={"host": "evil.example"})
            assert refused.headers["x-lbproxy-reason"] == "forbidden"

    run(main())


def test_it_is_ready_while_an_endpoint_takes_requests() -> None:
    async def main() -> None:
        async with site() as (made, client):
            pool = made.rig
            answer = await client.get("/readyz")
            assert (answer.status_code, answer.headers["x-lbproxy-reason"]) == (503, "no_endpoints")
            counts = {"serving": 0, "starting": 2, "up": 0, "ejected": 0, "half_open": 0, "down": 0}
            assert answer.json() == {"ready": False, "draining": False, "endpoints": counts}
            pool.runtime.report_health(pool.endpoints[0].uid, True, "test")
            answer = await client.get("/readyz")
            assert answer.status_code == 200
            assert answer.json()["endpoints"] == {**counts, "serving": 1, "starting": 1, "up": 1}
            made.front.draining = True
            answer = await client.get("/readyz")
            assert answer.status_code == 503
            assert answer.json()["draining"] is True
            made.front.draining = False
            made.front.url = None
            assert (await client.get("/readyz")).status_code == 503, "nobody accepts connections"
            made.front.url = FakeFront.url
            assert (await client.get("/readyz")).status_code == 200
            pool.take_down(pool.endpoints[0])
            assert (await client.get("/readyz")).status_code == 503

    run(main())


def test_who_asks_whether_it_is_ready_gets_no_snapshot_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may ask, every second, and one takes some 10 µs for each endpoint."""

    async def main() -> None:
        async with site() as (made, client):
            made.rig.bring_up()
            monkeypatch.delattr(EndpointSet, "snapshot")
            assert (await client.get("/readyz")).json()["endpoints"]["serving"] == 2

    run(main())


def test_an_endpoint_that_is_leaving_makes_nobody_ready() -> None:
    """It is up, and finishes what it has, but takes nothing new."""

    async def main() -> None:
        async with site() as (made, client):
            pool = made.rig
            pool.bring_up()
            submit(pool.runtime, InferenceRequest("r", None))
            pool.runtime.set_endpoints([])
            answer = await client.get("/readyz")
            assert answer.status_code == 503
            assert answer.json()["endpoints"]["up"] == 1

    run(main())


def test_metrics_come_as_they_are() -> None:
    async def main() -> None:
        async with site() as (_, client):
            answer = await client.get("/metrics")
            assert answer.content == b"lbproxy_up 1\n"
            assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"

    run(main())


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
def test_head_is_get_without_a_body(path: str) -> None:
    async def main() -> None:
        async with site() as (_, client):
            get, head = await client.get(path), await client.head(path)
            assert head.status_code == get.status_code
            assert head.content == b""
            assert head.headers["content-length"] == str(len(get.content))

    run(main())


def test_what_is_not_there_is_refused_in_json() -> None:
    async def main() -> None:
        async with site() as (_, client):
            answer = await client.get("/admin/config")
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "unknown_url"
            answer = await client.post("/metrics", content=b"x" * 100_000)
            assert answer.status_code == 405
            assert answer.headers["allow"] == "GET, HEAD"
            assert answer.json()["error"]["code"] == "method_not_allowed"

    run(main())


def test_a_defect_is_a_500_without_details(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with site() as (made, client):
            made.pages.broken = True
            answer = await client.get("/metrics")
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "internal_error"
            assert "defect" not in answer.text

    run(main())
    assert [(one.levelno, one.message) for one in caplog.records] == [(logging.ERROR, "admin /metrics failed")]


def test_closing_one_that_was_never_started_is_fine() -> None:
    async def main() -> None:
        async with rig() as pool:
            await Site(pool).admin.close()

    run(main())
