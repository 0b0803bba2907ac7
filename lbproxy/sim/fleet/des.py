# SPDX-License-Identifier: Apache-2.0
"""Virtual time: a heap of things to do, each at its time.

Nothing here knows what is simulated. Events at one time happen in the order in which they were asked for, so a
simulation whose chance comes from seeds is the same in every run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class EventHeap:
    """A clock, and what happens when. Time starts at 0 s and never goes back."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], object]] = []
        self._asked = 0

    def at(self, when: float, action: Callable[[T], None], argument: T) -> None:
        """Call `action(argument)` at `when`, or now if that has passed."""
        self._asked += 1
        # The running number decides between equal times, so actions are never compared.
        heapq.heappush(self._events, (max(when, self.now), self._asked, action, argument))

    def step(self) -> bool:
        """Let the next event happen; False if there is none."""
        if not self._events:
            return False
        self.now, _, action, argument = heapq.heappop(self._events)
        action(argument)
        return True
