# SPDX-License-Identifier: Apache-2.0
"""The calls to servers that sleep, and their driver, against scripted servers: hostile ones, and such that lie."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from lbproxy.control.sleeping import calls
from lbproxy.control.sleeping.driver import SHARE, SleepDriver
from lbproxy.core.endpoints.credentials import ApiKey
from lbproxy.core.endpoints.endpoint import ColdStart, SleepSpec
from lbproxy.core.engines.server_info import is_silent, read_state
from lbproxy.core.sleeping.phase import Phase
from lbproxy.core.sleeping.sleepers import Order, Task
from tests.control.rig import Rig, model_list, rig, running, spec
from tests.support.aio import run, until
from tests.support.endpoint import OK, Received, Script, ScriptedEndpoint, Wire, answer, hang, reset

AWAKE, ASLEEP = answer(b'{"is_sleeping":false}'), answer(b'{"is_sleeping":true}')
FAILS = answer(b"{}", status=500)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (200, b'{"is_sleeping":true}', True),
        (200, b'{"is_sleeping":false,"more":1}', False),
        (200, b'{"is_sleeping":"true"}', None),
        (200, b'{"is_sleeping":1}', None),
        (200, b'{"is_sleeping":null}', None),
        (200, b"[true]", None),
        (200, b"true", None),
        (200, b'{"is_sleeping":tr', None),
        (200, b"\xff\xfe", None),
        (200, b"[" * 60_000, None),
        (404, b'{"is_sleeping":true}', None),
    ],
)
def test_only_a_boolean_in_the_right_place_says_whether_it_sleeps(status: int, body: bytes, said: bool | None) -> None:
    assert read_state(status, body) is said


def test_what_may_be_said_another_time_is_silence() -> None:
    assert [status for status in (200, 401, 404, 408, 429, 500, 501, 502, 503) if is_silent(status)] == [
        408,
        429,
        500,
        502,
        503,
    ]


class Site:
    """A scripted server behind a pool, and its driver."""

    def __init__(self, pool: Rig, server: ScriptedEndpoint) -> None:
        self.pool, self.server = pool, server
        self.endpoint = pool.endpoints[0]
        self.driver = SleepDriver(pool.balancer, pool.runtime, pool.connections, random.Random(1))

    @property
    def phase(self) -> Phase | None:
        return self.pool.balancer.sleepers.phase_of(self.endpoint.uid)

    def asked(self) -> list[str]:
        return [one.line.removesuffix(" HTTP/1.1") for one in self.server.requests]


def drive(body: Callable[[Site], Awaitable[None]], scripts: dict[str, Script], sleep: SleepSpec | None = None) -> None:
    async def main() -> None:
        common: dict[str, Script] = {"/health": OK, "/v1/models": model_list("m")}
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(ScriptedEndpoint(common | scripts))
            one = replace(spec(server), sleep=sleep or SleepSpec(), api_key=ApiKey("s3cret"))
            pool = await stack.enter_async_context(rig(one))
            pool.runtime.report_health(pool.endpoints[0].uid, True, "up")
            await body(Site(pool, server))

    run(main())


def test_a_wake_that_the_server_denies_has_failed() -> None:
    """An engine that says 200 and sleeps on."""

    async def body(site: Site) -> None:
        problem = await calls.wake(site.endpoint, site.pool.connections)
        assert problem == "it was woken, and says that it sleeps"
        assert site.server.requests[0].field("authorization") == "Bearer s3cret"

    drive(body, {"/wake_up": OK, "/is_sleeping": ASLEEP})


@pytest.mark.parametrize(
    ("script", "text"), [(FAILS, "POST /wake_up returned 500"), (reset, "reset"), (answer(b"x" * 100_000), "too large")]
)
def test_a_wake_that_fails_says_why(script: Script, text: str) -> None:
    async def body(site: Site) -> None:
        problem = await calls.wake(site.endpoint, site.pool.connections)
        assert problem is not None
        assert text in problem

    drive(body, {"/wake_up": script, "/is_sleeping": AWAKE})


def test_level_two_wakes_in_three_steps_and_stops_at_the_first_that_fails() -> None:
    async def body(site: Site) -> None:
        assert await calls.wake(site.endpoint, site.pool.connections) is None
        assert site.asked() == [
            "POST /wake_up?tags=weights",
            "POST /collective_rpc",
            "POST /wake_up?tags=kv_cache",
            "GET /is_sleeping",
        ]
        assert site.server.requests[1].body == b'{"method": "reload_weights"}'
        site.server.scripts["/collective_rpc"] = FAILS
        site.server.requests.clear()
        assert await calls.wake(site.endpoint, site.pool.connections) == "POST /collective_rpc returned 500"
        assert len(site.asked()) == 2

    drive(body, {"/wake_up": OK, "/collective_rpc": OK, "/is_sleeping": AWAKE}, SleepSpec(level=2))


def test_a_sleep_that_takes_long_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine finishes what it computes: the call waits for the same end again."""
    monkeypatch.setattr(calls, "SLEEP_S", 0.05)

    asked: list[Received] = []

    async def third(wire: Wire, request: Received) -> None:
        asked.append(request)
        if len(asked) < 3:
            await hang(wire, request)
        await wire.send(OK)

    async def body(site: Site) -> None:
        assert await calls.put_to_sleep(site.endpoint, site.pool.connections) is None
        assert site.asked() == ["POST /sleep?level=1&mode=wait"] * 3

    drive(body, {"/sleep": third})


def test_the_driver_follows_what_a_server_says() -> None:
    async def body(site: Site) -> None:
        assert site.phase is Phase.UNKNOWN
        async with running(lambda: site.driver.follow(site.endpoint), site.driver.run):
            await until(lambda: site.phase is Phase.ASLEEP)
            site.server.scripts["/is_sleeping"] = AWAKE
            await until(lambda: site.phase is Phase.AWAKE)

    drive(body, {"/is_sleeping": ASLEEP})


@pytest.mark.parametrize(
    "script", [answer(b"[]"), answer(b"{}", status=404), answer(b"x" * 200_000), b"nonsense\r\n\r\n"]
)
def test_a_server_that_says_nonsense_is_taken_to_be_awake(script: Script) -> None:
    async def body(site: Site) -> None:
        async with running(lambda: site.driver.follow(site.endpoint)):
            await until(lambda: site.phase is Phase.AWAKE)

    drive(body, {"/is_sleeping": script})


def test_a_server_that_does_not_respond_now_is_asked_again() -> None:
    async def body(site: Site) -> None:
        async with running(lambda: site.driver.follow(site.endpoint)):
            await until(lambda: site.server.asked("/is_sleeping") > 1)
            assert site.phase is Phase.UNKNOWN
            site.server.scripts["/is_sleeping"] = AWAKE
            await until(lambda: site.phase is Phase.AWAKE)

    drive(body, {"/is_sleeping": FAILS})


def test_a_call_that_is_cancelled_ends_all_the_same() -> None:
    """Or the server would never get another order."""

    async def body(site: Site) -> None:
        sleepers = site.pool.balancer.sleepers
        sleepers.reported(site.endpoint.base_url, True, asked_at=site.pool.runtime.now(), now=site.pool.runtime.now())
        assert sleepers.ask(site.endpoint.uid, Task.WAKE, now=site.pool.runtime.now()) is None
        async with running(site.driver.run):
            await until(lambda: site.server.asked("/wake_up"))
        assert site.phase is Phase.ASLEEP
        assert site.driver.results[site.endpoint.server, "wake", "failed"] == 1
        sleepers.ask(site.endpoint.uid, Task.WAKE, now=site.pool.runtime.now())
        assert len(sleepers.decide(site.pool.runtime.now() + 1.0)) == 1

    drive(body, {"/wake_up": hang, "/is_sleeping": ASLEEP})


def test_nothing_is_woken_beside_a_server_that_somebody_woke_a_moment_ago() -> None:
    """Another lbproxy: the others of the host are asked right before."""

    async def main() -> None:
        async with (
            ScriptedEndpoint({"/is_sleeping": ASLEEP, "/wake_up": OK}) as one,
            ScriptedEndpoint({"/is_sleeping": ASLEEP, "/wake_up": OK}) as two,
        ):
            sleep = SleepSpec(host="box")
            async with rig(*(replace(spec(it, it.url[-5:]), sleep=sleep, models=("m",)) for it in (one, two))) as pool:
                sleepers, now = pool.balancer.sleepers, pool.runtime.now
                driver = SleepDriver(pool.balancer, pool.runtime, pool.connections, random.Random(1))
                for endpoint in pool.endpoints:
                    pool.runtime.report_health(endpoint.uid, True, "up")
                    sleepers.reported(endpoint.base_url, True, asked_at=now(), now=now())
                two.scripts["/is_sleeping"] = AWAKE
                sleepers.ask(pool.endpoints[0].uid, Task.WAKE, now=now())
                async with running(driver.run):
                    await until(lambda: driver.results[pool.endpoints[0].server, "wake", "failed"])
                assert one.asked("/wake_up") == 0
                assert sleepers.phase_of(pool.endpoints[1].uid) is Phase.AWAKE

    run(main())


def test_decisions_that_take_long_are_rare() -> None:
    """Of a fleet of thousands: together they take a small share of the CPU."""
    made: list[float] = []

    async def body(site: Site) -> None:
        class Slow:
            is_needed, transitions = True, ()

            def decide(self, _now: float) -> list[Order]:
                made.append(time.monotonic())
                until_s = time.thread_time() + 0.0015
                while time.thread_time() < until_s:
                    pass
                return []

        site.driver._sleepers = Slow()  # type: ignore[assignment]
        async with running(site.driver.run):
            await until(lambda: len(made) == 3)
        assert made[2] - made[0] >= 2 * 0.0015 / SHARE

    drive(body, {})


@pytest.mark.parametrize("path", ["", "/", "/start?a=1"])
def test_a_webhook_gets_what_is_needed_and_its_token(path: str) -> None:
    async def body(site: Site) -> None:
        hook = ColdStart(f"{site.server.url}{path}", 10.0, ApiKey("t0ken"))
        problem = await calls.start(site.endpoint, hook, "m", 3, site.pool.connections)
        assert problem is None
        got = site.server.requests[0]
        assert got.line == f"POST {path or '/'} HTTP/1.1"
        assert got.field("authorization") == "Bearer t0ken"
        assert b'"waiting":3' in got.body

    drive(body, {"/": OK, "/start": answer(b"", status=202)})


def test_a_webhook_that_refuses_has_failed() -> None:
    async def body(site: Site) -> None:
        for script, text in ((FAILS, "the webhook returned 500"), (answer(b"", status=302), "returned 302")):
            site.server.scripts["/"] = script
            hook = ColdStart(site.server.url, 10.0)
            problem = await calls.start(site.endpoint, hook, None, 0, site.pool.connections)
            assert problem is not None
            assert text in problem
        site.server.scripts["/"] = reset
        assert "the webhook: " in (await calls.start(site.endpoint, hook, None, 0, site.pool.connections) or "")

    drive(body, {})


def test_cancelling_the_loop_leaves_no_task() -> None:
    async def body(site: Site) -> None:
        async with running(site.driver.run, lambda: site.driver.follow(site.endpoint)):
            await until(lambda: site.server.asked("/is_sleeping"))
        assert len(asyncio.all_tasks()) <= 1 + len(site.server.wires)

    drive(body, {"/is_sleeping": hang})
