"""What is in each endpoint's prefix cache, as far as a proxy can know it: which blocks it sent where, and when.

`PrefixIndex` is a tree of prompts, of which each `Node` is a piece: some keys (see `core.requests.prompt_keys`), and
the endpoints that have all of these, as a bit mask. A prompt is a path from the root, so that one walk along its keys
finds how far each endpoint's cache reaches, however many there are. A new prompt is one new node, whatever its length;
where another leaves its path, the node is split. `EndpointCache` is one endpoint's share of the index.

Invariants: who has a node has its parent, which was used at the same time or later; a cache has a node either pinned
(requests in flight use it; never evicted) or idle since some time (oldest evicted first, a prompt's end before its
beginning, which others may share); bits of endpoints that left are cleared, and reused. The caches together never hold
more than `PrefixIndex.max_entries` blocks.

Keys can be forged. One that stands for two beginnings at once is only found behind the first of them, and where it
would have to be in two places, the rest of that prompt is not remembered.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from math import inf
from typing import Final

from lbproxy.core.requests.prompt_keys import BLOCK_BYTES, BlockKey

ENTRY_BYTES: Final = 600
"""Memory of a block in one cache, at most: where each prompt has a single block of its own. Of long prompts a block
takes a tenth of it (`python -m benchmarks.decision`)."""
MAX_ENTRIES: Final = 600 * 1024**2 // ENTRY_BYTES
"""Blocks in all caches together, if the settings do not say: 1,000 on each of 1,000 endpoints."""
STALE_PATHS: Final = 1000
"""Of prompts that were used again: a cache's list of idle ones may have so many, and as many as it has nodes."""


class Node:
    """A piece of a prompt: blocks that were always used together so far."""

    __slots__ = ("end", "keys", "mask", "parent")

    def __init__(self, parent: Node | None, keys: tuple[BlockKey, ...], end: int, mask: int) -> None:
        self.parent = parent
        """None: it is the root."""
        self.keys = keys
        """Never empty, but for the root."""
        self.end = end
        """How many keys there are from the root to its end."""
        self.mask = mask
        """The bits of the endpoints that have all of it; 0 only while it is being made."""


class _Use:
    """What one cache does with a node."""

    __slots__ = ("idle_since", "users")

    def __init__(self, users: int, idle_since: int) -> None:
        self.users = users
        """Requests in flight that use it."""
        self.idle_since = idle_since
        """When it had none any more, by the cache's own count of such moments."""


class PrefixIndex:
    """Which endpoint has which blocks. Endpoints take part by `join` and are called by their slot, a small number."""

    def __init__(self, block_bytes: int = BLOCK_BYTES, max_entries: int = MAX_ENTRIES) -> None:
        self.block_bytes = block_bytes
        self.max_entries = max_entries
        self.entries = 0
        """Blocks in all caches together."""
        self.width = 0
        """Above every slot in use."""
        self.members = 0
        self.root = Node(None, (), 0, 0)
        self._starts: dict[BlockKey, Node] = {}
        """By its first key: every node but the root."""
        self._caches: dict[int, EndpointCache] = {}
        """By bit."""
        self._free: list[int] = []

    def __len__(self) -> int:
        """How many pieces there are."""
        return len(self._starts)

    def join(self) -> EndpointCache:
        """An empty cache in a free slot."""
        if self._free:
            slot = heapq.heappop(self._free)  # the lowest, so that masks stay short
        else:
            slot = self.width
            self.width += 1
        self.members += 1
        return self._cache(slot)

    def leave(self, cache: EndpointCache) -> None:
        """Forget a cache; its slot is free for another. Later calls of its methods are no-ops."""
        cache.detach()
        del self._caches[1 << cache.slot]
        self.members -= 1
        heapq.heappush(self._free, cache.slot)

    def renew(self, cache: EndpointCache) -> EndpointCache:
        """An empty cache in the place of one whose endpoint lost everything."""
        cache.detach()
        return self._cache(cache.slot)

    def _cache(self, slot: int) -> EndpointCache:
        self._caches[1 << slot] = cache = EndpointCache(self, slot)
        return cache

    @property
    def fair_share(self) -> int:
        """Blocks that one cache may hold when every other holds as many."""
        return self.max_entries // max(1, self.members)

    def match(self, keys: tuple[BlockKey, ...]) -> list[int]:
        """By slot: how many of the first keys are there. One look-up for each piece, up to the longest match."""
        depths = [0] * self.width
        node, depth, alive = self.root, 0, 0
        while depth < len(keys):
            child = self.child(node, keys[depth])
            if child is None:
                break
            if child.mask != alive:
                _assign(depths, alive & ~child.mask, depth)
                alive = child.mask
            same = _common(child.keys, keys, depth)
            depth += same
            if same < len(child.keys):
                break
            node = child
        _assign(depths, alive, depth)
        return depths

    def longest(self, keys: tuple[BlockKey, ...]) -> int:
        """The deepest match of any endpoint."""
        return max(self.match(keys), default=0)

    # For EndpointCache

    def child(self, node: Node, key: BlockKey) -> Node | None:
        """The piece that goes on behind `node` with `key`."""
        found = self._starts.get(key)
        return found if found is not None and found.parent is node else None

    def grow(self, node: Node, keys: tuple[BlockKey, ...]) -> Node | None:
        """A new piece behind `node`. None: the first key is another's."""
        if keys[0] in self._starts:
            return None
        self._starts[keys[0]] = made = Node(node, keys, node.end + len(keys), 0)
        return made

    def split(self, node: Node, size: int) -> Node | None:
        """The first `size` keys of a piece as one of their own, before it: whoever has it has both, used alike. None:
        the first key of its rest is another's.
        """
        keys = node.keys
        if keys[size] in self._starts:
            return None
        head = Node(node.parent, keys[:size], node.end - len(keys) + size, node.mask)
        node.keys, node.parent = keys[size:], head
        self._starts[keys[0]], self._starts[keys[size]] = head, node
        mask = node.mask
        while mask:
            bit = mask & -mask
            self._caches[bit].copy_use(node, head)
            mask ^= bit
        return head

    @staticmethod
    def shorten(node: Node, size: int) -> None:
        """The only one that has a piece, of which nothing is behind it, has its first `size` keys alone."""
        node.end -= len(node.keys) - size
        node.keys = node.keys[:size]

    def drop(self, node: Node, bit: int) -> None:
        """One endpoint has a piece no more."""
        node.mask ^= bit
        if not node.mask:
            del self._starts[node.keys[0]]


def _common(mine: tuple[BlockKey, ...], keys: tuple[BlockKey, ...], start: int) -> int:
    """How many of the first of `mine`, at least one, are also in `keys` from `start` on. As keys are chained, the last
    that is the same is found by halving.
    """
    most = len(keys) - start
    most = min(most, len(mine))
    if mine[most - 1] == keys[start + most - 1]:
        return most
    least = 1
    while most - least > 1:
        middle = (least + most) // 2
        if mine[middle - 1] == keys[start + middle - 1]:
            least = middle
        else:
            most = middle
    return least


def _assign(depths: list[int], mask: int, depth: int) -> None:
    """Write `depth` at every set bit of `mask`."""
    while mask:
        lowest = mask & -mask
        depths[lowest.bit_length() - 1] = depth
        mask ^= lowest


class EndpointCache:
    """The blocks that one endpoint is believed to have."""

    __slots__ = ("_bit", "_idle", "_index", "_now", "_uses", "attached", "pinned", "size", "slot")

    def __init__(self, index: PrefixIndex, slot: int) -> None:
        self._index = index
        self._bit = 1 << slot
        self._uses: dict[Node, _Use] = {}
        """Of every node that is here."""
        self._idle: deque[tuple[Node, int]] = deque()
        """The ends of prompts, and since when they are idle; the oldest first. Out of date where that time is another
        by now."""
        self._now = 0
        self.slot = slot
        self.attached = True
        self.size = 0
        """Blocks, pinned and idle."""
        self.pinned = 0
        """Blocks that requests in flight use."""

    def pin(self, keys: tuple[BlockKey, ...]) -> tuple[int, Node]:
        """A request with these keys starts: they are there now, and stay until `unpin`.

        Returns how many of the first keys were there before, and the end of what is pinned, which `unpin` wants: the
        end of all, unless the index is full.
        """
        index = self._index
        node = index.root
        if not self.attached:
            return 0, node
        depth = 0
        while depth < len(keys):
            child = index.child(node, keys[depth])
            if child is None or not child.mask & self._bit:
                break
            same = _common(child.keys, keys, depth)
            if same < len(child.keys):
                child = index.split(child, same)
                if child is None:
                    break
            use = self._uses[child]
            if not use.users:
                self.pinned += same
            use.users += 1
            depth += same
            node = child
        return depth, self._add(node, keys, depth) if depth < len(keys) else node

    def _add(self, node: Node, keys: tuple[BlockKey, ...], depth: int) -> Node:
        """Pin the rest, of which nothing is here. Returns the end of what is pinned."""
        index = self._index
        wanted = len(keys) - depth
        room = index.max_entries - index.entries
        if wanted > room:
            room += self._evict(wanted - room)
            keys = keys[: depth + room]
        while depth < len(keys):
            found = index.child(node, keys[depth])
            if found is None:
                child = index.grow(node, keys[depth:])
            elif found.mask & self._bit:  # a forged key, by which `pin` could not split it, and a shorter prompt could
                break
            else:
                same = _common(found.keys, keys, depth)
                child = found if same == len(found.keys) else index.split(found, same)
            if child is None:
                break
            child.mask |= self._bit
            self._uses[child] = _Use(1, 0)
            size = len(child.keys)
            self.size += size
            self.pinned += size
            index.entries += size
            depth += size
            node = child
        return node

    def pinned_depth(self, keys: tuple[BlockKey, ...]) -> int:
        """How many of the first keys are in use."""
        index = self._index
        node, depth = index.root, 0
        while depth < len(keys):
            child = index.child(node, keys[depth])
            use = None if child is None else self._uses.get(child)
            if child is None or use is None or not use.users:
                break
            same = _common(child.keys, keys, depth)
            depth += same
            if same < len(child.keys):
                break
            node = child
        return depth

    def copy_use(self, node: Node, head: Node) -> None:
        """`head` was parted from `node`, which is here."""
        use = self._uses[node]
        self._uses[head] = _Use(use.users, use.idle_since)

    def unpin(self, end: Node) -> int:
        """The request is over for which `pin` returned `end`. Returns how many blocks nobody uses any more."""
        if not self.attached:
            return 0
        self._now += 1
        freed = 0
        node = end
        while node.parent is not None:
            use = self._uses[node]
            use.users -= 1
            if not use.users:
                use.idle_since = self._now
                freed += len(node.keys)
            node = node.parent
        if freed:
            self.pinned -= freed
            self._idle.append((end, self._now))
            if len(self._idle) > 2 * len(self._uses) + STALE_PATHS:
                self._idle = deque([one for one in self._idle if self._is_idle(one[0], one[1])])
        return freed

    def _is_idle(self, node: Node, since: int) -> bool:
        use = self._uses.get(node)
        return use is not None and not use.users and use.idle_since == since

    def trim(self, blocks: float) -> None:
        """Evict idle blocks, oldest first, until no more than `blocks` are left or none is idle."""
        wanted = self.size - blocks
        if wanted > 0.0:
            self._evict(self.size if wanted == inf else math.ceil(wanted))

    def _evict(self, blocks: int) -> int:
        """As many idle blocks, oldest first, as there are. Returns how many."""
        index, idle, gone = self._index, self._idle, 0
        while idle and gone < blocks:
            node, since = idle.popleft()
            while gone < blocks and self._is_idle(node, since):
                kept = len(node.keys) - (blocks - gone)
                if kept > 0 and node.mask == self._bit:
                    index.shorten(node, kept)
                    gone = blocks
                    break
                if kept > 0:
                    index.split(node, kept)
                del self._uses[node]
                index.drop(node, self._bit)
                gone += len(node.keys)
                assert node.parent is not None
                node = node.parent
            if gone >= blocks:
                idle.appendleft((node, since))
        self.size -= gone
        index.entries -= gone
        return gone

    def detach(self) -> None:
        """Take everything out of the index, for good."""
        if self.attached:
            for node in self._uses:
                self._index.drop(node, self._bit)
            self._index.entries -= self.size
            self.size = self.pinned = 0
            self.attached = False
            self._uses.clear()
            self._idle.clear()
