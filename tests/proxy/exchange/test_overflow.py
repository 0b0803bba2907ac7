# SPDX-License-Identifier: Apache-2.0
"""Requests that go to a provider, on real sockets: path, model name, credentials, and what never leaves.

The first endpoint is a server of one's own, the second the provider, `e2`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256

import orjson
import pytest

from lbproxy.proxy.request.keys import KeyRing
from tests.support.aio import run, until
from tests.support.endpoint import LAST, OK, STREAM_HEAD, Received, ScriptedEndpoint, Wire, answer, event, reset
from tests.support.rig import Rig, post, rig

ITS = "tier: 2, model: its-m, models: [m], health: null, metrics: null, api_key: sk-provider"
MULTIPART = (
    b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n\xff\x00\r\n'
    b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
)


@asynccontextmanager
async def fleet(
    here: ScriptedEndpoint, there: ScriptedEndpoint, path: str = "/openai/v1", more: str = "", its: str = ITS
) -> AsyncIterator[Rig]:
    async with here, there, rig(here.url, (there.url + path, its), more=more) as it:
        yield it


def sent(endpoint: ScriptedEndpoint) -> Received:
    (request,) = endpoint.requests
    return request


def test_a_request_that_overflows_is_what_the_provider_expects() -> None:
    async def scenario() -> None:
        here, there = ScriptedEndpoint(), ScriptedEndpoint()
        async with fleet(here, there) as it:
            it.take_down("e1")
            await it.settle()
            body = b'{"messages":[{"role":"user","content":"\\"model\\": m"}],"model":"m","n":1}'
            fields = (
                "Authorization: Bearer client-key\r\nx-api-key: client-key\r\nCookie: a=b\r\napi-key: c\r\n"
                "X-data-parallel-rank: 3\r\nx-lbproxy-session: s\r\nX-Forwarded-For: 10.0.0.1\r\nOpenAI-Beta: x\r\n"
            )
            reply = await it.ask(post(body, more=fields))
            await it.settle()
            assert reply.status == 200
            assert reply.field("x-lbproxy-tier") == "2"
            got = sent(there)
            assert got.line == "POST /openai/v1/chat/completions HTTP/1.1"
            assert got.body == body.replace(b'"m"', b'"its-m"')
            assert got.field("authorization") == "Bearer sk-provider"
            for name in ("x-api-key", "cookie", "api-key", "x-data-parallel-rank", "x-lbproxy-session"):
                assert got.field(name) is None
            assert got.field("x-forwarded-for") is None
            assert got.field("x-gateway-destination-endpoint") is None
            assert got.field("openai-beta") == "x"
            assert got.field("via") is not None
            (record,) = it.records.requests
            assert (record.tier, record.overflow, record.model, record.endpoint) == (2, "down", "m", "e2")
        assert here.requests == []

    run(scenario())


def test_a_retry_from_the_first_tier_has_the_right_body_at_each() -> None:
    async def scenario() -> None:
        here, there = ScriptedEndpoint(answer(status=503)), ScriptedEndpoint()
        async with fleet(here, there, path="") as it:
            reply = await it.ask(post(b'{"model":"m","stream":false}'))
            await it.settle()
            assert reply.status == 200
            (record,) = it.records.requests
            assert (record.attempts, record.tier, record.overflow) == (2, 2, "failed")
        assert (sent(here).body, sent(here).path) == (b'{"model":"m","stream":false}', "/v1/chat/completions")
        assert sent(there).body == b'{"model":"its-m","stream":false}'

    run(scenario())


def test_a_retry_from_a_provider_to_the_first_tier_has_the_clients_own_body_and_credentials() -> None:
    async def scenario() -> None:
        here, there = ScriptedEndpoint(), ScriptedEndpoint(answer(status=429, more="Retry-After: 100\r\n"))
        async with fleet(here, there) as it:
            it.take_down("e1")
            await it.settle()
            asked = asyncio.create_task(it.ask(post(more="Authorization: Bearer client\r\n")))
            await until(lambda: bool(there.requests))
            await it.settle()
            for endpoint in it.endpoints[:1]:
                for _ in range(2):
                    it.runtime.report_health(endpoint.uid, True, "it is back")
            it.tell()
            reply = await asked
            if reply.status == 429:  # nothing was there yet to try instead
                assert reply.field("retry-after") == "100"
                reply = await it.ask(post(more="Authorization: Bearer client\r\n"))
            assert reply.status == 200
        assert sent(here).body == b'{"model":"m"}'
        assert sent(here).field("authorization") == "Bearer client"

    run(scenario())


def test_a_provider_that_asked_for_time_gets_nothing_meanwhile() -> None:
    async def scenario() -> None:
        here, there = ScriptedEndpoint(), ScriptedEndpoint(answer(status=429, more="Retry-After: 100\r\n"))
        async with fleet(here, there, more="admission: {queue_timeout: 1s}\n") as it:
            it.take_down("e1")
            await it.settle()
            assert (await it.ask(post())).status == 429
            again = await it.ask(post())
            assert again.status == 429
            assert int(again.field("retry-after") or 0) == 60, "as much as SDKs wait at most"
        assert len(there.requests) == 1

    run(scenario())


@pytest.mark.parametrize("bound", ["header", "flow", "key"])
def test_what_may_not_leave_is_refused_instead(bound: str) -> None:
    key = "0123456789abcdef"
    more = {
        "header": "",
        "flow": "flows: {default: {max_tier: 1}}\n",
        "key": f"auth: {{keys: [{{name: private, key: {key}}}]}}\n"
        "flows: {header: true, named: {private: {max_tier: 1}, public: {max_tier: 9}}}\n",
    }[bound]
    fields = {
        "header": "x-lbproxy-tier: 1\r\n",
        "flow": "x-lbproxy-tier: 9\r\n",
        "key": f"Authorization: Bearer {key}\r\nx-lbproxy-flow: public\r\nx-lbproxy-tier: 9\r\n",
    }[bound]

    async def scenario() -> None:
        here, there = ScriptedEndpoint(reset), ScriptedEndpoint()
        async with fleet(here, there, more=more) as it:
            if bound == "key":
                it.front.requests.keys = KeyRing({sha256(key.encode()).digest(): "private"})
            assert (await it.ask(post(more=fields))).status == 502
            it.take_down("e1")
            await it.settle()
            assert (await it.ask(post(more=fields))).status == 503
            assert (await it.ask(post(more=fields + "X-Chunky: 1\r\nx-session-id: s\r\n"))).status == 503
        assert there.requests == []

    run(scenario())


@pytest.mark.parametrize("value", ["0", "10", "one", "", "-1", "1.0", "1, 9"])
@pytest.mark.parametrize("plain", [True, False])
def test_a_tier_that_cannot_be_meant_is_refused(value: str, plain: bool) -> None:
    async def scenario() -> None:
        here, there = ScriptedEndpoint(), ScriptedEndpoint()
        async with fleet(here, there) as it:
            more = "" if plain else "Connection: close\r\n"
            assert (await it.ask(post(more=f"x-lbproxy-tier: {value}\r\n{more}"))).status == 400
        assert here.requests == there.requests == []

    run(scenario())


def test_of_two_tiers_the_lower_counts() -> None:
    async def scenario() -> None:
        here, there = ScriptedEndpoint(), ScriptedEndpoint()
        async with fleet(here, there) as it:
            it.take_down("e1")
            await it.settle()
            assert (await it.ask(post(more="x-lbproxy-tier: 1\r\nx-lbproxy-tier: 9\r\n"))).status == 503
        assert there.requests == []

    run(scenario())


def test_a_form_has_the_providers_name_too() -> None:
    async def scenario() -> None:
        here, there = ScriptedEndpoint(), ScriptedEndpoint()
        async with fleet(here, there) as it:
            it.take_down("e1")
            await it.settle()
            head = (
                "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: lb\r\n"
                "Content-Type: multipart/form-data; boundary=b\r\n"
                f"Content-Length: {len(MULTIPART)}\r\n\r\n"
            )
            assert (await it.ask(head.encode() + MULTIPART)).status == 200
        assert sent(there).body == MULTIPART.replace(b"\r\n\r\nm\r\n", b"\r\n\r\nits-m\r\n")
        assert sent(there).path == "/openai/v1/audio/transcriptions"

    run(scenario())


def test_a_body_without_a_model_gets_the_providers_name_and_what_names_none_stays() -> None:
    async def scenario() -> None:
        here, there = ScriptedEndpoint(), ScriptedEndpoint()
        async with fleet(here, there) as it:
            it.take_down("e1")
            await it.settle()
            assert (await it.ask(post(b'{"prompt":"a"}'))).status == 200
            assert (await it.ask(b"GET /v1/files HTTP/1.1\r\nHost: lb\r\n\r\n")).status == 503
        assert orjson.loads(sent(there).body) == {"model": "its-m", "prompt": "a"}

    run(scenario())


def test_a_stream_never_changes_its_tier_after_the_first_byte() -> None:
    async def one_token(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD, event('{"choices":[{"delta":{"content":"a"}}]}'))
        wire.reset()

    async def scenario() -> None:
        here, there = ScriptedEndpoint(one_token), ScriptedEndpoint()
        async with fleet(here, there) as it:
            client = await it.connect()
            client.send(post(b'{"model":"m","stream":true}'))
            await client.head()
            assert b'"a"' in await client.reader.readuntil(b"\n\n")
            await until(lambda: len(it.records.requests) == 1)
            assert it.records.requests[0].tier == 1
        assert there.requests == []

    run(scenario())


def test_a_stream_of_a_provider_passes_unchanged() -> None:
    async def stream(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD, event('{"model":"its-m"}'), event("[DONE]"), LAST)

    async def scenario() -> None:
        here, there = ScriptedEndpoint(), ScriptedEndpoint(stream)
        async with fleet(here, there) as it:
            it.take_down("e1")
            await it.settle()
            reply = await it.ask(post(b'{"model":"m","stream":true}'))
            assert b'{"model":"its-m"}' in reply.body

    run(scenario())


def test_without_a_key_of_its_own_an_endpoint_gets_the_clients() -> None:
    """As everywhere; `lbproxy check` warns of it."""

    async def scenario() -> None:
        here, there = ScriptedEndpoint(), ScriptedEndpoint(OK)
        async with fleet(here, there, its=ITS.replace(", api_key: sk-provider", "")) as it:
            it.take_down("e1")
            await it.settle()
            await it.ask(post(more="Authorization: Bearer client\r\n"))
        assert sent(there).field("authorization") == "Bearer client"

    run(scenario())


@pytest.mark.parametrize("fields", ["x-lbproxy-tier: 1\r\n", "x-lbproxy-tier: 3\r\n", ""])
@pytest.mark.parametrize("socket", [False, True])
def test_a_bound_is_told_to_every_endpoint_which_may_be_an_lbproxy(fields: str, socket: bool) -> None:
    """Of a retry and of a WebSocket, too."""

    async def scenario() -> None:
        here, again = ScriptedEndpoint(answer(status=503)), ScriptedEndpoint(answer(status=503))
        more = "flows: {default: {max_tier: 4}}\n"
        async with here, again, rig(here.url, again.url, more=more) as it:
            data = post(more=fields)
            if socket:
                data = (
                    f"GET /v1/realtime?model=m HTTP/1.1\r\nHost: lb\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
                    f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n{fields}\r\n"
                ).encode()
            await it.ask(data)
            got = [*here.requests, *again.requests]
            assert len(got) == 2
            bound = fields.partition(": ")[2].strip() or "4"
            assert [one.field("x-lbproxy-tier") for one in got] == [bound, bound]

    run(scenario())


@pytest.mark.parametrize("body", [b'{"model":"m","model":"other"}', b'{"model":"m","MODEL":"other"}'])
@pytest.mark.parametrize("its", ["tier: 2, health: null, metrics: null, models: [m, other]", ITS])
def test_a_provider_reads_no_other_model_than_lbproxy_does(body: bytes, its: str) -> None:
    async def scenario() -> None:
        here, there = ScriptedEndpoint(), ScriptedEndpoint()
        async with fleet(here, there, its=its) as it:
            it.take_down("e1")
            await it.settle()
            reply = await it.ask(post(body))
            if reply.status == 200:
                assert sent(there).body.count(b'"its-m"') == 2
            else:
                assert (reply.status, there.requests) == (400, []) or reply.status == 404

    run(scenario())
