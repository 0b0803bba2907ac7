# SPDX-License-Identifier: Apache-2.0
"""Who used how many tokens, in days that ended: a file beside the state file. Everything here blocks.

A line of JSON for each day and whoever counted it. It is replaced atomically: once a day by the process that writes the
state file, and by one that handed that over, while it finishes its requests. A line that is damaged costs its day.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable, Sequence

import orjson

from lbproxy.control.saving.state_file import open_to_write
from lbproxy.core.requests.request import DayUse, Tokens
from lbproxy.core.saved.reading import SavedError, add_day, day_lines

MAX_DAYS = 400
MAX_FILE_BYTES = 256 << 20


def usage_path(state_file: str) -> str:
    """That beside a state file."""
    return f"{state_file}.usage"


def read_usage(path: str) -> list[DayUse]:
    """All of it, as it was written. Empty if there is none. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        return days_in(file.read(MAX_FILE_BYTES))
    return []


def days_in(data: bytes) -> list[DayUse]:
    """What `day_lines` wrote; without what it did not."""
    known: dict[tuple[str, str], DayUse] = {}
    for line in data.splitlines():
        with contextlib.suppress(SavedError, orjson.JSONDecodeError):
            piece = orjson.loads(line)
            add_day(known, piece if isinstance(piece, dict) else {})
    return list(known.values())


def once(uses: Iterable[DayUse]) -> list[DayUse]:
    """Each day of each that counted it once, as it was counted last: counts only grow."""
    known: dict[tuple[str, str], DayUse] = {}
    for use in sorted(uses, key=_size):
        known[use.day, use.id] = use
    return list(known.values())


def _size(use: DayUse) -> int:
    return sum(used.all for used in use.rows.values())


def append_usage(path: str, days: Sequence[DayUse]) -> None:
    """Add days, each once; the oldest beyond `MAX_DAYS` are dropped. Raises OSError."""
    with open(f"{path}.lock", "wb", opener=open_to_write) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = sorted(once([*read_usage(path), *days]), key=lambda one: one.day)
        kept = set(sorted({one.day for one in known})[-MAX_DAYS:])
        with open(f"{path}.tmp", "wb", opener=open_to_write) as file:
            for use in known:
                if use.day in kept:
                    file.write(day_lines(use))
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.tmp", path)


def first_day(days: int) -> str:
    """Of the last days, the present one (UTC) included."""
    return time.strftime("%Y-%m-%d", time.gmtime(time.time() - (days - 1) * 86_400))


def rows_of(uses: Iterable[DayUse], days: int) -> list[dict[str, object]]:
    """By day, flow and model, as the admin API and `lbproxy usage --json` have it: of the last days, the newest first;
    in each those that used most first.
    """
    first = first_day(days)
    sums: dict[tuple[str, str, str], Tokens] = {}
    for use in uses:
        if use.day >= first:
            for pair, used in use.rows.items():
                key = use.day, *pair
                sums[key] = used if key not in sums else sums[key].plus(used)
    ordered = sorted(sums.items(), key=lambda row: (row[0][0], row[1].all), reverse=True)
    return [
        {"day": day, "flow": flow, "model": model or None}
        | {name: getattr(used, name) for name in Tokens._fields[:3]}
        | {"estimated": used.estimated}
        for (day, flow, model), used in ordered
    ]
