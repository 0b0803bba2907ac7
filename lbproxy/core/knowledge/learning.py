"""How a value is learned: a bounded step towards each sample, and a count of the samples.

A value is assumed until there was one. Policies do not care; whoever shows it must not show a guess as a finding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class Samples:
    """Of how many samples a value is, by the names in `core.observed.learned`. 0: it is assumed."""

    prefill_ms_per_token: int = 0
    base_ms: int = 0
    gap_ms: int = 0
    bytes_per_token: int = 0
    answer_tokens: int = 0
    hit_ratio: int = 0
    adapter_load_ms: int = 0


def clip(value: float, low: float, high: float) -> float:
    """The nearest within the two."""
    return min(high, max(low, value))


def step(base_ms: float, took_ms: float) -> float:
    """A fixed time, 3 % nearer to a sample."""
    return clip(base_ms * math.exp(math.copysign(0.03, took_ms - base_ms)), 0.5, 10_000.0)
