# SPDX-License-Identifier: Apache-2.0
"""How large an endpoint's prefix cache is, learned from reported `cached_tokens`: for engines that do not report the
size.

An engine evicts the least recently used blocks. So a block is still cached exactly if everything in use, and everything
that was used since that block, fits into the cache with it. The size of that is the *distance* of the block, in tokens
(the literature: reuse or stack distance). When a request is placed, `CapacityLearner` notes the distance of its blocks;
at its end `usage` reports how many of them were cached. A hit at distance d means that the cache holds d, a miss that
it holds less.

The remembered range exceeds the estimated size, so that an estimate that is too low becomes visible. As too low costs
far more than too high, a hit is applied at once, but a miss only if the miss before it agrees, and never against hits
at a larger distance; each miss that contradicts hits reduces their weight a little.

Invariants: a key is remembered exactly while no request in flight uses it and its segment is not forgotten. `_blocks`
has the number of keys in each segment, and `_rest` the other tokens that were used then and cannot be requested again:
responses. There are at most as many empty segments as others, and `FEW_SEGMENTS`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf, log
from typing import Final, NamedTuple

from lbproxy.core.requests.prompt_keys import BlockKey

SEGMENT_BLOCKS: Final = 16
"""The order of last use is kept by segments of this many blocks: 1.3 % of a cache of 300,000 tokens."""
MAX_STEPS: Final = 16
"""At most this many distances are noted for one prompt."""
FEW_KEYS: Final = 4
"""A prompt with fewer blocks shows too little of how many tokens a block has."""
SLACK = 0.5, 0.03
"""The uncertainty of a block's position in its prompt: in blocks, and as a share of the position."""
REMEMBERED_FACTOR: Final = 1.5
"""Times the estimated size: older blocks are forgotten."""
HIT_DISCOUNT: Final = 0.99
"""The weight of hits is reduced to this share when a miss contradicts them. After an unnoticed restart there are many
such misses."""
GUESSED_TOKENS: Final = 2_000_000
"""For a cache of unknown size. High: half the true size was found to cost far more than twice the true size."""
FEW_SEGMENTS: Final = 64
"""Up to this many segments, empty ones are not searched for."""
SMALLEST_TOKENS: Final = 100_000
"""Caches of servers that are worth balancing are hardly smaller."""


class Step(NamedTuple):
    """The blocks of a prompt from `first` up to `end` (exclusive), at a distance of `distance` tokens."""

    first: int
    end: int
    distance: float


class SizeEstimate:
    """The estimated size of a cache, by hits and misses."""

    def __init__(self) -> None:
        self.tokens = float(GUESSED_TOKENS)
        """The largest size that is plausible."""
        self._least = 0.0
        """The largest distance of a hit."""
        self._last_miss = inf
        self._before_misses: tuple[float, float, float] | None = None
        """The estimate before the latest misses in a row."""
        self._is_saved = False
        """`_least` is from before a restart: the engine may be another one now."""
        self.space_tokens = expected_size(0.0, self.tokens)
        """The size that the price of cache space uses."""

    def learn(self, hit: float | None, miss: float | None) -> None:
        """Learn from one prompt: the largest distance of a hit, and the smallest of a miss."""
        if hit is None and miss is not None:
            self._before_misses = self._before_misses or (self.tokens, self._least, self._last_miss)
        elif hit is not None:
            self._before_misses = None
        if hit is not None:
            self._least = max(self._least, hit)
            self.tokens = max(self.tokens, hit)
        if miss is not None:
            if miss < self._least:
                self._least = 0.0 if self._is_saved else self._least * HIT_DISCOUNT
                self._is_saved = False
            self.tokens = min(self.tokens, max(miss, self._last_miss, self._least))
            self._last_miss = miss
        self.space_tokens = expected_size(self._least, self.tokens)

    def undo_misses(self) -> None:
        """Undo the latest misses: the cache was lost, so they said nothing about the size."""
        if self._before_misses is not None:
            self.tokens, self._least, self._last_miss = self._before_misses
            self._before_misses = None
            self.space_tokens = expected_size(self._least, self.tokens)

    def save(self) -> dict[str, float]:
        return {"tokens": self.tokens, "least": self._least}

    def restore(self, saved: Mapping[str, float]) -> None:
        """Start with a saved estimate. The first miss that contradicts its hits discards these."""
        self.tokens, self._least = saved["tokens"], min(saved["least"], saved["tokens"])
        self._is_saved = True
        self.space_tokens = expected_size(self._least, self.tokens)

    def holds(self, distance: float) -> bool:
        """Whether blocks at this distance were hit before."""
        return distance < self._least

    def cap(self, tokens: float) -> None:
        """Apply an upper bound that the engine reports. What hits and misses show counts more."""
        if self._last_miss < inf:
            tokens = min(tokens, self.tokens)
        self.tokens = max(tokens, self._least)
        self.space_tokens = expected_size(self._least, self.tokens)


def expected_size(least: float, most: float) -> float:
    """One size for a cache of between `least` and `most` tokens, so that its inverse is right on average: the price of
    space is proportional to that. Sizes are assumed to be distributed evenly by their logarithm: 315,000 if nothing is
    known.
    """
    least = max(least, SMALLEST_TOKENS)
    return most if least > 0.99 * most else log(most / least) / (1.0 / least - 1.0 / most)


class CapacityLearner:
    """Learns the cache size of one endpoint. A call costs about 0.1 µs for each block in it."""

    def __init__(self, shared: SizeEstimate) -> None:
        self.size = SizeEstimate()
        """The estimate for this endpoint."""
        self._shared = shared
        """The estimate for all endpoints, as if they were alike."""
        self.reports_cached = False
        """The endpoint reports cached tokens. Until then nothing is remembered."""
        self._idle: OrderedDict[BlockKey, int] = OrderedDict()
        """Key -> the number of its segment; the oldest first."""
        self._first = 0
        """The number of the oldest segment."""
        self._blocks = [0]
        self._rest = [0.0]
        self._between = [0.0]
        """The rest between each segment and the one before it."""
        self._compact_at = FEW_SEGMENTS
        """How many segments there may be before empty ones are removed."""

    def look_up(
        self, keys: Sequence[BlockKey], in_use: int, *, used_tokens: float, block_tokens: float
    ) -> tuple[Step, ...]:
        """Note that a request with these keys starts: its blocks are in use from now on.

        Returns their distances, as far as the first keys are known without a gap: later steps have larger distances.
        `in_use`: how many of the first keys are used by earlier requests. `used_tokens`: the space of these requests.
        """
        idle, blocks = self._idle, self._blocks
        runs: list[tuple[int, int]] = []
        taken: list[int] = []
        depth, known, last = 0, True, -1
        for place, key in enumerate(keys):
            segment = idle.pop(key, None)
            if segment is not None:
                taken.append(segment)
                if known and segment != last:
                    runs.append((depth, segment))
                    last = segment
            elif known and place >= in_use:
                known = False
            depth += known
        steps = []
        distance = 0.0
        for (first, segment), (end, _) in pairwise([*runs, (depth, -1)][: MAX_STEPS + 1]):
            at = segment - self._first
            younger = float(sum(blocks[at + 1 :])) + blocks[at] / 2.0
            rest = sum(self._rest[at + 1 :], 0.0) + sum(self._between[at + 1 :], 0.0) + self._rest[at] / 2.0
            distance = max(distance, used_tokens + younger * block_tokens + rest)
            steps.append(Step(first, end, distance))
        for segment in taken:
            blocks[segment - self._first] -= 1
        return tuple(steps)

    def learn(self, steps: Sequence[Step], blocks_hit: float) -> None:
        """Learn that the first `blocks_hit` blocks of a prompt were cached; `steps`: what `look_up` returned for it."""
        blocks, share = SLACK
        surely_there, surely_not = blocks_hit * (1.0 - share) - blocks, blocks_hit * (1.0 + share) + blocks
        hit = max((step.distance for step in steps if step.first + 1 <= surely_there), default=None)
        miss = next((step.distance for step in steps if step.end - 1 >= surely_not), None)
        self.size.learn(hit, miss)
        self._shared.learn(hit, miss)

    def remember(self, keys: Sequence[BlockKey], in_use: int, *, rest_tokens: float, max_blocks: float) -> None:
        """Note the end of a request that was prefilled. `in_use`: how many of its first keys others still use.
        `rest_tokens`: the space that it used in addition to these blocks. At most `max_blocks` are remembered.
        """
        idle = self._idle
        newest = self._first + len(self._blocks) - 1
        before = len(idle)
        for key in keys[in_use:]:
            if key not in idle:
                idle[key] = newest
        self._blocks[-1] += len(idle) - before
        self._rest[-1] += rest_tokens
        if self._blocks[-1] >= SEGMENT_BLOCKS:
            self._blocks.append(0)
            self._rest.append(0.0)
            self._between.append(0.0)
            if len(self._blocks) > self._compact_at:
                self._compact()
        while len(idle) > max_blocks:
            for _ in range(self._blocks.pop(0)):
                idle.popitem(last=False)
            del self._rest[0], self._between[0]
            self._first += 1
            if not self._blocks:
                self._blocks, self._rest, self._between = [0], [0.0], [0.0]

    def _compact(self) -> None:
        """Remove segments whose blocks were all used again; their rest then lies between other segments. Without this
        each request of a long conversation would leave a segment for ever.
        """
        newest = len(self._blocks) - 1
        blocks: list[int] = []
        rest: list[float] = []
        between: list[float] = []
        numbers: dict[int, int] = {}
        passed = 0.0
        for at, count in enumerate(self._blocks):
            passed += self._between[at]
            if count or at == newest:
                numbers[self._first + at] = len(blocks)
                blocks.append(count)
                rest.append(self._rest[at])
                between.append(passed)
                passed = 0.0
            else:
                passed += self._rest[at]
        for key, segment in self._idle.items():
            self._idle[key] = numbers[segment]
        self._first, self._blocks, self._rest, self._between = 0, blocks, rest, between
        self._compact_at = 2 * len(blocks) + FEW_SEGMENTS

    def start_again(self) -> None:
        """The endpoint is not the one whose size was restored: nothing is known of this one."""
        self.size = SizeEstimate()
        self.forget()

    def forget(self, *, undo_misses: bool = False) -> None:
        """The endpoint lost its cached blocks; the size is the same. `undo_misses`: the latest misses were due to
        that.
        """
        if undo_misses:
            self.size.undo_misses()
            self._shared.undo_misses()
        self._idle.clear()
        self._first, self._blocks, self._rest, self._between = 0, [0], [0.0], [0.0]
        self._compact_at = FEW_SEGMENTS
