# SPDX-License-Identifier: Apache-2.0
"""The settings' own names of models: what they stand for, for whom, and how a body comes to say so."""

from __future__ import annotations

import fnmatch
import json
from collections import Counter

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbproxy.config.parse import parse
from lbproxy.config.sections.models import NO_SETTINGS, ModelSettings
from lbproxy.core.requests import outline as outline_module
from lbproxy.core.requests.models import MAX_KNOWN, Allowed, ModelRules
from lbproxy.core.requests.openai import ModelCard, find_names, read_model_list
from lbproxy.core.requests.outcome import LbError
from lbproxy.core.requests.outline import MAX_MODEL_FIELD_BYTES, MAX_MODEL_KEYS, Outline, outline


def renamed(body: bytes, model: str, found: Outline | None = None) -> bytes:
    return b"".join(find_names(body, found).named(body, model))


def outlined(body: bytes, slice_bytes: int) -> Outline:
    """Looked at in slices so short that keys and values are cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outline_module, "SLICE_BYTES", slice_bytes)
        return outline(body)


def aliases(text: str) -> ModelRules:
    return ModelRules(parse(f"endpoints: ['http://a']\nmodels: {{{text}}}", environ={}).models)


# --- Which model ------------------------------------------------------------------------------------------------------

CANARY = aliases("chat: {split: {old: 90, new: 10}}, three: {split: {a: 1, b: 2, c: 5, never: 0}}, fast: {to: old}")


def test_an_alias_is_one_model_whoever_asks() -> None:
    assert {CANARY.target("fast", f"key-{n}", ()) for n in range(100)} == {"old"}
    assert "fast" in CANARY
    assert "old" not in CANARY


def test_the_longest_pattern_goes_first_of_equal_ones_the_first() -> None:
    """As written in a file: an order that is easy to foresee. What is special to regular expressions is not here."""
    some = aliases("'*': all, 'a*': a1, '*a': a2, 'a.*': dots, 'a.b': exact, 'a*b*c': three")
    chosen = {name: some.pattern_for(name) for name in ("a", "xa", "a.", "axbyc", "abc", "q", "", "a.*")}
    assert chosen == {
        "a": "a*",
        "xa": "*a",
        "a.": "a.*",
        "axbyc": "a*b*c",
        "abc": "a*b*c",
        "q": "*",
        "": "*",
        "a.*": "a.*",
    }
    assert some.has_patterns
    assert not CANARY.has_patterns
    assert some.target("a*", "key", ()) == "a1"
    assert [one.id for one in some.listed([ModelCard("all", b"{}"), ModelCard("exact", b"{}")])] == [
        "all",
        "exact",
        "a.b",
    ]


@given(st.text("ab", max_size=8), st.text("ab*", min_size=1, max_size=6).filter(lambda text: "*" in text))
def test_a_pattern_fits_what_a_shell_says(name: str, pattern: str) -> None:
    assert (aliases(f"'{pattern}': m").pattern_for(name) == pattern) == fnmatch.fnmatchcase(name, pattern)


def test_no_pattern_takes_long() -> None:
    """As a regular expression this one takes longer than the test may."""
    assert aliases(f"'{'a*' * 100}b': m").pattern_for("a" * 256) is None


def test_one_key_always_gives_the_same_model() -> None:
    """In every process and release: a session must not change its model when lbproxy restarts."""
    drawn = [CANARY.target("chat", f"session-{n}", ()) for n in range(40)]
    assert drawn == [CANARY.target("chat", f"session-{n}", ()) for n in range(40)]
    assert "".join(model[0] for model in drawn) == "ooooooooonnoooooooooonnooooooooooooooooo"


@pytest.mark.parametrize("keys", ["session-{}", "7a2d38c1e19b-{:x}", "{}"])
def test_shares_are_the_weights(keys: str) -> None:
    """Chi-square over 20,000 keys, also those that differ in a digit only, below its 99.99th percentile."""
    count = 20_000
    for name, weights, limit in (
        ("chat", {"old": 90, "new": 10}, 15.14),
        ("three", {"a": 1, "b": 2, "c": 5}, 18.42),
    ):
        drawn = Counter(CANARY.target(name, keys.format(n), ()) for n in range(count))
        expected = {model: count * weight / sum(weights.values()) for model, weight in weights.items()}
        assert drawn.keys() == expected.keys(), "a weight of 0 is nobody's"
        assert sum((drawn[model] - wanted) ** 2 / wanted for model, wanted in expected.items()) < limit


def test_a_weight_that_grows_moves_only_whom_it_must() -> None:
    more = aliases("chat: {split: {old: 80, new: 20}}")
    moved = {(CANARY.target("chat", f"{n}", ()), more.target("chat", f"{n}", ())) for n in range(5000)}
    assert moved == {("old", "old"), ("new", "new"), ("old", "new")}


def test_who_is_not_served_leaves_its_share_to_the_others() -> None:
    """A canary whose server is gone must cost nothing; if nobody is there, the weights hold."""
    assert {CANARY.target("chat", f"{n}", {"old", "x"}) for n in range(300)} == {"old"}
    assert {CANARY.target("three", f"{n}", {"b", "c"}) for n in range(300)} == {"b", "c"}
    assert {CANARY.target("chat", f"{n}", {"x"}) for n in range(300)} == {"old", "new"}


def card(name: str, **fields: object) -> ModelCard:
    fields = {"id": name, "max_model_len": 100, "root": "/weights"} | fields
    found = read_model_list(orjson.dumps({"data": [fields]}))
    assert found is not None
    return found[0]


def test_aliases_are_listed_where_what_they_stand_for_is() -> None:
    listed = {one.id: orjson.loads(one.raw) for one in CANARY.listed([card("old"), card("new", max_model_len=50)])}
    assert list(listed) == ["old", "new", "chat", "fast"]
    own = {"object": "model", "created": 0, "owned_by": "lbproxy"}
    assert listed["chat"] == {"id": "chat", **own, "max_model_len": 50}
    assert listed["fast"] == {"id": "fast", **own, "root": "old", "max_model_len": 100}
    assert listed["old"]["root"] == "/weights"
    assert CANARY.listed([]) == []


def test_an_alias_stands_before_a_model_of_its_name() -> None:
    shadow = aliases("old: {split: {old: 1, new: 1}}")
    (one,) = shadow.listed([card("old", max_model_len=None)])
    assert orjson.loads(one.raw)["owned_by"] == "lbproxy"
    assert {shadow.target("old", f"{n}", ()) for n in range(100)} == {"old", "new"}


# --- Other settings ---------------------------------------------------------------------------------------------------


class Example(ModelSettings):
    one: int | None = None
    two: int | None = None


def models(settings: dict[str, dict[str, object]]) -> ModelRules:
    return ModelRules({name: Example.model_validate(one) for name, one in settings.items()})


def said(some: ModelRules, written: str | None, model: str | None) -> dict[str, object]:
    """What `some` says of that request, without what it does not say."""
    found = some.settings_of(written, model)
    return {key: value for key in ("one", "two") if (value := getattr(found, key, None)) is not None}


def test_key_by_key_an_alias_goes_before_its_target() -> None:
    some = models({"fast": {"to": "big", "one": 1}, "big": {"one": 2, "two": 3}, "off": {"to": "big", "two": None}})
    assert said(some, None, "big") == {"one": 2, "two": 3}
    assert said(some, "fast", "big") == {"one": 1, "two": 3}
    assert said(some, "off", "big") == {"one": 2}, "null is said, too"
    assert said(some, None, "other") == said(some, None, None) == said(some, "fast", None) == {}
    assert some.settings_of("fast", "big").to is None


def test_key_by_key_a_name_goes_before_patterns_and_the_longest_of_these_first() -> None:
    some = models({"*": {"one": 1, "two": 1}, "q*": {"one": 2}, "*q": {"one": 3}, "q1": {"two": 4}})
    assert said(some, None, "x") == {"one": 1, "two": 1}
    assert said(some, None, "qq") == {"one": 2, "two": 1}
    assert said(some, None, "q1") == {"one": 2, "two": 4}


def test_a_name_or_pattern_with_other_settings_alone_is_no_alias() -> None:
    some = models({"gpt-*": {"one": 1}, "*": {"to": "big", "two": 2}, "big": {"one": 5}})
    assert "gpt-*" not in some
    assert "big" not in some
    assert some.has_patterns
    assert some.pattern_for("big") is None, "an exact name goes before a pattern"
    assert some.pattern_for("gpt-9") == "*", "what a pattern does not say leaves it to others"
    assert said(some, "gpt-9", "big") == {"one": 1, "two": 2}
    assert said(some, None, "gpt-oss") == {"one": 1}, (
        "a pattern that is an alias says nothing of models that are served"
    )
    assert said(some, None, "big") == {"one": 5}
    assert not models({"*": {"one": 1}}).has_patterns
    assert [one.id for one in some.listed([ModelCard("big", b"{}")])] == ["big"]


def test_of_two_patterns_that_are_aliases_only_the_one_that_counts_has_a_say() -> None:
    some = models({"a*": {"to": "x", "one": 1}, "*": {"to": "y", "one": 2, "two": 2}})
    assert said(some, "abc", "x") == {"one": 1}
    assert said(some, "b", "y") == {"one": 2, "two": 2}


def test_what_is_remembered_of_names_that_clients_write_is_bounded() -> None:
    some = models({"*": {"to": "x", "one": 1}})
    for n in range(3 * MAX_KNOWN):
        assert said(some, f"{n}", "x") == {"one": 1}
    assert 0 < len(some._known) <= MAX_KNOWN


def test_without_other_settings_nothing_is_looked_up() -> None:
    assert CANARY.settings_of("fast", "old") is NO_SETTINGS


# --- The body ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"model":"a","x":1}', '{"model":"B","x":1}'),
        (' {\n "x" : [1,{"model":"a"}], "model"\t:  "a" }\n', ' {\n "x" : [1,{"model":"a"}], "model"\t:  "B" }\n'),
        ('{"model":"a","model":"c"}', '{"model":"B","model":"B"}'),
        ('{"model":5,"model":"c"}', '{"model":5,"model":"B"}'),
        ('{"mod\\u0065l":"a"}', '{"mod\\u0065l":"B"}'),
        ('{"\\u006D\\u006F\\u0064\\u0065\\u006C":"a"}', '{"\\u006D\\u006F\\u0064\\u0065\\u006C":"B"}'),
        ('{"model":"a\\"\\\\"}', '{"model":"B"}'),
        ('{"x\\"model":"a","model":"a"}', '{"x\\"model":"a","model":"B"}'),
        ('{"x":"\\"model\\":\\"a\\"","model":"a"}', '{"x":"\\"model\\":\\"a\\"","model":"B"}'),
        ('{"x":"}}{{[[","y":{"model":"a"},"model":"a"}', '{"x":"}}{{[[","y":{"model":"a"},"model":"B"}'),
        (
            '{"t":[{"p":{"model":{"type":"string"}}}],"model":"a"}',
            '{"t":[{"p":{"model":{"type":"string"}}}],"model":"B"}',
        ),
        ('{"x":"\\\\","model":"a"}', '{"x":"\\\\","model":"B"}'),
        ('{"x":"model","model":"a"}', '{"x":"model","model":"B"}'),
        ('{"x":"\u00fc\u4e2d","model":"\u00fc"}', '{"x":"\u00fc\u4e2d","model":"B"}'),
        ('{"x":NaN,"model":"a"}', '{"x":NaN,"model":"B"}'),
        ('{"Model":"x","model":"a","MOD\\u0045l":"y"}', '{"Model":"B","model":"B","MOD\\u0045l":"B"}'),
    ],
)
def test_only_the_model_is_another(body: str, expected: str) -> None:
    assert renamed(body.encode(), "B") == expected.encode()
    for slice_bytes in range(4, 40):
        assert renamed(body.encode(), "B", outlined(body.encode(), slice_bytes)) == expected.encode()


def test_the_new_name_is_written_as_json() -> None:
    assert renamed(b'{"model":"a"}', 'q"\\\u00fc') == '{"model":"q\\"\\\\\u00fc"}'.encode()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["model", '"model":', "\\", "{"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["model", "x", "\\model", 'a"model', "mod"]) | st.text(max_size=4), inner, max_size=4
        )
    ),
    max_leaves=20,
)


@given(
    st.dictionaries(st.text(max_size=5) | st.sampled_from(['x"model', "nodel"]), VALUES, max_size=5),
    st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=12),
    st.integers(0, 5),
    st.booleans(),
    st.sampled_from([None, 1]),
)
def test_any_body_reads_as_before_but_for_the_model(
    fields: dict[str, object], name: str, at: int, ascii_only: bool, indent: int | None
) -> None:
    """By the judgement of the standard library's parser, which servers use."""
    items = [(key, value) for key, value in fields.items() if key != "model"]
    items.insert(at, ("model", name))
    body = json.dumps(dict(items), ensure_ascii=ascii_only, indent=indent).encode("utf-8", "replace")
    before = json.loads(body)
    after = json.loads(renamed(body, "B"))
    assert renamed(body, "B", outlined(body, 16)) == renamed(body, "B")
    assert after == before | {"model": "B"}
    assert list(after) == list(before)


IMAGE = '"' + "A" * (9 << 20) + '"'


@pytest.mark.parametrize(
    "body",
    [
        '{"model":"a","x":IMAGE}',
        '{"x":IMAGE,"model":"a"}',
        '{"x":IMAGE,"model":"a","y":IMAGE}',
        '{"x":IMAGE,"y":{"model":"c"},"model":"a"}',
        '{"x":IMAGE,"\\u006dodel":"a"}',
        '{"x":"\\"model\\":\\"c\\"BIG","model":"a"}',
        '{"y":"model","x":IMAGE,"model":"a"}',
    ],
)
def test_a_large_body_is_renamed_by_its_outline_alike(body: str) -> None:
    """To look through images for other keys of that name would hold the loop."""
    raw = body.replace("IMAGE", IMAGE).replace("BIG", IMAGE.strip('"')).encode()
    found = outline(raw)
    assert len(found.text()) < len(raw) / 1.5
    assert renamed(raw, "B", found) == renamed(raw, "B")
    assert json.loads(renamed(raw, "B", found)) == json.loads(raw) | {"model": "B"}


@pytest.mark.parametrize(
    "body", ['{"model":"LONG","model":"a"}', '{"model"BLANKS:"c","model":"a"}', '{"model":BLANKS"a"}']
)
def test_a_large_body_is_refused_if_one_of_its_models_cannot_be_replaced(body: str) -> None:
    """Else a server that takes another of them than we do would see a name that is not the alias's target."""
    raw = body.replace("LONG", "a" * MAX_MODEL_FIELD_BYTES).replace("BLANKS", " " * MAX_MODEL_FIELD_BYTES).encode()
    with pytest.raises(LbError):
        find_names(raw, outline(raw))


def test_what_only_looks_like_a_long_model_is_none() -> None:
    blanks = " " * MAX_MODEL_FIELD_BYTES
    raw = f'{{"x":"model","model" :{blanks[:-100]}"a","y":{{"model":"{blanks}"}}}}'.encode()
    assert json.loads(renamed(raw, "B", outline(raw))) == json.loads(raw) | {"model": "B"}


def test_many_keys_are_refused_before_they_take_long() -> None:
    nested = b'{"x":[' + b",".join([b'{"model":"a"}'] * MAX_MODEL_KEYS) + b'],"model":"a"}'
    with pytest.raises(LbError):
        renamed(nested, "B")
    renamed(nested.replace(b'{"model":"a"}', b"1", 1), "B")


# --- Models of a client's own -----------------------------------------------------------------------------------------


@given(st.lists(st.text("ab*.", min_size=1, max_size=5), max_size=5), st.text("ab.", min_size=1, max_size=6))
def test_a_client_may_name_what_one_of_its_names_or_patterns_fits(names: list[str], asked: str) -> None:
    fits = any(fnmatch.fnmatchcase(asked, name) for name in names)
    assert (asked in Allowed(names)) is fits


def test_a_pattern_does_not_allow_its_own_text_and_case_counts() -> None:
    allowed = Allowed(["a*b", "plain"])
    assert [name in allowed for name in ("a*b", "A*b", "plain", "Plain", "plain ", "")] == [
        True,
        False,
        True,
        *[False] * 3,
    ]
    assert [name in Allowed(["*"]) for name in ("", "x*")] == [True, True]
    assert "a" not in Allowed([])
