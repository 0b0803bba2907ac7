# SPDX-License-Identifier: Apache-2.0
"""Long-lived loops, on virtual time."""

from __future__ import annotations

import asyncio
import logging
import random
from itertools import pairwise

import pytest

from lbproxy.control.loops import RESTART_MAX_S, supervise
from tests.support.aio import VirtualLoop


def test_a_loop_that_has_run_long_starts_again_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """The back-off is for a loop that fails again and again, not for the eighth failure in a year."""
    caplog.set_level(logging.CRITICAL)
    runs: list[float] = []

    async def fails() -> None:
        runs.append(asyncio.get_running_loop().time())
        if len(runs) == 12:
            await asyncio.sleep(2 * RESTART_MAX_S)
        if len(runs) < 14:
            raise ZeroDivisionError

    loop = VirtualLoop()
    loop.run_until_complete(supervise("a loop", fails, random.Random(1)))
    loop.close()
    pauses = [later - earlier for earlier, later in pairwise(runs)]
    assert pauses[0] < 0.2
    assert 5.0 <= pauses[10] <= 15.0
    assert pauses[11] < 2 * RESTART_MAX_S + 0.2
    assert pauses[12] < 0.4
