# SPDX-License-Identifier: Apache-2.0
"""Failing, slow and refusing model servers, and clients that leave, as other routers' tests have them."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.conformance.peers.restated import ENDPOINTS, FAILOVER, FAULTS, LEAVING, RETRIES, restates
from tests.support.aio import run, until
from tests.support.endpoint import OK, STREAM_HEAD, Received, ScriptedEndpoint, Wire, answer, event, hang
from tests.support.rig import post, rig

FAILS = answer(b'{"error":{"message":"broken"}}', status=500)
REFUSES = answer(b'{"error":{"message":"busy"}}', status=503)


@restates(ENDPOINTS, "test_generate_with_worker_failure", "test_rerank_worker_failure")
@restates(RETRIES, "test_retries_disabled")
@pytest.mark.parametrize("path", ["/generate", "/rerank"])
def test_the_only_servers_failure_reaches_the_client(path: str) -> None:
    """With one server that always fails, the client gets its 500."""

    async def main() -> None:
        async with ScriptedEndpoint(FAILS) as endpoint, rig(endpoint.url) as it:
            reply = await it.ask(post(b'{"text":"x","model":"m"}', path=path))
            assert (reply.status, json.loads(reply.body)) == (500, {"error": {"message": "broken"}})
            assert len(endpoint.requests) == 1

    run(main())


@restates(RETRIES, "test_retry_succeeds_with_healthy_fallback")
@restates(FAULTS, "test_worker_failure_reroute", "test_circuit_breaker_prevents_cascade")
def test_no_request_fails_beside_a_server_that_always_does() -> None:
    """Of two servers one always fails: requests succeed by a retry, and it is soon asked no more."""

    async def main() -> None:
        async with ScriptedEndpoint(FAILS) as bad, ScriptedEndpoint(OK) as good, rig(bad.url, good.url) as it:
            for n in range(40):
                assert (await it.ask(post(b'{"model":"m","messages":[%d]}' % n))).status == 200
            assert 0 < len(bad.requests) < 20

    run(main())


@restates(RETRIES, "test_retry_finds_healthy_worker")
def test_a_retry_finds_the_one_server_that_takes_requests() -> None:
    """Two of three servers refuse every request (503): it succeeds at the third."""

    async def main() -> None:
        async with (
            ScriptedEndpoint(REFUSES) as one,
            ScriptedEndpoint(REFUSES) as two,
            ScriptedEndpoint(OK) as good,
            rig(one.url, two.url, good.url, more="routing: {policy: round-robin}") as it,
        ):
            for _ in range(3):
                assert (await it.ask(post())).status == 200

    run(main())


@restates(
    RETRIES,
    "test_retry_finds_healthy_worker",
    differs="a request that two servers accepted and failed on is not sent to a third, as it may be what breaks them "
    "(docs/failures.md)",
)
def test_a_request_that_two_servers_fail_on_does_not_reach_the_third() -> None:
    """Two of three servers fail every request (500): it succeeds at the third."""

    async def main() -> None:
        async with (
            ScriptedEndpoint(FAILS) as one,
            ScriptedEndpoint(FAILS) as two,
            ScriptedEndpoint(OK) as good,
            rig(one.url, two.url, good.url, more="routing: {policy: round-robin}") as it,
        ):
            assert (await it.ask(post())).status == 500
            assert (len(one.requests), len(two.requests), len(good.requests)) == (1, 1, 0)

    run(main())


@restates(FAULTS, "test_all_workers_temporarily_failing")
@restates(RETRIES, "test_max_retries_limit")
@restates(FAILOVER, "test_raises_after_all_attempts_exhausted", "test_breaks_when_no_remaining_endpoints")
@pytest.mark.parametrize("script", [FAILS, REFUSES], ids=["500", "503"])
def test_a_pool_that_fails_is_an_error_after_a_bounded_number_of_attempts(script: bytes) -> None:
    """All servers fail: the client gets a 500 or 503, after as many attempts as there are servers at most."""

    async def main() -> None:
        async with ScriptedEndpoint(script) as one, ScriptedEndpoint(script) as two, rig(one.url, two.url) as it:
            assert (await it.ask(post())).status in {500, 503}
            assert (len(one.requests), len(two.requests)) == (1, 1)

    run(main())


@restates(FAULTS, "test_system_stability_under_partial_failure")
def test_a_server_that_fails_half_of_its_requests_costs_no_request() -> None:
    """Of two servers one fails every second request: all requests succeed."""

    async def main() -> None:
        count = 0

        async def half(wire: Wire, _: Received) -> None:
            nonlocal count
            count += 1
            await wire.send(FAILS if count % 2 else OK)

        async with ScriptedEndpoint(half) as flaky, ScriptedEndpoint(OK) as good, rig(flaky.url, good.url) as it:
            for n in range(30):
                assert (await it.ask(post(b'{"model":"m","messages":[%d]}' % n))).status == 200

    run(main())


@restates(FAULTS, "test_slow_worker_handling")
def test_all_requests_succeed_beside_a_slow_server() -> None:
    """Ten requests at once, one of two servers is slow: all succeed."""

    async def main() -> None:
        free = asyncio.Event()

        async def slow(wire: Wire, _: Received) -> None:
            await free.wait()
            await wire.send(OK)

        async with ScriptedEndpoint(slow) as one, ScriptedEndpoint(OK) as two, rig(one.url, two.url) as it:
            asked = [asyncio.ensure_future(it.ask(post())) for _ in range(10)]
            await until(lambda: len(one.requests) + len(two.requests) == 10)
            free.set()
            assert [reply.status for reply in await asyncio.gather(*asked)] == [200] * 10

    run(main())


@restates(
    ENDPOINTS,
    "test_program_retry_completes_each_route_attempt_without_occupancy_leak",
    differs="no second attempt at a server that has just refused: its 503 is relayed, and SDKs try again",
)
def test_a_lone_server_that_refuses_once_is_not_asked_again() -> None:
    """The only server refuses a request once (503): the router sends it again, and it succeeds."""

    async def main() -> None:
        async with ScriptedEndpoint(REFUSES) as endpoint, rig(endpoint.url) as it:
            assert (await it.ask(post())).status == 503
            assert len(endpoint.requests) == 1
            assert it.in_flight() == 0

    run(main())


@restates(FAILOVER, "test_no_retry_on_success")
def test_a_success_is_asked_for_once() -> None:
    """A request that succeeds has one attempt."""

    async def main() -> None:
        async with ScriptedEndpoint(OK) as one, ScriptedEndpoint(OK) as two, rig(one.url, two.url) as it:
            assert (await it.ask(post())).status == 200
            assert len(one.requests) + len(two.requests) == 1

    run(main())


@restates(FAILOVER, "test_retries_on_failure_with_different_url")
def test_a_refused_connection_leads_to_another_server() -> None:
    """A server that cannot be reached: the request goes to another one."""

    async def main() -> None:
        async with ScriptedEndpoint(OK) as good:
            async with ScriptedEndpoint(OK) as closed:
                pass
            async with rig(closed.url, good.url, more="routing: {policy: round-robin}") as it:
                replies = [await it.ask(post()) for _ in range(4)]
            assert [reply.status for reply in replies] == [200] * 4
            assert max(int(reply.field("x-lbproxy-attempts") or 1) for reply in replies) == 2

    run(main())


@restates(FAILOVER, "test_no_retry_when_disabled")
def test_retries_can_be_turned_off() -> None:
    """Retries are turned off: one attempt."""

    async def main() -> None:
        more = "retry: {attempts: 1}"
        async with (
            ScriptedEndpoint(FAILS) as one,
            ScriptedEndpoint(FAILS) as two,
            rig(one.url, two.url, more=more) as it,
        ):
            assert (await it.ask(post())).status == 500
            assert len(one.requests) + len(two.requests) == 1

    run(main())


@restates(FAILOVER, "test_http_exception_not_retried")
def test_a_clients_mistake_is_not_sent_elsewhere() -> None:
    """A 400 of a server is the client's mistake: no other server is asked."""

    async def main() -> None:
        bad = answer(b'{"error":{"message":"bad"}}', status=400)
        async with ScriptedEndpoint(bad) as one, ScriptedEndpoint(bad) as two, rig(one.url, two.url) as it:
            assert (await it.ask(post())).status == 400
            assert len(one.requests) + len(two.requests) == 1

    run(main())


@restates(LEAVING, "test_disconnect_before_headers_aborts_backend_request")
def test_who_leaves_before_the_head_frees_the_server_and_no_other_is_asked() -> None:
    """The client closes before the response's head: the request at the server is closed, and no other is asked."""

    async def main() -> None:
        async with ScriptedEndpoint(hang) as one, ScriptedEndpoint(hang) as two, rig(one.url, two.url) as it:
            client = await it.connect()
            client.send(post())
            await until(lambda: len(one.requests) + len(two.requests) == 1)
            client.writer.close()
            wire = (one.wires + two.wires)[0]
            await wire.gone.wait()
            await until(lambda: bool(it.records.requests))
            assert it.records.requests[0].outcome.label == "client_closed_request"
            assert len(one.requests) + len(two.requests) == 1

    run(main())


@restates(LEAVING, "test_abandoned_stream_is_marked_complete")
def test_an_abandoned_stream_is_not_counted_as_load_any_more() -> None:
    """The client leaves a stream: the server is closed, and counts as free."""

    async def main() -> None:
        async def begin(wire: Wire, _: Received) -> None:
            await wire.send(STREAM_HEAD, event('{"choices":[{"delta":{"content":"a"}}]}'))
            await wire.watch()

        async with ScriptedEndpoint(begin) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post(b'{"model":"m","stream":true}'))
            await client.head()
            assert it.in_flight() == 1
            client.writer.close()
            await endpoint.wires[0].gone.wait()
            await until(lambda: it.in_flight() == 0)

    run(main())


@restates(
    LEAVING, "test_connected_client_still_gets_the_response", "test_fully_consumed_stream_is_marked_complete_once"
)
def test_a_whole_stream_ends_its_request_once() -> None:
    """A client that stays gets the whole stream, and its request ends once."""

    async def main() -> None:
        parts = [event(text) for text in ('{"choices":[{"delta":{"content":"a"}}]}', "[DONE]")]
        stream = STREAM_HEAD + b"".join(parts) + b"0\r\n\r\n"
        async with ScriptedEndpoint(stream) as endpoint, rig(endpoint.url) as it:
            reply = await it.ask(post(b'{"model":"m","stream":true}'))
            assert reply.body.endswith(b"data: [DONE]\n\n")
            assert [record.outcome.label for record in it.records.requests] == ["completed"]

    run(main())
