# SPDX-License-Identifier: Apache-2.0
"""A simulated server that fails: what is written is understood, and what comes over the wire is just that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import httpx
import pytest

from lbproxy.sim.mock.faults import GARBAGE, KINDS, FaultBook, FaultError, parse_fault, parse_faults
from lbproxy.sim.mock.http import MockOptions, MockServer
from tests.support.aio import run as run_loop
from tests.support.aio import until
from tests.support.rig import post

STREAM = post(b'{"prompt":"x","max_tokens":6,"stream":true}', "/v1/completions")
WHOLE = post(b'{"prompt":"x","max_tokens":6}', "/v1/completions")
Test = Callable[[MockServer], Awaitable[None]]


def run(test: Test, *faults: str) -> None:
    async def main() -> None:
        async with MockServer(MockOptions(speed=50.0, faults=faults)) as server:
            await test(server)

    run_loop(main())


async def ask(server: MockServer, request: bytes) -> tuple[bytes, str]:
    """All that comes on a connection of its own, and how it ended: `eof` or `reset`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request)
    data = b""
    try:
        while piece := await reader.read(1 << 16):
            data += piece
    except ConnectionResetError:
        return data, "reset"
    finally:
        writer.close()
    return data, "eof"


async def change(server: MockServer, faults: str) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.post(f"{server.url}/faults", content=faults)


# --- The text ---------------------------------------------------------------------------------------------------------


def test_a_line_says_what_differs_from_the_defaults() -> None:
    fault = parse_fault("status  code=429 share=0.25 for=2.5 retry-after=7")
    assert (fault.kind, fault.share, fault.for_s, fault.on) == ("status", 0.25, 2.5, "requests")
    assert fault.numbers == {"code": 429, "retry-after": 7}
    assert fault.text == "status code=429 share=0.25 for=2.5 retry-after=7"
    assert parse_fault("freeze").on == "all"
    assert len(parse_faults("freeze\n\nslow-down factor=3\n")) == 2
    for kind in KINDS:
        assert parse_fault(f"{kind} for=1").kind == kind


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("stauts", "is not a fault; the faults are refuse, freeze"),
        ("status code", "status takes share=, for=, on=, having=, code=, retry-after= but not 'code'"),
        ("status cod=1", "but not 'cod=1'"),
        ("status code=99", "status code must be 200 to 599, got '99'"),
        ("status code=nan", "got 'nan'"),
        ("status share=2", "status share must be 0 to 1"),
        ("status for=-1", "status for must be"),
        ("status on=moon", "status on must be one of requests, health, metrics, wake, sleep, state, all, got 'moon'"),
        ("break how=gently", "break how must be one of fin, rst"),
        ("refuse", "refuse needs for=SECONDS"),
        ("freeze\n" * 17, "over 16 faults"),
        ("x" * 5000, "over 4096 bytes"),
    ],
)
def test_what_is_wrong_is_said(text: str, why: str) -> None:
    with pytest.raises(FaultError) as raised:
        parse_faults(text)
    assert why in str(raised.value)


def test_chance_and_time_decide_who_is_hit() -> None:
    book = FaultBook(seed=1)
    book.replace(parse_faults("status share=0.3\nfreeze on=metrics for=5"), now=100.0)
    hit = sum(book.chosen("requests", now=100.0) is not None for _ in range(1000))
    assert 250 < hit < 350
    assert book.chosen("health", now=100.0) is None
    assert book.chosen("metrics", now=104.9) is not None
    assert book.next_end(now=104.9) == 105.0
    assert book.chosen("metrics", now=105.0) is None
    assert book.next_end(now=105.0) is None


# --- The wire ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize(
    ("at", "rest"),
    [("event", b""), ("line", b"data: "), ("chunk", b"data: ")],
)
def test_a_stream_breaks_where_it_is_told(how: str, at: str, rest: bytes) -> None:
    async def test(server: MockServer) -> None:
        data, end = await ask(server, STREAM)
        assert end == ("reset" if how == "rst" else "eof")
        head, _, body = data.partition(b"\r\n\r\n")
        assert b"200" in head.splitlines()[0]
        assert body.count(b"\n\n\r\n") == 2
        tail = body.rpartition(b"\n\n\r\n")[2]
        assert rest in tail
        size, _, piece = tail.partition(b"\r\n")
        if at == "event":
            assert tail == b""
        elif at == "line":
            assert len(piece) == int(size, 16) + 2, "the chunk is whole, the line is not"
        else:
            assert len(piece) < int(size, 16)

    run(test, f"break how={how} at={at} events=2")


def test_a_stream_without_framing_ends_in_the_middle() -> None:
    async def test(server: MockServer) -> None:
        for version, framing in ((b"1.1", "close"), (b"1.0", "http/1.0")):
            await change(server, f"break at=line events=1 framing={framing}")
            data, end = await ask(server, STREAM)
            assert end == "eof"
            assert data.startswith(b"HTTP/" + version + b" 200")
            assert b"chunked" not in data
            assert data.count(b"\n\n") == 1
            assert not data.endswith(b"\n")

    run(test)


def test_a_whole_answer_stops_at_half_its_length() -> None:
    async def test(server: MockServer) -> None:
        data, end = await ask(server, WHOLE)
        head, _, body = data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        assert (end, len(body)) == ("eof", length // 2)

    run(test, "break")


def test_a_stream_shorter_than_its_fault_breaks_before_its_end() -> None:
    async def test(server: MockServer) -> None:
        data, _ = await ask(server, STREAM)
        assert b"[DONE]" in data
        assert not data.endswith(b"0\r\n\r\n")

    run(test, "break events=7 at=line")


def test_every_kind_of_garbage_comes_in_turn() -> None:
    async def test(server: MockServer) -> None:
        for expected in GARBAGE:
            assert await ask(server, WHOLE) == (expected, "eof")
        await change(server, "garbage number=8")
        assert (await ask(server, WHOLE))[0] == GARBAGE[8] == (await ask(server, WHOLE))[0]

    run(test, "garbage")


def test_a_status_comes_at_once_and_leaves_the_rest_alone() -> None:
    async def test(server: MockServer) -> None:
        async with httpx.AsyncClient(base_url=server.url) as client:
            refused = await client.post("/v1/completions", json={"prompt": "x"})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "3")
            assert refused.json()["error"]["code"] == 429
            assert (await client.get("/health")).status_code == 200
            await change(server, "status code=500 on=health")
            assert (await client.get("/health")).status_code == 500
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200

    run(test, "status code=429 retry-after=3")


def test_only_the_poisoned_request_is_hit() -> None:
    async def test(server: MockServer) -> None:
        async with httpx.AsyncClient(base_url=server.url) as client:
            for prompt, status in (("poison", 500), ("food", 200)):
                answer = await client.post("/v1/completions", json={"prompt": prompt})
                assert answer.status_code == status

    run(test, "status code=500 having=poison")


def test_a_slow_head_and_a_slow_stream_arrive_in_the_end() -> None:
    async def test(server: MockServer) -> None:
        async with httpx.AsyncClient(base_url=server.url) as client:
            began = time.monotonic()
            answer = await client.post("/v1/completions", json={"prompt": "x"})
            assert answer.json()["choices"]
            assert time.monotonic() - began > 0.001 * 50
            await change(server, "slow-stream every=0.02")
            began = time.monotonic()
            stream = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 6, "stream": True})
            assert stream.text.endswith("data: [DONE]\n\n")
            assert time.monotonic() - began > 0.02 * 6

    run(test, "slow-head every=0.001")


def test_a_frozen_server_says_nothing_until_it_thaws() -> None:
    async def test(server: MockServer) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            async with asyncio.TaskGroup() as tasks:
                health = tasks.create_task(client.get("/health"))
                answer = tasks.create_task(client.post("/v1/completions", json={"prompt": "x"}))
                await asyncio.sleep(0.1)
                assert not health.done()
                assert not answer.done()
                assert (await client.get("/faults")).json()[0]["fault"] == "freeze"
                await client.delete("/faults")
            assert (health.result().status_code, answer.result().status_code) == (200, 200)
            await change(server, "freeze on=metrics for=0.2")
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/metrics")).status_code == 200, "it ends by itself"

    run(test, "freeze")


def test_running_streams_stand_still_in_a_frozen_server() -> None:
    async def test(server: MockServer) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post(b'{"prompt":"x","max_tokens":20000,"stream":true,"ignore_eos":true}', "/v1/completions"))
        await reader.readuntil(b"\n\n")
        await change(server, "freeze")
        while True:  # what was on its way
            try:
                async with asyncio.timeout(0.2):
                    await reader.read(1 << 16)
            except TimeoutError:
                break
        await change(server, "")
        assert await reader.read(100)
        writer.close()

    run(test)


def test_a_refusing_server_comes_back_by_itself() -> None:
    async def test(server: MockServer) -> None:
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get("/health")).status_code == 200
            await change(server, "refuse for=0.3")

            async def refuses() -> bool:
                try:
                    await client.get("/health")
                except httpx.TransportError:
                    return True
                return False

            async with asyncio.timeout(10):
                while not await refuses():
                    pass
                while await refuses():  # noqa: ASYNC110 - the server is what changes
                    await asyncio.sleep(0.01)

    run(test)


def test_a_slowed_server_takes_longer() -> None:
    async def test(server: MockServer) -> None:
        async def seconds() -> float:
            began = time.monotonic()
            await ask(server, post(b'{"prompt":"x","max_tokens":40}', "/v1/completions", "Connection: close\r\n"))
            return time.monotonic() - began

        normal = min([await seconds() for _ in range(3)])
        await change(server, "slow-down factor=20")
        slow = await seconds()
        await change(server, "")
        assert slow > 4 * normal
        assert min([await seconds() for _ in range(3)]) < slow

    run(test)


def test_what_is_wrong_is_refused_at_run_time_too() -> None:
    async def test(server: MockServer) -> None:
        answer = await change(server, "break how=gently")
        assert (answer.status_code, "break how must be one of fin, rst" in answer.text) == (400, True)
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get("/faults")).json() == [
                {"fault": "status for=100", "ends_in_s": pytest.approx(100, abs=5)}
            ]

    run(test, "status for=100")
    with pytest.raises(FaultError):
        MockOptions(faults=("refuse",))


def test_work_of_a_broken_stream_leaves_the_engine() -> None:
    async def test(server: MockServer) -> None:
        body = b'{"prompt":"x","max_tokens":20000,"stream":true,"ignore_eos":true}'
        await ask(server, post(body, "/v1/completions"))
        await until(lambda: server.driver.engine.gauges().running == 0)

    run(test, "break how=rst events=2")
