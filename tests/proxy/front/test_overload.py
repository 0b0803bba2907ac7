# SPDX-License-Identifier: Apache-2.0
"""Overload: when requests are refused for our own lack of memory or time, and when that ends."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from lbproxy.config.sections.clients import LimitSettings
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.proxy.front.arrivals import Arrivals
from lbproxy.proxy.front.connection import ClientConnection
from lbproxy.proxy.front.overload import BODIES, LAG, MEMORY, Overload
from tests.support.aio import run, until
from tests.support.endpoint import STREAM_HEAD, Received, ScriptedEndpoint, Wire, event, first_event_or_nothing
from tests.support.rig import post, rig

MIB = 1 << 20


class Meter:
    """Memory of which a test decides."""

    def __init__(self, limit: int | None = 1000 * MIB) -> None:
        self.rss: int | None = 0
        self.limit = limit

    def rss_bytes(self) -> int | None:
        return self.rss

    def limit_bytes(self) -> int | None:
        return self.limit


class Request:
    held_bytes = 0


def made(meter: Meter | None = None, arrivals: Arrivals | None = None, **limits: int) -> Overload:
    return Overload(LimitSettings.model_validate(limits), meter or Meter(), arrivals)


def test_memory_has_three_marks_and_each_ends_below_where_it_began() -> None:
    meter = Meter()
    overload = made(meter)
    ended: list[int] = []

    def end_largest() -> bool:
        ended.append(1)
        return True

    overload.end_largest = end_largest

    def at(percent: int) -> tuple[bool, str | None, int]:
        meter.rss = percent * 10 * MIB
        overload.judge_memory(now=0.0)
        return overload.memory_is_short, overload.refuses, len(ended)

    assert at(84) == (False, None, 0)
    assert at(86) == (True, None, 0)
    assert at(93) == (True, MEMORY, 0)
    assert at(88) == (True, MEMORY, 0), "a little less is not enough"
    assert at(97) == (True, MEMORY, 1)
    assert at(98) == (True, MEMORY, 2), "one at a time, as long as it is that full"
    assert at(95) == (True, MEMORY, 2)
    assert at(86) == (True, None, 2)
    assert at(79) == (False, None, 2)
    assert overload.ended == 2


def test_memory_that_is_free_but_kept_is_given_back_now_and_then() -> None:
    meter = Meter()
    overload = made(meter)
    relieved = []
    overload.relieve = lambda: relieved.append(1)
    for now, percent in ((0, 40), (1, 60), (2, 90), (7, 60), (20, 40)):
        meter.rss = percent * 10 * MIB
        overload.judge_memory(now=now)
    assert len(relieved) == 2


def test_what_a_crowd_leaves_is_given_back_once_it_has_left() -> None:
    """Also far below the limit: of holes 412 MiB were kept after the third crowd of hostile clients."""
    meter = Meter()
    overload, holder = made(meter), Request()
    relieved: list[int | None] = []
    overload.relieve = lambda: relieved.append(meter.rss)
    start = time.monotonic()
    overload.hold(holder, MIB)
    for after_s, mib in (
        *((0.0, 20), (10.0, 100), (10.25, 41), (10.5, 42), (11.0, 43), (11.25, 44)),  # what is left of it, once
        *((20.0, 22), (30.0, 80), (40.0, 90), (41.0, 80)),  # 64 MiB more than the least since, but not again so soon
        *((50.0, 91), (90.0, 92)),  # what cannot be given back is not asked for again
    ):
        if after_s > 10:
            overload.release(holder)
        meter.rss = mib * MIB
        overload.judge_memory(now=start + after_s)
    assert relieved == [42 * MIB, 80 * MIB]


def test_where_nothing_is_known_of_memory_nothing_is_refused_for_it() -> None:
    meter = Meter(limit=None)
    meter.rss = None
    overload = made(meter)
    overload.judge_memory(now=0.0)
    assert (overload.refuses, overload.max_held_bytes) == (None, 512 * MIB)


def test_one_long_standstill_refuses_nobody_but_a_loop_that_stays_late_does() -> None:
    overload = made()

    def late(now: float, lag_s: float) -> str | None:
        overload.judge_lag(lag_s, 0.9, now=now)
        return overload.refuses

    assert late(0.0, 5.0) is None
    assert late(0.05, 0.0) is None
    assert [late(1 + 0.3 * n, 0.3) for n in range(6)] == [None] * 4 + [LAG] * 2
    assert late(2.6, 0.01) == LAG, "not over with the first good tick"
    assert late(3.0, 0.2) == LAG, "and the second begins anew"
    assert late(3.1, 0.01) == LAG
    assert late(4.0, 0.01) == LAG
    assert late(4.11, 0.01) is None
    assert late(4.2, 0.3) is None, "the next time it takes a second again"


def test_who_got_no_cpu_refuses_nobody() -> None:
    """For seconds, again and again: nothing of it is our own load, and nobody gains by a refusal."""
    overload = made()
    for n in range(10):
        overload.judge_lag(2.0, 0.02, now=2.0 * n)
        assert overload.refuses is None


def test_bodies_take_their_room_and_give_it_back() -> None:
    overload = made(buffered_bodies=MIB)
    one, two = Request(), Request()
    overload.hold(one, MIB // 2)
    overload.hold(one, MIB // 4)
    with pytest.raises(LbError) as refused:
        overload.hold(two, MIB // 2)
    assert refused.value.outcome is Outcome.OVERLOADED
    assert overload.refused[BODIES] == 1
    overload.release(one)
    overload.release(one)
    overload.hold(two, MIB)
    assert overload.held_bytes == MIB


class Arriving(Request):
    """A body, of which `size` bytes came at once."""

    def __init__(self, overload: Overload, size: int) -> None:
        self.given_up: LbError | None = None
        overload.arrivals.begin(self, 1000, self._give_up)
        overload.arrivals.moved(self, size)
        overload.hold(self, size, size)

    def _give_up(self, error: LbError) -> None:
        self.given_up = error


def test_who_makes_room_is_large_or_stands_still() -> None:
    """And equals do not replace each other: each would be ended by the next."""
    now = 0.0
    overload = made(arrivals=Arrivals(lambda: now), buffered_bodies=10 * MIB)
    slow, large = Arriving(overload, 2 * MIB), Arriving(overload, 5 * MIB)
    with pytest.raises(LbError):
        overload.hold(Request(), 4 * MIB)
    now += 8.0
    others = [Arriving(overload, 2 * MIB) for _ in range(4)]
    assert large.given_up is not None
    assert (large.given_up.outcome, large.held_bytes) == (Outcome.OVERLOADED, 0)
    assert slow.held_bytes == 2 * MIB, "there was room enough by then"
    with pytest.raises(LbError):
        Arriving(overload, 3 * MIB)
    assert len(overload.arrivals) == 5, "who was refused does not arrive any more"
    complete = Request()
    overload.hold(complete, 2 * MIB)
    assert slow.held_bytes == 0, "of it nothing came lately"
    with pytest.raises(LbError):
        overload.hold(Request(), 2 * MIB)
    overload.hold(Request(), MIB // 2)
    assert [one.given_up is not None for one in others].count(True) == 1
    with pytest.raises(LbError):
        overload.hold(Request(), 11 * MIB)
    assert [one.given_up is not None for one in others].count(True) == 1, "for what never fits nobody is ended"
    assert overload.held_bytes == 8 * MIB + MIB // 2


def test_a_quarter_of_memory_is_for_bodies_unless_a_setting_says_otherwise() -> None:
    assert made(Meter(256 * MIB)).max_held_bytes == 64 * MIB
    assert made(Meter(1 << 40)).max_held_bytes == 512 * MIB
    assert made(memory=100 * MIB).max_held_bytes == 25 * MIB
    assert made(buffered_bodies=3 * MIB).max_held_bytes == 3 * MIB


def test_new_requests_get_503_while_memory_is_short_and_what_runs_goes_on() -> None:
    """And connections are not kept, from a little before."""
    finish = asyncio.Event()

    async def script(wire: Wire, request: Received) -> None:
        await wire.send(STREAM_HEAD + event("1"))
        await finish.wait()
        await wire.send(b"0\r\n\r\n")

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url, more="limits: {memory: 100MiB}") as it:
            meter, overload = Meter(), it.front.overload
            overload._meter = meter
            stream = await it.connect()
            stream.send(post(b'{"model":"m","stream":true}'))
            await stream.head()
            meter.rss = 95 * MIB
            overload.judge_memory(now=0.0)
            refused = await it.ask(post())
            assert (refused.status, json.loads(refused.body)["error"]["code"]) == (503, "lb_overloaded")
            assert refused.field("connection") == "close"
            assert refused.field("retry-after") is not None
            assert overload.refused[MEMORY] == 1
            meter.rss = 86 * MIB
            overload.judge_memory(now=0.0)
            finish.set()
            assert (await it.ask(post())).field("connection") == "close"
            assert (await stream.reader.read(4096)).endswith(b"0\r\n\r\n")

    run(main())


def test_the_largest_request_is_ended_visibly_when_memory_is_nearly_full() -> None:
    """A waiting one by a 503, a stream by an error in it; the small one beside it goes on."""

    async def main() -> None:
        async with ScriptedEndpoint(first_event_or_nothing) as endpoint, rig(endpoint.url) as it:
            waiting, small = await it.connect(), await it.connect()
            small.send(post(b'{"model":"m","stream":true}'))
            await small.head()
            waiting.send(post(b'{"model":"m","prompt":"%s"}' % (b"x" * 50_000)))
            await until(lambda: len(endpoint.requests) == 2, "both run")
            assert it.front.overload.held_bytes > 50_000
            assert it.front.overload.end_largest()
            refused = await waiting.reply()
            assert (refused.status, json.loads(refused.body)["error"]["code"]) == (503, "lb_overloaded")
            await until(lambda: it.front.overload.held_bytes == 0, "its memory is free")
            assert not it.front.overload.end_largest(), "who holds nothing is not worth ending"
            for client in it.front.connections:
                assert isinstance(client, ClientConnection)
                client.cut(Outcome.OVERLOADED)
            rest = await small.reader.read()
            assert b'"code":"lb_overloaded"' in rest
            assert b"[DONE]" not in rest
            await it.settle()
            assert [record.outcome for record in it.records.requests] == [Outcome.OVERLOADED] * 2

    run(main())


def test_a_large_body_is_let_go_when_its_answer_begins() -> None:
    """A stream may last for minutes, and nobody else is going to be asked."""
    begin = asyncio.Event()

    async def script(wire: Wire, request: Received) -> None:
        await begin.wait()
        await wire.send(STREAM_HEAD + event("1"))
        await wire.watch()

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post(b'{"model":"m","stream":true,"prompt":"%s"}' % (b"x" * 300_000)))
            await until(lambda: it.front.overload.held_bytes > 300_000, "it is read")
            begin.set()
            await client.head()
            assert it.front.overload.held_bytes == 0
            assert it.front.running == 1

    run(main())


def test_bodies_that_are_read_at_the_same_time_share_one_limit() -> None:
    """What would exceed it is refused; what was being read before is served."""

    async def main() -> None:
        more = "limits: {buffered_bodies: 1MiB}"
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url, more=more) as it:
            body = b'{"model":"m","prompt":"%s"}' % (b"x" * 700_000)
            first, second = await it.connect(), await it.connect()
            data = post(body)
            first.send(data[:-10])
            await until(lambda: it.front.overload.held_bytes > 860_000, "most of the first is here")
            second.send(data)
            refused = await second.reply()
            assert (refused.status, json.loads(refused.body)["error"]["code"]) == (503, "lb_overloaded")
            await until(lambda: it.front.overload.held_bytes < 890_000, "only the first is held")
            first.send(data[-10:])
            assert (await first.reply()).status == 200
            assert it.front.overload.held_bytes == 0
            assert (await it.ask(post(body + b" " * 400_000))).status == 413, "there will never be room for it"

    run(main())


def test_bodies_that_stand_still_make_room_for_those_that_come() -> None:
    """Three connections that sent 60 MiB and then nothing kept out all others for an hour."""

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url, more="limits: {buffered_bodies: 2560KiB}") as it:
            held = [await it.connect() for _ in range(3)]
            for client in held:
                client.send(post(b'{"model":"m","prompt":"%s"}' % (b"x" * 690_000))[:-10])
            await until(lambda: it.front.overload.held_bytes > 2_570_000, "they hold nearly everything")
            small = post(b'{"model":"m","prompt":"%s"}' % (b"x" * 200_000))
            assert [(await it.ask(small)).status for _ in range(5)] == [200] * 5
            outcomes = [record.outcome for record in it.records.requests]
            assert outcomes.count(Outcome.OVERLOADED) == 1, "one is enough"
            assert outcomes.count(Outcome.COMPLETED) == 5
            for client in held:
                client.writer.transport.abort()
            await until(lambda: it.front.overload.held_bytes == 0)
            assert not it.front.overload.arrivals

    run(main())
