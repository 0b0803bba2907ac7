# SPDX-License-Identifier: Apache-2.0
"""Requests, usages, records and endpoints, into messages and out of them: not in `messages`, as this is compiled."""

from __future__ import annotations

from typing import Final

from lbproxy.core.capacity.allowance import Bounds
from lbproxy.core.endpoints.credentials import ApiKey, ForwardProxy, Tls
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointUid
from lbproxy.core.engines.handover import Handover, Role
from lbproxy.core.observed.record import MAX_PATH_CHARS, RequestRecord
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import WHOLE, InferenceRequest
from lbproxy.workers import messages as m
from lbproxy.workers.link import Sent
from lbproxy.workers.origins import NOT_KEPT

_PLACED: Final = m.Placed.__struct_config__.tag
_SAME: Final = m.Ended.__struct_fields__[6:]
"""Attributes of a record that a worker tells as they are."""
_TOLD: Final = ["uid", "name", "base_url", "rank", "weight", "tier", "model", "engine", "client_keep_alive"]
"""Attributes of an endpoint that a worker is told as they are."""


def submit_of(  # noqa: PLR0913, PLR0917 - see RequestRuntime.submit
    number: int,
    request: InferenceRequest,
    record: RequestRecord,
    avoid: frozenset[EndpointUid],
    suspect: EndpointUid | None,
    again: bool,
    owner: str | None,
) -> m.Submit:
    """The message about an attempt that begins."""
    attempt = None
    if avoid or suspect is not None or again or owner is not None:
        attempt = tuple(avoid), suspect, again, owner
    origin = record.method, record.path, record.client, record.route, record.key, NOT_KEPT
    return m.Submit(number, request, record.started_at, origin, attempt)


def placed(number: int, ticket: Ticket, prompt_tokens: float, explanation: str | None) -> Sent:
    """The message about a placement."""
    state, placed_at, leg = ticket.placed_state, ticket.placed_at, ticket.request.leg
    assert placed_at is not None
    uid, waited, first, overflow = state.endpoint.uid, placed_at > ticket.submitted_at, ticket.prefill, ticket.overflow
    flow = ticket.flow
    rates = None if flow is None or not flow.limited else flow.rates(placed_at)
    rare = rates is not None or waited or state.reported.asks_load or explanation is not None or overflow is not None
    if not rare and first is None and leg == WHOLE:
        return _PLACED, number, uid, placed_at, prompt_tokens
    first_uid = 0 if first is None else first.placed_state.endpoint.uid
    why = None if overflow is None else overflow.value
    rest = waited, state.reported.asks_load, explanation, leg, first_uid, why, rates
    return m.Placed(number, uid, placed_at, prompt_tokens, rest)


def message_of(record: RequestRecord) -> m.Ended:
    """The message about a record that is complete."""
    trace_id = None if record.trace is None else f"{record.trace.trace_id:032x}"
    same = [getattr(record, name) for name in _SAME]
    origin = record.method, record.client, record.started_at
    return m.Ended(record.number, *origin, m.OUTCOME_NUMBERS[record.outcome], trace_id, *same)


def fill(record: RequestRecord, end: m.Ended) -> RequestRecord:
    """Write what a worker noted into a record that the balancer process began, and return it.

    What only the balancer process knows stays as it is: why the request waited, the decisions, the predicted hits.
    """
    record.outcome, record.trace_id = m.OUTCOMES[end.outcome], end.trace_id
    for name in _SAME:
        setattr(record, name, getattr(end, name))
    return record


def is_plain(record: RequestRecord) -> bool:
    """Whether `served` says all that the balancer process does not know of a record: one attempt, and nothing else."""
    return (
        record.attempts == 1
        and record.error is None
        and record.trace is None
        and record.alias is None
        and record.fallback_from is None
        and record.prefill is None
        and record.tier == 1
        and record.overflow is None
        and not record.failed
        and not record.first_legs
        and len(record.path) < MAX_PATH_CHARS  # else it may have been cut
    )


def served(record: RequestRecord, answered: m.Answered | None) -> m.ServedAtOnce:
    """The message about a plain record. `answered`: a message about it that leaves at the same time, and needs not."""
    return m.ServedAtOnce(
        record.number,
        (
            answered is not None,
            answered is not None and answered.began,
            m.OUTCOME_NUMBERS[record.outcome],
            record.status,
            record.request_bytes,
            record.response_bytes,
            record.events,
            record.usage,
            record.queue_s,
            record.first_byte_at,
            record.ended_at,
        ),
    )


def fill_plain(record: RequestRecord, what: m.Fields) -> Outcome:
    """Write what a worker noted into a plain record that the balancer process began. Returns its outcome."""
    (
        _, _, number, record.status, record.request_bytes, record.response_bytes, record.events, record.usage,
        record.queue_s, record.first_byte_at, record.ended_at,
    ) = what  # fmt: skip
    record.attempts = 1
    record.outcome = outcome = m.OUTCOMES[number]
    return outcome


def member(
    endpoint: Endpoint, health: str, handover: Handover, *, draining: bool, dormant: str = "", process: int = 0
) -> m.Member:
    """What a worker is told of an endpoint. Secrets are in it: it goes to our own processes only."""
    proxy = endpoint.proxy
    credentials = None if proxy is None or proxy.credentials is None else proxy.credentials.reveal()
    return m.Member(
        **{name: getattr(endpoint, name) for name in _TOLD},
        forward_headers=endpoint.forward_headers,
        bounds=endpoint.bounds,
        api_key=None if endpoint.api_key is None else endpoint.api_key.reveal(),
        tls=endpoint.tls,
        proxy=None if proxy is None else (proxy.host, proxy.port, credentials),
        health=health,
        draining=draining,
        handover=(handover.role.value, handover.connector, handover.bootstrap_port),
        dormant=dormant,
        process=process,
    )


def read_endpoint(told: m.Member) -> Endpoint:
    """The endpoint, as far as a worker needs it."""
    proxy = None
    if told.proxy is not None:
        host, port, credentials = told.proxy
        proxy = ForwardProxy(host, port, None if credentials is None else ApiKey(credentials))
    return Endpoint(
        **{name: getattr(told, name) for name in _TOLD},
        forward_headers=tuple(told.forward_headers),
        bounds=None if told.bounds is None else Bounds._make(told.bounds),
        api_key=None if told.api_key is None else ApiKey(told.api_key),
        tls=None if told.tls is None else Tls._make(told.tls),
        proxy=proxy,
    )


def read_handover(told: m.Member) -> Handover:
    """Its part where prefill and decode are apart."""
    role, connector, port = told.handover
    return Handover(Role(role), connector, port)
