# SPDX-License-Identifier: Apache-2.0
"""A collector: takes OTLP over HTTP in a thread of its own, and keeps what came."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Message

from tests.support.aio import until

Value = str | int | float | bool | None

SERVER, CLIENT, INTERNAL = Message.SPAN_KIND_SERVER, Message.SPAN_KIND_CLIENT, Message.SPAN_KIND_INTERNAL


@dataclass
class Span:
    """One span, decoded."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    state: str
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    failed: bool
    why: str
    events: Mapping[str, int]
    """When, by name."""
    resource: Mapping[str, Value] = field(default_factory=dict)


def _value(value: AnyValue) -> Value:
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)


def _values(pairs: list[KeyValue]) -> dict[str, Value]:
    return {pair.key: _value(pair.value) for pair in pairs}


def decode(body: bytes) -> list[Span]:
    """The spans of an export, in order."""
    return [
        Span(
            name=one.name,
            kind=one.kind,
            trace_id=one.trace_id.hex(),
            span_id=one.span_id.hex(),
            parent_id=one.parent_span_id.hex(),
            state=one.trace_state,
            begin_ns=one.start_time_unix_nano,
            end_ns=one.end_time_unix_nano,
            attributes=_values(list(one.attributes)),
            failed=one.status.code == 2,
            why=one.status.message,
            events={event.name: event.time_unix_nano for event in one.events},
            resource=_values(list(group.resource.attributes)),
        )
        for group in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in group.scope_spans
        for one in scope.spans
    ]


class Collector:
    """Listens on a free port of 127.0.0.1 while entered. What it answers may be changed at any time."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.go = threading.Event()
        """Answers wait for it."""
        self.go.set()
        self.spans: list[Span] = []
        """Of exports that it answered well."""
        self.heads: list[Mapping[str, str]] = []
        """Fields of each export, names in lower case."""
        self.paths: list[str] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                head = {name.lower(): value for name, value in self.headers.items()}
                collector.go.wait(30)
                if collector.status == 200:
                    collector.spans += decode(gzip.decompress(body) if head.get("content-encoding") == "gzip" else body)
                collector.heads.append(head)
                collector.paths.append(self.path)
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Nobody reads it."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None) -> None:
        self.go.set()
        self._server.shutdown()
        self._server.server_close()

    async def has(self, count: int, wanted: Callable[[Span], bool] = lambda _: True) -> list[Span]:
        """Wait until so many spans are there that are `wanted`; they are those, in the order in which they came."""
        await until(lambda: sum(map(wanted, self.spans)) >= count, f"{count} spans came", within_s=30.0)
        return [span for span in self.spans if wanted(span)]
