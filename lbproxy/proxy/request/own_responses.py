# SPDX-License-Identifier: Apache-2.0
"""Responses of lbproxy itself: errors in OpenAI's format, and the model list. Bytes, ready to write."""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime
from http import HTTPStatus
from math import ceil, floor
from typing import Final, NamedTuple
from urllib.parse import unquote

from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.queue.flow import MAX_RETRY_AFTER_S
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.models import Allowed
from lbproxy.core.requests.openai import REASON_FIELD, ModelCard, error_body, model_list
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.proxy.request.headers import status_line

# The names that users of llm-d's endpoint picker know.
_DROPPED_REASONS = {
    Outcome.SATURATED: "rejected-saturated",
    Outcome.NO_ENDPOINTS: "rejected-no-endpoints",
    Outcome.EXPIRED: "rejected-ttl-expired",
    Outcome.TOO_LATE: "rejected-ttl-expired",
    Outcome.DRAINING: "rejected-shutting-down",
}
RETRY_AFTER_S = (1, 5)
"""Random, so that refused clients do not come back together; far below the 120 s above which SDKs give up."""


def error_response(
    error: LbError, record: RequestRecord, *, keep_alive: bool, rng: random.Random, more: str = ""
) -> bytes:
    """An error as a complete response, in the format of the API of the request's path. `more`: further field lines,
    each with its CRLF.
    """
    facts = error.outcome.value
    fields = {"x-request-id": record.request_id}
    if record.attempts:
        fields["x-lbproxy-attempts"] = str(record.attempts)
    if facts.retry_after:
        spread = rng.randint(*RETRY_AFTER_S)
        after_s = min(error.retry_after_s or 0.0, MAX_RETRY_AFTER_S)
        fields["retry-after"] = str(ceil(after_s) or spread)
    fields[REASON_FIELD] = facts.code
    if error.outcome in _DROPPED_REASONS:
        fields["x-llm-d-request-dropped-reason"] = _DROPPED_REASONS[error.outcome]
    if not facts.client_retry:
        fields["x-should-retry"] = "false"
    if error.outcome is Outcome.UNAUTHORIZED:
        fields["www-authenticate"] = "Bearer"
    if error.outcome is Outcome.WEBSOCKET_VERSION:
        fields |= {"sec-websocket-version": "13", "upgrade": "websocket", "connection": "upgrade"}
    if error.allow is not None:
        fields["allow"] = error.allow
    return json_response(
        facts.status, error_body(error, record.path), fields, keep_alive=keep_alive, more=more + error.fields
    )


def json_response(status: int, body: bytes, fields: dict[str, str], *, keep_alive: bool, more: str = "") -> bytes:
    """A JSON body as a complete response: see `json_head`."""
    return json_head(status, len(body), fields, keep_alive=keep_alive, more=more) + body


def json_head(status: int, length: int, fields: dict[str, str], *, keep_alive: bool, more: str = "") -> bytes:
    """The head of a response with a JSON body of `length` bytes. `fields` are ASCII without line breaks, `more` are
    lines with their CRLF.
    """
    lines = [f"{name}: {value}\r\n" for name, value in fields.items()]
    if not keep_alive:
        lines.append("connection: close\r\n")
    kind = "content-type: application/json; charset=utf-8\r\n"
    head = f"{kind}content-length: {length}\r\n{''.join(lines)}{more}\r\n"
    return status_line(status) + head.encode("ascii")


def no_content_response(fields: str, *, keep_alive: bool) -> bytes:
    """A 204. `fields`: lines with their CRLF."""
    return status_line(204) + fields.encode("ascii") + (b"\r\n" if keep_alive else b"connection: close\r\n\r\n")


def rate_fields(ticket: Ticket | None, route: str, now: float) -> str:
    """Field lines about the limits per minute of a request's flow, in the words of its API; empty: there are none."""
    flow = None if ticket is None else ticket.flow
    rates = None if flow is None else flow.rates(now)
    if rates is None:
        return ""
    fields = ""
    for what, rate in zip(("requests", "tokens"), rates, strict=True):
        if rate is None:
            continue
        size, left, wait_s = rate
        facts = {"limit": f"{size:.0f}", "remaining": f"{max(0, floor(left + 1e-6))}"}
        if route == "messages":
            facts["reset"] = datetime.fromtimestamp(ceil(time.time() + wait_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            fields += "".join(f"anthropic-ratelimit-{what}-{name}: {fact}\r\n" for name, fact in facts.items())
        else:
            facts["reset"] = _in_words(wait_s)
            fields += "".join(f"x-ratelimit-{name}-{what}: {fact}\r\n" for name, fact in facts.items())
    return fields


def _in_words(seconds: float) -> str:
    """As OpenAI writes it: 12ms, 1s, 6m0s."""
    if seconds < 1.0:
        millis = ceil(seconds * 1000.0)
        return f"{millis}ms" if 0 < millis < 1000 else "1s" if millis else "0s"
    whole = ceil(seconds)
    return f"{whole}s" if whole < 60 else f"{whole // 60}m{whole % 60}s"


class _Listed(NamedTuple):
    """A list of models, as it was made."""

    of: list[ModelCard]
    cards: dict[str, ModelCard]
    body: bytes


MAX_LISTS: Final = 64
"""Lists that are kept: each may have megabytes, and clients with models of their own share fewer."""


def stream_head(fields: str, *, keep_alive: bool) -> bytes:
    """The head of an event stream in chunks. `fields`: lines with their CRLF. Proxies pass all on at once."""
    own = "content-type: text/event-stream\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"
    end = "\r\n" if keep_alive else "connection: close\r\n\r\n"
    return status_line(200) + f"{own}{fields}transfer-encoding: chunked\r\n{end}".encode("ascii")


class ModelList:
    """The bodies of /v1/models. All clients that may see the same models share the list, as long as it is the same: it
    can be megabytes long, and a client may take a minute to read it.
    """

    def __init__(self) -> None:
        self._lists: dict[tuple[Allowed, ...], _Listed] = {}

    def body(self, cards: list[ModelCard], path: str, allowed: tuple[Allowed, ...] = ()) -> bytes:
        """The body for a path of /v1/models: of all `cards`, or of the one that it names; those that are not in each of
        `allowed` do not exist. Raises LbError.
        """
        listed = self._lists.pop(allowed, None)
        if listed is None or listed.of != cards:
            seen = [card for card in cards if all(card.id in one for one in allowed)]
            listed = _Listed(cards, {card.id: card for card in seen}, model_list(seen))
        if len(self._lists) >= MAX_LISTS:
            del self._lists[next(iter(self._lists))]
        self._lists[allowed] = listed
        wanted = unquote(path.removeprefix("/v1/models").removeprefix("/"))
        if not wanted:
            return listed.body
        if wanted not in listed.cards:
            raise model_not_found(wanted)
        return listed.cards[wanted].raw


def model_not_found(model: str | None) -> LbError:
    """The error when no endpoint serves `model`."""
    return LbError(
        Outcome.MODEL_NOT_FOUND,
        f"The model `{model}` does not exist; GET /v1/models lists those that do.",
        param="model",
    )


def refusal(ticket: Ticket, model: str | None, fields: str = "") -> LbError:
    """The error for a request for `model` that got no place. `fields`: by `rate_fields`."""
    outcome = ticket.outcome
    assert outcome is not None
    if outcome is Outcome.MODEL_NOT_FOUND:
        return model_not_found(model)
    if outcome.value.status != HTTPStatus.TOO_MANY_REQUESTS:
        return LbError(outcome)
    return LbError(
        outcome, ticket.refusal and ticket.refusal.message, retry_after_s=ticket.retry_after_s, fields=fields
    )
