# SPDX-License-Identifier: Apache-2.0
"""What a traced request costs lbproxy's CPU: `python -m benchmarks.traces`. The collector's side is not in it.

A stream with one attempt and everything that is known of one. The best of several turns, since others use the machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

from lbproxy.core.endpoints.endpoint import Endpoint, EndpointUid
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.observed.trace import Sampling
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import Usage
from lbproxy.extras.spans import Spans
from lbproxy.extras.traces import BATCH_REQUESTS

TURNS = 20
ENDED_NS = 1_800_000_000_000_000_000
ENDPOINT = Endpoint(name="gpu-1", base_url="http://10.0.0.1:8000", uid=EndpointUid(1))
THEIRS = b"traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\n"


def cost_us(turn: Callable[[], object]) -> float:
    """CPU time for each request of a batch."""
    best = float("inf")
    for _ in range(TURNS):
        began = time.process_time()
        turn()
        best = min(best, time.process_time() - began)
    return 1e6 * best / BATCH_REQUESTS


def begun(lines: bytes) -> list[RequestRecord]:
    """A batch, as far as the event loop brings it."""
    sampling = Sampling(1.0, follow_clients=True, rng=random.Random(1))
    records = []
    for n in range(BATCH_REQUESTS):
        record = RequestRecord(f"id-{n}", "POST", "/v1/chat/completions", "192.0.2.1", 100.0)
        record.trace, _ = sampling.begin(lines)
        assert record.trace is not None
        record.trace.placed(ENDPOINT, 100.0, 100.0)
        assert record.trace.fields
        records.append(record)
    return records


def ended() -> list[RequestRecord]:
    """The same with all that is known at their end."""
    records = begun(THEIRS)
    for record in records:
        record.route, record.model, record.stream = "chat_completions", "qwen3-8b", True
        record.status, record.outcome, record.endpoint, record.attempts = 200, Outcome.COMPLETED, "gpu-1", 1
        record.placed_at, record.first_byte_at, record.ended_at = 100.0, 100.2, 104.0
        record.usage, record.events = Usage(1200, 1024, 180), 182
        record.request_bytes, record.response_bytes = 5_000, 40_000
    return records


def main() -> None:
    records, spans = ended(), Spans(Resource.create({"service.name": "lbproxy"}))
    made = [span for record in records for span in spans.of(record, ENDED_NS)]
    loop = max(cost_us(partial(begun, lines)) for lines in (b"", THEIRS))
    making = cost_us(lambda: [spans.of(record, ENDED_NS) for record in records])
    encoding = cost_us(lambda: encode_spans(made).SerializeToString())
    size = len(encode_spans(made).SerializeToString()) / BATCH_REQUESTS
    print("| a traced request, two spans | CPU, us |\n| --- | --- |")
    print(f"| event loop: reading or making ids, the record they belong to | {loop:.0f} |")
    print(f"| thread: making spans | {making:.0f} |")
    print(f"| thread: encoding them, by OpenTelemetry's exporter, {size:.0f} bytes | {encoding:.0f} |")


if __name__ == "__main__":
    main()
