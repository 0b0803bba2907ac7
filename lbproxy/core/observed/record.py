# SPDX-License-Identifier: Apache-2.0
"""The record of one request, from which metrics, logs and traces are made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lbproxy.core.queue.ticket import Ticket, Wait
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import DECODE, PREFILL, WHOLE, Usage

if TYPE_CHECKING:
    from lbproxy.core.observed.trace import Trace
    from lbproxy.core.policies.explain import Decision


MAX_PATH_CHARS: Final = 512
"""Characters of the path in a finished record."""
SUFFIX_CHARS: Final = 16
"""What an id has after a client's own: 64 random bits."""


MOVED = frozenset({Outcome.UPSTREAM_BROKE.label, "moved"})
"""Labels of attempts whose stream went on at another endpoint: it broke, or its endpoint drains."""


class RequestRecord:
    """The record of one request, however it ends. Access log, metrics and traces are sinks of it.

    It is filled in during the request, emitted once, and never changed after that. Times are monotonic seconds.
    Defaults live in the class until they are overwritten: one object is made for every request.
    """

    route: str = "other"
    """The route's bounded name, for labels; `path` is for the log only."""
    model: str | None = None
    alias: str | None = None
    """The model as the client named it, if that is a name in the settings' `models`."""
    fallback_from: str | None = None
    """The model in place of which `model` was to serve it; None: it is its own."""
    stream: bool = False
    endpoint: str | None = None
    prefill: str | None = None
    """If it was split, last: the endpoint of its first leg; `endpoint` is that of the second."""
    prefill_s: float | None = None
    """Seconds from the placement of that first leg to its end; None: it failed, or had not ended."""
    prefill_usage: Usage | None = None
    """Usage of the first leg: its cached tokens are those of the prompt."""
    first_legs: tuple[tuple[str, str], ...] = ()
    """The first legs of all attempts that ended: the endpoint's name, and `completed`, `failed` or `refused`."""
    attempts: int = 0
    status: int = 0
    outcome: Outcome = Outcome.INTERNAL_ERROR
    failed: tuple[tuple[str, str], ...] = ()
    """The attempts that failed before a response: the endpoint's name, and the outcome's code."""
    error: str | None = None
    """What went wrong, for the log. It may contain addresses, so it never goes to a client."""
    request_bytes: int = 0
    response_bytes: int = 0
    events: int = 0
    """SSE events relayed."""
    usage: Usage | None = None
    """The usage that the endpoint reported."""
    predicted_cached_tokens: float | None = None
    """Tokens of the prompt that were expected in the endpoint's cache; None = the policy predicts none."""
    key: str | None = None
    """The name of the request's API key."""
    flow: str | None = None
    """Its flow: see `core.queue.flows`. None until a place is requested."""
    queue_s: float = 0.0
    """Seconds waited for a place, in all attempts together."""
    tier: int = 1
    """The tier of the endpoint of the last attempt."""
    overflow: str | None = None
    """Why that is above the lowest tier of its model: see `core.queue.ticket.Overflow`. None = it is not."""
    placed_at: float | None = None
    first_byte_at: float | None = None
    ended_at: float = 0.0
    decision: Decision | None = None
    """The last one, if decisions are recorded: see `core.policies.explain`. It refers to those before it."""
    wait: Wait | None = None
    """Why it waited for a place, the last time that it did."""
    held_for: str | None = None
    """The endpoint for which it was held when that wait began; None = any."""
    full_by: str | None = None
    """Why that endpoint was full: see `core.observed.learned.FULL_BY`. None = it was not full."""
    wake_predicted_s: float | None = None
    """If it waited for a wake: how long that was predicted to take, with all that came before it; None = not known."""
    wake_took_s: float | None = None
    """How long that took; None = its endpoint was not awake when the request ended, or is not yet."""
    trace_id: str | None = None
    """In the balancer process, of a request whose trace is in its worker process: 32 hexadecimal digits."""
    number: int = 0
    """In a worker process: see `Ticket.number`."""
    explanation: str | None = None
    """In a worker process: of the last decision, for the client that asks for it; the decision is not there."""
    trace: Trace | None = None
    """Its ids and its attempts, if it is traced."""

    def __init__(self, id: str, method: str, path: str, client: str, started_at: float) -> None:  # noqa: A002
        self.id = id
        """Nobody can guess it, and no other request has it: our own, without a `-`; or the client's, a `-` and
        `SUFFIX_CHARS` of ours. Of the characters that `proxy.request.headers` accepts: it needs no escapes anywhere.
        """
        self.method = method
        self.path = path
        self.client = client
        self.started_at = started_at

    @property
    def request_id(self) -> str:
        """Its `x-request-id`, as its client knows it: `id` without what was added to the client's own."""
        made = self.id
        end = len(made) - SUFFIX_CHARS - 1
        return made[:end] if end > 0 and made[end] == "-" else made

    @property
    def attempt_id(self) -> str:
        """The id by which the engine of the present attempt knows it. An engine may still run an earlier attempt, so
        each has another; both legs of one have the same.
        """
        return self.id if self.attempts < 2 else f"{self.id}.{self.attempts}"

    def note_placed(self, ticket: Ticket) -> None:
        """Note a placement: of an attempt, or of the second leg of one."""
        leg, first = ticket.request.leg, ticket.prefill
        self.endpoint = ticket.placed_state.endpoint.name
        _note_tier(self, ticket)
        if ticket.wait is Wait.WAKING:
            _note_wake(self, ticket)
        if leg != DECODE or first is not None:
            self.attempts += 1
            if self.first_byte_at is None:  # else its stream goes on elsewhere
                self.placed_at = ticket.placed_at
            if leg != WHOLE or self.prefill is not None:
                self.prefill = None if leg == WHOLE else (first or ticket).placed_state.endpoint.name
                self.prefill_s = self.prefill_usage = None
        if ticket.decision is not None:
            self.note_decision(ticket.decision)

    def note_wait(self, ticket: Ticket) -> None:
        """Note that the ticket was not placed at once."""
        best = ticket.best
        self.wait, self.held_for, self.full_by = ticket.wait, None, None
        _note_wake(self, ticket)
        if best is not None:
            self.held_for, self.full_by = best.endpoint.name, ticket.full_by

    def note_prediction(self, ticket: Ticket) -> None:
        """Note what is expected in the cache of the endpoint where the ticket is."""
        cached = ticket.predicted_cached_tokens
        if cached is not None:
            self.predicted_cached_tokens = cached

    def note_failure(self, ticket: Ticket, label: str, now: float) -> None:
        """Note an attempt that failed before a response: `label` is the outcome's code."""
        name, leg = ticket.placed_state.endpoint.name, ticket.request.leg
        self.failed += ((name, label),)
        if leg == PREFILL:
            self.first_legs += ((name, "failed"),)
        if self.trace is not None:
            self.trace.failed(label, now, leg)

    def note_prefilled(self, usage: Usage | None, now: float) -> None:
        """Note the end of a first leg, and what it used."""
        self.prefill_usage, self.prefill_s = usage, now - (self.placed_at or 0.0)
        self.first_legs += ((self.prefill or "", "completed"),)
        if self.trace is not None:
            self.trace.prefilled(now)

    def note_first_refused(self, status: int, now: float) -> None:
        """Note a first leg that returned an error."""
        self.first_legs += ((self.prefill or "", "refused"),)
        if self.trace is not None:
            self.trace.failed(f"upstream_{status}", now, PREFILL)

    def note_decision(self, decision: Decision) -> None:
        """Note the decision about one more attempt."""
        decision.previous, self.decision = self.decision, decision

    @property
    def moves(self) -> int:
        """How often its stream went on at another endpoint."""
        return sum(label in MOVED for _, label in self.failed)

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that were cached, as reported. Of a split request those at the first leg: the second one
        reports none, or all that was transferred.
        """
        usage = self.usage if self.prefill is None else self.prefill_usage
        return None if usage is None else usage.cached_tokens

    @property
    def attempt_decision(self) -> Decision | None:
        """The decision about the last attempt; if that is split, the one about both legs."""
        made = self.decision
        while made is not None and made.is_second and made.previous is not None:
            made = made.previous
        return made

    @property
    def decisions(self) -> list[Decision]:
        """One for each attempt, in order; a second leg that was placed by itself has one more."""
        found = []
        made = self.decision
        while made is not None:
            found.append(made)
            made = made.previous
        return found[::-1]


def _note_tier(record: RequestRecord, ticket: Ticket) -> None:
    record.tier = ticket.placed_state.endpoint.tier
    record.overflow = None if ticket.overflow is None else ticket.overflow.value


def _note_wake(record: RequestRecord, ticket: Ticket) -> None:
    state, asked_at = ticket.placed_on, ticket.submitted_at
    is_awake = state is not None and ticket.wait is Wait.WAKING and state.standing.woken_at >= asked_at
    record.wake_predicted_s = ticket.wakes_in_s
    record.wake_took_s = state.standing.woken_at - asked_at if is_awake and state is not None else None
