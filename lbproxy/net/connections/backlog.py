# SPDX-License-Identifier: Apache-2.0
"""Reads that have more pieces than one turn of the loop may walk: they are walked on in later turns.

A chunk of one byte costs as much as one of a thousand, and a read has room for 20,000 of them: 10 ms in which all
others wait, for each connection of a server that writes so. Of a read the first `h1.LINES_AT_ONCE` are walked at once;
what is left of all connections together takes `WALKS_A_TURN` times as many a turn, the loop serves others in between,
and nothing more is read from a connection that has such a rest: at most one read is held for each.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Final, Protocol

WALKS_A_TURN: Final = 8
"""About 0.3 ms."""


class Walker(Protocol):
    """A connection with a rest."""

    def walk_on(self) -> None:
        """Walk so much of it as one turn may; if something is left, `add` the connection again."""
        ...


class Backlog:
    """The connections that have a rest, in the order in which they are served."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: dict[Walker, None] = {}

    def add(self, walker: Walker) -> None:
        """Serve it too, after those that wait already."""
        if not self._due:
            self._loop.call_soon(self._serve)
        self._due[walker] = None

    def _serve(self) -> None:
        for walker in list(islice(self._due, WALKS_A_TURN)):
            del self._due[walker]
            self._loop.call_soon(walker.walk_on)
        if self._due:
            self._loop.call_soon(self._serve)
