# SPDX-License-Identifier: Apache-2.0
"""The interface of a routing policy.

A policy prices the candidates of one request; the Balancer takes the lowest price and counts the request there in the
same step. A policy only reads states: it keeps no state that a placement would have to undo. It does not decide which
endpoints are candidates (health, draining, model and concurrency limit do). `core.policies.registry` has the table of
policies for the settings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from mypy_extensions import mypyc_attr

from lbproxy.core.caches.prefix_index import MAX_ENTRIES
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.engines.handover import Role
from lbproxy.core.requests.request import InferenceRequest

PRICED: Final = -1.0
NEVER_SPLIT: Final = float("inf")
NO_PAIRS: Final[Mapping[str, EndpointState]] = MappingProxyType({})


class Context:
    """What a price depends on beside the request and the states of the candidates. Valid during that price: the next
    one may come with the same object.
    """

    def __init__(
        self,
        now: float,
        explains: bool = False,
        any_held: bool = False,
        share_ahead: float = -1.0,
        newest_first: bool = False,
    ) -> None:
        self.now = now  # this and the next are not final: the same object is used again
        self.explains = explains
        """The parts of a price are to be noted in it."""
        self.any_held: Final = any_held
        """Some requests are held for an endpoint."""
        self.share_ahead: Final = share_ahead
        """The share of held requests that precedes this one; below 0: those with less work precede it."""
        self.newest_first: Final = newest_first
        """The newest held requests are served first (`core.queue.queue_overload`)."""


class Prices:
    """A policy's result for one request, in lists in the order of the candidates."""

    def __init__(
        self,
        costs: list[float],
        waits_ms: list[float] | None = None,
        work_tokens: list[float] | None = None,
        notes: object = None,
        decode_on: Mapping[str, EndpointState] = NO_PAIRS,
    ) -> None:
        self.costs = costs
        """The lowest cost wins. The unit is the policy's own. Never NaN; infinite = the request must not be placed
        there."""
        self.waits_ms = waits_ms
        """How long the request waits there before its prefill begins, including for held requests that precede it. None
        = the policy does not predict it, and no request is held."""
        self.work_tokens = work_tokens
        """The request's own prefill work there. Set whenever `waits_ms` is."""
        self.notes = notes
        """What `Policy.explain` needs of the price in addition. Numbers and lists that are not changed any more."""
        self.decode_on = decode_on
        """If requests may be split: the best endpoint for the second leg, by connector. A prefill endpoint's price is
        that of its best pair then."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Policy(ABC):
    """Prices endpoints."""

    block_bytes: int | None = None
    """The block size in which prompts must be hashed. None = the policy reads no `EndpointState.load`, which is not
    maintained then, and needs no hashes."""
    index_entries: int = MAX_ENTRIES
    """How many of these blocks are remembered, of all endpoints together."""
    reads_weights: bool = False
    """It uses the configured weights of endpoints, at least until it has measured them."""
    holds: bool = False
    """Its prices have waits, so that requests can be held."""
    tolerance: float = 0.0
    """Costs up to this much above the lowest count as equal: learned values are not more exact, and an endpoint must
    not be left out for chance. Of equal candidates the one chosen longest ago is taken."""
    may_refuse: bool = False
    """Its costs may be infinite, so that it must be asked even about a single candidate."""
    notes_costs: bool = False
    """The notes contain the costs, for `noted_costs`, so that these need not be kept as well."""
    name: str = ""
    """Its name in the settings."""
    split_above: float = PRICED
    """Requests are split if more than this many tokens of their prompt are cached nowhere; PRICED = where that costs
    less, and always under policies whose costs are no times."""
    unit: str | None = None
    """The unit of its costs and their parts; None: none."""
    assumed: tuple[tuple[str, float], ...] = ()
    """Parts that have exactly these values until anything was learned of them."""
    first_byte_parts: frozenset[str] = frozenset()
    """The parts of its costs whose sum is the predicted time to the first byte, in milliseconds."""

    @abstractmethod
    def price(self, request: InferenceRequest, candidates: Sequence[EndpointState], context: Context) -> Prices:
        """The cost of placing `request`, whole or one leg of it, on each candidate (at least one)."""
        ...

    def stalls_ms(self, candidates: Sequence[EndpointState], works: Sequence[float], *, now: float) -> list[float]:
        """What whole requests with so much prefill work cost the streams on each candidate in addition to their price,
        where they could be split instead.
        """
        return [0.0] * len(works)

    def is_full(self, state: EndpointState, now: float, overloaded: bool) -> bool:
        """Whether a request whose best endpoint this is is held until there is room, under a policy that `holds`.
        `overloaded`: requests have been arriving faster than they are served, for a while.
        """
        raise NotImplementedError

    def is_full_for_decode(self, state: EndpointState, now: float, overloaded: bool) -> bool:
        """Whether a split request whose second leg is best there is held until there is room."""
        return self.is_full(state, now, overloaded)

    def explain(self, notes: object, *, shown: Sequence[int]) -> list[dict[str, float]]:
        """The parts of costs, from the notes of their price, at any later time.

        For each candidate whose index is in `shown`, in this order, the parts of its cost by name, which add up to the
        cost. An empty list: there are no parts.
        """
        return []

    def cached_tokens(self, notes: object, *, shown: Sequence[int]) -> list[float | None]:
        """Tokens of the prompt that were expected in the cache of each candidate in `shown`, from the notes of their
        price; None: unknown. An empty list: the policy predicts none.
        """
        return []

    def noted_costs(self, notes: object) -> list[float]:
        """The costs of the price with these notes, under a policy with `notes_costs`."""
        raise NotImplementedError


def partner_of(first: EndpointState, decode_on: Mapping[str, EndpointState]) -> EndpointState | None:
    """Where the second leg goes if the first goes to `first`; None: it takes the request whole.

    `decode_on`: the best endpoint for the second leg, by connector.
    """
    handover = first.handover
    if handover.role is not Role.PREFILL or handover.connector is None:
        return None
    return decode_on.get(handover.connector)
