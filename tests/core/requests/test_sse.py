# SPDX-License-Identifier: Apache-2.0
"""The watchers see an answer's state whatever pieces it comes in."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbproxy.core.requests import sse
from lbproxy.core.requests.request import Usage
from lbproxy.core.requests.sse import (
    MAX_JSON_BYTES,
    EventScanner,
    IdScanner,
    JsonWatcher,
    UsageScanner,
    find_response_id,
    read_usage,
)

EVENTS = st.sampled_from(
    [b"data: {}", b": keep-alive", b'data: {"finish_reason": null}', b"data: x\r", b"a\nb", b"id: data: 1", b""]
)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(events=st.lists(st.tuples(EVENTS, st.sampled_from([b"\n\n", b"\r\n\r\n"])), max_size=8), data=st.data())
def test_events_are_counted_alike_however_they_are_cut(events: list[tuple[bytes, bytes]], data: st.DataObject) -> None:
    stream = b"".join(text.strip(b"\r\n") + end for text, end in events if text.strip(b"\r\n"))
    count = sum(text.startswith(b"data:") for text, _ in events)
    scanner = EventScanner()
    for piece in pieces(stream, data.draw(st.lists(st.integers(0, len(stream)), max_size=6))):
        framed = b"5\r\n" + piece + b"\r\n"
        scanner.feed(framed, 3, 3 + len(piece))
    assert scanner.events == count
    assert scanner.at_boundary


@given(data=st.data(), half=st.sampled_from([b"data: {", b"d", b"data: {}\n", b"\r\n\r"]))
def test_half_an_event_is_no_boundary(data: st.DataObject, half: bytes) -> None:
    stream = b"data: {}\n\n" + half
    scanner = EventScanner()
    for piece in pieces(stream, data.draw(st.lists(st.integers(0, len(stream)), max_size=6))):
        scanner.feed(piece, 0, len(piece))
    assert not scanner.at_boundary
    assert not scanner.is_complete


@pytest.mark.parametrize(
    ("stream", "whole"),
    [
        (b'data: {"finish_reason":null}\n\n', False),
        (b'data: {"finish_reason":"stop"}\n\n', True),
        (b'data: {"finish_reason": "length"}\n\n', True),
        (b"data: [DONE]\n\n", True),
        (b"data: [DONE]\n", False),
        (b"", False),
    ],
)
def test_an_end_is_believed_only_after_a_finish(stream: bytes, whole: bool) -> None:
    for step in (1, 7, 1000):
        scanner = EventScanner(watch_finish=True)
        for at in range(0, len(stream), step):
            piece = stream[at : at + step]
            scanner.feed(piece, 0, len(piece))
        assert scanner.is_complete is whole, step


def test_json_is_whole_when_it_parses_or_is_too_large_to_tell() -> None:
    watcher = JsonWatcher()
    for piece, whole in ((b'xx{"a":', False), (b"1}", True), (b"}", False)):
        start = 2 if piece.startswith(b"xx") else 0
        watcher.feed(piece, start, len(piece))
        assert watcher.is_complete is whole
    watcher.feed(b"x" * MAX_JSON_BYTES, 0, MAX_JSON_BYTES)
    assert watcher.is_complete


VLLM = b'{"prompt_tokens":14,"total_tokens":22,"completion_tokens":8,"prompt_tokens_details":{"cached_tokens":5}}'
USAGES = [
    (b'{"choices":[],"usage":' + VLLM + b"}", Usage(14, 5, 8)),
    (b'{"choices":[{"text":"\\"usage\\": {\\"prompt_tokens\\": 7}"}],"usage":null}', None),
    (b'data: {"usage":null}\n\ndata: {"usage": ' + VLLM + b"}\n\ndata: [DONE]\n\n", Usage(14, 5, 8)),
    (
        b'data: {"usage":{"prompt_tokens":1}}\n\ndata: {"usage":{"prompt_tokens":1,"completion_tokens":2}}',
        Usage(1, None, 2),
    ),
    (b'{"usage":{"input_tokens":3,"input_tokens_details":{"cached_tokens":0},"output_tokens":4}}', Usage(3, 0, 4)),
    (b'{"usage":{"prompt_tokens":-1,"completion_tokens":null}}', None),
    (b'{"usage":{"prompt_tokens":99999999999999}}', None),
    (b'{"usage":' + b" " * 5000 + b'{"prompt_tokens":1}}', None),
    (b"", None),
    (b'"usage', None),
]


@pytest.mark.parametrize(("payload", "usage"), USAGES)
@pytest.mark.parametrize("step", [1, 2, 3, 5, 6, 7, 8, 100, 10_000])
def test_usage_is_found_however_it_is_cut(payload: bytes, usage: Usage | None, step: int) -> None:
    scanner = UsageScanner()
    for at in range(0, len(payload), step):
        piece = b"5\r\n" + payload[at : at + step] + b"\r\n"
        scanner.feed(piece, 3, len(piece) - 2)
    assert scanner.usage == usage
    assert read_usage(payload) == usage


@given(
    counts=st.dictionaries(
        st.sampled_from(
            ["prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens", "prompt_tokens_details"]
        ),
        st.none() | st.integers(-5, 10**10) | st.booleans() | st.just({"cached_tokens": 3}),
    ),
    spaced=st.booleans(),
)
def test_usage_that_is_parsed_says_what_a_search_finds(counts: dict[str, object], spaced: bool) -> None:
    """The short way is for the usual object only, and must not read another meaning into it."""
    body = json.dumps({"usage": counts}, separators=None if spaced else (",", ":")).encode()
    assert read_usage(body) == sse._search_counts(body[body.rfind(b'"usage"') :])


@given(noise=st.binary(max_size=3000), data=st.data())
def test_whatever_comes_usage_costs_little_memory(noise: bytes, data: st.DataObject) -> None:
    scanner = UsageScanner()
    for piece in pieces(noise + b'"usage":' + noise, data.draw(st.lists(st.integers(0, len(noise)), max_size=6))):
        scanner.feed(piece, 0, len(piece))
        assert len(scanner._tail) <= 1024
    _ = scanner.usage


# --- /v1/responses and /v1/messages -----------------------------------------------------------------------------------


CREATED = b'event: response.created\ndata: {"response":{"id":"resp_1","instructions":"event: x"}}\n\n'
OPENING = CREATED + b'event: response.in_progress\r\ndata: {"response":{}}\r\n\r\n'
DELTA = b'event: response.output_text.delta\ndata: {"delta":"a"}\n\n'
STARTED = b'event: message_start\ndata: {"message":{}}\n\nevent: ping\ndata: {}\n\n'
BLOCK = b'event: content_block_delta\ndata: {"delta":{}}\n\n'


@given(data=st.data(), opening=st.sampled_from([OPENING, STARTED, b": x\n\n" + CREATED, CREATED * 3]))
def test_events_that_stand_for_no_token_begin_nothing(data: st.DataObject, opening: bytes) -> None:
    """vLLM sends them before the prompt is computed: taken for the first token they made it look free."""
    scanner = EventScanner(skip_preamble=True)
    for piece in pieces(opening, data.draw(st.lists(st.integers(0, len(opening)), max_size=6))):
        scanner.feed(piece, 0, len(piece))
        assert not scanner.has_content
    assert scanner.preamble_events == scanner.events > 0
    for piece in pieces(DELTA + BLOCK, data.draw(st.lists(st.integers(0, len(DELTA + BLOCK)), max_size=6))):
        scanner.feed(piece, 0, len(piece))
    assert scanner.has_content
    assert scanner.events - scanner.preamble_events == 2


def test_a_first_event_in_one_piece_with_a_token_begins_at_once() -> None:
    for skip, opening in ((True, 2), (False, 0)):
        scanner = EventScanner(skip_preamble=skip)
        scanner.feed(OPENING + DELTA, 0, len(OPENING + DELTA))
        assert (scanner.has_content, scanner.preamble_events, scanner.events) == (True, opening, 3)


@given(data=st.data())
def test_the_id_of_a_stored_response_is_found_in_any_pieces(data: st.DataObject) -> None:
    for text in (OPENING, b'{"object":"response","id" : "resp_1","output":[{"id":"msg_2"}]}'):
        scanner = IdScanner()
        cut = pieces(text, data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
        found = [scanner.feed(b"xx" + piece, 2, 2 + len(piece)) for piece in cut if not scanner.done]
        assert [one for one in found if one] == ["resp_1"]


def test_what_is_no_id_of_a_response_is_not_taken_for_one() -> None:
    assert find_response_id(b'{"id":"chatcmpl-9a"}') == "chatcmpl-9a"
    for text in (
        b'{"id":"msg_1"}',
        b'{"text":"\\"id\\":\\"resp_1\\""}',
        b'{"id":"resp_' + b"x" * 200 + b'"}',
        b" " * 5000 + CREATED,
    ):
        assert find_response_id(text) is None
    scanner = IdScanner()
    assert scanner.feed(b"x" * 5000, 0, 5000) is None
    assert scanner.done


START = b'data: {"type":"message_start","message":{"usage":{"input_tokens":14,"output_tokens":0}}}\n\n'
VLLM_END = (
    b'data: {"usage":{"input_tokens":14,"output_tokens":6,"cache_creation_input_tokens":0,"cache_read_input_tokens":0}}'
)


@pytest.mark.parametrize(
    ("stream", "usage"),
    [
        (START + VLLM_END, Usage(14, 0, 6)),
        (
            START.replace(b"14", b"538")
            + VLLM_END.replace(b"14", b"26").replace(b'read_input_tokens":0', b'read_input_tokens":512'),
            Usage(538, 512, 6),
        ),
        (START + b'data: {"usage":{"output_tokens":6}}\n\n', Usage(14, None, 6)),
        (
            b'{"usage":{"input_tokens":3,"cache_creation_input_tokens":20,"cache_read_input_tokens":100,"output_tokens":1}}',
            Usage(3, 100, 1, 20),
        ),
        (b'{"usage":{"input_tokens":3,"cache_read_input_tokens":100,"output_tokens":1}}', Usage(3, 100, 1, 0)),
        (
            b'{"usage":{"input_tokens":14,"input_tokens_details":{"cached_tokens":9},"output_tokens":6}}',
            Usage(14, 9, 6),
        ),
    ],
)
def test_usage_of_a_stream_may_stand_in_two_events(stream: bytes, usage: Usage) -> None:
    """Anthropic's API tells of the prompt at the beginning, and of the output at the end."""
    for step in (1, 7, 1000):
        scanner = UsageScanner()
        for at in range(0, len(stream), step):
            piece = stream[at : at + step]
            scanner.feed(piece, 0, len(piece))
        assert scanner.usage == usage, step


@pytest.mark.parametrize(
    ("said", "expected", "prompt"),
    [
        (Usage(3, 100, 1, 20), 5000.0, 123),  # less than what is beside it: so it is not in it
        (Usage(1000, 900, 1, 0), 1100.0, 1000),
        (Usage(1000, 900, 1, 0), 2100.0, 1900),  # vLLM, SGLang, Anthropic
        (Usage(1000, 0, 1, 0), 9000.0, 1000),
        (Usage(1000, 900, 1), 9000.0, 1000),  # OpenAI's: always in it
        (Usage(None, 900, 1, 0), 9000.0, None),
        (Usage(0, 0, 0, 0), 0.0, 0),
    ],
)
def test_the_whole_prompt_counts_whatever_the_engine_means_by_input_tokens(
    said: Usage, expected: float, prompt: int | None
) -> None:
    assert said.resolved(expected).prompt_tokens == prompt
    assert said.resolved(expected).cached_tokens == said.cached_tokens


PIECES = st.sampled_from(
    [
        b'data: {"choices":[{"delta":{"content":" a"}}]}\n\n',
        b'data:{"usage":null}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n',
        b'data: {"usage":{"prompt_tokens":7,"completion_tokens":2},"x":"' + b"y" * 1200 + b'"}\n\n',
        b'data: a\ndata: "usage":{"prompt_tokens":1}\n\n',
        b"data: a\n\ndata: b\n\n",
        b"data: a\r\n\r\n",
        b"data: a\n",
        b"\n",
        b'data: {"us',
        b'age":{"prompt_tokens":3}}\n\n',
        b"data:\n\n",
        b"data\n\n",
        b": comment\n\n",
        b"event: ping\ndata: {}\n\n",
        b"d",
        b"\n\n",
    ]
)


@given(pieces=st.lists(PIECES, max_size=12), skip=st.booleans(), around=st.tuples(st.binary(max_size=9), st.binary()))
def test_a_token_that_is_recognised_leaves_both_scanners_as_if_they_had_read_it(
    pieces: list[bytes], skip: bool, around: tuple[bytes, bytes]
) -> None:
    before, after = around
    events, usage = EventScanner(skip_preamble=skip), UsageScanner()
    plain_events, plain_usage = EventScanner(skip_preamble=skip), UsageScanner()
    for piece in pieces:
        data, start, end = before + piece + after, len(before), len(before) + len(piece)
        if not events.is_token(data, start, end, usage):
            events.feed(data, start, end)
            usage.feed(data, start, end)
        plain_events.feed(data, start, end)
        plain_usage.feed(data, start, end)
        assert (events.events, events.has_content, events.at_boundary) == (
            plain_events.events,
            plain_events.has_content,
            plain_events.at_boundary,
        )
        assert usage.usage == plain_usage.usage


def test_most_events_of_a_stream_are_recognised_as_tokens() -> None:
    events, usage = EventScanner(), UsageScanner()
    token = b'data: {"choices":[{"delta":{"content":" a"}}],"usage":null}\n\n'
    known = []
    for piece in (token, token, b'data: {"usage":{"prompt_tokens":7}}\n\n', token, token):
        known.append(events.is_token(piece, 0, len(piece), usage))
        if not known[-1]:
            events.feed(piece, 0, len(piece))
            usage.feed(piece, 0, len(piece))
    assert known == [False, True, False, False, False], "what follows `usage` may continue it"
