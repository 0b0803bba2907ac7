# SPDX-License-Identifier: Apache-2.0
"""WebSocket frames (RFC 6455, section 5): bytes into frames, and frames into bytes. Sans-io.

The only module that imports the library `websockets`, of which only the frames are used (decision 34). Peers are not
trusted: reserved bits, opcodes, masks and sizes are checked here. The order of a message's fragments, and UTF-8, are
checked by the other peer, which gets them unchanged.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Final

from websockets.exceptions import PayloadTooBig, ProtocolError
from websockets.frames import Close, Frame, Opcode
from websockets.streams import StreamReader

NORMAL: Final = 1000
GOING_AWAY: Final = 1001
PROTOCOL_ERROR: Final = 1002
POLICY_VIOLATION: Final = 1008
TOO_BIG: Final = 1009
INTERNAL_ERROR: Final = 1011
TRY_AGAIN_LATER: Final = 1013
"""Close codes: RFC 6455, section 7.4.1, and IANA's registry."""
DATA: Final = frozenset({Opcode.CONT, Opcode.TEXT, Opcode.BINARY})
MAX_REASON_BYTES: Final = 123
"""The room in a control frame besides the code."""

__all__ = [
    "DATA",
    "Frame",
    "FrameError",
    "FrameReader",
    "close_code",
    "close_frame",
    "is_close",
    "is_pong",
    "ping_frame",
]


class FrameError(Exception):
    """The peer's bytes are not frames, or one is too large. `code`: of the close frame that reports it."""

    def __init__(self, code: int, problem: str) -> None:
        super().__init__(problem)
        self.code = code


class FrameReader:
    """Splits the bytes of one peer into frames. At most one frame is held, and at most `max_bytes` of it."""

    def __init__(self, *, masked: bool, max_bytes: int) -> None:
        """`masked`: its frames must be masked, as a client's; else they must not be."""
        self._bytes = StreamReader()
        self._frames = _frames(self._bytes, masked, max_bytes)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete with `data`, in order. Raises FrameError, after the frames before the bad
        one; then nothing more may be fed.
        """
        self._bytes.feed_data(data)
        while True:
            try:
                frame = next(self._frames)
            except PayloadTooBig:
                raise FrameError(TOO_BIG, "a frame is too large") from None
            except ProtocolError as error:
                raise FrameError(PROTOCOL_ERROR, str(error)) from None
            if frame is None:
                return
            yield frame

    def discard(self) -> None:
        """Nothing more is fed: free the incomplete frame. What holds this may live on for a while."""
        self._bytes.discard()

    @property
    def held_bytes(self) -> int:
        """Bytes of the incomplete frame."""
        return len(self._bytes.buffer)


def _frames(source: StreamReader, masked: bool, max_bytes: int) -> Generator[Frame | None, None, None]:
    """Yield the next frame; None where bytes are missing."""
    while True:
        yield (yield from Frame.parse(source.read_exact, mask=masked, max_size=max_bytes))


def is_close(frame: Frame) -> bool:
    """Whether its sender sends nothing more."""
    return frame.opcode is Opcode.CLOSE


def is_pong(frame: Frame, payload: bytes) -> bool:
    """Whether it responds to a ping with this payload."""
    return frame.opcode is Opcode.PONG and frame.data == payload


def close_code(frame: Frame) -> int | None:
    """The code of a close frame; None = it has none, or an invalid one."""
    try:
        code = Close.parse(bytes(frame.data)).code
    except (ProtocolError, UnicodeDecodeError):
        return None
    return None if code == 1005 else int(code)


def close_frame(code: int, reason: str) -> Frame:
    """A close frame of lbproxy. `reason`: ASCII, at most MAX_REASON_BYTES."""
    assert len(reason) <= MAX_REASON_BYTES
    return Frame(Opcode.CLOSE, Close(code, reason).serialize())


def ping_frame(payload: bytes) -> Frame:
    """A ping of lbproxy. `payload`: at most 125 bytes."""
    return Frame(Opcode.PING, payload)
