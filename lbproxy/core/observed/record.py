"""What is known of one request, whatever happened to it: the one thing that everything that is observed is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lbproxy.core.queue.ticket import Ticket, Wait
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import Usage

if TYPE_CHECKING:
    from lbproxy.core.observed.trace import Trace
    from lbproxy.core.policies.explain import Decision


MAX_PATH_CHARS: Final = 512
"""Of a path in a record that is over."""


class RequestRecord:
    """One request, whatever happened. Access log, metrics and traces are sinks of it.

    Filled in as the request goes along, emitted once, never changed after that. Times are monotonic seconds. What has
    a default lives in the class until it is set: one is made for every request.
    """

    route: str = "other"
    """The route's bounded name, for labels; `path` is for the log only."""
    model: str | None = None
    alias: str | None = None
    """What the client called it, if that is a name of the settings' `models`."""
    stream: bool = False
    endpoint: str | None = None
    attempts: int = 0
    status: int = 0
    outcome: Outcome = Outcome.INTERNAL_ERROR
    failed: tuple[tuple[str, str], ...] = ()
    """The attempts that failed before a response: the endpoint's name, and the outcome's code."""
    error: str | None = None
    """What went wrong, for the log; may name addresses, so it never goes to a client."""
    request_bytes: int = 0
    response_bytes: int = 0
    events: int = 0
    """SSE events relayed."""
    usage: Usage | None = None
    """What the endpoint said that the request used."""
    predicted_cached_tokens: float | None = None
    """How much of the prompt was expected in the endpoint's cache; None = the policy expects nothing."""
    key: str | None = None
    """The name of the API key that it came with."""
    flow: str | None = None
    """Whose it is: see `core.queue.flows`. None until it is asked for a place."""
    queue_s: float = 0.0
    """Waited for a place, all attempts together."""
    placed_at: float | None = None
    first_byte_at: float | None = None
    ended_at: float = 0.0
    decision: Decision | None = None
    """About the last attempt, if decisions are wanted: see `core.policies.explain`. It leads to those before it."""
    wait: Wait | None = None
    """Why it waited for a place, the last time that it did."""
    held_for: str | None = None
    """The endpoint that it was held for when that wait began; None = for any."""
    full_by: str | None = None
    """Why that endpoint got no more: see `core.observed.learned.FULL_BY`. None = it was not full."""
    trace: Trace | None = None
    """Its ids and its attempts, if it is traced."""

    def __init__(self, id: str, method: str, path: str, client: str, started_at: float) -> None:  # noqa: A002
        self.id = id
        """At most 128 of the characters that `proxy.request.headers` lets through: it needs no escapes anywhere."""
        self.method = method
        self.path = path
        self.client = client
        self.started_at = started_at

    def note_wait(self, ticket: Ticket) -> None:
        """The ticket was not placed at once."""
        best = ticket.best
        self.wait, self.held_for, self.full_by = ticket.wait, None, None
        if best is not None:
            self.held_for, self.full_by = best.endpoint.name, best.load.full_by(ticket.submitted_at)

    def note_decision(self, decision: Decision) -> None:
        """About one more attempt."""
        decision.before, self.decision = self.decision, decision

    @property
    def decisions(self) -> list[Decision]:
        """One for each attempt, in order."""
        found = []
        made = self.decision
        while made is not None:
            found.append(made)
            made = made.before
        return found[::-1]
