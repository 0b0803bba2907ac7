"""How much work a prefill is, counted in tokens that have little before them.

Each token attends to all that stand before it, so a token behind a long context, cached or not, takes longer. A speed
that is learned from all prefills cannot know it: the same 1,000 new tokens are half as much work again at the end of a
conversation of 23,000.
"""

from __future__ import annotations

from typing import Final

PER_CONTEXT: Final = 1.0 / 30_000.0
"""A token takes as long again behind so many more tokens of context: 26,000 to 37,000 in the step times that were
measured for dense models of 8 to 70 thousand million parameters (docs/simulator.md)."""
SHORT: Final = 8000.0
"""Tokens of context that are part of the learned speed: with prompts that are all shorter nothing is changed."""


def work_tokens(uncached: float, cached: float) -> float:
    """Of a prompt with so many tokens to compute behind so many cached ones."""
    beyond = cached + 0.5 * uncached - SHORT
    return uncached * (1.0 + PER_CONTEXT * beyond) if beyond > 0.0 else uncached
