# SPDX-License-Identifier: Apache-2.0
"""The sequence numbers of one publisher of KV events: what is next, what is missing, and when it started again."""

from __future__ import annotations

from enum import Enum
from math import inf
from typing import Final

SILENT_S: Final = 10.0
"""A publisher that was silent for so long may have a successor with another topic."""


class KvOrder(Enum):
    """How a message follows the one before."""

    NEXT = "next"
    FIRST = "first"
    """Nothing was received of this publisher before."""
    GAP = "gap"
    """Messages between are missing."""
    RESTART = "restart"
    """The number is not larger than the last one: the publisher started again."""
    FOREIGN = "foreign"
    """It is from another publisher at the same address, and not to be used."""


class KvSequence:
    """Follows one publisher. Topics identify it: those of one publisher do not change."""

    __slots__ = ("_heard_at", "_topic", "expected")

    def __init__(self) -> None:
        self.expected: int | None = None
        """The number of the next message; None = nothing was received yet."""
        self._topic = b""
        self._heard_at = -inf

    def judge(self, topic: bytes, number: int, now: float) -> KvOrder:
        """Classify a message. Unless it is FOREIGN, the one after it is expected from now on."""
        expected = self.expected
        if expected is not None and topic != self._topic:
            if now < self._heard_at + SILENT_S:
                return KvOrder.FOREIGN
            order = KvOrder.RESTART
        elif expected is None:
            order = KvOrder.FIRST
        elif number == expected:
            order = KvOrder.NEXT
        else:
            order = KvOrder.GAP if number > expected else KvOrder.RESTART
        self._topic, self._heard_at, self.expected = topic, now, number + 1
        return order
