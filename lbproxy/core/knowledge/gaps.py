# SPDX-License-Identifier: Apache-2.0
"""Inter-token gaps, learned as a line over the context tokens at an endpoint: `gap_ms + gap_per_token_ms * context`.

What context adds to a step is a property of the model and its hardware. So the slope is learned from all endpoints
together: from each endpoint's deviations from its *own* means, and from gaps without the prefills in them. Busy
endpoints have more context and more prefills, which made separately learned lines five times too steep. How slow an
endpoint is relative to that line, prefills included, is learned for each endpoint, as far as it is significant: the
scatter of its blocks of samples is deducted, and few samples show nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from lbproxy.core.knowledge.learning import SAVED_SAMPLES, clip

MEMORY: Final = 1000.0
"""Samples of an endpoint over which means are taken."""
MIN_SAMPLES: Final = 5
"""With this many samples an endpoint's own mean has a weight of one half; with fewer none."""
COLD_FACTOR: Final = 2.0
"""A server may be slow at its first streams: its first `MIN_SAMPLES` samples count as at most this factor above the
line, and for twice as many samples a new one counts twice."""
BLOCK_SAMPLES: Final = 24
"""Samples that are averaged before they are compared: consecutive samples have the same context and prefills, and so
scatter less than their uncertainty."""
MAX_BLOCKS: Final = 40
"""Blocks over which the scatter is averaged."""
SIGNIFICANT_ERRORS: Final = 5.0
"""An endpoint must deviate from the line by this many standard errors. A larger deviation is reduced by the same
share."""
MIN_BLOCKS: Final = 3
"""With fewer blocks the scatter is not known, and an endpoint must deviate by `OWN_GAP`, in ln."""
OWN_GAP: Final = 0.25
MIN_DECODE_SHARE: Final = 0.3
"""At least this share of a gap is decode, however much of it prefills are assumed to have taken."""
MIN_SLOPE_SHARE: Final = 0.2
MAX_SLOPE_SHARE: Final = 1.0
"""The minimum and maximum of the share of the mean gap that is due to context."""


class PoolGaps:
    """The line of all endpoints together."""

    def __init__(self, gap_ms: float, gap_per_token_ms: float) -> None:
        self.gap_ms = gap_ms
        self.gap_per_token_ms = gap_per_token_ms
        self.count = 0
        self._context = self._gap = self._square = self._cov = 0.0

    def learn(self, context: float, gap_ms: float, square: float, cov: float, endpoints: int) -> None:
        """Learn from a sample of one of `endpoints` endpoints. `square`, `cov`: of its deviations from that endpoint's
        own means.
        """
        self.count += 1
        weight = max(1.0 / (MEMORY * max(1, endpoints)), _weight(self.count, max(1, endpoints)))
        self._context += weight * (context - self._context)
        self._gap += weight * (gap_ms - self._gap)
        self._square += weight * (square - self._square)
        self._cov += weight * (cov - self._cov)
        ratio = self._gap / max(1.0, self._context)
        slope = self._cov / self._square if self._square > 0.0 else 0.0
        self.gap_per_token_ms = clip(slope, MIN_SLOPE_SHARE * ratio, MAX_SLOPE_SHARE * ratio)
        self.gap_ms = max(0.0, self._gap - self.gap_per_token_ms * self._context)

    def save(self) -> dict[str, float]:
        """The line and the means behind it, for `restore`."""
        return {
            "count": self.count,
            "gap_ms": self.gap_ms,
            "gap_per_token_ms": self.gap_per_token_ms,
            "context": self._context,
            "mean_ms": self._gap,
            "square": self._square,
            "cov": self._cov,
        }

    def restore(self, saved: Mapping[str, float], share: float) -> None:
        """Start with what `save` returned. `share`: of the weight of its samples; 1 = it is new."""
        self.count = int(min(SAVED_SAMPLES, saved["count"]) * share)
        self.gap_ms, self.gap_per_token_ms = saved["gap_ms"], saved["gap_per_token_ms"]
        self._context, self._gap = saved["context"], saved["mean_ms"]
        self._square, self._cov = saved["square"], saved["cov"]


class Gaps:
    """The gaps of one endpoint, relative to the pool's."""

    def __init__(self, pool: PoolGaps) -> None:
        self.pool = pool
        self.mean_ms = pool.gap_ms
        """The recent mean gap, prefills included."""
        self._count = 0
        self._context = self._decode = 0.0
        self._block_count = 0
        self._block_context = self._block_gap = 0.0
        self._blocks = 0
        self._off = self._scatter = 0.0  # mean and variance of how far blocks deviate from the line, in ln

    def learn(self, context: float, gap_ms: float, prefill_ms: float, endpoints: int) -> None:
        """Learn from a gap at `context`, of which prefills took `prefill_ms`. `endpoints`: how many share the line."""
        decode_ms = max(MIN_DECODE_SHARE * gap_ms, gap_ms - prefill_ms)
        self._count += 1
        own_ms = gap_ms
        if self._count <= MIN_SAMPLES <= self.pool.count:
            own_ms = min(gap_ms, COLD_FACTOR * self._expected_ms(context))
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
        if self._block_count == BLOCK_SAMPLES:
            self._compare()

    def _compare(self) -> None:
        """Compare a complete block with the line, and update the scatter of blocks."""
        off = math.log(
            max(0.1, self._block_gap / BLOCK_SAMPLES) / max(0.1, self._expected_ms(self._block_context / BLOCK_SAMPLES))
        )
        self._block_count = 0
        self._block_context = self._block_gap = 0.0
        self._blocks = min(MAX_BLOCKS, self._blocks + 1)
        weight = 1.0 / self._blocks
        change = off - self._off
        self._off += weight * change
        self._scatter = (1.0 - weight) * (self._scatter + weight * change * change)

    def save(self) -> dict[str, float]:
        """The means and how they scatter, for `restore`; empty before there are any."""
        if not self._count:
            return {}
        return {
            "count": self._count,
            "context": self._context,
            "decode_ms": self._decode,
            "mean_ms": self.mean_ms,
            "blocks": self._blocks,
            "off": self._off,
            "scatter": self._scatter,
        }

    def restore(self, saved: Mapping[str, float], share: float) -> None:
        """Start with what `save` returned, after the pool has. `share`: of the deviation from the pool's line, and of
        the weight of the samples; 1 = it is new.
        """
        if not saved:
            return
        self._count = int(min(SAVED_SAMPLES, saved["count"]) * share)
        self._context, self._decode = saved["context"], saved["decode_ms"]
        expected_ms = max(0.1, self._expected_ms(self._context))
        self.mean_ms = expected_ms * math.exp(share * math.log(saved["mean_ms"] / expected_ms))
        self._blocks = min(MAX_BLOCKS, int(saved["blocks"] * share))
        self._off, self._scatter = saved["off"] * share, saved["scatter"]

    def slowness(self) -> float:
        """Gaps here relative to the pool's line at the same context; closer to 1 the less significant the
        deviation is.
        """
        if self._count < MIN_SAMPLES:
            return 1.0
        off = math.log(max(0.1, self.mean_ms) / max(0.1, self._expected_ms(self._context)))
        off *= self._count / (self._count + MIN_SAMPLES)
        if self._blocks < MIN_BLOCKS:
            return math.exp(off) if abs(off) > OWN_GAP else 1.0
        error = SIGNIFICANT_ERRORS * SIGNIFICANT_ERRORS * self._scatter / self._blocks
        return math.exp(off * (1.0 - error / (off * off))) if off * off > error else 1.0

    def _expected_ms(self, context: float) -> float:
        return self.pool.gap_ms + self.pool.gap_per_token_ms * context


def _weight(count: int, endpoints: int) -> float:
    """The weight of the latest of `count` samples of `endpoints` endpoints."""
    return 2.0 / (count + 1) if count <= 2 * MIN_SAMPLES * endpoints else 1.0 / count
