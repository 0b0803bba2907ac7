# SPDX-License-Identifier: Apache-2.0
"""The outline of a large body: the same JSON with shorter texts, and nothing that would hold the event loop."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lbproxy.core.requests import outline as outline_module
from lbproxy.core.requests.openai import read_json_body
from lbproxy.core.requests.outcome import LbError
from lbproxy.core.requests.outline import Outline, omitted_bytes, outline

MIB = 1 << 20
HEAD = 16
TEXT = st.lists(
    st.sampled_from(["plain text ", "x" * 40, '"', "\\", "\\\\", "\n", "\u00e9", "\u20ac", "\U0001f600", "\x00", "a"]),
    max_size=40,
).map("".join)
VALUES = st.recursive(
    TEXT | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of a few bytes, so that every cut there is happens."""
    monkeypatch.setattr(outline_module, "SLICE_BYTES", 48)
    monkeypatch.setattr(outline_module, "UNCUT_STRING_BYTES", 0)
    monkeypatch.setattr(outline_module, "KEPT_HEAD_BYTES", HEAD)
    monkeypatch.setattr(outline_module, "MIN_OMITTED_BYTES", 8)


def assert_outlines(short: object, whole: object) -> None:
    """The same keys and values; a text may lack its middle."""
    if isinstance(whole, str) and isinstance(short, str):
        assert short == whole or omitted_bytes(short.encode("utf-8", "surrogatepass"), 10**6)
    elif isinstance(whole, list) and isinstance(short, list):
        assert len(short) == len(whole)
        for one, other in zip(short, whole, strict=True):
            assert_outlines(one, other)
    elif isinstance(whole, dict) and isinstance(short, dict):
        assert len(short) <= len(whole)
        for one, other in zip(short.values(), list(whole.values())[: len(short)], strict=True):
            if len(short) == len(whole):
                assert_outlines(one, other)
    else:
        assert short == whole


@pytest.mark.usefixtures("small")
@settings(max_examples=300)
@given(value=VALUES, escaped=st.booleans(), plain=st.booleans())
def test_an_outline_is_the_same_json_with_shorter_texts(value: object, escaped: bool, plain: bool) -> None:
    value = {"model": "m", "x": value} if plain else {"x": value, "model": "m"}
    body = json.dumps(value, ensure_ascii=escaped).encode()
    short = json.loads(outline(body).text())
    assert_outlines(short, value)
    assert short["model"] == "m"


def test_large_texts_are_left_out_and_small_ones_stay() -> None:
    image = "A" * (8 * MIB)
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": image}}]}] * 3
    value = {"model": "m", "messages": messages, "stream": True}
    text = outline(json.dumps(value).encode()).text()
    assert len(text) < 5 * MIB
    assert omitted_bytes(text, 10**9) + len(text) == pytest.approx(len(json.dumps(value)), rel=0.02)
    assert read_json_body(json.dumps(value).encode())[:2] == ("m", True)
    assert orjson.loads(text)["messages"][0]["content"][0]["image_url"]["url"].startswith("A" * MIB)


def test_a_long_text_never_becomes_a_name() -> None:
    """Else lbproxy would see a model that the server does not."""
    filler = b'"f":"' + b"x" * (4 * MIB) + b'",'
    for unit in (b"a", b"\\u0061", "\u00e9".encode(), "\U0001f600".encode()):
        body = b"{" + filler + b'"model":"' + unit * (MIB // len(unit)) + b'"}'
        model = orjson.loads(outline(body).text())["model"]
        assert not model.isprintable()
        with pytest.raises(LbError):
            read_json_body(body)


K = 900_000
HOSTILE = {
    "keys": b'{"a":0,' + b",".join(b'"k%d":0' % n for n in range(K)) + b"}",
    "equal keys": b'{"a":' + b'0,"a":' * K + b"0}",
    "lists": b'{"a":[' + b"[]," * K + b"0]}",
    "objects": b'{"a":[' + b"{}," * K + b"0]}",
    "nested": b'{"a":[' + (b"[" * 900 + b"]" * 900 + b",") * 1000 + b"0]}",
    "texts": b'{"a":["' + b'a","' * (8 * MIB) + b'"]}',
    "numbers": b'{"a":[' + b"1," * (15 * MIB) + b"1]}",
    "short texts": b'{"a":["' + (b"x" * 500 + b'","') * 60_000 + b'"]}',
    "escapes": b'{"a":"' + b"\\\\" * (15 * MIB) + b'"}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_would_hold_the_loop_is_refused_before_it_is_parsed(name: str) -> None:
    with pytest.raises(LbError):
        outline(HOSTILE[name])


def test_what_models_can_take_is_not_refused() -> None:
    """A million tokens as text, as numbers of half a million, as a long chat, and many documents."""
    words = "def f(x: int) -> dict: return {'a': [x, 1]}  # \"why\"\n" * 80_000
    chat = [{"role": "user", "content": "what is that?"}] * 20_000
    documents = ["x" * 1900] * 10_000
    lines = "ab, c\n" * 2_500_000
    values: list[dict[str, object]] = [{"prompt": text} for text in (words, lines, "\n" * 7_500_000)]
    values += [{"prompt": list(range(500_000))}, {"messages": chat}, {"documents": documents}]
    for value in values:
        body = json.dumps({"model": "m", **value}).encode()
        assert read_json_body(body).model == "m"
        assert len(outline(body).text()) < 8 * MIB


def test_it_takes_many_short_steps() -> None:
    one = Outline(b'{"a":"' + b"x" * (4 * MIB) + b'"}')
    steps = 1
    while one.step():
        steps += 1
    assert steps >= 16


MANY = {
    "pairs": b'{"model":"m",' + b'"a":"b",' * 100_000 + b'"z":1}',
    "a list of texts": b'{"model":"m","p":[' + b'"a",' * 200_000 + b'"model"]}',
    "empty texts": b'{"model":"m","p":[' + b'"",' * 250_000 + b'""]}',
    "escaped keys": b'{"model":"m",' + b'"\\u006e":"b",' * 80_000 + b'"z":1}',
    "messages": b'{"model":"m","messages":[' + b'{"role":"user","content":"hi"},' * 30_000 + b"1]}",
}


@pytest.mark.parametrize("body", MANY.values(), ids=MANY.keys())
def test_a_step_walks_a_bounded_number_of_texts(body: bytes) -> None:
    """Steps were bounded by what parsing would cost: 1 MB of short texts held the event loop for .1 s a step."""
    whole = Outline(body)
    before, more = 0, True
    while more:
        try:
            more = whole.step()
        except LbError:
            more = False
        assert body.count(b'"', before, whole._at) <= outline_module.STEP_STRINGS + outline_module.SLICE_BYTES
        before = whole._at


@pytest.mark.parametrize(
    "unit", [b'"model":"a",', b'"model":1,', b'"model"' + b" " * 40 + b",", b'"mod\\u0065l":1,', b'"MODEL":"a",']
)
def test_a_body_that_names_a_thousand_models_is_refused_at_once(unit: bytes) -> None:
    """Each was looked at with the 8 KiB that follow it."""
    whole = Outline(b'{"x":1,' + unit * 200_000 + b'"z":1}')
    with pytest.raises(LbError):
        _walk(whole)
    assert whole._at < MIB
    assert whole._model_keys == outline_module.MAX_MODEL_KEYS + 1


def _walk(whole: Outline) -> None:
    while whole.step():
        pass


def test_values_that_are_called_model_are_no_keys() -> None:
    assert len(outline(b'{"model":"m","p":[' + b'"model",' * 20_000 + b'"a"]}').models) == 1
