# SPDX-License-Identifier: Apache-2.0
"""What /metrics says of each endpoint, from a snapshot. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from prometheus_client.core import Metric

from lbproxy.control.families.common import counters, gauges, render
from lbproxy.core.endpoints.breaker import Cause
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointSnapshot
from lbproxy.core.observed.learned import FULL_BY, EndpointLearned


@dataclass(frozen=True)
class _EndpointGauge:
    name: str
    help: str
    read: Callable[[EndpointSnapshot], float | None]
    """None: no sample."""


def _up(one: EndpointSnapshot) -> float:
    return float(one.health is Health.UP)


def _waiting(one: EndpointSnapshot) -> float | None:
    return None if one.stale or one.metrics is None else one.metrics.waiting


def _running(one: EndpointSnapshot) -> float | None:
    return None if one.stale or one.metrics is None else one.metrics.running


def _kv_utilization(one: EndpointSnapshot) -> float | None:
    return None if one.stale or one.metrics is None else one.metrics.kv_utilization


_ENDPOINT_GAUGES = (
    _EndpointGauge("up", "1 while the endpoint is healthy and not ejected", _up),
    _EndpointGauge(
        "readmitted",
        "1 while it is used although it is ejected: panic",
        lambda one: float(one.readmitted),
    ),
    _EndpointGauge("share", "Share of placements that its slow start allows, 0.1 to 1", lambda one: one.share),
    _EndpointGauge("draining", "1 while the endpoint gets no new requests", lambda one: float(one.draining)),
    _EndpointGauge(
        "backing_off",
        "1 while it is backing off after it refused or failed requests",
        lambda one: float(one.backing_off),
    ),
    _EndpointGauge("in_flight", "Requests from lbproxy in flight at the endpoint", lambda one: one.in_flight),
    _EndpointGauge(
        "awaiting_first_byte", "Those of them without a first byte of the response", lambda one: one.awaiting_first_byte
    ),
    _EndpointGauge(
        "requests_elsewhere",
        "Requests of other replicas in flight at the endpoint, as far as is known",
        lambda one: one.elsewhere,
    ),
    _EndpointGauge("waiting", "Requests queued in the engine, from its fresh metrics", _waiting),
    _EndpointGauge("running", "Requests running in the engine, from its fresh metrics", _running),
    _EndpointGauge("kv_utilization", "Share of the KV cache in use, 0 to 1, from fresh metrics", _kv_utilization),
    _EndpointGauge(
        "metrics_age_seconds", "Age of the newest successful scrape or load report", lambda one: one.metrics_age_s
    ),
)

_KV_GAUGES = (
    _EndpointGauge(
        "kv_cached_tokens", "Tokens in the prefix cache, counted from KV events", lambda one: one.kv_cached_tokens
    ),
    _EndpointGauge(
        "kv_fill",
        "Share of the KV cache that holds cached tokens, 0 to 1",
        lambda one: one.kv_fill,
    ),
)


Learned: TypeAlias = Mapping[EndpointUid, EndpointLearned]
"""What was learned of each member; empty under policies that learn nothing."""


def render_endpoints(
    endpoints: Sequence[EndpointSnapshot], learned: Learned, ejections: Mapping[tuple[str, str], int]
) -> list[bytes]:
    """May run in a thread: it reads nothing that changes."""
    rooms = [(one.endpoint.name, learned[one.endpoint.uid]) for one in endpoints if one.endpoint.uid in learned]
    families = (*_endpoint_families(endpoints, ejections), *_room_families(rooms))
    return [render(family) for family in families]


def _room_families(rooms: Sequence[tuple[str, EndpointLearned]]) -> Iterator[Metric]:
    """How much more each endpoint takes now."""
    text = "Learned limit of requests that the endpoint runs at once"
    yield gauges("endpoint_request_limit", text, ("endpoint",), [((name,), room.limit) for name, room in rooms])
    text = "1 while the endpoint is full, by reason"
    reasons = [((name, word), float(room.full_by == word)) for name, room in rooms for word in FULL_BY]
    yield gauges("endpoint_full", text, ("endpoint", "reason"), reasons)
    text = "Predicted wait before the prefill of a request that is placed there now"
    waits = [((name,), room.wait_ms / 1000.0) for name, room in rooms]
    yield gauges("endpoint_wait_seconds", text, ("endpoint",), waits)
    text = "Requests that wait in lbproxy for room on the endpoint"
    yield gauges("endpoint_held_requests", text, ("endpoint",), [((name,), room.held) for name, room in rooms])


def _endpoint_families(
    endpoints: Sequence[EndpointSnapshot], ejections: Mapping[tuple[str, str], int]
) -> Iterator[Metric]:
    for one_gauge in _ENDPOINT_GAUGES:
        rows = [((one.endpoint.name,), one_gauge.read(one)) for one in endpoints]
        yield gauges(f"endpoint_{one_gauge.name}", one_gauge.help, ("endpoint",), rows)
    if any(one.kv_cached_tokens is not None for one in endpoints):
        yield from cache_families(endpoints)
    states = [
        ((one.endpoint.name, health.value), float(one.health is health)) for one in endpoints for health in Health
    ]
    yield gauges("endpoint_health", "1 for the current state of the endpoint", ("endpoint", "state"), states)
    text = "Ejections of the endpoint by the circuit breaker, by cause"
    keys = [(one.endpoint.name, cause.value) for one in endpoints for cause in Cause]
    yield counters("endpoint_ejections", text, ("endpoint", "cause"), [(key, ejections.get(key, 0)) for key in keys])
    text = "Known tokens of streams from the endpoint, counted four times a second"
    yield counters(
        "endpoint_streamed_tokens",
        text,
        ("endpoint",),
        [((one.endpoint.name,), one.tokens_streamed) for one in endpoints],
    )
    text = "Load reports in response headers of the endpoint"
    reports = [
        ((one.endpoint.name, word), count)
        for one in endpoints
        for word, count in (("ok", one.load_reports), ("malformed", one.malformed_reports))
        if one.asks_load or count
    ]
    yield counters("load_reports", text, ("endpoint", "result"), reports)


def cache_families(endpoints: Sequence[EndpointSnapshot]) -> Iterator[Metric]:
    """What the KV events of endpoints show of their caches: there is nothing of it while none are read."""
    for one_gauge in _KV_GAUGES:
        rows = [((one.endpoint.name,), one_gauge.read(one)) for one in endpoints]
        yield gauges(f"endpoint_{one_gauge.name}", one_gauge.help, ("endpoint",), rows)


def one_per_name(endpoints: Iterable[EndpointSnapshot]) -> list[EndpointSnapshot]:
    """An endpoint that is leaving may have a successor of the same name: the member stands for both, requests added."""
    by_name: dict[str, EndpointSnapshot] = {}
    for one in endpoints:  # members come first
        first = by_name.get(one.endpoint.name)
        if first is not None:
            in_flight = first.in_flight + one.in_flight
            awaiting = first.awaiting_first_byte + one.awaiting_first_byte
            elsewhere = first.elsewhere + one.elsewhere
            one = replace(first, in_flight=in_flight, awaiting_first_byte=awaiting, elsewhere=elsewhere)  # noqa: PLW2901
        by_name[one.endpoint.name] = one
    return list(by_name.values())
