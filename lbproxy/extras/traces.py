# SPDX-License-Identifier: Apache-2.0
"""Sends traces to a collector: a sink of the Runtime, with a thread of its own.

Theory of operation. The event loop only appends the record of a request that is traced to a bounded queue. The thread
takes what has gathered every second, or as soon as there is a batch, makes spans of it and has OpenTelemetry's exporter
send them, which tries again for as long as an export may take. Not its BatchSpanProcessor: that takes finished spans,
so that they would be made on the event loop, and it does not say what it lost. Invariants:

- A collector that is slow, gone or refuses costs spans, which are counted, and nothing else.
- Every request that is traced is counted once: sent, failed (its export did not go well), or dropped (no room).
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from lbproxy import __version__
from lbproxy.config.sections.observing import TraceSettings
from lbproxy.core.endpoints.health import Transition
from lbproxy.core.observed.record import RequestRecord
from lbproxy.extras.spans import Spans

logger = logging.getLogger("lbproxy")

EXPORT_EVERY_S = 1.0
BATCH_REQUESTS = 128
"""In one export: about 350 spans, of 200 KB."""
FLUSH_S = 3.0
"""How long the end waits for the last export."""
LINE_EVERY_S = 60.0
"""The shortest time between two lines of what OpenTelemetry logs."""


class Traces:
    """A sink of the Runtime. `retire` it when another takes its place, `close` it when no request runs any more."""

    def __init__(self, exporter: SpanExporter, resource: Resource, queue_requests: int) -> None:
        """Starts its thread. The exporter is closed with it."""
        self._exporter = exporter
        self._spans = Spans(resource)
        self._room = queue_requests
        self._records: deque[tuple[RequestRecord, int]] = deque()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._abandoned = False
        self._lost = False
        """The last export failed."""
        # Each count has one writer: the first the loop, the others the thread.
        self._dropped = self._sent = self._failed = 0
        self._thread = threading.Thread(target=self._run, name="lbproxy-traces", daemon=True)
        self._thread.start()

    @classmethod
    def to_collector(cls, settings: TraceSettings, endpoint: str) -> Traces:
        """By OTLP over HTTP. Reads those OTEL_ variables that docs/traces.md names."""
        _quieten()
        headers = {name: text.get_secret_value() for name, text in settings.headers.items()}
        exporter = OTLPSpanExporter(endpoint, headers=headers, timeout=settings.timeout)
        return cls(exporter, _resource(settings.service_name), settings.queue_requests)

    @property
    def results(self) -> dict[str, int]:
        """What became of the requests that were traced and have ended, but for those that wait to be sent."""
        return {"sent": self._sent, "failed": self._failed, "dropped": self._dropped}

    def ended(self, records: list[RequestRecord]) -> None:
        for record in records:
            if record.trace is not None:
                self._take(record)

    def _take(self, record: RequestRecord) -> None:
        waiting = len(self._records)
        if waiting >= self._room or self._closing.is_set():
            self._dropped += 1
            return
        self._records.append((record, time.time_ns()))
        if waiting >= BATCH_REQUESTS and not self._wake.is_set():
            self._wake.set()

    def transition(self, transition: Transition) -> None:
        """See runtime.Sink. Endpoints have no traces."""

    def retire(self) -> None:
        """Send what waits, and end. Nothing more is taken."""
        self._closing.set()
        self._wake.set()

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """The same, waited for, but no longer than this: then what is left is lost."""
        self.retire()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._abandoned = True
            self._exporter.shutdown()  # ends the wait for another try

    def _run(self) -> None:
        closing = False
        while not closing:
            self._wake.wait(EXPORT_EVERY_S)
            self._wake.clear()  # before the queue is emptied, as the next: what comes meanwhile is seen next time
            closing = self._closing.is_set()
            self._export_all()
        if not self._abandoned:
            self._exporter.shutdown()

    def _export_all(self) -> None:
        while self._records and not self._abandoned:
            count = min(len(self._records), BATCH_REQUESTS)
            self._export([self._records.popleft() for _ in range(count)])

    def _export(self, batch: list[tuple[RequestRecord, int]]) -> None:
        try:
            spans = [span for record, ended_ns in batch for span in self._spans.of(record, ended_ns)]
            sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception:  # the next batch may go well
            logger.exception("%d traces could not be made or sent", len(batch))
            sent = False
        if sent:
            self._sent += len(batch)
        else:
            self._failed += len(batch)
        if sent is self._lost:
            self._lost = not sent
            level, word = (
                (logging.INFO, "are sent again") if sent else (logging.WARNING, "cannot be sent, and are lost")
            )
            logger.log(level, "traces %s", word, extra={"event": "traces"})


def _resource(service_name: str | None) -> Resource:
    """Who speaks: what the settings say, else the environment."""
    name = service_name or OTELResourceDetector().detect().attributes.get("service.name") or "lbproxy"
    own = {"service.name": name, "service.version": __version__, "service.instance.id": str(uuid.uuid4())}
    return Resource.create(own)


class _NowAndThen(logging.Filter):
    """Lets one line a minute through: a collector that is gone is no news each second."""

    def __init__(self) -> None:
        super().__init__()
        self._next_at = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now < self._next_at:
            return False
        self._next_at = now + LINE_EVERY_S
        return True


def _quieten() -> None:
    exporters = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    if not any(isinstance(one, _NowAndThen) for one in exporters.filters):
        exporters.addFilter(_NowAndThen())
