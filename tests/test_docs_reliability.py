# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/reliability.md are what the tests of tests/chaos wrote, and these cover what they say."""

from __future__ import annotations

import json
import re

import pytest

from tests.chaos import report
from tests.chaos.peers import PEERS
from tests.conformance import report as conformance
from tests.fuzz.__main__ import FUZZERS, RESULTS
from tests.fuzz.strictness import RULES
from tests.support.docs import DOCS, ROOT, expect_generated, table

PAGE = DOCS / "reliability.md"
FUZZ = ROOT / "tests" / "fuzz" / "README.md"


def test_every_test_is_on_the_page() -> None:
    """And in the form that `make chaos` runs, with nothing missed."""
    expect_generated(PAGE, "reliability", report.own_results())
    sources = "".join(file.read_text() for file in (ROOT / "tests/chaos").glob("test_*.py"))
    written = set(re.findall(r'mark\.chaos\(\s*"(T\d+[a-z]?)"', sources))
    kept = report.lines("lbproxy")
    assert set(kept) == written
    assert {line["form"] for line in kept.values()} == {"fast"}
    assert {test: line["missed"] for test, line in kept.items() if line["missed"]} == {}


def test_invariants_and_peers_are_in_tables() -> None:
    expect_generated(PAGE, "invariants", report.invariants_table())
    names = [name for name in PEERS if report.lines(name)]
    expect_generated(PAGE, "peers", report.peers_table(names))


def test_the_tables_say_what_was_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    line = report.Line(
        test="T01",
        proxy="x",
        form="fast",
        what="w",
        figures={"UF": 3, "requests": 1200, "lag, ms": 1.0},
        missed=["UF is 3"],
        seconds=1.0,
    )
    assert report.figures(line) == "UF 3; requests 1,200; **missed: UF is 3**"
    assert report.verdict(line) == "3 failed of 1,200"
    assert report.verdict(None) == "-"
    assert json.loads(json.dumps(line)) == line


def test_http_case_by_case_is_in_a_table() -> None:
    scores = conformance.scores(["lbproxy", *PEERS])
    expect_generated(PAGE, "http", conformance.by_group(scores))
    assert scores[0]["name"] == "lbproxy"
    assert scores[0]["failed"] == {}


def test_fuzzers_and_what_they_may_find_are_on_the_page() -> None:
    lines = []
    for name, fuzzer in FUZZERS.items():
        kept = json.loads((RESULTS / f"{name}.json").read_text())
        against = (fuzzer.__doc__ or "").partition("\n\n")[0].replace("\n", " ").partition(": ")[2]
        lines.append(f"- **{name}**: {' '.join(against.split())}\n")
        assert (kept["runs"], kept["crashes"], kept["differ"]) == (1_000_000, 0, 0)
    expect_generated(FUZZ, "fuzz", "".join(lines))
    by_fuzzer: dict[str, tuple[list[str], list[str]]] = {}
    for rule in RULES:
        by_fuzzer.setdefault(rule.fuzzer, ([], []))[rule.laxer].append(rule.name)
    rows = [[name, "; ".join(stricter), "; ".join(laxer) or "-"] for name, (stricter, laxer) in by_fuzzer.items()]
    expect_generated(FUZZ, "strictness", table(["fuzzer", "stricter", "laxer"], rows))
