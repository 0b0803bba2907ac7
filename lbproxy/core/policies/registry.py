# SPDX-License-Identifier: Apache-2.0
"""The policies that only use counts and gauges, the weighted scorers, and the table of all policies.

The interface is in `core.policies.policy`, the default for model servers in `core.policies.adaptive`, and policies for
comparison are in `core.policies.baselines`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeAlias, cast

from lbproxy.config.sections.routing import RoutingSettings
from lbproxy.core.caches.prefix_index import ENTRY_BYTES
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.policies.adaptive import Adaptive
from lbproxy.core.policies.baselines import (
    BASELINE_BLOCK_BYTES,
    CacheAware,
    Dynamo,
    GieTree,
    LlmD,
    LMetric,
    MinTtft,
    Preble,
    PrefixHash,
    TwoChoices,
)
from lbproxy.core.policies.policy import Context, Policy, Prices
from lbproxy.core.policies.scorers import READ_LOADS, SCORERS, Scorer
from lbproxy.core.requests.request import InferenceRequest


class LeastRequest(Policy):
    """Requests on the endpoint, with this one, by its weight: our own in flight now, plus those of others in the last
    scrape.

    Gauges alone lag by a scrape, so that every request of a burst would see the same values; own counts alone miss the
    load of other clients. An endpoint with stale gauges is judged by its in-flight count alone.
    """

    reads_weights = True

    def price(self, request: InferenceRequest, candidates: Sequence[EndpointState], context: Context) -> Prices:
        """Requests that each endpoint would have, by its weight."""
        now = context.now
        if not context.explains:
            return Prices([(_requests(state, now) + 1.0) / state.endpoint.weight for state in candidates])
        seen = [(state.requests, _requests(state, now), state.endpoint.weight) for state in candidates]
        return Prices([(both + 1.0) / weight for _, both, weight in seen], notes=seen)

    def explain(self, notes: object, *, shown: Sequence[int]) -> list[dict[str, float]]:
        """Ours, others', and this one, all by the weight."""
        return [
            {"in_flight": ours / weight, "others": (both - ours) / weight, "this_one": 1.0 / weight}
            for ours, both, weight in map(cast(_Counts, notes).__getitem__, shown)
        ]


_Counts: TypeAlias = list[tuple[int, float, float]]


def _requests(state: EndpointState, now: float) -> float:
    return state.requests if state.others is None or now > state.fresh_until else state.requests + state.others


class RoundRobin(Policy):
    """The endpoint that was chosen longest ago. Over a fixed set this is round robin; an endpoint that returns after an
    outage gets one request at once and then its turn, not all that it missed.
    """

    def price(self, request: InferenceRequest, candidates: Sequence[EndpointState], context: Context) -> Prices:
        """The pool-wide number of each endpoint's last placement."""
        return Prices([state.placed_seq for state in candidates])


class Random(Policy):
    """A random candidate, with probabilities proportional to the weights."""

    reads_weights = True

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def price(self, request: InferenceRequest, candidates: Sequence[EndpointState], context: Context) -> Prices:
        """An exponentially distributed random number for each, with its weight as the rate: the lowest is chosen."""
        return Prices([self._rng.expovariate(state.endpoint.weight) for state in candidates])


class Weighted(Policy):
    """Weighted scorers: the cost is minus the weighted sum of their scores."""

    def __init__(self, weights: Iterable[tuple[str, float]]) -> None:
        weights = list(weights)
        self._scorers: list[tuple[str, Scorer, float]] = [(name, SCORERS[name], weight) for name, weight in weights]
        if any(name in READ_LOADS for name, _ in weights):
            self.block_bytes = BASELINE_BLOCK_BYTES

    def price(self, request: InferenceRequest, candidates: Sequence[EndpointState], context: Context) -> Prices:
        """Minus the weighted sum, so that the best score is the lowest cost."""
        costs = [0.0] * len(candidates)
        notes = []
        for _, scorer, weight in self._scorers:
            scores = scorer(request, candidates, now=context.now)
            notes.append(scores)
            costs = [cost - weight * score for cost, score in zip(costs, scores, strict=True)]
        return Prices(costs, notes=notes)

    def explain(self, notes: object, *, shown: Sequence[int]) -> list[dict[str, float]]:
        """Each scorer's share."""
        assert isinstance(notes, list)
        return [
            {name: -weight * scores[n] for (name, _, weight), scores in zip(self._scorers, notes, strict=True)}
            for n in shown
        ]


# The scorers and weights of the Gateway API Inference Extension's default profile, with its max-score picker.
GIE_WEIGHTS = (("queue", 2.0), ("kv-utilization", 2.0), ("prefix", 3.0))

POLICIES: Final[Mapping[str, Callable[[RoutingSettings, random.Random], Policy]]] = {
    "adaptive": lambda _, __: Adaptive(),
    "least-request": lambda _, __: LeastRequest(),
    "round-robin": lambda _, __: RoundRobin(),
    "random": lambda _, rng: Random(rng),
    "p2c": lambda _, rng: TwoChoices(rng),
    "gie": lambda _, __: Weighted(GIE_WEIGHTS),
    "gie-tree": lambda _, rng: GieTree(rng),
    "llm-d": lambda _, __: LlmD(),
    "cache-aware": lambda _, __: CacheAware(),
    "prefix-hash": lambda _, __: PrefixHash(),
    "preble": lambda _, __: Preble(),
    "dynamo": lambda _, __: Dynamo(),
    "lmetric": lambda _, __: LMetric(),
    "min-ttft": lambda _, __: MinTtft(),
    "weighted": lambda settings, _: Weighted((settings.scorers or {}).items()),
}


def make_policy(settings: RoutingSettings, rng: random.Random | None = None) -> Policy:
    """The configured policy. `rng`: for policies that draw random numbers; None = the same numbers each time."""
    policy = POLICIES[settings.policy](settings, rng or random.Random(0))  # noqa: S311 - not for secrets
    policy.name = settings.policy
    policy.split_above = settings.split
    policy.index_entries = settings.prefix_memory // ENTRY_BYTES
    return policy
