# SPDX-License-Identifier: Apache-2.0
"""What a response has used: as its endpoint says, perhaps as it was asked to, or estimated by what it wrote, so that it
counts for limits.
"""

from __future__ import annotations

from math import ceil
from typing import Final

from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import BYTES_PER_TOKEN, Usage, estimated
from lbproxy.core.responses.text_rate import TextRate, TextRates
from lbproxy.core.responses.unasked import UnaskedUsage, UsageForm
from lbproxy.core.responses.usage import read_usage
from lbproxy.driver.request_runtime import RequestRuntime
from lbproxy.net.connections.h1 import ResponseHead
from lbproxy.net.connections.pool import Connection
from lbproxy.proxy.exchange.relay import (
    Relay,
    RequestOwner,
    Stage,
    is_json,
)
from lbproxy.proxy.request.client_request import ClientRequest
from lbproxy.proxy.request.reading import with_usage
from lbproxy.proxy.request.routes import Route

STREAM_OPTIONS: Final = b"stream_options"
MAX_FORMS: Final = 4096
"""Of which a form is remembered: two for each of 1,024 endpoints, and for those before them."""


class UsedTokens:
    """Finds out what responses have used. What was reported is noted in their records."""

    def __init__(self) -> None:
        self._rates = TextRates()
        self._forms: dict[tuple[int, str], tuple[int, UsageForm]] = {}
        """How streams say what they used, by endpoint and route, as its process did (`Standing.process`)."""

    def ask(
        self, client: ClientRequest, sent: ClientRequest, ticket: Ticket, *, always: bool, refused: bool
    ) -> tuple[ClientRequest, ClientRequest]:
        """The client's request for a stream, with the form that its response has, and the one to send to where it is
        placed, which asks for usage if that applies and the client does not. `refused`: not again.
        """
        form: UsageForm | None = None
        if client.route.continues and client.method == "POST" and (always or client.continues or _is_limited(ticket)):
            state = ticket.placed_state
            process, form = self._forms.get((state.endpoint.uid, client.route.name), (0, UsageForm.UNKNOWN))
            form = UsageForm.UNKNOWN if process != state.standing.process else form
            form = UsageForm.ANYWAY if refused else None if form is UsageForm.ANYWAY else form
            asking = None if form is None else with_usage(sent)
            form = None if asking is None else form
            if asking is not None and form is not None and form.is_asked:
                sent = asking
        return client if client.usage is form else client._replace(usage=form), sent

    def of_body(
        self, record: RequestRecord, ticket: Ticket, route: Route, head: ResponseHead, body: bytes
    ) -> Usage | None:
        """Of a response that came complete, and is no stream."""
        usage: Usage | None = None
        if is_json(head):
            usage = read_usage(body, native=route.is_native)
        completion = None
        if usage is not None:
            usage = _note_usage(record, ticket, usage)
            completion = usage.completion_tokens
        if completion is None and body and _generates(route, head.status, head.content_type):
            usage = estimated(
                usage, ceil(len(body) / (1.0 if head.encoded else self.rate(record, ticket).bytes_per_token))
            )
        return usage

    def of_stream(
        self, record: RequestRecord, ticket: Ticket, route: Route, relay: Relay, ended: Outcome
    ) -> Usage | None:
        """Of a response that was relayed and `ended` so."""
        if ended is Outcome.COMPLETED and (form := relay.usage_form) is not None:
            if len(self._forms) >= MAX_FORMS:
                self._forms.clear()
            state = ticket.placed_state
            self._forms[state.endpoint.uid, route.name] = state.standing.process, form
        usage = relay.usage
        if usage is not None:
            usage = _note_usage(record, ticket, usage)
        reported = None if usage is None else usage.completion_tokens
        if reported is not None and ended is Outcome.COMPLETED:
            if not relay.has_moved:
                events, text_bytes = relay.written
                self._rates.learn(record.endpoint or "", record.model or "", events, text_bytes, reported)
        elif _wrote_text(relay, route, record.status):
            # What was reported of a response that broke is what it had at its first event, or in one of its choices.
            usage = estimated(usage, max(reported or 0, relay.generated(self.rate(record, ticket))))
        return None if usage is None else relay.share(usage)

    def so_far(
        self, record: RequestRecord, ticket: Ticket, route: Route, relay: Relay, *, is_left: bool
    ) -> Usage | None:
        """Of a response that ends early: what the endpoint wrote until then; and if the client left before any of it
        came (`is_left`), what it is likely to have written. None: nothing that counts.
        """
        if not _wrote_text(relay, route, record.status):
            return None
        usage, generated = relay.usage, relay.generated(self.rate(record, ticket))
        if usage is not None:
            usage = usage.resolved(expected_prompt_tokens(ticket))
            generated = max(generated, usage.completion_tokens or 0)
        return relay.share(estimated(usage, generated)) if generated or is_left else None

    def rate(self, record: RequestRecord, ticket: Ticket) -> TextRate:
        """What the response to a placed request is likely to be like."""
        request = ticket.request
        is_text = request.prompt_bytes and not request.media_tokens
        prompt_rate = request.prompt_bytes / expected_prompt_tokens(ticket) if is_text else BYTES_PER_TOKEN
        return self._rates.of(record.endpoint or "", record.model or "", prompt_rate)


class AskedRelay(Relay):
    """The relay of a stream whose usage the client does not ask for."""

    def __init__(
        self, head: ResponseHead, connection: Connection, ticket: Ticket, runtime: RequestRuntime, owner: RequestOwner
    ) -> None:
        Relay.__init__(self, head, connection, ticket, runtime, owner)
        head.announced = None  # the client's length is another one
        self._unasked = UnaskedUsage(owner.request.usage or UsageForm.ANYWAY)

    @property
    def _keeps_framing(self) -> bool:
        return False

    def _pass(self, piece: bytes) -> None:
        Relay._pass(self, self._unasked.feed(piece))

    def ended(self) -> None:
        self._connection = None
        Relay._pass(self, self._unasked.end())
        if self.stage is not Stage.FINISHED:  # what was left may be an error, for which it is dropped
            Relay.ended(self)

    def _takes_event(self, connection: Connection | None) -> bool:
        if not self._unasked.changes:
            return Relay._takes_event(self, connection)
        return self._chunked and self._unasked.is_whole

    @property
    def usage_form(self) -> UsageForm | None:
        return self._unasked.learned


def refuses_usage(request: ClientRequest, head: ResponseHead, body: bytes = STREAM_OPTIONS) -> bool:
    """Whether an endpoint refuses a request as it asks for usage. `body`: without it, whether it may do so."""
    is_asked = request.usage is not None and request.usage.is_asked
    return is_asked and head.status in {400, 422} and body.find(STREAM_OPTIONS) >= 0


def _is_limited(ticket: Ticket) -> bool:
    """Whether a limit of tokens applies to a placed request, of its flow or its endpoint."""
    bounds, flow = ticket.placed_state.endpoint.bounds, ticket.flow
    if bounds is not None and (bounds.tokens_per_minute or bounds.tokens_per_day):
        return True
    rates = flow.rates(0.0) if flow is not None and flow.limited else None  # at any time: whether there are any
    return rates is not None and rates[1] is not None


def expected_prompt_tokens(ticket: Ticket) -> float:
    """About how long the prompt of a placed request is."""
    if ticket.placement is not None:
        return ticket.placement.prompt_tokens
    return ticket.predicted_prompt_tokens or ticket.request.body_bytes / 4.0


def _note_usage(record: RequestRecord, ticket: Ticket, usage: Usage) -> Usage:
    """Record the usage that the endpoint reported, with the complete prompt in it. Returns that."""
    if ticket.placement is not None:
        record.note_prediction(ticket)
    record.usage = usage = usage.resolved(expected_prompt_tokens(ticket))
    return usage


def _wrote_text(relay: Relay, route: Route, status: int) -> bool:
    return relay.is_readable_stream or _generates(route, status, relay.content_type)


def _generates(route: Route, status: int, content_type: bytes) -> bool:
    """Whether a response of this type is text that a model writes, and not an error. Of what it heard there is no
    usage, if the client wants that as text.
    """
    return (route.flatten is not None or (route.is_inference and content_type.startswith(b"text/"))) and status < 300
