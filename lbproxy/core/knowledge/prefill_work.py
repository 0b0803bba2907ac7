# SPDX-License-Identifier: Apache-2.0
"""How much work a prefill is, in tokens with little context before them.

Each token attends to all tokens before it, so a token after a long context, cached or not, takes longer. A speed that
is learned from all prefills does not show that: 1,000 new tokens at the end of a conversation of 23,000 are half as
much work again.
"""

from __future__ import annotations

from typing import Final

PER_CONTEXT: Final = 1.0 / 30_000.0
"""A token takes twice as long after this much context: 26,000 to 37,000 tokens in the measured step times of dense
models with 8 to 70 thousand million parameters (docs/simulator.md)."""
SHORT: Final = 8000.0
"""Context up to this length is part of the learned speed: with shorter prompts only, nothing changes."""


def work_tokens(uncached: float, cached: float) -> float:
    """The work of a prompt with `uncached` tokens to compute after `cached` ones."""
    beyond = cached + 0.5 * uncached - SHORT
    return uncached * (1.0 + PER_CONTEXT * beyond) if beyond > 0.0 else uncached
