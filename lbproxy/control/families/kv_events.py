# SPDX-License-Identifier: Apache-2.0
"""What /metrics shows of the KV events of endpoints, and what it has to know for that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from lbproxy.control.families.common import counters, gauges
from lbproxy.core.engines.kv_events import KvStats, Problem

_COUNTERS = (
    ("messages", "Messages that the endpoint published over ZMQ"),
    ("bytes", "Bytes of these messages"),
    ("clears", "Times that the endpoint cleared its prefix cache"),
    ("restarts", "Times that the publisher of the endpoint started again"),
    ("lost", "Messages that were lost and not replayed"),
    ("replayed", "Messages that were replayed"),
)


def kv_families(stats: Mapping[str, KvStats]) -> Iterator[Metric]:
    """How the events of each endpoint arrive, by its name; nothing while none are read."""
    if not stats:
        return
    for name, text in _COUNTERS:
        rows = [((endpoint,), getattr(one, name)) for endpoint, one in stats.items()]
        suffix = "_messages" if name in {"lost", "replayed"} else ""
        yield counters(f"kv_events_{name}{suffix}", text, ("endpoint",), rows)
    text = "Blocks stored in or removed from the prefix cache of the endpoint's GPU"
    blocks = [
        ((endpoint, change), count)
        for endpoint, one in stats.items()
        for change, count in (("stored", one.stored), ("removed", one.removed))
    ]
    yield counters("kv_events_blocks", text, ("endpoint", "change"), blocks)
    text = "Messages or events that were not used, by kind of problem"
    problems = [((name, kind.value), one.problems.get(kind, 0)) for name, one in stats.items() for kind in Problem]
    yield counters("kv_events_problems", text, ("endpoint", "problem"), problems)
    text = "Seconds since the last message of the endpoint"
    yield gauges("kv_events_age_seconds", text, ("endpoint",), [((name,), one.age_s) for name, one in stats.items()])
