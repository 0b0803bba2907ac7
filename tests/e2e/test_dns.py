# SPDX-License-Identifier: Apache-2.0
"""Servers behind a DNS name come and go under load, in processes as a user would run them.

Each listens on an address of its own (127.0.0.1, 127.0.0.2) and the same port.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.support.aio import run, until
from tests.support.dns import DnsServer, Says
from tests.support.docs import DOCS, blocks
from tests.support.process import Process, mock

NAME = "vllm.test"
CLIENTS = 8


@contextmanager
def servers(count: int) -> Iterator[tuple[int, list[Process]]]:
    """Simulated servers on 127.0.0.1 and the next addresses, all on one port, and that port."""
    with mock("--model", "sim") as (first, url):
        port = int(url.rpartition(":")[2])
        more = [
            Process("mock", "--model", "sim", "--host", f"127.0.0.{n}", "--port", str(port))
            for n in range(2, count + 1)
        ]
        try:
            for one in more:
                one.wait_for("at http://")
            yield port, [first, *more]
        finally:
            for one in more:
                one.__exit__(None, None, None)


@dataclass
class Proxy:
    process: Process
    url: str
    admin: str
    client: httpx.AsyncClient

    async def metrics(self) -> str:
        return (await self.client.get(f"{self.admin}/metrics")).text

    async def until_shown(self, line: str) -> None:
        """Wait for a sample on the metrics page."""
        async with asyncio.timeout(30):
            while f"{line}\n" not in await self.metrics():  # noqa: ASYNC110 - it happens in another process
                await asyncio.sleep(0.02)

    async def until_up(self, name: str) -> None:
        await self.until_shown(f'lbproxy_endpoint_up{{endpoint="{name}"}} 1.0')


@asynccontextmanager
async def proxy(folder: Path, nameserver: str, endpoint: str, dns: str = "", more: str = "") -> AsyncIterator[Proxy]:
    """`dns`: more of that section; `more`: other settings."""
    config = folder / "cfg.yaml"
    config.write_text(
        f"listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nlog: {{access: false}}\nendpoints: ['{endpoint}']\n"
        f"dns: {{nameservers: ['{nameserver}']{dns}}}\n{more}"
    )
    with Process("--config", str(config)) as process:
        found = await asyncio.to_thread(process.wait_for, r"listens on (http://[\w.:]+), admin on (http://[\w.:]+)")
        async with httpx.AsyncClient(timeout=60) as client:
            yield Proxy(process, found[1], found[2], client)
        assert process.stop() == 0
        assert "Traceback" not in process.output


@dataclass
class Load:
    """Clients that ask again as soon as they are answered."""

    failed: list[str]
    served: list[tuple[float, float, str]]
    """Sent at, answered at, by whom."""

    def first(self, name: str) -> float | None:
        return min((sent for sent, _, by in self.served if by == name), default=None)

    def last(self, name: str) -> float:
        return max(sent for sent, _, by in self.served if by == name)


@asynccontextmanager
async def load(url: str) -> AsyncIterator[Load]:
    it = Load([], [])

    async def client() -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            while True:
                sent = time.monotonic()
                body = {"model": "sim", "prompt": "x", "max_tokens": 3}
                try:
                    answer = await http.post(f"{url}/v1/completions", json=body)
                except httpx.HTTPError as error:
                    it.failed.append(repr(error))
                    continue
                if answer.status_code != 200:
                    it.failed.append(answer.text)
                else:
                    it.served.append((sent, time.monotonic(), answer.headers["x-lbproxy-endpoint"]))

    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(client()) for _ in range(CLIENTS)]
        yield it
        for one in clients:
            one.cancel()


async def stream(proxy: Proxy, started: asyncio.Event) -> tuple[str, str]:
    """A generation of about 15 s: who did it, and its whole text."""
    body = {"model": "sim", "prompt": "x", "max_tokens": 3000, "stream": True}
    async with proxy.client.stream("POST", f"{proxy.url}/v1/completions", json=body) as answer:
        pieces = []
        async for piece in answer.aiter_text():
            pieces.append(piece)
            started.set()
        return answer.headers["x-lbproxy-endpoint"], "".join(pieces)


def test_an_address_added_and_removed_under_load(tmp_path: Path) -> None:
    """At the default interval: the new address gets traffic, the removed one no more, its stream ends well."""

    async def main() -> None:
        with servers(2) as (port, _):
            one, two = f"127.0.0.1:{port}", f"127.0.0.2:{port}"
            async with (
                DnsServer({NAME: Says(a=["127.0.0.1"])}) as dns,
                proxy(tmp_path, dns.address, f"dns+http://{NAME}:{port}") as lb,
            ):
                await lb.until_up(one)
                async with load(lb.url) as it:
                    await until(lambda: len(it.served) > 50)
                    started = asyncio.Event()
                    running = asyncio.create_task(stream(lb, started))
                    await started.wait()
                    dns.zone[NAME], at = Says(a=["127.0.0.2", "127.0.0.1"]), time.monotonic()
                    await until(lambda: it.first(two) is not None, within_s=30)
                    print(f"added: first request there after {(it.first(two) or 0) - at:.2f} s")

                    dns.zone[NAME], at = Says(a=["127.0.0.2"]), time.monotonic()
                    await lb.until_shown(f'lbproxy_endpoint_draining{{endpoint="{one}"}} 1.0')
                    gone_at = time.monotonic()
                    assert not running.done(), "the stream is there to see its server removed"
                    print(f"removed: gone after {gone_at - at:.2f} s, last request there {it.last(one) - at:.2f} s")
                    count = len(it.served)
                    await until(lambda: len(it.served) > count + 100, within_s=30)
                    assert it.last(one) < gone_at
                    by, text = await running
                assert it.failed == []
                assert by == one, "the stream ran where it began"
                assert text.endswith("data: [DONE]\n\n")
                print(f"{len(it.served)} requests, none failed")

    run(main(), timeout_s=110)


def test_a_name_that_flaps_loses_no_request(tmp_path: Path) -> None:
    """The set is another one all the time: A, B, A, B; and sometimes the nameserver is no help at all."""
    answers = [Says(a=["127.0.0.1"]), Says(a=["127.0.0.2"]), Says(rcode="SERVFAIL"), Says(a=["127.0.0.1"]), Says()]

    async def main() -> None:
        with servers(2) as (port, _):
            async with (
                DnsServer({NAME: answers[0]}) as dns,
                proxy(tmp_path, dns.address, f"dns+http://{NAME}:{port}", ", interval: 50ms") as lb,
            ):
                await lb.until_up(f"127.0.0.1:{port}")
                async with load(lb.url) as it:
                    for turn in range(40):
                        dns.zone[NAME] = answers[turn % len(answers)]
                        enough = dns.asked("udp A") + 2
                        await until(lambda: dns.asked("udp A") >= enough)  # noqa: B023
                assert it.failed == []
                assert {by for _, _, by in it.served} == {f"127.0.0.1:{port}", f"127.0.0.2:{port}"}
                page = await lb.metrics()
                print(f"{len(it.served)} requests, none failed")
                assert re.search(rf'lbproxy_dns_resolutions_total{{name="{NAME}:{port}",result="failed"}} [1-9]', page)
                assert f'lbproxy_dns_addresses{{name="{NAME}:{port}"}} ' in page

    run(main(), timeout_s=110)


def test_a_hung_nameserver_stops_neither_the_start_nor_a_request(tmp_path: Path) -> None:
    async def main() -> None:
        with servers(1) as (port, _):
            async with (
                DnsServer({NAME: Says(silent=True)}) as dns,
                proxy(tmp_path, dns.address, f"dns+http://{NAME}:{port}", ", interval: 50ms, timeout: 500ms") as lb,
            ):
                answer = await lb.client.post(f"{lb.url}/v1/completions", json={"model": "sim", "prompt": "x"})
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_endpoints")
                await until(lambda: '"event":"discovery"' in lb.process.read(), within_s=30)
                dns.zone[NAME] = Says(a=["127.0.0.1"])
                await lb.until_up(f"127.0.0.1:{port}")
                dns.zone[NAME] = Says(silent=True)
                asked = dns.asked("udp A")
                async with load(lb.url) as it:
                    await until(lambda: dns.asked("udp A") > asked + 3 and len(it.served) > 100, within_s=30)
                assert it.failed == []
                slowest = max(done - sent for sent, done, _ in it.served)
                print(f"slowest of {len(it.served)} requests beside a hung nameserver: {slowest * 1000:.0f} ms")
                assert lb.process.stop() == 0
                assert_logged_as_documented(lb.process)

    run(main(), timeout_s=110)


def assert_logged_as_documented(process: Process) -> None:
    """Each kind of line that docs/discovery.md shows is among the live ones, with the same keys."""
    live = {tuple(line) for line in process.lines("discovery")}
    shown = [
        json.loads(line)
        for one in blocks(DOCS / "discovery.md")
        if one.language == "json"
        for line in one.text.splitlines()
    ]
    assert shown
    assert {tuple(line) for line in shown} <= live


@pytest.mark.parametrize(
    ("zone", "code"), [({NAME: Says(a=["127.0.0.1", "127.0.0.2"])}, 0), ({}, 1)], ids=["good", "none"]
)
def test_check_lists_each_address(zone: dict[str, Says], code: int, tmp_path: Path) -> None:
    async def main() -> None:
        with servers(1) as (port, _):
            async with DnsServer(zone) as dns:
                config = tmp_path / "cfg.yaml"
                config.write_text(
                    f"endpoints: [{{url: 'dns+http://{NAME}:{port}', name: pool}}]\n"
                    f"dns: {{nameservers: ['{dns.address}']}}\n"
                )
                with Process("check", "--config", str(config)) as process:
                    assert await asyncio.to_thread(process.process.wait, 60) == code
                    output = process.read()
        if code:
            assert f"pool: cannot be resolved: The DNS query name does not exist: {NAME}." in output
        else:
            assert f"pool/127.0.0.1:{port}" in output
            assert f"pool/127.0.0.2:{port}" in output
            assert "1 of 2 endpoints can be used." in output

    run(main())
