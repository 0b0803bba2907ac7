# SPDX-License-Identifier: Apache-2.0
"""Any text gives settings, or all that is wrong with it in lines that name the place, and nothing else happens."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lbproxy.config.parse import parse
from lbproxy.config.sections.engines import BUILT_IN_ENGINES
from lbproxy.config.sections.routing import RoutingSettings
from lbproxy.config.text import MAX_DEPTH, MAX_PROBLEMS_SHOWN, MAX_TEXT_CHARS, ConfigError
from lbproxy.config.tree import Settings
from tests.config.reading import MINIMAL, problems, read

EXAMPLE = (Path(__file__).parents[2] / "config.example.yaml").read_text()
FIXTURES = Path(__file__).parents[1] / "fixtures" / "config"


# --- ${ENV} -----------------------------------------------------------------------------------------------------------


def test_environment_is_expanded_in_any_value() -> None:
    text = "listen: ${HOST:-127.0.0.1}:${PORT:-1}\nendpoints: ['${A}', '${B:-http://b}']\nretry: {attempts: '${N}'}\n"
    got = read(text + "log: {access: '${ACCESS:-no}'}", {"PORT": "81", "A": "http://a", "B": "", "N": "5"})
    assert str(got.listen) == "127.0.0.1:81"
    assert [e.url for e in got.endpoints] == ["http://a:80", "http://b:80"]
    assert (got.retry.attempts, got.log.access) == (5, False)


def test_environment_cannot_inject_yaml() -> None:
    (problem,) = problems("endpoints: ['${A}']", {"A": "http://a\nlisten: 0.0.0.0:80"})
    assert problem.startswith("endpoints[0].url: expected http://host:port")
    (problem,) = problems("endpoints: ${A}", {"A": "[http://a]"})
    assert problem == "endpoints: expected a list, got another text"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("${NO_SUCH}", "environment variable NO_SUCH is not set, got '${NO_SUCH}'"),
        ("${", "expected ${NAME} or ${NAME:-default}"),
        ("${A B}", "expected ${NAME} or ${NAME:-default}"),
        ("${A:-${B}}", "expected ${NAME} or ${NAME:-default}"),
        ("${BIG}${BIG}", "expected at most 4096 characters, got 8000"),
        ("x" * 4097, "expected at most 4096 characters, got 4097"),
        ("${BYTES}", "expected valid Unicode"),
        ("\\ud800", "expected valid Unicode"),
    ],
)
def test_bad_reference_is_told_with_its_path_and_once(value: str, problem: str) -> None:
    environ = {"BIG": "x" * 4000, "BYTES": "\udcff"}
    assert problems(f'{MINIMAL}log: {{level: "{value}"}}', environ) == (f"log.level: {problem}",)


def test_bad_reference_in_a_short_form_is_told_once() -> None:
    text = "listen: '${NO}'\nendpoints: ['${NO}']"
    unset = "environment variable NO is not set, got '${NO}'"
    assert problems(text) == (f"listen: {unset}", f"endpoints[0]: {unset}")


# --- All that is wrong, at once ---------------------------------------------------------------------------------------


def test_all_problems_come_at_once_each_with_its_path() -> None:
    text = (FIXTURES / "wrong-everywhere.yaml").read_text()
    with pytest.raises(ConfigError) as error:
        parse(text, environ={}, source="wrong-everywhere.yaml")
    url = "expected http://host:port, dns+http://name:port, srv+http://name (or https), unix:/path or file:path"
    duration = "expected a duration (250ms, 2s, 5m, 1h, or seconds)"
    *names, last = (f"'{name}'" for name in get_args(RoutingSettings.model_fields["policy"].annotation))
    policies = f"{', '.join(names)} or {last}"
    assert str(error.value).splitlines() == [
        "wrong-everywhere.yaml: 29 problems",
        "  timeouts.connect: expected once, got it on lines 21 and 22",
        "  timeouts.first_byte: environment variable FIRST_BYTE is not set, got '${FIRST_BYTE}'",
        "  listen: expected host:port, such as 127.0.0.1:8080 or [::1]:8080, or unix:/path, got ':8080'",
        "  admin.port: expected a whole number from 0 to 65535, got 99999",
        f"  endpoints[0].url: {url}, got 'gpu-1'",
        f"  endpoints[1].url: {url}, got 'ftp://gpu-2:8000'",
        f"  endpoints[2].url: {url}, got 'http://***@gpu-3:8000'",
        f"  endpoints[3].url: {url}, got 'http://gpu-4:8000/v1?***'",
        "  endpoints[4].nam: unknown key, did you mean name?",
        "  endpoints[5].name: expected 1 to 64 letters, digits or any of ._:[]-, got 'six six'",
        f"  endpoints[6].engine: expected one of auto, {', '.join(BUILT_IN_ENGINES)}, got 'vlm'",
        "  endpoints[7].metrics: expected auto, an absolute path, :port/path, an absolute URL or null, got 'metrics'",
        "  endpoints[8].health: expected text (quote it if YAML reads it as something else), got 3",
        "  endpoints[9].url: required, but not there",
        f"  routing.policy: expected {policies}, got 'best'",
        "  routing.scorers.hops: expected 'queue', 'kv-utilization', 'in-flight', 'prefix' or 'lora', got 'hops'",
        "  routing.scorers.queue: expected a weight from 0.000001 to 1000000, got 0",
        "  admission.queue_requests: expected a whole number from 0 to 1000000, got -1",
        "  admission.queue_bytes: expected a size (64KiB, 2MiB, 1GiB, or bytes) from 0 to 1024GiB, got '3GB'",
        f"  admission.queue_timeout: {duration} from 1ms to 24h, got 'forever'",
        "  retry: expected a mapping, got a list of 1",
        "  health.fall: expected a whole number from 1 to 100, got 2.5",
        "  health.rise: expected a whole number from 1 to 100, got true",
        "  scrape.stale_after: expected at least scrape.interval (else stale before the next scrape), got 2.0",
        "  limits.body: expected at least limits.json_body, got 67108864",
        f"  drain.deadline: {duration} from 1ms to 24h, got '2d'",
        "  log.level: expected 'debug', 'info', 'warning' or 'error', got 'loud'",
        "  log.access: expected true or false, got 'perhaps'",
        "  rooting: unknown key, did you mean routing?",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("policy: rr", "policy: unknown key, did you mean routing.policy?"),
        ("routing: {endpoints: []}", "routing.endpoints: unknown key, did you mean endpoints at the top level?"),
        (
            "timeout: 3s",
            "timeout: unknown key, did you mean timeouts or endpoints[].cold_start.timeout or health.timeout?",
        ),
        (
            "flows: {weight: 3}",
            (
                "flows.weight: unknown key, did you mean flows.default.weight or flows.named.NAME.weight"
                " or endpoints[].weight?"
            ),
        ),
    ],
)
def test_a_key_of_another_level_says_where_it_stands(text: str, problem: str) -> None:
    assert problems(f"{MINIMAL}{text}") == (problem,)


def test_unknown_key_without_a_near_one_lists_the_known() -> None:
    assert problems(MINIMAL + "drain: {zzz: 1}") == (
        "drain.zzz: unknown key, known here: deadline, lame_duck, restart_deadline",
    )
    assert problems("listen: {hots: a, host: a, port: 1}\n" + MINIMAL) == (
        "listen.hots: unknown key, did you mean host?",
    )


@pytest.mark.parametrize("key", ["autoscale", "plugins"])
def test_key_of_a_later_version_is_unknown(key: str) -> None:
    (problem,) = problems(f"{MINIMAL}{key}: 1")
    assert problem.startswith(f"{key}: unknown key")


def test_endless_problems_are_cut() -> None:
    text = "endpoints:\n" + "  - x\n" * 1000
    with pytest.raises(ConfigError) as error:
        read(text)
    lines = str(error.value).splitlines()
    assert (lines[0], lines[-1]) == ("settings: 1000 problems", "  ... and 900 more")
    assert len(lines) == MAX_PROBLEMS_SHOWN + 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: b: c", "line 1, column 5: mapping values are not allowed here"),
        ("a: &x 1\nb: *x", "line 1, column 4: anchors and aliases are not accepted"),
        ("a: *x", "line 1, column 4: anchors and aliases are not accepted"),
        ("a: !!python/object:os.system x", "line 1, column 4: tags are not accepted"),
        ("a: !!int 3", "line 1, column 4: tags are not accepted"),
        ("a: 1\n---\nb: 2", "line 2, column 1: but found another document"),
        ("[1]", "the text: expected a mapping, got a list of 1"),
        ("x", "the text: expected a mapping, got another text"),
        ("[" * 100, f"line 1, column {MAX_DEPTH + 1}: more than {MAX_DEPTH} levels"),
        ("a: [" + "1," * 30_000 + "]", "line 1, column 39999: more than 20000 values"),
        ("x" * (MAX_TEXT_CHARS + 1), "the text: expected at most 1 MiB, got 1048577 characters"),
        ("\0", "the text: not YAML, unacceptable character #x0000: special characters are not allowed"),
        ('a: "\\UFFFFFFFF"', "the text: not YAML, "),
        ("%YAML 1." + "1" * 5000, "the text: not YAML, "),
        ("? [a]\n: 1", "line 1: expected a plain word as the key, got a collection"),
        ('log:\n  "a\\nb": 1', "log, line 2: expected a plain word as the key"),
    ],
)
def test_text_that_is_no_settings_file(text: str, problem: str) -> None:
    got = problems(text)
    assert got[0].startswith(problem)
    assert all("\n" not in line and len(line) < 250 for line in got)


def test_billion_laughs_is_refused_at_its_first_anchor() -> None:
    bomb = "a: &a [x,x]\n" + "".join(f"{b}: &{b} [*{a},*{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    assert problems(bomb) == ("line 1, column 4: anchors and aliases are not accepted",)


def test_duplicate_key_at_any_level_is_refused() -> None:
    assert problems(MINIMAL + "log: {level: info}\nlog: {}") == ("log: expected once, got it on lines 2 and 3",)
    text = "endpoints:\n  - url: http://a\n    url: http://b\n"
    assert problems(text) == ("endpoints[0].url: expected once, got it on lines 2 and 3",)


def test_yaml_reads_words_and_numbers_as_people_do() -> None:
    """YAML 1.1 reads 010 as eight, 1:30 as ninety, and 2024-01-01 as a date."""
    assert read(MINIMAL + "retry: {attempts: 010}").retry.attempts == 10
    assert problems(MINIMAL + "retry: {attempts: 1:30}")[0].endswith("got '1:30'")
    assert read(MINIMAL + "log: {access: off}").log.access is False


# --- Any text ---------------------------------------------------------------------------------------------------------


def settings_or_problems(text: str) -> None:
    """Anything but ConfigError fails the test that calls this."""
    try:
        got = parse(text, environ={"A": "1", "B": "http://b"})
    except ConfigError as error:
        lines = error.problems
        assert lines
        assert all(line.isprintable() for line in lines)
    else:
        assert got.endpoints or got.admin is not None  # where they register
        assert math.isfinite(got.scrape.interval)


@settings(max_examples=300, derandomize=True)
@given(st.text(max_size=200) | st.text("{}[]:,-?&*!|>'\"%@#`\n \\$aA1.~", max_size=100))
def test_any_text_gives_settings_or_problems(text: str) -> None:
    settings_or_problems(text)


WORDS = st.sampled_from(re.findall(r"(?m)^ *(?:- )?([a-z_]+):", EXAMPLE))
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.dates()
    | st.sampled_from(["2s", "1MiB", "http://a:1", "${A}", "${B}", "${", "auto", "weighted", "queue", "a:1", "[::1]:2"])
)  # fmt: skip
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=5), inner, max_size=5)
)


@settings(max_examples=300, derandomize=True)
@given(st.dictionaries(st.sampled_from(list(Settings.model_fields)), TREES, max_size=6) | TREES)
def test_any_structure_gives_settings_or_problems(tree: object) -> None:
    settings_or_problems(yaml.safe_dump(tree))


@settings(max_examples=200, derandomize=True)
@given(st.data())
def test_any_mutation_of_the_example_gives_settings_or_problems(data: st.DataObject) -> None:
    text = re.sub(r"(?m)^ *#.*\n", "", EXAMPLE)
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 12)))
        text = (
            text[:start]
            + data.draw(st.text(max_size=5) | st.sampled_from(["null", "-1", "[]", "{}", "1e9"]))
            + text[end:]
        )
    settings_or_problems(text)
