"""The watchers see an answer's state whatever pieces it comes in."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbproxy.core.requests import sse
from lbproxy.core.requests.request import Usage
from lbproxy.core.requests.sse import MAX_JSON_BYTES, EventScanner, JsonWatcher, UsageScanner, read_usage

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
    assert not scanner.whole


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
        assert scanner.whole is whole, step


def test_json_is_whole_when_it_parses_or_is_too_large_to_tell() -> None:
    watcher = JsonWatcher()
    for piece, whole in ((b'xx{"a":', False), (b"1}", True), (b"}", False)):
        start = 2 if piece.startswith(b"xx") else 0
        watcher.feed(piece, start, len(piece))
        assert watcher.whole is whole
    watcher.feed(b"x" * MAX_JSON_BYTES, 0, MAX_JSON_BYTES)
    assert watcher.whole


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
