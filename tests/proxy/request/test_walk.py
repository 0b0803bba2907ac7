# SPDX-License-Identifier: Apache-2.0
"""The walk over what clients send: it finds the ends of heads and bodies however reads cut them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbproxy.net.connections.h1 import ProtocolError
from lbproxy.proxy.request.walk import MAX_EXTENSION_BYTES, RequestWalk
from tests.conformance.case import BODY, CHUNKED, GOOD, LINE, chunks, http

GET = b"GET /v1/models HTTP/1.1\r\nHost: lb\r\n\r\n"
LOOKS_LIKE_HEADS = http(f"Content-Length: {3 * len(GET)}", body=3 * GET)
MESSAGES = [
    GOOD,
    GET,
    http(CHUNKED, body=chunks(1, 2)),
    http("transfer-ENCODING:chunked", body=chunks()),
    b"\r\n" + GET,
]
MESSAGES += [
    LOOKS_LIKE_HEADS,
    http(CHUNKED, body=b"1;a\r\nx\r\n0\r\nX-T: 1\r\n\r\n"),
    http("Content-Length: 0", body=b""),
]


def heads_of(stream: bytes, cuts: list[int]) -> list[int]:
    """Where the walk finds the ends of heads in a stream that is read in pieces."""
    walk, found = RequestWalk(), []
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    for start, end in itertools.pairwise(edges):
        piece, at = stream[start:end], 0
        while at < len(piece):
            at = walk.step(piece, at)
            if walk.head_ended:
                found.append(start + at)
    return found


@given(messages=st.lists(st.sampled_from(MESSAGES), max_size=6), cuts=st.lists(st.integers(0, 5000), max_size=40))
def test_heads_are_found_however_reads_cut_them(messages: list[bytes], cuts: list[int]) -> None:
    """A body that is taken for heads, or the other way round, would refuse good requests."""
    ends, at = [], 0
    for message in messages:
        ends.append(at + message.index(b"\r\n\r\n") + 4)
        at += len(message)
    assert heads_of(b"".join(messages), cuts) == ends


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (b"", b"1a\nx"),
        (b"1;a\r\nx\r\n", b"1;b\nx"),
        (b"1\r\nx", b"\nz"),
        (b"0\r\nA: b\r\n", b"\n"),
        (b"1;" + b"a" * 2500 + b"\r\nx\r\n", b"1;" + b"a" * (MAX_EXTENSION_BYTES - 2500) + b"\r\ny\r\n"),
    ],
)
def test_the_place_of_bad_framing_is_where_it_begins(good: bytes, bad: bytes) -> None:
    """All before it goes to aiohttp's parser, which must then be made to refuse exactly there."""
    walk = RequestWalk()
    stream = http(CHUNKED, body=good + bad)
    at = walk.step(stream, 0)
    with pytest.raises(ProtocolError) as caught:
        walk.step(stream, at)
    assert caught.value.at == len(stream) - len(bad)
    assert walk.step(GOOD, 0) == len(GOOD), "nothing is walked after that"


def test_a_head_without_an_end_is_not_kept() -> None:
    walk = RequestWalk()
    for _ in range(100):
        walk.step(LINE.encode() + b"x" * 4096 + BODY, 0)
    assert len(walk._head) < 80_000
