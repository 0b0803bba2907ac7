# SPDX-License-Identifier: Apache-2.0
"""A client that did not ask for usage gets the stream that its server writes unasked, whatever pieces it comes in."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbproxy.core.responses.unasked import MAX_EVENT_BYTES, UnaskedUsage, UsageForm

USAGE = '"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}'
FIXTURES = Path(__file__).parents[2] / "fixtures" / "http"
UNSAID, NULL, ANYWAY, UNKNOWN = UsageForm.UNSAID, UsageForm.NULL, UsageForm.ANYWAY, UsageForm.UNKNOWN


def passed(stream: bytes, form: UsageForm, cuts: tuple[int, ...] = ()) -> bytes:
    edges = [0, *sorted(cuts), len(stream)]
    unasked = UnaskedUsage(form)
    return b"".join(unasked.feed(stream[a:b]) for a, b in itertools.pairwise(edges)) + unasked.end()


def learned(stream: bytes) -> UsageForm | None:
    unasked = UnaskedUsage(UNKNOWN)
    assert unasked.feed(stream) == stream
    assert unasked.end() == b""
    return unasked.learned


def stream_of(*data: str, end: str = "\n\n") -> bytes:
    return "".join(f"data: {one}{end}" for one in data).encode()


TOKEN = '{"id":"1","choices":[{"index":0,"delta":{"content":"é \\"usage\\": {"}}]}'
LAST = '{"id":"1","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'
ONLY = '{"id":"1","choices":[],' + USAGE + ',"system_fingerprint":"x"}'
NULLS = [f'{one[:-1]},"usage":null}}' for one in (TOKEN, LAST)]
PLAIN = (TOKEN, LAST, "[DONE]")
ASKED = {
    "in an event of its own": (UNSAID, PLAIN, (TOKEN, LAST, ONLY, "[DONE]")),
    "with null in the others, as OpenAI": (UNSAID, PLAIN, (*NULLS, ONLY, "[DONE]")),
    "with the last choice": (UNSAID, PLAIN, (TOKEN, f"{LAST[:-1]},{USAGE}}}", "[DONE]")),
    "with each choice": (UNSAID, PLAIN, (f"{TOKEN[:-1]},{USAGE}}}", f"{LAST[:-1]},{USAGE}}}", ONLY, "[DONE]")),
    "first of all": (UNSAID, PLAIN, (f"{{{USAGE} , {TOKEN[1:]}", LAST, ONLY, "[DONE]")),
    "with spaces": (UNSAID, PLAIN, (f'{TOKEN[:-1]} , "usage" : null}}', LAST, ONLY, "[DONE]")),
    "in the middle": (UNSAID, PLAIN, (TOKEN.replace(',"choices"', f', {USAGE},"choices"'), LAST, ONLY, "[DONE]")),
    "and deeper": (
        UNSAID,
        ('{"a":{"usage":null},"choices":[{"usage":{}}]}',),
        ('{"a":{"usage":null},"usage":null,"choices":[{"usage":{}}]}', ONLY),
    ),
    "where null is there unasked": (NULL, (*NULLS, "[DONE]"), (*NULLS, ONLY, "[DONE]")),
    "in place of null": (NULL, (*NULLS, "[DONE]"), (NULLS[0], f"{LAST[:-1]},{USAGE}}}", "[DONE]")),
    "with an error": (UNSAID, ('{"error":{"code":500}}',), ('{"error":{"code":500},"usage":null}',)),
    "by a server that ignores the wish": (UNSAID, PLAIN, PLAIN),
}


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n", "\r\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize("case", ASKED)
def test_what_was_not_asked_for_is_taken_out_and_all_else_stays(case: str, end: str) -> None:
    form, unasked, asked = ASKED[case]
    stream, expected = stream_of(*asked, end=end), stream_of(*unasked, end=end)
    for cut in range(len(stream)):
        assert passed(stream, form, (cut,)) == expected, stream[:cut]
    assert passed(stream, form, tuple(range(len(stream)))) == expected, "byte by byte"


VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(max_size=4) | st.sampled_from(["usage", '"usage":', "data:", "\r\n\r\n"]),
    lambda one: st.lists(one, max_size=2) | st.dictionaries(st.sampled_from(["usage", "a", "é"]), one, max_size=2),
    max_leaves=4,
)
MEMBERS = st.dictionaries(st.sampled_from(["id", "object", "choices", "x_groq", "z"]), VALUES, max_size=4)


@given(data=st.data(), members=st.lists(MEMBERS, max_size=4), end=st.sampled_from(["\n\n", "\r\n\r\n"]))
def test_any_event_is_as_if_it_had_never_had_a_usage(
    data: st.DataObject, members: list[dict[str, object]], end: str
) -> None:
    """Whatever is in it, and wherever the usage stands."""
    asked = unasked = b": a comment\n\n"
    for one in members:
        items = [*{**one, "choices": one.get("choices") or [0]}.items()]
        usage = data.draw(st.sampled_from([None, {"prompt_tokens": 1}, {"usage": {"usage": None}}]))
        at, ascii_only = data.draw(st.integers(0, len(items))), data.draw(st.booleans())
        more = [*items[:at], ("usage", usage), *items[at:]]
        asked += f"data: {json.dumps(dict(more), ensure_ascii=ascii_only)}{end}".encode()
        unasked += f"data: {json.dumps(dict(items), ensure_ascii=ascii_only)}{end}".encode()
    cuts = data.draw(st.lists(st.integers(0, len(asked)), max_size=6))
    assert passed(asked, UNSAID, tuple(cuts)) == unasked


def test_the_beginning_of_an_event_waits_and_a_long_one_does_not() -> None:
    unasked = UnaskedUsage(UNSAID)
    assert (unasked.feed(b"data: {"), unasked.is_whole) == (b"", True)
    assert unasked.feed(b'"choices":[0]}\n\ndata') == b'data: {"choices":[0]}\n\n'
    long = b"x" * MAX_EVENT_BYTES
    assert (unasked.feed(long), unasked.is_whole) == (b"data" + long, False)
    assert (unasked.feed(b"more"), unasked.is_whole) == (b"more", False)
    assert (unasked.feed(b"\n\n: a"), unasked.is_whole) == (b"\n\n", True)
    assert unasked.end() == b": a"


def test_a_stream_that_ends_without_an_empty_line_is_passed_to_its_end() -> None:
    assert passed(stream_of(TOKEN, ONLY) + b"data: [DONE]\n", UNSAID) == stream_of(TOKEN) + b"data: [DONE]\n"
    assert passed(stream_of(TOKEN) + f"data: {ONLY}".encode(), UNSAID) == stream_of(TOKEN)


@pytest.mark.parametrize(
    ("stream", "form"),
    [
        (stream_of(*PLAIN), UNSAID),
        (stream_of(*PLAIN, end="\r\n\r\n"), UNSAID),
        (stream_of(*NULLS, "[DONE]"), NULL),
        (stream_of(NULLS[0], f"{LAST[:-1]},{USAGE}}}", "[DONE]"), ANYWAY),
        (stream_of(TOKEN, LAST, ONLY), ANYWAY),
        (stream_of(TOKEN, f'{LAST[:-1]},"timings":{{"prompt_n":3}}}}'), ANYWAY),
        (stream_of('{"choices":[{"text":"\\"usage\\":null"}]}'), UNSAID),
        (stream_of("[DONE]"), None),
        (b"", None),
    ],
)
def test_a_stream_that_nobody_asked_shows_what_its_server_writes(stream: bytes, form: UsageForm | None) -> None:
    assert learned(stream) is form


@pytest.mark.parametrize("form", [UNKNOWN, ANYWAY])
def test_who_is_not_asked_is_relayed_as_it_is(form: UsageForm) -> None:
    stream = stream_of(*NULLS, ONLY) + b"data: half"
    for cut in range(len(stream)):
        assert passed(stream, form, (cut,)) == stream


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("vllm-0.32.0/chat-stream", UNSAID),
        ("vllm-0.32.0/completion-stream", UNSAID),
        ("vllm-0.32.0/force-include-usage-stream", ANYWAY),
        ("transformers-serve-5.19.0/chat-stream", ANYWAY),
        ("sglang-0.5.23/shutdown-sigterm-inflight-stream", NULL),
    ],
)
def test_what_real_servers_write_unasked(name: str, form: UsageForm) -> None:
    assert learned(payload(name)) is form


@pytest.mark.parametrize(
    ("name", "form", "lost"),
    [
        ("vllm-0.32.0/chat-stream-usage", UNSAID, 1),
        ("vllm-0.32.0/completion-stream-usage", UNSAID, 1),
        ("vllm-0.32.0/completion-n2-stream", UNSAID, 1),
        ("sglang-0.5.23/completion-stream-usage", NULL, 1),
        ("sglang-0.5.23/chat-stream-usage", UNSAID, 1),
    ],
)
def test_of_real_servers_that_are_asked_one_event_is_taken_out(name: str, form: UsageForm, lost: int) -> None:
    events = payload(name).split(b"\n\n")
    kept = [one for one in events if b'"choices":[]' not in one]
    assert len(events) == len(kept) + lost
    assert passed(payload(name), form) == b"\n\n".join(kept)


def payload(name: str) -> bytes:
    """The payload of a recorded response."""
    _, _, rest = (FIXTURES / f"{name}.response.http").read_bytes().partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body
