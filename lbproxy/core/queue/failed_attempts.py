# SPDX-License-Identifier: Apache-2.0
"""What follows an attempt that failed before any of a response went to the client, and what it says of the endpoint."""

from __future__ import annotations

from collections.abc import Sequence

from lbproxy.core.endpoints.backpressure import Backpressure
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.judge import Judge
from lbproxy.core.queue.candidates import Candidates
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.retry import FailureKind, Retries, Verdict


class FailedAttempts:
    """Decides whether a request is retried, and reports its endpoint's failure to the `Judge`."""

    def __init__(self, retries: Retries, backpressure: Backpressure, judge: Judge, candidates: Candidates) -> None:
        self._retries, self._backpressure, self._judge, self._candidates = retries, backpressure, judge, candidates

    def decide(  # noqa: PLR0913 - what is known of a failure
        self,
        ticket: Ticket,
        kind: FailureKind,
        earlier: Sequence[FailureKind],
        *,
        now: float,
        why: str,
        refused: bool,
        decided: Verdict | None,
        retry_after_s: float | None = None,
    ) -> tuple[Verdict, bool]:
        """See `Balancer.after_failure`. Also returns whether the failure counts against the endpoint."""
        state = ticket.placed_state
        self._backpressure.note_failure(state, ticket.request.model, kind, now=now, retry_after_s=retry_after_s)
        is_unreachable = kind is FailureKind.CONNECT
        others_available = self._candidates.others_available(ticket, now, at_other_address=is_unreachable)
        if kind is FailureKind.STRANDED and ticket.is_trial and state.health is Health.HALF_OPEN:
            others_available = False
        verdict = decided or self._retries.decide(
            kind, earlier, others_available=others_available, now=now, repeatable=ticket.request.repeatable
        )
        if refused and self._candidates.response_owner(ticket.request, now) is not None:
            verdict = Verdict(False, Outcome.RESPONSE_NOT_FOUND)  # the process that stored it is gone
        # A 500 that is retried counts only if the retry succeeds; a 500 from two endpoints is the request's own fault.
        open_question = kind is FailureKind.ERROR and not ticket.is_trial and (verdict.retry or kind in earlier)
        counts = kind is not FailureKind.STRANDED and not open_question
        if counts:
            trial, placed_at = ticket.is_trial, ticket.placed_at or 0.0
            flow = ticket.request.flow
            self._judge.failed(state, kind, why, flow, trial=trial, placed_at=placed_at, now=now, refused=refused)
        return verdict, counts
