# SPDX-License-Identifier: Apache-2.0
"""What configured weights say of the endpoints' speeds before these are measured.

A weight is the operator's estimate: an endpoint of twice the weight is assumed to prefill twice as fast, until its
first prefill shows its speed. From there on `core.knowledge.load_model` learns as usual, starting at the assumption.
For decode nothing is assumed: in the simulation a wrong assumption cost more than a right one gained. Only the ratios
of weights count. Invariant: if all weights are equal, nothing is assumed, and no value changes.
"""

from __future__ import annotations

from collections.abc import Collection
from math import log
from typing import Final

from lbproxy.core.knowledge.learning import clip
from lbproxy.core.knowledge.load_model import LoadModel

MAX_LN_FACTOR: Final = log(2.0)
"""At most twice or half the speed of the geometric mean, in ln: a larger ratio is an error, or the weight of an SRV
record, which is about how much is sent there and not about speed."""


def assume_speeds(weighted: Collection[tuple[float, LoadModel]]) -> None:
    """Assume the weights of a pool's endpoints as speeds of those without measurements. O(endpoints)."""
    weights = [weight for weight, _ in weighted]
    if len(set(weights)) > 1:
        mean = sum(map(log, weights)) / len(weights)
        guesses = [clip(mean - log(weight), -MAX_LN_FACTOR, MAX_LN_FACTOR) for weight in weights]
    else:
        guesses = [0.0] * len(weights)  # exact, unlike a mean of logarithms
    for (_, load), guess in zip(weighted, guesses, strict=True):
        load.speed.assume(guess)
