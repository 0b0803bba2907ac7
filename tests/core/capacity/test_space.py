# SPDX-License-Identifier: Apache-2.0
"""Space without gauges: learned from streams that stall while first bytes are late, and from nothing else."""

from __future__ import annotations

from math import inf

import pytest

from lbproxy.core.capacity.space import DECREASE, EVERY_S, INCREASE, Space


def limited(tokens: float = 60_000.0) -> Space:
    """One that was seen twice to hold nine tenths of that."""
    space = Space()
    for at in (1.0 - EVERY_S, 1.0):
        space.lacked(tokens, 60, 6, at)
    return space


def test_stalled_streams_and_a_late_first_byte_show_how_much_the_engine_holds() -> None:
    space = Space()
    assert not space.is_full(1e9, 0.0)
    space = limited()
    assert space.limit_tokens == 54_000.0
    assert space.is_full(54_001.0, 0.0)
    assert not space.is_full(50_000.0, 8_000.0)
    assert space.is_full(50_001.0, 8_000.0), "half of the growth is kept free"


def test_one_silent_stream_shows_nothing() -> None:
    space = Space()
    space.lacked(60_000.0, 60, 1, 1.0)
    assert space.limit_tokens == inf


def test_what_one_moment_shows_counts_once() -> None:
    space = Space()
    for at in (1.0, 1.1, 1.2):
        space.lacked(60_000.0, 60, 6, at)
    assert space.limit_tokens == inf
    space = limited()
    space.lacked(55_000.0, 55, 5, 1.0 + EVERY_S)
    assert space.limit_tokens == pytest.approx(54_000.0 - DECREASE * 4000.0)


def test_what_differs_each_time_is_no_limit() -> None:
    """An engine that stands for a moment, now and then: what is silent then is any number."""
    space = Space()
    for n, stalled in enumerate((6, 20, 2, 25)):
        space.lacked(60_000.0, 60, stalled, 1.0 + n)
    assert space.limit_tokens == inf


def test_an_engine_that_stands_lacks_no_space() -> None:
    space = Space()
    for n in range(8):
        space.lacked(60_000.0, 60, 55, 1.0 + n)
    assert space.limit_tokens == inf


def test_it_grows_while_it_is_used_and_suffices() -> None:
    space = limited()
    space.sufficed(30_000.0)
    assert space.limit_tokens == 54_000.0, "nothing is learned from an engine that is not full"
    space.sufficed(50_000.0)
    assert space.limit_tokens == 54_000.0 * INCREASE
