# SPDX-License-Identifier: Apache-2.0
"""Publishers that do their worst, over real sockets: whatever they send, the next clear of an honest one counts, memory
and the event loop are not theirs, and each kind of problem is counted and logged once.
"""

from __future__ import annotations

import asyncio
import logging
import random
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import pytest
import zmq
from msgspec.msgpack import encode

from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.engines.kv_events import MAX_FRAME_BYTES, KvStats, Problem
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.driver.runtime import Runtime
from lbproxy.extras import kv_feed
from lbproxy.extras.kv_events import KvEvents
from tests.support.aio import run, until
from tests.support.pool import bring_up, make_balancer, spec
from tests.support.ports import free_port

CLEAR = encode([1.0, [{"type": "AllBlocksCleared"}], 0])
KEYS = tuple(range(4))


class Hostile:
    """A publisher that a test drives frame by frame, and who reads it."""

    def __init__(self, socket: zmq.Socket[bytes], balancer: Balancer, events: KvEvents) -> None:
        self.socket = socket
        self.balancer = balancer
        self.events = events
        self.sequence = 0

    @property
    def stats(self) -> KvStats:
        return self.events.stats["e1"]

    @property
    def state(self) -> EndpointState:
        return next(iter(self.balancer.endpoints.members()))

    def send(self, payload: bytes, *, topic: bytes = b"t", number: int | None = None) -> None:
        number, self.sequence = self.sequence if number is None else number, self.sequence + 1
        self.socket.send_multipart([topic, number.to_bytes(8), payload])

    async def survives(self) -> None:
        """A clear that comes after everything still counts."""
        self.balancer.submit(InferenceRequest("r", "m", True, 4096, 4096, KEYS), now=0.0)
        assert self.state.load.kv.cache.size == len(KEYS)
        while self.state.load.kv.cache.size or self.state.reported.cached_tokens != 0:
            self.send(CLEAR)  # again and again: a connection may be made anew meanwhile
            await asyncio.sleep(0.01)


@contextmanager
def publishing() -> Iterator[tuple[zmq.Socket[bytes], int]]:
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, 2_000)
        yield socket, socket.bind_to_random_port("tcp://127.0.0.1")


@asynccontextmanager
async def hostile(replay: str | None = None) -> AsyncIterator[Hostile]:
    balancer = make_balancer(policy="adaptive")
    with publishing() as (socket, port):
        member = replace(spec(1), kv_events=f"tcp://127.0.0.1:{port}", kv_events_replay=replay)
        added = balancer.set_endpoints([member], now=0.0).added
        bring_up(balancer, added)
        events = KvEvents(balancer, Runtime(balancer))
        async with asyncio.TaskGroup() as tasks:
            loop = tasks.create_task(events.follow(added[0]))
            it = Hostile(socket, balancer, events)
            try:
                while not events.stats or not it.stats.messages:
                    it.send(CLEAR)
                    await asyncio.sleep(0.01)
                yield it
            finally:
                loop.cancel()
                await asyncio.gather(loop, return_exceptions=True)
                events.close()


def stored(*blocks: object, **more: object) -> dict[str, object]:
    return {"type": "BlockStored", "block_hashes": blocks, "token_ids": [], "block_size": 16, **more}


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        (b"", Problem.BATCH),
        (b"\xc1" * 100, Problem.BATCH),
        (b"\x93\xc0" + b"\x91" * 900_000, Problem.BATCH),
        (b"\x93\xc0\xdd\xff\xff\xff\xff", Problem.BATCH),
        (encode([1.0, [None] * 40_000]), Problem.BATCH),
        (encode([1.0, [{"type": "BlockStored"}]]), Problem.EVENT),
        (encode([1.0, [stored("x")]]), Problem.EVENT),
        (encode([1.0, [["BlockRemoved", 5]]]), Problem.EVENT),
    ],
)
def test_a_batch_that_cannot_be_read_makes_the_count_unknown(payload: bytes, problem: Problem) -> None:
    async def main() -> None:
        async with hostile() as it:
            it.send(payload)
            await until(lambda: it.stats.problems[problem])
            assert it.state.reported.cached_tokens is None
            await it.survives()

    run(main())


@pytest.mark.parametrize("frames", [[b"x"], [b"t", b"12345678"], [b"t", b"1", b"x"], [b""] * 50_000])
def test_messages_of_other_shapes_are_dropped(frames: list[bytes]) -> None:
    async def main() -> None:
        async with hostile() as it:
            it.socket.send_multipart(frames)
            await until(lambda: it.stats.problems[Problem.FRAMES])
            await it.survives()

    run(main())


def test_a_frame_that_is_too_large_costs_the_connection_and_the_count() -> None:
    async def main() -> None:
        async with hostile() as it:
            read = it.stats.bytes
            it.send(b"\xc1" * (MAX_FRAME_BYTES + 1))
            await it.survives()
            assert it.stats.bytes - read < MAX_FRAME_BYTES
            assert it.stats.lost >= 1
            assert it.stats.problems[Problem.DISCONNECTED] == 1

    run(main())


def test_unknown_events_are_no_problem() -> None:
    async def main() -> None:
        async with hostile() as it:
            unknown = {"type": "BlockMoved"}, ["New", 1]
            it.send(encode([1.0, [*unknown, stored(1, 2), stored(3, medium="CPU")], 0, "more"]))
            await until(lambda: it.state.reported.cached_tokens == 32)
            assert not sum(it.stats.problems.values())

    run(main())


def test_a_second_publisher_is_not_believed() -> None:
    async def main() -> None:
        async with hostile() as it:
            it.send(encode([1.0, [stored(1)]]))
            it.socket.send_multipart([b"other", (0).to_bytes(8), CLEAR])
            await until(lambda: it.stats.problems[Problem.TOPIC])
            assert it.state.reported.cached_tokens == 16
            assert not it.stats.restarts

    run(main())


def test_more_blocks_than_are_counted_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lbproxy.core.caches.kv_blocks.MAX_BLOCKS", 1_000)

    async def main() -> None:
        async with hostile() as it:
            it.send(encode([1.0, [stored(*range(1_001))]]))
            await until(lambda: it.stats.problems[Problem.BLOCKS])
            assert it.state.reported.cached_tokens is None
            await it.survives()

    run(main())


def test_each_kind_of_problem_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with hostile() as it:
            for _ in range(500):
                it.send(b"\xc1")
                it.send(encode([1.0, [{"type": "BlockStored"}]]))
            await until(lambda: it.stats.problems[Problem.EVENT] == 500)
            assert it.stats.problems[Problem.BATCH] == 500

    with caplog.at_level(logging.WARNING, logger="lbproxy"):
        run(main())
    assert [record.__dict__["problem"] for record in caplog.records] == ["batch", "event"]
    assert all(len(record.getMessage()) < 300 and "\n" not in record.getMessage() for record in caplog.records)


def test_a_flood_fills_no_memory() -> None:
    """20,000 batches of 20 KB as fast as they can be sent: most are dropped, and gaps show it."""

    async def main() -> None:
        rng = random.Random(1)
        async with hostile() as it:
            batch = encode([1.0, [stored(*(rng.getrandbits(64) for _ in range(300)), token_ids=[70_000] * 3_500)]])
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for number in range(20_000):
                it.send(batch)
                if number % 100 == 0:
                    await asyncio.sleep(0)
            await it.survives()
            assert it.stats.messages > 100
            assert it.stats.lost > 1_000
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            assert grown < 150_000, f"{grown} KiB"

    run(main())


def test_a_publisher_that_counts_backwards_is_a_restart_each_time() -> None:
    async def main() -> None:
        async with hostile() as it:
            for number in range(2_000, 0, -1):
                it.send(CLEAR, number=number)
                if number % 100 == 0:  # before ZMQ drops what a busy machine does not read
                    await until(lambda number=number: it.stats.restarts >= 2_000 - number)  # type: ignore[misc]
            await until(lambda: it.stats.restarts >= 1_999)
            it.sequence = 0
            await it.survives()

    run(main())


@pytest.mark.parametrize("form", ["silent", "endless", "garbage", "backwards", "nobody"])
def test_a_replay_that_fails_costs_the_count_and_nothing_else(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_feed, "REPLAY_SILENT_S", 0.2)
    monkeypatch.setattr(kv_feed, "REPLAY_S", 0.5)

    async def main() -> None:
        port = free_port()
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.set(zmq.LINGER, 0)
            router.set(zmq.SNDHWM, 1_000)
            if form != "nobody":
                router.bind(f"tcp://127.0.0.1:{port}")
            async with hostile(f"tcp://127.0.0.1:{port}") as it, asyncio.TaskGroup() as tasks:
                answering = tasks.create_task(answer(router, form))
                failed = it.stats.problems[Problem.REPLAY]
                it.sequence += 5
                it.send(encode([1.0, [stored(1)]]))
                await until(lambda: it.stats.lost >= 5)
                assert failed or it.stats.problems[Problem.REPLAY]
                assert it.state.reported.cached_tokens is None
                await it.survives()
                answering.cancel()

    run(main())


async def answer(router: zmq.Socket[bytes], form: str) -> None:
    """Respond to each request for a replay, as long as the test lasts."""
    while True:
        await until(lambda: router.poll(0), within_s=60.0)
        client, _, start = router.recv_multipart()
        first = int.from_bytes(start)
        if form == "garbage":
            router.send_multipart([client, b"x", b"y"])
        for number in range(2_000 if form in {"endless", "backwards"} else 0):
            sent = 0 if form == "endless" else max(0, first - number - 1)
            router.send_multipart([client, b"", b"t", sent.to_bytes(8), b"\xc1"])


def test_old_publishers_replay_without_a_topic() -> None:
    """vLLM up to 0.24, SGLang up to 0.5.21."""

    async def main() -> None:
        port = free_port()
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.set(zmq.LINGER, 0)
            router.bind(f"tcp://127.0.0.1:{port}")
            async with hostile(f"tcp://127.0.0.1:{port}") as it, asyncio.TaskGroup() as tasks:

                async def old() -> None:
                    while True:
                        await until(lambda: router.poll(0), within_s=60.0)
                        client, _, start = router.recv_multipart()
                        for number in range(int.from_bytes(start), it.sequence):
                            batch = encode([1.0, [["BlockStored", [number], None, [], 16, None]]])
                            router.send_multipart([client, b"", number.to_bytes(8), batch])
                        router.send_multipart([client, b"", b"\xff" * 8, b""])

                answering = tasks.create_task(old())
                it.send(CLEAR)
                it.sequence += 5
                it.send(encode([1.0, [["BlockStored", [0], None, [], 16, None]]]))
                await until(lambda: it.stats.replayed >= 5)
                await until(lambda: it.state.reported.cached_tokens == 16 * 6)
                assert it.stats.lost == 0
                answering.cancel()

    run(main())
