# SPDX-License-Identifier: Apache-2.0
"""Batches of events that replicas send each other, and their form as bytes. The one place that validates them.

A batch is a byte with the version and a msgpack array. Batches of one replica are numbered. What happened is told by
its age when the batch was made, as clocks of machines differ. Endpoints are told by their URLs, which all replicas
have in common, requests by a number that their replica gave them. A prompt is told by the keys of its blocks, 8 bytes
for each KiB, and never as text.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from lbproxy.core.capacity.bucket import SLOTS
from lbproxy.core.requests.encodable import encodable

VERSION: Final = 3
"""To be increased with each change of what is told. Replicas of another version are not understood."""
MAX_BATCH_BYTES: Final = 4 << 20
MAX_EVENTS: Final = 4096
"""In one batch."""
MAX_KEYS: Final = 8192
"""Keys of one prompt: 8 MiB."""
KEY_BYTES: Final = 8
MAX_FLOWS: Final = 4096

MAX_NAME_CHARS: Final = 1024
MAX_SIZE: Final = 1 << 32
"""The largest count of bytes or tokens."""
MAX_AMOUNT: Final = 1e18
MAX_AGE_MS: Final = 1e10
"""Older events are told as if they were this old."""

Name: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
Url: TypeAlias = Annotated[str, Meta(max_length=8192)]
"""Longer than any string of the settings."""
Count: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 53)]
Size: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_SIZE)]
Ms: TypeAlias = Annotated[float, Meta(ge=0.0, le=MAX_AGE_MS)]
Amount: TypeAlias = Annotated[float, Meta(ge=0.0, le=MAX_AMOUNT)]
Keys: TypeAlias = Annotated[bytes, Meta(max_length=KEY_BYTES * MAX_KEYS)]


class BatchError(Exception):
    """Bytes that are no batch of this version. The text says why, without any of them."""


class ReplicaEvent(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """What all events are."""


class RequestPlaced(ReplicaEvent, tag=1):
    """A request was placed."""

    number: Count
    endpoint: Annotated[int, Meta(ge=0, le=MAX_EVENTS)]
    """An index of `Batch.urls`."""
    age_ms: Ms
    keys: Keys
    prompt_bytes: Size
    body_bytes: Size
    model: Name | None
    stream: bool
    session: Name | None
    flow: Name
    max_tokens: Size | None
    media_tokens: Size
    binary: bool
    open_ended: bool
    second_leg: bool
    """Its prompt was computed elsewhere: see InferenceRequest."""
    counted: bool = False
    """What is told of the use of its flow and its endpoint includes it, as after a reset."""


class RequestBegan(ReplicaEvent, tag=2):
    """The first byte of its response came."""

    number: Count
    age_ms: Ms


class RequestEnded(ReplicaEvent, tag=3):
    """The request ended."""

    number: Count
    age_ms: Ms
    completed: bool
    response_tokens: Size
    """As far as they were counted."""
    usage: tuple[Size | None, Size | None, Size | None] | None
    """Prompt, cached and completion tokens."""
    tokens: Amount = 0.0
    """What it used of limits."""


class ResponseStored(ReplicaEvent, tag=4):
    """An endpoint stores a response, and clients may ask for it."""

    response_id: Name
    endpoint: Annotated[int, Meta(ge=0, le=MAX_EVENTS)]
    prompt_bytes: Size
    keys: Keys


class Used(ReplicaEvent, tag=5):
    """What is used of an endpoint's limits per time, requests of others included. Told after a reset."""

    endpoint: Annotated[int, Meta(ge=0, le=MAX_EVENTS)]
    requests: Amount
    tokens: Amount
    day_age_ms: Ms
    """How long ago the newest step of the day began."""
    day: Annotated[list[Amount], Meta(max_length=SLOTS)]
    """As `core.capacity.bucket.Spent`."""


class FlowUse(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """What a flow with limits uses at one replica, at the end of the batch."""

    active: Size
    """Requests that are placed, or wait and are not parked."""
    admitted: Count
    """Requests that its limit per minute admitted there, ever."""
    used_requests: Amount
    """What is missing in its buckets there: requests that others admitted are included."""
    used_tokens: Amount


AnyEvent: TypeAlias = RequestPlaced | RequestBegan | RequestEnded | ResponseStored | Used


class Batch(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """What one replica tells at one time."""

    replica: Name
    """Its id: another one for each process."""
    number: Count
    """1 for its first batch, and one more for each."""
    block_bytes: Size
    """The block size of its keys; 0 = it has none."""
    is_reset: bool
    """All requests that it has in flight are told again, here and in the batches that follow."""
    untold: Count
    """How many of these the batches that follow still have to tell; 0 = those that were not told again have ended."""
    urls: Annotated[list[Url], Meta(max_length=MAX_EVENTS)]
    events: Annotated[list[AnyEvent], Meta(max_length=MAX_EVENTS)]
    """In the order in which they happened."""
    flows: Annotated[dict[Name, FlowUse], Meta(max_length=MAX_FLOWS)]
    """Flows whose use changed."""
    asks: Annotated[list[Name], Meta(max_length=1024)]
    """Replicas of which a batch was missed: they should send a reset."""


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Batch).decode


def encode(batch: Batch) -> bytes:
    """A batch as bytes. No text or number that a client or an endpoint sent is in the way of all others."""
    try:
        return bytes((VERSION,)) + _encode(batch)
    except (UnicodeError, OverflowError):
        return bytes((VERSION,)) + _encode(encodable(batch))


def decode(data: bytes) -> Batch:
    """A batch that was received. Raises BatchError."""
    if not 1 < len(data) <= MAX_BATCH_BYTES:
        raise BatchError("a batch is empty or too long")
    if data[0] != VERSION:
        raise BatchError(f"a batch has version {data[0]}, not {VERSION}: all replicas must run the same lbproxy")
    try:
        batch = _decode(memoryview(data)[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise BatchError("a batch is malformed") from None
    for event in batch.events:
        match event:
            case RequestPlaced(endpoint=endpoint, keys=keys) | ResponseStored(endpoint=endpoint, keys=keys):
                if endpoint >= len(batch.urls) or len(keys) % KEY_BYTES:
                    raise BatchError("a batch is malformed")
            case Used(endpoint=endpoint) if endpoint >= len(batch.urls):
                raise BatchError("a batch is malformed")
    return batch


def pack_keys(keys: tuple[object, ...]) -> bytes:
    """Keys of blocks as bytes: the first `MAX_KEYS`."""
    keys = keys[:MAX_KEYS]
    return struct.pack(f"<{len(keys)}Q", *keys)


def unpack_keys(data: bytes) -> tuple[object, ...]:
    """Keys of blocks from bytes."""
    return struct.unpack(f"<{len(data) // KEY_BYTES}Q", data)
