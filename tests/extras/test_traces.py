# SPDX-License-Identifier: Apache-2.0
"""The thread that sends traces, before a collector that takes them, refuses them, stands still, or is not there."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lbproxy import __version__
from lbproxy.config.sections.observing import TraceSettings
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.observed.trace import Trace
from lbproxy.core.requests.outcome import Outcome
from lbproxy.extras import traces as module
from lbproxy.extras.traces import BATCH_REQUESTS, Traces
from tests.support.aio import run, until
from tests.support.otlp import Collector

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the machine's own, and no quiet minute that another test began."""
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_EXPORTER_OTLP_HEADERS"):
        monkeypatch.delenv(name, raising=False)
    exporters = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    monkeypatch.setattr(exporters, "filters", [])


def a_record(n: int = 0, *, traced: bool = True) -> RequestRecord:
    record = RequestRecord(f"r-{n}", "POST", "/v1/completions", "192.0.2.1", time.monotonic())
    record.outcome, record.status, record.ended_at = Outcome.COMPLETED, 200, record.started_at
    record.trace = Trace(None, random.Random(n)) if traced else None
    return record


@contextmanager
def sender(url: str, **more: object) -> Iterator[Traces]:
    settings = TraceSettings.model_validate({"endpoint": url, **more})
    assert settings.endpoint is not None
    traces = Traces.to_collector(settings, settings.endpoint)
    try:
        yield traces
    finally:
        traces.close(0.0)


def settled(traces: Traces, count: int) -> None:
    run(until(lambda: sum(traces.results.values()) == count, f"{count} are counted", within_s=30.0))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "lbproxy"]


def test_what_is_traced_comes_to_the_collector_and_nothing_else() -> None:
    with Collector() as collector, sender(collector.url) as traces:
        for n in range(10):
            traces.ended([a_record(n, traced=n % 2 == 0)])
        traces.close()
        assert traces.results == {"sent": 5, "failed": 0, "dropped": 0}
        assert [span.attributes["lbproxy.request_id"] for span in collector.spans] == [
            f"r-{n}" for n in range(0, 10, 2)
        ]
        assert set(collector.paths) == {"/v1/traces"}
        assert {head["content-type"] for head in collector.heads} == {"application/x-protobuf"}


def test_a_span_ends_when_its_request_did_by_the_wall_clock() -> None:
    with Collector() as collector, sender(collector.url) as traces:
        before = time.time_ns()
        traces.ended([a_record()])
        after = time.time_ns()
        traces.close()
        assert before <= collector.spans[0].end_ns <= after


def test_many_go_in_batches_without_the_wait_of_a_second() -> None:
    with Collector() as collector, sender(collector.url) as traces:
        for n in range(3 * BATCH_REQUESTS):
            traces.ended([a_record(n)])
        settled(traces, 3 * BATCH_REQUESTS)
        assert len({span.trace_id for span in collector.spans}) == 3 * BATCH_REQUESTS


def test_a_collector_that_stands_still_costs_what_there_is_no_room_for() -> None:
    """And whoever ends a request waits for nobody."""
    with Collector() as collector, sender(collector.url, queue_requests=5) as traces:
        collector.go.clear()
        traces.ended([a_record()])
        run(until(lambda: not traces._records, "the thread took it and waits for the collector"))
        for n in range(100):
            traces.ended([a_record(n)])
        assert traces.results["dropped"] == 95
        collector.go.set()
        settled(traces, 101)
        assert traces.results == {"sent": 6, "failed": 0, "dropped": 95}


def test_a_collector_that_refuses_is_said_once_and_so_is_that_it_takes_them_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with Collector(status=400) as collector, sender(collector.url) as traces:
        for n in range(3):
            traces.ended([a_record(n)])
            settled(traces, n + 1)
        assert traces.results["failed"] == 3
        collector.status = 200
        traces.ended([a_record()])
        settled(traces, 4)
        assert traces.results["sent"] == 1
    assert lines(caplog) == ["traces cannot be sent, and are lost", "traces are sent again"]
    others = [record for record in caplog.records if record.name.startswith("opentelemetry")]
    assert len(others) == 1, "OpenTelemetry's own word, which says why, comes once a minute"
    assert "400" in others[0].getMessage()


def test_the_end_does_not_wait_for_a_collector_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    """It would be asked again and again for as long as an export may take."""
    with sender(NOWHERE, timeout="1h") as traces:
        traces.ended([a_record()])
        run(until(lambda: not traces._records, "the thread tries"))
        traces.close(0.1)
        traces._thread.join(15.0)  # six tries take half a minute
        assert not traces._thread.is_alive()
        assert traces.results == {"sent": 0, "failed": 1, "dropped": 0}
        traces.ended([a_record()])
        assert traces.results["dropped"] == 1


def test_who_is_retired_sends_what_it_has_and_ends() -> None:
    with Collector() as collector, sender(collector.url) as traces:
        traces.ended([a_record()])
        traces.retire()
        traces._thread.join(30.0)
        assert not traces._thread.is_alive()
        assert len(collector.spans) == 1


def test_a_defect_costs_a_batch_and_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with Collector() as collector, sender(collector.url) as traces:
        monkeypatch.setattr(module, "BATCH_REQUESTS", 1)
        broken = a_record()
        broken.path = None  # type: ignore[assignment]
        traces.ended([broken])
        traces.ended([a_record(1)])
        settled(traces, 2)
        assert traces.results == {"sent": 1, "failed": 1, "dropped": 0}
        assert len(collector.spans) == 1
    assert [record.levelname for record in caplog.records if record.exc_info] == ["ERROR"]


# --- Settings and environment -----------------------------------------------------------------------------------------


def exported(collector: Collector, **more: object) -> None:
    with sender(collector.url, **more) as traces:
        traces.ended([a_record()])
        traces.close()
        assert traces.results["sent"] == 1


def test_headers_of_the_settings_and_of_the_environment_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=theirs,x-tenant=t1")
    with Collector() as collector:
        exported(collector, headers={"Authorization": "Bearer ours"})
        (head,) = collector.heads
        assert (head["authorization"], head["x-tenant"]) == ("Bearer ours", "t1")


def test_who_speaks_is_said_by_the_settings_else_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with Collector() as collector:
        exported(collector)
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab,service.name=from-attributes")
        exported(collector)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "from-name")
        exported(collector)
        exported(collector, service_name="from-settings")
        resources = [span.resource for span in collector.spans]
    names = [one["service.name"] for one in resources]
    assert names == ["lbproxy", "from-attributes", "from-name", "from-settings"]
    assert [one.get("deployment.environment.name") for one in resources] == [None, "lab", "lab", "lab"]
    assert {one["service.version"] for one in resources} == {__version__}
    assert len({one["service.instance.id"] for one in resources}) == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", NOWHERE),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", NOWHERE),
        ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.000001"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_TRACES_SAMPLER", "always_off"),
        ("OTEL_TRACES_EXPORTER", "none"),
        ("OTEL_SDK_DISABLED", "true"),
    ],
)
def test_other_variables_change_nothing(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with Collector() as collector:
        exported(collector)


def test_compression_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    with Collector() as collector:
        exported(collector)
        assert [head["content-encoding"] for head in collector.heads] == ["gzip"]
        assert len(collector.spans) == 1
