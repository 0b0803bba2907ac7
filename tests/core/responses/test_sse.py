# SPDX-License-Identifier: Apache-2.0
"""The watchers see an answer's state whatever pieces it comes in."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbproxy.core.requests.request import Usage
from lbproxy.core.responses.json_walk import CARRIED_BYTES, VALUE_BYTES
from lbproxy.core.responses.sse import LINE_BYTES, BodyScanner, EventScanner, IdScanner, find_response_id
from lbproxy.core.responses.usage import read_usage

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
        (b'data: {"choices":[{"finish_reason":null}]}\n\n', False),
        (b'data: {"choices":[{"finish_reason":"stop"}]}\n\n', True),
        (b'data: {"choices":[{"finish_reason": "length"}]}\n\n', True),
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


@pytest.mark.parametrize(
    ("events", "whole"),
    [
        (['{"choices":[{"finish_reason":""}]}'], False),
        (['{"choices":[{"finish_reason":"null"}]}'], False),
        (['{"choices":[{"delta":{"content":"[DONE]"}}]}'], False),
        (['{"choices":[{"delta":{"content":"x\\ndata: [DONE]\\n\\n"}}]}'], False),
        (['{"choices":[{"logprobs":{"top_logprobs":[{"finish_reason":"stop"}]}}]}'], False),
        (['{"choices":[{"delta":{"content":"\\"finish_reason\\":\\"stop\\""}}]}'], False),
        (['{"metadata":{"finish_reason":"stop"},"choices":[{"finish_reason":null}]}'], False),
        (['{"type":"response.output_text.delta","delta":"response.completed"}'], False),
        (['{"type":"response.created","response":{"metadata":{"type":"response.completed"}}}'], False),
        (['{"type":"content_block_delta","delta":{"text":"message_stop"}}'], False),
        (['{"choices":[{"index":0,"finish_reason":"stop"}]}', '{"choices":[{"index":1,"delta":{}}]}'], False),
        (['{"choices":[{"index":1}]}', '{"choices":[{"index":0,"finish_reason":"stop"}]}'], False),
        (['{"choices":[{"index":0,"finish_reason":"stop"}]}', '{"choices":[],"usage":{"prompt_tokens":1}}'], True),
        (
            ['{"choices":[{"index":1}]}', '{"choices":[{"finish_reason":"stop"},{"index":1,"finish_reason":"stop"}]}'],
            True,
        ),
        (['{"content":"x","stop":false,"tokens_predicted":1}'], False),
        (['{"content":"","stop":true,"tokens_predicted":1}'], True),
        (['{"text":"x","meta_info":{"finish_reason":null}}'], False),
        (['{"text":"x","meta_info":{"finish_reason":{"type":"stop"}}}'], True),
        (['{"type":"response.incomplete","response":{}}'], True),
        (['{"type":"message_stop"}'], True),
        (["[DONE]"], True),
        ([" [DONE] \r"], True),
    ],
)
def test_only_the_servers_own_word_ends_a_stream(events: list[str], whole: bool) -> None:
    """A broken stream would look complete to whoever wrote the end of one into a token."""
    stream = "".join(f"data: {event}\n\n" for event in events).encode()
    for step in (1, 7, 1000):
        scanner = EventScanner(watch_finish=True)
        for at in range(0, len(stream), step):
            scanner.feed(stream, at, min(len(stream), at + step))
        assert scanner.is_complete is whole, step


@pytest.mark.parametrize(
    ("stream", "content", "opaque"),
    [
        (b": ping\n\n", False, False),
        (b":\r\n\r\nevent: a\r\nid: 1\r\nretry\r\n\r\n", False, False),
        (b": " + b"x" * 200 + b"\r\n\n", False, False),
        (b"event", False, False),
        (b": ping\n\ndata: 1\n\n", True, False),
        (b"data: 1\r\n\r\ndata: 2\r\n\r\n", True, False),
        (b"eventful: 1\n\ndata: 1\n\n", True, True),
        (b"data\n\n", True, True),
        (b'{"a":1}\n', True, True),
        (b": ping\r\r", True, True),
        (b": " + b"x" * 200 + b"\rdata: 1\r\r", True, True),
        (b"data: 1\r\rdata: 2\r\r", True, True),
        (b"\xef\xbb\xbfdata: 1\n\n", True, True),
        (b"\x1f\x8b\x08\x00", True, True),
    ],
)
def test_what_has_begun_and_can_be_read_is_known_however_it_is_cut(stream: bytes, content: bool, opaque: bool) -> None:
    for step in (1, 2, 3, 70, 1000):
        scanner = EventScanner(measures=True)
        for at in range(0, len(stream), step):
            scanner.feed(stream, at, min(len(stream), at + step))
        assert (scanner.has_content, scanner.is_opaque) == (content, opaque), step


@pytest.mark.parametrize(
    ("stream", "whole"),
    [(b'data: {"x":1}\n\n', True), (b'data: {"type":"a.delta"}\n\n', False), (b'data: {"x":1}\n', False), (b"", False)],
)
def test_on_unknown_paths_an_end_of_unknown_events_is_believed(stream: bytes, whole: bool) -> None:
    scanner = EventScanner(watch_finish=True, trusts=True)
    scanner.feed(stream, 0, len(stream))
    assert scanner.is_complete is whole


def test_an_image_that_is_too_long_to_be_parsed_may_be_the_last() -> None:
    for kind, whole in (("image_generation.completed", True), ("image_generation.partial_image", False)):
        scanner = EventScanner(watch_finish=True, trusts=True)
        stream = f'data: {{"type":"{kind}","b64_json":"{"A" * 2 * LINE_BYTES}"}}\n\n'.encode()
        scanner.feed(stream, 0, len(stream))
        assert scanner.is_complete is whole


def test_the_last_event_may_be_larger_than_what_is_parsed() -> None:
    big = b'{"response":{"instructions":"' + b"x" * 2 * LINE_BYTES + b'"}}'
    for name in (b"response.completed", b"response.created"):
        scanner = EventScanner(watch_finish=True)
        stream = b"event: " + name + b"\ndata: " + big + b"\n\n"
        for at in range(0, len(stream), 50_000):
            scanner.feed(stream, at, min(len(stream), at + 50_000))
        assert scanner.is_complete is (name == b"response.completed")
        assert len(scanner._carried) <= LINE_BYTES + 1


def test_json_is_whole_once_everything_is_closed_however_large() -> None:
    body = json.dumps({"a": ['\\"}]', {"b": "x" * 3_000_000}, "[{", ""], "c": {}}).encode()
    for step in (1009, 65_536):
        scanner = BodyScanner()
        for at in range(0, len(body), step):
            assert not scanner.is_complete
            scanner.feed(b"xx" + body[at : at + step], 2, 2 + len(body[at : at + step]))
        assert scanner.is_complete
    for text in (b"", b" ", b"{", b'{"a":', b'"a', b"[1,", b"{}}", b"tru"):
        scanner = BodyScanner()
        scanner.feed(text, 0, len(text))
        assert not scanner.is_complete, text


def scanned(payload: bytes, step: int) -> tuple[Usage | None, Usage | None]:
    """As a stream, and as a whole body."""
    stream, whole = EventScanner(), BodyScanner()
    for at in range(0, len(payload), step):
        piece = b"5\r\n" + payload[at : at + step] + b"\r\n"
        stream.feed(piece, 3, len(piece) - 2)
        whole.feed(piece, 3, len(piece) - 2)
    return stream.usage, whole.usage


VLLM = b'{"prompt_tokens":14,"total_tokens":22,"completion_tokens":8,"prompt_tokens_details":{"cached_tokens":5}}'
USAGES = [
    (b'{"choices":[],"usage":' + VLLM + b"}", Usage(14, 5, 8)),
    (b'{"choices":[],"usage" : ' + VLLM + b' , "user":"usage"}', Usage(14, 5, 8)),
    (b'{"choices":[],"usage":' + VLLM + b',"metadata":{"usage":{"prompt_tokens":1}}}', Usage(14, 5, 8)),
    (b'{"metadata":{"usage":{"prompt_tokens":1}},"usage":' + VLLM + b"}", Usage(14, 5, 8)),
    (b'{"metadata":{"usage":{"prompt_tokens":1}},"usage":' + VLLM + b',"x":{}}', Usage(14, 5, 8)),
    (b'{"metadata":{"usage":{"prompt_tokens":1}}}', None),
    (b'{"a\\"usage":{"prompt_tokens":1}}', None),
    (b'{"choices":[{"text":"\\"usage\\": {\\"prompt_tokens\\": 7}"}],"usage":null}', None),
    (b'{"usage":{"prompt_tokens":-1,"completion_tokens":null}}', None),
    (b'{"usage":{"prompt_tokens":99999999999999}}', None),
    (b'{"usage":{"prompt_tokens":3.0,"completion_tokens":"4"}}', Usage(3, None, None)),
    (b'{"usage":{"prompt_tokens":true,"completion_tokens":[4]}}', None),
    (b'{"usage":{"prompt_tokens":1,"completion_tokens":2,"cached_tokens":1}}', Usage(1, 1, 2)),
    (b'{"usage":{"type":"tokens","input_tokens":3,"output_tokens":4}}', Usage(3, None, 4)),
    (b'{"usage":{"input_tokens":3,"input_tokens_details":{"cached_tokens":0},"output_tokens":4}}', Usage(3, 0, 4)),
    (b'{"usage":{"prompt_tokens":1,"x":"' + b"y" * 9000 + b'"},"z":1}', Usage(1)),
    (b"", None),
    (b'"usage', None),
    (b'"usage":{"prompt_tokens":1}', None),
]


@pytest.mark.parametrize(("payload", "usage"), USAGES)
@pytest.mark.parametrize("step", [1, 2, 3, 5, 6, 7, 8, 100, 10_000])
def test_usage_is_found_however_it_is_cut(payload: bytes, usage: Usage | None, step: int) -> None:
    assert read_usage(payload) == usage
    if len(payload) < 4096 or step == 10_000:
        assert scanned(payload, step)[1] == (None if len(payload) > 4096 else usage)
    assert scanned(b"data: " + payload + b"\n\ndata: [DONE]\n\n", step)[0] == (
        None if len(payload) > 4096 and step < 10_000 else usage
    )


def done(kind: str, before: str = "", after: str = "", usage: str = "null") -> bytes:
    text = f'"id":"resp_1",{before}"usage":{usage}{after}'
    return f'event: {kind}\ndata: {{"response":{{{text}}},"sequence_number":1,"type":"{kind}"}}\n\n'.encode()


SAID = '{"input_tokens":14,"input_tokens_details":{"cached_tokens":5},"output_tokens":8}'
NESTED = '"metadata":{"usage":{"input_tokens":0,"output_tokens":0}}'
STREAMS = [
    b'data: {"usage":null}\n\ndata: {"usage": ' + VLLM + b"}\n\ndata: [DONE]\n\n",
    b'data: {"usage": ' + VLLM + b'}\n\ndata: {"usage":null}\n\n',
    b'data: {"usage": ' + VLLM + b'}\n\ndata: {"choices":[{"logprobs":{"top_logprobs":[{"usage":-0.1}]}}]}\n\n',
    b'data: {"usage": ' + VLLM + b'}\n\ndata: {"choices":[{"delta":{"content":"usage"},"token":"usage"}]}\n\n',
    b'data: {"usage": ' + VLLM + b'}\n\ndata: {"metadata":{"usage":{"prompt_tokens":0}}}\n\n',
    b'data: {"usage":{"prompt_tokens":1}}\n\ndata: {"usage":' + VLLM + b"}",
    done("response.created", f"{NESTED},") + done("response.completed", f"{NESTED},", ',"user":"usage"', SAID),
    done("response.completed", "", f',"user":"usage",{NESTED}', SAID),
    done("response.incomplete", "", "", SAID) + done("response.in_progress"),
    b'data: {"type":"response.failed","response":{"usage":' + SAID.encode() + b',"user":"usage"}}\n\n',
]


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("step", [1, 3, 50, 10_000])
def test_usage_of_a_stream_is_that_of_its_events_and_not_what_a_client_wrote(stream: bytes, step: int) -> None:
    assert scanned(stream, step)[0] == Usage(14, 5, 8)


NATIVE = [
    (b'{"text":"a","meta_info":{"prompt_tokens":7,"completion_tokens":3,"cached_tokens":2}}', Usage(7, 2, 3)),
    (b'[{"meta_info":{"prompt_tokens":7,"completion_tokens":3}},{"meta_info":{"prompt_tokens":1}}]', Usage(8, None, 3)),
    (b'{"content":"usage","tokens_predicted":8,"tokens_evaluated":14,"timings":{"cache_n":5}}', Usage(14, 5, 8)),
    (b'{"usage":{"prompt_tokens":1}}', Usage(1)),
    (b'{"text":"meta_info"}', None),
    (b"[1,", None),
]


@pytest.mark.parametrize(("body", "usage"), NATIVE)
def test_engines_own_apis_have_usage_of_their_own(body: bytes, usage: Usage | None) -> None:
    assert read_usage(body, native=True) == usage
    scanner = BodyScanner(native=True)
    for at in range(len(body)):
        scanner.feed(body, at, at + 1)
    assert scanner.usage == usage


def test_a_body_of_an_engines_own_api_that_takes_long_to_parse_is_not_read() -> None:
    """A megabyte of empty lists takes 60 ms, in which nobody else is served."""
    dense = b"[" + 200_000 * b"[]," + b"0]"
    assert read_usage(b'{"meta_info":{"prompt_tokens":7},"x":' + dense + b"}", native=True) is None


def test_the_last_events_of_an_engines_own_streams_say_what_they_used() -> None:
    def sglang(index: int, tokens: int, reason: object = None) -> bytes:
        meta = {"prompt_tokens": 7, "completion_tokens": tokens, "cached_tokens": 0, "finish_reason": reason}
        return b"data: " + json.dumps({"text": "x" * tokens, "meta_info": meta, "index": index}).encode() + b"\n\n"

    over = sglang(0, 1) + sglang(1, 1) + sglang(0, 5, {"type": "stop"}) + sglang(1, 9)
    broken = b'data: {"content":"a","tokens_predicted":8,"tokens_evaluated":14}\n\ndata: {"content":"b","tok'
    for stream, usage in ((over, Usage(14, 0, 14)), (broken, Usage(14, None, 8))):
        for step in (1, 60, 10_000):
            scanner = EventScanner(native=True)
            for at in range(0, len(stream), step):
                scanner.feed(stream, at, min(len(stream), at + step))
            assert scanner.usage == usage


TEXTS = st.sampled_from(["usage", '"usage":', "\\", '\\"usage":{"prompt_tokens":0}', "{", "}]", "a", '"', "\n", "é"])
VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


@given(members=st.lists(st.tuples(TEXTS, VALUES), max_size=6), spaced=st.booleans(), data=st.data())
def test_usage_is_the_member_of_the_outermost_object_whatever_else_a_body_says(
    members: list[tuple[str, object]], spaced: bool, data: st.DataObject
) -> None:
    """Against a parser: nested keys, escaped quotes, text that looks like usage, in any pieces."""
    tokens = data.draw(st.integers(0, 9) | st.none())
    value = None if tokens is None else {"prompt_tokens": tokens, "x": data.draw(VALUES)}
    at = data.draw(st.integers(0, len(members)))
    others = [(name, one) for name, one in members if name != "usage"]
    said = dict([*others[:at], *([] if value is None else [("usage", value)]), *others[at:]])
    body = json.dumps(said, separators=None if spaced else (",", ":"), ensure_ascii=data.draw(st.booleans())).encode()
    expected = None if tokens is None else Usage(tokens)
    assert read_usage(body) == expected
    scanner, event = BodyScanner(), EventScanner()
    for piece in pieces(body, data.draw(st.lists(st.integers(0, len(body)), max_size=6))):
        scanner.feed(b"}" + piece, 1, 1 + len(piece))
    assert scanner.usage == expected
    assert scanner.is_complete
    stream = b"data: " + body + b"\n\n"
    for piece in pieces(stream, data.draw(st.lists(st.integers(0, len(stream)), max_size=6))):
        event.feed(piece, 0, len(piece))
    assert event.usage == expected


@given(noise=st.binary(max_size=3000), data=st.data())
def test_whatever_comes_usage_costs_little_memory(noise: bytes, data: st.DataObject) -> None:
    scanner = BodyScanner()
    for piece in pieces(noise + b'{"usage":' + noise, data.draw(st.lists(st.integers(0, len(noise)), max_size=6))):
        scanner.feed(piece, 0, len(piece))
        assert len(scanner._walk.value) <= VALUE_BYTES
        assert len(scanner._walk._carried) <= CARRIED_BYTES + 8
    _ = scanner.usage


def chat(text: str, **more: object) -> bytes:
    said = {"id": "c", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **more}
    return b"data: " + json.dumps(said, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


@pytest.mark.parametrize("step", [1, 100, 0])
def test_the_text_of_a_stream_is_measured_however_many_tokens_an_event_has(step: int) -> None:
    """A server joins tokens while its client does not read; speculative decoding does it always."""
    parts = [" a", " word", "é" * 9, " " + "many tokens at once " * 500, ".", " a", " b" * 4, "x" * 70_000, " c"]
    stream = chat("", role="assistant") + b"".join(map(chat, parts)) + b"data: [DONE]\n\n"
    whole = len("".join(parts).encode())
    scanner = EventScanner(measures=True)
    if step:
        for at in range(0, len(stream), step):
            scanner.feed(stream, at, min(len(stream), at + step))
    else:
        for event in stream.split(b"\n\n")[:-1]:
            piece = event + b"\n\n"
            if not scanner.is_token(piece, 0, len(piece)):
                scanner.feed(piece, 0, len(piece))
    assert scanner.text_bytes == pytest.approx(whole, rel=0.001)


def test_events_that_only_repeat_text_add_none() -> None:
    text = "word " * 50
    delta = json.dumps({"type": "response.output_text.delta", "delta": text})
    finished = json.dumps({"type": "response.output_text.done", "text": text})
    response = json.dumps({"type": "response.completed", "response": {"output": [{"content": [{"text": text}]}]}})
    block = json.dumps({"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}})
    call = json.dumps({"choices": [{"delta": {"tool_calls": [{"function": {"arguments": text}}]}}]})
    old = json.dumps({"choices": [{"delta": {"function_call": {"arguments": text}}}]})
    for events, size in (
        ([old], 250),
        ([delta, finished, response], 250),
        ([block], 250),
        ([call], 250),
        ([delta, delta], 500),
    ):
        scanner = EventScanner(measures=True, skip_preamble=True)
        for one in events:
            piece = f"event: x\ndata: {one}\n\n".encode()
            scanner.feed(piece, 0, len(piece))
        assert scanner.text_bytes == size


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


@pytest.mark.parametrize(
    "text",
    [
        b'{"metadata":{"id":"resp_2"},"id":"resp_1"}',
        b'{"user":"\\"id\\":\\"resp_2\\"","id":"resp_1","tools":[{"id":"resp_2"}]}',
        b'event: response.created\ndata: {"response":{"metadata":{"id":"resp_2"},"id":"resp_1","x":{"id":"y"}}}\n\n',
        b'event: response.created\ndata: {"type":"response.created","response":{"user":"id","id":"resp_1"}}\n\n',
    ],
)
def test_the_id_of_a_response_is_its_own_and_not_one_that_a_client_wrote(text: bytes) -> None:
    """With that of another's response a client would take over where requests about it go."""
    assert find_response_id(text) == "resp_1"
    assert find_response_id(text.replace(b"resp_1", b"msg_1")) is None


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
        scanner = EventScanner()
        body = stream if stream.startswith(b"data:") else b"data: " + stream
        for at in range(0, len(body), step):
            scanner.feed(body, at, min(len(body), at + step))
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
def test_a_token_that_is_recognised_leaves_the_scanner_as_if_it_had_read_it(
    pieces: list[bytes], skip: bool, around: tuple[bytes, bytes]
) -> None:
    before, after = around
    quick, plain = (EventScanner(skip_preamble=skip, measures=True) for _ in range(2))
    for piece in pieces:
        data, start, end = before + piece + after, len(before), len(before) + len(piece)
        if not quick.is_token(data, start, end):
            quick.feed(data, start, end)
        plain.feed(data, start, end)
        assert (quick.events, quick.has_content, quick.at_boundary, quick.text_bytes) == (
            plain.events,
            plain.has_content,
            plain.at_boundary,
            plain.text_bytes,
        )
    assert quick.usage == plain.usage


def test_most_events_of_a_stream_are_recognised_as_tokens() -> None:
    for measures in (False, True):
        events = EventScanner(measures=measures)
        token = b'data: {"choices":[{"delta":{"content":" a"}}],"usage":null}\n\n'
        longer = token.replace(b" a", b" longer")
        known = []
        for piece in (token, token, token, longer, b'data: {"usage":{"prompt_tokens":7}}\n\n', token, token):
            known.append(events.is_token(piece, 0, len(piece)))
            if not known[-1]:
                events.feed(piece, 0, len(piece))
        assert known == [False, not measures, True, True, False, True, True], "two must agree"
