# SPDX-License-Identifier: Apache-2.0
"""Writes that are held until the turn ends: nothing is lost, swapped or late."""

from __future__ import annotations

import asyncio
import itertools
import socket

import pytest

from lbproxy.net.connections.corked import BATCH, Cork, Corked


class Inner(asyncio.Transport):
    """Notes what is done to it."""

    def __init__(self, done: list[object]) -> None:
        super().__init__()
        self.done = done
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.done.append(bytes(data))

    def writelines(self, list_of_data: object) -> None:
        self.done.append(b"+".join(list_of_data))  # type: ignore[arg-type]

    def write_eof(self) -> None:
        self.done.append("eof")

    def close(self) -> None:
        self.done.append("close")
        self.closing = True

    def abort(self) -> None:
        self.done.append("abort")
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return 100


class Loop(asyncio.SelectorEventLoop):
    """One whose next turn comes when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.soon: list[object] = []

    def call_soon(self, callback: object, *args: object, context: object = None) -> asyncio.Handle:
        self.soon.append(callback)
        return None  # type: ignore[return-value]


@pytest.fixture
def loop() -> Loop:
    loop = Loop()
    loop.close()
    return loop


def transports(loop: Loop, count: int) -> tuple[Cork, list[Corked], list[object]]:
    cork, done = Cork(loop), list[object]()
    return cork, [Corked(Inner(done), cork) for _ in range(count)], done


def test_who_must_be_silent_and_is_not_gets_nothing(loop: Loop) -> None:
    """Its bytes would be taken for the answer to what is sent. The others are looked at in the same system call."""
    cork, (speaks, closed, silent, other), done = transports(loop, 4)
    pairs = [socket.socketpair() for _ in range(3)]
    for transport, (ours, _) in zip((speaks, closed, silent), pairs, strict=True):
        cork.send_if_silent(transport, ours.fileno())
        transport.write(b"%d" % ours.fileno())
    other.write(b"other")
    pairs[0][1].send(b"x")
    pairs[1][1].close()
    cork.flush()
    assert done == ["abort", "abort", b"%d" % pairs[2][0].fileno(), b"other"]
    pairs[2][1].send(b"its answer")
    silent.write(b"more")
    cork.flush()
    assert done[4:] == [b"more"], "asked for once"
    for sock in itertools.chain(*pairs):
        sock.close()


def test_all_of_a_turn_goes_out_together_and_in_order(loop: Loop) -> None:
    cork, (one, two), done = transports(loop, 2)
    one.write(b"a")
    two.write(b"b")
    one.writelines((b"c", b"d"))
    assert (done, loop.soon) == ([], [cork.flush])
    assert (one.get_write_buffer_size(), two.get_write_buffer_size()) == (103, 101), "what is held counts"
    cork.flush()
    assert done == [b"a+c+d", b"b"]
    assert one.get_write_buffer_size() == 100
    cork.flush()
    assert len(done) == 2
    one.write(b"e")
    assert loop.soon == [cork.flush, cork.flush], "the next turn is asked for again"


@pytest.mark.parametrize("ending", ["write_eof", "close", "abort"])
def test_what_was_written_goes_before_the_end(loop: Loop, ending: str) -> None:
    cork, (one,), done = transports(loop, 1)
    one.write(b"last")
    getattr(one, ending)()
    assert done == [b"last", ending.removeprefix("write_")]
    cork.flush()
    assert len(done) == 2


def test_what_is_written_to_a_connection_that_closes_is_dropped(loop: Loop) -> None:
    cork, (one,), done = transports(loop, 1)
    one.write(b"late")
    assert isinstance(one._inner, Inner)
    one._inner.closing = True
    cork.flush()
    assert done == []
    assert one.is_closing()


def test_a_busy_turn_does_not_hold_everything(loop: Loop) -> None:
    _, many, done = transports(loop, BATCH + 1)
    for one in many:
        one.write(b"x")
    assert len(done) == BATCH


def test_a_write_while_others_are_sent_goes_out_in_the_next_turn(loop: Loop) -> None:
    cork, (one, two), done = transports(loop, 2)
    assert isinstance(one._inner, Inner)
    one._inner.write = lambda data: (done.append(bytes(data)), two.write(b"answer"))  # type: ignore[assignment,func-returns-value]
    one.write(b"question")
    cork.flush()
    assert (done, loop.soon) == ([b"question"], [cork.flush, cork.flush])
    cork.flush()
    assert done == [b"question", b"answer"]


def test_one_that_cannot_send_keeps_nobody_elses_bytes_back(loop: Loop) -> None:
    class Broken(Inner):
        def write(self, data: bytes | bytearray | memoryview) -> None:
            raise RuntimeError("unable to perform operation on a closed transport")

    cork, (one, two), done = transports(loop, 2)
    broken, told = Corked(Broken(done), cork), []
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    one.write(b"a")
    broken.write(b"b")
    two.write(b"c")
    cork.flush()
    assert done == [b"a", b"c"]
    assert [str(error) for error in told] == ["unable to perform operation on a closed transport"]
