"""What a routing policy is, and the table of those that the settings can name.

A policy prices the candidates of one request; the Balancer takes the cheapest and counts the request there in the same
breath. A policy only reads states: it remembers nothing of its own that a placement would have to undo. It does not
decide who is a candidate (health, drain, model, concurrency limit do, before).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from lbproxy.config import RoutingSettings
from lbproxy.core.scorers import SCORERS, Scorer
from lbproxy.core.types import EndpointState, InferenceRequest


class Policy(Protocol):
    """Prices endpoints."""

    def price(self, request: InferenceRequest, candidates: Sequence[EndpointState], *, now: float) -> list[float]:
        """The cost of placing `request` on each candidate, in their order; the lowest wins, ties at random.

        Costs are finite. The unit is the policy's own: only the order matters.
        """
        ...


class LeastRequest:
    """Requests on the endpoint: our own in flight now, plus what the last scrape saw there of other senders.

    Gauges alone lag by a scrape, and every request of a burst would see the same picture; own counts alone do not
    see the neighbours' load. With stale gauges it is judged by its in-flight count alone.
    """

    def price(self, request: InferenceRequest, candidates: Sequence[EndpointState], *, now: float) -> list[float]:
        """Requests on each endpoint."""
        return [
            state.in_flight if state.others is None or now > state.fresh_until else state.in_flight + state.others
            for state in candidates
        ]


class RoundRobin:
    """The endpoint that was chosen longest ago. Over a fixed set this is the classic rotation; one that returns after
    an outage gets one request at once and then its turn, not all those it missed.
    """

    def price(self, request: InferenceRequest, candidates: Sequence[EndpointState], *, now: float) -> list[float]:
        """The pool-wide number of each endpoint's last placement."""
        return [state.placed_seq for state in candidates]


class Random:
    """Any candidate, each as likely: the tie-break does it."""

    def price(self, request: InferenceRequest, candidates: Sequence[EndpointState], *, now: float) -> list[float]:
        """All equal."""
        return [0.0] * len(candidates)


class Weighted:
    """Scorers, each with a weight: the cost is minus the weighted sum of their scores."""

    def __init__(self, weights: Iterable[tuple[str, float]]) -> None:
        self._scorers: list[tuple[Scorer, float]] = [(SCORERS[name], weight) for name, weight in weights]

    def price(self, request: InferenceRequest, candidates: Sequence[EndpointState], *, now: float) -> list[float]:
        """Minus the weighted sum, so that the best score is the lowest cost."""
        costs = [0.0] * len(candidates)
        for scorer, weight in self._scorers:
            scores = scorer(request, candidates, now=now)
            costs = [cost - weight * score for cost, score in zip(costs, scores, strict=True)]
        return costs


# The scorers and weights of the Gateway API Inference Extension's default profile: queue 2, KV-cache utilisation 2,
# with its max-score picker. Its prefix scorer (weight 3) needs a model of the prefix caches, which is not there yet.
GIE_WEIGHTS = (("queue", 2.0), ("kv-utilization", 2.0))

POLICIES: Mapping[str, Callable[[RoutingSettings], Policy]] = {
    "least-request": lambda _: LeastRequest(),
    "round-robin": lambda _: RoundRobin(),
    "random": lambda _: Random(),
    "gie": lambda _: Weighted(GIE_WEIGHTS),
    "weighted": lambda settings: Weighted((settings.scorers or {}).items()),
}


def make_policy(settings: RoutingSettings) -> Policy:
    """The policy that the settings name."""
    return POLICIES[settings.policy](settings)
