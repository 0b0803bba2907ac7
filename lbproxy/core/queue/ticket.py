"""A request's place in the balancer."""

from __future__ import annotations

from enum import Enum
from typing import Final

from lbproxy.core.capacity.reservations import Reservations
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.endpoints.state import EndpointState, Trial
from lbproxy.core.knowledge.load_model import LoadModel
from lbproxy.core.knowledge.placement import Placement
from lbproxy.core.policies.explain import Decision
from lbproxy.core.queue.flow import Flow, Refusal
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest

LONG_AGO: Final = float("-inf")
"""A constant, as what a class has for its defaults is worked out for each ticket."""


class TicketState(Enum):
    """WAITING -> PLACED -> CLOSED, or WAITING -> CLOSED."""

    WAITING = "waiting"
    PLACED = "placed"
    CLOSED = "closed"


class Wait(Enum):
    """Why a request is not placed though waiting may help."""

    HELD = "held"
    """Its cheapest endpoint has enough to do; another has not, and may be the cheapest for other requests."""
    BUSY = "busy"
    """Every endpoint has enough to do."""
    FULL = "full"
    """Every endpoint has as many requests as it may have, or there is none yet."""
    BEHIND = "behind"
    """Others wait, and the order of service says whose turn it is."""
    FLOW = "flow"
    """Its flow has as many requests as it may have."""


class Ticket:
    """A request's place in the Balancer for one attempt. Written by the Balancer only.

    What has a default lives in the class until it is set: one is made for every request.
    """

    state: TicketState = TicketState.WAITING
    placed_on: EndpointState | None = None
    """Set while PLACED and after; None if the ticket closed while waiting."""
    placed_at: float | None = None
    first_byte_at: float | None = None
    outcome: Outcome | None = None
    """Set when CLOSED."""
    load: LoadModel | None = None
    """Its endpoint's when it was placed; None under policies without such models."""
    placement: Placement | None = None
    """How its endpoint's `LoadModel` counts it; None under policies without such models."""
    best: EndpointState | None = None
    """While WAITING: the endpoint that it is held for; None = any that takes it."""
    best_wait_s: float = 0.0
    """How long the wait for it was predicted to be, with how much prefill work there, and when."""
    best_tokens: float = 0.0
    priced_at: float = LONG_AGO
    reservation: tuple[Reservations, float, float] | None = (
        None  # its place in the line of `best`: the line, work, tokens
    )
    retry_after_s: float | None = None  # when there will be room, if it closed for want of that
    work_tokens: float = 0.0
    """While WAITING: the least prefill work that any endpoint would have with it, as of `work_at`."""
    work_at: float = LONG_AGO
    flow: Flow | None = None
    """Set by the Balancer at once."""
    counts_in_flow = False
    """It counts in `flow.active`."""
    charged: float = 0.0
    billed: float = 0.0
    """While PLACED: what its flow was charged, and the tokens that count for its limit."""
    response_tokens = 0
    """Tokens of the response so far."""
    refusal: Refusal | None = None
    """If it closed because of its flow's limit: which."""
    trial: Trial | None = None
    """It was placed to try an endpoint that is half open or down."""
    suspect: EndpointUid | None = None
    """The endpoint that answered this request 500: it is at fault if this attempt goes well."""
    wait: Wait | None = None
    """Why it began to wait; None = it did not."""
    decision: Decision | None = None
    """Why it was placed where it is; None = nobody wants to know."""

    def __init__(
        self, request: InferenceRequest, submitted_at: float, deadline: float, avoid: frozenset[EndpointUid]
    ) -> None:
        self.request = request
        self.submitted_at = submitted_at
        self.deadline = deadline
        """When waiting ends with `Outcome.EXPIRED`."""
        self.avoid = avoid
        """Endpoints that already failed this request."""

    @property
    def is_trial(self) -> bool:
        """It tries its endpoint, and nothing has come of that yet."""
        return self.trial is not None and not self.trial.ended

    @property
    def placed_state(self) -> EndpointState:
        """Of a placed ticket: its endpoint."""
        assert self.placed_on is not None
        return self.placed_on
