"""What a routing policy is, and what it says.

A policy prices the candidates of one request; the Balancer takes the cheapest and counts the request there in the same
breath. A policy only reads states: it remembers nothing of its own that a placement would have to undo. It does not
decide who is a candidate (health, drain, model, concurrency limit do, before). The table of those that the settings can
name is in `core.policy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

from lbproxy.core.prefix import MAX_ENTRIES
from lbproxy.core.types import EndpointState, InferenceRequest

Plan: TypeAlias = list[float]
"""The uncached tokens that the plan under way reserved on each endpoint, by the slot of its load model."""


class Prices(NamedTuple):
    """What a policy says of a request, in lists as long as the candidates and in their order."""

    costs: list[float]
    """The lowest wins. The unit is the policy's own. Never NaN; infinite = must not go there."""
    waits_ms: list[float] | None = None
    """How long the endpoint's prefill queue is. None = the policy does not know, and nothing is held back."""
    uncached_tokens: list[float] | None = None
    """What the request would add to that queue. Given whenever `waits_ms` is."""
    notes: object = None
    """What `Policy.explain` wants to know of the price besides. Numbers and lists that nobody changes any more."""


class Policy(Protocol):
    """Prices endpoints."""

    block_bytes: int | None = None
    """Into blocks of how many bytes prompts have to be hashed for it. None = it reads no `EndpointState.load`, which
    then is not kept, and needs no hashes."""
    index_entries: int = MAX_ENTRIES
    """How many of these blocks may be remembered, of all endpoints together."""
    holds: bool = False
    """Its prices have waits, by which requests can be held back."""
    tolerance: float = 0.0
    """Costs above the lowest by no more than this are as good: what is learned is not that exact, and an endpoint that
    was a little unlucky must not be left out for it. Of such candidates the one chosen longest ago is taken."""
    refuses: bool = False
    """Its costs may be infinite, so that it has to be asked even about a single candidate."""
    explains: bool = False
    """What a price consists of is to be noted in it. Set anew before each price."""
    name: str = ""
    """What the settings call it."""
    unit: str | None = None
    """Of its costs and their parts; None: they have none that has a name."""
    first_byte_parts: frozenset[str] = frozenset()
    """Those parts of its costs that together are the milliseconds to the first byte that it expects."""

    def price(
        self, request: InferenceRequest, candidates: Sequence[EndpointState], *, plan: Plan | None, now: float
    ) -> Prices:
        """What placing `request` on each candidate (at least one) costs. `plan`: None when nothing is planned."""
        ...

    def explain(self, notes: object, *, shown: Sequence[int]) -> list[dict[str, float]]:
        """What costs consist of, from the notes of the price that said them, at any later time.

        For each candidate whose index is in `shown`, in this order, its cost's parts by name, which add up to the cost.
        An empty list: there are no parts.
        """
        return []
