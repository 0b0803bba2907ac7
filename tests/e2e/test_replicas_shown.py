# SPDX-License-Identifier: Apache-2.0
"""Two lbproxies over a real Redis: what the API, `lbproxy status`, /metrics and the dashboard show of each other."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import jsonschema
import pytest

from tests.e2e.test_admin_document import document_of
from tests.support.aio import run, until
from tests.support.browser import needs_browser, page
from tests.support.process import LBPROXY, lbproxy, mock
from tests.support.redis_server import RedisServer, needs_redis, redis_server
from tests.support.workers import one_process

pytestmark = [needs_redis, pytest.mark.timeout(180)]
LIVE = "document.getElementById('connection-text').textContent === 'Live'"
PASSWORD = "s3cret"


class Pair(NamedTuple):
    redis: RedisServer
    urls: list[str]
    """Of the listeners for clients."""
    admins: list[str]


@contextmanager
def pair(folder: Path) -> Iterator[Pair]:
    """lb-1 and lb-2, which know of each other, before one simulated server."""
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(folder, "--requirepass", PASSWORD))
        _, server = stack.enter_context(mock("--speed", "0.2"))
        found = []
        for name in ("lb-1", "lb-2"):
            (folder / name).mkdir()
            url = redis.url.replace("//", f"//:{PASSWORD}@")
            process, *urls = stack.enter_context(
                lbproxy(
                    folder / name, [f"{{url: '{server}', name: gpu-1}}"], f"replicas: {{url: '{url}', name: {name}}}"
                )
            )
            process.wait_for("gpu-1 serves sim")
            found.append(urls)
        listeners, admins = ([one[n] for one in found] for n in (0, 1))
        run(until(lambda: [len(exchange(one)["others"]) for one in admins] == [1, 1], "they found each other"))
        yield Pair(redis, listeners, admins)


def exchange(admin: str) -> Any:
    return httpx.get(f"{admin}/admin/state").json()["replicas"]


def elsewhere(admin: str) -> Any:
    return httpx.get(f"{admin}/admin/state").json()["endpoints"][0]["elsewhere"]


def stream(url: str) -> Any:
    body = {"model": "sim", "prompt": "x", "max_tokens": 2000, "stream": True}
    return httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60)


def test_each_shows_the_other_and_what_it_has_in_flight(tmp_path: Path) -> None:
    with pair(tmp_path) as (redis, urls, admins), stream(urls[1]) as answer:
        assert answer.status_code == 200
        run(until(lambda: elsewhere(admins[0]) == 1, "the other's request is known"))
        seen = exchange(admins[0])
        assert (seen["name"], seen["url"], seen["connected"], seen["problem"]) == ("lb-1", redis.url, True, None)
        (other,) = seen["others"]
        assert (other["name"], other["in_flight"], other["complete"]) == ("lb-2", 1, True)
        document = document_of(admins[0])
        schema = {"$ref": "#/components/schemas/State", "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(httpx.get(f"{admins[0]}/admin/state").json())

        metrics = httpx.get(f"{admins[0]}/metrics").text
        assert 'lbproxy_replica_in_flight{replica="lb-2"} 1.0' in metrics
        assert 'lbproxy_endpoint_requests_elsewhere{endpoint="gpu-1"} 1.0' in metrics
        assert 'lbproxy_endpoint_in_flight{endpoint="gpu-1"} 0.0' in metrics
        command = [*LBPROXY, "status", "--admin", admins[0]]
        status = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        assert "1 of 1 endpoints up  1 other replica\n" in status
        assert "\nreplica lb-2  " in status
        assert "  1 in flight  last batch " in status
        for text in (status, metrics, str(seen), httpx.get(f"{admins[0]}/admin/config").text):
            assert PASSWORD not in text

        redis.kill()
        run(until(lambda: elsewhere(admins[0]) == 0, "it is not heard of", within_s=30))
        seen = exchange(admins[0])
        assert (seen["connected"], seen["others"]) == (False, [])
        assert "refused" in seen["problem"]
        metrics = httpx.get(f"{admins[0]}/metrics").text
        assert "lbproxy_replicas_connected 0.0" in metrics
        assert "lb-2" not in metrics


@needs_browser
@one_process("the page is the same")
def test_the_dashboard_has_a_panel_if_replicas_are_configured(tmp_path: Path) -> None:
    panel = "document.getElementById('replicas').innerText"

    async def main(it: Pair) -> None:
        async with page() as tab:
            await tab.visit(f"{it.admins[0]}/dashboard")
            await tab.until(f"{LIVE} && {panel}.includes('lb-2')")
            assert await tab.js("document.getElementById('replicas').hidden") is False
            assert "This is lb-1, connected to redis://127.0.0.1" in await tab.js(panel)
            it.redis.kill()
            await tab.until(f"{panel}.includes('cannot be used, so this one balances alone')")
            await tab.until(f"{panel}.includes('No other replica is alive')")
            assert tab.complaints == []

    with pair(tmp_path) as it:
        run(main(it), timeout_s=120)


@needs_browser
@one_process("the page is the same")
def test_and_none_else(tmp_path: Path) -> None:
    async def main(admin: str) -> None:
        async with page() as tab:
            await tab.visit(f"{admin}/dashboard")
            await tab.until(LIVE)
            assert await tab.js("document.getElementById('replicas').hidden") is True

    with mock() as (_, server), lbproxy(tmp_path, [server]) as (_, _, admin):
        run(main(admin), timeout_s=120)
