# SPDX-License-Identifier: Apache-2.0
"""What spans say of a request, by the semantic conventions, and that nothing in them can lose an export."""

from __future__ import annotations

import random

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

from lbproxy.config.sections.routing import RoutingSettings
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointUid
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.observed.trace import Parent, Trace
from lbproxy.core.policies.explain import Decision
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.queue.ticket import Wait
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import DECODE, PREFILL, Usage
from lbproxy.extras.spans import MAX_CHARS, Spans
from tests.support.otlp import CLIENT, INTERNAL, SERVER, Span, decode

ENDED_NS = 1_800_000_000_000_000_000
"""The wall clock's time at the end of each request here, which is 110.0 by its own clock."""
RESOURCE = Resource({"service.name": "lbproxy"})
PARENT = Parent(0xABC, 0xDEF, 3, "a=1")
ONE = Endpoint(name="gpu-1", base_url="http://10.0.0.1:8000", uid=EndpointUid(1))
OTHER = Endpoint(name="gpu-2", base_url="https://[fd00::2]:443", uid=EndpointUid(2))


def request(**facts: object) -> tuple[RequestRecord, Trace]:
    """A whole answer to a chat; `facts` are what is different."""
    record = RequestRecord("r-1", "POST", "/v1/chat/completions", "192.0.2.1", 100.0)
    record.trace = trace = Trace(PARENT, random.Random(1))
    record.route, record.model, record.status, record.outcome = "chat_completions", "m", 200, Outcome.COMPLETED
    record.request_bytes, record.response_bytes, record.ended_at = 30, 300, 110.0
    for name, value in facts.items():
        setattr(record, name, value)
    return record, trace


def spans_of(record: RequestRecord) -> list[Span]:
    """As a collector gets them, by way of the exporter's own encoder."""
    return decode(encode_spans(Spans(RESOURCE).of(record, ENDED_NS)).SerializeToString())


def ns(at: float) -> int:
    return ENDED_NS + round(1e9 * (at - 110.0))


def place(record: RequestRecord, trace: Trace, endpoint: Endpoint, submitted_at: float, placed_at: float) -> None:
    trace.placed(endpoint, submitted_at, placed_at)
    record.attempts += 1
    record.endpoint, record.placed_at = endpoint.name, placed_at


def split(record: RequestRecord, trace: Trace, *, at: float) -> None:
    """Place the first leg of a split request at ONE."""
    trace.placed(ONE, at, at, PREFILL)
    record.attempts += 1
    record.endpoint, record.prefill, record.placed_at = ONE.name, ONE.name, at


def test_a_split_request_has_a_span_for_each_leg_of_its_attempt() -> None:
    record, trace = request(stream=True, usage=Usage(50, 50, 5), prefill_usage=Usage(50, 32, 1))
    split(record, trace, at=100.0)
    trace.prefilled(102.0)
    trace.placed(OTHER, 102.0, 102.0, DECODE)
    record.endpoint, record.first_byte_at = OTHER.name, 103.0
    root, first, second = spans_of(record)
    assert (root.attributes["lbproxy.prefill"], root.attributes["lbproxy.endpoint"]) == ("gpu-1", "gpu-2")
    assert root.attributes["gen_ai.usage.cache_read.input_tokens"] == 32, "not what was transferred"
    assert (first.attributes["lbproxy.leg"], second.attributes["lbproxy.leg"]) == ("prefill", "decode")
    assert (first.begin_ns, first.end_ns, first.events, first.failed) == (ns(100.0), ns(102.0), {}, False)
    assert (second.begin_ns, second.end_ns, second.events) == (ns(102.0), ns(110.0), {"first token": ns(103.0)})
    assert not [one for one in (first, second) if "http.request.resend_count" in one.attributes], "one attempt"


def test_a_first_leg_that_fails_ends_the_second_which_did_not() -> None:
    record, trace = request()
    split(record, trace, at=100.0)
    trace.placed(OTHER, 100.0, 100.0, DECODE)
    trace.failed("upstream_503", 101.0, PREFILL)
    record.prefill = None
    place(record, trace, OTHER, 101.0, 101.0)
    _, first, second, whole = spans_of(record)
    assert (first.failed, first.attributes["error.type"], first.end_ns) == (True, "upstream_503", ns(101.0))
    assert (second.failed, second.end_ns, second.events) == (False, ns(101.0), {})
    assert "http.response.status_code" not in second.attributes
    assert (whole.attributes["http.request.resend_count"], whole.end_ns) == (1, ns(110.0))


def decision(at: float, *, cost: float) -> Decision:
    """The second of two endpoints was chosen."""
    states = [EndpointState(ONE), EndpointState(OTHER)]
    policy = make_policy(RoutingSettings(policy="least-request"))
    made = Decision(policy, at, states[1], states, [99.0, cost], None, [])
    made.parts = []
    return made


def test_a_stream_is_a_request_and_an_attempt() -> None:
    record, trace = request(
        stream=True,
        events=7,
        usage=Usage(50, 40, 5),
        predicted_cached_tokens=32.5,
        key="team-a",
        flow="u-7",
        alias="fast",
        fallback_from="big",
    )
    place(record, trace, ONE, 100.25, 100.25)
    record.first_byte_at = 101.5
    root, attempt = spans_of(record)
    assert (root.name, root.kind) == ("POST /v1/chat/completions", SERVER)
    assert (root.trace_id, root.parent_id, root.state) == (f"{0xABC:032x}", f"{0xDEF:016x}", "a=1")
    assert (root.begin_ns, root.end_ns, root.failed, root.events) == (ns(100.0), ns(110.0), False, {})
    assert root.resource == {"service.name": "lbproxy"}
    assert root.attributes == {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "lbproxy.request_bytes": 30,
        "client.address": "192.0.2.1",
        "lbproxy.request_id": "r-1",
        "lbproxy.outcome": "completed",
        "lbproxy.attempts": 1,
        "lbproxy.endpoint": "gpu-1",
        "lbproxy.events": 7,
        "lbproxy.response_bytes": 300,
        "lbproxy.key": "team-a",
        "lbproxy.flow": "u-7",
        "lbproxy.alias": "fast",
        "lbproxy.fallback_from": "big",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "m",
        "gen_ai.request.stream": True,
        "gen_ai.response.time_to_first_chunk": 1.5,
        "gen_ai.usage.input_tokens": 50,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 40,
    }
    assert (attempt.name, attempt.kind, attempt.failed) == ("POST", CLIENT, False)
    assert (attempt.trace_id, attempt.parent_id) == (root.trace_id, root.span_id)
    assert attempt.span_id == f"{trace.attempts[0].span_id:016x}"
    assert (attempt.begin_ns, attempt.end_ns) == (ns(100.25), ns(110.0))
    assert attempt.events == {"first token": ns(101.5)}
    assert attempt.attributes == {
        "http.request.method": "POST",
        "url.full": "http://10.0.0.1:8000/v1/chat/completions",
        "server.address": "10.0.0.1",
        "server.port": 8000,
        "http.response.status_code": 200,
        "lbproxy.endpoint": "gpu-1",
        "lbproxy.predicted_cached_tokens": 32.5,
    }


def test_an_endpoint_on_a_unix_socket_has_its_path_for_an_address() -> None:
    record, trace = request()
    unix = Endpoint(name="vllm.sock", base_url="unix:/run/vllm.sock", uid=EndpointUid(3))
    place(record, trace, unix, 100.25, 100.25)
    _, attempt = spans_of(record)
    said = {key: attempt.attributes.get(key) for key in ("server.address", "server.port", "url.full")}
    assert said["server.address"] == "/run/vllm.sock"
    assert said["server.port"] is None
    assert str(said["url.full"]).startswith("http://localhost/v1/")


def test_a_retry_after_a_wait_is_two_attempts_and_two_waits() -> None:
    record, trace = request(wait=Wait.FULL, error="returned 503", failed=(("gpu-1", "upstream_503"),))
    place(record, trace, ONE, 100.0, 101.0)
    trace.failed("upstream_503", 102.0)
    place(record, trace, OTHER, 102.0, 103.0)
    record.first_byte_at = 109.0
    root, first, second, *waits = spans_of(record)
    assert not root.failed, "the client got its answer"
    assert root.attributes["lbproxy.attempts"] == 2
    assert (first.begin_ns, first.end_ns, first.failed, first.events) == (ns(101.0), ns(102.0), True, {})
    assert (first.attributes["error.type"], first.attributes["http.response.status_code"]) == ("upstream_503", 503)
    assert "http.request.resend_count" not in first.attributes
    assert (second.begin_ns, second.end_ns, second.failed) == (ns(103.0), ns(110.0), False)
    assert second.events == {"first byte": ns(109.0)}
    assert second.attributes["http.request.resend_count"] == 1
    assert (second.attributes["server.address"], second.attributes["server.port"]) == ("fd00::2", 443)
    assert [(one.name, one.kind, one.begin_ns, one.end_ns) for one in waits] == [
        ("queue", INTERNAL, ns(100.0), ns(101.0)),
        ("queue", INTERNAL, ns(102.0), ns(103.0)),
    ]
    assert {one.attributes["lbproxy.queue.reason"] for one in waits} == {"full"}
    assert {one.parent_id for one in (first, second, *waits)} == {root.span_id}
    assert len({one.span_id for one in (root, first, second, *waits)}) == 5


def test_a_request_that_got_no_place_is_a_wait() -> None:
    record, trace = request(status=429, outcome=Outcome.EXPIRED, wait=Wait.BUSY)
    trace.waiting_since = 100.5
    root, wait = spans_of(record)
    assert (wait.name, wait.begin_ns, wait.end_ns) == ("queue", ns(100.5), ns(110.0))
    assert (root.failed, root.attributes["http.response.status_code"]) == (False, 429)  # by the conventions for servers
    assert root.attributes["lbproxy.outcome"] == "rejected_ttl_expired"


@pytest.mark.parametrize(
    ("outcome", "status", "failure", "error", "told"),
    [
        (Outcome.COMPLETED, 200, None, (None, None), 200),
        (Outcome.COMPLETED, 404, None, (None, "404"), 404),
        (Outcome.COMPLETED, 500, None, ("500", "500"), 500),
        (Outcome.UPSTREAM_BROKE, 200, None, ("upstream_broke", "upstream_broke"), 200),
        (Outcome.CUT, 200, None, ("lb_shutdown", "lb_shutdown"), 200),
        (Outcome.CLIENT_CLOSED, 0, None, (None, None), None),
        (Outcome.CLIENT_CLOSED, 200, None, (None, None), 200),
        (Outcome.UPSTREAM_RESET, 502, "upstream_reset", ("upstream_reset", "upstream_reset"), None),
        (Outcome.INTERNAL_ERROR, 500, None, ("internal_error", "internal_error"), None),
    ],
)
def test_who_is_to_blame_is_said_where_it_happened(
    outcome: Outcome, status: int, failure: str | None, error: tuple[str | None, str | None], told: int | None
) -> None:
    record, trace = request(status=status, outcome=outcome, error="why")
    place(record, trace, ONE, 100.0, 100.0)
    if failure is not None:
        trace.failed(failure, 109.0)
    root, attempt = spans_of(record)
    assert (root.attributes.get("error.type"), attempt.attributes.get("error.type")) == error
    assert (root.failed, attempt.failed) == (error[0] is not None, error[1] is not None)
    assert (root.why, attempt.why) == tuple("why" if one else "" for one in error)
    assert attempt.attributes.get("http.response.status_code") == told
    assert root.attributes["http.response.status_code"] == (status or 499)


@pytest.mark.parametrize(
    ("route", "path", "operation", "provider"),
    [
        ("completions", "/v1/completions", "text_completion", "openai"),
        ("embeddings", "/v1/embeddings", "embeddings", "openai"),
        ("messages", "/v1/messages", "chat", "anthropic"),
        ("rerank", "/rerank", None, None),
    ],
)
def test_operations_have_the_conventions_names(
    route: str, path: str, operation: str | None, provider: str | None
) -> None:
    (root,) = spans_of(request(route=route, path=path)[0])
    assert root.name == f"POST {path}"
    assert root.attributes.get("gen_ai.operation.name") == operation
    assert root.attributes.get("gen_ai.provider.name") == provider
    assert any(name.startswith("gen_ai.") for name in root.attributes) is (operation is not None)


def test_names_are_few_whatever_clients_ask_for() -> None:
    (model,) = spans_of(request(method="GET", route="models", path="/v1/models/m")[0])
    (unknown,) = spans_of(request(method="BREW", route="other", path="/pot?key=secret")[0])
    assert model.name == "GET /v1/models/{model}"
    assert (unknown.name, unknown.attributes["http.request.method"]) == ("HTTP", "_OTHER")
    assert (unknown.attributes["http.request.method_original"], unknown.attributes["url.path"]) == ("BREW", "/pot")
    assert "http.route" not in unknown.attributes


@pytest.mark.parametrize(
    "text", ["lone \udc80 surrogate \ud800", "\udcff" * (1 << 16), "x" * (1 << 20), "\U0001f600" * 999, "\x00\x01"]
)
def test_no_text_can_lose_an_export_or_bloat_it(text: str) -> None:
    facts = {"path": f"/{text}", "model": text, "alias": text, "error": text, "method": text, "flow": text}
    record, trace = request(**facts, outcome=Outcome.UPSTREAM_BROKE)
    place(record, trace, ONE, 100.0, 100.0)
    data = encode_spans(Spans(RESOURCE).of(record, ENDED_NS)).SerializeToString()
    assert len(decode(data)) == 2
    assert len(data) < 16 * 6 * MAX_CHARS


def test_an_attempt_says_why_it_was_that_endpoint() -> None:
    """Where the decision about it is known."""
    record, trace = request()
    place(record, trace, ONE, 100.0, 100.5)
    trace.failed("upstream_reset", 101.0)
    place(record, trace, OTHER, 101.0, 101.0)
    record.decision = decision(101.0, cost=12.5)
    _, first, second, _ = spans_of(record)
    picks = [{name: v for name, v in one.attributes.items() if ".pick." in name} for one in (first, second)]
    assert picks == [
        {},
        {"lbproxy.pick.policy": "least-request", "lbproxy.pick.candidates": 2, "lbproxy.pick.cost": 12.5},
    ]


def test_without_a_parent_it_is_a_root() -> None:
    record, _ = request(trace=Trace(None, random.Random(2)))
    (root,) = spans_of(record)
    assert (root.parent_id, root.state) == ("", "")
