# SPDX-License-Identifier: Apache-2.0
"""The walk over what clients send: it finds the ends of heads and bodies however reads cut them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbproxy.net.connections.h1 import ProtocolError
from lbproxy.proxy.request.walk import DENSE_PIECE_BYTES, MAX_EMPTY_BYTES, MAX_EXTENSION_BYTES, PIECE_BYTES, RequestWalk
from tests.conformance.case import CHUNKED, GOOD, chunks, http

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
    http("Content-Length: 00000000000000005", body=b"x" * 5),
]


def ends_in(stream: bytes, cuts: list[int]) -> list[int]:
    """Where the walk finds the ends of messages in a stream that is read in pieces."""
    walk, found = RequestWalk(), []
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    for start, end in itertools.pairwise(edges):
        piece, at = stream[start:end], 0
        while at < len(piece):
            at = walk.step(piece, at)
            if walk.at_boundary:
                found.append(start + at)
    return found


@given(messages=st.lists(st.sampled_from(MESSAGES), max_size=6), cuts=st.lists(st.integers(0, 5000), max_size=40))
def test_the_ends_of_messages_are_found_however_reads_cut_them(messages: list[bytes], cuts: list[int]) -> None:
    """A body that is taken for heads, or the other way round, would refuse good requests."""
    assert ends_in(b"".join(messages), cuts) == list(itertools.accumulate(map(len, messages)))


def test_a_step_of_a_body_of_tiny_chunks_is_a_small_piece() -> None:
    """Of any other it is a large one: large bodies come in large reads."""
    walk, tiny = RequestWalk(), http(CHUNKED, body=chunks(*[1] * 40_000, body=b"x" * 40_000))
    steps, at = 0, 0
    while not walk.at_boundary or not at:
        end = walk.step(tiny, at)
        assert end - at <= len(http(CHUNKED, body=b"")) + DENSE_PIECE_BYTES
        steps, at = steps + 1, end
        assert steps < len(tiny) // 1000, "and not a smaller one"
    assert at == len(tiny)
    large = http(CHUNKED, body=chunks(*[4000] * 60, body=b"x" * 240_000))
    assert walk.step(large, 0) == len(http(CHUNKED, body=b"")) + PIECE_BYTES


@pytest.mark.parametrize("line", [b"\r\n", b"\n", b"\r"])
@pytest.mark.parametrize("size", [1, 3, 1 << 20])
def test_empty_lines_are_skipped_up_to_a_limit_however_they_come(line: bytes, size: int) -> None:
    """As heads, 2 MB of them were a million steps, each of which copied the rest."""
    walk, fed = RequestWalk(), 0

    def feed_all() -> None:
        nonlocal fed
        while fed < 2 << 20:
            walk.step(line * size, 0)
            fed += size * len(line)

    with pytest.raises(ProtocolError):
        feed_all()
    assert fed <= MAX_EMPTY_BYTES


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
    with pytest.raises(ProtocolError) as caught:
        walk.step(stream, 0)
    assert caught.value.at == len(stream) - len(bad)
    assert walk.step(GOOD, 0) == len(GOOD), "nothing is walked after that"
