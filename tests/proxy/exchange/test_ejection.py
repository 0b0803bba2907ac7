# SPDX-License-Identifier: Apache-2.0
"""The state machine through real sockets: endpoints that fail fast, poison, and requests that wait in vain."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextlib import AsyncExitStack

import pytest

from lbproxy.core.endpoints.breaker import Cause
from lbproxy.core.endpoints.health import Health
from lbproxy.core.requests.outcome import Outcome
from lbproxy.net.connections.pool import SWEEP_S
from tests.support.aio import run, until
from tests.support.endpoint import (
    LAST,
    OK,
    STREAM_HEAD,
    Received,
    Script,
    ScriptedEndpoint,
    Wire,
    answer,
    event,
    hang,
    reset,
)
from tests.support.rig import Reply, Rig, post, rig

LEAST_REQUEST = "routing: {policy: least-request}"
ERROR = answer(b'{"error":{"message":"no","code":500}}', status=500)


async def slow(wire: Wire, _: Received) -> None:
    """A good answer that takes a while."""
    await asyncio.sleep(0.02)
    await wire.send(OK)


PLAIN = b'{"model":"m"}'


async def many(it: Rig, count: int, at_once: int, bodies: tuple[bytes, ...] = (PLAIN,)) -> list[Reply]:
    """So many requests, so many at a time."""
    left = iter(range(count))
    replies: list[Reply] = []

    async def client() -> None:
        for n in left:
            reply = await it.ask(post(bodies[n % len(bodies)]))
            replies.append(reply)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(client())
    return replies


def states(it: Rig) -> dict[str, Health]:
    return {one.endpoint.name: one.health for one in it.snapshots()}


async def servers(stack: AsyncExitStack, *scripts: Script) -> list[ScriptedEndpoint]:
    return [await stack.enter_async_context(ScriptedEndpoint(script)) for script in scripts]


@pytest.mark.parametrize("policy", ["least-request", "adaptive"])
def test_a_black_hole_gets_few_though_it_is_always_the_least_loaded(policy: str) -> None:
    """500 in a moment, while the others take theirs: 5, 1 in 100, and what was on its way to it meanwhile."""
    count, at_once = 400, 8

    async def main() -> None:
        async with AsyncExitStack() as stack:
            bad, *good = await servers(stack, ERROR, slow, slow, slow)
            urls = [one.url for one in (bad, *good)]
            it = await stack.enter_async_context(rig(*urls, more=f"routing: {{policy: {policy}}}"))
            replies = await many(it, count, at_once)
            assert Counter(reply.status for reply in replies) == {200: count}
            assert len(bad.requests) <= 5 + 0.01 * count + at_once / 4

    run(main())


def test_a_fast_failure_that_lasts_is_an_ejection() -> None:
    """502 is no request's fault: five in a row are enough."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            bad, good = await servers(stack, answer(status=502), slow)
            it = await stack.enter_async_context(rig(bad.url, good.url, more=LEAST_REQUEST))
            replies = await many(it, 60, 4)
            assert Counter(reply.status for reply in replies) == {200: 60}
            assert states(it)["e1"] in {Health.EJECTED, Health.HALF_OPEN}
            first = it.records.transitions[0]
            assert first.after is Health.EJECTED
            assert "returned 502" in first.reason

    run(main())


def test_poison_is_tried_twice_and_ejects_nobody() -> None:
    poison = b'{"model":"m","poison":1}'

    async def maybe(wire: Wire, request: Received) -> None:
        await wire.send(ERROR if b"poison" in request.body else OK)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            endpoints = await servers(stack, maybe, maybe, maybe, maybe)
            it = await stack.enter_async_context(rig(*(one.url for one in endpoints), more=LEAST_REQUEST))
            replies = await many(it, 200, 4, (poison, PLAIN))
            assert Counter(reply.status for reply in replies) == {200: 100, 500: 100}
            asked = sum(b"poison" in one.body for endpoint in endpoints for one in endpoint.requests)
            assert asked <= 200
            assert not it.records.transitions

    run(main())


# --- Requests that wait in vain ---------------------------------------------------------------------------------------


async def silent_stream(wire: Wire, _: Received) -> None:
    """The head of a stream, and nothing more."""
    await wire.send(STREAM_HEAD)
    await wire.watch()


async def begun_stream(wire: Wire, _: Received) -> None:
    """One event, and nothing more."""
    await wire.send(STREAM_HEAD, event("1"))
    await wire.watch()


async def whole_stream(wire: Wire, _: Received) -> None:
    await wire.send(STREAM_HEAD, event('{"choices":[{"finish_reason":"stop"}]}'), event("[DONE]"), LAST)


async def stranded(
    stack: AsyncExitStack, script: Script, more: str = ""
) -> tuple[Rig, ScriptedEndpoint, ScriptedEndpoint]:
    """A request that waits on e1, because e2 was down when it came."""
    one, two = await servers(stack, script, whole_stream)
    it = await stack.enter_async_context(rig(one.url, two.url, more=f"{LEAST_REQUEST}\n{more}"))
    it.take_down("e2")
    client = await it.connect()
    client.send(post(b'{"model":"m","stream":true}'))
    await until(lambda: one.requests)
    uid = it.endpoints[1].uid
    for _ in range(2):
        it.runtime.report_health(uid, True, "back")
    assert states(it) == {"e1": Health.UP, "e2": Health.UP}
    return it, one, two


@pytest.mark.parametrize("script", [hang, silent_stream], ids=["no head", "a head that was not passed on"])
def test_who_waits_on_an_endpoint_that_goes_down_is_answered_by_another(script: Script) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            it, one, two = await stranded(stack, script)
            it.take_down("e1")
            reply = await it.clients[0].reply()
            assert (reply.status, reply.field("x-lbproxy-endpoint")) == (200, "e2")
            assert reply.field("x-lbproxy-attempts") == "2"
            assert b"[DONE]" in reply.body
            await until(one.wires[0].gone.is_set, "the old connection is closed")
            assert two.requests[0].body == one.requests[0].body
            await until(lambda: it.records.requests)
            record = it.records.requests[0]
            assert (record.outcome, record.failed) == (Outcome.COMPLETED, (("e1", "upstream_stranded"),))

    run(main())


def test_no_progress_moves_them_too() -> None:
    """The same when the breaker, not health, is who says so."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            it, _, _ = await stranded(stack, hang)
            state = it.balancer._endpoints.get(it.endpoints[0].uid)
            assert state is not None
            it.balancer._judge._eject(state, Cause.NO_PROGRESS, "test", it.runtime.now())
            it.runtime.check()
            reply = await it.clients[0].reply()
            assert reply.field("x-lbproxy-endpoint") == "e2"

    run(main())


def test_who_has_a_byte_stays() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            it, one, two = await stranded(stack, begun_stream)
            client = it.clients[0]
            assert b"200 OK" in await client.head()
            it.take_down("e1")
            it.runtime.check()
            await asyncio.sleep(0.05)
            assert not one.wires[0].gone.is_set()
            assert not two.requests

    run(main())


def test_without_budget_they_stay_and_go_when_there_is_some() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            it, one, two = await stranded(stack, hang, "retry: {budget_ratio: 0, budget_per_second: 0}")
            it.take_down("e1")
            it.runtime.check()
            await asyncio.sleep(0.05)
            assert not two.requests
            assert it.in_flight() == 1
            it.retries._per_second = 10.0
            it.runtime.check()
            assert (await it.clients[0].reply()).field("x-lbproxy-endpoint") == "e2"
            assert len(one.requests) == len(two.requests) == 1

    run(main())


def test_a_client_that_left_meanwhile_is_not_asked_for() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            it, one, two = await stranded(stack, hang)
            it.clients[0].writer.transport.abort()
            await until(one.wires[0].gone.is_set)
            it.take_down("e1")
            it.runtime.check()
            assert not two.requests
            await until(lambda: it.records.requests)
            assert it.records.requests[0].outcome is Outcome.CLIENT_CLOSED

    run(main())


# --- Nobody is up -----------------------------------------------------------------------------------------------------


def test_a_dead_pool_is_said_at_once_and_dialled_seldom() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            endpoints = await servers(stack, reset, reset)
            it = await stack.enter_async_context(rig(*(one.url for one in endpoints), more=LEAST_REQUEST))
            it.take_down("e1")
            it.take_down("e2")
            began = it.runtime.now()
            replies = [await it.ask(post()) for _ in range(100)]
            took = it.runtime.now() - began
            codes = Counter(json.loads(reply.body)["error"]["code"] for reply in replies)
            assert set(codes) <= {"no_endpoints", "upstream_reset"}
            for endpoint in endpoints:
                assert len(endpoint.wires) <= 1 + took / 0.5
            refused = next(reply for reply in replies if reply.status == 503)
            assert refused.field("retry-after")

    run(main())


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_pool_that_counts_as_up_and_refuses_connections_is_502(count: int) -> None:
    """Whether it had attempts left or endpoints left does not matter."""

    async def main() -> None:
        urls = [f"http://127.0.0.{n + 2}:9" for n in range(count)]  # nothing listens there
        async with rig(*urls, more=f"{LEAST_REQUEST}\nbreaker: {{consecutive_failures: 50}}") as it:
            reply = await it.ask(post())
            assert {one.health for one in it.runtime.snapshot().endpoints} == {Health.UP}
            assert (reply.status, json.loads(reply.body)["error"]["code"]) == (502, "upstream_connect_failed")

    run(main())


def test_a_request_may_bring_back_who_is_down() -> None:
    """Good answers count like good probes: nobody waits for a prober that is refused."""

    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            it.take_down("e1")
            statuses: list[int] = []
            while states(it)["e1"] is not Health.UP:
                statuses.append((await it.ask(post())).status)
                await asyncio.sleep(0.02)
                assert len(statuses) < 500
            assert statuses.count(200) == 2
            assert (await it.ask(post())).status == 200

    run(main())


def test_a_stall_of_our_own_cuts_no_answer() -> None:
    """Bytes that came while we slept count as come in time."""

    async def trickle(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD, event("1"))
        await asyncio.sleep(4 * SWEEP_S)
        await wire.send(event("[DONE]"), LAST)

    async def main() -> None:
        limits = "timeouts: {stream_idle: 1500ms, first_byte: 1500ms}"
        async with ScriptedEndpoint(trickle) as endpoint, rig(endpoint.url, more=limits) as it:
            client = await it.connect()
            client.send(post(b'{"model":"m","stream":true}'))
            await client.head()
            time.sleep(2.0)  # noqa: ASYNC251 - the point
            assert b"[DONE]" in await client.reader.readuntil(LAST)
            assert not it.records.transitions

    run(main())


@pytest.mark.parametrize("listens", [True, False])
def test_a_request_whose_connection_is_refused_shows_that_nothing_listens(listens: bool) -> None:
    """So that what listens there later counts as another process, with empty caches; after a reset it does not."""

    async def main() -> None:
        async with ScriptedEndpoint(reset) as endpoint, rig(endpoint.url) as it:
            if not listens:
                await endpoint.stop()
            assert (await it.ask(post())).status >= 500
            state = it.balancer._endpoints.get(it.endpoints[0].uid)
            assert state is not None
            assert state.standing.refused_connection is not listens

    run(main())
