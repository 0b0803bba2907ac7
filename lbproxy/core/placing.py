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

from lbproxy.core.endpoints.backpressure import Backpressure
from lbproxy.core.endpoints.breaker import NO_FLOWS
from lbproxy.core.endpoints.endpoint_set import EndpointSet
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.observed.ledger import Ledger
from lbproxy.core.queue.dispatcher import Dispatcher
from lbproxy.core.queue.flows import Flows
from lbproxy.core.queue.limits import with_estimate
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
        self.ledger = Ledger()
        self._endpoints, self._flows, self._limits, self._backpressure = endpoints, flows, flows.limits, backpressure
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
        if (on_demand := state.standing.on_demand) is not None and ticket.request.model is not None:
            on_demand.placed(ticket.request.model, ticket.submitted_at)
            if self._endpoints.serving.has_contexts or ticket.request.context_tokens is not None:
                self._endpoints.serving.has_contexts = True
                if ticket.request.model in on_demand.listed:
                    on_demand.contexts[ticket.request.model] = ticket.request.context_tokens
        state.placed += 1
        state.placed_seq = self._placements
        ticket.state, ticket.placed_on, ticket.placed_at = TicketState.PLACED, state, now
        if state.health is not Health.UP:
            ticket.trial = self._judge.begin_trial(state, stream=ticket.request.stream, now=now)
        state.standing.progress.open_ended += ticket.request.open_ended
        if self._endpoints.has_loads and not ticket.request.open_ended:  # the work of a WebSocket is not known
            ticket.load = state.load
            ticket.placement = ticket.load.place(ticket.request, now)
            if on_demand is not None and ticket.request.model in on_demand.loading:
                ticket.placement.wait_for_model()
            self.advice.demand.placed(ticket.placement)
        assert ticket.flow is not None
        if ticket.flow.limited or state.allowance is not None:
            self._limits.placed(ticket, now)
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
        state.standing.progress.last_at = now
        breaker = state.standing.breaker
        breaker.successes += 1
        breaker.faults_in_row = 0
        breaker.forbidden = NO_FLOWS
        self._backpressure.note_success(state, ticket.request.model)
        if ticket.trial is not None or ticket.suspect is not None:
            suspect = None if ticket.suspect is None else self._endpoints.get(ticket.suspect)
            self._judge.responded(state, suspect, trial=ticket.is_trial, now=now)
        on_demand, model = state.standing.on_demand, ticket.request.model
        if on_demand is not None and on_demand.is_silent and model is not None and model in on_demand.listed:
            on_demand.responded[model] = now
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
            shown = state.standing.progress
            shown.tokens_streamed += tokens
            shown.last_at = now
            if tokens:
                ticket.response_tokens += tokens
                self._flows.progress(ticket, now)
                if state.allowance is not None or (ticket.flow is not None and ticket.flow.limited):
                    self._limits.progress(ticket, tokens, now)
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
        charged = with_estimate(ticket, usage, now)
        if charged is not None and ticket.request.leg == DECODE:  # the prompt was cached with the first leg
            charged = charged._replace(cached_tokens=None)
        usage = told = None if charged is not None and charged.is_estimate else charged
        state.in_flight -= 1
        if (on_demand := state.standing.on_demand) is not None and ticket.request.model is not None:
            on_demand.closed(ticket.request.model)
        state.standing.progress.open_ended -= ticket.request.open_ended
        if ticket.first_byte_at is None:
            state.awaiting_first_byte -= 1
        if outcome is Outcome.COMPLETED:
            state.standing.progress.last_at = now
        elif outcome is Outcome.UPSTREAM_BROKE:
            self._judge.response_broke(state, timed_out=timed_out, placed_at=ticket.placed_at or 0.0, now=now)
        if ticket.is_trial:
            self._judge.trial_ended(state, outcome, now=now)
        if usage is None and outcome is Outcome.COMPLETED and ticket.first_byte_at is not None:
            usage = NO_USAGE if not ticket.request.prompt_bytes else None
        reported = usage is not None and outcome is Outcome.COMPLETED
        served = ticket.first_byte_at is not None or reported or (charged is not None and charged.is_estimate)
        used = self._settle(ticket, charged, now, served=served)
        if self.journal is not None:
            self.journal.ended(ticket, told, used, now, completed=outcome is Outcome.COMPLETED)
        if ticket.load is not None and ticket.placement is not None:
            ticket.load.end(ticket.placement, usage, now, completed=outcome is Outcome.COMPLETED)
            self.advice.demand.ended(ticket.placement, usage)
        self._endpoints.released(state)
        self._dispatcher.wake(state)
        ticket.state, ticket.outcome = TicketState.CLOSED, outcome

    def _settle(self, ticket: Ticket, usage: Usage | None, now: float, *, served: bool) -> float:
        """Correct what its flow and its endpoint's limits were charged. `served`: the endpoint worked for it. Returns
        the tokens that it used of limits, if there are any.
        """
        flow, used = ticket.flow, 0.0
        assert flow is not None
        flow.in_flight -= 1
        if flow.limited or ticket.placed_state.allowance is not None or self.journal is not None:
            used = self._limits.ended(ticket, usage, now, served=served)
        if served:
            self.ledger.add(flow.name, ticket.request.model, self._limits.tokens(ticket, usage))
            self._limits.learn(ticket, usage)
        self._flows.ended(ticket, usage, now, served=served)
        return used
