# SPDX-License-Identifier: Apache-2.0
"""A request's place in the balancer."""

from __future__ import annotations

from enum import Enum
from typing import Final

from lbproxy.core.capacity.allowance import Claim
from lbproxy.core.capacity.reservations import Reservations
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.endpoints.state import EndpointState, Trial
from lbproxy.core.knowledge.load_model import LoadModel
from lbproxy.core.knowledge.placement import Placement
from lbproxy.core.policies.explain import Decision
from lbproxy.core.queue.flow import Flow, Refusal
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import DECODE, InferenceRequest

LONG_AGO: Final = float("-inf")
"""A constant, because defaults in a class body are evaluated for each ticket."""


class TicketState(Enum):
    """WAITING -> PLACED -> CLOSED, or WAITING -> CLOSED."""

    WAITING = "waiting"
    PLACED = "placed"
    CLOSED = "closed"


class Wait(Enum):
    """Why a request is not placed although waiting may help."""

    HELD = "held"
    """The endpoint that is best for it is full; another is not, and may be best for other requests."""
    BUSY = "busy"
    """Every endpoint is full."""
    FULL = "full"
    """Every endpoint has reached its limit of requests, or there is none yet."""
    BEHIND = "behind"
    """Other requests wait, and the order of service decides."""
    FLOW = "flow"
    """Its flow has reached its limit of requests."""
    WAKING = "waking"
    """Every endpoint that serves it is asleep, or on the way there or back."""


class Overflow(Enum):
    """Why a request was placed above the lowest tier that serves its model."""

    DOWN = "down"
    """No endpoint of a lower tier takes requests."""
    FAILED = "failed"
    """Those that do have failed this request."""
    WAIT = "wait"
    """The wait would be too long, or was."""
    LIMIT = "limit"
    """It waited too long for endpoints at a configured limit."""
    FULL = "full"
    """It would have been refused: the queue is full, or the predicted wait longer than the queue timeout."""
    DEADLINE = "deadline"
    """A lower tier would miss its deadline."""


class Turn:
    """A pass through the queue, as far as it has come, in which what a request leaves goes to those of a lower priority
    or of other flows.
    """

    def __init__(self, with_room: dict[EndpointUid, EndpointState]) -> None:
        self.with_room = with_room
        """The endpoints that have room."""
        self.held: dict[EndpointUid, list[float]] = {}
        """By endpoint, the requests that were reached and are held there, and their prefill work."""


ALONE: Final = Turn({})
"""A turn in which nobody else takes what is left."""


class Answer:
    """What the choice says of one ticket. A value: the Balancer acts on it."""

    def __init__(  # noqa: PLR0913, PLR0917 - all that is said
        self,
        chosen: EndpointState | Outcome | Wait,
        best: EndpointState | None = None,
        best_wait_s: float = 0.0,
        best_tokens: float = 0.0,
        decode_on: EndpointState | None = None,
        retry_after_s: float | None = None,
        decision: Decision | None = None,
        overflow: Overflow | None = None,
        short: EndpointState | None = None,
    ) -> None:
        self.chosen: Final = chosen
        """Where to place the ticket, or how it ends, or why it waits."""
        self.best: Final = best
        """If it waits: the endpoint that it is held for; None = any endpoint."""
        self.best_wait_s: Final = best_wait_s
        """The predicted wait for that endpoint."""
        self.best_tokens: Final = best_tokens
        """Its prefill work there."""
        self.decode_on: Final = decode_on
        """If it is best split: the endpoint that is best for its second leg."""
        self.retry_after_s: Final = retry_after_s
        """When there will be room, if it ends for lack of it."""
        self.decision: Final = decision
        """Why it is placed where it is; None = not to be recorded."""
        self.overflow: Final = overflow
        """Why it is placed above the lowest tier; None = it is not, or only that tier serves its model."""

        self.short: Final = short
        """If it waits for limits per time: the endpoint that is first within its own."""

    def overflowing(self, why: Overflow) -> Answer:
        """The same place, above the lowest tier."""
        if self.decision is not None:
            self.decision.overflow = why.value
        return Answer(self.chosen, decode_on=self.decode_on, decision=self.decision, overflow=why)


class Ticket:
    """A request's place in the Balancer for one attempt. Written by the Balancer and its parts; `Choice` only
    reads it.

    Defaults live in the class until they are overwritten: one object is made for every request.
    """

    state: TicketState = TicketState.WAITING
    placed_on: EndpointState | None = None
    """Set while PLACED and after; None if the ticket closed while waiting."""
    placed_at: float | None = None
    first_byte_at: float | None = None
    outcome: Outcome | None = None
    """Set when CLOSED."""
    load: LoadModel | None = None
    """The load model of its endpoint when it was placed; None under policies without such models."""
    placement: Placement | None = None
    """How that load model counts it; None under policies without such models."""
    best: EndpointState | None = None
    """While WAITING: the endpoint that it is held for; None = any endpoint."""
    best_wait_s: float = 0.0
    """The predicted wait for that endpoint, with its prefill work there, and the time of the prediction."""
    best_tokens: float = 0.0
    priced_at: float = LONG_AGO
    reservation: tuple[Reservations, float, float] | None = None
    """Its reservation at `best`: the reservations there, its work, its tokens."""
    declined: int = 0
    """How often in a row it left an endpoint with room to others, and stayed held for another one."""
    retry_after_s: float | None = None  # when there will be room, if it closed for lack of it
    work_tokens: float = 0.0
    """While WAITING: the least prefill work that it would be at any endpoint, as of `work_at`."""
    work_at: float = LONG_AGO
    flow: Flow | None = None
    """Set by the Balancer at once."""
    counts_in_flow = False
    """It is counted in `flow.active`."""
    charged_cost: float = 0.0
    """While PLACED: what its flow was charged of service."""
    used_tokens: float = 0.0
    reserved_tokens: float = 0.0
    """Since it was placed: the tokens that count for the limits of its flow, and of its endpoint (`limits`)."""
    claim: Claim | None = None
    """While WAITING: what is kept for it of the limits of one endpoint."""
    response_tokens = 0
    """Tokens of the response so far."""
    refusal: Refusal | None = None
    """The limit of its flow, if it closed because of that."""
    trial: Trial | None = None
    """Set if it was placed to try an endpoint that is half open or down."""
    suspect: EndpointUid | None = None
    """The endpoint that returned 500 to this request: it is at fault if this attempt succeeds."""
    wait: Wait | None = None
    """Why it began to wait; None = it did not."""
    full_by: str | None = None
    """Why the endpoint was full that it was held for then: see `core.observed.learned.FULL_BY`; None = it was not."""
    wakes_in_s: float | None = None
    """If it waits for a wake: how long that was predicted to take when it began to wait; None = not known."""
    overflow: Overflow | None = None
    """Why it was placed above the lowest tier; None = it was not, or only that tier serves its model."""
    is_overdue = False
    """It has waited long enough for a higher tier."""
    counted = False
    """What it used of limits so far, its prompt and `response_tokens`, was counted before it was placed here."""
    prefill: Ticket | None = None
    """With a concurrent connector, of the second leg: the ticket of the first, placed in the same step."""
    decision: Decision | None = None
    """Why it was placed where it is; None = not recorded."""
    shared_number: int = 0
    """In `core.replicas.journal`: what other replicas know it by."""
    number: int = 0
    """In a worker process: of its request. The balancer process has the ticket with the models (`workers.remote`)."""
    predicted_prompt_tokens: float = 0.0
    """In a worker process: of its `placement` there; 0 = there is none."""

    def __init__(
        self, request: InferenceRequest, submitted_at: float, expires_at: float, avoid: frozenset[EndpointUid]
    ) -> None:
        self.request = request
        self.submitted_at = submitted_at
        self.expires_at = expires_at
        """When waiting ends, with `Outcome.EXPIRED` or, at the request's own deadline, `TOO_LATE`."""
        self.avoid = avoid
        """Endpoints that already failed this request."""
        self.waits_since = submitted_at
        """While WAITING: since when it has waited for an endpoint, and not for its flow."""

    @property
    def is_trial(self) -> bool:
        """Whether it tries its endpoint, and the trial is not decided yet."""
        return self.trial is not None and not self.trial.ended

    @property
    def predicted_cached_tokens(self) -> float | None:
        """Tokens of the prompt that are expected in the cache of the endpoint that computes it; None: nothing is
        predicted, or another ticket computes it.
        """
        computing = self if self.prefill is None else self.prefill
        placement = computing.placement
        return None if placement is None or computing.request.leg == DECODE else placement.cached_tokens

    @property
    def placed_state(self) -> EndpointState:
        """The endpoint of a placed ticket."""
        assert self.placed_on is not None
        return self.placed_on
