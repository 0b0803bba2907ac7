# SPDX-License-Identifier: Apache-2.0
"""The KV events of simulated engines, over real sockets: what is counted of a cache is what is in it, events that are
lost are replayed, and a publisher that starts again is a new process.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest

from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import Endpoint
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.engines.kv_events import KvStats, Problem
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.driver.runtime import Runtime
from lbproxy.extras.kv_events import KvEvents
from lbproxy.sim.engine.engine import Engine
from lbproxy.sim.mock.http import MockOptions, MockServer
from lbproxy.sim.mock.serving.kv_publisher import KvPublisher
from tests.support.aio import run, until
from tests.support.pool import bring_up, make_balancer, spec
from tests.support.ports import free_port

KV_TOKENS = 8_000


class Reader:
    """A Balancer whose endpoints' events are read."""

    def __init__(self, balancer: Balancer, tasks: asyncio.TaskGroup) -> None:
        self.balancer = balancer
        self.events = KvEvents(balancer, Runtime(balancer))
        self._tasks = tasks
        self._loops: list[asyncio.Task[None]] = []

    def follow(self, endpoints: list[Endpoint]) -> None:
        self._loops += [self._tasks.create_task(self.events.follow(one)) for one in endpoints]

    async def stop(self) -> None:
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        self._loops.clear()

    def state(self, name: str = "e1") -> EndpointState:
        return next(one for one in self.balancer.endpoints.members() if one.endpoint.name == name)

    def stats(self, name: str = "e1") -> KvStats:
        return self.events.stats[name]


class Engines:
    """A simulated server, what it publishes, and who reads it."""

    def __init__(self, server: MockServer, reader: Reader, http: aiohttp.ClientSession) -> None:
        self.server = server
        self.reader = reader
        self._http = http
        self._rng = random.Random(1)

    async def ask(self, words: int = 300) -> None:
        """A prompt of random words, so that nothing of it is cached."""
        prompt = " ".join(str(self._rng.random()) for _ in range(words // 8))
        async with self._http.post("/v1/completions", json={"model": "sim", "prompt": prompt, "max_tokens": 4}) as done:
            assert done.status == 200
            await done.read()

    async def clear(self) -> None:
        async with self._http.post("/reset_prefix_cache") as done:
            assert done.status == 200

    @property
    def publisher(self) -> KvPublisher:
        return self.server.published.publishers[0]

    def cached(self, rank: int = 0) -> int:
        """Tokens that really are in the cache."""
        engine = self.server.published._engines[rank]
        return 16 * len(engine._pool._by_hash)

    async def agree(self) -> None:
        """Wait until the reader counts what is there."""
        state = self.reader.state()
        await until(
            lambda: state.reported.cached_tokens == self.cached(), f"{state.reported.cached_tokens} of {self.cached()}"
        )


@asynccontextmanager
async def engines(
    *, replay: bool = True, bind: bool = False, ranks: int = 1, follow: bool = True
) -> AsyncIterator[Engines]:
    events, replays = free_port(), free_port()
    options = MockOptions(
        speed=200.0,
        kv_tokens=KV_TOKENS,
        ranks=ranks,
        kv_events=f"tcp://{'127.0.0.1' if bind else '*'}:{events}",
        kv_events_replay=f"tcp://*:{replays}" if replay else None,
    )
    member = replace(
        spec(1),
        kv_events=f"bind tcp://*:{events}" if bind else f"tcp://127.0.0.1:{events}",
        kv_events_replay=f"tcp://127.0.0.1:{replays}" if replay else None,
    )
    balancer = make_balancer(policy="adaptive")
    members = [member] if ranks == 1 else [replace(member, name=f"e1#{n}", rank=n) for n in range(ranks)]
    added = balancer.set_endpoints(members, now=0.0).added
    bring_up(balancer, added)
    async with asyncio.TaskGroup() as tasks:
        reader = Reader(balancer, tasks)
        try:
            async with MockServer(options) as server, aiohttp.ClientSession(server.url) as http:
                it = Engines(server, reader, http)
                if follow:
                    reader.follow(added)
                    await joined(it)
                yield it
        finally:
            await reader.stop()
            reader.events.close()


async def joined(it: Engines) -> None:
    """Wait until the first events arrive: a publisher drops what it sends before a subscriber has connected."""
    async with asyncio.timeout(30):
        while not it.reader.events.stats or any(not one.messages for one in it.reader.events.stats.values()):
            await asyncio.gather(*(it.ask() for _ in range(4)))
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("bind", [False, True])
def test_what_is_counted_is_what_is_cached(bind: bool) -> None:
    """Of an engine that evicts, from its first event on; also of one that connects to us."""

    async def main() -> None:
        async with engines(bind=bind) as it:
            state, stats = it.reader.state(), it.reader.stats()
            while stats.removed < 1_000:  # twice what it holds
                await asyncio.gather(*(it.ask(600) for _ in range(4)))
            await it.agree()
            assert (stats.lost, sum(stats.problems.values())) == (0, 0)
            assert state.reported.measured_cache_tokens is not None
            assert 0.9 * KV_TOKENS < state.reported.measured_cache_tokens <= KV_TOKENS
            assert state.load.kv.capacity_tokens == state.reported.measured_cache_tokens

    run(main())


def test_a_clear_forgets_what_is_predicted_with_the_next_step() -> None:
    """vLLM publishes a clear with the next step that it computes."""

    async def main() -> None:
        async with engines() as it:
            state = it.reader.state()
            ticket = it.reader.balancer.submit(InferenceRequest("r", "m", True, 4096, 4096, tuple(range(4))), now=0.0)
            assert ticket.placed_on is state
            assert state.load.kv.cache.size == 4
            await it.clear()
            assert it.cached() == 0
            await it.ask()
            await until(lambda: state.load.kv.cache.size == 0)
            await it.agree()
            assert it.reader.stats().clears == 1

    run(main())


def test_lost_events_are_replayed() -> None:
    async def main() -> None:
        async with engines() as it:
            await it.agree()
            stats, before = it.reader.stats(), it.reader.stats().replayed
            it.publisher.lose = 3
            while it.publisher.lose:
                await it.ask()
            await it.ask()
            await until(lambda: stats.replayed == before + 3)
            await it.agree()
            assert stats.lost == 0

    run(main())


def test_a_clear_among_lost_events_is_replayed() -> None:
    async def main() -> None:
        async with engines() as it:
            state = it.reader.state()
            it.reader.balancer.submit(InferenceRequest("r", "m", True, 4096, 4096, tuple(range(4))), now=0.0)
            await it.agree()
            await it.clear()
            it.publisher.lose = 1
            while it.publisher.lose:
                await it.ask()
            assert state.load.kv.cache.size == 4
            await it.ask()
            await until(lambda: state.load.kv.cache.size == 0)
            await it.agree()

    run(main())


def test_without_a_replay_the_count_is_unknown_after_a_gap_and_the_prefixes_stay() -> None:
    """Until a clear, which says what is in the cache: nothing."""

    async def main() -> None:
        async with engines(replay=False) as it:
            state, stats = it.reader.state(), it.reader.stats()
            it.reader.balancer.submit(InferenceRequest("r", "m", True, 4096, 4096, tuple(range(4))), now=0.0)
            await it.clear()
            await it.ask()
            await it.agree()
            it.reader.balancer.submit(InferenceRequest("r", "m", True, 4096, 4096, tuple(range(4))), now=0.0)
            it.publisher.lose = 2
            while it.publisher.lose:
                await it.ask()
            await it.ask()
            await until(lambda: stats.lost == 2)
            assert state.reported.cached_tokens is None
            assert stats.problems[Problem.GAP] == 1
            assert state.load.kv.cache.size == 4
            await it.clear()
            await it.ask()
            await it.agree()

    run(main())


def test_a_publisher_that_starts_again_is_a_new_process() -> None:
    async def main() -> None:
        async with engines() as it:
            state, stats = it.reader.state(), it.reader.stats()
            await it.agree()
            it.reader.balancer.submit(InferenceRequest("r", "m", True, 4096, 4096, tuple(range(4))), now=0.0)
            engine = it.server.driver.engine
            assert isinstance(engine, Engine)
            engine.restart(now=asyncio.get_running_loop().time())
            it.publisher._changes.clear()
            it.publisher.start_again()
            await it.ask()
            await until(lambda: stats.restarts == 1)
            assert state.load.kv.cache.size == 0
            await it.agree()
            assert stats.lost == 0

    run(main())


def test_who_joins_late_is_told_the_past() -> None:
    """A clear in it is older than anything that is predicted."""

    async def main() -> None:
        async with engines(follow=False) as it:
            for _ in range(6):
                await asyncio.gather(*(it.ask(600) for _ in range(4)))
            await it.clear()
            for _ in range(3):
                await it.ask()
            it.reader.balancer.submit(InferenceRequest("r", "m", True, 4096, 4096, tuple(range(4))), now=0.0)
            it.reader.follow([it.reader.state().endpoint])
            await joined(it)
            await it.agree()
            assert it.reader.stats().replayed >= 4
            assert it.reader.state().load.kv.cache.size == 4

    run(main())


def test_who_joins_late_without_a_replay_knows_nothing_until_the_cache_has_turned_over() -> None:
    async def main() -> None:
        async with engines(replay=False, follow=False) as it:
            for _ in range(6):
                await asyncio.gather(*(it.ask(600) for _ in range(4)))
            it.reader.follow([it.reader.state().endpoint])
            await joined(it)
            assert it.reader.state().reported.cached_tokens is None
            for _ in range(12):
                await asyncio.gather(*(it.ask(600) for _ in range(4)))
            await it.agree()
            stats = it.reader.stats()
            assert (stats.lost, sum(stats.problems.values())) == (0, 0), "nothing was lost before the begin"

    run(main())


def test_each_rank_has_a_port_and_a_count_of_its_own() -> None:
    async def main() -> None:
        async with engines(replay=False, ranks=2) as it:
            for _ in range(24):  # what was published before both had joined is unknown until it was evicted
                await asyncio.gather(*(it.ask(600) for _ in range(8)))
            for rank in (0, 1):
                state = it.reader.state(f"e1#{rank}")
                await until(lambda state=state, rank=rank: state.reported.cached_tokens == it.cached(rank))  # type: ignore[misc]
            assert set(it.reader.events.stats) == {"e1#0", "e1#1"}

    run(main())


def test_an_address_that_is_taken_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """By the process before us, after a restart without interruption."""

    async def main() -> None:
        port = free_port()
        before = await asyncio.start_server(lambda *_: None, "127.0.0.1", port)
        balancer = make_balancer(policy="adaptive")
        added = balancer.set_endpoints([replace(spec(1), kv_events=f"bind tcp://127.0.0.1:{port}")], now=0.0).added
        async with asyncio.TaskGroup() as tasks:
            reader = Reader(balancer, tasks)
            reader.follow(added)
            await until(lambda: "Address already in use" in caplog.text)
            before.close()
            await before.wait_closed()
            publisher = KvPublisher(f"tcp://127.0.0.1:{port}", None, 0)
            while not reader.stats().messages:
                publisher.cleared()
                publisher.publish()
                await asyncio.sleep(0.01)
            publisher.close()
            await reader.stop()
            reader.events.close()

    run(main())
    assert caplog.text.count("cannot be received") == 1


def test_nothing_is_known_any_more_of_what_is_not_read_any_more() -> None:
    async def main() -> None:
        async with engines() as it:
            await it.agree()
            await it.reader.stop()
            assert it.reader.state().reported.cached_tokens is None
            assert not it.reader.events.stats

    run(main())
