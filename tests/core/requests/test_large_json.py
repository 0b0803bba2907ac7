# SPDX-License-Identifier: Apache-2.0
"""Large bodies that are read in many turns: what is read is what a parser reads in one."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lbproxy.core.requests import outline as outline_module
from lbproxy.core.requests.outcome import LbError
from lbproxy.core.requests.outline import LargeJson, load_json, omitted_bytes, outline
from lbproxy.core.requests.prompts import completion_prompt

MIB = 1 << 20
SCALARS = st.sampled_from([0, -1.5, None, True, "", "a", 'q"', "\\", ",", "[", "]}", "\u00e9", "\U0001f600", "x" * 60])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=6) | st.dictionaries(SCALARS.map(str), inner, max_size=4)
)
BODIES = st.dictionaries(st.sampled_from(["model", "messages", "prompt", "a", ""]), st.lists(VALUES, max_size=12))


def read(body: bytes) -> LargeJson:
    large = LargeJson(body)
    while large.step():
        pass
    return large


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short slices and segments: what is cut somewhere is cut everywhere."""
    monkeypatch.setattr(outline_module, "LITTLE_COST", 0)
    monkeypatch.setattr(outline_module, "UNCOUNTED_BYTES", 0)
    monkeypatch.setattr(outline_module, "SLICE_BYTES", 24)
    monkeypatch.setattr(outline_module, "SEGMENT_COST", 0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No outline where one can be done without, and a cut after each message."""
    monkeypatch.setattr(outline_module, "UNCOUNTED_BYTES", 0)


def pieces_of(body: bytes) -> list[bytes]:
    """Those that are parsed without an outline; none if that is needed."""
    pieces, at = [], 0
    while piece := outline_module.next_piece(body, at):
        pieces.append(bytes(piece[0]))
        at = piece[1]
        if not at:
            return pieces
    return []


def by_one_parser(body: bytes) -> object:
    try:
        return load_json(body)
    except LbError:
        return LbError


def by_segments(body: bytes) -> object:
    try:
        return read(body).value
    except LbError:
        return LbError


@pytest.mark.usefixtures("small")
@settings(max_examples=100)
@given(body=BODIES, spaces=st.sampled_from([None, 1]), escaped=st.booleans())
def test_segments_say_what_the_whole_says(body: object, spaces: int | None, escaped: bool) -> None:
    text = json.dumps(body, indent=spaces, ensure_ascii=escaped).encode()
    assert read(text).value == orjson.loads(text)


KINDS = st.sampled_from(
    [{"role": "user"}, {"type": "message"}, {"type": "text"}, {"type": "function_call", "role": "}, {"}]
)
NESTED = st.lists(st.fixed_dictionaries({"role": SCALARS}), max_size=3)
MESSAGES = st.lists(
    st.builds(lambda kind, said: {**kind, "content": said}, KINDS, SCALARS | NESTED), min_size=2, max_size=5
)


@pytest.mark.usefixtures("quick")
@settings(max_examples=100)
@given(body=BODIES, said=MESSAGES, more=MESSAGES, spaces=st.sampled_from([None, 1]), escaped=st.booleans())
def test_segments_without_an_outline_say_the_same(
    body: dict[str, object], said: object, more: object, spaces: int | None, escaped: bool
) -> None:
    """Wherever such places to cut are: also within a message, in another list, in a text."""
    body = {**body, "input": more, "messages": said, "z": {"messages": more}}
    text = json.dumps(body, indent=spaces, ensure_ascii=escaped).encode()
    assert read(text).value == orjson.loads(text)
    quoted = orjson.dumps({"messages": [{"role": text.decode()}, {"role": 1}]})
    assert read(quoted).value == orjson.loads(quoted)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("blank", [b"", b" ", b"\r\n\t"])
@pytest.mark.parametrize("begin", [b'"role":"user"', b'"type":"function_call_output"', b'"type" : "reasoning"'])
def test_a_conversation_is_cut_between_its_messages(blank: bytes, begin: bytes) -> None:
    """Each is parsed in a turn of its own, and no outline is made; of another long list none is a message."""
    between = b"}" + blank + b"," + blank + b"{" + blank
    messages = between.join(begin + b',"content":"},{,%d"' % number for number in range(20))
    text = b'{"model":"m","messages":[{' + messages + b'}],"n":[{"id":1},{"id":2}]}'
    pieces = pieces_of(text)
    assert len(pieces) == 20
    assert b",".join(pieces).replace(blank, b"") == text.replace(blank, b"")
    large = read(text)
    assert (large.outline, large.value) == (None, orjson.loads(text))


@pytest.mark.usefixtures("quick")
def test_a_body_that_was_cut_in_a_wrong_place_gets_an_outline() -> None:
    nested = [{"role": "user", "content": [{"role": "a"}, {"role": "b"}]}, {"role": "user", "content": "x"}]
    text = orjson.dumps({"messages": nested})
    large = read(text)
    assert large.outline is not None
    assert large.value == orjson.loads(text)


def test_of_a_long_message_the_structure_is_counted() -> None:
    """A short one may be parsed whatever is in it, a long one might take long."""
    light, heavy = b'"content":"%b"' % (b"a" * MIB), b'"content":[%b[]]' % (b"[]," * (MIB // 3))
    for said, is_light in ((light, True), (heavy, False), (heavy[: 128 << 10] + b"[]]", True)):
        text = b'{"messages":[{"role":"user","content":"a"},{"role":"user",%b}]}' % said
        assert bool(pieces_of(text)) == is_light
        assert by_segments(text) == (orjson.loads(text) if is_light else LbError)
    assert LargeJson(b" " * (5 * MIB)).outline is not None


def test_a_message_is_looked_for_a_part_of_the_body_at_a_time() -> None:
    """However much of it might be the end of one."""
    far = b'{"messages":[{"role":"user","content":"%b"},{"role":"user"}]}' % (b"}" * (2 * MIB))
    assert [len(one) for one in pieces_of(far)] == [len(far)]
    near = b'{"messages":[{"role":"user","content":"%b"},{"role":"user","content":"%b"}]}' % (b"}" * MIB, b"a" * MIB)
    assert len(pieces_of(near.replace(b"}" * MIB, b"}" * (MIB // 8)))) == 2


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "inner", [b'{"role":1},{"role":2},NaN', b'{"role":1},{"role":"\\ud800"},5', b'{"role":1},{"role":2},']
)
@pytest.mark.parametrize("whole", [
    b'{"messages":[%b],"a":1}', b'{"messages":[1],"messages":[%b]}', b'{"messages":[%b],"messages":5,"input":[4]}',
    b'{"messages":[%b]}}', b'{"mess\\u0061ges":[ %b ] ,"a":1}', b'[{"messages":[%b]}]',
    b'\xef\xbb\xbf{"messages":[%b]}',
    b'{"a":{"b":[%b]}}', b'{"a":[[%b]]}', b'{"a":{"b":{%b}}}', b'{"a":[%b}',
])  # fmt: skip
def test_what_is_odd_is_read_as_by_one_parser(whole: bytes, inner: bytes) -> None:
    for said in (inner, b'{"role":1},{"role":2}'):
        text = whole % said
        assert repr(by_segments(text)) == repr(LbError if text.startswith(b"[") else by_one_parser(text))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "text",
    [
        b'{"a":[,1,2]}',
        b'{"a":[1,,2]}',
        b'{"a":[1,2,]}',
        b'{"a":[1,2}',
        b'{"a":[1,2]]',
        b'{"a":[1,2]}{"a":[1,2]}',
        b'{"a":[1,2],}',
    ],
)
def test_no_comma_is_forgotten_at_a_cut(text: bytes) -> None:
    assert by_segments(text) == by_one_parser(text)


def test_what_is_a_list_is_refused_before_it_is_parsed() -> None:
    large = LargeJson(b"[" + b'"a",' * 1_000_000 + b"1]")
    assert large.step(), "it takes an outline"
    with pytest.raises(LbError):
        large.step()


@pytest.mark.usefixtures("small")
def test_of_equal_keys_the_last_counts() -> None:
    text = b'{"a":[1,2,3],"b":[4,5],"a":[6,7,8],"a":[9,10,11],"b":0}'
    assert read(text).value == {"a": [9, 10, 11], "b": 0}


def test_a_million_tokens_are_parsed_in_many_turns() -> None:
    body = b'{"model":"m","prompt":[' + b"12345," * 300_000 + b"1]}"
    large = LargeJson(body)
    steps = 1
    while large.step():
        steps += 1
    assert steps > 15
    assert large.value == {"model": "m", "prompt": [12345] * 300_000 + [1]}


def test_long_texts_are_told_apart_and_counted_by_all_of_their_bytes() -> None:
    """Documents of the same length, alike at both ends: their prefixes are not the same beyond where they differ."""
    text = "all alike " * MIB
    other = text[: 7 * MIB] + "X" + text[7 * MIB + 1 :]
    prompts = [completion_prompt(read(orjson.dumps({"prompt": one})).value).text for one in (text, other, text)]  # type: ignore[arg-type]
    assert prompts[0] == prompts[2] != prompts[1]
    assert len(prompts[0]) < 5 * MIB
    for prompt in prompts:
        assert len(prompt) + omitted_bytes(prompt, 10**9) == pytest.approx(len(text), rel=0.01)
    assert prompts[0][: 2 * MIB] == prompts[1][: 2 * MIB]


@pytest.mark.parametrize("text", ["\u4e2d\u6587", "\U0001f600", "caf\u00e9 "])
@pytest.mark.parametrize("escaped", [False, True])
def test_text_of_any_language_can_be_shortened(text: str, escaped: bool) -> None:
    """Also as Python's json writes it, all in escapes."""
    body = json.dumps(
        {"model": "m", "prompt": text * (24 * MIB // len(text) // (6 if escaped else 3))}, ensure_ascii=escaped
    )
    short = outline(body.encode()).text()
    assert len(short) < 5 * MIB
    assert json.loads(short)["prompt"].startswith(text * 1000)


def test_who_writes_marks_himself_adds_no_more_than_his_body() -> None:
    mark = "\ufdd099999999:0123456789abcdef\ufdd1"
    assert omitted_bytes((mark * 50).encode(), 1000) == 1000
