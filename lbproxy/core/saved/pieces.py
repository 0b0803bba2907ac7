"""Exports what a pool has learned, in small pieces: the driver goes on with other work between two of them.

A piece is a mapping of plain values (text, numbers, lists, mappings). In order: one `head`, one `pool`, an `endpoint`
for each endpoint, with prefixes `nodes` and `ends`, and one `end`, without which the data is not complete.

Prefixes are a tree, as in `core.caches.prefix_index`: a node is a piece of a prompt, with the number of the node before
it (-1: it is the beginning) and its keys; nodes are numbered in the order of the pieces. `ends` has the prompts in one
endpoint's cache by the numbers of their last nodes, the least recently used first. The index may change between two
pieces: every path is a prompt that was sent all the same.
"""

from __future__ import annotations

import struct
from binascii import b2a_base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from lbproxy.core.caches.prefix_index import EndpointCache, Node
from lbproxy.core.knowledge.load_model import LoadModel
from lbproxy.core.knowledge.pool_model import PoolModel

Piece: TypeAlias = Mapping[str, object]
FORMAT: Final = "lbproxy state"
VERSION: Final = 1
"""Another version cannot be read. To be increased with each change of names or meanings."""
MAX_NAMES: Final = 1024
"""Adapters of one endpoint, in each of its lists."""
MAX_NAME_CHARS: Final = 1024
MAX_NODES: Final = 1_000_000
MAX_KEYS: Final = 4_000_000
"""Blocks in all nodes together: 45 MB of text."""
MAX_ENDS: Final = 4_000_000
"""Prompts in all caches together."""
MAX_STARTED_AT: Final = 1e18
KEYS_IN_PIECE: Final = 2000
SHARDS: Final = 64
"""One mapping of a million nodes takes 40 ms when it grows."""
ITEMS_IN_PIECE: Final = 250
"""Nodes, or ends, in one piece: some 0.5 ms."""


def pieces(
    pool: PoolModel, loads: Iterable[tuple[str, LoadModel]], *, saved_at: float, prefixes: bool, now: float
) -> Iterator[Piece | None]:
    """Export what was learned of the pool and of the endpoints, which are given with their URLs. `saved_at`: the wall
    time. None = nothing for this step, each of which is bounded.
    """
    members = list(loads)
    block_bytes = pool.index.block_bytes
    yield {"kind": "head", "format": FORMAT, "version": VERSION, "saved_at": saved_at, "block_bytes": block_bytes}
    yield {"kind": "pool", "endpoints": len(members), "learned": pool.save()}
    for url, load in members:
        yield _endpoint(url, load, now)
    if prefixes:
        tree = _Tree()
        for number, (_, load) in enumerate(members):
            yield from tree.prompts(number, load.kv.cache)
    yield {"kind": "end"}


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
    """Whether this may be the name of an adapter."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS and name.isprintable()


class _Tree:
    """The nodes that were exported, by their numbers."""

    def __init__(self) -> None:
        self._numbers: list[dict[Node, int]] = [{} for _ in range(SHARDS)]
        """By a part of the node's hash."""
        self._count = 0
        self._nodes: list[tuple[int, str]] = []
        """Those that are in no piece yet."""
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
