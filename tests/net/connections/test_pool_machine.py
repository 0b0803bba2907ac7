# SPDX-License-Identifier: Apache-2.0
"""T42: a machine that does everything to the pool in every order, against a model of a few lines."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lbproxy.core.requests.retry import UpstreamError
from lbproxy.net.connections.h1 import ResponseHead
from lbproxy.net.connections.patience import ClockLimits
from lbproxy.net.connections.pool import IDLE_S, Connection, ConnectionPool
from lbproxy.net.dialing.origin import Origin

ORIGINS = [Origin(("10.0.0.1", 1)), Origin(("10.0.0.2", 1))]
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK, LAST = b"5\r\nhello\r\n", b"0\r\n\r\n"
ANSWERS = [WHOLE, HEAD + CHUNK + LAST, b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE, HEAD + CHUNK]
TAILS = [b"", b"", b"", b"x", WHOLE]
CLOSING = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Transport(asyncio.Transport):
    """Open until it is aborted; `unsent` bytes wait to go out."""

    def __init__(self) -> None:
        super().__init__()
        self.open = True
        self.unsent = 0

    def abort(self) -> None:
        self.open = False

    def is_closing(self) -> bool:
        return not self.open

    def write(self, data: Any) -> None:
        assert self.open, "written to a closed connection"

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def pause_reading(self) -> None:
        assert self.open

    def resume_reading(self) -> None:
        assert self.open


class Asker:
    """A receiver that counts what it is told."""

    switches = False

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.ends = 0
        self.payload = b""

    def complete_response(self, head: ResponseHead, body: bytes) -> None:
        assert self.ends == 0
        self.payload, self.ends = body, 1

    def hints(self, head: ResponseHead) -> None:
        raise AssertionError("there was no 103")

    def head(self, head: ResponseHead) -> None:
        assert self.ends == 0
        self.connection.relay(head, self, None)

    def body(self, data: bytes) -> None:
        assert self.ends == 0, "a byte after the end"
        self.payload += data

    def ended(self) -> None:
        self.ends += 1

    def broke(self, error: UpstreamError) -> None:
        self.ends += 1


class PoolMachine(RuleBasedStateMachine):
    """One exchange at a time; unread bytes end a connection; what is kept is open, and the last kept goes first."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.loop = asyncio.new_event_loop()
        self.loop.time = lambda: self.now  # type: ignore[method-assign]
        self.loop.call_later = lambda *_: asyncio.TimerHandle(0.0, print, (), self.loop)  # type: ignore[method-assign]
        self.pool = self.loop.run_until_complete(self._made())
        self.wires: dict[Connection, Transport] = {}
        self.busy: dict[Connection, Asker | None] = {}
        self.kept: list[Connection] = []
        """In the order in which they were kept."""

    async def _made(self) -> ConnectionPool:
        return ConnectionPool()

    def teardown(self) -> None:
        self.pool.close()
        assert not any(wire.open for wire in self.wires.values()), "a connection is left open"
        self.loop.close()

    def settle(self) -> None:
        """Take into the model what the last step ended."""
        for connection, asker in list(self.busy.items()):
            if asker is not None and asker.ends:
                assert asker.ends == 1, "an exchange ended twice"
                del self.busy[connection]
                if self.wires[connection].open:
                    self.kept.append(connection)

    @rule(origin=st.sampled_from(ORIGINS))
    def connect(self, origin: Origin) -> None:
        connection, wire = Connection(self.pool, origin), Transport()
        connection.connection_made(wire)
        self.pool._busy.add(connection)
        self.wires[connection] = wire
        self.busy[connection] = None

    @rule(origin=st.sampled_from(ORIGINS))
    def take(self, origin: Origin) -> None:
        expected = next((one for one in reversed(self.kept) if one.origin == origin), None)
        taken = self.pool.take(origin)
        assert taken is expected
        if taken is not None:
            assert taken not in self.busy, "two exchanges on one connection"
            assert self.wires[taken].open
            self.kept.remove(taken)
            self.busy[taken] = None

    def some(self, data: st.DataObject, *, asking: bool) -> Connection:
        return data.draw(st.sampled_from([one for one, asker in self.busy.items() if (asker is not None) is asking]))

    @precondition(lambda self: any(asker is None for asker in self.busy.values()))
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        connection = self.some(data, asking=False)
        self.busy[connection] = asker = Asker(connection)
        connection.send("GET", b"GET / HTTP/1.1\r\n\r\n", b"", asker, ClockLimits(5.0, 5.0, 10.0))

    @precondition(lambda self: any(asker is not None for asker in self.busy.values()))
    @rule(data=st.data(), answer=st.sampled_from([*ANSWERS, CLOSING, b"garbage\r\n\r\n"]), tail=st.sampled_from(TAILS))
    def answer(self, data: st.DataObject, answer: bytes, tail: bytes) -> None:
        connection = self.some(data, asking=True)
        wire = self.wires[connection]
        wire.unsent = data.draw(st.sampled_from([0, 0, 0, 5]))
        cut = data.draw(st.integers(0, len(answer + tail)))
        for piece in ((answer + tail)[:cut], (answer + tail)[cut:]):
            if piece and wire.open and connection in self.busy:
                connection.data_received(piece)
                self.settle()
        if connection in self.kept:
            assert wire.unsent == 0, "kept, and the request is not out"

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), stray=st.sampled_from([b"x", WHOLE]))
    def a_kept_one_speaks(self, data: st.DataObject, stray: bytes) -> None:
        connection = data.draw(st.sampled_from(self.kept))
        connection.data_received(stray)
        assert not self.wires[connection].open
        self.kept.remove(connection)

    @precondition(lambda self: self.busy or self.kept)
    @rule(data=st.data(), error=st.sampled_from([None, ConnectionResetError()]))
    def lost(self, data: st.DataObject, error: Exception | None) -> None:
        connection = data.draw(st.sampled_from([*self.busy, *self.kept]))
        asker = self.busy.get(connection)
        self.wires[connection].open = False
        connection.connection_lost(error)
        assert asker is None or asker.ends == 1, "nobody was told"
        self.busy.pop(connection, None)
        if connection in self.kept:
            self.kept.remove(connection)

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        connection = data.draw(st.sampled_from(list(self.busy)))
        asker = self.busy.pop(connection)
        connection.abort()
        connection.connection_lost(None)
        assert asker is None or asker.ends == 0, "told though it let go"

    @rule(seconds=st.sampled_from([0.1, 1.0, IDLE_S, 6.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.pool._sweep()
        self.settle()
        self.kept = [one for one in self.kept if self.wires[one].open]

    @invariant()
    def all_are_accounted_for(self) -> None:
        assert self.pool.open_connections == len(self.busy) + len(self.kept)
        assert all(self.wires[one].open for one in (*self.busy, *self.kept))
        still_open = {one for one, wire in self.wires.items() if wire.open}
        assert still_open == {*self.busy, *self.kept}


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=200, stateful_step_count=50)
