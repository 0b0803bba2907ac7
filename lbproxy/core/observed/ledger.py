# SPDX-License-Identifier: Apache-2.0
"""Who used how much: tokens by flow and model, since the start and in the present day.

`core.queue.limits` says what a request used, and writes it here once, when its attempt ends. Days are UTC; the driver,
which has the wall clock, says when one ends. Invariants: counts since the start never go down; there are at most
`MAX_PAIRS` pairs of flow and model, and one more for all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from lbproxy.core.requests.request import Tokens

MAX_PAIRS: Final = 2000
MAX_NAME_CHARS: Final = 128
REST: Final = ("others", "other")
"""The flow and the model of all beyond."""

Pair: TypeAlias = tuple[str, str]
"""A flow and a model; no model is an empty text."""


class Ledger:
    """Counts tokens by flow and model."""

    def __init__(self) -> None:
        self._rows: dict[Pair, list[int]] = {}
        """Since the start, in the order of `Tokens`."""

    def add(self, flow: str, model: str | None, used: Tokens) -> None:
        """Count what a request used."""
        row = self._rows.get((flow, model or ""))
        if row is None:
            row = self._row(flow, model or "")
        for n, tokens in enumerate(used):
            row[n] += tokens

    def _row(self, flow: str, model: str) -> list[int]:
        """That of a pair under a name that can be shown; of `REST` if there are too many."""
        pair = _shown(flow), _shown(model)
        if pair not in self._rows and len(self._rows) - (REST in self._rows) >= MAX_PAIRS:
            pair = REST
        return self._rows.setdefault(pair, [0] * len(Tokens._fields))

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
