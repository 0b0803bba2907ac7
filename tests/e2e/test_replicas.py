# SPDX-License-Identifier: Apache-2.0
"""Two and three lbproxies over a real Redis server, as processes, under load: clients must notice nothing of it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from lbproxy.commands.cli import main
from tests.support.aio import run, until
from tests.support.load import Load, load
from tests.support.ports import free_port
from tests.support.process import Process, lbproxy, mock
from tests.support.redis_failures import FAILURES
from tests.support.redis_server import PROGRAMS, needs_redis, redis_server, use
from tests.support.replica_pool import NOTICED_S, One, pool
from tests.support.rig import RawClient, post

pytestmark = [needs_redis, pytest.mark.timeout(240)]
LONG = b'{"model":"sim","prompt":"x","max_tokens":3000,"stream":true}'


@pytest.fixture(params=PROGRAMS, autouse=True)
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test with each server."""
    use(request.param, monkeypatch)


@pytest.mark.parametrize("failure", FAILURES)
def test_no_client_notices_that_redis_fails(tmp_path: Path, failure: str) -> None:
    fail, mend = FAILURES[failure]

    async def body() -> None:
        with pool(tmp_path, 2) as it:
            one, two = it.members
            async with load(one.url, keep=2, fresh=2) as first, load(two.url, keep=2, fresh=2) as second:
                await _served(first, second, more=20)
                fail(it.redis)
                await until(lambda: not one.is_connected(), "it is noticed", within_s=NOTICED_S, every_s=0.2)
                await _served(first, second, more=50)
                assert one.elsewhere() <= 8
                mend(it.redis)
                both = lambda: one.is_connected() and two.is_connected()  # noqa: E731
                await until(both, "both are back", within_s=NOTICED_S, every_s=0.2)
                await until(lambda: one.others() == two.others() == 1, within_s=NOTICED_S, every_s=0.2)
                await _served(first, second, more=20)
            assert (first.failed, second.failed) == ([], [])
            quiet = lambda: one.elsewhere() == two.elsewhere() == 0  # noqa: E731
            await until(quiet, "nothing is left", within_s=NOTICED_S, every_s=0.2)

    run(body(), timeout_s=200.0)


async def _served(*loads: Load, more: int) -> None:
    """Wait for so many responses more of each."""
    wanted = [one.done + more for one in loads]
    enough = lambda: all(one.done >= count for one, count in zip(loads, wanted, strict=True))  # noqa: E731
    await until(enough, "requests go on", within_s=NOTICED_S)


async def _stream(url: str) -> RawClient:
    host, _, port = url.removeprefix("http://").partition(":")
    client = RawClient(*await asyncio.open_connection(host, int(port)))
    client.send(post(LONG, "/v1/completions"))
    await client.reader.readuntil(b"data: ")
    return client


def test_of_one_that_is_killed_only_its_own_break_and_its_counts_go(tmp_path: Path) -> None:
    async def body() -> None:
        with pool(tmp_path, 3) as it:
            killed, *left = it.members
            streams = [await _stream(killed.url) for _ in range(6)]
            others = [await _stream(one.url) for one in left]
            await until(lambda: [one.elsewhere() for one in left] == [7, 7], "all are known", every_s=0.1)
            killed.process.kill()
            await until(lambda: [one.elsewhere() for one in left] == [1, 1], "its counts are gone", every_s=0.1)
            assert [one.others() for one in left] == [1, 1]
            for stream in streams:
                assert b"[DONE]" not in await stream.reader.read(1 << 26)
                stream.writer.transport.abort()
            for stream in others:
                await stream.reader.readuntil(b"data: ")
                stream.writer.transport.abort()

    run(body(), timeout_s=120.0)


def test_tokens_are_those_of_all_replicas_also_of_dead_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing but the store keeps them; while it is down each has its own, and says so."""

    def used(member: str, *more: str) -> list[tuple[str, int, int]]:
        assert main(["usage", "--json", "--admin", member, *more]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        return sorted((row["flow"], row["prompt_uncached"] + row["prompt_cached"], row["completion"]) for row in rows)

    with pool(tmp_path, 3, "flows: {header: true}") as it:
        prompt = 0
        for number, member in enumerate(it.members):
            for _ in range(number + 1):
                body = {"model": "sim", "prompt": "word " * 40, "max_tokens": 3, "ignore_eos": True}
                response = httpx.post(
                    f"{member.url}/v1/completions", json=body, headers={"x-lbproxy-flow": f"f{number % 2}"}, timeout=60
                )
                prompt = response.json()["usage"]["prompt_tokens"]
        whole = [("f0", 4 * prompt, 12), ("f1", 2 * prompt, 6)]
        own = [[("f0", prompt, 3)], [("f1", 2 * prompt, 6)], [("f0", 3 * prompt, 9)]]
        admins = [member.admin for member in it.members]
        end = time.monotonic() + 60
        while any(used(admin) != whole for admin in admins):
            assert time.monotonic() < end, [used(admin) for admin in admins]
        assert used(admins[0], "--admin", admins[1]) == own[0] + own[1]
        it.members[2].process.kill()
        assert [used(admin) for admin in admins[:2]] == [whole, whole]
        it.redis.kill()
        assert [used(admin) for admin in admins[:2]] == own[:2]
        assert main(["usage", "--admin", admins[0]]) == 0
        assert "of one replica" in capsys.readouterr().out


def test_tokens_are_counted_once_with_workers_replicas_and_restarts(tmp_path: Path) -> None:
    """By each API, streamed or not, by what servers report; nothing but the store keeps them. 10,000 by hand."""
    requests = int(os.environ.get("LBPROXY_TEST_REQUESTS", "300"))
    reported: Counter[str] = Counter()
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(tmp_path))
        servers = [stack.enter_context(mock("--model", "sim", "--speed", "50"))[1] for _ in range(2)]

        def start(number: int) -> One:
            folder = tmp_path / f"lb{number}"
            folder.mkdir(exist_ok=True)
            more = (
                f"replicas: {{url: '{redis.url}', name: lb{number}}}\nflows: {{header: true}}\nworkers: {2 - number}\n"
            )
            one = One(*stack.enter_context(lbproxy(folder, servers, more)))
            one.process.wait_for(r"(?s)serves sim.*serves sim")
            one.process.wait_for("connected to")
            return one

        members = [start(0), start(1)]
        taking = list(members)

        def ask(number: int) -> tuple[str, int]:
            flow, (path, request) = f"f{number % 3}", _mixed(number)
            while True:
                url = f"{taking[number % len(taking)].url}/v1/{path}"
                try:
                    response = httpx.post(url, json=request, headers={"x-lbproxy-flow": flow}, timeout=60)
                    break
                except httpx.ConnectError:
                    time.sleep(0.1)  # it has stopped since it was chosen, and was asked nothing
            assert response.status_code == 200, response.text
            return flow, _told(response.text)

        with ThreadPoolExecutor(8) as clients:
            sent = [clients.submit(ask, number) for number in range(requests)]
            for number in (0, 1):
                while sum(one.done() for one in sent) < (number + 1) * requests // 3:
                    time.sleep(0.05)
                taking[:] = [members[1 - number]]  # within the other's lame duck's time
                assert members[number].process.stop() == 0
                members[number] = start(number)
                taking[:] = members
            for flow, tokens in (one.result() for one in sent):
                reported[flow] += tokens
        end = time.monotonic() + NOTICED_S
        while True:
            rows = [httpx.get(f"{one.admin}/admin/usage", timeout=10).json()["rows"] for one in members]
            counted = [Counter[str](), Counter[str]()]
            for mine, theirs in zip(counted, rows, strict=True):
                for row in theirs:
                    mine[row["flow"]] += row["prompt_uncached"] + row["prompt_cached"] + row["completion"]
            if counted == [reported, reported]:
                break
            assert time.monotonic() < end, (counted, reported)
        print(f"{requests} requests, {reported.total()} tokens reported, {counted[0].total()} counted")
        assert sum(row["estimated"] for row in rows[0]) == 0


def _mixed(number: int) -> tuple[str, dict[str, object]]:
    """The path and body of a request that tells its usage."""
    text, tokens, stream = f"{number} " + "word " * (number % 90), 1 + number % 40, number % 5 < 3
    said: dict[str, object] = {"model": "sim", "max_tokens": tokens, "stream": stream}
    asks = {"stream_options": {"include_usage": True}} if stream else {}
    messages = {"messages": [{"role": "user", "content": text}]}
    match number % 7:
        case 0 | 1:
            return "completions", said | asks | {"prompt": text}
        case 2 | 3:
            return "chat/completions", said | asks | messages
        case 4:
            return "messages", said | messages
        case 5:
            return "responses", {"model": "sim", "input": text, "max_output_tokens": tokens, "stream": stream}
    return "embeddings", {"model": "sim", "input": text}


def _told(response: str) -> int:
    """The tokens of a response, as its server reports them: the last number of each kind."""
    prompt = re.findall(r'"(?:prompt|input)_tokens": ?(\d+)', response)
    completion = re.findall(r'"(?:completion|output)_tokens": ?(\d+)', response)
    return int(prompt[-1]) + int(completion[-1] if completion else 0)


def test_a_limit_of_requests_holds_over_replicas(tmp_path: Path) -> None:
    more = "flows: {header: true, default: {requests_per_minute: 60}}"

    async def body() -> None:
        with pool(tmp_path, 3, more) as it:
            passed = refused = 0
            async with httpx.AsyncClient(timeout=30.0) as client:
                for number in range(150):
                    request = {"model": "sim", "prompt": "x", "max_tokens": 1}
                    url = f"{it.members[number % 3].url}/v1/completions"
                    response = await client.post(url, json=request, headers={"x-lbproxy-flow": "a"})
                    passed += response.status_code == 200
                    refused += response.status_code == 429
                    await asyncio.sleep(0.03)
            assert passed + refused == 150
            # A minute's worth at once, and one more for each second that it took; three alone would pass 150.
            assert 55 <= passed <= 100

    run(body(), timeout_s=120.0)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGUSR2])
def test_a_rolling_restart_fails_no_request(tmp_path: Path, how: signal.Signals) -> None:
    """Behind two addresses: a client that finds one closed takes the other, as with DNS or a TCP front."""

    async def body() -> None:
        ports = [free_port(), free_port()]
        with ExitStack() as stack:
            redis = stack.enter_context(redis_server(tmp_path))
            servers = [stack.enter_context(mock("--model", "sim", "--speed", "0.5"))[1] for _ in range(2)]

            def start(number: int) -> Process:
                folder = tmp_path / f"lb{number}"
                folder.mkdir(exist_ok=True)
                config = folder / "cfg.yaml"
                config.write_text(
                    f"listen: {{host: 127.0.0.1, port: {ports[number]}, allowed_hosts: [lb]}}\nadmin: 127.0.0.1:0\n"
                    f"replicas: {{url: '{redis.url}', name: lb{number}}}\ndrain: {{lame_duck: 0s}}\n"
                    f"endpoints: [{', '.join(servers)}]\n"
                )
                process = stack.enter_context(Process("--config", str(config)))
                process.wait_for(r"(?s)listens on")
                process.wait_for(r"(?s)serves sim.*serves sim")
                return process

            processes = [start(0), start(1)]
            failed: list[str] = []
            done = [0]
            async with asyncio.TaskGroup() as tasks:
                clients = [tasks.create_task(_client(ports, n, done, failed)) for n in range(8)]
                for number in (0, 1):
                    wanted = done[0] + 50
                    await until(lambda wanted=wanted: done[0] >= wanted, within_s=NOTICED_S)  # type: ignore[misc]
                    if how is signal.SIGTERM:
                        stopping = asyncio.to_thread(processes[number].stop, how)
                        assert await stopping == 0
                        processes[number] = await asyncio.to_thread(start, number)
                        processes[number].wait_for("told what it knows")
                    else:
                        processes[number].process.send_signal(how)
                        await asyncio.to_thread(processes[number].wait_for, "accepts connections: process")
                wanted = done[0] + 50
                await until(lambda: done[0] >= wanted, within_s=NOTICED_S)
                for one in clients:
                    one.cancel()
            await asyncio.sleep(0.1)  # for connections to be closed
            assert failed == []

    run(body(), timeout_s=200.0)


async def _client(ports: list[int], number: int, done: list[int], failed: list[str]) -> None:
    """Requests on new connections, to one of the addresses and, where nobody listens, to the other."""
    request = post(b'{"model":"sim","prompt":"Once","max_tokens":3}', "/v1/completions")
    while True:
        number += 1
        try:
            try:
                streams = await asyncio.open_connection("127.0.0.1", ports[number % 2])
            except ConnectionRefusedError:
                streams = await asyncio.open_connection("127.0.0.1", ports[1 - number % 2])
            client = RawClient(*streams)
            try:
                client.send(request)
                reply = await client.reply()
            finally:
                client.writer.transport.abort()
        except (OSError, EOFError) as error:
            failed.append(repr(error))
        else:
            done[0] += 1
            if reply.status != 200:
                failed.append(str(reply.status))
        await asyncio.sleep(0.005)
