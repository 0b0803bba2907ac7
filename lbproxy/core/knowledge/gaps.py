"""Inter-token gaps, learned as a line over the context tokens on an endpoint: `gap_ms + gap_per_token_ms * context`.

What context adds to a step is a property of the model and its hardware. So the slope is learned by all endpoints
together, each from what is off its *own* means, and from gaps less the prefills that were in them: busy endpoints have
more context and more prefills, which made lines learned by each alone five times too steep. How slow an endpoint is
beside that line, prefills included, is its own as far as it is no chance: what its blocks of samples scatter by is
taken off, and few samples say nothing.
"""

from __future__ import annotations

import math
from typing import Final

from lbproxy.core.knowledge.learning import clip

MEMORY: Final = 1000.0
"""Samples of an endpoint over which is averaged."""
FEW: Final = 5
"""With so many samples an endpoint counts half for itself, half for one like the others; with fewer not at all."""
COLD: Final = 2.0
"""A server may be slow at its first streams: its first `FEW` samples are taken to be so much off the line at most, and
for twice as many a new one counts twice."""
BLOCK: Final = 24
"""Samples that are averaged before they are compared: those that follow each other have the same context and prefills,
and so scatter less than they are uncertain."""
BLOCKS: Final = 40
"""Over which the scatter is averaged."""
CERTAIN: Final = 5.0
"""Standard errors by which an endpoint must be off the line. More counts for what it is, less the same share."""
FIRST_BLOCKS: Final = 3
"""With fewer the scatter is not known, and an endpoint must be off by `OWN_GAP`, in ln."""
OWN_GAP: Final = 0.25
LEAST_DECODE: Final = 0.3
"""A gap is decode at least by this share, whatever prefills are believed to have taken of it."""
LEAST_SLOPE: Final = 0.2
MOST_SLOPE: Final = 1.0
"""The share of the mean gap that is due to context, at least and at most."""


class PoolGaps:
    """The line of all endpoints together."""

    __slots__ = ("_context", "_cov", "_gap", "_square", "count", "gap_ms", "gap_per_token_ms")

    def __init__(self, gap_ms: float, gap_per_token_ms: float) -> None:
        self.gap_ms = gap_ms
        self.gap_per_token_ms = gap_per_token_ms
        self.count = 0
        self._context = self._gap = self._square = self._cov = 0.0

    def learn(self, context: float, gap_ms: float, square: float, cov: float, endpoints: int) -> None:
        """A sample of one of so many `endpoints`. `square`, `cov`: of what is off that endpoint's own means."""
        self.count += 1
        weight = max(1.0 / (MEMORY * max(1, endpoints)), _weight(self.count, max(1, endpoints)))
        self._context += weight * (context - self._context)
        self._gap += weight * (gap_ms - self._gap)
        self._square += weight * (square - self._square)
        self._cov += weight * (cov - self._cov)
        ratio = self._gap / max(1.0, self._context)
        slope = self._cov / self._square if self._square > 0.0 else 0.0
        self.gap_per_token_ms = clip(slope, LEAST_SLOPE * ratio, MOST_SLOPE * ratio)
        self.gap_ms = max(0.0, self._gap - self.gap_per_token_ms * self._context)


class Gaps:
    """One endpoint's, beside the pool's."""

    __slots__ = (
        *("_block_context", "_block_count", "_block_gap", "_blocks", "_off", "_scatter"),
        *("_context", "_count", "_decode", "mean_ms", "pool"),
    )

    def __init__(self, pool: PoolGaps) -> None:
        self.pool = pool
        self.mean_ms = pool.gap_ms
        """Mean gap of late, prefills included."""
        self._count = 0
        self._context = self._decode = 0.0
        self._block_count = 0
        self._block_context = self._block_gap = 0.0
        self._blocks = 0
        self._off = self._scatter = 0.0  # mean and variance of how far blocks are off the line, in ln

    def learn(self, context: float, gap_ms: float, prefill_ms: float, endpoints: int) -> None:
        """A gap at so much `context`, of which prefills took `prefill_ms`; `endpoints`: how many learn the line."""
        decode_ms = max(LEAST_DECODE * gap_ms, gap_ms - prefill_ms)
        self._count += 1
        own_ms = gap_ms
        if self._count <= FEW <= self.pool.count:
            own_ms = min(gap_ms, COLD * self._expected_ms(context))
        if self._count == 1:
            self._context, self.mean_ms, self._decode = context, own_ms, decode_ms
        weight = max(1.0 / MEMORY, _weight(self._count, 1))
        off_context, off_decode = context - self._context, decode_ms - self._decode
        self._context += weight * off_context
        self._decode += weight * off_decode
        self.mean_ms += weight * (own_ms - self.mean_ms)
        rest = 1.0 - weight
        self.pool.learn(context, gap_ms, rest * off_context * off_context, rest * off_context * off_decode, endpoints)
        self._block_count += 1
        self._block_context += context
        self._block_gap += gap_ms
        if self._block_count == BLOCK:
            self._compare()

    def _compare(self) -> None:
        """A block is full: how far is it off the line, and how much do blocks scatter?"""
        off = math.log(max(0.1, self._block_gap / BLOCK) / max(0.1, self._expected_ms(self._block_context / BLOCK)))
        self._block_count = 0
        self._block_context = self._block_gap = 0.0
        self._blocks = min(BLOCKS, self._blocks + 1)
        weight = 1.0 / self._blocks
        change = off - self._off
        self._off += weight * change
        self._scatter = (1.0 - weight) * (self._scatter + weight * change * change)

    def slowness(self) -> float:
        """Gaps here, relative to the pool's line at the same context; the nearer to 1, the more chance may be in it."""
        if self._count < FEW:
            return 1.0
        off = math.log(max(0.1, self.mean_ms) / max(0.1, self._expected_ms(self._context)))
        off *= self._count / (self._count + FEW)
        if self._blocks < FIRST_BLOCKS:
            return math.exp(off) if abs(off) > OWN_GAP else 1.0
        error = CERTAIN * CERTAIN * self._scatter / self._blocks
        return math.exp(off * (1.0 - error / (off * off))) if off * off > error else 1.0

    def _expected_ms(self, context: float) -> float:
        return self.pool.gap_ms + self.pool.gap_per_token_ms * context


def _weight(count: int, endpoints: int) -> float:
    """Of the latest of so many samples of so many endpoints."""
    return 2.0 / (count + 1) if count <= 2 * FEW * endpoints else 1.0 / count
