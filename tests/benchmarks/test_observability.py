# SPDX-License-Identifier: Apache-2.0
"""benchmarks.observability: what it concludes from its rounds, and where it writes that."""

from __future__ import annotations

import pytest

from benchmarks.observability import BEGIN, END, OFF, ON, PARTS, SIDES, insert, interval
from lbproxy.config.parse import parse


def test_the_interval_of_a_median_is_that_of_the_sign_test() -> None:
    """Fifteen rounds: the 4th and the 12th, which hold the median in 96.5 % of cases."""
    values = [float(n) for n in range(1, 16)]
    assert interval(values) == (4.0, 12.0)
    assert interval(values[::-1]) == (4.0, 12.0)
    assert interval([2.0, 1.0, 3.0]) == (1.0, 3.0), "too few for 95 %: all of them"
    assert interval([float(n) for n in range(1, 10)]) == (2.0, 8.0)


def test_a_section_takes_the_place_of_the_one_before() -> None:
    page = "# Results\n\nfirst\n"
    once = insert(page, "one\n")
    assert once == f"# Results\n\nfirst\n\n{BEGIN}\none\n{END}\n"
    assert insert(f"{once}last\n", "two\n") == f"# Results\n\nfirst\n\n{BEGIN}\ntwo\n{END}\nlast\n"


@pytest.mark.parametrize("name", [*SIDES, *PARTS])
def test_what_is_on_is_on(name: str) -> None:
    observed = (SIDES | PARTS)[name]
    settings = parse(f"endpoints: ['http://127.0.0.1:1']\n{observed.settings}", environ={})
    shown = settings.log.access, settings.explain.requests > 0, observed.scraped, observed.viewed
    assert (
        shown
        == {
            OFF: (False, False, False, False),
            ON: (True, True, True, True),
            "access log": (True, False, False, False),
            "decisions": (False, True, False, False),
            "/metrics": (False, False, True, False),
            "viewer": (False, False, False, True),
        }[name]
    )
