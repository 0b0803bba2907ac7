# SPDX-License-Identifier: Apache-2.0
"""The tables about load generators (docs/testing.md) and about other routers' tests are what the runs found."""

from __future__ import annotations

from importlib import import_module

import pytest

from tests.conformance.peers import restated
from tests.loadgens import report
from tests.support.docs import DOCS, ROOT, expect_generated

PAGE = DOCS / "testing.md"
PEERS = ROOT / "tests" / "conformance" / "peers" / "README.md"
MODULES = ("failures", "requests", "streams")


@pytest.fixture(scope="module", autouse=True)
def cases() -> None:
    for name in MODULES:
        import_module(f"tests.conformance.peers.test_peers_{name}")


def test_load_generators_and_lbproxy_report_the_same() -> None:
    """In the run that was kept, which `make test-loadgens` replaces."""
    reports = report.read()
    assert [difference for one in reports for difference in report.differences(one.figures)] == []
    expect_generated(PAGE, "load generators", report.comparison(reports))


def test_what_differs_is_told() -> None:
    """A count by one, a time by more than a percent."""
    assert report.differences({"requests": (40, 40), "TTFT, s": (1.009, 1.0), "E2E, s": (0.991, 1.0)}) == []
    wrong = {"requests": (40, 41), "errors": (1, 0), "TTFT, s": (1.011, 1.0), "E2E, s": (0.989, 1.0)}
    assert [text.partition(":")[0] for text in report.differences(wrong)] == list(wrong)


def test_cases_of_other_routers_are_in_tables() -> None:
    expect_generated(PEERS, "cases of other routers", restated.restated())
    expect_generated(PEERS, "cases that differ", restated.differing())


def test_every_case_says_what_is_promised() -> None:
    for case in restated.CASES:
        assert case.promise, case
        assert case.names, case
        assert len(case.source.commit) == 40, case
