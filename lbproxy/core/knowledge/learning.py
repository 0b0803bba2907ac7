# SPDX-License-Identifier: Apache-2.0
"""How a value is learned: a bounded step towards each sample, and a count of the samples.

Without samples a value is an assumption. Policies use it all the same; displays must mark it as assumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

SAVED_SAMPLES: Final = 100.0
"""What was saved before a restart counts as at most this many samples, so that new ones soon overrule it."""

MEDIA_TOKENS: Final = 500.0
"""The weight of the assumption that engines count media as they are estimated: that of so many tokens, of half a
screenshot."""
MIN_SCALE: Final = 0.02
MAX_SCALE: Final = 20.0
KEPT: Final = 0.98
"""Of the weight of earlier samples, with each new one."""


@dataclass
class Samples:
    """How many samples a value has, by its name in `core.observed.learned`. 0: it is assumed."""

    prefill_ms_per_token: int = 0
    base_ms: int = 0
    gap_ms: int = 0
    bytes_per_token: int = 0
    answer_tokens: int = 0
    hit_ratio: int = 0
    adapter_load_ms: int = 0


def saved_samples(counts: Mapping[str, float]) -> Samples:
    """The sample counts that were saved, by the names in `Samples`."""
    return Samples(**{name: int(count) for name, count in counts.items()})


def clip(value: float, low: float, high: float) -> float:
    """Clip `value` to the range from `low` to `high`."""
    return min(high, max(low, value))


def step(base_ms: float, took_ms: float) -> float:
    """A fixed time, moved 3 % towards a sample."""
    return clip(base_ms * math.exp(math.copysign(0.03, took_ms - base_ms)), 0.5, 10_000.0)


class MediaScale:
    """What engines count for images and other media, relative to the estimate (`core.requests.media`)."""

    def __init__(self, scale: float = 1.0) -> None:
        """`scale`: by default it is assumed; another one was learned before a restart."""
        self.scale = scale
        self.samples = int(scale != 1.0)
        self._estimated, self._reported = MEDIA_TOKENS, MEDIA_TOKENS * scale

    def learn(self, reported: float, estimated: float) -> None:
        """Learn from the media of a prompt: the tokens that its text does not explain, and the estimate. Large media
        count for more: beside small ones, what the text is wrong by is more than they have.
        """
        if reported > 0.0:
            self._estimated = KEPT * self._estimated + estimated
            self._reported = KEPT * self._reported + clip(reported, MIN_SCALE * estimated, MAX_SCALE * estimated)
            self.scale = self._reported / self._estimated
            self.samples += 1
