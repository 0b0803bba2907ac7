# SPDX-License-Identifier: Apache-2.0
"""Traces through real sockets, on both ways in: what the endpoint is told, and what the record knows in the end."""

from __future__ import annotations

import random
import re

import pytest

from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.observed.trace import Sampling, Trace
from lbproxy.core.requests.outcome import Outcome
from tests.support.aio import run, until
from tests.support.endpoint import OK, Received, ScriptedEndpoint, Wire, answer, hang
from tests.support.rig import Rig, post, rig

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
CLIENTS = f"traceparent: {PARENT}\r\ntracestate: a=1,b=2\r\n"


def sample(it: Rig, ratio: float = 1.0) -> None:
    it.front.requests.sampling = Sampling(ratio, follow_clients=True, rng=random.Random(1))


def last(it: Rig) -> tuple[RequestRecord, Trace]:
    record = it.traced[-1]
    assert record.trace is not None
    return record, record.trace


def span_told(request: Received, trace_id: str) -> str:
    """The span that the endpoint's span is to be a child of."""
    (field,) = re.findall(rb"(?i)\r\ntraceparent: ([^\r]*)", request.head)
    match = re.fullmatch(rf"00-{trace_id}-([0-9a-f]{{16}})-0[13]", field.decode())
    assert match is not None, field
    return match[1]


# The last has two fields, which makes it no plain request.
@pytest.mark.parametrize("sent", [CLIENTS, "TraceParent:  bad \u00e9\r\n", CLIENTS + "tracestate: c=3\r\n", ""])
def test_what_a_client_says_goes_on_as_it_came_while_nobody_traces(sent: str) -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            assert (await it.ask(post(more=sent))).status == 200
            got = [line for line in endpoint.requests[0].head.split(b"\r\n") if line.lower().startswith(b"trace")]
            assert [line.replace(b" ", b"") for line in got] == sent.encode().replace(b" ", b"").split(b"\r\n")[:-1]
            assert it.traced[0].trace is None

    run(main())


def test_the_endpoint_is_told_the_attempt_and_the_client_is_its_grandparent() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            sample(it)
            assert (await it.ask(post(more=CLIENTS))).status == 200
            record, trace = last(it)
            assert trace.parent is not None
            assert (f"{trace.trace_id:032x}", f"{trace.parent.span_id:016x}") == (TRACE, SPAN)
            (attempt,) = trace.attempts
            (request,) = endpoint.requests
            assert span_told(request, TRACE) == f"{attempt.span_id:016x}"
            assert request.field("tracestate") == "a=1,b=2"
            assert request.head.lower().count(b"tracestate") == 1
            assert (attempt.endpoint.name, attempt.failure, attempt.ended_at) == ("e1", None, None)
            assert record.placed_at is not None
            assert record.started_at <= attempt.submitted_at <= attempt.placed_at == record.placed_at

    run(main())


def test_requests_without_a_trace_or_with_a_malformed_one_begin_their_own() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            sample(it)
            seen = set()
            for sent in ("", f"traceparent: {PARENT}x\r\ntracestate: a=1\r\n", CLIENTS + f"traceparent: {PARENT}\r\n"):
                assert (await it.ask(post(more=sent))).status == 200
                _, trace = last(it)
                span_told(endpoint.requests[-1], f"{trace.trace_id:032x}")
                assert endpoint.requests[-1].field("tracestate") is None
                seen.add(f"{trace.trace_id:032x}")
            assert len(seen | {TRACE}) == 4

    run(main())


def test_what_is_not_sampled_leaves_no_trace_and_the_endpoint_is_told_so() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            sample(it, 0.0)
            theirs = f"traceparent: 00-{TRACE}-{SPAN}-00\r\ntracestate: a=1\r\n"
            for sent in ("", theirs):
                assert (await it.ask(post(more=sent))).status == 200
            ours, passed = (request.field("traceparent") or "" for request in endpoint.requests)
            assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-02", ours)
            assert (passed, endpoint.requests[1].field("tracestate")) == (f"00-{TRACE}-{SPAN}-00", "a=1")
            assert [record.trace for record in it.traced] == [None, None]

    run(main())


@pytest.mark.parametrize("nominated", ["traceparent", "tracestate"])
def test_a_field_that_the_client_wants_to_end_here_does(nominated: str) -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            assert (await it.ask(post(more=f"{CLIENTS}Connection: {nominated}\r\n"))).status == 200
            assert endpoint.requests[0].field(nominated) is None

    run(main())


def test_a_retry_is_an_attempt_of_its_own() -> None:
    """Each endpoint is told another span, and the record knows when the first one failed, and how."""

    async def main() -> None:
        async with (
            ScriptedEndpoint(answer(status=503)) as one,
            ScriptedEndpoint() as other,
            rig(one.url, other.url, more="routing: {policy: round-robin}") as it,
        ):
            sample(it)
            for _ in range(2):  # one of the two goes to the bad one first
                assert (await it.ask(post(more=CLIENTS))).status == 200
            record = next(record for record in it.traced if record.attempts == 2)
            trace = record.trace
            assert trace is not None
            first, second = trace.attempts
            assert span_told(one.requests[0], TRACE) == f"{first.span_id:016x}"
            assert f"{second.span_id:016x}" in {span_told(request, TRACE) for request in other.requests}
            assert (first.failure, second.failure) == ("upstream_503", None)
            assert first.ended_at is not None
            assert first.placed_at <= first.ended_at <= second.submitted_at <= second.placed_at <= record.ended_at

    run(main())


def test_a_failed_connection_is_an_attempt_too() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint:
            dead = ScriptedEndpoint()
            async with dead:
                pass
            more = "routing: {policy: round-robin}"
            async with rig(dead.url, endpoint.url, more=more) as it:
                sample(it)
                for _ in range(2):
                    assert (await it.ask(post())).status == 200
                failures = [[one.failure for one in record.trace.attempts] for record in it.traced if record.trace]
                assert ["upstream_connect_failed", None] in failures

    run(main())


def test_waiting_for_a_place_is_known_also_of_who_leaves_meanwhile() -> None:
    async def main() -> None:
        async def slow(wire: Wire, request: Received) -> None:
            if b"first" in request.body:
                await until(lambda: it.runtime.snapshot().waiting == 2)
                clients[2].writer.transport.abort()
                await until(lambda: it.runtime.snapshot().waiting == 1)
            await wire.send(OK)

        more = "admission: {max_in_flight_per_endpoint: 1}\nrouting: {policy: least-request}"
        async with ScriptedEndpoint(slow) as endpoint, rig(endpoint.url, more=more) as it:
            sample(it)
            clients = [await it.connect() for _ in range(3)]
            clients[0].send(post(b'{"model":"m","prompt":"first"}'))
            await until(lambda: it.in_flight() == 1)
            clients[1].send(post(b'{"model":"m","prompt":"second"}'))
            await until(lambda: it.runtime.snapshot().waiting == 1)
            clients[2].send(post(b'{"model":"m","prompt":"third"}'))
            assert [(await client.reply()).status for client in clients[:2]] == [200, 200]
            by_outcome = {record.outcome: record for record in it.traced}
            left = by_outcome[Outcome.CLIENT_CLOSED].trace
            assert left is not None
            assert (left.attempts, left.waiting_since is None) == ([], False)
            _, waited = last(it)
            (attempt,) = waited.attempts
            assert attempt.submitted_at < attempt.placed_at
            assert waited.waiting_since is None

    run(main())


def test_what_lbproxy_answers_itself_is_traced_too() -> None:
    async def main() -> None:
        async with ScriptedEndpoint(hang) as endpoint, rig(endpoint.url) as it:
            sample(it)
            wrong = post(b"{", more=CLIENTS)
            for data, status in ((wrong, 400), (post(path="/nowhere", more=CLIENTS), 404)):
                assert (await it.ask(data)).status == status
                _, trace = last(it)
                assert (f"{trace.trace_id:032x}", trace.attempts) == (TRACE, [])

    run(main())
