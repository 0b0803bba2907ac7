# SPDX-License-Identifier: Apache-2.0
"""Recorded rows: parsing, what malformed ones do, replay, and the stand-ins' statistics."""

from statistics import fmean, median

import pytest

from lbproxy.sim.workloads.prompts import Piece
from lbproxy.sim.workloads.traces import (
    TraceError,
    TraceRow,
    azure_like,
    mooncake_like,
    read_azure,
    read_bailian,
    read_burstgpt,
    read_mooncake,
    replay,
)

MOONCAKE = [
    '{"timestamp": 3000, "input_length": 600, "output_length": 3, "hash_ids": [0, 7]}',
    "",
    '{"timestamp": 0, "input_length": 512, "output_length": 500, "hash_ids": [0]}',
]
AZURE = [
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 18:15:46.6805900,374,44",
    "2023-11-16 18:15:50.9951690,396,109",
]


BAILIAN = [
    f'{{"chat_id": {chat}, "parent_chat_id": {parent}, "timestamp": {at}, {lengths}, "hash_ids": {blocks}}}'
    for chat, parent, at, lengths, blocks in (
        (159, 55, 61.5, '"input_length": 40, "output_length": 7', [8, 9]),
        (55, -1, 60.0, '"input_length": 20, "output_length": 5', [8, 3]),
        (160, 159, 62, '"input_length": 9, "output_length": 1', [8, 9]),
    )
]
BURSTGPT = [
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
    "5,,1,ChatGPT,472,18,490,API log",
    "45,a,3,GPT-4,100,30,130,Conversation log",
    "118,a,9,GPT-4,150,20,170,Conversation log",
    "200,a,9,GPT-4,160,10,170,Conversation log",
]


def prompts(rows: list[TraceRow]) -> list[tuple[Piece, ...]]:
    arrivals = replay(rows, seed=1, speedup=1.0, max_context=10**6).begin(0.0)
    assert arrivals is not None
    return [job.prompt for _, job in arrivals]


def test_bailian_sessions_are_followed_to_their_first_request() -> None:
    """Also where a file has a request before the one that it follows: it then begins a session."""
    rows = read_bailian([BAILIAN[1], BAILIAN[0], BAILIAN[2]])
    assert rows == [
        TraceRow(0.0, 20, 5, (8, 3), 16, "55"),
        TraceRow(1.5, 40, 7, (8, 9), 16, "55"),
        TraceRow(2.0, 9, 1, (8, 9), 16, "55"),
    ]
    assert {row.session for row in read_bailian(BAILIAN)} == {"159", "55"}


def test_bailian_blocks_need_not_be_as_many_as_the_tokens() -> None:
    """What they lack is the prompt's own; what they have too much is not sent."""
    first, second, third = prompts(read_bailian([BAILIAN[1], BAILIAN[0], BAILIAN[2]]))
    assert first == (Piece(8, 16), Piece(3, 4))
    assert second[:2] == (Piece(8, 16), Piece(9, 16))
    assert [piece.tokens for piece in second] == [16, 16, 8]
    assert third == (Piece(8, 9),)


def test_burstgpt_turns_begin_with_what_was_said_if_they_have_room() -> None:
    rows = read_burstgpt(BURSTGPT)
    assert [(row.at_s, row.session) for row in rows] == [(0.0, None), (40.0, "a"), (113.0, "a"), (195.0, "a")]
    alone, first, second, third = prompts(rows)
    assert [piece.tokens for piece in alone] == [472]
    assert second[0] == first[0]
    assert [piece.tokens for piece in second] == [100, 30, 20]
    # 170 tokens were said before: more than it has.
    assert [piece.tokens for piece in third] == [160]
    assert third[0].id not in {piece.id for piece in (*first, *second)}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("5,,1,ChatGPT,472,0,490,API log", "Response tokens must be"),
        ("nan,,1,ChatGPT,472,8,490,API log", "Timestamp must be"),
        ("5,,1,ChatGPT", "TypeError"),
        ("5,,1,ChatGPT,x,8,490,API log", "ValueError"),
    ],
)
def test_malformed_burstgpt_row_is_an_error_that_names_its_line(line: str, why: str) -> None:
    with pytest.raises(TraceError, match=r"^line 6: ") as raised:
        read_burstgpt([*BURSTGPT, line])
    assert why in str(raised.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [('"chat_id": 159', '"chat_id": "x"'), ("[8, 9]", "8"), ("61.5", "-1"), ('"output_length": 7', '"x": 7')],
)
def test_malformed_bailian_row_is_an_error_that_names_its_line(old: str, new: str) -> None:
    with pytest.raises(TraceError, match=r"^line 1: "):
        read_bailian([BAILIAN[0].replace(old, new)])


def test_mooncake_rows_are_read_in_order_of_time() -> None:
    assert read_mooncake(MOONCAKE) == [TraceRow(0.0, 512, 500, (0,)), TraceRow(3.0, 600, 3, (0, 7))]


def test_azure_rows_count_from_the_first() -> None:
    rows = read_azure(AZURE)
    assert [row[1:4] for row in rows] == [(374, 44, ()), (396, 109, ())]
    assert rows[1].at_s == pytest.approx(4.314579, abs=1e-6)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("not json", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 3}', "KeyError: 'hash_ids'"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0]}', "not 1 blocks of 512"),
        ('{"timestamp": 0, "input_length": 6, "output_length": 3, "hash_ids": ["a"]}', "list of numbers"),
        ('{"timestamp": 0, "input_length": 6, "output_length": 3, "hash_ids": [-1]}', "list of numbers"),
        ('{"timestamp": 0, "input_length": 6, "output_length": 0, "hash_ids": [1]}', "output_length must be"),
        ('{"timestamp": 0, "input_length": true, "output_length": 3, "hash_ids": [1]}', "input_length must be"),
        ('{"timestamp": "x", "input_length": 6, "output_length": 3, "hash_ids": [1]}', "timestamp must be"),
        ('{"timestamp": -1, "input_length": 6, "output_length": 3, "hash_ids": [1]}', "timestamp must be"),
    ],
)
def test_malformed_mooncake_row_is_an_error_that_names_its_line(line: str, why: str) -> None:
    with pytest.raises(TraceError, match=r"^line 4: ") as raised:
        read_mooncake([*MOONCAKE, line])
    assert why in str(raised.value)


@pytest.mark.parametrize(
    "line", ["2023-11-16 18:15:46,1", "2023-11-16 18:15:46,1,x", "yesterday,1,1", "2023-11-16 18:15:46,0,1"]
)
def test_malformed_azure_row_is_an_error_that_names_its_line(line: str) -> None:
    with pytest.raises(TraceError, match=r"^line 4: "):
        read_azure([*AZURE, line])


def test_other_files_are_refused() -> None:
    with pytest.raises(TraceError, match="header"):
        read_azure(["a,b,c"])
    with pytest.raises(TraceError, match="header"):
        read_burstgpt(["Timestamp,Model"])
    with pytest.raises(TraceError, match="no rows"):
        read_mooncake([""])


def test_replay_spreads_coarse_times_and_keeps_the_prefixes() -> None:
    rows = [TraceRow(float(second), 700, 5, (0, second + 1)) for second in (0, 0, 0, 3, 3, 9)]
    arrivals = replay(rows, seed=1, speedup=2.0, max_context=1000).begin(10.0)
    assert arrivals is not None
    times = [at for at, _ in arrivals]
    assert times == sorted(times)
    assert len(set(times)) == 6
    assert all(10 <= at <= 11.5 for at in times[:3])
    assert all(11.5 <= at <= 14.5 for at in times[3:5])
    assert times[5] == 14.5
    assert {job.prompt for _, job in arrivals[3:5]} == {(Piece(0, 512), Piece(4, 188))}
    assert len({job.answer.id for _, job in arrivals}) == 6


def test_replay_leaves_out_what_no_model_takes_and_what_comes_too_late() -> None:
    rows = [TraceRow(0.0, 100, 5), TraceRow(1.0, 2000, 5), TraceRow(9.0, 100, 5)]
    arrivals = replay(rows, seed=1, speedup=1.0, max_context=1000, duration_s=5).begin(0.0)
    assert arrivals is not None
    assert [job.id for _, job in arrivals] == ["0"]


def test_same_seed_same_replay_other_seed_other_times() -> None:
    rows = mooncake_like(1, requests=50, duration_s=15)
    first, again, other = (replay(rows, seed=seed, speedup=1.0, max_context=10**6).begin(0.0) for seed in (1, 1, 2))
    assert first == again != other


def test_stand_in_for_mooncake_has_its_statistics() -> None:
    """Theirs: prompts of 12,035 tokens on average, median 6,909; answers of 343; 37 % of all prompt tokens known."""
    rows = mooncake_like(1, requests=6000, duration_s=1764)
    assert len(rows) == pytest.approx(6000, rel=0.05)
    prompts = [row.prompt_tokens for row in rows]
    assert fmean(prompts) == pytest.approx(12_035, rel=0.2)
    assert median(prompts) == pytest.approx(6909, rel=0.2)
    assert fmean(row.output_tokens for row in rows) == pytest.approx(343, rel=0.1)
    seen: set[int] = set()
    known = 0
    for row in rows:
        for position, block in enumerate(row.blocks):
            known += min(512, row.prompt_tokens - 512 * position) if block in seen else 0
            seen.add(block)
    assert known / sum(prompts) == pytest.approx(0.374, abs=0.06)
    assert all(len(row.blocks) == -(-row.prompt_tokens // 512) for row in rows)
    assert all(row.blocks[0] == 0 for row in rows)


def test_stand_in_for_azure_has_its_means() -> None:
    rows = azure_like(1)
    assert fmean(row.prompt_tokens for row in rows) == pytest.approx(1155, rel=0.05)
    assert fmean(row.output_tokens for row in rows) == pytest.approx(211, rel=0.05)
