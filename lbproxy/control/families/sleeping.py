# SPDX-License-Identifier: Apache-2.0
"""What /metrics shows of endpoints that may sleep, and what it has to know for that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import Metric

from lbproxy.control.families.common import add_to, counter, counters, gauges, histogram
from lbproxy.control.families.histogram import Histogram
from lbproxy.core.observed.snapshot import PoolSnapshot
from lbproxy.core.sleeping.phase import Phase


class Sleeping(Protocol):
    """The driver of what sleeps: control.sleeping.driver.SleepDriver."""

    wake_times: Histogram
    """How long wakes took that succeeded, in seconds."""

    @property
    def is_needed(self) -> bool:
        """Whether there are servers that may sleep."""

    @property
    def waited(self) -> int:
        """Requests that waited for a wake, so far."""

    @property
    def results(self) -> Mapping[tuple[str, str, str], int]:
        """Orders that were carried out: the endpoint, what, and ok or failed."""


_COUNTERS = (
    ("wake", "wakes", "Times that the endpoint was woken, by result"),
    ("sleep", "sleeps", "Times that the endpoint was put to sleep, by result"),
    ("start", "cold_starts", "Times that the webhook was called that starts the endpoint, by result"),
)


def sleep_families(sleeping: Sleeping, snapshot: PoolSnapshot) -> Iterator[Metric]:
    """Nothing while no endpoint may sleep."""
    if not sleeping.is_needed:
        return
    names = {one.endpoint.uid: one.endpoint.name for one in snapshot.endpoints}
    phases = {names[uid]: one.phase for uid, one in snapshot.sleep.items() if uid in names}
    states = [((name, phase.value), float(phase is now)) for name, now in phases.items() for phase in Phase]
    yield gauges("endpoint_sleep_state", "1 for the current state of the endpoint", ("endpoint", "state"), states)
    failures = [((names[uid],), float(one.failures)) for uid, one in snapshot.sleep.items() if uid in names]
    text = "Wakes, sleeps or starts of the endpoint in a row that failed"
    yield gauges("endpoint_sleep_failures", text, ("endpoint",), failures)
    servers = {one.endpoint.server for one in snapshot.endpoints}
    results = dict(sleeping.results)
    for task, name, text in _COUNTERS:
        rows = [((one, how), count) for (one, what, how), count in results.items() if what == task and one in servers]
        yield counters(name, text, ("endpoint", "result"), rows)
    times = histogram("wake_seconds", "How long wakes took that succeeded", ())
    add_to(times, [], sleeping.wake_times)
    yield times
    yield counter("waited_for_wake", "Requests that waited for an endpoint to wake", sleeping.waited)
