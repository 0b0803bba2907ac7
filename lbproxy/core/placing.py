# SPDX-License-Identifier: Apache-2.0
"""What a placed ticket counts as, from its placement to its end.

The Balancer decides where a ticket goes; here it is counted there, and taken off again: the endpoint's counts and
progress, its load model, the flow, the trial, and what other replicas are told. Invariants: an endpoint's in-flight
count is the number of tickets that were placed there and have not ended; each is counted once, and ends once.

A request that is split has two tickets at endpoints, one for each leg. With a serial connector they follow each other,
and each is submitted. With a concurrent one both are placed in one step: the ticket of the second leg, which its driver
knows, has that of the first (`Ticket.prefill`), which ends with the first byte of the second at the latest.
"""

from __future__ import annotations

from typing import Final

from lbproxy.core.endpoints.backpressure import Backpressure
from lbproxy.core.endpoints.endpoint_set import EndpointSet
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.queue.dispatcher import Dispatcher
from lbproxy.core.queue.flows import Flows
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.replicas.journal import Journal
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import DECODE, NO_USAGE, PREFILL, Usage, estimated
from lbproxy.core.scaling.advice import Advice


class Placing:
    """Counts the tickets that are placed."""

    journal: Journal | None = None
    """Set if there are other replicas."""

    def __init__(
        self,
        endpoints: EndpointSet,
        flows: Flows,
        backpressure: Backpressure,
        dispatcher: Dispatcher,
        advice: Advice,
    ) -> None:
        self.advice = advice
        self._endpoints, self._flows, self._backpressure = endpoints, flows, backpressure
        self._judge = endpoints.judge
        self._dispatcher = dispatcher
        self._placements = 0

    def place(self, ticket: Ticket, state: EndpointState, decode_on: EndpointState | None, now: float) -> None:
        """Place a ticket. If it is split, `state` is the endpoint of its first leg, `decode_on` that of its second."""
        if decode_on is not None:
            how = state.handover.how
            if how is not None and how.concurrent:
                ticket.prefill = first = Ticket(ticket.request, ticket.submitted_at, ticket.expires_at, ticket.avoid)
                first.flow = ticket.flow
                first.request = ticket.request.as_leg(PREFILL)
                self._count(first, state, now)
                ticket.request = ticket.request.as_leg(DECODE, state.endpoint.uid)
                state = decode_on
            else:
                ticket.request = ticket.request.as_leg(PREFILL)
        self._count(ticket, state, now)
        for one in self._judge.slow_start.starting:  # each placement gives them slow-start credit
            self._dispatcher.wake(one)

    def _count(self, ticket: Ticket, state: EndpointState, now: float) -> None:
        if state.endpoint.tier > ticket.request.max_tier:  # no assert: a defect must end the request, not leak it
            raise AssertionError("a request was to be placed above its highest tier")
        self._placements += 1
        if self.journal is not None:
            self.journal.placed(ticket, now)
        state.in_flight += 1
        state.awaiting_first_byte += 1
        state.placed += 1
        state.placed_seq = self._placements
        ticket.state, ticket.placed_on, ticket.placed_at = TicketState.PLACED, state, now
        if state.health is not Health.UP:
            ticket.trial = self._judge.begin_trial(state, stream=ticket.request.stream, now=now)
        state.progress.open_ended += ticket.request.open_ended
        if self._endpoints.has_loads and not ticket.request.open_ended:  # the work of a WebSocket is not known
            ticket.load = state.load
            ticket.placement = ticket.load.place(ticket.request, now)
            self.advice.demand.placed(ticket.placement)
        if state.allowance is not None:
            counted = ticket.response_tokens if ticket.counted else None
            ticket.reserved_tokens = state.allowance.reserve(ticket.request, now, counted=counted)
        assert ticket.flow is not None
        ticket.flow.in_flight += 1
        self._flows.placed(ticket, now)

    def first_byte(self, ticket: Ticket, now: float) -> None:
        """See `Balancer.first_byte`."""
        if ticket.state is not TicketState.PLACED or ticket.first_byte_at is not None:
            return
        ticket.first_byte_at = now
        if self.journal is not None:
            self.journal.first_byte(ticket, now)
        state = ticket.placed_state
        state.awaiting_first_byte -= 1
        state.progress.last_at = now
        state.breaker.successes += 1
        state.breaker.faults_in_row = 0
        self._backpressure.note_success(state)
        if ticket.trial is not None or ticket.suspect is not None:
            suspect = None if ticket.suspect is None else self._endpoints.get(ticket.suspect)
            self._judge.responded(state, suspect, trial=ticket.is_trial, now=now)
        if ticket.load is not None and ticket.placement is not None:
            ticket.load.first_byte(ticket.placement, now)
            self._dispatcher.wake(state)
        if ticket.prefill is not None:  # its endpoint has handed everything over
            self.first_byte(ticket.prefill, now)
            self.end(ticket.prefill, Outcome.COMPLETED, NO_USAGE, now)

    def progress(self, ticket: Ticket, tokens: int, now: float) -> None:
        """See `Balancer.progress`."""
        if ticket.state is TicketState.PLACED:
            state = ticket.placed_state
            state.tokens_streamed += tokens
            state.progress.last_at = now
            if tokens:
                self._flows.progress(ticket, tokens, now)
                if state.allowance is not None:
                    request, reserved, written = ticket.request, ticket.reserved_tokens, ticket.response_tokens
                    ticket.reserved_tokens = state.allowance.written(request, reserved, written, now)
            if ticket.load is not None and ticket.placement is not None:
                ticket.load.progress(ticket.placement, tokens, now)

    def end(
        self, ticket: Ticket, outcome: Outcome, usage: Usage | None, now: float, *, timed_out: bool = False
    ) -> None:
        """Take a ticket off again, if it is placed: see `Balancer.close`. The Balancer closes it."""
        if ticket.state is not TicketState.PLACED:
            return
        if ticket.prefill is not None:
            is_left = usage is not None and usage.is_estimate  # by a client for which both worked
            self.end(ticket.prefill, outcome, estimated(None, 0) if is_left else None, now)
        state = ticket.placed_state
        charged, usage = _charged(ticket, usage, now)
        if self.journal is not None:
            self.journal.ended(ticket, usage, now, completed=outcome is Outcome.COMPLETED)
        state.in_flight -= 1
        state.progress.open_ended -= ticket.request.open_ended
        if ticket.first_byte_at is None:
            state.awaiting_first_byte -= 1
        if outcome is Outcome.COMPLETED:
            state.progress.last_at = now
        elif outcome is Outcome.UPSTREAM_BROKE:
            self._judge.response_broke(state, timed_out=timed_out, placed_at=ticket.placed_at or 0.0, now=now)
        if ticket.is_trial:
            self._judge.trial_ended(state, outcome, now=now)
        if usage is None and outcome is Outcome.COMPLETED and ticket.first_byte_at is not None:
            usage = NO_USAGE if not ticket.request.prompt_bytes else None
        reported = usage is not None and outcome is Outcome.COMPLETED
        served = ticket.first_byte_at is not None or reported or (charged is not None and charged.is_estimate)
        self._settle(ticket, state, charged, usage, now, served=served)
        if ticket.load is not None and ticket.placement is not None:
            ticket.load.end(ticket.placement, usage, now)
            self.advice.demand.ended(ticket.placement, usage)
        self._endpoints.released(state)
        self._dispatcher.wake(state)
        ticket.state, ticket.outcome = TicketState.CLOSED, outcome

    def _settle(
        self,
        ticket: Ticket,
        state: EndpointState,
        charged: Usage | None,
        usage: Usage | None,
        now: float,
        *,
        served: bool,
    ) -> None:
        """Correct what its flow and its endpoint's limits were charged. `served`: the endpoint worked for it."""
        assert ticket.flow is not None
        ticket.flow.in_flight -= 1
        used = self._flows.ended(ticket, charged, now, served=served)
        if state.allowance is not None:
            if served and charged is None and ticket.request.binary:
                used = ticket.reserved_tokens
            state.allowance.settle(ticket.reserved_tokens, used, usage if served else None, now)


USUAL_GAP_S: Final = 0.02
"""Between two tokens of a response, under policies that learn none."""


def _charged(ticket: Ticket, usage: Usage | None, now: float) -> tuple[Usage | None, Usage | None]:
    """Of the usage of a ticket that ended: what counts for limits, and what its endpoint's load model learns."""
    charged = usage
    if usage is not None and usage.is_estimate:
        tokens = max(ticket.response_tokens, usage.completion_tokens or _unseen_tokens(ticket, now))
        ticket.response_tokens, charged, usage = tokens, estimated(usage, tokens), None
    if charged is not None and ticket.request.leg == DECODE:  # the prompt was charged, and cached, with the first leg
        charged = Usage(None, None, charged.completion_tokens, None, charged.is_estimate)
        usage = None if usage is None else usage._replace(cached_tokens=None)
    return charged, usage


def _unseen_tokens(ticket: Ticket, now: float) -> int:
    """About how many tokens of a response were generated that is no stream, and of which nothing came until now."""
    request = ticket.request
    if request.stream or request.open_ended or ticket.placed_at is None:
        return 0
    load, placement = ticket.load, ticket.placement
    gap_s = USUAL_GAP_S if load is None else max(0.001, load.pool.gap_ms / 1000.0)
    prefill_s = 0.0 if placement is None else placement.predicted_s
    tokens = max(0, int((now - ticket.placed_at - prefill_s) / gap_s))
    return tokens if request.max_tokens is None else min(tokens, request.max_tokens)
