# SPDX-License-Identifier: Apache-2.0
"""KV events decoded from bytes: those of a real vLLM, both forms of events, and everything that a hostile or newer
publisher may send instead.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from msgspec import Raw
from msgspec.msgpack import encode

from lbproxy.core.engines.kv_events import (
    MAX_EVENTS,
    MAX_FRAME_BYTES,
    BlocksStored,
    Cleared,
    KvEvent,
    KvEventError,
    KvMessage,
    Problem,
    Removed,
    decode_event,
    read_message,
    read_replayed,
    replay_request,
    split_batch,
)

RECORDED = Path(__file__).parents[2] / "fixtures" / "kv-events" / "vllm-0.32.0.jsonl"
STORED = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": None,
    "token_ids": [5] * 32,
    "block_size": 16,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}


def events(*some: object) -> list[KvEvent | None]:
    return [decode_event(one) for one in split_batch(encode([1.5, some, 0]))]


def problem_of(payload: bytes) -> Problem:
    """Of a batch, or of its first event."""
    with pytest.raises(KvEventError) as caught:
        _read(payload)
    return caught.value.problem


def _read(payload: bytes) -> None:
    for one in split_batch(payload):
        decode_event(one)


def test_what_a_real_vllm_published_is_read() -> None:
    """Recorded from vLLM 0.32: a subscriber that came late, with a topic as llm-d sets it."""
    lines = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    for line in lines:
        message = read_message([bytes.fromhex(frame) for frame in line["frames"]])
        assert (message.topic, message.sequence) == (b"kv@pod1@tiny", line["seq"])
        found = [decode_event(one) for one in split_batch(message.payload)]
        for event, shown in zip(found, line["decoded"][1], strict=True):
            if shown["type"] == "BlockStored":
                assert event == BlocksStored(shown["block_hashes"], 32, "GPU", 0)
            else:
                assert event == Removed(shown["block_hashes"], "GPU", 0)
    assert len(lines) == 5


def test_maps_and_arrays_say_the_same() -> None:
    """Arrays: vLLM before 0.24 and SGLang before 0.5.20. What follows the medium differs between the two."""
    assert events(
        STORED,
        ["BlockStored", [1, 2], None, [5] * 32, 16, None, "GPU", None, [], 0],
        ["BlockStored", [1, 2], 7, [5] * 32, 16, None],
        {"type": "BlockRemoved", "block_hashes": [3], "medium": "CPU", "group_idx": 2},
        ["BlockRemoved", [3], "CPU"],
        {"type": "AllBlocksCleared"},
        ["AllBlocksCleared"],
    ) == [
        BlocksStored([1, 2], 16, "GPU", 0),
        BlocksStored([1, 2], 16, "GPU", 0),
        BlocksStored([1, 2], 16, "GPU", 0),
        Removed([3], "CPU", 2),
        Removed([3], "CPU", 0),
        Cleared("GPU"),
        Cleared("GPU"),
    ]


def test_unknown_types_and_keys_are_passed_over() -> None:
    new = {**STORED, "new": {"deep": [1, {"x": b"y"}]}, "medium": None}
    assert events({"type": "BlockMoved", "block_hashes": "?"}, ["BlockMoved", 1], new) == [
        None,
        None,
        BlocksStored([1, 2], 16, "GPU", 0),
    ]


def test_long_hashes_count_by_their_first_bytes() -> None:
    """vLLM's are 32 bytes of SHA-256 unless they are asked for as numbers."""
    assert events({**STORED, "block_hashes": [(9).to_bytes(8) + b"x" * 24]}) == [BlocksStored([9], 16, "GPU", 0)]


@pytest.mark.parametrize(
    "event",
    [
        {**STORED, "block_hashes": "ab"},
        {**STORED, "block_hashes": [1.5]},
        {**STORED, "block_hashes": [b"x" * 65]},
        {**STORED, "block_size": 0},
        {**STORED, "block_size": 1 << 40},
        {**STORED, "medium": "G" * 65},
        {**STORED, "group_idx": -1},
        {key: value for key, value in STORED.items() if key != "block_hashes"},
        ["BlockStored", [1]],
        [],
        [5],
        {},
        {"type": 5},
        {5: "type"},
        7,
        None,
        "BlockStored",
    ],
)
def test_an_event_of_wrong_types_is_one_problem(event: object) -> None:
    assert problem_of(encode([1.5, [event], 0])) is Problem.EVENT


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        encode({"ts": 1}),
        encode([]),
        encode([1.5]),
        encode([1.5, {"type": "AllBlocksCleared"}]),
        encode([1.5, [None] * (MAX_EVENTS + 1)]),
        b"\x93\xc0\xdd\xff\xff\xff\xff\x01",
        b"\xdd\xff\xff\xff\xff\x01",
        b"\x93\xc0" + b"\x91" * 500_000,
        b"\x93\xc0" + b"\x81\x01" * 500_000,
        encode([1.5, [], 0]) + b"\x00",
    ],
)
def test_a_batch_that_is_none_is_one_problem(payload: bytes) -> None:
    """Bombs included: claimed lengths that are not there, and depth."""
    assert problem_of(payload) is Problem.BATCH


def test_a_bomb_inside_an_event_is_a_problem_of_that_event() -> None:
    deep = b"\x82" + encode("type") + encode("BlockStored") + encode("block_hashes") + b"\x91" * 900 + b"\x01"
    with pytest.raises(KvEventError) as caught:
        decode_event(Raw(deep))
    assert caught.value.problem is Problem.EVENT


def test_a_batch_that_is_too_large_is_not_looked_at() -> None:
    assert problem_of(b"\xc1" * (MAX_FRAME_BYTES + 1)) is Problem.BATCH


@pytest.mark.parametrize(
    "frames", [[], [b""], [b"t", b"1" * 8], [b"t", b"1" * 7, b"x"], [b"t", b"", b"x"], [b"t", b"1" * 8, b"x", b""]]
)
def test_messages_of_other_shapes_are_problems(frames: list[bytes]) -> None:
    with pytest.raises(KvEventError) as caught:
        read_message(frames)
    assert caught.value.problem is Problem.FRAMES


def test_replays_of_old_and_new_publishers_are_read() -> None:
    """vLLM up to 0.24 and SGLang up to 0.5.21 send no topic."""
    five, end = (5).to_bytes(8), b"\xff" * 8
    assert read_replayed([b"", b"t", five, b"x"]) == KvMessage(b"t", 5, b"x")
    assert read_replayed([b"", five, b"x"]) == KvMessage(b"", 5, b"x")
    assert read_replayed([b"", b"", end, b""]) is None
    assert read_replayed([b"", end, b""]) is None
    assert replay_request(5) == [b"", five]
    for wrong in ([], [b""], [b"", five], [b"x", five, b"x"], [b"", b"t", b"short", b"x"], [b""] * 9):
        with pytest.raises(KvEventError):
            read_replayed(wrong)


def test_random_damage_raises_nothing_else() -> None:
    rng = random.Random(7)
    whole = bytes.fromhex(json.loads(RECORDED.read_text().splitlines()[0])["frames"][2])
    arrays = encode([1.0, [["BlockStored", [1], None, [1], 1, None, "GPU"], ["BlockRemoved", [b"xx"]]]])
    read = 0
    for _ in range(20_000):
        damaged = bytearray(rng.choice((whole, arrays)))
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.getrandbits(8)
        try:
            read += len([decode_event(one) for one in split_batch(bytes(damaged[: rng.randint(1, len(damaged))]))])
        except KvEventError:
            continue
    assert read
