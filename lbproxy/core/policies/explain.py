# SPDX-License-Identifier: Apache-2.0
"""What is kept of a decision for a later explanation: the candidates, the cost of each, and the excluded endpoints.

A `Decision` is made for every request, together with the choice, from lists that exist anyway; the parts of the costs
are computed only when they are read. Bounded: of more than `MAX_SHOWN` candidates those with the lowest costs are kept,
and as many excluded endpoints of each kind. That selection costs more in a larger fleet, so it is made for
`IN_FULL_PER_S` requests a second and for special ones: requests that waited, that are retried, or whose clients ask for
it. For other requests in such a fleet the chosen candidate and the next best are kept, with their costs alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Final, cast

from lbproxy.core.endpoints.endpoint import Endpoint
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.policies.policy import NO_PAIRS, Policy, partner_of

MAX_SHOWN: Final = 16
IN_FULL_PER_S: Final = 500
"""In a fleet of more than `MAX_SHOWN`."""


class Decision:
    """One placement. It is made for each request, so it only stores; everything else is computed on reading."""

    def __init__(  # noqa: PLR0913, PLR0917 - all that is kept
        self,
        policy: Policy,
        at: float,
        chosen_state: EndpointState,
        shown_states: Sequence[EndpointState],
        costs: Sequence[float] | None,
        notes: object,
        absent: Sequence[tuple[Endpoint, str]],
    ) -> None:
        self.policy = policy
        self.at = at
        self.chosen_state = chosen_state
        self.shown_states = shown_states
        self.candidates = len(shown_states)
        """How many endpoints could be asked."""
        self._costs = costs
        """None: the notes have them."""
        self.notes = notes
        """See `Policy.explain`. After `shrink`: the cached tokens of `shown`."""
        self.parts: list[dict[str, float]] | None = None
        """The parts of the costs of `shown`, if they were computed already."""
        self.unavailable = absent
        """Endpoints that took no requests at all, with the reason: at most MAX_SHOWN."""
        self.excluded: Sequence[tuple[Endpoint, str]] = ()
        """Endpoints that take requests but were not considered, with the reason: at most MAX_SHOWN."""
        self.decode_on: Mapping[str, EndpointState] = NO_PAIRS
        """The endpoint of the second leg, by connector, if requests may be split: see `Policy`. A prefill endpoint then
        stands for its pair, with the cost of both legs.
        """
        self.is_second = False
        """It is about the second leg of a split request alone; `previous` is about both."""
        self.overflow: str | None = None
        """Why it is above the lowest tier: see `core.queue.ticket.Overflow`. None = it is not."""
        self._best: tuple[float | None, float | None] | None = None
        self.previous: Decision | None = None
        """The decision about the previous attempt of the same request. Set by `RequestRecord.note_decision`."""

    @property
    def chosen(self) -> Endpoint:
        return self.chosen_state.endpoint

    @property
    def costs(self) -> Sequence[float]:
        """The costs of `shown`. Empty: there was only one candidate, and the policy was not asked."""
        return self.policy.noted_costs(self.notes) if self._costs is None else self._costs

    @property
    def shown(self) -> list[Endpoint]:
        """The candidates with the lowest costs. The chosen one is among them; it is the first if these are not all
        candidates.
        """
        return [state.endpoint for state in self.shown_states]

    @property
    def chosen_index(self) -> int:
        return self.shown_states.index(self.chosen_state)

    @property
    def cost(self) -> float | None:
        costs = self.costs
        return costs[self.chosen_index] if costs else None

    def partner(self, state: EndpointState) -> EndpointState | None:
        """Where the second leg goes if the first goes to this candidate; None: it takes the request whole."""
        return partner_of(state, self.decode_on)

    @property
    def lowest_costs(self) -> tuple[float | None, float | None]:
        """Of all candidates: the lowest cost of a whole request, and of a split one. None: there is no finite one."""
        if self._best is not None:
            return self._best
        lowest = [inf, inf]
        for state, cost in zip(self.shown_states, self.costs, strict=False):
            split = self.partner(state) is not None
            lowest[split] = min(lowest[split], cost)
        whole, split_cost = (None if cost == inf else cost for cost in lowest)
        return whole, split_cost

    def breakdown(self) -> list[dict[str, float]]:
        """For each of `shown` the parts of its cost, which add up to the cost."""
        return self._known_parts() or [{"cost": cost} for cost in self.costs]

    def cached_tokens(self) -> list[float | None]:
        """For each of `shown` the tokens of the prompt that were expected in its cache; empty: they are not known."""
        costs = self.costs
        if self.parts is not None:
            return cast("list[float | None]", self.notes or [])
        return self.policy.cached_tokens(self.notes, shown=range(len(costs)))

    def _known_parts(self) -> list[dict[str, float]]:
        costs = self.costs
        if self.parts is not None or not costs:
            return self.parts or []
        return self.policy.explain(self.notes, shown=range(len(costs)))

    def first_byte_ms(self) -> float | None:
        """Predicted milliseconds until the first byte, from the decision on; None if the policy predicts nothing."""
        wanted = self.policy.first_byte_parts
        if not wanted or (self.parts is None and not self.costs):
            return None
        index = self.chosen_index
        known = self.policy.explain(self.notes, shown=[index]) if self.parts is None else self.parts[index:]
        return sum(value for name, value in known[0].items() if name in wanted) if known else None

    def shrink(self, *, in_full: bool) -> None:
        """Keep only the candidates with the lowest costs; `in_full`: with the parts of their costs."""
        if self.decode_on:
            self._best = self.lowest_costs
        costs = self.costs
        kept = lowest_costs(costs, self.chosen_index, MAX_SHOWN if in_full else 2)
        cached = self.policy.cached_tokens(self.notes, shown=kept) if in_full else []
        self.parts = self.policy.explain(self.notes, shown=kept) if in_full else []
        self.shown_states = [self.shown_states[index] for index in kept]
        self._costs = [costs[index] for index in kept]
        self.notes = cached


def lowest_costs(costs: Sequence[float], index: int, count: int) -> list[int]:
    """The indices of `count` of many candidates: `index`, and the lowest costs of the others."""
    if count == 2:
        others = [*costs]
        others[index] = inf
        return [index, others.index(min(others))]
    most = sorted(costs)[count - 1]
    return [index, *[n for n, cost in enumerate(costs) if cost <= most and n != index][: count - 1]]


class Explainer:
    """Decides which decisions are explained in full."""

    def __init__(self) -> None:
        self._left = 0
        self._since = float("-inf")

    def in_full(self, now: float) -> bool:
        """Whether the decision about an ordinary request is explained in full, in a fleet of more than MAX_SHOWN."""
        if now - self._since >= 1.0:
            self._since = now
            self._left = IN_FULL_PER_S
        self._left -= 1
        return self._left >= 0


def compact(made: Decision) -> str:
    """One line of ASCII: the endpoint, its cost and the parts of it, the number of candidates, and the next best."""
    fields = [f"endpoint={made.chosen.name}"]
    second = made.partner(made.chosen_state)
    if second is not None:
        fields = [f"endpoint={second.endpoint.name}", f"prefill={made.chosen.name}"]
    if made.chosen.tier > 1:
        fields.append(f"tier={made.chosen.tier}")
    if made.overflow is not None:
        fields.append(f"overflow={made.overflow}")
    if made.cost is not None:
        fields.append(f"cost={made.cost:.1f}")
        parts = made.breakdown()
        fields += [f"{name}={value:.1f}" for name, value in parts[made.chosen_index].items() if round(value, 1)]
    fields.append(f"candidates={made.candidates}")
    others = [(cost, one.name) for one, cost in zip(made.shown, made.costs, strict=False) if one is not made.chosen]
    if others:
        cost, name = min(others)
        fields.append(f"next={name}:{cost:.1f}")
    return "; ".join(fields)
