"""What endpoints' weights say of their speeds before any was measured.

A weight is a guess of the operator's: an endpoint of twice the weight is taken to prefill twice as fast, until its
first prefill shows how fast it is; from there `core.knowledge.load_model` learns as always, beginning at the guess. Of
decode nothing is assumed: in the simulation a wrong guess cost more there than a right one brought. Only the
proportions of weights count. Invariant: where all are equal, nothing is assumed, and no figure changes.
"""

from __future__ import annotations

from collections.abc import Collection
from math import log
from typing import Final

from lbproxy.core.knowledge.learning import clip
from lbproxy.core.knowledge.load_model import LoadModel

MOST: Final = log(2.0)
"""Twice or half the speed of the geometric mean at most, in ln: more is a mistake, or the weight of an SRV record,
which says how much is sent somewhere and not how fast it is."""


def assume_speeds(weighted: Collection[tuple[float, LoadModel]]) -> None:
    """Take the weights of a pool's endpoints for the speeds of those that have shown none. O(endpoints)."""
    weights = [weight for weight, _ in weighted]
    if len(set(weights)) > 1:
        mean = sum(map(log, weights)) / len(weights)
        guesses = [clip(mean - log(weight), -MOST, MOST) for weight in weights]
    else:
        guesses = [0.0] * len(weights)  # exactly, which a mean of logarithms is not
    for (_, load), guess in zip(weighted, guesses, strict=True):
        load.speed.assume(guess)
