"""What is kept of a decision so that it can be explained later: who was asked, what each costs, who was left out.

A `Decision` is made in the same breath as the choice, from lists that are there anyway; what the costs consist of is
worked out when somebody asks. What that needs is copied at the decision (`Policy.explain`), which takes some µs, and
what is remembered has left the processor's caches when it is forgotten. So at most `EXPLAINED_PER_S` are made a second
about requests that nothing is special about; one that waited, that is tried again, or whose client asks, always has its
own. Bounded: of a large fleet the cheapest `MAX_SHOWN` candidates are kept, and as many of each kind that was left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lbproxy.core.pricing import Policy, Prices
from lbproxy.core.types import Endpoint, EndpointState, Ticket

MAX_SHOWN = 16
EXPLAINED_PER_S = 500
"""Half a percent of a core; and of more a second nobody could look at the one that he means before it is forgotten."""


class Decision:
    """One placement."""

    left_out: Sequence[tuple[Endpoint, str]] = ()
    """Endpoints that take requests and got no turn, and why: at most MAX_SHOWN."""
    parts: Callable[[], list[dict[str, float]]] = list
    """See `Policy.explain`."""

    def __init__(
        self,
        policy: Policy,
        at: float,
        chosen: EndpointState,
        candidates: Sequence[EndpointState],
        costs: Sequence[float],
        absent: Sequence[tuple[Endpoint, str]],
    ) -> None:
        self.policy = policy
        self.at = at
        self._chosen = chosen
        self.candidates = len(candidates)
        """How many could be asked."""
        self._shown = candidates
        self.costs = costs
        """Of `shown`. Empty: there was nobody to compare with, and the policy was not asked."""
        self.absent = absent
        """Endpoints that took no requests at all, and why: at most MAX_SHOWN."""

    @property
    def chosen(self) -> Endpoint:
        """The endpoint that got it."""
        return self._chosen.endpoint

    @property
    def shown(self) -> list[Endpoint]:
        """The cheapest candidates. The chosen one is among them; the first, if they are not all."""
        return [state.endpoint for state in self._shown]

    @property
    def place(self) -> int:
        """Of the chosen one in `shown`."""
        return self._shown.index(self._chosen)

    @property
    def cost(self) -> float | None:
        """Of the chosen one."""
        return self.costs[self.place] if self.costs else None

    def breakdown(self) -> list[dict[str, float]]:
        """For each of `shown` what its cost consists of; the values of one add up to its cost."""
        return self.parts() or [{"cost": cost} for cost in self.costs]

    def first_byte_ms(self) -> float | None:
        """How long the first byte was expected to take from here; None if the policy expects nothing."""
        wanted = self.policy.first_byte_parts
        if not wanted or not self.costs:
            return None
        return sum(value for name, value in self.breakdown()[self.place].items() if name in wanted)

    def take_down(self, ticket: Ticket, prices: Prices) -> None:
        """Keep what the costs consist of. Call it before anything changes."""
        candidates, costs = self._shown, prices.costs
        kept: Sequence[int] = range(len(candidates))
        if len(candidates) > MAX_SHOWN:
            kept = cheapest(costs, candidates.index(self._chosen))
            self._shown = [candidates[index] for index in kept]
            self.costs = [costs[index] for index in kept]
        self.parts = self.policy.explain(ticket.request, candidates, prices, shown=kept, now=self.at)


def cheapest(costs: Sequence[float], index: int) -> list[int]:
    """Of many: `index`, and the cheapest of the others; MAX_SHOWN in all."""
    most = sorted(costs)[MAX_SHOWN - 1]
    return [index, *[n for n, cost in enumerate(costs) if cost <= most and n != index][: MAX_SHOWN - 1]]


class Explainer:
    """Says which decisions are explained."""

    def __init__(self) -> None:
        self._left = 0
        self._since = float("-inf")

    def wants(self, ticket: Ticket, now: float) -> bool:
        """Whether the decision about `ticket` is to be explained."""
        if now - self._since >= 1.0:
            self._since = now
            self._left = EXPLAINED_PER_S
        self._left -= 1
        return self._left >= 0 or ticket.wait is not None or bool(ticket.avoid) or ticket.request.explain


def compact(made: Decision) -> str:
    """One line of ASCII: the endpoint, its cost and what that consists of, of how many, and who came next."""
    fields = [f"endpoint={made.chosen.name}"]
    if made.cost is not None:
        fields.append(f"cost={made.cost:.1f}")
        parts = made.breakdown()
        fields += [f"{name}={value:.1f}" for name, value in parts[made.place].items() if round(value, 1)]
    fields.append(f"candidates={made.candidates}")
    others = [(cost, one.name) for one, cost in zip(made.shown, made.costs, strict=False) if one is not made.chosen]
    if others:
        cost, name = min(others)
        fields.append(f"next={name}:{cost:.1f}")
    return "; ".join(fields)
