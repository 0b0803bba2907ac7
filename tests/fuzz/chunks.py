# SPDX-License-Identifier: Apache-2.0
"""Chunked bodies: `net.connections.h1.ChunkedFraming`, fed in pieces, against h11: same payload, same end, or both
broken.
"""

from __future__ import annotations

import random

import h11

from lbproxy.net.connections.h1 import ChunkedFraming, PayloadWatcher, ProtocolError
from tests.fuzz.mutate import pieces
from tests.fuzz.oracle import DifferenceError
from tests.fuzz.strictness import explain

NAME = "chunks"
SEEDS = [
    b"5\r\nhello\r\n0\r\n\r\n",
    b"b\r\ndata: {}\n\nxx\r\n1A;x=1\r\nabcdefghijklmnopqrstuvwxyz\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n",
    b'3;q="a b"\r\nabc\r\n000\r\nT: 1\r\nU:\r\n\r\n',
    b"1\r\na\r\n1\r\nb\r\n01\r\nc\r\n0\r\n\r\n",
    b"8 \r\n\r\n0\r\n\r\n \r\n0\r\n\r\n",
    b"10\r\n0123456789abcdef\r\n0;end\r\n\r\n",
]
TOKENS = [
    *(b"\r\n", b"0\r\n\r\n", b"5\r\n", b"0", b";", b";a=b", b"\n", b"\r", b"+", b"0x", b"_", b" ", b"\t", b"-", b"1e"),
    *(b"T: x\r\n", b" folded: x\r\n", b"FFFFFFFFFFFFFFFF", b"1000000000000000", b"\x00", b"\xff", b"G", b"\r\n\r\n"),
    *(b"x" * 5000, b"T: y\r\n" * 3000),
]
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Payload(PayloadWatcher):
    """Keeps the payload."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def feed(self, data: bytes, start: int, end: int) -> None:
        self.parts.append(data[start:end])


def as_we_read(parts: list[bytes]) -> tuple[bool, bytes, int, bool]:
    """Whole, payload, where it ended, and whether it was refused (rather than not whole)."""
    payload = Payload()
    framing = ChunkedFraming(payload)
    at = 0
    try:
        for piece in parts:
            used = framing.feed(piece)
            at += used
            if framing.done:
                break
            if used != len(piece):
                raise DifferenceError(f"not done, and yet only {used} of {len(piece)} bytes taken")
    except ProtocolError:
        return False, b"".join(payload.parts), at, True
    return framing.eof(), b"".join(payload.parts), at, False


def as_h11_reads(data: bytes) -> tuple[bool, bytes, int]:
    """The same of h11."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    connection.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(HEAD)
    connection.next_event()
    payload: list[bytes] = []
    try:
        for piece in (data, b""):
            connection.receive_data(piece)
            while (event := connection.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Data):
                    payload.append(bytes(event.data))
                else:
                    end = len(data) - len(connection.trailing_data[0])
                    return isinstance(event, h11.EndOfMessage), b"".join(payload), end
    except h11.RemoteProtocolError:
        pass
    return False, b"".join(payload), 0


def check(data: bytes, rng: random.Random) -> str:
    """See the module."""
    ours = as_we_read(pieces(data, rng))
    whole, payload, end = as_h11_reads(data)
    if ours[:3] == (whole, payload, end) or (ours[0] == whole is False and payload.startswith(ours[1])):
        return "read alike" if whole else "broken for both"
    if ours[0] == whole is False and ours[1].startswith(payload):
        return "broken for both"  # h11 tells a bad trailer or line before it shows what came with it
    if ours[3]:
        rule = explain(NAME, data)
        if rule is not None and ours[1] == payload[: len(ours[1])]:
            return rule
    elif ours[0] and ours[1].startswith(payload):
        rule = explain(NAME, data, laxer=True)
        if rule is not None:
            return rule
    raise DifferenceError(f"we: {ours}, h11: {(whole, payload, end)}")
