# SPDX-License-Identifier: Apache-2.0
"""Requests, responses, limits and headers, as other routers' tests have them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from hashlib import sha256

import pytest

from lbproxy.proxy.request.keys import KeyRing
from tests.conformance.peers.restated import (
    ALIASES,
    BUFFERING,
    CACHE,
    EDGES,
    ENDPOINTS,
    FORMS,
    HEADERS,
    IDS,
    KEYS,
    LIMITS,
    SMG_LIMITS,
    STREAMS,
    VALIDATION,
    restates,
)
from tests.support.aio import run, until
from tests.support.endpoint import OK, STREAM_HEAD, Received, ScriptedEndpoint, Wire, answer, event
from tests.support.rig import Reply, Rig, post, rig

LIMIT = 1 << 20


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: lb\r\n\r\n".encode()


def code(reply: Reply) -> str:
    return str(json.loads(reply.body)["error"]["code"])


@restates(ENDPOINTS, "test_liveness_endpoint", "test_readiness_*", "test_health_endpoint_details")
@restates(KEYS, "test_health_endpoint_no_auth")
def test_health_is_asked_without_a_key() -> None:
    """`GET /health` needs no key; without a server that is up, it is 503."""

    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            it.front.requests.keys = KeyRing({sha256(b"sk-0123456789abcdef").digest(): "a"})
            assert (await it.ask(get("/health"))).status == 200
        async with rig("http://127.0.0.1:9", up=False) as it:
            assert (await it.ask(get("/health"))).status == 503

    run(main())


@restates(ENDPOINTS, "test_generate_success", "test_v1_chat_completions_success", "test_rerank_success")
@restates(ENDPOINTS, "test_v1_responses_non_streaming", "test_v1_rerank_compatibility")
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/rerank", "/v1/rerank", "/v1/responses"])
def test_a_response_is_relayed(path: str) -> None:
    """A request of each API gets the server's response."""

    async def main() -> None:
        async with ScriptedEndpoint(answer(b'{"of":"the server"}')) as endpoint, rig(endpoint.url) as it:
            reply = await it.ask(post(b'{"model":"m","text":"x"}', path=path))
            assert (reply.status, reply.body) == (200, b'{"of":"the server"}')
            assert endpoint.requests[0].path == path

    run(main())


@restates(STREAMS, "test_generate_streaming", "test_v1_*_streaming", "test_batch_streaming")
@restates(ENDPOINTS, "test_generate_streaming", "test_v1_responses_streaming")
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_stream_is_relayed_as_a_stream(path: str) -> None:
    """A stream's events arrive one by one, unchanged, as text/event-stream."""

    async def main() -> None:
        more = asyncio.Event()

        async def steps(wire: Wire, _: Received) -> None:
            await wire.send(STREAM_HEAD, event('{"n":1}'))
            await more.wait()
            await wire.send(event('{"n":2}'), event("[DONE]"), b"0\r\n\r\n")

        async with ScriptedEndpoint(steps) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post(b'{"model":"m","stream":true}', path=path))
            assert b"text/event-stream" in await client.head()
            assert b'{"n":1}' in await client.reader.readuntil(b"\n\n")
            more.set()
            rest = await client.reader.readuntil(b"0\r\n\r\n")
            assert rest.count(b"data: ") == 2
            assert b"data: [DONE]\n\n" in rest

    run(main())


@restates(STREAMS, "test_streaming_with_error")
def test_a_stream_that_cannot_begin_is_an_error() -> None:
    """A server that fails a request for a stream: the client sees the status, not an empty stream."""

    async def main() -> None:
        async with ScriptedEndpoint(answer(status=500)) as endpoint, rig(endpoint.url) as it:
            assert (await it.ask(post(b'{"model":"m","stream":true}'))).status == 500

    run(main())


@restates(ENDPOINTS, "test_v1_responses_get", "test_v1_responses_cancel", "test_v1_responses_get_multi_worker_fanout")
def test_a_stored_response_is_read_and_cancelled_where_it_is() -> None:
    """A stored response is read and cancelled by its id, whichever server has it."""

    async def main() -> None:
        made = answer(b'{"object":"response","id":"resp_1","status":"completed"}')
        async with ScriptedEndpoint(made) as one, ScriptedEndpoint(made) as two, rig(one.url, two.url) as it:
            await it.ask(post(b'{"model":"m","input":"x","store":true}', path="/v1/responses"))
            owner = one if one.requests else two
            for _ in range(4):
                assert (await it.ask(get("/v1/responses/resp_1"))).status == 200
            assert (await it.ask(post(b"", path="/v1/responses/resp_1/cancel"))).status == 200
            assert len(owner.requests) == 6

    run(main())


@restates(
    ENDPOINTS,
    "test_v1_responses_delete_and_list_not_implemented",
    differs="these are forwarded to the server that has the response; its answer counts",
)
def test_deleting_a_stored_response_is_the_servers() -> None:
    """To delete a response, or to list its input, is 501."""

    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            assert (await it.ask(get("/v1/responses/resp_1", "DELETE"))).status == 200
            assert (await it.ask(get("/v1/responses/resp_1/input"))).status == 200
            assert len(endpoint.requests) == 2

    run(main())


@restates(ENDPOINTS, "test_404_not_found")
def test_an_unknown_path_is_404() -> None:
    """Paths that no model server has are 404, and reach none."""

    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            for request in (get("/unknown_endpoint"), post(b'{"text":"x"}', path="/api/v2/generate")):
                assert (await it.ask(request)).status == 404
            assert not endpoint.requests

    run(main())


@restates(ENDPOINTS, "test_method_not_allowed")
def test_a_wrong_method_is_405() -> None:
    """POST to `/health`, and GET of a path for completions, are 405."""

    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            assert (await it.ask(post(path="/health"))).status == 405
            assert (await it.ask(get("/v1/chat/completions"))).status == 405
            assert not endpoint.requests

    run(main())


@restates(ENDPOINTS, "test_invalid_json_payload")
@restates(VALIDATION, "test_general_request_rejects_invalid_json_body")
@pytest.mark.parametrize("body", [b"{invalid json}", b"", b'{"model":"m"', b"\xff", b"[]"])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_what_is_no_json_object_is_400(path: str, body: bytes) -> None:
    """A body that is no JSON object is 400, and reaches no server."""

    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            assert (await it.ask(post(body, path=path))).status == 400
            assert not endpoint.requests

    run(main())


@restates(EDGES, "body_at_the_payload_limit_is_routed_and_one_byte_more_is_rejected")
@restates(ENDPOINTS, "test_payload_too_large")
def test_the_limit_of_a_body_is_inclusive() -> None:
    """A body of exactly the limit is served; one byte more is 413, and reaches no server."""

    async def main() -> None:
        envelope = len(b'{"model":"m","prompt":""}')
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url, more=f"limits: {{body: {LIMIT}}}") as it:
            for size, status in ((LIMIT, 200), (LIMIT + 1, 413)):
                body = b'{"model":"m","prompt":"%s"}' % (b"x" * (size - envelope))
                assert (await it.ask(post(body, path="/v1/completions"))).status == status
            assert len(endpoint.requests) == 1

    run(main())


@restates(ENDPOINTS, "test_request_id_generation")
@restates(IDS, "test_request_id_forwarding", "test_header_priority")
@restates(HEADERS, "test_process_request_preserves_client_auth_and_normalizes_request_id")
def test_a_request_keeps_its_id_and_its_credentials() -> None:
    """The client's x-request-id (made unique) and credentials reach the server, each once; the response has the id."""

    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            sent = "x-request-id: mine-1\r\nx-correlation-id: other\r\nAuthorization: Bearer t\r\nX-Custom: keep\r\n"
            assert (await it.ask(post(more=sent))).field("x-request-id") == "mine-1"
            head = endpoint.requests[0].head.lower()
            assert head.count(b"x-request-id: mine-1-") == head.count(b"x-request-id") == 1
            assert b"authorization: bearer t\r\n" in head
            assert b"x-custom: keep\r\n" in head

    run(main())


@restates(
    IDS,
    *("test_auto_generated_request_id", "test_chat_completions_request_id_format", "test_correlation_id_forwarding"),
    differs="an id of its own has no prefix by API, and x-correlation-id is forwarded but is not the request's id",
)
def test_a_request_without_an_id_gets_one() -> None:
    """Without x-request-id the id is x-correlation-id, or a new one with a prefix by API (`chatcmpl-`)."""

    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            replies = [await it.ask(post(more="x-correlation-id: c-1\r\n")) for _ in range(2)]
            ids = [reply.field("x-request-id") for reply in replies]
            assert len(set(ids)) == 2
            assert not {None, "", "c-1"} & set(ids)
            assert b"x-correlation-id: c-1\r\n" in endpoint.requests[0].head

    run(main())


@restates(KEYS, "test_no_auth_required", "test_with_api_key_header", "test_openai_api_key_header")
@restates(KEYS, "test_concurrent_authenticated_requests")
def test_keys_that_nobody_asks_for_do_no_harm() -> None:
    """Where no key is required, requests with none, with a bearer token or with X-API-Key succeed."""

    async def main() -> None:
        lines = ["", "X-API-Key: sk-test\r\n", *(f"Authorization: Bearer key-{n}\r\n" for n in range(20))]
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            replies = await asyncio.gather(*(it.ask(post(more=line)) for line in lines))
            assert {reply.status for reply in replies} == {200}

    run(main())


async def at_once(it: Rig, count: int, endpoint: ScriptedEndpoint, arrive: int, free: asyncio.Event) -> list[Reply]:
    """The responses to so many requests at once; the server is freed when `arrive` of them have reached it."""
    asked = [asyncio.ensure_future(it.ask(post())) for _ in range(count)]
    await until(lambda: len(endpoint.requests) == arrive and sum(one.done() for one in asked) == count - arrive)
    free.set()
    return list(await asyncio.gather(*asked))


@restates(LIMITS, "test_rate_limit_and_queue", "test_rate_limit_429_carries_retry_after")
def test_what_is_over_the_limit_is_429_with_retry_after() -> None:
    """Two requests may run and none may wait: of sixteen, two succeed, the others get 429 with a Retry-After of at
    least 1.
    """

    async def main() -> None:
        free = asyncio.Event()

        async def slow(wire: Wire, _: Received) -> None:
            await free.wait()
            await wire.send(OK)

        more = "admission: {max_in_flight_per_endpoint: 2, queue_requests: 0}"
        async with ScriptedEndpoint(slow) as endpoint, rig(endpoint.url, more=more) as it:
            replies = await at_once(it, 16, endpoint, 2, free)
            assert Counter(reply.status for reply in replies) == {200: 2, 429: 14}
            refused = [reply for reply in replies if reply.status == 429]
            assert all(int(reply.field("retry-after") or 0) >= 1 for reply in refused)

    run(main())


@restates(
    LIMITS,
    "test_rate_limit_queue_and_timeout",
    differs="429 with Retry-After where that router has 408: SDKs try a 429 again later, a 408 at once",
)
def test_who_waits_too_long_is_refused() -> None:
    """One request runs, one may wait: it gets 408 when its wait is over, and those beyond get 429."""

    async def main() -> None:
        free = asyncio.Event()

        async def slow(wire: Wire, _: Received) -> None:
            await free.wait()
            await wire.send(OK)

        more = "admission: {max_in_flight_per_endpoint: 1, queue_requests: 1, queue_timeout: 50ms}"
        async with ScriptedEndpoint(slow) as endpoint, rig(endpoint.url, more=more) as it:
            replies = await at_once(it, 4, endpoint, 1, free)
            assert Counter(reply.status for reply in replies) == {200: 1, 429: 3}
            assert len({code(reply) for reply in replies if reply.status == 429}) == 2

    run(main())


@restates(SMG_LIMITS, "test_concurrent_requests_within_limit", "test_unlimited_concurrent_requests")
@pytest.mark.parametrize(("more", "count"), [("admission: {max_in_flight_per_endpoint: 10}", 5), ("", 20)])
def test_within_the_limit_all_run_at_once(more: str, count: int) -> None:
    """Requests within the limit, or without one, all reach the server at once and succeed."""

    async def main() -> None:
        free = asyncio.Event()

        async def slow(wire: Wire, _: Received) -> None:
            await free.wait()
            await wire.send(OK)

        async with ScriptedEndpoint(slow) as endpoint, rig(endpoint.url, more=more) as it:
            replies = await at_once(it, count, endpoint, count, free)
            assert {reply.status for reply in replies} == {200}

    run(main())


@restates(SMG_LIMITS, "test_queue_behavior")
def test_what_waits_is_served_in_its_turn() -> None:
    """Two requests may run and five may wait: seven succeed, one after the other, and the others are refused."""

    async def main() -> None:
        free = asyncio.Event()

        async def slow(wire: Wire, _: Received) -> None:
            await free.wait()
            await wire.send(OK)

        more = "admission: {max_in_flight_per_endpoint: 2, queue_requests: 5}"
        async with ScriptedEndpoint(slow) as endpoint, rig(endpoint.url, more=more) as it:
            asked = [asyncio.ensure_future(it.ask(post())) for _ in range(10)]
            await until(lambda: sum(one.done() for one in asked) == 3)
            free.set()
            replies = await asyncio.gather(*asked)
            assert Counter(reply.status for reply in replies) == {200: 7, 429: 3}

    run(main())


LONG = "One file after the other is read, and what they have in common is what the server has cached. " * 20


@restates(CACHE, "test_cache_aware_affinity", "test_cache_aware_chat_affinity_uses_stable_agent_prefix")
@pytest.mark.parametrize("chat", [False, True], ids=["the same prompt", "the same beginning"])
def test_what_begins_alike_goes_where_it_is_cached(chat: bool) -> None:
    """Twelve requests with the same prompt, or with the same system prompt and tools: ten or more go to one of two
    servers. (Here the common part is long enough to be cached: engines cache blocks of 16 tokens and more.)
    """

    async def main() -> None:
        async with ScriptedEndpoint(OK) as one, ScriptedEndpoint(OK) as two, rig(one.url, two.url) as it:
            for n in range(12):
                if chat:
                    messages = [{"role": "system", "content": LONG}, {"role": "user", "content": f"Task {n}"}]
                    body, path = {"model": "m", "messages": messages, "tools": []}, "/v1/chat/completions"
                else:
                    body, path = {"model": "m", "prompt": LONG}, "/v1/completions"
                assert (await it.ask(post(json.dumps(body).encode(), path=path))).status == 200
            assert max(len(one.requests), len(two.requests)) >= 10

    run(main())


@restates(CACHE, "test_cache_aware_diverse_prompts_balances")
@restates(ENDPOINTS, "test_request_distribution", "test_random_policy")
def test_what_has_nothing_in_common_is_spread() -> None:
    """Forty different prompts, sixteen at a time: all succeed, and at least two of three servers take part."""

    async def main() -> None:
        async with (
            ScriptedEndpoint(OK) as one,
            ScriptedEndpoint(OK) as two,
            ScriptedEndpoint(OK) as three,
            rig(one.url, two.url, three.url) as it,
        ):
            gate = asyncio.Semaphore(16)

            async def ask(n: int) -> int:
                async with gate:
                    return (await it.ask(post(b'{"model":"m","prompt":"%d"}' % n, path="/v1/completions"))).status

            assert set(await asyncio.gather(*(ask(n) for n in range(40)))) == {200}
            assert sum(bool(server.requests) for server in (one, two, three)) >= 2

    run(main())


FORM = (
    b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n'
    b'--B\r\nContent-Disposition: form-data; name="file"; filename="speech.wav"\r\nContent-Type: audio/wav\r\n\r\n'
    b"\x00\xff audio\r\n--B--\r\n"
)


@restates(FORMS, "test_audio_*", "test_image_edit_accepts_standard_multipart_request")
@restates(HEADERS, "test_proxy_multipart_request_preserves_client_auth_without_stale_boundary")
@pytest.mark.parametrize("path", ["/v1/audio/translations", "/v1/audio/transcriptions", "/v1/images/edits"])
@pytest.mark.parametrize("policy", ["adaptive", "round-robin", "least-request"])
def test_a_form_reaches_the_server_as_it_is(path: str, policy: str) -> None:
    """A multipart form with a file reaches the server byte for byte under each policy, with its credentials; a
    response in plain text stays one.
    """

    async def main() -> None:
        plain = answer(b"translated text", kind="text/plain; charset=utf-8")
        async with ScriptedEndpoint(plain) as endpoint, rig(endpoint.url, more=f"routing: {{policy: {policy}}}") as it:
            head = f"POST {path} HTTP/1.1\r\nHost: lb\r\nContent-Type: multipart/form-data; boundary=B\r\n"
            fields = f"Authorization: Bearer t\r\nContent-Length: {len(FORM)}\r\n\r\n"
            reply = await it.ask((head + fields).encode() + FORM)
            assert (reply.status, reply.body) == (200, b"translated text")
            assert (reply.field("content-type") or "").startswith("text/plain")
            (received,) = endpoint.requests
            assert received.body == FORM
            assert received.field("content-type") == "multipart/form-data; boundary=B"
            assert received.field("authorization") == "Bearer t"

    run(main())


@restates(ALIASES, "test_plain_alias_no_reasoning_effort", "test_legacy_plain_string_alias")
def test_an_alias_changes_the_model_and_nothing_else() -> None:
    """An alias: the server gets the model's name, and every other field as the client wrote it."""

    async def main() -> None:
        more = "models: {short: {to: m}}"
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url, more=more) as it:
            sent = b'{"model":"short","stream":false,"reasoning_effort":"low","messages":[{"role":"user"}]}'
            assert (await it.ask(post(sent))).status == 200
            assert endpoint.requests[0].body == sent.replace(b'"short"', b'"m"')

    run(main())


@restates(BUFFERING, "test_non_streaming_response_reports_token_usage")
def test_the_tokens_of_a_response_are_counted() -> None:
    """The tokens in the usage of a response are counted, those of the prompt and those of the response."""

    async def main() -> None:
        used = answer(b'{"usage": {"prompt_tokens": 11, "completion_tokens": 22}}')
        async with ScriptedEndpoint(used) as endpoint, rig(endpoint.url) as it:
            await it.ask(post())
            usage = it.records.requests[0].usage
            assert usage is not None
            assert (usage.prompt_tokens, usage.completion_tokens) == (11, 22)

    run(main())
