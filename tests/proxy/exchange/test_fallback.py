# SPDX-License-Identifier: Apache-2.0
"""Another model serves a request where its own does not, through real sockets: when, in which order, and when not."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256

import openai
import pytest

from lbproxy.core.requests.outcome import Outcome
from lbproxy.proxy.request.keys import KeyRing
from tests.support.aio import run, until
from tests.support.endpoint import (
    LAST,
    STREAM_HEAD,
    Received,
    Script,
    ScriptedEndpoint,
    Wire,
    answer,
    event,
    hang,
    reset,
)
from tests.support.pool import card
from tests.support.rig import Reply, Rig, post, rig

BIG = b'{"model":"big","messages":[]}'
SERVED = b'{"model":"the server\'s own words"}'
SMALL = answer(SERVED)
FALLBACK = "models: {big: {fallback: [small]}}\n"
WAITING = "models: {big: {fallback: [small], fallback_after: 100ms}}\nadmission: {max_in_flight_per_endpoint: 1}\n"


@asynccontextmanager
async def two(big: Script, small: Script = SMALL, more: str = FALLBACK) -> AsyncIterator[Fleet]:
    """Endpoint e1 serves `big`, e2 `small`."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(ScriptedEndpoint(one)) for one in (big, small)]
        it = await stack.enter_async_context(rig(*(one.url for one in servers), more=more))
        serve(it, ["big"], ["small"])
        yield Fleet(it, *servers)


class Fleet:
    def __init__(self, it: Rig, big: ScriptedEndpoint, small: ScriptedEndpoint) -> None:
        self.it, self.big, self.small = it, big, small

    @property
    def asked(self) -> tuple[int, int]:
        return len(self.big.requests), len(self.small.requests)


def serve(it: Rig, *models: list[str]) -> None:
    for endpoint, names in zip(it.endpoints, models, strict=True):
        it.runtime.report_models(endpoint.uid, [card(one) for one in names])


def is_from_small(reply: Reply) -> bool:
    return (reply.status, reply.body, reply.field("x-lbproxy-model")) == (200, SERVED, "small")


def code(reply: Reply) -> str:
    return str(json.loads(reply.body)["error"]["code"])


# --- When -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages", "embeddings", "rerank"])
def test_a_model_whose_endpoints_are_down_is_replaced_in_every_api(path: str) -> None:
    body = b'{"x":{"model":"big"}, "model" : "big", "input":"hi"}'

    async def main() -> None:
        async with two(answer()) as fleet:
            fleet.it.take_down("e1")
            reply = await fleet.it.ask(post(body, f"/v1/{path}"))
            assert is_from_small(reply)
            assert fleet.small.requests[0].body == body.replace(b' "model" : "big"', b' "model" : "small"')
            (record,) = fleet.it.records.requests
            assert (record.model, record.fallback_from, record.alias) == ("small", "big", None)
            assert (record.attempts, record.outcome) == (1, Outcome.COMPLETED)

    run(main())


def test_a_forms_model_is_replaced_too() -> None:
    def form(model: str) -> bytes:
        return f'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\n{model}\r\n--B--\r\n'.encode()

    async def main() -> None:
        async with two(answer()) as fleet:
            fleet.it.take_down("e1")
            head = f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: lb\r\nContent-Length: {len(form('big'))}\r\n"
            reply = await fleet.it.ask(
                (head + "Content-Type: multipart/form-data; boundary=B\r\n\r\n").encode() + form("big")
            )
            assert is_from_small(reply)
            assert fleet.small.requests[0].body == form("small")

    run(main())


def test_a_large_body_is_sent_for_the_other_model_as_well() -> None:
    def body(model: bytes) -> bytes:
        return b'{"messages":[{"role":"user","content":"%b"}],"model":"%b"}' % (b"word " * 300_000, model)

    async def main() -> None:
        async with two(answer(status=503)) as fleet:
            assert is_from_small(await fleet.it.ask(post(body(b"big"))))
            assert fleet.small.requests[0].body == body(b"small")
            assert fleet.it.front.requests.overload.held_bytes == 0

    run(main())


def test_a_model_that_nobody_lists_is_replaced() -> None:
    async def main() -> None:
        async with two(answer()) as fleet:
            serve(fleet.it, ["another"], ["small"])
            assert is_from_small(await fleet.it.ask(post(BIG)))
            assert code(await fleet.it.ask(post(b'{"model":"nope"}'))) == "model_not_found"

    run(main())


def test_who_is_down_and_full_is_not_waited_for() -> None:
    more = FALLBACK + "admission: {max_in_flight_per_endpoint: 1}\n"

    async def main() -> None:
        async with busy(more) as fleet:
            fleet.it.take_down("e1")
            assert is_from_small(await fleet.it.ask(post(BIG)))
            assert fleet.asked == (1, 1), "nor is it tried while another model serves"

    run(main())


@pytest.mark.parametrize("status", [429, 409, 500, 502, 503, 529])
def test_a_model_whose_every_endpoint_refuses_is_replaced(status: int) -> None:
    async def main() -> None:
        async with two(answer(b'{"error":"theirs"}', status=status)) as fleet:
            assert is_from_small(await fleet.it.ask(post(BIG)))
            (record,) = fleet.it.records.requests
            assert (record.failed, record.attempts) == ((("e1", f"upstream_{status}"),), 2)

    run(main())


def test_who_has_just_refused_is_not_asked_each_time() -> None:
    """For a second after its 503; a request that has no other model is sent there all the same."""

    async def main() -> None:
        async with two(answer(status=503)) as fleet:
            for _ in range(5):
                assert is_from_small(await fleet.it.ask(post(BIG)))
            assert fleet.asked == (1, 5)
            reply = await fleet.it.ask(post(BIG, more="x-lbproxy-fallback: 0\r\n"))
            assert (reply.status, fleet.asked) == (503, (2, 5))

    run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_that_breaks_before_the_first_byte_is_a_failure(stream: bool) -> None:
    async def main() -> None:
        async with two(reset) as fleet:
            body = b'{"model":"big","stream":%b}' % (b"true" if stream else b"false")
            assert is_from_small(await fleet.it.ask(post(body)))
            assert fleet.asked == (1, 1)

    run(main())


def test_a_stream_is_replaced_before_its_first_event_and_not_after() -> None:
    async def small(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD, event("small"), LAST)

    async def head_alone(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD)
        wire.close()

    async def one_event(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD, event("big"))
        wire.close()

    async def main() -> None:
        body = b'{"model":"big","stream":true}'
        async with two(head_alone, small) as fleet:
            reply = await fleet.it.ask(post(body))
            assert (reply.status, reply.body, reply.field("x-lbproxy-model")) == (200, b"data: small\n\n", "small")
        async with two(one_event, small) as fleet:
            client = await fleet.it.connect()
            client.send(post(body))
            assert b"x-lbproxy-model" not in await client.head()
            await until(lambda: bool(fleet.it.records.requests))
            assert fleet.asked == (1, 0)

    run(main())


def test_the_other_models_are_asked_in_order_and_have_none_themselves() -> None:
    """Those of the model that the client asked for, each once: no chains, so no loops."""
    more = "models: {big: {fallback: [gone, small, tiny]}, small: {fallback: [tiny, big]}, tiny: {fallback: [big]}}\n"

    async def main() -> None:
        async with two(answer(status=503), answer(b'{"error":"full"}', status=503), more) as fleet:
            serve(fleet.it, ["big", "tiny"], ["small"])
            reply = await fleet.it.ask(post(BIG))
            assert (reply.status, reply.field("x-lbproxy-model")) == (503, "tiny"), "the last one's own words"
            models = [json.loads(one.body)["model"] for one in (*fleet.big.requests, *fleet.small.requests)]
            assert models == ["big", "tiny", "small"]
            (record,) = fleet.it.records.requests
            assert (record.model, record.fallback_from, record.status) == ("tiny", "big", 503)

    run(main())


def test_if_no_model_serves_it_the_error_is_that_of_the_first() -> None:
    async def main() -> None:
        async with two(answer()) as fleet:
            fleet.it.take_down("e1")
            fleet.it.take_down("e2")
            reply = await fleet.it.ask(post(BIG))
            assert (reply.status, code(reply), reply.field("x-lbproxy-model")) == (503, "no_endpoints", None)
            (record,) = fleet.it.records.requests
            assert (record.model, record.fallback_from) == ("big", None)
            serve(fleet.it, ["x"], ["y"])

        async with two(answer()) as fleet:
            serve(fleet.it, ["x"], ["y"])
            reply = await fleet.it.ask(post(BIG))
            assert (reply.status, code(reply)) == (404, "model_not_found")
            assert b"`big`" in reply.body

    run(main())


# --- A wait -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def busy(more: str = WAITING, small: Script = SMALL) -> AsyncIterator[Fleet]:
    """The endpoint of `big` takes one request, and has it."""
    async with two(hang, small, more) as fleet:
        client = await fleet.it.connect()
        client.send(post(BIG))
        await until(lambda: len(fleet.big.requests) == 1)
        yield fleet
        client.writer.close()


def test_who_waited_for_too_long_is_served_by_another_model() -> None:
    async def main() -> None:
        async with busy() as fleet:
            assert is_from_small(await fleet.it.ask(post(BIG)))
            assert fleet.asked == (1, 1)

    run(main())


def test_without_a_limit_of_the_wait_it_waits() -> None:
    more = "models: {big: {fallback: [small]}}\nadmission: {max_in_flight_per_endpoint: 1, queue_timeout: 100ms}\n"

    async def main() -> None:
        async with busy(more) as fleet:
            reply = await fleet.it.ask(post(BIG))
            assert (reply.status, code(reply)) == (429, "rejected_ttl_expired")
            assert fleet.asked == (1, 0)

    run(main())


def test_who_is_served_by_no_other_model_waits_on_for_its_own() -> None:
    """A request is never worse off than without other models."""
    more = (
        "models: {big: {fallback: [small], fallback_after: 50ms}}\n"
        "admission: {max_in_flight_per_endpoint: 1, queue_timeout: 500ms}\n"
    )

    async def main() -> None:
        async with busy(more) as fleet:
            fleet.it.take_down("e2")
            reply = await fleet.it.ask(post(BIG))
            assert (reply.status, code(reply)) == (429, "rejected_ttl_expired")
            record = fleet.it.records.requests[-1]
            assert (record.model, record.fallback_from) == ("big", None)
            assert record.ended_at - record.started_at >= 0.5, "it waited again"

    run(main())


def test_a_limit_of_the_clients_own_flow_is_no_reason() -> None:
    more = (
        "models: {big: {fallback: [small], fallback_after: 50ms}}\nadmission: {queue_timeout: 300ms}\n"
        "flows: {named: {many: {requests_per_minute: 1}, one: {in_flight: 1}}}\n"
    )

    async def main() -> None:
        async with two(hang, more=more) as fleet:
            for flow, expected in (("many", "rate_limit_exceeded"), ("one", "rejected_ttl_expired")):
                client = await fleet.it.connect()
                client.send(post(BIG, more=f"x-lbproxy-flow: {flow}\r\n"))
                asked = len(fleet.big.requests)
                await until(lambda asked=asked: len(fleet.big.requests) > asked)  # type: ignore[misc]
                reply = await fleet.it.ask(post(BIG, more=f"x-lbproxy-flow: {flow}\r\n"))
                assert (reply.status, code(reply)) == (429, expected)
                client.writer.close()
            assert fleet.asked == (2, 0)

    run(main())


def test_another_model_counts_for_the_flow_once() -> None:
    more = FALLBACK + "flows: {default: {requests_per_minute: 2}}\n"

    async def main() -> None:
        async with two(answer(status=503), more=more) as fleet:
            assert [(await fleet.it.ask(post(BIG))).status for _ in range(3)] == [200, 200, 429]
            assert fleet.asked == (1, 2)

    run(main())


# --- Never ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [504, 524, 598, 400, 413, 501])
def test_what_is_never_repeated_is_not_repeated_by_another_model(status: int) -> None:
    async def main() -> None:
        async with two(answer(b'{"error":"theirs"}', status=status)) as fleet:
            reply = await fleet.it.ask(post(BIG))
            assert (reply.status, reply.body, reply.field("x-lbproxy-model")) == (status, b'{"error":"theirs"}', None)
            assert fleet.asked == (1, 0)

    run(main())


def test_silence_is_not_repeated_by_another_model() -> None:
    async def main() -> None:
        async with two(hang, more=FALLBACK + "timeouts: {first_byte: 100ms}\n") as fleet:
            reply = await fleet.it.ask(post(BIG))
            assert (reply.status, code(reply), fleet.asked) == (504, "upstream_timeout", (1, 0))

    run(main())


def test_a_response_in_the_background_is_made_once_but_may_be_refused() -> None:
    body = b'{"model":"big","input":"x","background":true}'

    async def main() -> None:
        async with two(reset) as fleet:
            assert (await fleet.it.ask(post(body, "/v1/responses"))).status == 502
            assert fleet.asked == (1, 0)
        async with two(answer(status=503)) as fleet:
            assert is_from_small(await fleet.it.ask(post(body, "/v1/responses")))

    run(main())


def test_what_ends_one_server_after_another_is_not_sent_to_a_third() -> None:
    """It broke the server of `big`, then that of `small`: the third model's is left alone."""

    async def main() -> None:
        more = "models: {big: {fallback: [small, tiny]}}\n"
        async with ScriptedEndpoint(answer()) as third, two(reset, reset, more) as fleet:
            assert third.requests == []
            serve(fleet.it, ["big", "tiny"], ["small"])
            reply = await fleet.it.ask(post(BIG))
            assert (reply.status, code(reply)) == (502, "upstream_reset")
            assert fleet.asked == (1, 1)

    run(main())


def test_what_continues_a_stored_response_stays_where_that_is() -> None:
    async def main() -> None:
        async with two(answer(status=503)) as fleet:
            body = b'{"model":"big","input":"x","previous_response_id":"resp_1"}'
            assert (await fleet.it.ask(post(body, "/v1/responses"))).status == 503
            assert fleet.asked == (1, 0)

    run(main())


@pytest.mark.parametrize("plain", [True, False])
def test_a_client_may_forbid_it(plain: bool) -> None:
    path = "/v1/chat/completions" if plain else "/v1/embeddings"

    async def main() -> None:
        async with two(answer(status=503)) as fleet:
            reply = await fleet.it.ask(post(BIG, path, "x-lbproxy-fallback: 0\r\n"))
            assert (reply.status, fleet.asked) == (503, (1, 0))
            assert fleet.big.requests[0].field("x-lbproxy-fallback") is None, "it is ours"
            assert is_from_small(await fleet.it.ask(post(BIG, path, "x-lbproxy-fallback: 1\r\n")))
            for wrong in ("", "2", "no", "01"):
                reply = await fleet.it.ask(post(BIG, path, f"x-lbproxy-fallback: {wrong}\r\n"))
                assert (reply.status, code(reply)) == (400, "bad_request")
                assert b"x-lbproxy-fallback is 0 or 1" in reply.body

    run(main())


def test_a_flow_may_forbid_it_and_its_clients_may_still_ask_for_it() -> None:
    """Precedence: header, flow, model. A key's rule holds whichever flow its requests choose."""
    more = FALLBACK + (
        "flows: {header: true, default: {fallback: false}, named: {free: {fallback: null}, key: {fallback: false}}}\n"
    )

    async def main() -> None:
        async with two(answer(status=503), more=more) as fleet:
            keys = {sha256(b"secret-1").digest(): "key", sha256(b"secret-2").digest(): "free"}
            fleet.it.front.requests.keys = KeyRing(keys)

            async def ask(key: str, *lines: str) -> bool:
                more = "".join(f"{one}\r\n" for one in (f"Authorization: Bearer {key}", *lines))
                return is_from_small(await fleet.it.ask(post(BIG, more=more)))

            assert await ask("secret-2")
            assert not await ask("secret-2", "x-lbproxy-flow: other")
            assert not await ask("secret-1")
            assert not await ask("secret-1", "x-lbproxy-flow: free")
            assert await ask("secret-1", "x-lbproxy-fallback: 1")
            assert not await ask("secret-2", "x-lbproxy-fallback: 0")

    run(main())


def test_a_model_that_the_client_may_not_name_does_not_serve_it() -> None:
    more = "models: {big: {fallback: [small, tiny]}}\nflows: {default: {models: ['b*', tiny]}}\n"

    async def main() -> None:
        async with two(answer(status=503), more=more) as fleet:
            reply = await fleet.it.ask(post(BIG))
            assert (reply.status, fleet.asked) == (503, (1, 0)), "nobody serves `tiny`"
            serve(fleet.it, ["big"], ["small", "tiny"])
            assert (await fleet.it.ask(post(BIG))).field("x-lbproxy-model") == "tiny"

    run(main())


# --- Names ------------------------------------------------------------------------------------------------------------


def test_an_aliass_other_models_go_before_its_targets() -> None:
    more = "models: {fast: {to: big, fallback: [small]}, big: {fallback: [tiny]}, none: {to: big, fallback: []}}\n"

    async def main() -> None:
        async with two(answer(status=503), more=more) as fleet:
            serve(fleet.it, ["big"], ["small", "tiny"])
            served = {}
            for name in ("fast", "big", "none"):
                reply = await fleet.it.ask(post(json.dumps({"model": name}).encode()))
                served[name] = reply.field("x-lbproxy-model")
            assert served == {"fast": "small", "big": "tiny", "none": None}
            record = fleet.it.records.requests[0]
            assert (record.alias, record.model, record.fallback_from) == ("fast", "small", "big")

    run(main())


def test_a_pattern_may_have_one_of_its_own_models() -> None:
    """`small` itself is no fallback of its own, and an unknown name is served too where the pattern says so."""

    async def main() -> None:
        async with two(answer(status=503), more="models: {'*': {fallback: [small]}}\n") as fleet:
            assert is_from_small(await fleet.it.ask(post(BIG)))
            assert is_from_small(await fleet.it.ask(post(b'{"model":"whatever"}')))
            fleet.it.take_down("e2")
            assert (await fleet.it.ask(post(b'{"model":"small"}'))).status == 503

    run(main())


def test_names_that_no_header_can_have_are_escaped() -> None:
    async def main() -> None:
        more = "models: {big: {fallback: ['klein-\u00fc']}}\nexplain: {header: true}\n"
        async with two(answer(status=503), more=more) as fleet:
            serve(fleet.it, ["big"], ["klein-\u00fc"])
            fleet.it.balancer.explain(True)
            reply = await fleet.it.ask(post(BIG, more="x-lbproxy-explain: 1\r\n"))
            assert (reply.status, reply.field("x-lbproxy-model")) == (200, "klein-\\xfc")
            assert json.loads(fleet.small.requests[0].body)["model"] == "klein-\u00fc"
            assert "; fallback_from=big; " in (reply.field("x-lbproxy-explain") or "")

    run(main())


# --- OpenAI's SDK -----------------------------------------------------------------------------------------------------

CHUNK = (
    '{"id":"c","object":"chat.completion.chunk","created":1,"model":"s","choices":'
    '[{"index":0,"delta":{"role":"assistant","content":"hello"},"finish_reason":%s}]}'
)
WHOLE = (
    b'{"id":"c","object":"chat.completion","created":1,"model":"s","choices":'
    b'[{"index":0,"message":{"role":"assistant","content":"hello"},"finish_reason":"stop"}]}'
)


@pytest.mark.parametrize("down", [True, False], ids=["down", "busy"])
def test_openais_sdk_is_served_whole_and_streamed(down: bool) -> None:
    async def small(wire: Wire, request: Received) -> None:
        if json.loads(request.body).get("stream"):
            pieces = (event(CHUNK % "null"), event(CHUNK % '"stop"'), event("[DONE]"))
            await wire.send(STREAM_HEAD, *pieces, LAST)
        else:
            await wire.send(answer(WHOLE))

    async def main() -> None:
        async with busy(small=small) as fleet:
            if down:
                fleet.it.take_down("e1")
            url = f"http://127.0.0.1:{fleet.it.port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                asked = {"model": "big", "messages": [{"role": "user", "content": "hi"}]}
                raw = await client.chat.completions.with_raw_response.create(**asked)  # type: ignore[call-overload]
                assert raw.headers["x-lbproxy-model"] == "small"
                assert raw.parse().choices[0].message.content == "hello"
                chunks = await client.chat.completions.create(**asked, stream=True)  # type: ignore[call-overload]
                assert "".join([one.choices[0].delta.content or "" async for one in chunks]) == "hellohello"
                headers = {"x-lbproxy-fallback": "0", "x-lbproxy-slo-ttft-ms": "1"}  # or it waits
                with pytest.raises(openai.APIStatusError) as caught:
                    await client.chat.completions.create(**asked, extra_headers=headers)  # type: ignore[call-overload]
                assert caught.value.status_code in {429, 503}
            assert len(fleet.small.requests) == 2

    run(main())
