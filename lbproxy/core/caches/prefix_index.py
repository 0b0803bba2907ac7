# SPDX-License-Identifier: Apache-2.0
"""The predicted content of each endpoint's prefix cache: which blocks were sent there, and when.

`PrefixIndex` is a tree of prompts. Each `Node` is a piece of a prompt: some keys (see `core.requests.prompt_keys`), and
a bit mask of the endpoints that have all of these. A prompt is a path from the root, so one walk along its keys finds
the length of the match at every endpoint. A new prompt is one new node, whatever its length; a node is split where
another prompt leaves its path. `EndpointCache` is one endpoint's share of the index.

Invariants: an endpoint that has a node has its parent, which was used at the same time or later. In a cache a node is
either pinned (requests in flight use it; it is never evicted) or idle since some time (the oldest is evicted first, and
the end of a prompt before its beginning, which other prompts may share). Bits of endpoints that left are cleared, and
reused. All caches together never hold more than `PrefixIndex.max_entries` blocks.

Keys can be forged. A key that stands for two prefixes at once is found only after the first of them. Where it would
have to be in two places, the rest of that prompt is not remembered.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from math import inf
from typing import Final

from lbproxy.core.requests.prompt_keys import BLOCK_BYTES, BlockKey

ENTRY_BYTES: Final = 600
"""Memory of a block in one cache in the worst case, where each prompt has a single block of its own. In long prompts a
block takes a tenth of it (`python -m benchmarks.decision`)."""
MAX_ENTRIES: Final = 600 * 1024**2 // ENTRY_BYTES
"""Blocks in all caches together, if it is not configured: 1,000 on each of 1,000 endpoints."""
STALE_PATHS: Final = 1000
"""A cache's list of idle paths may have this many outdated entries (of prompts that were used again), and as many as it
has nodes."""


class Node:
    """A piece of a prompt: blocks that were always used together so far."""

    __slots__ = ("end", "keys", "mask", "parent", "users")

    def __init__(self, parent: Node | None, keys: tuple[BlockKey, ...], end: int, mask: int) -> None:
        self.parent = parent
        """None: this is the root."""
        self.keys = keys
        """Never empty, except for the root."""
        self.end = end
        """How many keys there are from the root to the end of this node."""
        self.mask = mask
        """The bits of the endpoints that have all of it; 0 only while the node is being created."""
        self.users = 0
        """Requests in flight that use it, at all of these together."""


class _Use:
    """How one cache uses a node."""

    __slots__ = ("idle_since", "users")

    def __init__(self, users: int, idle_since: int) -> None:
        self.users = users
        """Requests in flight that use it."""
        self.idle_since = idle_since
        """When the last of them ended, by the cache's own counter."""


class PrefixIndex:
    """Which endpoint has which blocks. Endpoints take part by `join`, and are identified by their `member_id`, a small
    number.
    """

    def __init__(self, block_bytes: int = BLOCK_BYTES, max_entries: int = MAX_ENTRIES) -> None:
        self.block_bytes = block_bytes
        self.max_entries = max_entries
        self.entries = 0
        """Blocks in all caches together."""
        self.width = 0
        """Larger than every `member_id` in use."""
        self.members = 0
        self.root = Node(None, (), 0, 0)
        self._starts: dict[BlockKey, Node] = {}
        """By first key: every node except the root."""
        self._caches: dict[int, EndpointCache] = {}
        """By bit."""
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._starts)

    def join(self) -> EndpointCache:
        """Return an empty cache with a free `member_id`."""
        if self._free:
            member_id = heapq.heappop(self._free)  # the lowest, so that masks stay short
        else:
            member_id = self.width
            self.width += 1
        self.members += 1
        return self._cache(member_id)

    def leave(self, cache: EndpointCache) -> None:
        """Remove a cache; its `member_id` can be reused. Later calls of its methods have no effect."""
        cache.detach()
        del self._caches[1 << cache.member_id]
        self.members -= 1
        heapq.heappush(self._free, cache.member_id)

    def renew(self, cache: EndpointCache) -> EndpointCache:
        """Return an empty cache that replaces one whose endpoint lost everything."""
        cache.detach()
        return self._cache(cache.member_id)

    def _cache(self, member_id: int) -> EndpointCache:
        self._caches[1 << member_id] = cache = EndpointCache(self, member_id)
        return cache

    @property
    def fair_share(self) -> int:
        """Blocks that each cache may hold when all hold equally many."""
        return self.max_entries // max(1, self.members)

    def match(self, keys: tuple[BlockKey, ...]) -> list[int]:
        """Return, by `member_id`, how many of the first keys are cached. One look-up for each node, up to the longest
        match.
        """
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
        """The longest match of any endpoint. As `match`, but whatever the number of endpoints."""
        node, depth, longest = self.root, 0, 0
        while depth < len(keys):
            child = self.child(node, keys[depth])
            if child is None:
                break
            same = _common(child.keys, keys, depth)
            depth += same
            if child.mask:
                longest = depth
            if same < len(child.keys):
                break
            node = child
        return longest

    def demanded(self, keys: tuple[BlockKey, ...], users: float) -> int:
        """How many of the first keys are used by at least `users` requests in flight, more than 0, for each endpoint
        that has them. Ends where fewer requests use them in all.
        """
        node, depth, demanded = self.root, 0, 0
        while depth < len(keys):
            child = self.child(node, keys[depth])
            if child is None or not child.users or child.users < users:
                break
            same = _common(child.keys, keys, depth)
            depth += same
            if child.users >= users * child.mask.bit_count():
                demanded = depth
            if same < len(child.keys):
                break
            node = child
        return demanded

    # For EndpointCache

    def child(self, node: Node, key: BlockKey) -> Node | None:
        """The node that continues `node` with `key`."""
        found = self._starts.get(key)
        return found if found is not None and found.parent is node else None

    def grow(self, node: Node, keys: tuple[BlockKey, ...]) -> Node | None:
        """Add a node after `node`. None: its first key is in use elsewhere."""
        if keys[0] in self._starts:
            return None
        self._starts[keys[0]] = made = Node(node, keys, node.end + len(keys), 0)
        return made

    def split(self, node: Node, size: int) -> Node | None:
        """Split the first `size` keys of a node off as its new parent, which the same endpoints have and use. None: the
        first key of the rest is in use elsewhere.
        """
        keys = node.keys
        if keys[size] in self._starts:
            return None
        head = Node(node.parent, keys[:size], node.end - len(keys) + size, node.mask)
        head.users = node.users
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
        """Keep the first `size` keys of a node. Only one endpoint may have it, and it must have no children."""
        node.end -= len(node.keys) - size
        node.keys = node.keys[:size]

    def drop(self, node: Node, bit: int) -> None:
        node.mask ^= bit
        if not node.mask:
            del self._starts[node.keys[0]]


def _common(mine: tuple[BlockKey, ...], keys: tuple[BlockKey, ...], start: int) -> int:
    """How many of the first keys of `mine`, at least one, are also in `keys` from `start` on. As keys are chained,
    binary search finds the last common one.
    """
    high = len(keys) - start
    high = min(high, len(mine))
    if mine[high - 1] == keys[start + high - 1]:
        return high
    low = 1
    while high - low > 1:
        middle = (low + high) // 2
        if mine[middle - 1] == keys[start + middle - 1]:
            low = middle
        else:
            high = middle
    return low


def _assign(depths: list[int], mask: int, depth: int) -> None:
    """Write `depth` at every set bit of `mask`."""
    while mask:
        lowest = mask & -mask
        depths[lowest.bit_length() - 1] = depth
        mask ^= lowest


class EndpointCache:
    """The blocks that one endpoint is predicted to have."""

    __slots__ = ("_bit", "_idle", "_index", "_now", "_uses", "attached", "member_id", "pinned", "size")

    def __init__(self, index: PrefixIndex, member_id: int) -> None:
        self._index = index
        self._bit = 1 << member_id
        self._uses: dict[Node, _Use] = {}
        """For every node that is in this cache."""
        self._idle: deque[tuple[Node, int]] = deque()
        """The ends of prompts, and since when they are idle, the oldest first. An entry is outdated if the node is idle
        since another time by now."""
        self._now = 0
        self.member_id = member_id
        self.attached = True
        self.size = 0
        """Blocks, pinned and idle."""
        self.pinned = 0
        """Blocks that requests in flight use."""

    def pin(self, keys: tuple[BlockKey, ...]) -> tuple[int, Node]:
        """Note that a request with these keys starts: its blocks are cached now, and stay until `unpin`.

        Returns how many of the first keys were cached before, and the end node of what is pinned, which `unpin` needs:
        the end of the prompt, unless the index is full.
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
            child.users += 1
            depth += same
            node = child
        return depth, self._add(node, keys, depth) if depth < len(keys) else node

    def _add(self, node: Node, keys: tuple[BlockKey, ...], depth: int) -> Node:
        """Add and pin the rest of a prompt, of which nothing is cached here. Returns the end node of what is pinned."""
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
            elif found.mask & self._bit:  # a forged key: `pin` could not split it, and a shorter prompt could
                break
            else:
                same = _common(found.keys, keys, depth)
                child = found if same == len(found.keys) else index.split(found, same)
            if child is None:
                break
            child.mask |= self._bit
            child.users += 1
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
        """Note that `head` was split off `node`, which is in this cache."""
        use = self._uses[node]
        self._uses[head] = _Use(use.users, use.idle_since)

    def unpin(self, end: Node) -> int:
        """Note the end of the request for which `pin` returned `end`. Returns how many blocks are idle from now on."""
        if not self.attached:
            return 0
        self._now += 1
        freed = 0
        node = end
        while node.parent is not None:
            use = self._uses[node]
            use.users -= 1
            node.users -= 1
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

    def ends(self) -> Iterator[Node | None]:
        """The ends of the prompts in this cache, the least recently used first, those in use last; None between them
        where there is nothing. O(1) for each item after the first; the cache may change meanwhile.
        """
        idle, uses = list(self._idle), list(self._uses)
        for node, since in idle:
            yield node if self._is_idle(node, since) else None
        inner: set[Node | None] = set()
        for node in uses:
            if self._is_pinned(node):
                inner.add(node.parent)
            yield None
        for node in uses:
            yield node if node not in inner and self._is_pinned(node) else None

    def _is_pinned(self, node: Node) -> bool:
        use = self._uses.get(node)
        return use is not None and use.users > 0

    def trim(self, blocks: float) -> None:
        """Evict idle blocks, oldest first, until at most `blocks` are left or none is idle."""
        wanted = self.size - blocks
        if wanted > 0.0:
            self._evict(self.size if wanted == inf else math.ceil(wanted))

    def _evict(self, blocks: int) -> int:
        """Evict `blocks` idle blocks, oldest first, or all. Returns how many."""
        index, idle, evicted = self._index, self._idle, 0
        while idle and evicted < blocks:
            node, since = idle.popleft()
            while evicted < blocks and self._is_idle(node, since):
                kept = len(node.keys) - (blocks - evicted)
                if kept > 0 and node.mask == self._bit:
                    index.shorten(node, kept)
                    evicted = blocks
                    break
                if kept > 0:
                    index.split(node, kept)
                del self._uses[node]
                index.drop(node, self._bit)
                evicted += len(node.keys)
                assert node.parent is not None
                node = node.parent
            if evicted >= blocks:
                idle.appendleft((node, since))
        self.size -= evicted
        index.entries -= evicted
        return evicted

    def detach(self) -> None:
        """Remove everything from the index, permanently."""
        if self.attached:
            for node, use in self._uses.items():
                node.users -= use.users
                self._index.drop(node, self._bit)
            self._index.entries -= self.size
            self.size = self.pinned = 0
            self.attached = False
            self._uses.clear()
            self._idle.clear()
