# SPDX-License-Identifier: Apache-2.0
"""`engines` in the settings: every spec that cannot be parsed is an error with its path, never a missing signal."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lbproxy.config.parse import json_schema, parse
from lbproxy.config.sections.engines import (
    BUILT_IN_ENGINES,
    MAX_ENGINES,
    MAX_SPECS,
    EngineSettings,
    MetricRatio,
    MetricSpec,
)
from lbproxy.core.engines.dialects import ENGINES
from tests.config.reading import MINIMAL, problems

SPEC = "a metric as name or name{label=value,...}"


def engine(text: str) -> EngineSettings:
    return parse(f"{MINIMAL}engines: {{my: {{running: r, {text}}}}}", environ={}).engines["my"]


# --- Specs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("m", ()),
        ("a:m_2{k=v}", (("k", "v"),)),
        ('m{k=v-1/x,label2="v"}', (("k", "v-1/x"), ("label2", "v"))),
        ('m{ k = "a, b}=\\"c\\\\" , l=2 }', (("k", 'a, b}="c\\'), ("l", "2"))),
        ('m{k=""}', (("k", ""),)),
    ],
)
def test_spec_is_read(text: str, labels: tuple[tuple[str, str], ...]) -> None:
    family = text.partition("{")[0]
    assert MetricSpec.parse(text) == MetricSpec(family, labels)
    assert engine(f"queued: {json.dumps(text)}").queued == (MetricSpec(family, labels),)


BAD_SPECS = [
    *("m{a=1", "ma=1}", "m{a}", "m{=1}", "m{a=}", "m{a=1}x", "{a=1}"),
    *("m{}", "m{a=1,}", "m{a=1 b=2}", "m{a=1,a=2}", 'm{a="1}', 'm{a="1""}', "m{9=1}", "m{a==1}"),
    *("9m", "m m", " m", "m\n", "m-x"),
]


@pytest.mark.parametrize("text", BAD_SPECS)
def test_bad_spec_is_refused_with_its_path(text: str) -> None:
    quoted, shown = json.dumps(text), f"expected {SPEC} with each label once, got {text!a}"
    for form, path in [
        (quoted, "queued"),
        (f"[ok, {quoted}]", "queued[1]"),
        (f"{{metric: {quoted}}}", "kv_utilization.metric"),
        (f"{{used: u, max: {quoted}}}", "kv_utilization.max"),
        (f"[a, {{used: {quoted}, max: u}}]", "kv_utilization[1].used"),
        (f"{{metric: {quoted}, label: x}}", "kv_blocks.metric"),
        (quoted, "lora"),
    ]:
        key = path.partition("[")[0].partition(".")[0]
        (problem,) = problems(f"{MINIMAL}engines: {{my: {{running: r, {key}: {form}}}}}")
        assert problem == f"engines.my.{path}: {shown}"


@settings(derandomize=True)
@given(st.text(max_size=30) | st.text('m{}a=1," \\', max_size=30))
def test_any_text_is_a_spec_or_a_value_error(text: str) -> None:
    try:
        parsed = MetricSpec.parse(text)
    except ValueError:
        return
    assert text.startswith(parsed.family)


# --- The forms of a signal --------------------------------------------------------------------------------------------


def test_forms() -> None:
    got = engine("queued: '', kv_utilization: [a, {metric: b, above_one: per_cent}, {used: c, max: 'd{e=f}'}]")
    assert got.queued == (), "disabled"
    assert got.kv_blocks is None, "not said"
    assert got.kv_utilization == (
        MetricSpec("a"),
        MetricSpec("b", above_one="per_cent"),
        MetricRatio(MetricSpec("c"), MetricSpec("d", (("e", "f"),))),
    )
    assert engine("kv_blocks: {metric: 'a{b=c}', label: d}").kv_blocks == (MetricSpec("a", (("b", "c"),), "d"),)
    assert engine("metrics_path: /m, metrics_port: 99").metrics_port == 99


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("queued: 5", f'queued: expected {SPEC}, a list of these, or "", got 5'),
        ("queued: {used: a, max: b}", f'queued: expected {SPEC}, a list of these, or "", got a mapping'),
        ("queued: {metric: a, label: b}", f'queued: expected {SPEC}, a list of these, or "", got a mapping'),
        ("queued: []", f"queued: expected 1 to {MAX_SPECS} metrics, got a list of 0"),
        (f"queued: {['a'] * (MAX_SPECS + 1)}", f"queued: expected 1 to {MAX_SPECS} metrics, got a list of 17"),
        ("queued: [[a]]", f'queued[0]: expected {SPEC}, a list of these, or "", got a list of 1'),
        ("queued: ['']", f"queued[0]: expected {SPEC} with each label once, got ''"),
        (
            "kv_utilization: {used: a}",
            f"kv_utilization: expected {SPEC}, {{metric, above_one}}, {{used, max}}, a list of these, or",
        ),
        ("kv_utilization: {used: a, max: 3}", f"kv_utilization.max: expected {SPEC}, got 3"),
        (
            "kv_utilization: {metric: a, above_one: no}",
            "kv_utilization.above_one: expected clamp, per_cent or ignore, got false",
        ),
        (
            "kv_blocks: {metric: a, lable: b}",
            f'kv_blocks: expected {SPEC}, {{metric, label}}, a list of these, or "", got a mapping',
        ),
        ("kv_blocks: {metric: a, label: 'b c'}", "kv_blocks.label: expected the name of a label, got 'b c'"),
        ("metrics_path: metrics", "metrics_path: expected an absolute path or null, got 'metrics'"),
        ("metrics_port: 0", "metrics_port: expected a whole number from 1 to 65535, got 0"),
        ("qeued: a", "qeued: unknown key, did you mean queued?"),
    ],
)
def test_bad_form(text: str, problem: str) -> None:
    (got,) = problems(f"{MINIMAL}engines: {{my: {{running: r, {text}}}}}")
    assert got.startswith(f"engines.my.{problem}")


def test_all_bad_specs_come_at_once() -> None:
    text = "engines: {my: {queued: ['m{', ok, 3], running: 'm}', kv_utilization: {used: '{', max: '}'}}}"
    assert [problem.partition(":")[0] for problem in problems(MINIMAL + text)] == [
        *("engines.my.queued[0]", "engines.my.queued[2]", "engines.my.running"),
        *("engines.my.kv_utilization.used", "engines.my.kv_utilization.max"),
    ]


# --- Names ------------------------------------------------------------------------------------------------------------


def test_endpoints_may_name_built_in_and_own_engines() -> None:
    text = "endpoints: [{url: 'http://a', engine: my}, {url: 'http://b', engine: sglang}]\nengines: {my: {queued: q}}"
    assert [one.engine for one in parse(text, environ={}).endpoints] == ["my", "sglang"]


def test_unknown_engine_is_told_beside_other_problems() -> None:
    text = "endpoints: [{url: 'http://a', engine: mine}, {url: b}]\nengines: {my: {queued: 'm{'}}"
    unknown, url, spec = problems(text)
    assert unknown == f"endpoints[0].engine: expected one of auto, {', '.join(BUILT_IN_ENGINES)}, my, got 'mine'"
    assert url.startswith("endpoints[1].url: ")
    assert spec.startswith("engines.my.queued: ")


def test_engines_are_those_that_core_knows() -> None:
    assert tuple(ENGINES) == BUILT_IN_ENGINES


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{auto: {queued: q}}", "engines.auto: expected another name (auto is taken), got 'auto'"),
        ("{my: {}}", "engines.my: expected at least one of queued, running and kv_utilization, got a mapping"),
        (
            "{my: {lora: a, queued: ''}}",
            "engines.my: expected at least one of queued, running and kv_utilization, got a",
        ),
        ("[my]", "engines: expected a mapping, got a list of 1"),
        ("{my: q}", "engines.my: expected a mapping, got 'q'"),
        (
            "{" + ", ".join(f"e{n}: {{queued: q}}" for n in range(MAX_ENGINES + 1)) + "}",
            f"engines: expected at most {MAX_ENGINES} engines, got a mapping",
        ),
    ],
)
def test_bad_engines(text: str, problem: str) -> None:
    (got,) = problems(f"{MINIMAL}engines: {text}")
    assert got.startswith(problem)


def test_a_built_in_engine_may_be_left_with_less() -> None:
    assert parse(f"{MINIMAL}engines: {{vllm: {{queued: ''}}}}", environ={}).engines["vllm"].queued == ()


def test_schema_knows_the_forms() -> None:
    definitions = json_schema()["$defs"]
    assert isinstance(definitions, dict)
    forms = definitions["EngineSettings"]["properties"]["kv_utilization"]["anyOf"]
    assert [form["type"] for form in forms] == ["string", "object", "object", "array", "null"]
