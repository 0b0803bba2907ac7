# SPDX-License-Identifier: Apache-2.0
"""Exports what a pool has learned, in small pieces: the driver goes on with other work between two of them.

A piece is a mapping of plain values (text, numbers, lists, mappings). In order: one `head`; if something is learned,
one `pool` and an `endpoint` for each endpoint, with prefixes `nodes` and `ends`; `used` for each endpoint with limits
per time, `flow` for each flow that used some of its limits per minute, `sleep` for each server that may sleep, `tokens`
for who used how many in which day; and one `end`, without which the data is not complete. Times are wall times, in
seconds since 1970.

Prefixes are a tree, as in `core.caches.prefix_index`: a node is a piece of a prompt, with the number of the node before
it (-1: it is the beginning) and its keys; nodes are numbered in the order of the pieces. `ends` has the prompts in one
endpoint's cache by the numbers of their last nodes, the least recently used first. The index may change between two
pieces: every path is a prompt that was sent all the same.
"""

from __future__ import annotations

import struct
from binascii import b2a_base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from lbproxy.core.caches.prefix_index import EndpointCache, Node
from lbproxy.core.capacity.allowance import Use
from lbproxy.core.knowledge.load_model import LoadModel
from lbproxy.core.knowledge.pool_model import PoolModel
from lbproxy.core.requests.request import DayUse

Piece: TypeAlias = Mapping[str, object]
FORMAT: Final = "lbproxy state"
VERSION: Final = 2
"""To be increased with each change of names or meanings. An older lbproxy does not use the data of a newer one."""
READABLE: Final = frozenset({1, 2})
"""Version 1 has neither `used` nor `flow` nor `sleep` nor `tokens`, and always a pool."""
MAX_NAMES: Final = 1024
"""Adapters of one endpoint, in each of its lists."""
MAX_NAME_CHARS: Final = 1024
MAX_NODES: Final = 1_000_000
MAX_KEYS: Final = 4_000_000
"""Blocks in all nodes together: 45 MB of text."""
MAX_ENDS: Final = 4_000_000
"""Prompts in all caches together."""
MAX_STARTED_AT: Final = 1e18
MAX_AMOUNT: Final = 1e15
"""Requests or tokens."""
MAX_TIMES: Final = 16
"""Durations of one kind, of one server."""
MAX_WAKE_S: Final = 3600.0
MAX_START_S: Final = 86_400.0
"""The longest durations that are kept, of a wake or sleep, and of a start."""
KEYS_IN_PIECE: Final = 2000
SHARDS: Final = 64
"""One mapping of a million nodes takes 40 ms when it grows."""
ITEMS_IN_PIECE: Final = 250
"""Nodes, or ends, in one piece: some 0.5 ms."""


class Durations(NamedTuple):
    """How long a server took to wake, to fall asleep and to start, the last time last."""

    wakes: tuple[float, ...] = ()
    sleeps: tuple[float, ...] = ()
    starts: tuple[float, ...] = ()


class Learned(NamedTuple):
    """What a pool has learned."""

    pool: PoolModel
    loads: Sequence[tuple[str, LoadModel]]
    """What was learned of its endpoints, by URL."""


def pieces(
    learned: Learned | None, others: Iterable[Piece], *, saved_at: float, prefixes: bool, now: float
) -> Iterator[Piece | None]:
    """Export what was learned (None: nothing is), and `others`: see the functions below. `saved_at`: the
    wall time. The result None = nothing for this step, each of which is bounded.
    """
    block_bytes = None if learned is None else learned.pool.index.block_bytes
    yield {"kind": "head", "format": FORMAT, "version": VERSION, "saved_at": saved_at, "block_bytes": block_bytes}
    if learned is not None:
        yield {"kind": "pool", "endpoints": len(learned.loads), "learned": learned.pool.save()}
        for url, load in learned.loads:
            yield _endpoint(url, load, now)
        if prefixes:
            tree = _Tree()
            for number, (_, load) in enumerate(learned.loads):
                yield from tree.prompts(number, load.kv.cache)
    yield from others
    yield {"kind": "end"}


def used_piece(key: str, use: Use, ahead_s: float) -> Piece:
    """What an endpoint used of its limits per time. `ahead_s`: of the wall clock, before the one of `use`."""
    day = use.day
    return {
        "kind": "used",
        "key": key,
        "at": max(0.0, use.at + ahead_s),
        "requests": _amount(use.requests),
        "tokens": _amount(use.tokens),
        "day_at": None if day is None else max(0.0, day.at + ahead_s),
        "day": [] if day is None else [_amount(amount) for amount in day.amounts],
    }


def flow_piece(name: str, use: Use, ahead_s: float) -> Piece:
    """What a flow used of its limits per minute. `ahead_s`: as above."""
    amounts = {"requests": _amount(use.requests), "tokens": _amount(use.tokens)}
    return {"kind": "flow", "name": name, "at": max(0.0, use.at + ahead_s), **amounts}


def tokens_pieces(days: Iterable[DayUse]) -> Iterator[Piece]:
    """Who used how many tokens."""
    for use in days:
        rows = [[*pair, *used] for pair, used in use.rows.items()]
        for first in range(0, len(rows), ITEMS_IN_PIECE):
            part = rows[first : first + ITEMS_IN_PIECE]
            yield {"kind": "tokens", "day": use.day, "id": use.id, "rows": part}


def _amount(amount: float) -> float:
    return round(min(amount, MAX_AMOUNT), 3)


def sleep_piece(url: str, durations: Durations) -> Piece:
    """How long a server took to wake, to fall asleep and to start."""
    wakes, sleeps, starts = (list(times[-MAX_TIMES:]) for times in durations)
    return {
        "kind": "sleep",
        "url": url,
        "wakes": [time for time in wakes if time <= MAX_WAKE_S],
        "sleeps": [time for time in sleeps if time <= MAX_WAKE_S],
        "starts": [time for time in starts if time <= MAX_START_S],
    }


def _endpoint(url: str, load: LoadModel, now: float) -> Piece:
    loaded, known = load.adapters.save()
    started_at = load.kv.started_at
    return {
        "kind": "endpoint",
        "url": url,
        "started_at": started_at if started_at is not None and abs(started_at) <= MAX_STARTED_AT else None,
        "learned": load.save(now),
        "loaded": _named(loaded),
        "known": _named(known),
    }


def _named(names: Sequence[str]) -> list[str]:
    return [name for name in names if is_name(name)][-MAX_NAMES:]


def is_name(name: object) -> bool:
    """Whether this may be the name of an adapter or a flow."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS and name.isprintable()


class _Tree:
    """The nodes that were exported, by their numbers."""

    def __init__(self) -> None:
        self._numbers: list[dict[Node, int]] = [{} for _ in range(SHARDS)]
        """Numbers of nodes, by a part of the node's hash."""
        self._count = 0
        self._nodes: list[tuple[int, str]] = []
        """Nodes that are in no piece yet."""
        self._keys = self._all_keys = 0
        """In `_nodes`, and ever."""
        self._ends = 0

    def prompts(self, endpoint: int, cache: EndpointCache) -> Iterator[Piece | None]:
        """Export the prompts in one cache."""
        ends: list[int] = []
        for seen, node in enumerate(cache.ends(), 1):
            number = None if node is None else self._number(node)
            if number is not None and self._ends < MAX_ENDS:
                ends.append(number)
                self._ends += 1
            if self._keys >= KEYS_IN_PIECE or len(self._nodes) >= ITEMS_IN_PIECE:
                yield self._flush()
            if len(ends) >= ITEMS_IN_PIECE:
                yield from self._ended(endpoint, ends)
                ends = []
            elif not seen % ITEMS_IN_PIECE:
                yield None
        yield from self._ended(endpoint, ends)

    def _ended(self, endpoint: int, ends: list[int]) -> Iterator[Piece]:
        if self._nodes:
            yield self._flush()
        if ends:
            yield {"kind": "ends", "endpoint": endpoint, "nodes": ends}

    def _flush(self) -> Piece:
        nodes, self._nodes, self._keys = self._nodes, [], 0
        return {"kind": "nodes", "nodes": nodes}

    def _number(self, node: Node) -> int | None:
        """The number of a node, which is exported with those before it. None: there are too many."""
        path = []
        while node.parent is not None and node not in self._numbers[hash(node) % SHARDS]:
            path.append(node)
            node = node.parent
        number = self._numbers[hash(node) % SHARDS].get(node, -1)
        for one in reversed(path):
            keys = one.keys
            if self._count >= MAX_NODES or self._all_keys + len(keys) > MAX_KEYS:
                return None
            text = b2a_base64(struct.pack(f"<{len(keys)}Q", *keys), newline=False).decode()
            self._nodes.append((number, text))
            self._keys += len(keys)
            self._all_keys += len(keys)
            number = self._numbers[hash(one) % SHARDS][one] = self._count
            self._count += 1
        return number if number >= 0 else None
