# SPDX-License-Identifier: Apache-2.0
"""Replicas that tell each other over a real server, which fails in every way; each has a Balancer without endpoints'
traffic, so that a test decides every placement.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.sections.replicas import ReplicasSettings
from lbproxy.config.sections.routing import RoutingSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage
from lbproxy.driver.runtime import Runtime
from lbproxy.extras.replication import SILENT_S, Replication, make_replication
from tests.support.aio import run, until
from tests.support.pool import MODEL, card, spec, submit
from tests.support.redis_failures import FAILURES
from tests.support.redis_server import PROGRAMS, needs_redis, redis_server, use

pytestmark = needs_redis
KEYS = tuple(range(100, 140))
WITHIN_S = 30.0


@pytest.fixture(params=PROGRAMS, autouse=True)
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test with each server."""
    use(request.param, monkeypatch)


class Member:
    """One replica."""

    def __init__(self, url: str, name: str) -> None:
        rng = random.Random(1)
        self.balancer = Balancer(make_policy(RoutingSettings(), rng), BalancingSettings(), rng=rng)
        self.runtime = Runtime(self.balancer)
        for endpoint in self.runtime.set_endpoints([spec(1), spec(2)]).added:
            self.runtime.report_health(endpoint.uid, True, "test")
            self.runtime.report_models(endpoint.uid, [card(MODEL)])
        made = make_replication(
            ReplicasSettings.model_validate({"url": url, "name": name}), self.balancer, self.runtime
        )
        assert made is not None
        self.replication: Replication = made
        self.runs: asyncio.Task[None] | None = None

    def place(self, number: int = 0) -> Ticket:
        """A short request."""
        return self._placed(InferenceRequest(f"r{number}", MODEL, True, 200, 100))

    def place_long(self) -> Ticket:
        """One with a prompt that is always the same."""
        return self._placed(InferenceRequest("long", MODEL, True, 40_000, 40_960, KEYS))

    def _placed(self, request: InferenceRequest) -> Ticket:
        ticket = submit(self.runtime, request)
        assert ticket.placed_on is not None
        return ticket

    def end(self, ticket: Ticket) -> None:
        self.runtime.first_byte(ticket)
        self.runtime.close(ticket, Outcome.COMPLETED, Usage(10_000, 0, 10))

    @property
    def elsewhere(self) -> int:
        """Requests of others, as this one knows."""
        return sum(state.elsewhere for state in self.balancer.endpoints.members())

    @property
    def in_models(self) -> int:
        """Requests in the load models, of all replicas."""
        return sum(state.load.work.in_flight for state in self.balancer.endpoints.members())

    async def cut(self) -> None:
        """As kill -9 would: nobody is told."""
        assert self.runs is not None
        self.runs.cancel()
        await asyncio.gather(self.runs, return_exceptions=True)


@asynccontextmanager
async def replicas(url: str, *names: str, others: int | None = None) -> AsyncIterator[list[Member]]:
    members = [Member(url, name) for name in names]
    count = len(members) - 1 if others is None else others

    def connected() -> bool:
        parts = [one.replication for one in members]
        return all(one.problem is None and len(one.facts().others) == count for one in parts)

    async with asyncio.TaskGroup() as tasks:
        for member in members:
            await member.replication.join()
            member.runs = tasks.create_task(member.replication.run())
        try:
            await until(connected, "all are connected", within_s=WITHIN_S)
            yield members
        finally:
            for member in members:
                if member.runs is not None:
                    member.runs.cancel()


def test_each_counts_what_others_placed_and_knows_their_prefixes(tmp_path: Path) -> None:
    async def body() -> None:
        with redis_server(tmp_path) as server:
            async with replicas(server.url, "a", "b", "c") as (a, b, c):
                placed = a.place_long()
                await until(lambda: (b.elsewhere, c.elsewhere) == (1, 1))
                assert (a.elsewhere, a.in_models, b.in_models) == (0, 1, 1)
                a.end(placed)
                await until(lambda: (b.elsewhere, c.elsewhere, b.in_models) == (0, 0, 0))
                assert b.place_long().placed_state.endpoint.name == placed.placed_state.endpoint.name

    run(body())


def test_who_joins_is_told_what_another_knows(tmp_path: Path) -> None:
    async def body() -> None:
        with redis_server(tmp_path) as server:
            async with replicas(server.url, "a") as (a,):
                known = a.place_long()
                a.end(known)
                running = a.place()
                a.balancer.stored_responses.remember(
                    "resp_1", known.placed_state.endpoint.uid, known.request, now=a.runtime.now()
                )
                b = Member(server.url, "b")
                saved = await b.replication.join()
                assert saved is not None
                restoring = b.balancer.restarts.restore(saved, age_s=0.0, now=b.runtime.now())
                assert restoring is not None
                while restoring.step():
                    pass
                async with asyncio.TaskGroup() as tasks:
                    task = tasks.create_task(b.replication.run())
                    await until(lambda: b.elsewhere == 1, "what runs at a is known")
                    stored = b.balancer.stored_responses
                    await until(lambda: stored.find("resp_1", now=b.runtime.now()) is not None, "and what is stored")
                    assert b.place_long().placed_state.endpoint.name == known.placed_state.endpoint.name
                    a.end(running)
                    await until(lambda: b.elsewhere == 0)
                    task.cancel()

    run(body())


def test_a_replica_that_dies_is_taken_out_and_one_that_leaves_at_once(tmp_path: Path) -> None:
    async def body() -> None:
        with redis_server(tmp_path) as server:
            async with replicas(server.url, "a", "b", "c") as (a, b, c):
                b.place()
                c.place()
                await until(lambda: a.elsewhere == 2)
                await b.cut()
                began = a.runtime.now()
                await until(lambda: a.elsewhere == 1, "b is taken out")
                assert a.runtime.now() - began < WITHIN_S
                await c.cut()
                await c.replication.leave()
                await until(lambda: a.elsewhere == 0, "c left")
                assert a.replication.facts().others == []

    run(body())


def test_the_last_batch_before_a_silence_is_missed_and_noticed(tmp_path: Path) -> None:
    async def body() -> None:
        with redis_server(tmp_path) as server:
            async with replicas(server.url, "a", "b") as (a, b):
                placed = a.place()
                await until(lambda: b.elsewhere == 1)
                a.end(placed)
                missed = a.balancer._placing.journal.take(a.runtime.now())  # type: ignore[union-attr]
                assert missed is not None
                await until(lambda: b.elsewhere == 0, "an empty batch shows that one is missing", within_s=WITHIN_S)

    run(body())


def _knows(member: Member, requests: int) -> bool:
    return member.elsewhere == requests


@pytest.mark.parametrize("failure", FAILURES)
def test_a_server_that_fails_leaves_each_alone_and_all_join_again(
    tmp_path: Path, failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    fail, mend = FAILURES[failure]
    caplog.set_level(logging.WARNING, "lbproxy")

    async def body() -> None:
        with redis_server(tmp_path) as server:
            async with replicas(server.url, "a", "b") as (a, b):
                before = a.place_long()
                await until(lambda: b.elsewhere == 1)
                a.runtime.first_byte(before)
                fail(server)
                # Requests are placed as ever, and what others have is forgotten, but not their prefixes.
                during = [a.place(n) for n in range(1, 4)]
                await until(lambda: b.replication.problem is not None, "it is noticed", within_s=WITHIN_S)
                await until(lambda: b.elsewhere == 0, "a is not heard of", within_s=WITHIN_S)
                assert b.place_long().placed_state.endpoint.name == before.placed_state.endpoint.name
                a.end(during[0])
                mend(server)
                await until(lambda: b.elsewhere == 3, "b knows again what a has", within_s=WITHIN_S)
                await until(lambda: a.elsewhere == 1, "and a what b has", within_s=WITHIN_S)
                assert (a.replication.problem, b.replication.problem) == (None, None)
                for ticket in (before, *during[1:]):
                    a.end(ticket)
                await until(lambda: (b.elsewhere, b.in_models) == (0, 1), "all of it has ended")

    run(body(), timeout_s=120.0)
    texts = [record.getMessage() for record in caplog.records if record.name == "lbproxy"]
    assert any("goes on alone" in text for text in texts)
    assert all(texts.count(text) <= 2 for text in texts), f"each of the two tells a problem once: {texts}"


def test_a_server_that_loses_everything_at_once_is_filled_again(tmp_path: Path) -> None:
    async def body() -> None:
        with redis_server(tmp_path) as server:
            async with replicas(server.url, "a", "b") as (a, b):
                for number in range(5):
                    ticket = a.place(number)
                    await until(partial(_knows, b, number + 1))
                    server.call("FLUSHALL")
                    assert ticket.placed_on is not None
                await until(lambda: b.elsewhere == 5 and len(b.replication.facts().others) == 1, within_s=WITHIN_S)
                await asyncio.sleep(1.2)  # more than two beats
                assert b.elsewhere == 5

    run(body())


def test_a_server_that_evicts_costs_resets_and_nothing_else(tmp_path: Path) -> None:
    async def body() -> None:
        with redis_server(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "allkeys-random") as server:
            async with replicas(server.url, "a", "b") as (a, b):
                tickets = []
                for number in range(100):
                    tickets.append(a.place(number))
                    server.call("SET", f"noise{number}", "x" * 50_000)
                    await asyncio.sleep(0.02)
                server.call("CONFIG", "SET", "maxmemory", "0")
                await until(lambda: b.elsewhere == 100, "all are known", within_s=WITHIN_S)
                for ticket in tickets:
                    a.end(ticket)
                await until(lambda: b.elsewhere == 0, "all have ended", within_s=WITHIN_S)

    run(body(), timeout_s=120.0)


def test_connections_that_break_again_and_again_lose_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        with redis_server(tmp_path) as server:
            async with replicas(server.url, "a", "b") as (a, b):
                tickets = []
                for number in range(30):
                    tickets.append(a.place(number))
                    server.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                    await asyncio.sleep(0.05)
                await until(lambda: b.elsewhere == 30, within_s=WITHIN_S)
                for ticket in tickets:
                    a.end(ticket)
                await until(lambda: b.elsewhere == 0, within_s=WITHIN_S)

    run(body(), timeout_s=120.0)


def test_others_write_garbage_into_the_streams(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lbproxy")

    async def body() -> None:
        with redis_server(tmp_path) as server:
            server.call(
                "SADD", "{lbproxy:default}:replicas", "x", "\udcff".encode("utf-8", "surrogateescape"), "y" * 10_000
            )
            server.call("SET", "{lbproxy:default}:alive:x", "no json")
            async with replicas(server.url, "a", others=1) as (a,):
                assert [one.replica for one in a.replication.facts().others] == ["x"]
                for words in (
                    ("b", b"\x01garbage"),
                    ("b", b""),
                    ("c", b"x"),
                    ("b", b"\x07" + bytes(50)),
                    ("b", bytes(5_000_000)),
                ):
                    server.call("XADD", "{lbproxy:default}:stream:x", "*", *words)
                await until(lambda: a.replication.stats.malformed == 5)
                assert a.replication.problem is None

    run(body())
    assert sum("replicas: x" in record.getMessage() for record in caplog.records) == 1


def test_a_start_without_a_server_does_not_wait(tmp_path: Path) -> None:
    async def body() -> None:
        with redis_server(tmp_path) as server:
            server.kill()
            member = Member(server.url, "a")
            assert await member.replication.join() is None
            server.start()
            server.pause()
            assert await member.replication.join() is None
            await member.replication.leave()
            server.resume()

    run(body())
    assert SILENT_S < 3.0
