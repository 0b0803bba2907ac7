# SPDX-License-Identifier: Apache-2.0
"""One request's record as OpenTelemetry spans: the request, each wait for a place, each attempt.

Names are those of the semantic conventions for HTTP (stable) and for generative AI (in development) where they have
one, and begin with `lbproxy.` where they have none. What is about generative AI stands on the span of the request
alone, which covers all attempts: tokens must not be counted twice. Nothing of a prompt or a response is in any.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from http import HTTPMethod
from typing import NamedTuple

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import AttributeValue

from lbproxy import __version__
from lbproxy.core.endpoints.endpoint import Endpoint
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.observed.trace import Attempt, Trace
from lbproxy.core.policies.explain import Decision
from lbproxy.core.queue.flow import ANONYMOUS
from lbproxy.core.requests.encodable import encodable_text
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import DECODE, PREFILL, Usage

MAX_CHARS = 512
"""Characters of a text that a client or an endpoint wrote."""
OPERATIONS = {
    "chat_completions": ("chat", "openai"),
    "responses": ("chat", "openai"),
    "messages": ("chat", "anthropic"),
    "completions": ("text_completion", "openai"),
    "embeddings": ("embeddings", "openai"),
}
"""`gen_ai.operation.name` and `gen_ai.provider.name`, which says whose API it is, by route."""
LEGS = (None, "prefill", "decode")
"""`lbproxy.leg`, by `InferenceRequest.leg`."""
_METHODS = frozenset(HTTPMethod)
_BROKE = frozenset({Outcome.UPSTREAM_BROKE, Outcome.CUT})
"""The response was not whole, whatever its status said."""
_ANSWERED = _BROKE | {Outcome.COMPLETED, Outcome.CLIENT_CLOSED}
"""The record's status is the endpoint's."""
_STATUS = {one: one.value.status for one in Outcome}
_SCOPE = InstrumentationScope("lbproxy", __version__)
Attributes = dict[str, AttributeValue]


class _Facts(NamedTuple):
    """What a span says, but for its ids and times."""

    name: str
    kind: SpanKind
    attributes: Attributes
    error: str | None = None
    """`error.type`; None = it went well."""
    why: str | None = None
    """For whoever reads it."""


class Spans:
    """Makes spans that all speak of one lbproxy."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource

    def of(self, record: RequestRecord, ended_ns: int) -> list[ReadableSpan]:
        """Those of a request that is traced and over, its own first. `ended_ns`: its end in ns since 1970."""
        trace = record.trace
        assert trace is not None
        made = _SpanTree(self._resource, record, trace, ended_ns)
        spans = [made.span(_request(record), trace.span_id, record.started_at, record.ended_at)]
        number = -1
        for attempt in trace.attempts:
            number += attempt.leg != DECODE  # a second leg is of the same attempt
            ended_at = record.ended_at if attempt.ended_at is None else attempt.ended_at
            first_byte_at = record.first_byte_at if attempt.ended_at is None else None
            facts = _attempt(record, attempt, number)
            spans.append(made.span(facts, attempt.span_id, attempt.placed_at, ended_at, first_byte_at))
        for begin, end in _waits(trace, record.ended_at):
            spans.append(made.span(_wait(record), secrets.randbits(64) or 1, begin, end))
        return spans


class _SpanTree:
    """What the spans of one request have in common."""

    def __init__(self, resource: Resource, record: RequestRecord, trace: Trace, ended_ns: int) -> None:
        self._resource = resource
        self._offset_ns = ended_ns - int(1e9 * record.ended_at)
        self._event = "first token" if record.stream else "first byte"
        self._trace = trace
        self._flags = TraceFlags(trace.flags)
        self._state = TraceState.from_header([trace.state]) if trace.state else None
        parent = trace.parent
        self._above = None if parent is None else self._context(parent.span_id, is_remote=True)
        self._root = self._context(trace.span_id)

    def span(
        self, facts: _Facts, span_id: int, begin: float, end: float, first_byte_at: float | None = None
    ) -> ReadableSpan:
        is_root = span_id == self._trace.span_id
        events = () if first_byte_at is None else (Event(self._event, timestamp=self._ns(first_byte_at)),)
        failed = facts.error is not None
        return ReadableSpan(
            facts.name,
            self._root if is_root else self._context(span_id),
            self._above if is_root else self._root,
            self._resource,
            facts.attributes | ({"error.type": facts.error} if facts.error is not None else {}),
            events,
            kind=facts.kind,
            status=Status(StatusCode.ERROR, facts.why and _text(facts.why)) if failed else Status(),
            start_time=self._ns(begin),
            end_time=self._ns(end),
            instrumentation_scope=_SCOPE,
        )

    def _ns(self, at: float) -> int:
        return self._offset_ns + int(1e9 * at)

    def _context(self, span_id: int, *, is_remote: bool = False) -> SpanContext:
        return SpanContext(self._trace.trace_id, span_id, is_remote, self._flags, self._state)


def _waits(trace: Trace, ended_at: float) -> Iterator[tuple[float, float]]:
    """When it waited for a place; nearly no request does."""
    for attempt in trace.attempts:
        if attempt.placed_at > attempt.submitted_at:
            yield attempt.submitted_at, attempt.placed_at
    if trace.waiting_since is not None:
        yield trace.waiting_since, ended_at


def _error(record: RequestRecord) -> str | None:
    """`error.type` of a request that did not get a complete response, or one that says that the server failed."""
    outcome = record.outcome
    if outcome in _BROKE or (outcome is not Outcome.COMPLETED and _STATUS[outcome] >= 500):
        return outcome.label
    return str(record.status) if record.status >= 500 else None


def _request(record: RequestRecord) -> _Facts:
    method, route = _method(record), _route(record)
    facts = _named(record) | _some(
        {
            "url.path": _text(record.path.partition("?")[0]),
            "http.route": route,
            "http.response.status_code": record.status or _STATUS[record.outcome] or None,
            "lbproxy.request_bytes": record.request_bytes,
            "client.address": record.client or None,
            "lbproxy.request_id": record.request_id,
            "lbproxy.outcome": record.outcome.label,
            "lbproxy.attempts": record.attempts,
            "lbproxy.endpoint": record.endpoint,
            "lbproxy.prefill": record.prefill,
            "lbproxy.events": record.events or None,
            "lbproxy.response_bytes": record.response_bytes,
            "lbproxy.key": record.key,
            "lbproxy.flow": None if record.flow in {None, ANONYMOUS} else _text(record.flow or ""),
            "lbproxy.alias": record.alias and _text(record.alias),
            "lbproxy.fallback_from": record.fallback_from and _text(record.fallback_from),
        }
    )
    operation = OPERATIONS.get(record.route)
    if operation is not None:
        facts |= _generation(record, *operation)
    return _Facts(
        method if route is None else f"{method} {route}", SpanKind.SERVER, facts, _error(record), record.error
    )


def _generation(record: RequestRecord, operation: str, provider: str) -> Attributes:
    """What the conventions for generative AI have names for."""
    first_byte_at = record.first_byte_at if record.stream else None
    usage = record.usage or Usage()
    return _some(
        {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": provider,
            "gen_ai.request.model": record.model and _text(record.model),
            "gen_ai.request.stream": record.stream or None,
            "gen_ai.response.time_to_first_chunk": None if first_byte_at is None else first_byte_at - record.started_at,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        }
    )


def _place(endpoint: Endpoint) -> tuple[Attributes, str]:
    """What `server.address` and `server.port` say, and the URL up to the path. A Unix socket has no port, and its path
    is the address.
    """
    if endpoint.base_url.startswith("unix:"):
        return {"server.address": endpoint.base_url.removeprefix("unix:")}, "http://localhost"
    host, _, port = endpoint.authority.rpartition(":")
    return {"server.address": host.strip("[]"), "server.port": int(port)}, endpoint.base_url


def _attempt(record: RequestRecord, attempt: Attempt, number: int) -> _Facts:
    endpoint = attempt.endpoint
    address, url = _place(endpoint)
    facts = _named(record) | _some(
        {
            "url.full": url + _text(record.path.partition("?")[0]),
            **address,
            "http.request.resend_count": number or None,
            "lbproxy.endpoint": endpoint.name,
            "lbproxy.leg": LEGS[attempt.leg],
        }
    )
    for made in record.decisions:
        if made.at == attempt.placed_at:
            facts |= _pick(made)
    status, error = 0, None
    if attempt.failure is None and attempt.ended_at is None:
        status = record.status if record.outcome in _ANSWERED else 0
        # A response that blames whoever asked is an error where it was asked for.
        error = _error(record) or (str(status) if status >= 400 else None)
    elif attempt.failure is None:
        status = 200 if attempt.leg == PREFILL else 0  # else it was ended as the first leg had failed
    else:
        said = attempt.failure.removeprefix("upstream_")
        status, error = int(said) if said.isdigit() else 0, attempt.failure
    if attempt.failure is None and attempt.leg != DECODE:
        facts |= _some({"lbproxy.predicted_cached_tokens": record.predicted_cached_tokens})
    if status:
        facts["http.response.status_code"] = status
    why = record.error if attempt is _last(record) else None
    return _Facts(_method(record), SpanKind.CLIENT, facts, error, why)


def _last(record: RequestRecord) -> Attempt | None:
    return record.trace.attempts[-1] if record.trace is not None and record.trace.attempts else None


def _wait(record: RequestRecord) -> _Facts:
    reason = None if record.wait is None else record.wait.value
    return _Facts("queue", SpanKind.INTERNAL, _some({"lbproxy.queue.reason": reason}))


def _pick(made: Decision) -> Attributes:
    """Why it was this endpoint."""
    return _some(
        {
            "lbproxy.pick.policy": made.policy.name,
            "lbproxy.pick.candidates": made.candidates,
            "lbproxy.pick.cost": made.cost,
        }
    )


def _route(record: RequestRecord) -> str | None:
    """The path as a template: those that are known have nothing that changes, but for the model in /v1/models/."""
    if record.route == "other":
        return None
    if record.route == "models" and record.path != "/v1/models":
        return "/v1/models/{model}"
    return _text(record.path)


def _method(record: RequestRecord) -> str:
    return record.method if record.method in _METHODS else "HTTP"


def _named(record: RequestRecord) -> Attributes:
    if record.method in _METHODS:
        return {"http.request.method": record.method}
    return {"http.request.method": "_OTHER", "http.request.method_original": _text(record.method)}


def _some(attributes: Mapping[str, AttributeValue | None]) -> Attributes:
    """Those that are known."""
    return {name: value for name, value in attributes.items() if value is not None}


def _text(text: str) -> str:
    """What others wrote, bounded, and such that UTF-8 can say it: one that it cannot would lose a whole export."""
    return encodable_text(text[:MAX_CHARS])
