# SPDX-License-Identifier: Apache-2.0
"""KV cache events as engines publish them over ZMQ: the bytes of one message in, typed events out.

vLLM and SGLang send messages of three frames: a topic, a sequence number of 8 bytes (big-endian, from 0 at each start
of the publisher), and a msgpack array `[timestamp, events, rank]`. An event is a map with a `type` (vLLM since 0.24,
SGLang since 0.5.20) or an array that begins with its type (before). Replayed messages have the same frames after an
empty one, from older publishers without the topic. See docs/decisions/0041-contracts-of-engines.md, section 8.

Nothing here is trusted. A batch is split into its events in one pass over its bytes (1 MiB takes 1 to 8 ms), and each
event is decoded by itself, so that a caller can stop in between. Token ids and unknown keys are passed over without an
object for each. Unknown types of events are no error: they are None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Annotated, Final, NamedTuple, TypeAlias

from msgspec import DecodeError, Meta, Raw, Struct
from msgspec.msgpack import Decoder

MAX_FRAME_BYTES: Final = 1 << 20
"""One step of an engine stays far below: 16,384 tokens are 0.1 MB in blocks of 16 (vLLM), 8,192 tokens 0.9 MB in blocks
of one token (SGLang's default)."""
MAX_EVENTS: Final = 32_768
"""In a batch."""
MAX_HASHES: Final = 65_536
"""In an event."""
MAX_HASH_BYTES: Final = 64
SEQUENCE_BYTES: Final = 8
END_OF_REPLAY: Final = (1 << 64) - 1
"""The sequence number that ends a replay: -1."""
GPU: Final = "GPU"
"""The medium of events that name none."""
_UNREADABLE: Final = (DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that it cannot decode."""
_KNOWN: Final = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})
SILENT_S: Final = 10.0
"""A publisher that was silent for so long may have a successor with another topic."""


class Problem(Enum):
    """Why a message or a part of it was not used: also the label of the counter."""

    FRAMES = "frames"
    """Not three frames, or a sequence number that is none."""
    BATCH = "batch"
    """The third frame is not an array of a time and a list of events."""
    EVENT = "event"
    """One event of a known type could not be read."""
    TOPIC = "topic"
    """From a second publisher."""
    BLOCKS = "blocks"
    """More blocks than are counted."""
    GAP = "gap"
    """Messages were lost, and not replayed."""
    REPLAY = "replay"
    """The replay failed, or did not respond in time."""
    DISCONNECTED = "disconnected"
    """The connection was closed: by the other end, or because a frame was larger than `MAX_FRAME_BYTES`."""


@dataclass(slots=True)
class KvStats:
    """What one endpoint published."""

    now: Callable[[], float]
    messages: int = 0
    bytes: int = 0
    stored: int = 0
    """Blocks."""
    removed: int = 0
    clears: int = 0
    restarts: int = 0
    """Times that the publisher started again."""
    lost: int = 0
    """Messages that were never received."""
    replayed: int = 0
    problems: Counter[Problem] = field(default_factory=Counter)
    heard_at: float = -inf
    """When the last message arrived."""

    @property
    def age_s(self) -> float | None:
        """Seconds since then; None = there was no message."""
        return None if self.heard_at == -inf else self.now() - self.heard_at


class KvEventError(Exception):
    """A message or event that cannot be read."""

    def __init__(self, problem: Problem, text: str) -> None:
        super().__init__(text)
        self.problem = problem


class KvMessage(NamedTuple):
    """One message, not decoded yet."""

    topic: bytes
    sequence: int
    payload: bytes


class BlocksStored(NamedTuple):
    """Blocks are in the cache now. They may have been there before."""

    blocks: list[int]
    """64-bit hashes; of a longer hash the first 8 bytes."""
    block_size: int
    """Tokens in each of them."""
    medium: str
    """`GPU`, or where else they are."""
    group: int
    """The group of layers whose cache it is: hybrid models have several."""


class Removed(NamedTuple):
    """Blocks are not in the cache any more."""

    blocks: list[int]
    medium: str
    group: int


class Cleared(NamedTuple):
    """Nothing is in the cache any more."""

    medium: str


KvEvent: TypeAlias = BlocksStored | Removed | Cleared

_Hashes: TypeAlias = Annotated[
    list[int | Annotated[bytes, Meta(max_length=MAX_HASH_BYTES)]], Meta(max_length=MAX_HASHES)
]
_BlockSize: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 20)]
_Medium: TypeAlias = Annotated[str, Meta(max_length=64)] | None
_Group: TypeAlias = Annotated[int, Meta(ge=0, le=255)] | None


class _Batch(Struct, array_like=True, gc=False):
    ts: Raw
    events: Annotated[list[Raw], Meta(max_length=MAX_EVENTS)]


class _Stored(Struct, tag_field="type", tag="BlockStored", gc=False):
    block_hashes: _Hashes
    block_size: _BlockSize
    medium: _Medium = None
    group_idx: _Group = None


class _Removed(Struct, tag_field="type", tag="BlockRemoved", gc=False):
    block_hashes: _Hashes
    medium: _Medium = None
    group_idx: _Group = None


class _Cleared(Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    medium: _Medium = None


class _StoredArray(Struct, array_like=True, tag="BlockStored", gc=False):
    """What follows `medium` differs between the engines, and is not needed."""

    block_hashes: _Hashes
    parent_block_hash: Raw
    token_ids: Raw
    block_size: _BlockSize
    lora_id: Raw
    medium: _Medium = None


class _RemovedArray(Struct, array_like=True, tag="BlockRemoved", gc=False):
    block_hashes: _Hashes
    medium: _Medium = None


class _ClearedArray(Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    medium: _Medium = None


class _TypeOnly(Struct):
    type: Annotated[str, Meta(max_length=64)]


_batch: Final = Decoder(_Batch)
_from_map: Final = Decoder(_Stored | _Removed | _Cleared)
_from_array: Final = Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_type_of_map: Final = Decoder(_TypeOnly)
_type_of_array: Final = Decoder(Annotated[list[Raw], Meta(max_length=64)])
_text: Final = Decoder(str)


def read_message(frames: Sequence[bytes]) -> KvMessage:
    """Read the frames of a published message. Raises KvEventError."""
    if len(frames) != 3 or len(frames[1]) != SEQUENCE_BYTES:
        raise KvEventError(Problem.FRAMES, f"expected a topic, 8 bytes and a batch, got {_shape(frames)}")
    return KvMessage(frames[0], int.from_bytes(frames[1]), frames[2])


def read_replayed(frames: Sequence[bytes]) -> KvMessage | None:
    """Read the frames of a replayed message, in both forms; None: the replay ends. Raises KvEventError."""
    first, *rest = frames if frames else (b"?",)
    if first or len(rest) not in (2, 3) or len(rest[-2]) != SEQUENCE_BYTES:
        raise KvEventError(Problem.REPLAY, f"expected an empty frame, 8 bytes and a batch, got {_shape(frames)}")
    sequence = int.from_bytes(rest[-2])
    return None if sequence == END_OF_REPLAY else KvMessage(rest[0] if len(rest) == 3 else b"", sequence, rest[-1])


def replay_request(start: int) -> list[bytes]:
    """The frames that ask for a replay of everything from a sequence number on."""
    return [b"", start.to_bytes(SEQUENCE_BYTES)]


def split_batch(payload: bytes) -> list[Raw]:
    """The events of a batch, for `decode_event`. Raises KvEventError."""
    if len(payload) > MAX_FRAME_BYTES:
        raise KvEventError(Problem.BATCH, f"a batch of {len(payload)} bytes")
    try:
        return _batch.decode(payload).events
    except _UNREADABLE as error:
        raise KvEventError(Problem.BATCH, f"a batch that cannot be read: {error}") from None


def decode_event(raw: Raw) -> KvEvent | None:
    """One event; None if its type is not known. Raises KvEventError."""
    first = bytes(memoryview(raw)[:1])[0]
    is_map, is_array = first >> 4 == 0x8 or first in (0xDE, 0xDF), first >> 4 == 0x9 or first in (0xDC, 0xDD)
    if not is_map and not is_array:
        raise KvEventError(Problem.EVENT, "an event that is neither a map nor an array")
    try:
        found = _from_map.decode(raw) if is_map else _from_array.decode(raw)
        medium = found.medium or GPU
        if isinstance(found, _Cleared | _ClearedArray):
            return Cleared(medium)
        group = getattr(found, "group_idx", None) or 0
        hashes = [_hash(one) for one in found.block_hashes]
        if isinstance(found, _Stored | _StoredArray):
            return BlocksStored(hashes, found.block_size, medium, group)
        return Removed(hashes, medium, group)
    except _UNREADABLE as error:
        if _is_unknown(raw, is_map=is_map):
            return None
        raise KvEventError(Problem.EVENT, f"an event that cannot be read: {error}") from None


def _is_unknown(raw: Raw, *, is_map: bool) -> bool:
    """Whether its type is readable, and none of those that are known."""
    try:
        if is_map:
            return _type_of_map.decode(raw).type not in _KNOWN
        parts = _type_of_array.decode(raw)
        return bool(parts) and _text.decode(parts[0]) not in _KNOWN
    except _UNREADABLE:
        return False


def _hash(value: int | bytes) -> int:
    return value if isinstance(value, int) else int.from_bytes(value[:SEQUENCE_BYTES])


def _shape(frames: Sequence[bytes]) -> str:
    return f"{len(frames)} frames of {', '.join(str(len(one)) for one in frames[:4])} bytes"


class KvOrder(Enum):
    """How a message follows the one before."""

    NEXT = "next"
    FIRST = "first"
    """Nothing was received of this publisher before."""
    GAP = "gap"
    """Messages between are missing."""
    RESTART = "restart"
    """The number is not larger than the last one: the publisher started again."""
    FOREIGN = "foreign"
    """It is from another publisher at the same address, and not to be used."""


class KvSequence:
    """The sequence numbers of one publisher of KV events: what is next, what is missing, and when it started again.

    Follows one publisher. Topics identify it: those of one publisher do not change.
    """

    def __init__(self) -> None:
        self.expected: int | None = None
        """The number of the next message; None = nothing was received yet."""
        self._topic = b""
        self._heard_at = -inf

    def judge(self, topic: bytes, number: int, now: float) -> KvOrder:
        """Classify a message. Unless it is FOREIGN, the one after it is expected from now on."""
        expected = self.expected
        if expected is not None and topic != self._topic:
            if now < self._heard_at + SILENT_S:
                return KvOrder.FOREIGN
            order = KvOrder.RESTART
        elif expected is None:
            order = KvOrder.FIRST
        elif number == expected:
            order = KvOrder.NEXT
        else:
            order = KvOrder.GAP if number > expected else KvOrder.RESTART
        self._topic, self._heard_at, self.expected = topic, now, number + 1
        return order
