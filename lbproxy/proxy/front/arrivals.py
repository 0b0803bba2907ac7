# SPDX-License-Identifier: Apache-2.0
"""Bodies that arrive in parts and are held until they are complete: which of them are too slow, and which make room for
others.

*Too slow*: bytes earn time, at the least rate, and at most `STOCK_S` of it can be saved. So what keeps to the rate may
take as long as it likes, and what stops is given up within `STOCK_S`, however much came before: by an average since
the start, 60 MiB in a second would earn an hour of silence. *Room*: when the memory for all of them is used up, the
one that weighs most is given up, if it weighs more than twice of what the newcomer will hold. The weight is its size,
divided by the share of it that is recent: a body that arrives at once weighs what it holds, one that stands still more
and more. So a few large or slow ones never keep out many small ones, and equals do not replace each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import exp, inf
from typing import Final, Protocol

from lbproxy.core.requests.outcome import LbError, Outcome

GRACE_S: Final = 10.0
"""How long a first byte may take, and the rate may be missed at the start."""
STOCK_S: Final = 20.0
"""How long something that was fast may stand still: a phone in a lift."""
RECENT_S: Final = 10.0
"""Bytes are recent for about this long (an exponential decay)."""
OUTWEIGHS: Final = 2.0
"""How many times heavier than the newcomer must be what makes room for it."""


class Holder(Protocol):
    """What holds bytes."""

    held_bytes: int


class BodyArrival:
    """One body."""

    def __init__(self, rate: float, ends_at: float, give_up: Callable[[LbError], None], now: float) -> None:
        self._rate = rate
        self._ends_at = ends_at
        self.give_up = give_up
        """Ends it, with the error for its sender."""
        self.due_at = min(now + GRACE_S, ends_at)
        """When it is given up, unless more arrives."""
        self._size = 0
        self._recent = 0.0
        self._at = now

    def moved(self, size: int, now: float) -> None:
        """`size` more bytes arrived."""
        self.due_at = min(self.due_at + size / self._rate, now + STOCK_S, self._ends_at)
        self._size += size
        self._recent = self._recent_bytes(now) + size
        self._at = now

    def weight(self, now: float) -> float:
        """Of what it holds: bytes, more of them the longer it stands still."""
        return self._size * (self._size / max(1.0, self._recent_bytes(now)))

    def _recent_bytes(self, now: float) -> float:
        return self._recent * exp((self._at - now) / RECENT_S)


class Arrivals:
    """All that arrives now."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of: dict[Holder, BodyArrival] = {}
        self.on_begin: Callable[[], None] = lambda: None
        """Has `end_overdue` called about once a second, as long as there are any."""

    def __len__(self) -> int:
        return len(self._of)

    def begin(self, holder: Holder, rate: float, give_up: Callable[[LbError], None], *, within_s: float = inf) -> None:
        """Something begins to arrive, in place of what the holder had before. `rate`: the least, in bytes a second."""
        now = self._clock()
        self._of[holder] = BodyArrival(rate, now + within_s, give_up, now)
        self.on_begin()

    def moved(self, holder: Holder, size: int) -> None:
        """`size` more bytes of it arrived; nothing if it has ended."""
        if (arrival := self._of.get(holder)) is not None:
            arrival.moved(size, self._clock())

    def end(self, holder: Holder) -> None:
        """It is complete, or given up. A repeated call has no effect."""
        self._of.pop(holder, None)

    def end_overdue(self) -> None:
        now = self._clock()
        for holder, arrival in list(self._of.items()):
            if now >= arrival.due_at and self._of.pop(holder, None) is not None:
                arrival.give_up(LbError(Outcome.BODY_TIMEOUT))

    def make_room(self, holder: Holder, claim: int) -> Holder | None:
        """Give up what is in the way of `holder`, which will hold `claim` bytes. Returns what was given up, whose bytes
        are released by the caller; None: nothing weighs more than twice as much.
        """
        now = self._clock()
        others = [(one.weight(now), other) for other, one in self._of.items() if other is not holder]
        weight, heaviest = max(others, key=lambda one: one[0], default=(0.0, holder))
        if weight <= OUTWEIGHS * claim:
            return None
        self._of.pop(heaviest).give_up(LbError(Outcome.OVERLOADED))
        return heaviest
