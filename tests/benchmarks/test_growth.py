# SPDX-License-Identifier: Apache-2.0
"""What the core's benchmark says of its figures: by canned ones, worse than linear and too long are said."""

from __future__ import annotations

import pytest

from benchmarks.growth import Series, growth_rows, statement

SIZES = (1, 10, 100, 1000)


def series(power: float, unit_us: float = 1.0, *, is_one_turn: bool = True) -> Series:
    points = [(size, unit_us * size**power) for size in SIZES]
    return Series(f"power {power:g}", "things", points, is_one_turn=is_one_turn)


@pytest.mark.parametrize("power", [0, 0.5, 1, 2])
def test_the_power_is_found(power: float) -> None:
    assert series(power).power == pytest.approx(power)


def test_a_fixed_cost_does_not_hide_how_it_grows() -> None:
    assert Series("", "", [(size, 50 + size**2) for size in SIZES]).power > 1.8


def test_what_is_well_is_said_with_the_worst_of_it() -> None:
    said = statement([series(0.5), series(1)])
    assert "Nothing grows faster than linearly: the greatest power is 1.00 (power 1, by things)." in said
    assert "Nothing holds up the event loop for more than 5 ms: the longest is 1.0 ms (power 1, 1,000 things)." in said


def test_what_is_worse_than_linear_is_named() -> None:
    said = statement([series(1), series(1.3, 0.1)])
    assert "Nothing grows" not in said
    assert "- power 1.3, by things: to the power of 1.30" in said


def test_what_holds_up_the_loop_is_named() -> None:
    said = statement([series(1, 6.0)])
    assert "- power 1, 1,000 things: 6.0 ms" in said
    assert "100 things" not in said
    assert "Nothing holds up" in statement([series(1, 6.0, is_one_turn=False), series(0)]), "many turns of the loop"


def test_the_table_has_both_ends() -> None:
    assert growth_rows([series(1)])[1] == ["power 1", "things", "1", "1.0", "1,000", "1000.0", "1.00"]
