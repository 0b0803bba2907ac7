# SPDX-License-Identifier: Apache-2.0
"""What telemetry builds its page of: histograms, families by kind, and those about lbproxy's own load.

With `control.telemetry.telemetry` the only module that knows prometheus_client.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from lbproxy.control.discovery.discovery import EndpointFile
from lbproxy.control.discovery.known_names import KnownName, KnownService
from lbproxy.control.families.histogram import Histogram
from lbproxy.core.observed.ledger import Pair
from lbproxy.core.queue.flow import FlowSnapshot
from lbproxy.core.queue.flows import OTHERS
from lbproxy.core.requests.request import Tokens
from lbproxy.driver.own_load import OwnLoad


def add_to(family: HistogramMetricFamily, labels: Sequence[str], seen: Histogram) -> None:
    """Append what was seen to a family, as the series with these labels."""
    bounds = [*map(floatToGoString, seen.bounds), "+Inf"]
    cumulative = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip(bounds, seen.counts, strict=True):
        cumulative += count
        buckets.append((bound, cumulative))
    family.add_metric(labels, buckets, seen.total)


def counters(
    name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], float]]
) -> CounterMetricFamily:
    """Counters by label values."""
    family = CounterMetricFamily(f"lbproxy_{name}", f"{text}.", labels=labels)
    for values, count in rows:
        family.add_metric(values, count)
    return family


def counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"lbproxy_{name}", f"{text}.", value=value)


def gauges(
    name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], float | None]]
) -> GaugeMetricFamily:
    """Gauges by label values; None: no sample."""
    family = GaugeMetricFamily(f"lbproxy_{name}", f"{text}.", labels=labels)
    for values, value in rows:
        if value is not None:
            family.add_metric(values, value)
    return family


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"lbproxy_{name}", f"{text}.", value=value)


def histogram(name: str, text: str, labels: Sequence[str] = ("route",)) -> HistogramMetricFamily:
    """A family for `add_to`."""
    return HistogramMetricFamily(f"lbproxy_{name}", f"{text}.", labels=labels)


def render(family: Metric) -> bytes:
    return generate_latest(_Single(family))


Key = TypeVar("Key")
Value = TypeVar("Value")


def keep(series: MutableMapping[Key, Value], wanted: Callable[[Key], bool]) -> None:
    """Forget the others."""
    for key in [key for key in series if not wanted(key)]:
        del series[key]


class _Single(Collector):
    """Makes generate_latest render one family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client's Collector."""
        return (self._family,)


# --- Our own load -----------------------------------------------------------------------------------------------------


@dataclass
class RequestTotals:
    """Requests that ended, since the start."""

    first_bytes: list[int]
    """Streams by time to their first byte: by its bucket."""
    tokens: int
    """Tokens of responses that are no streams, as usage reports them. Of streams see EndpointSnapshot."""
    prompt_tokens: int = 0
    """Of prompts of which the response says how many tokens were cached."""
    cached_tokens: int = 0
    """How many of these were."""
    requests: int = 0
    errors: int = 0
    """Requests that an endpoint or lbproxy failed."""
    rejected: int = 0
    """Requests that were answered 429."""


@dataclass(frozen=True)
class WorkerFacts:
    """One worker process, as it said half a second ago at most."""

    index: int
    pid: int
    connections: int
    """Connections of clients."""
    running: int
    """Requests that run."""
    upstream_connections: int
    cpu_s: float
    """CPU time since its start."""
    cpu_share: float
    """The share of one core that it uses now."""
    loop_lag_s: float
    """The longest delay of its event loop in the last half second."""
    memory_bytes: int | None


@dataclass(frozen=True)
class Workers:
    """The worker processes. Counts are of all that ever were."""

    connected: Sequence[WorkerFacts]
    """Workers that are connected, by index."""
    unheard: int
    """Workers that are not connected, or have not said yet what they run."""
    internal_errors: int
    dropped_lines: int
    """Lines of the log."""
    placed_alone: int
    """Requests that they placed while there was no balancer process."""


class Loads:
    """How settings and other files were loaded."""

    def __init__(self) -> None:
        self.succeeded = True
        """The last time."""
        self.succeeded_at = time.time()
        """The last time that it did; wall time."""
        self.stale: set[str] = set()
        """What else is read from files, and could not be when they changed last."""
        self.state = StateStats()
        """How the state file is kept."""


class StateStats:
    """How the state file is read and written. Kept by control.saving."""

    def __init__(self) -> None:
        self.age_at_start_s: float | None = None
        """None: nothing was restored."""
        self.bytes: int | None = None
        self.written_at: float | None = None
        """The last time; wall time."""
        self.writes = {"written": 0, "failed": 0, "locked": 0}
        """Attempts by result; locked: another process writes the file."""


def state_families(state: StateStats) -> Iterator[Metric]:
    """How the state file is kept."""
    text = "Age of the state file that was restored at the start"
    yield gauges("state_age_at_start_seconds", text, (), [((), state.age_at_start_s)])
    yield gauges("state_bytes", "Size of the state file when it was last written", (), [((), state.bytes)])
    text = "Time when the state file was last written, in seconds since 1970"
    yield gauges("state_last_write_timestamp_seconds", text, (), [((), state.written_at)])
    text = "Writes of the state file, by result"
    yield counters("state_writes", text, ("result",), [((word,), count) for word, count in state.writes.items()])


def worker_families(workers: Workers) -> Iterator[Metric]:
    """What each worker process does."""
    facts = workers.connected
    for name, text, values in (
        ("connections", "Open connections from clients, by worker process", [one.connections for one in facts]),
        ("running_requests", "Requests that run, by worker process", [one.running for one in facts]),
        ("cpu_share", "Share of one core that a worker process uses", [one.cpu_share for one in facts]),
        ("memory_bytes", "Memory in use, by worker process", [one.memory_bytes or 0 for one in facts]),
    ):
        rows = [((str(one.index),), float(value)) for one, value in zip(facts, values, strict=True)]
        yield gauges(f"worker_{name}", text, ("worker",), rows)
    rows = [((str(one.index),), one.cpu_s) for one in facts]
    yield counters("worker_cpu_seconds", "CPU time since its start, by worker process", ("worker",), rows)
    text = "Requests that worker processes placed by themselves, while there was no balancer process"
    yield counter("requests_placed_alone", text, workers.placed_alone)


def load_families(load: OwnLoad) -> Iterator[Metric]:
    """What is open, what is refused, how near that is, and what becomes of traces."""
    yield gauge("client_connections", "Open connections from clients", load.connections)
    text = "Open connections to endpoints, including idle ones"
    yield gauge("upstream_connections", text, load.upstream_connections)
    if load.traces is not None:
        text = "Traced requests, by the result of their export"
        yield counters("traces", text, ("result",), [((word,), count) for word, count in load.traces.items()])
    reasons = [((reason,), float(reason == load.refuses)) for reason in load.refused]
    text = "1 while lbproxy refuses new requests because it lacks this resource itself"
    yield gauges("overloaded", text, ("reason",), reasons)
    refused = [((reason,), float(count)) for reason, count in {**load.refused, **load.refused_connections}.items()]
    text = "Requests (or connections) refused by lbproxy for lack of a resource"
    yield counters("overload_refusals", text, ("reason",), refused)
    text = "Client connections closed without a complete TLS handshake within 10 s"
    yield counter("tls_handshake_failures", text, load.failed_handshakes)
    yield counter("overload_ended_requests", "Running requests ended because memory was nearly full", load.ended)
    yield gauge("buffered_body_bytes", "Bytes of request bodies in memory", load.held_bytes)
    yield gauge("buffered_body_limit_bytes", "Limit of the bytes of request bodies in memory", load.max_held_bytes)
    memory = [((), load.limit_bytes)]
    yield gauges("memory_limit_bytes", "Memory limit of lbproxy, from its settings or its cgroup", (), memory)


# --- Where endpoints come from ----------------------------------------------------------------------------------------


MAX_FLOW_LABELS = 100


def flow_families(flows: Sequence[FlowSnapshot]) -> Iterator[Metric]:
    """What each flow has and had. Those after the first `MAX_FLOW_LABELS` are one, `others`."""
    rows: dict[str, list[float]] = {}
    for number, one in enumerate(flows):
        row = rows.setdefault(one.name if number < MAX_FLOW_LABELS else OTHERS, [0.0] * 4)
        for n, value in enumerate((one.waiting, one.in_flight, one.served_tokens, one.refused)):
            row[n] += value
    columns = [[((name,), row[n]) for name, row in rows.items()] for n in range(4)]
    yield gauges("flow_waiting_requests", "Requests in the queue, by flow", ("flow",), columns[0])
    yield gauges("flow_in_flight", "Requests in flight at endpoints, by flow", ("flow",), columns[1])
    text = "Work that a flow received, in tokens: uncached prompt tokens, plus twice the response tokens"
    yield counters("flow_served_tokens", text, ("flow",), columns[2])
    text = "Requests refused because of their flow's limit of requests or tokens per minute"
    yield counters("flow_refused", text, ("flow",), columns[3])


def token_families(used: Mapping[Pair, Tokens]) -> list[Metric]:
    """Who used how much. The parts of `tokens` add up; what servers did not report of it is estimated."""
    text = "Tokens of responses, by flow and model: uncached and cached ones of the prompt, and those of the response"
    names, estimated = ("flow", "model", "type"), "The part of lbproxy_tokens_total that no server reported"
    tokens = [((*pair, kind), getattr(row, kind)) for pair, row in used.items() for kind in Tokens._fields[:3]]
    guesses = [
        ((*pair, kind), guess)
        for pair, row in used.items()
        for kind, guess in (("prompt_uncached", row.estimated_prompt), ("completion", row.estimated_completion))
    ]
    return [counters("tokens", text, names, tokens), counters("estimated_tokens", estimated, names, guesses)]


def source_families(names: Sequence[KnownName | KnownService], files: Sequence[EndpointFile]) -> Iterator[Metric]:
    """How finding endpoints gets on. The settings and a file may have names that are called alike: these are added."""
    resolutions: Counter[tuple[str, str]] = Counter()
    addresses: Counter[tuple[str]] = Counter()
    for one in names:
        addresses[(one.entry.name,)] += len(one.authorities)
        resolutions.update({(one.entry.name, word): count for word, count in one.results.items()})
    if addresses:
        text = "Resolutions of a dns+ or srv+ name, by result"
        yield counters("dns_resolutions", text, ("name", "result"), resolutions.items())
        yield gauges("dns_addresses", "Addresses in use of a dns+ or srv+ name", ("name",), addresses.items())
    if files:
        reads = [((one.entry.name, word), count) for one in files for word, count in one.results.items()]
        text = "Versions of an endpoint file that were read, by result"
        yield counters("file_reads", text, ("name", "result"), reads)
        good = [((one.entry.name,), float(one.problem is None)) for one in files]
        text = "0 while an endpoint file cannot be read or is invalid; its last valid version stays in use"
        yield gauges("file_valid", text, ("name",), good)
        sizes = [((one.entry.name,), float(len(one.known))) for one in files]
        yield gauges("file_endpoints", "Endpoints in use of an endpoint file", ("name",), sizes)
