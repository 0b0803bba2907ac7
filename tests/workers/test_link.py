# SPDX-License-Identifier: Apache-2.0
"""Links between two of lbproxy's processes: what arrives, in what pieces ever, and how a link ends."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from lbproxy.core.requests.request import InferenceRequest
from lbproxy.workers import link as links
from lbproxy.workers import messages as m
from tests.support.aio import run, until
from tests.support.compiled import interpreted
from tests.support.links import End, pair


@asynccontextmanager
async def raw() -> AsyncIterator[tuple[End, socket.socket]]:
    """The balancer process's end, and a socket that writes to it byte by byte."""
    end = End(m.FromWorker)
    ours, theirs = socket.socketpair()
    await asyncio.get_running_loop().connect_accepted_socket(end.link.protocol, theirs)
    with ours:
        ours.setblocking(False)
        yield end, ours
        end.link.close()
        await asyncio.sleep(0)


def frame(*sent: m.Message) -> bytes:
    payload = msgspec.msgpack.encode(sent)
    return struct.pack("<I", len(payload)) + payload


def test_messages_of_one_turn_arrive_in_order_in_one_frame() -> None:
    """A write wakes the other process: many messages must not cost many."""

    async def body() -> None:
        async with pair() as (worker, balancer):
            sent = [m.FirstByte(number) for number in range(100)]
            for message in sent:
                worker.link.send(message)
            assert not balancer.batches
            await until(lambda: balancer.batches)
            assert balancer.batches == [sent]
            assert worker.link.sent == balancer.link.arrived == 100

    run(body())


def test_a_reply_leaves_with_what_it_replies_to_and_all_else_in_its_turn() -> None:
    async def body() -> None:
        end = End(m.ToWorker, received=lambda _: end.link.send(m.FirstByte(2)))
        async with pair(worker=end) as (_, balancer):
            end.link.data_received(frame(m.Pong()))
            assert end.link.sent == 1
            end.link.send(m.FirstByte(3))
            end.link.data_received(frame(m.Pong()))  # with what leaves anyway
            assert end.link.sent == 1
            await until(lambda: len(balancer.arrived) == 3)
            assert balancer.batches == [[m.FirstByte(2)], [m.FirstByte(3), m.FirstByte(2)]]

    run(body())


def test_a_link_that_ends_because_of_what_arrived_gathers_nothing() -> None:
    def fail(_: object) -> None:
        raise ValueError("a defect")

    async def body() -> None:
        end = End(m.ToWorker, received=fail)
        async with pair(worker=end):
            with pytest.raises(ValueError, match="a defect"):
                end.link.data_received(frame(m.Pong()))
            end.link.abort()
            await until(lambda: end.lost)
            end.link.send(m.FirstByte(1))
            await until(lambda: end.link.last is None)

    run(body())


def test_a_link_carries_messages_both_ways() -> None:
    async def body() -> None:
        async with pair() as (worker, balancer):
            worker.link.send(m.Hello(1, 2))
            balancer.link.send(m.Pong())
            await until(lambda: worker.batches and balancer.batches)
            assert worker.arrived == [m.Pong()]
            assert balancer.arrived == [m.Hello(1, 2)]

    run(body())


def test_frames_arrive_byte_by_byte() -> None:
    """A stream socket may deliver any part of a frame, its length too."""

    async def body() -> None:
        async with raw() as (end, _):
            data = frame(m.FirstByte(1), m.FirstByte(2)) + frame(m.Stores(3, "r" * 300))
            for at in range(len(data)):
                end.link.data_received(data[at : at + 1])
            assert end.batches == [[m.FirstByte(1), m.FirstByte(2)], [m.Stores(3, "r" * 300)]]

    run(body())


def test_several_frames_and_a_part_arrive_in_one_read() -> None:
    async def body() -> None:
        async with raw() as (end, _):
            last = frame(m.FirstByte(3))
            end.link.data_received(frame(m.FirstByte(1)) + frame(m.FirstByte(2)) + last[:-1])
            assert end.arrived == [m.FirstByte(1), m.FirstByte(2)]
            end.link.data_received(last[-1:])
            assert end.arrived[-1] == m.FirstByte(3)

    run(body())


def test_a_frame_of_many_reads_is_complete() -> None:
    """Larger than a socket's buffers in both directions."""

    async def body() -> None:
        async with pair() as (worker, balancer):
            text = "x" * (8 << 20)
            balancer.link.send(m.Settle(text, None))
            balancer.link.send(m.Pong())
            await until(lambda: len(worker.arrived) == 2)
            assert worker.arrived == [m.Settle(text, None), m.Pong()]

    run(body())


GARBAGE = {
    "no msgpack": struct.pack("<I", 1) + b"\xc1",
    "no array": struct.pack("<I", 1) + b"\x01",
    "a message that is unknown": struct.pack("<I", 3) + b"\x91\x91\x7f",
    "a message of the other direction": frame(m.Pong()),
    "too few fields": struct.pack("<I", 4) + b"\x91\x92\x01\x00",
    "a field of another type": struct.pack("<I", 5) + b"\x91\x92\x03\xa1x",
    "more than one frame may have": struct.pack("<I", links.MAX_FRAME_BYTES + 1),
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_ends_the_link(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """What came before it counts; nothing that follows does, and the owner is told once."""

    async def body() -> None:
        async with raw() as (end, sock):
            sock.sendall(frame(m.FirstByte(1)) + data + frame(m.FirstByte(2)))
            await until(lambda: end.lost)
            await asyncio.sleep(0)
            assert end.arrived == [m.FirstByte(1)]
            assert end.lost == 1

    with caplog.at_level(logging.ERROR, "lbproxy"):
        run(body())
    assert "a link between two processes of lbproxy ends" in caplog.text


@interpreted
def test_a_peer_that_does_not_read_loses_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what is unsent would take all memory."""
    monkeypatch.setattr(links, "MAX_UNSENT_BYTES", 1 << 20)

    async def body() -> None:
        async with raw() as (end, _):
            while not end.lost:
                end.link.send(m.Stores(1, "x" * 100_000))
                await asyncio.sleep(0)
            assert end.link.sent < 100

    run(body())


def test_the_end_of_the_peer_is_told_once() -> None:
    async def body() -> None:
        async with pair() as (worker, balancer):
            worker.link.abort()
            await until(lambda: balancer.lost and worker.lost)
            balancer.link.send(m.Pong())
            balancer.link.abort()
            await asyncio.sleep(0)
            assert balancer.lost == worker.lost == 1

    run(body())


def test_close_sends_what_is_unsent_and_calls_nothing() -> None:
    """A worker that stops still has the records of its last requests to send."""

    async def body() -> None:
        async with pair() as (worker, balancer):
            worker.link.send(m.FirstByte(1))
            worker.link.close()
            await until(lambda: balancer.lost)
            assert balancer.arrived == [m.FirstByte(1)]
            assert not worker.lost

    run(body())


def test_a_finished_link_is_lost_when_a_peer_that_stood_still_has_read_all() -> None:
    """More was sent than its socket takes."""

    async def body() -> None:
        async with pair() as (worker, balancer):
            transport = balancer.link._transport
            assert transport is not None
            transport.pause_reading()
            sent = [m.Stores(n, "x" * 1000) for n in range(1000)]
            for message in sent:
                worker.link.send(message)
                worker.link.flush()
            worker.link.finish()
            await asyncio.sleep(0.05)
            assert not worker.lost
            transport.resume_reading()
            await until(lambda: worker.lost and balancer.lost)
            assert balancer.arrived == sent

    run(body())


def test_what_is_sent_after_the_end_is_dropped() -> None:
    async def body() -> None:
        async with pair() as (worker, balancer):
            balancer.link.abort()
            await until(lambda: worker.lost)
            worker.link.send(m.FirstByte(1))
            await asyncio.sleep(0)
            assert worker.link.sent == 0

    run(body())


def test_what_msgpack_cannot_encode_costs_nothing_else() -> None:
    """A model's name with a lone surrogate, or a limit over 64 bits, must not lose the messages of other requests."""
    request = InferenceRequest("id", "\ud800m", max_tokens=10**30, block_keys=(2**64 - 1,))

    async def body() -> None:
        async with pair() as (worker, balancer):
            message = m.Submit(2, request, 0.0, ("POST", "/\udcff", "c", "r", None, 7))
            for one in (m.FirstByte(1), message, m.FirstByte(3)):
                worker.link.send(one)
            await until(lambda: len(balancer.arrived) == 3)
            first, odd, last = balancer.arrived
            assert (first, last) == (m.FirstByte(1), m.FirstByte(3))
            assert isinstance(odd, m.Submit)
            read = odd.request
            assert (read.model, read.max_tokens, read.block_keys) == ("\\ud800m", 2**64 - 1, (2**64 - 1,))
            assert odd.origin == ("POST", "/\\udcff", "c", "r", None, 7)

    run(body())


def test_a_message_that_cannot_be_sent_is_lost_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Too large, or a defect of ours: the next link would have to carry it again, and end, too."""

    async def body() -> None:
        async with pair() as (worker, balancer):
            dropped: list[object] = []
            worker.link.dropped = dropped.append
            large = m.Stores(2, "x" * links.MAX_FRAME_BYTES)
            odd = (3, object())
            for message in (m.FirstByte(1), large, odd, m.FirstByte(4)):
                worker.link.send(message)
            worker.link.feed(iter((m.FirstByte(5), large, m.FirstByte(6))))
            await until(lambda: len(balancer.arrived) == 4)
            assert balancer.arrived == [m.FirstByte(number) for number in (1, 4, 5, 6)]
            assert dropped == [large, odd, large]
            assert worker.link.sent == balancer.link.arrived == 4
            assert not worker.lost

    with caplog.at_level(logging.ERROR, "lbproxy"):
        run(body())
    assert caplog.text.count("is lost: Stores: it has") == 2


def test_many_messages_are_frames_that_hold_nobody_up() -> None:
    """One of 64 MiB stopped the balancer process for half a second, and its link for good."""

    async def body() -> None:
        async with pair() as (worker, balancer):
            sent = [m.Stores(n, "x" * 10_000) for n in range(100)]
            for message in sent:
                worker.link.send(message)
            await until(lambda: len(balancer.arrived) == 100)
            assert balancer.arrived == sent
            assert all(len(batch) <= 27 for batch in balancer.batches)

    run(body())


def test_what_is_fed_waits_for_a_peer_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much there is, it takes no memory, and other messages go on."""

    async def body() -> None:
        made: list[int] = []

        def much() -> Iterator[m.Stores]:
            for number in range(10_000):
                made.append(number)
                yield m.Stores(number, "x" * 10_000)

        async with pair() as (worker, balancer):
            transport = balancer.link._transport
            assert transport is not None
            transport.pause_reading()
            worker.link.feed(much())
            await asyncio.sleep(0.05)
            assert len(made) < 300
            worker.link.send(m.FirstByte(77))
            transport.resume_reading()
            await until(lambda: len(balancer.arrived) == 10_001)
            assert balancer.arrived.index(m.FirstByte(77)) < 400
            numbers = [one.number for one in balancer.arrived if isinstance(one, m.Stores)]
            assert numbers == list(range(10_000))
            assert all(len(batch) <= 27 for batch in balancer.batches)

    run(body())


def test_what_is_fed_ends_with_the_link() -> None:
    async def body() -> None:
        async with pair() as (worker, balancer):
            worker.link.feed(m.Stores(1, "x" * 1000) for _ in iter(int, 1))
            await until(lambda: balancer.arrived)
            worker.link.abort()
            await until(lambda: worker.lost and balancer.lost)
            assert not worker.link._fed
            worker.link.feed(iter((m.FirstByte(1),)))
            assert not worker.link._fed

    run(body())
