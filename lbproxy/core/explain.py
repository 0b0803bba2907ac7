"""What is kept of a decision so that it can be explained later: who was asked, what each costs, who was left out.

A `Decision` is made in the same breath as the choice, from lists that are there anyway; what the costs consist of is
worked out when somebody asks (`Policy.explain` takes down what that needs). Bounded: of a large fleet the cheapest
`MAX_SHOWN` candidates are kept, and as many of each kind that was left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lbproxy.core.pricing import Policy, Prices
from lbproxy.core.types import Endpoint, EndpointState, InferenceRequest

MAX_SHOWN = 16


@dataclass(slots=True)
class Decision:
    """One placement."""

    policy: Policy
    at: float
    chosen: Endpoint
    candidates: int
    """How many were priced."""
    shown: list[Endpoint]
    """The cheapest of them. The chosen one is among them; the first, if they are not all."""
    costs: list[float]
    """What those cost. Empty: there was nobody to compare with, and the policy was not asked."""
    wait_ms: float | None
    """How long the chosen one's prefill queue was, if the policy knows."""
    parts: Callable[[], list[dict[str, float]]]
    """See `Policy.explain`."""
    left_out: Sequence[tuple[Endpoint, str]] = ()
    """Endpoints that take requests and got no turn, and why: at most MAX_SHOWN."""
    absent: Sequence[tuple[Endpoint, str]] = ()
    """Endpoints that took no requests at all: at most MAX_SHOWN."""

    @property
    def cost(self) -> float | None:
        """Of the chosen one."""
        return self.costs[self.shown.index(self.chosen)] if self.costs else None

    def breakdown(self) -> list[dict[str, float]]:
        """For each of `shown` what its cost consists of; the values of one add up to its cost."""
        return self.parts() or [{"cost": cost} for cost in self.costs]

    def first_byte_ms(self) -> float | None:
        """How long the first byte was expected to take from here; None if the policy expects nothing."""
        wanted = self.policy.first_byte_parts
        if not wanted or not self.costs:
            return None
        parts = self.breakdown()[self.shown.index(self.chosen)]
        return sum(value for name, value in parts.items() if name in wanted)


def alone(policy: Policy, chosen: EndpointState, now: float) -> Decision:
    """There was one candidate, and no need to price it."""
    return Decision(policy, now, chosen.endpoint, 1, [chosen.endpoint], [], None, list)


def decision(
    policy: Policy,
    request: InferenceRequest,
    candidates: Sequence[EndpointState],
    prices: Prices,
    index: int,
    now: float,
) -> Decision:
    """`candidates[index]` is taken. Call it before anything changes."""
    count, waits = len(candidates), prices.waits_ms
    wait_ms = None if waits is None else waits[index]
    parts: Callable[[], list[dict[str, float]]]
    if count <= MAX_SHOWN:
        costs = prices.costs
        shown = [state.endpoint for state in candidates]
        parts = policy.explain(request, candidates, prices, shown=range(count), now=now)
    else:
        indices = _cheapest(prices.costs, index)
        costs = [prices.costs[n] for n in indices]
        shown = [candidates[n].endpoint for n in indices]
        parts = policy.explain(request, candidates, prices, shown=indices, now=now)
    return Decision(policy, now, candidates[index].endpoint, count, shown, costs, wait_ms, parts)


def _cheapest(costs: list[float], index: int) -> list[int]:
    """Of many: the chosen one, and the cheapest of the others."""
    most = sorted(costs)[MAX_SHOWN - 1]
    return [index, *[n for n, cost in enumerate(costs) if cost <= most and n != index][: MAX_SHOWN - 1]]


def compact(made: Decision) -> str:
    """One line of ASCII: the endpoint, its cost and what that consists of, of how many, and who came next."""
    fields = [f"endpoint={made.chosen.name}"]
    if made.cost is not None:
        parts = made.breakdown()[made.shown.index(made.chosen)]
        fields.append(f"cost={made.cost:.1f}")
        fields += [f"{name}={value:.1f}" for name, value in parts.items() if round(value, 1)]
    fields.append(f"candidates={made.candidates}")
    others = [(cost, one.name) for one, cost in zip(made.shown, made.costs, strict=False) if one is not made.chosen]
    if others:
        cost, name = min(others)
        fields.append(f"next={name}:{cost:.1f}")
    return "; ".join(fields)
