# SPDX-License-Identifier: Apache-2.0
"""Which worker accepts how many of the connections that wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from lbproxy.workers.shares import Shares


@pytest.fixture
def shares(tmp_path: Path) -> Shares:
    return Shares(tmp_path / "shares")


def counts(shares: Shares, *each: int | None) -> list[int]:
    """Set them; what each of those that accept should accept now."""
    for index, count in enumerate(each):
        shares.set(index, count)
    return [shares.batch(index, waited=False) for index, count in enumerate(each) if count is not None]


def test_few_connections_are_shared_one_by_one(shares: Shares) -> None:
    assert counts(shares, 0, 0) == [1, 1]
    assert counts(shares, 1, 0) == [0, 2]
    assert counts(shares, 5, 5, 4) == [0, 0, 2]


def test_who_has_fewer_catches_up_in_one_turn(shares: Shares) -> None:
    """A worker that was just started accepts what it lacks, while the others leave it to that one."""
    assert counts(shares, 800, 0, 810) == [0, 901, 0]


def test_with_many_connections_a_turn_accepts_many(shares: Shares) -> None:
    """A turn of a worker with 800 streams takes milliseconds: one connection a turn would be a few hundred a second."""
    assert counts(shares, 800, 800) == [101, 101]
    assert counts(shares, 880, 800) == [21, 191]


def test_those_that_accept_nothing_are_not_waited_for(shares: Shares) -> None:
    assert counts(shares, 80, None) == [11]
    assert counts(shares, 80, None, 80) == [11, 11]


def test_what_others_left_is_accepted(shares: Shares) -> None:
    counts(shares, 5, 0)
    assert shares.batch(0, waited=True) == 1
    counts(shares, 900, 0)
    assert shares.batch(0, waited=True) == 113


def test_a_burst_ends_up_evenly_whoever_wakes_up_first(shares: Shares) -> None:
    """The same worker is always first, and the other has its turn only when that one leaves it some."""
    held, waiting = [0, 0], 1000
    while waiting:
        for index in (0, 0, 0, 1):
            shares.set(index, held[index])
            taken = min(waiting, shares.batch(index, waited=False))
            held[index] += taken
            waiting -= taken
    assert 450 <= held[0] <= 550
