# SPDX-License-Identifier: Apache-2.0
"""Batches as bytes: what is told arrives as it was, and anything else is refused with BatchError and nothing else."""

from __future__ import annotations

import contextlib
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lbproxy.core.replicas.batches import (
    KEY_BYTES,
    MAX_BATCH_BYTES,
    MAX_EVENTS,
    MAX_FLOWS,
    MAX_KEYS,
    MAX_NAME_CHARS,
    MAX_SIZE,
    VERSION,
    Batch,
    BatchError,
    FlowUse,
    RequestBegan,
    RequestEnded,
    RequestPlaced,
    ResponseStored,
    decode,
    encode,
    pack_keys,
    unpack_keys,
)

COUNTS = st.integers(0, 1 << 53)
SIZES = st.integers(0, MAX_SIZE)
AGES = st.floats(0.0, 1e10)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
KEYS = st.lists(st.integers(0, 2**64 - 1), max_size=5).map(tuple)
PACKED = KEYS.map(pack_keys)
PLACED = st.builds(
    RequestPlaced,
    number=COUNTS,
    endpoint=st.just(0),
    age_ms=AGES,
    keys=PACKED,
    prompt_bytes=SIZES,
    body_bytes=SIZES,
    model=st.none() | NAMES,
    stream=st.booleans(),
    session=st.none() | NAMES,
    flow=NAMES,
    max_tokens=st.none() | SIZES,
    media_tokens=SIZES,
    binary=st.booleans(),
    open_ended=st.booleans(),
)
USAGES = st.none() | st.tuples(*[st.none() | SIZES] * 3)
ENDED = st.builds(RequestEnded, COUNTS, AGES, st.booleans(), SIZES, USAGES)
EVENTS = (
    PLACED | st.builds(RequestBegan, COUNTS, AGES) | ENDED | st.builds(ResponseStored, NAMES, st.just(0), SIZES, PACKED)
)
USES = st.builds(FlowUse, SIZES, COUNTS, st.floats(0.0, 1e18), st.floats(0.0, 1e18))
BATCHES = st.builds(
    Batch,
    replica=NAMES,
    number=COUNTS,
    block_bytes=SIZES,
    is_reset=st.booleans(),
    untold=COUNTS,
    urls=st.lists(NAMES, min_size=1, max_size=3),
    events=st.lists(EVENTS, max_size=6),
    flows=st.dictionaries(NAMES, USES, max_size=3),
    asks=st.lists(NAMES, max_size=3),
)
PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
ANYTHING = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=12
)


def placed(**changes: object) -> RequestPlaced:
    """A placement that is valid without the changes."""
    valid: dict[str, object] = {
        "number": 1,
        "endpoint": 0,
        "age_ms": 3.0,
        "keys": pack_keys((1, 2)),
        "prompt_bytes": 2048,
        "body_bytes": 2100,
        "model": "m",
        "stream": True,
        "session": None,
        "flow": "f",
        "max_tokens": None,
        "media_tokens": 0,
        "binary": False,
        "open_ended": False,
        "second_leg": False,
    }
    return RequestPlaced(**{**valid, **changes})  # type: ignore[arg-type]


def batch(**changes: object) -> Batch:
    """A batch that is valid without the changes."""
    valid: dict[str, object] = {
        "replica": "r",
        "number": 1,
        "block_bytes": 1024,
        "is_reset": False,
        "untold": 0,
        "urls": ["http://10.0.0.1:8000"],
        "events": [],
        "flows": {},
        "asks": [],
    }
    return Batch(**{**valid, **changes})  # type: ignore[arg-type]


@settings(deadline=None)
@given(BATCHES)
def test_a_batch_arrives_as_it_was_sent(sent: Batch) -> None:
    assert decode(encode(sent)) == sent


@settings(deadline=None)
@given(KEYS)
def test_keys_arrive_as_they_were_sent(keys: tuple[int, ...]) -> None:
    assert unpack_keys(pack_keys(keys)) == keys


def test_of_a_very_long_prompt_only_the_first_keys_are_told() -> None:
    packed = pack_keys(tuple(range(MAX_KEYS + 5)))
    assert len(packed) == KEY_BYTES * MAX_KEYS
    assert unpack_keys(packed)[-1] == MAX_KEYS - 1
    assert decode(encode(batch(events=[placed(keys=packed)])))


# --- What is refused --------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_a_batch_or_a_batch_error(data: bytes) -> None:
    for text in (data, bytes((VERSION,)) + data):
        with contextlib.suppress(BatchError):
            decode(text)


@settings(deadline=None)
@given(ANYTHING, st.lists(ANYTHING, min_size=9, max_size=9))
def test_other_values_are_a_batch_or_a_batch_error(value: object, fields: list[object]) -> None:
    for one in (value, fields):
        with contextlib.suppress(BatchError):
            decode(bytes((VERSION,)) + msgspec.msgpack.encode(one))


@settings(deadline=None)
@given(BATCHES, st.data())
def test_a_truncated_or_prolonged_batch_is_refused(sent: Batch, data: st.DataObject) -> None:
    whole = encode(sent)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(BatchError):
        decode(whole[:cut])
    with pytest.raises(BatchError):
        decode(whole + b"\x00")


@settings(deadline=None)
@given(BATCHES, st.data())
def test_a_batch_with_a_wrong_byte_raises_nothing_but_batch_error(sent: Batch, data: st.DataObject) -> None:
    whole = bytearray(encode(sent))
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BatchError):
        decode(bytes(whole))


@pytest.mark.parametrize("version", [0, VERSION + 1, 255])
def test_another_version_is_named(version: int) -> None:
    with pytest.raises(BatchError, match=f"version {version}, not {VERSION}"):
        decode(bytes((version,)) + encode(batch())[1:])


def test_a_batch_that_is_too_long_is_not_read() -> None:
    one = placed(keys=bytes(KEY_BYTES * MAX_KEYS))
    assert decode(encode(batch(events=[one] * 63)))
    long = encode(batch(events=[one] * 64))
    assert len(long) > MAX_BATCH_BYTES
    with pytest.raises(BatchError, match="too long"):
        decode(long)
    with pytest.raises(BatchError, match="empty"):
        decode(b"")


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(BatchError):
        decode(bytes((VERSION,)) + b"\x91" * 100_000 + b"\xc0")


WRONG: dict[str, Batch] = {
    "name too long": batch(replica="r" * (MAX_NAME_CHARS + 1)),
    "number negative": batch(number=-1),
    "number huge": batch(number=(1 << 53) + 1),
    "number no integer": batch(number=1.5),
    "number text": batch(number="1"),
    "reset no boolean": batch(is_reset=1),
    "block size negative": batch(block_bytes=-1),
    "untold negative": batch(untold=-1),
    "url too long": batch(urls=["u" * 8193]),
    "url no text": batch(urls=[b"u"]),
    "too many urls": batch(urls=["u"] * (MAX_EVENTS + 1)),
    "too many events": batch(events=[RequestBegan(1, 0.0)] * (MAX_EVENTS + 1)),
    "too many flows": batch(flows={str(n): FlowUse(0, 0, 0.0, 0.0) for n in range(MAX_FLOWS + 1)}),
    "too many asks": batch(asks=["r"] * 1025),
    "event without a tag": batch(events=[[1, 2.0]]),
    "event of an unknown kind": batch(events=[[9, 1, 2.0]]),
    "event too short": batch(events=[[2, 1]]),
    "event too long": batch(events=[[2, 1, 0.0, 0]]),
    "endpoint without a url": batch(events=[placed(endpoint=1)]),
    "endpoint negative": batch(events=[placed(endpoint=-1)]),
    "stored at no url": batch(events=[ResponseStored("id", 1, 1, b"")]),
    "part of a key": batch(events=[placed(keys=bytes(KEY_BYTES + 1))]),
    "part of a key of a stored response": batch(events=[ResponseStored("id", 0, 1, bytes(3))]),
    "too many keys": batch(events=[placed(keys=bytes(KEY_BYTES * (MAX_KEYS + 1)))]),
    "age NaN": batch(events=[placed(age_ms=math.nan)]),
    "age infinite": batch(events=[RequestBegan(1, math.inf)]),
    "age negative": batch(events=[RequestBegan(1, -1.0)]),
    "age of years": batch(events=[RequestBegan(1, 1.1e10)]),
    "prompt negative": batch(events=[placed(prompt_bytes=-1)]),
    "prompt huge": batch(events=[placed(prompt_bytes=MAX_SIZE + 1)]),
    "model too long": batch(events=[placed(model="m" * (MAX_NAME_CHARS + 1))]),
    "flow missing": batch(events=[placed(flow=None)]),
    "stream no boolean": batch(events=[placed(stream=0)]),
    "usage too short": batch(events=[RequestEnded(1, 0.0, True, 0, (1, 2))]),  # type: ignore[arg-type]
    "usage negative": batch(events=[RequestEnded(1, 0.0, True, 0, (1, -2, 3))]),
    "use NaN": batch(flows={"f": FlowUse(0, 0, math.nan, 0.0)}),
    "use infinite": batch(flows={"f": FlowUse(0, 0, 0.0, math.inf)}),
    "use negative": batch(flows={"f": FlowUse(-1, 0, 0.0, 0.0)}),
    "flow's name too long": batch(flows={"f" * (MAX_NAME_CHARS + 1): FlowUse(0, 0, 0.0, 0.0)}),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_value_out_of_its_range_or_of_another_type_is_refused(wrong: Batch) -> None:
    with pytest.raises(BatchError):
        decode(encode(wrong))


def test_what_is_refused_is_not_repeated_in_the_text() -> None:
    with pytest.raises(BatchError) as refused:
        decode(encode(batch(replica="secret" * 1000)))
    assert "secret" not in str(refused.value)
    assert refused.value.__cause__ is None
