# SPDX-License-Identifier: Apache-2.0
"""How many connections each worker has, in memory that all of them share, so that each accepts its share.

All workers accept from the same sockets, and whichever wakes up first would get most of a burst. So a worker that has
more connections than another, by more than a share of them, leaves new ones to that one for a moment. The share is for
storms of connections: a turn of a busy worker's loop takes milliseconds, so it must accept many in one. Each slot is
written by its worker alone, and by the supervisor when that worker is gone; a torn or old value costs a moment's
balance, and nothing else.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Final

MAX_WORKERS: Final = 64
_SLOT: Final = struct.Struct("=q")
_ABSENT: Final = -1
"""Accepts nothing: it is not there yet, or drains, or is gone."""
_AHEAD: Final = 8
"""One in so many of a worker's connections may be more than another worker has."""


class Shares:
    """The counts of all workers, in a file that is mapped into memory."""

    def __init__(self, path: Path) -> None:
        """The file is made if it does not exist. Raises OSError."""
        size = _SLOT.size * MAX_WORKERS
        if not path.exists():
            path.write_bytes(_SLOT.pack(_ABSENT) * MAX_WORKERS)
        with path.open("r+b") as file:
            self._slots = mmap.mmap(file.fileno(), size)

    def set(self, index: int, count: int | None) -> None:
        """A worker has so many connections; None = it accepts none."""
        _SLOT.pack_into(self._slots, _SLOT.size * index, _ABSENT if count is None else count)

    def batch(self, index: int, *, waited: bool) -> int:
        """How many connections a worker should accept now; 0: others first. `waited`: they had the time to."""
        counts: list[int] = [count for (count,) in _SLOT.iter_unpack(self._slots)]
        mine = counts.pop(index)
        if waited:
            return 1 + mine // _AHEAD
        fewest = min((count for count in counts if count != _ABSENT), default=mine)
        return max(0, fewest + 1 + fewest // _AHEAD - mine)
