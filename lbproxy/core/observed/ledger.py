# SPDX-License-Identifier: Apache-2.0
"""Who used how much: tokens by flow and model, since the start and in the present day.

`core.queue.limits` says what a request used, and writes it here once, when its attempt ends. Days are UTC; the driver,
which has the wall clock, says when one ends. Invariants: counts since the start never go down; there are at most
`MAX_PAIRS` pairs of flow and model, and one more for all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from lbproxy.core.requests.request import Counts, DayUse, Tokens

MAX_PAIRS: Final = 2000
MAX_NAME_CHARS: Final = 128
MAX_ENDED: Final = 8
"""Days that wait for a disk."""
NOTHING: Final = Tokens()
Pair: TypeAlias = tuple[str, str]
"""A flow and a model; no model is an empty text."""
REST: Pair = ("others", "other")
"""All beyond."""


class Ledger:
    """Counts tokens by flow and model."""

    def __init__(self) -> None:
        self._rows: dict[Pair, list[int]] = {}
        """Since the start, in the order of `Tokens`."""
        self._before: dict[Pair, Tokens] = {}
        """Of these, what was counted before the present day."""
        self._resumed: dict[Pair, Tokens] = {}
        """What an earlier process counted in the present day."""
        self.day = self.id = ""
        """Of the present day: see `DayUse`. Empty: the driver has not said which day it is."""
        self.ended: list[DayUse] = []
        """Days that ended, until the driver has written them down."""
        self.yesterday: DayUse | None = None
        """The day that ended last, if this process counted in it."""

    def add(self, flow: str, model: str | None, used: Counts) -> None:
        """Count what a request used."""
        row = self._rows.get((flow, model or ""))
        if row is None:
            row = self._row(flow, model or "")
        uncached, cached, completion, estimated_prompt, estimated_completion = used
        row[0] += uncached
        row[1] += cached
        row[2] += completion
        row[3] += estimated_prompt
        row[4] += estimated_completion

    def _row(self, flow: str, model: str) -> list[int]:
        """That of a pair under a name that can be shown; of `REST` if there are too many."""
        pair = _shown(flow), _shown(model)
        if pair not in self._rows and len(self._rows) - (REST in self._rows) >= MAX_PAIRS:
            pair = REST
        return self._rows.setdefault(pair, [0] * len(Tokens._fields))

    def turn(self, day: str, new_id: str) -> None:
        """Say which day it is, at least once a second. `new_id`: for a day that begins."""
        if day == self.day:
            return
        if self.day and (use := self.today()).rows:
            self.yesterday, self.ended = use, [*self.ended, use][-MAX_ENDED:]
        if self.day:
            self._before, self._resumed = dict(self.since_start()), {}
        self.day, self.id = day, new_id

    def resume(self, saved: Iterable[DayUse], *, still_count: bool = False) -> None:
        """Go on with days that an earlier process counted, before anything is counted here; after `turn`.
        `still_count`: it still counts in them.
        """
        uses = list(saved)
        if uses and uses[-1].day == self.day and not still_count:  # the present day was the last to be written
            self.id, self._resumed = uses[-1].id, dict(uses.pop().rows)
        self.ended += uses

    def today(self) -> DayUse:
        """The present day so far."""
        rows = dict(self._resumed)
        for pair, used in self.since_start().items():
            new = used.less(self._before.get(pair, NOTHING))
            if new.all:
                rows[pair] = rows.get(pair, NOTHING).plus(new)
        return DayUse(self.day, self.id, rows)

    def days(self) -> list[DayUse]:
        """What is to survive a restart: days that were not written down yet, and the present one."""
        today = self.today()
        return [*self.ended, *([today] if today.rows and self.day else [])]

    def since_start(self) -> Mapping[Pair, Tokens]:
        """By pair, oldest first."""
        return {pair: Tokens(*row) for pair, row in self._rows.items()}


def by_flow(rows: Mapping[Pair, Tokens]) -> dict[Pair, Tokens]:
    """The sums of all models, which are no model."""
    sums: dict[Pair, Tokens] = {}
    for (flow, _), used in rows.items():
        pair = flow, ""
        sums[pair] = used if pair not in sums else sums[pair].plus(used)
    return sums


def largest(rows: Mapping[Pair, Tokens], most: int) -> list[tuple[Pair, Tokens]]:
    """Those that used most, those first; all others together are the last one, `REST`."""
    found = sorted(rows.items(), key=lambda row: (-row[1].all, row[0]))
    shown, rest = found[:most], Tokens()
    if len(found) > most:
        for _, used in found[most - 1 :]:
            rest = rest.plus(used)
        shown[-1] = REST, rest
    return shown


def _shown(name: str) -> str:
    name = name[:MAX_NAME_CHARS]
    return name if name.isprintable() else name.encode("unicode_escape").decode("ascii")[:MAX_NAME_CHARS]
