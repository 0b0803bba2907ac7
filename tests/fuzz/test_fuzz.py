# SPDX-License-Identifier: Apache-2.0
"""A short form of every fuzzer, and the list of differences that are meant. By hand: `python -m tests.fuzz all`."""

from __future__ import annotations

import pytest

from lbproxy.net.connections.h1 import parse_head
from tests.fuzz import heads
from tests.fuzz.__main__ import FUZZERS, run
from tests.fuzz.strictness import RULES

RUNS = {
    "heads": 8000,
    "chunks": 6000,
    "metrics": 6000,
    "bodies": 12_000,
    "agents": 4000,
    "forms": 6000,
    "segments": 6000,
    "events": 12_000,
    "settings": 2000,
}


@pytest.mark.parametrize("name", FUZZERS)
def test_nothing_crashes_and_nothing_differs_but_what_is_meant(name: str) -> None:
    report = run(name, RUNS[name], seed=1)
    assert report["shown"] == []
    assert report["labels"].get("read alike", report["labels"].get("taken", 0)) > RUNS[name] / 20, "too little is valid"


def test_a_parser_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Laxer, stricter, and raising what it must not."""
    real = parse_head
    monkeypatch.setattr(heads, "parse_head", lambda head, method: real(head.replace(b"\n ", b"\nX: "), method))
    assert run("heads", 2000, seed=1)["differ"]
    monkeypatch.setattr(heads, "parse_head", lambda head, method: real(head.replace(b"304", b"3x4"), method))
    assert run("heads", 2000, seed=1)["differ"]
    monkeypatch.setattr(heads, "parse_head", lambda head, method: head[100])
    assert run("heads", 200, seed=1)["crashes"]


def test_every_rule_has_a_reason_and_a_fuzzer() -> None:
    assert {rule.fuzzer for rule in RULES} <= set(FUZZERS)
    assert all(rule.why for rule in RULES)
    assert len({(rule.fuzzer, rule.name) for rule in RULES}) == len(RULES)
