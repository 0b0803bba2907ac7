# SPDX-License-Identifier: Apache-2.0
"""Two workers decide as one: what only a single balancer can know holds over them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.aio import run, until
from tests.support.process import changing, lbproxy, mock

WORKERS = "workers: 2\nexplain: {header: true}\n"
BODY = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "Hello"}]}


def state(admin: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{admin}/admin/state").json()
    return found


Clients = list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]


@asynccontextmanager
async def connected(listen: str, count: int) -> AsyncIterator[Clients]:
    """So many clients."""
    host, port = listen.removeprefix("http://").split(":")
    clients = [await asyncio.open_connection(host, int(port)) for _ in range(count)]
    try:
        yield clients
    finally:
        for _, writer in clients:
            writer.transport.abort()
        await asyncio.sleep(0)


def request(body: dict[str, object], more: str = "") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def reply(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """The status and the fields; the body is read."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    lines = head.split("\r\n")
    fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
    await reader.readexactly(int(fields["content-length"]))
    return int(lines[0].split()[1]), fields


def test_keep_alive_clients_are_shared_evenly_and_shown(tmp_path: Path) -> None:
    with mock("--model", "m") as (_, url), lbproxy(tmp_path, [url], WORKERS) as (process, listen, admin):
        process.wait_for("2 workers accept connections")

        async def main() -> None:
            for count in (24, 60):  # at once
                async with connected(listen, count):
                    await until(lambda n=count: state(admin)["client_connections"] == n)  # type: ignore[misc]
                    shares = [one["client_connections"] for one in state(admin)["workers"]]
                    # Who has less to do accepts more, on a busy machine too.
                    assert all(0.3 * count <= share <= 0.7 * count for share in shares), shares
                await until(lambda: not state(admin)["client_connections"])

        run(main())
        shown = state(admin)
        assert [one["index"] for one in shown["workers"]] == [0, 1]
        page = httpx.get(f"{admin}/metrics").text
        assert 'lbproxy_worker_memory_bytes{worker="1"}' in page
        assert "lbproxy_requests_placed_alone_total 0.0" in page


def test_a_burst_over_idle_servers_is_spread_evenly(tmp_path: Path) -> None:
    """64 requests at once over 4 idle servers: 16 +- 1 each, though each worker sees half of them."""
    with ExitStack() as stack:
        slow = ("--model", "m", "--ttft", "1.0", "--token-time", "0.02")
        urls = [stack.enter_context(mock(*slow))[1] for _ in range(4)]
        process, listen, admin = stack.enter_context(lbproxy(tmp_path, urls, WORKERS))
        process.wait_for("2 workers accept connections")
        for url in urls:
            process.wait_for(f"{url.removeprefix('http://')} is up")

        async def main() -> list[str]:
            async with connected(listen, 64) as clients:
                await until(lambda: state(admin)["client_connections"] == 64)
                for _, writer in clients:
                    writer.write(request(BODY))
                replies = [await reply(reader) for reader, _ in clients]
            assert {status for status, _ in replies} == {200}
            return [fields["x-lbproxy-endpoint"] for _, fields in replies]

        counts = Counter(run(main(), timeout_s=90))
        assert sorted(counts.values())[0] >= 15, counts
        assert sorted(counts.values())[-1] <= 17, counts
        assert all(one["running"] == 0 for one in state(admin)["workers"]) or state(admin)["running"] == 0


def test_a_limit_of_a_key_holds_over_all_workers(tmp_path: Path) -> None:
    settings = f"""{WORKERS}
auth: {{keys: [{{name: team, key: sk-aaaaaaaaaaaaaaaaaaaa}}]}}
flows: {{named: {{team: {{requests_per_minute: 20}}}}}}
"""
    with mock("--model", "m") as (_, url), lbproxy(tmp_path, [url], settings) as (process, listen, admin):
        process.wait_for("serves m")
        process.wait_for("2 workers accept connections")

        async def main() -> list[int]:
            async with connected(listen, 10) as clients:
                await until(lambda: state(admin)["client_connections"] == 10)
                assert all(one["client_connections"] >= 3 for one in state(admin)["workers"])
                key = "Authorization: Bearer sk-aaaaaaaaaaaaaaaaaaaa\r\n"
                statuses = []
                for _ in range(4):
                    for _, writer in clients:
                        writer.write(request(BODY, key))
                    statuses += [(await reply(reader))[0] for reader, _ in clients]
            return statuses

        counts = Counter(run(main()))
        assert 20 <= counts[200] <= 26, counts  # what a minute refills meanwhile
        assert counts[429] == 40 - counts[200]


def test_a_conversation_finds_its_prompt_whichever_worker_it_comes_through(tmp_path: Path) -> None:
    """Prompts are hashed in the worker and looked up in the balancer process: each conversation stays where it was."""
    with ExitStack() as stack:
        urls = [stack.enter_context(mock("--model", "m", "--speed", "20"))[1] for _ in range(3)]
        process, listen, _ = stack.enter_context(lbproxy(tmp_path, urls, WORKERS))
        process.wait_for("2 workers accept connections")
        for url in urls:
            process.wait_for(f"{url.removeprefix('http://')} is up")

        async def main() -> None:
            homes: dict[int, set[str]] = {n: set() for n in range(6)}
            for turn in range(4):
                async with connected(listen, 6) as clients:  # new connections: any worker may get them
                    for n, (reader, writer) in enumerate(clients):
                        text = f"conversation {n}: " + "some words of it " * 500 + "more " * 100 * turn
                        body = BODY | {"messages": [{"role": "user", "content": text}]}
                        writer.write(request(body, "x-lbproxy-explain: 1\r\n"))
                        status, fields = await reply(reader)
                        assert status == 200
                        assert "endpoint=" in fields["x-lbproxy-explain"]
                        homes[n].add(fields["x-lbproxy-endpoint"])
            assert all(len(found) == 1 for found in homes.values()), homes

        run(main())


def test_each_request_is_logged_once_by_who_served_it_at_the_level_of_now(tmp_path: Path) -> None:
    """Over connections of their own, so that both workers serve some."""

    def ask(name: str, count: int) -> None:
        for n in range(count):
            headers = {"x-request-id": f"{name}-{n}"}
            assert httpx.post(f"{listen}/v1/chat/completions", json=BODY, headers=headers).status_code == 200

    with mock("--model", "m") as (_, url), lbproxy(tmp_path, [url], WORKERS) as (process, listen, admin):
        process.wait_for("2 workers accept connections")
        ask("first", 12)
        run(until(lambda: len(process.lines("request")) == 12, "all are logged"))
        assert Counter(line["id"] for line in process.lines("request")) == Counter(f"first-{n}" for n in range(12))
        assert {line["endpoint"] for line in process.lines("request")} == {url.removeprefix("http://")}
        httpx.put(f"{admin}/admin/log-level", json={"level": "error"}, headers=changing(admin)).raise_for_status()
        ask("unheard", 6)
        httpx.put(f"{admin}/admin/log-level", json={"level": "info"}, headers=changing(admin)).raise_for_status()
        ask("last", 1)
        process.wait_for('"id":"last-0"')
        assert [line["id"] for line in process.lines("request")[12:]] == ["last-0"]
        page = httpx.get(f"{admin}/metrics").text
        counted = [line for line in page.splitlines() if line.startswith("lbproxy_requests_total{")]
        assert sum(float(line.rsplit(" ", 1)[1]) for line in counted) == 19
