"""What a routing policy is, and what it says.

A policy prices the candidates of one request; the Balancer takes the cheapest and counts the request there in the same
breath. A policy only reads states: it remembers nothing of its own that a placement would have to undo. It does not
decide who is a candidate (health, drain, model, concurrency limit do, before). The table of those that the settings can
name is in `core.policies.registry`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from lbproxy.core.caches.prefix_index import MAX_ENTRIES
from lbproxy.core.capacity.room import HOLD_MS
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.requests.request import InferenceRequest


class Prices:
    """What a policy says of a request, in lists as long as the candidates and in their order."""

    __slots__ = ("costs", "notes", "waits_ms", "work_tokens")

    def __init__(
        self,
        costs: list[float],
        waits_ms: list[float] | None = None,
        work_tokens: list[float] | None = None,
        notes: object = None,
    ) -> None:
        self.costs = costs
        """The lowest wins. The unit is the policy's own. Never NaN; infinite = must not go there."""
        self.waits_ms = waits_ms
        """How long the request waits there before its prefill begins, also behind those that are held for the endpoint
        and go before it. None = the policy does not know, and nothing is held back."""
        self.work_tokens = work_tokens
        """The request's own prefill work there. Given whenever `waits_ms` is."""
        self.notes = notes
        """What `Policy.explain` wants to know of the price besides. Numbers and lists that nobody changes any more."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Policy(ABC):
    """Prices endpoints."""

    block_bytes: int | None = None
    """Into blocks of how many bytes prompts have to be hashed for it. None = it reads no `EndpointState.load`, which
    then is not kept, and needs no hashes."""
    index_entries: int = MAX_ENTRIES
    """How many of these blocks may be remembered, of all endpoints together."""
    reads_weights: bool = False
    """It goes by the weights that the settings or DNS give endpoints, if only until it has measured them."""
    holds: bool = False
    """Its prices have waits, by which requests can be held back."""
    tolerance: float = 0.0
    """Costs above the lowest by no more than this are as good: what is learned is not that exact, and an endpoint that
    was a little unlucky must not be left out for it. Of such candidates the one chosen longest ago is taken."""
    may_refuse: bool = False
    """Its costs may be infinite, so that it has to be asked even about a single candidate."""
    explains: bool = False
    """What a price consists of is to be noted in it. Set anew before each price."""
    notes_costs: bool = False
    """The notes hold the costs as well, for `noted_costs`, so that nobody has to keep these beside them."""
    name: str = ""
    """What the settings call it."""
    unit: str | None = None
    """Of its costs and their parts; None: they have none that has a name."""
    first_byte_parts: frozenset[str] = frozenset()
    """Those parts of its costs that together are the milliseconds to the first byte that it expects."""

    @abstractmethod
    def price(self, request: InferenceRequest, candidates: Sequence[EndpointState], *, now: float) -> Prices:
        """What placing `request` on each candidate (at least one) costs."""
        ...

    def is_full(self, state: EndpointState, wait_ms: float, now: float) -> bool:
        """Whether a request whose best endpoint this is, with this wait, is held until there is room. Asked only under
        a policy that `holds`.
        """
        return wait_ms > HOLD_MS

    def explain(self, notes: object, *, shown: Sequence[int]) -> list[dict[str, float]]:
        """What costs consist of, from the notes of the price that said them, at any later time.

        For each candidate whose index is in `shown`, in this order, its cost's parts by name, which add up to the cost.
        An empty list: there are no parts.
        """
        return []

    def noted_costs(self, notes: object) -> list[float]:
        """The costs of the price that said these notes, under a policy with `notes_costs`."""
        raise NotImplementedError
