# SPDX-License-Identifier: Apache-2.0
"""Frames: the same ones out as in, however the bytes are cut; and what is no frame is refused."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbproxy.proxy.sockets.frames import (
    PIECE_BYTES,
    FrameError,
    FrameReader,
    close_code,
    close_frame,
    is_close,
    is_pong,
)
from tests.support.sockets import BINARY, CLOSE, CONT, PING, PONG, TEXT, close, frame


def read(reader: FrameReader, *pieces: bytes) -> list[tuple[int, bool, bytes]]:
    return [(one.opcode, one.fin, bytes(one.data)) for piece in pieces for one in reader.feed(piece)]


FRAMES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([TEXT, BINARY, CONT]), st.booleans(), st.binary(max_size=70_000)),
        st.tuples(st.sampled_from([PING, PONG, CLOSE]), st.just(True), st.binary(max_size=125)),
    ),
    max_size=5,
)


@given(FRAMES, st.booleans(), st.lists(st.integers(1, 80_000), max_size=20))
def test_frames_are_read_and_written_as_they_were(
    said: list[tuple[int, bool, bytes]], masked: bool, cuts: list[int]
) -> None:
    data = b"".join(frame(opcode, payload, fin=fin, masked=masked) for opcode, fin, payload in said)
    pieces, at = [], 0
    for size in cuts:
        pieces.append(data[at : at + size])
        at += size
    reader = FrameReader(masked=masked, max_bytes=1 << 20)
    got = [one for piece in [*pieces, data[at:]] for one in reader.feed(piece)]
    assert [(one.opcode, one.fin, bytes(one.data)) for one in got] == said
    assert reader.held_bytes == 0
    again = FrameReader(masked=not masked, max_bytes=1 << 20)
    assert read(again, b"".join(one.serialize(mask=not masked) for one in got)) == said


def test_a_frame_that_is_too_large_is_refused_by_its_head() -> None:
    """Nothing of its payload is held: a peer that announces much costs nothing."""
    reader = FrameReader(masked=False, max_bytes=1000)
    assert read(reader, frame(BINARY, bytes(1000))) == [(BINARY, True, bytes(1000))]
    with pytest.raises(FrameError) as caught:
        read(reader, frame(BINARY, bytes(1001))[:4])
    assert caught.value.code == 1009


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("size", [PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES - 1])
@pytest.mark.parametrize("fin", [True, False])
def test_a_large_frame_comes_as_fragments_that_mean_the_same(masked: bool, size: int, fin: bool) -> None:
    """60 MiB were held, and unmasked, masked and copied in one turn of the event loop, for half a second."""
    payload = random.Random(size).randbytes(size)
    data = frame(TEXT, payload, fin=fin, masked=masked) + frame(PING, b"x", masked=masked)
    reader = FrameReader(masked=masked, max_bytes=size)
    got = []
    for at in range(0, len(data), 100_000):
        got += read(reader, data[at : at + 100_000])
        assert reader.held_bytes < PIECE_BYTES
    *parts, ping = got
    assert ping == (PING, True, b"x")
    assert b"".join(part for *_, part in parts) == payload
    assert max(len(part) for *_, part in parts) <= PIECE_BYTES
    assert [kind for kind, *_ in parts] == [TEXT] + [CONT] * (len(parts) - 1)
    assert [last for _, last, _ in parts] == [False] * (len(parts) - 1) + [fin]


def test_frames_before_a_bad_one_are_there_still() -> None:
    reader = FrameReader(masked=False, max_bytes=1000)
    frames = reader.feed(frame(TEXT, b"good") + b"\xff\x00")
    assert next(frames).data == b"good"
    with pytest.raises(FrameError) as caught:
        next(frames)
    assert caught.value.code == 1002


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"", None),
        (b"\x03", None),
        (b"\x03\xe8", 1000),
        (b"\x0f\xa1why", 4001),
        (b"\x03\xee", None),
        (b"\x03\xf6", 1014),
    ],
)
def test_close_codes(payload: bytes, code: int | None) -> None:
    """1014, Bad Gateway, is IANA's; 1006 may never be sent."""
    (found,) = FrameReader(masked=False, max_bytes=125).feed(frame(CLOSE, payload))
    assert is_close(found)
    assert close_code(found) == code


def test_our_own_frames() -> None:
    assert close_frame(1011, "why").serialize(mask=False) == close(1011, "why")
    (pong,) = FrameReader(masked=False, max_bytes=125).feed(frame(PONG, b"x"))
    assert is_pong(pong, b"x")
    assert not is_pong(pong, b"y")
