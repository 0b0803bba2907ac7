# SPDX-License-Identifier: Apache-2.0
"""How much of what endpoints send is walked in one turn of the loop, and that nothing is lost or overtaken by that."""

from __future__ import annotations

import asyncio
from itertools import count
from math import inf

import pytest

from lbproxy.core.requests.retry import UpstreamError
from lbproxy.net.connections.backlog import TURN_S, Backlog
from lbproxy.net.connections.h1 import AT_ONCE_BYTES, LINES_AT_ONCE, PayloadWatcher, ResponseHead
from lbproxy.net.connections.patience import NO_LIMITS
from lbproxy.net.connections.pool import Connection, ConnectionPool
from lbproxy.net.dialing.origin import Origin
from tests.support.aio import run

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b"1\r\nx\r\n"
LAST = b"0\r\n\r\n"


class Transport(asyncio.Transport):
    """Leads nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = True
        self.open = True

    def write(self, data: object) -> None:
        assert self.open

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return not self.open

    def is_reading(self) -> bool:
        return self.reads

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        assert self.open
        self.reads = True

    def abort(self) -> None:
        self.open = False


class Stream(PayloadWatcher):
    """One response on a connection of its own."""

    switches = False

    def __init__(self, pool: ConnectionPool) -> None:
        self.transport = Transport()
        self.connection = Connection(pool, Origin(("10.0.0.1", 1)))
        self.connection.connection_made(self.transport)
        self.data = b""
        self.payload = b""
        self.looks = 0
        self.end: str | UpstreamError | None = None
        self.connection.send("GET", b"GET / HTTP/1.1\r\n\r\n", b"", self, NO_LIMITS)
        self.connection.data_received(HEAD)

    def complete_response(self, head: ResponseHead, body: bytes) -> None:
        raise AssertionError("a chunked one")

    def hints(self, head: ResponseHead) -> None:
        raise AssertionError("there was no 103")

    def head(self, head: ResponseHead) -> None:
        self.connection.relay(head, self, self)

    def body(self, data: bytes) -> None:
        assert self.end is None
        self.data += data

    def feed(self, data: bytes, start: int, end: int) -> None:
        self.looks += 1
        self.payload += data[start:end]

    def ended(self) -> None:
        assert self.end is None
        self.end = "ended"

    def broke(self, error: UpstreamError) -> None:
        assert self.end is None
        self.end = error

    @property
    def lines(self) -> int:
        return len(self.data) // len(CHUNK)


class Full(Stream):
    """Whose client is full once something is sent."""

    def body(self, data: bytes) -> None:
        asyncio.get_running_loop().call_soon(self.connection.pause)


def slow_pool() -> ConnectionPool:
    """Of which one connection walks in a turn."""
    pool = ConnectionPool()
    pool.backlog = Backlog(pool.loop, count().__next__)
    return pool


async def turns(number: float = inf) -> int:
    """So many turns of the loop; or as many as it takes until nothing happens any more."""
    loop = asyncio.get_running_loop()
    for n in count():
        if n >= number or not loop._ready:  # type: ignore[attr-defined]
            return n
        await asyncio.sleep(0)
    raise AssertionError


def test_of_a_read_of_tiny_chunks_one_turn_walks_few_and_all_arrive_in_order() -> None:
    """10,000 chunks at once took 10 ms, for each stream of a server that writes so: nobody else was served."""

    async def main() -> None:
        pool = slow_pool()
        stream, other = Stream(pool), Stream(pool)
        body = b"".join(b"1\r\n%d\r\n" % (n % 10) for n in range(10_000)) + LAST
        stream.connection.data_received(body)
        await turns(1)
        assert stream.lines == LINES_AT_ONCE
        assert stream.looks == 1, "the watcher looks once at what one turn brings"
        assert not stream.transport.is_reading(), "no more comes before it is walked"
        other.connection.data_received(CHUNK)
        assert other.data == CHUNK, "nobody waits for it"
        seen = stream.lines
        while await turns(1):
            assert 0 <= stream.lines - seen <= LINES_AT_ONCE
            seen = stream.lines
        assert (stream.end, stream.data) == ("ended", body)
        assert stream.payload == b"0123456789" * 1000
        assert stream.transport.is_reading()
        assert pool.take(stream.connection.origin) is stream.connection, "and it is kept"
        pool.close()

    run(main(), plain=True)


def test_many_such_streams_together_get_no_more_of_a_turn() -> None:
    async def main() -> None:
        pool = slow_pool()
        streams = [Stream(pool) for _ in range(40)]
        for stream in streams:
            stream.connection.data_received(CHUNK * 1000 + LAST)
        before = [stream.lines for stream in streams]
        for _ in range(100):
            await turns(1)
            now = [stream.lines for stream in streams]
            assert sum(now) - sum(before) <= LINES_AT_ONCE
            assert max(now) - min(now) <= LINES_AT_ONCE, "each in its turn"
            before = now
        await turns()
        assert [stream.data for stream in streams] == [CHUNK * 1000 + LAST] * len(streams)
        pool.close()

    run(main(), plain=True)


def test_of_the_large_reads_of_one_turn_each_waits_in_the_backlog() -> None:
    """200 streams of large events, each read at once, took 140 ms of one turn."""

    async def main() -> None:
        pool = slow_pool()
        streams = [Stream(pool) for _ in range(40)]
        chunk = b"%x\r\n%b\r\n" % (AT_ONCE_BYTES, bytes(AT_ONCE_BYTES))
        for stream in streams:
            stream.connection.data_received(chunk)
            assert not stream.data
            assert not stream.transport.is_reading()
        for n in range(1, len(streams) + 1):
            await turns(1)
            assert sum(stream.data == chunk for stream in streams) == n
        await turns()
        assert all(stream.transport.is_reading() for stream in streams)
        pool.close()

    run(main(), plain=True)


def test_who_is_full_once_a_large_read_is_sent_holds_no_second_one() -> None:
    """What is passed on is sent at the end of the turn. A stream that was read before that held two reads for its
    client: 350 KiB for each, of 500 that did not read.
    """

    async def main() -> None:
        pool = ConnectionPool()
        stream = Full(pool)
        stream.connection.data_received(b"4000\r\n" + bytes(0x4000) + b"\r\n")
        for _ in range(5):
            await turns(1)
            assert not stream.transport.is_reading()
        stream.connection.resume()
        assert stream.transport.is_reading()
        pool.close()

    run(main(), plain=True)


@pytest.mark.parametrize("trailer", [b"T: x\r\n" * 1000, b"a:\r\n" * 1000])
def test_trailers_are_walked_by_turns_too(trailer: bytes) -> None:
    async def main() -> None:
        pool = slow_pool()
        stream = Stream(pool)
        stream.connection.data_received(CHUNK + b"0\r\n" + trailer + b"\r\n")
        assert len(stream.data) < len(CHUNK) + LINES_AT_ONCE * 6
        await turns()
        assert (stream.end, stream.data) == ("ended", CHUNK + b"0\r\n" + trailer + b"\r\n")
        pool.close()

    run(main(), plain=True)


@pytest.mark.parametrize("whole", [True, False])
def test_a_loss_in_between_comes_after_what_came_before_it(whole: bool) -> None:
    async def main() -> None:
        pool = slow_pool()
        stream = Stream(pool)
        body = CHUNK * 1000 + (LAST if whole else b"")
        stream.connection.data_received(body)
        stream.connection.connection_lost(None)
        assert stream.end is None
        await turns()
        assert stream.data == body
        assert (stream.end == "ended") is whole
        assert whole or isinstance(stream.end, UpstreamError)
        pool.close()

    run(main(), plain=True)


def test_a_receiver_that_is_full_stops_the_walk_too() -> None:
    async def main() -> None:
        pool = slow_pool()
        stream = Stream(pool)
        stream.connection.data_received(CHUNK * 1000)
        for _ in range(3):
            stream.connection.pause()
            await turns(3)
            seen = stream.data
            await turns(10)
            assert stream.data == seen
            assert not stream.transport.is_reading()
            stream.connection.resume()
            assert not stream.transport.is_reading(), "what was read before comes first"
            await turns(3)
            assert len(stream.data) > len(seen)
        stream.connection.data_received(CHUNK)  # a TLS transport may have had it
        await turns()
        assert stream.data == CHUNK * 1001
        assert stream.transport.is_reading()
        pool.close()

    run(main(), plain=True)


def test_after_an_abort_nothing_is_walked() -> None:
    async def main() -> None:
        pool = slow_pool()
        stream = Stream(pool)
        stream.connection.data_received(CHUNK * 1000)
        stream.connection.abort()
        stream.connection.connection_lost(None)
        seen = stream.data
        await turns()
        assert (stream.data, stream.end) == (seen, None)
        pool.close()

    run(main(), plain=True)


def test_bad_chunks_in_what_waits_break_it() -> None:
    async def main() -> None:
        pool = slow_pool()
        stream = Stream(pool)
        stream.connection.data_received(CHUNK * 1000 + b"no size\r\n")
        await turns()
        assert isinstance(stream.end, UpstreamError)
        assert stream.transport.is_closing()
        assert stream.lines > 900
        pool.close()

    run(main(), plain=True)


def test_a_defect_in_a_later_turn_closes_the_connection() -> None:
    """As a transport does itself where `data_received` raises: else the exchange would hang."""

    async def main() -> None:
        pool = slow_pool()
        stream = Stream(pool)
        stream.connection.data_received(CHUNK * 1000)
        stream.feed = None  # type: ignore[method-assign, assignment]
        with pytest.raises(TypeError):
            stream.connection.walk_on()
        assert stream.transport.is_closing()
        stream.connection.connection_lost(None)
        assert isinstance(stream.end, UpstreamError)
        pool.close()

    run(main(), plain=True)


def test_who_reads_again_just_before_the_rest_is_walked_does_not_stop_the_connection() -> None:
    """The rest was due twice then: the second time there was none, and nothing was ever read again."""

    async def main() -> None:
        pool = slow_pool()
        stream = Stream(pool)
        stream.connection.data_received(CHUNK * (LINES_AT_ONCE + 1))
        stream.connection.pause()
        asyncio.get_running_loop().call_soon(stream.connection.resume)  # in the turn in which the backlog serves it
        assert await turns(10) < 10, "there is nothing left to do"
        assert stream.data == CHUNK * (LINES_AT_ONCE + 1)
        assert stream.transport.is_reading()
        stream.connection.data_received(LAST)
        assert stream.end == "ended"
        pool.close()

    run(main(), plain=True)


class Walk:
    """Takes a third of a turn's time, so many times."""

    def __init__(self, backlog: Backlog, times: int, seen: list[int], clock: list[float]) -> None:
        self.left = times
        self._backlog = backlog
        self._seen = seen
        self._clock = clock

    def walk_on(self) -> None:
        self._clock[0] += TURN_S / 2.5
        self._seen[-1] += 1
        self.left -= 1
        if self.left == 0:
            raise ValueError("the last one fails")
        self._backlog.add(self)


def test_all_work_together_has_a_time_in_each_turn_and_what_fails_holds_nobody_up() -> None:
    async def main() -> None:
        loop, clock, seen, failures = asyncio.get_running_loop(), [0.0], [0], []
        loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
        backlog = Backlog(loop, lambda: clock[0])
        walks = [Walk(backlog, times, seen, clock) for times in (1, 7, 4, 30)]
        for walk in walks:
            backlog.add(walk)
            backlog.add(walk)
        while any(walk.left for walk in walks):
            await asyncio.sleep(0)
            seen.append(0)
        assert max(seen) == 3
        assert sum(seen) == 42
        assert len(failures) == 4

    run(main(), plain=True)
