"""How large an endpoint's prefix cache is, learned from what its responses say was cached: for engines that do not say.

An engine evicts what was used longest ago. So a block is still there exactly if all that is in use, and all that was
used since the block was, fits into the cache beside it. That much is the block's *distance*, in tokens (the literature:
reuse or stack distance). When a request is placed, `CapacityLearner` notes how far its blocks are; at its end `usage`
says how many of them were there. One that was there at a distance of d says that the cache holds d; one that was not,
that it holds less.

What is remembered reaches beyond what the cache is believed to hold, so that a belief that is too low shows. As too low
costs far more than too high, a hit is believed at once, and a miss when the one before it says so too, and never
against hits from farther off; but each miss that hits speak against makes these count a little less.

Invariants: a key is remembered exactly while no request in flight uses it and its segment is not forgotten; `_blocks`
says how many keys each segment has, and `_rest` what else was used then that nobody can ask for again: answers. Empty
segments are at most as many as the others, and `FEW_SEGMENTS`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from math import inf, log
from typing import TYPE_CHECKING, Final, NamedTuple

from lbproxy.core.requests.prompt_keys import BlockKey

if TYPE_CHECKING:
    pass

SEGMENT_BLOCKS: Final = 16
"""The order of last use is kept by segments of so many blocks: 1.3 % of a cache of 300,000 tokens."""
MAX_STEPS: Final = 16
"""At most so many distances are noted of one prompt."""
FEW_KEYS: Final = 4
"""A prompt of fewer blocks says too little of how many tokens a block has."""
SLACK = 0.5, 0.03
"""Where in its prompt a block lies is known to so many blocks, and to this share of the way."""
REMEMBERED: Final = 1.5
"""Times the believed size: what is older is forgotten."""
DOUBT: Final = 0.99
"""What is left of a hit's word when a miss contradicts it. After a restart that nobody told of there are many such."""
GUESSED_TOKENS: Final = 2_000_000
"""Of a cache whose size nobody says. High: half the true size was found to cost far more than twice."""
FEW_SEGMENTS: Final = 64
"""So many are too few to look for empty ones."""
SMALLEST_TOKENS: Final = 100_000
"""Caches of servers that are worth balancing are hardly smaller."""


class Step(NamedTuple):
    """Blocks of a prompt, from `first` up to but without `end`, that are `distance` tokens away."""

    first: int
    end: int
    distance: float


class Size:
    """Of a cache, as far as hits and misses tell."""

    __slots__ = ("_before_misses", "_last_miss", "_least", "space_tokens", "tokens")

    def __init__(self) -> None:
        self.tokens = float(GUESSED_TOKENS)
        """The largest that it may well be."""
        self._least = 0.0
        """The farthest hit."""
        self._last_miss = inf
        self._before_misses: tuple[float, float, float] | None = None
        """What was known before the misses in a row that came last."""
        self.space_tokens = between(0.0, self.tokens)
        """What it is taken for by the price of space."""

    def learn(self, hit: float | None, miss: float | None) -> None:
        """Of one prompt: the distance of the farthest blocks that were there, and of the nearest that were not."""
        if hit is None and miss is not None:
            self._before_misses = self._before_misses or (self.tokens, self._least, self._last_miss)
        elif hit is not None:
            self._before_misses = None
        if hit is not None:
            self._least = max(self._least, hit)
            self.tokens = max(self.tokens, hit)
        if miss is not None:
            if miss < self._least:
                self._least *= DOUBT
            self.tokens = min(self.tokens, max(miss, self._last_miss, self._least))
            self._last_miss = miss
        self.space_tokens = between(self._least, self.tokens)

    def undo_misses(self) -> None:
        """The last of them said nothing of the size: the cache was lost."""
        if self._before_misses is not None:
            self.tokens, self._least, self._last_miss = self._before_misses
            self._before_misses = None
            self.space_tokens = between(self._least, self.tokens)

    def holds(self, distance: float) -> bool:
        """Blocks that far were there before."""
        return distance < self._least

    def limit(self, tokens: float) -> None:
        """It holds so much at most, as its engine says. What answers say counts more."""
        if self._last_miss < inf:
            tokens = min(tokens, self.tokens)
        self.tokens = max(tokens, self._least)
        self.space_tokens = between(self._least, self.tokens)


def between(least: float, most: float) -> float:
    """One size for a cache of between `least` and `most` tokens, when its inverse is to be right on average: the price
    of space is proportional to that. Any size between is as likely as its double: 315,000 if nothing is known.
    """
    least = max(least, SMALLEST_TOKENS)
    return most if least > 0.99 * most else log(most / least) / (1.0 / least - 1.0 / most)


class CapacityLearner:
    """One endpoint's. A call costs about 0.1 µs for each block in it."""

    __slots__ = ("_between", "_blocks", "_compact_at", "_first", "_idle", "_rest", "_shared", "listens", "size")

    def __init__(self, shared: Size) -> None:
        self.size = Size()
        """This endpoint's."""
        self._shared = shared
        """All endpoints', as if they were alike."""
        self.listens = False
        """Answers here say what was cached. Until one does, nothing is remembered."""
        self._idle: OrderedDict[BlockKey, int] = OrderedDict()
        """Key -> the number of its segment; the oldest first."""
        self._first = 0
        """The oldest segment's number."""
        self._blocks = [0]
        self._rest = [0.0]
        self._between = [0.0]
        """The rest between each segment and the one before it."""
        self._compact_at = FEW_SEGMENTS
        """How many segments there may be until the empty ones are given up."""

    def look_up(
        self, keys: Sequence[BlockKey], in_use: int, *, used_tokens: float, block_tokens: float
    ) -> tuple[Step, ...]:
        """A request with these keys starts, and its blocks are in use from now on. Returns how far they were, as far as
        the first keys are known without a gap: later steps are farther. `in_use`: how many of the first keys requests
        before it use; `used_tokens`: the space of these.
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
        """The first `blocks_hit` blocks of a prompt, of which `look_up` returned `steps`, were there."""
        blocks, share = SLACK
        surely_there, surely_not = blocks_hit * (1.0 - share) - blocks, blocks_hit * (1.0 + share) + blocks
        hit = max((step.distance for step in steps if step.first + 1 <= surely_there), default=None)
        miss = next((step.distance for step in steps if step.end - 1 >= surely_not), None)
        self.size.learn(hit, miss)
        self._shared.learn(hit, miss)

    def remember(self, keys: Sequence[BlockKey], in_use: int, *, rest_tokens: float, max_blocks: float) -> None:
        """A request that was prefilled is over. `in_use`: how many of its first keys others still use. `rest_tokens`:
        what it used beside these blocks. No more than `max_blocks` are remembered.
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
        """Give up segments of which each block was used again: what they hold lies between others from now on. Without
        this each request of a long conversation would leave one for ever.
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

    def forget(self, *, undo_misses: bool = False) -> None:
        """The endpoint lost what it had cached. Its size is the same. `undo_misses`: the last ones were of that."""
        if undo_misses:
            self.size.undo_misses()
            self._shared.undo_misses()
        self._idle.clear()
        self._first, self._blocks, self._rest, self._between = 0, [0], [0.0], [0.0]
        self._compact_at = FEW_SEGMENTS
