# SPDX-License-Identifier: Apache-2.0
"""What a response has used: as its endpoint says, or estimated by what it wrote, so that it counts for limits."""

from __future__ import annotations

from math import ceil

from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import BYTES_PER_TOKEN, Usage, estimated
from lbproxy.core.responses.text_rate import TextRate, TextRates
from lbproxy.core.responses.usage import read_usage
from lbproxy.net.connections.h1 import ResponseHead
from lbproxy.proxy.exchange.relay import Relay, is_json
from lbproxy.proxy.request.routes import Route


class UsedTokens:
    """Finds out what responses have used. What was reported is noted in their records."""

    def __init__(self) -> None:
        self._rates = TextRates()

    def of_body(
        self, record: RequestRecord, ticket: Ticket, route: Route, head: ResponseHead, body: bytes
    ) -> Usage | None:
        """Of a response that came complete."""
        usage = read_usage(body, native=route.is_native) if is_json(head) else None
        completion = None
        if usage is not None:
            usage = _note_usage(record, ticket, usage)
            completion = usage.completion_tokens
        if completion is None and body and _generates(route, head.status, head.content_type):
            usage = estimated(
                usage, ceil(len(body) / (1.0 if head.encoded else self._rate(record, ticket).bytes_per_token))
            )
        return usage

    def of_stream(
        self, record: RequestRecord, ticket: Ticket, route: Route, relay: Relay, ended: Outcome
    ) -> Usage | None:
        """Of a response that was relayed and `ended` so."""
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
            usage = estimated(usage, max(reported or 0, relay.generated(self._rate(record, ticket))))
        return None if usage is None else relay.share(usage)

    def so_far(
        self, record: RequestRecord, ticket: Ticket, route: Route, relay: Relay, *, is_left: bool
    ) -> Usage | None:
        """Of a response that ends early: what the endpoint wrote until then; and if the client left before any of it
        came (`is_left`), what it is likely to have written. None: nothing that counts.
        """
        if not _wrote_text(relay, route, record.status):
            return None
        usage, generated = relay.usage, relay.generated(self._rate(record, ticket))
        if usage is not None:
            usage = usage.resolved(expected_prompt_tokens(ticket))
            generated = max(generated, usage.completion_tokens or 0)
        return relay.share(estimated(usage, generated)) if generated or is_left else None

    def _rate(self, record: RequestRecord, ticket: Ticket) -> TextRate:
        """What the response to a placed request is likely to be like."""
        request = ticket.request
        is_text = request.prompt_bytes and not request.media_tokens
        prompt_rate = request.prompt_bytes / expected_prompt_tokens(ticket) if is_text else BYTES_PER_TOKEN
        return self._rates.of(record.endpoint or "", record.model or "", prompt_rate)


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
