# SPDX-License-Identifier: Apache-2.0
"""What /metrics says of each endpoint, from a snapshot. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TypeAlias

from prometheus_client.core import Metric

from lbproxy.control.families.common import counters, gauges, render
from lbproxy.core.endpoints.breaker import Cause
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointSnapshot
from lbproxy.core.observed.learned import FULL_BY, EndpointLearned

_Read: TypeAlias = Callable[[EndpointSnapshot], float | None]
"""None: no sample."""


def _fresh(name: str) -> _Read:
    """What the engine's metrics say, while they are believed."""
    return lambda one: None if one.stale or one.metrics is None else getattr(one.metrics, name)


_ENDPOINT_GAUGES: Mapping[str, tuple[str, _Read]] = {
    "up": ("1 while the endpoint is healthy and not ejected", lambda one: one.health is Health.UP),
    "readmitted": ("1 while it is used although it is ejected: panic", attrgetter("readmitted")),
    "share": ("Share of placements that its slow start allows, 0.1 to 1", attrgetter("share")),
    "draining": ("1 while the endpoint gets no new requests", attrgetter("draining")),
    "backing_off": ("1 while it is backing off after it refused or failed requests", attrgetter("backing_off")),
    "in_flight": ("Requests from lbproxy in flight at the endpoint", attrgetter("in_flight")),
    "awaiting_first_byte": ("Those of them without a first byte of the response", attrgetter("awaiting_first_byte")),
    "requests_elsewhere": (
        "Requests of other replicas in flight at the endpoint, as far as is known",
        attrgetter("elsewhere"),
    ),
    "waiting": ("Requests queued in the engine, from its fresh metrics", _fresh("waiting")),
    "running": ("Requests running in the engine, from its fresh metrics", _fresh("running")),
    "kv_utilization": ("Share of the KV cache in use, 0 to 1, from fresh metrics", _fresh("kv_utilization")),
    "metrics_age_seconds": ("Age of the newest successful scrape or load report", attrgetter("metrics_age_s")),
}
KV_GAUGES: Mapping[str, tuple[str, _Read]] = {
    "kv_cached_tokens": ("Tokens in the prefix cache, counted from KV events", attrgetter("kv_cached_tokens")),
    "kv_fill": ("Share of the KV cache that holds cached tokens, 0 to 1", attrgetter("kv_fill")),
}


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
    yield from gauge_families(_ENDPOINT_GAUGES, endpoints)
    if any(one.kv_cached_tokens is not None for one in endpoints):
        # There is nothing of it while no KV events are read.
        yield from gauge_families(KV_GAUGES, endpoints)
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


def gauge_families(table: Mapping[str, tuple[str, _Read]], endpoints: Sequence[EndpointSnapshot]) -> Iterator[Metric]:
    """A gauge of each endpoint for each row: its name, text, and how it is read."""
    for name, (text, read) in table.items():
        yield gauges(f"endpoint_{name}", text, ("endpoint",), [((one.endpoint.name,), read(one)) for one in endpoints])


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
