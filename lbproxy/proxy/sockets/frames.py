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
from websockets.frames import apply_mask as _apply_mask  # type: ignore[attr-defined]  # in C, where that was built
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
PIECE_BYTES: Final = 64 << 10
"""Divisible by four, the length of a mask. It is as much as is buffered for a client besides a read, so that nobody has
to count what incomplete frames hold; messages of speech and of text are smaller."""
MAX_CONTROL_BYTES: Final = 125
"""RFC 6455, section 5.5."""
_TWO_BYTES: Final = 126
"""In place of a length: it follows in two bytes; 127: in eight."""
MAX_REASON_BYTES: Final = 123
"""The room in a control frame besides the code."""

__all__ = [
    "DATA",
    "Frame",
    "FrameError",
    "FrameReader",
    "Opcode",
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
    """Splits the bytes of one peer into frames. A large frame of data comes as the fragments of it that arrived, which
    mean the same (RFC 6455, section 5.4): less than `PIECE_BYTES` of a frame are held, and so much unmasked at a time.
    """

    def __init__(self, *, masked: bool, max_bytes: int) -> None:
        """`masked`: its frames must be masked, as a client's; else they must not be. `max_bytes`: of a frame."""
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
        """Bytes that were not yielded yet."""
        return len(self._bytes.buffer)


def _frames(source: StreamReader, masked: bool, max_bytes: int) -> Generator[Frame | None, None, None]:
    """Yield the next frame, or the next fragment of one; None where bytes are missing."""
    while True:
        first, second = yield from source.read_exact(2)
        try:
            opcode = Opcode(first & 0x0F)
        except ValueError:
            raise ProtocolError("invalid opcode") from None
        if bool(second & 0x80) is not masked:
            raise ProtocolError("incorrect masking")
        left = second & 0x7F
        if left >= _TWO_BYTES:
            left = int.from_bytes((yield from source.read_exact(2 if left == _TWO_BYTES else 8)), "big")
        if left > max_bytes:
            raise PayloadTooBig(left, max_bytes)
        if left > MAX_CONTROL_BYTES and opcode not in DATA:
            raise ProtocolError("control frame too long")
        mask = (yield from source.read_exact(4)) if masked else b""
        fin, reserved = bool(first & 0x80), [bool(first & bit) for bit in (0x40, 0x20, 0x10)]
        while True:
            size = min(left, PIECE_BYTES)
            left -= size
            data: bytes | bytearray = yield from source.read_exact(size)
            frame = Frame(opcode, _apply_mask(data, mask) if masked else data, fin and not left, *reserved)
            frame.check()
            yield frame
            if not left:
                break
            opcode = Opcode.CONT


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
