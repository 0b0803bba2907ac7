# SPDX-License-Identifier: Apache-2.0
"""Space without gauges: learned from streams that stall while first bytes are late, and from nothing else."""

from __future__ import annotations

from math import inf

import pytest

from lbproxy.core.capacity.space import DECREASE, EVERY_S, INCREASE, Space


def test_stalled_streams_and_a_late_first_byte_show_how_much_the_engine_holds() -> None:
    space = Space()
    assert not space.is_full(1e9, 0.0)
    space.lacked(60_000.0, 60, 6, 1.0)
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
    assert space.limit_tokens == 54_000.0
    space.lacked(40_000.0, 40, 4, 1.0 + EVERY_S)
    assert space.limit_tokens == pytest.approx(54_000.0 - DECREASE * 18_000.0)


def test_it_grows_while_it_is_used_and_suffices() -> None:
    space = Space()
    space.lacked(60_000.0, 60, 6, 1.0)
    space.sufficed(30_000.0)
    assert space.limit_tokens == 54_000.0, "nothing is learned from an engine that is not full"
    space.sufficed(50_000.0)
    assert space.limit_tokens == 54_000.0 * INCREASE
