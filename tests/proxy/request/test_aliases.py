# SPDX-License-Identifier: Apache-2.0
"""Names of models that the settings make up, through real sockets."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest

from lbproxy.control.discovery.discovery import NO_CERTIFICATES, spec_of
from lbproxy.proxy.front.requests import LISTS_S
from tests.support.aio import run
from tests.support.endpoint import ScriptedEndpoint, answer
from tests.support.pool import card
from tests.support.rig import Rig, post, rig, settings_for

MODELS = "models: {fast: {to: m}, chat: {split: {old: 90, new: 10}}, gone: {to: secret-target}}\n"
MIB = 1 << 20
ANSWER = b'{"model":"served-name"}'


def serve(it: Rig, **models: str) -> None:
    """Endpoint e1 serves `e1=` and so on."""
    for endpoint in it.endpoints:
        it.runtime.report_models(endpoint.uid, [card(models[endpoint.name])])


def test_only_the_models_name_changes() -> None:
    body = b'{"tools":[{"model":"fast"}], "model" :"x","mod\\u0065l": "fast","metadata":{"model":"fast"}}'
    sent = b'{"tools":[{"model":"fast"}], "model" :"m","mod\\u0065l": "m","metadata":{"model":"fast"}}'

    async def main() -> None:
        async with ScriptedEndpoint(answer(ANSWER)) as server, rig(server.url, more=MODELS) as it:
            reply = await it.ask(post(body))
            assert (reply.status, reply.body) == (200, ANSWER), "the answer is the endpoint's, name included"
            (request,) = server.requests
            assert request.body == sent
            assert request.field("content-length") == str(len(sent))
            (record,) = it.records.requests
            assert (record.model, record.alias) == ("m", "fast")

    run(main())


def test_a_model_of_an_ollama_is_named_without_its_tag_in_each_api() -> None:
    """And as the target of an alias. Its server knows it by either name, so that the body passes as it is."""

    async def main() -> None:
        more = "models: {fast: {to: q}}\nflows: {default: {models: [q, fast, n]}}\n"
        async with ScriptedEndpoint(answer(ANSWER)) as server, rig(server.url, more=more) as it:
            serve(it, e1="q:latest")
            statuses = [(await it.ask(post(b'{"model":"%b"}' % name))).status for name in (b"q", b"fast", b"n")]
            assert statuses == [200, 200, 404]
            assert [one.body for one in server.requests] == [b'{"model":"q"}', b'{"model":"q:latest"}']
            assert [one.model for one in it.records.requests[:2]] == ["q:latest"] * 2

    run(main())


def test_a_forms_model_changes_too() -> None:
    def form(model: str) -> bytes:
        return f'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\n{model}\r\n--B--\r\n'.encode()

    async def main() -> None:
        async with ScriptedEndpoint(answer(ANSWER)) as server, rig(server.url, more=MODELS) as it:
            head = f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: lb\r\nContent-Length: {len(form('fast'))}\r\n"
            kind = "Content-Type: multipart/form-data; boundary=B\r\n\r\n"
            reply = await it.ask((head + kind).encode() + form("fast"))
            assert reply.status == 200
            assert server.requests[0].body == form("m")

    run(main())


@pytest.mark.parametrize("field", ["model", "file"])
def test_large_bodies_change_by_no_other_byte(field: str) -> None:
    """Those that are read in many turns of the event loop, wherever the name stands."""

    def json_body(model: str) -> bytes:
        pieces = [b'"model" : "%b"' % model.encode(), b'"messages":[{"role":"user","content":"%b"}]' % (b"a\\n" * MIB)]
        return b'{"x":{"model":"fast"},' + b",".join(pieces if field == "model" else pieces[::-1]) + b"}"

    def form(model: str) -> bytes:
        part = b'--B\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
        parts = [part % (b"model", model.encode()), part % (b"file", b"\r\n--b" * MIB)]
        return b"".join(parts if field == "model" else parts[::-1]) + b"--B--\r\n"

    async def main() -> None:
        async with ScriptedEndpoint(answer(ANSWER)) as server, rig(server.url, more=MODELS) as it:
            assert (await it.ask(post(json_body("fast")))).status == 200
            head = f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: lb\r\nContent-Length: {len(form('fast'))}\r\n"
            kind = "Content-Type: multipart/form-data; boundary=B\r\n\r\n"
            assert (await it.ask((head + kind).encode() + form("fast"))).status == 200
            assert [one.body for one in server.requests] == [json_body("m"), form("m")]
            assert [one.request_bytes for one in it.records.requests] == [len(json_body("fast")), len(form("fast"))]
            assert it.front.overload.held_bytes == 0

    run(main())


@pytest.mark.parametrize("named", [b'"fast"', b'"m"', None])
def test_each_endpoint_gets_a_large_body_with_its_own_name(named: bytes | None) -> None:
    """The second one, after the first one's error, is sent the client's bytes, not those that the first one was."""
    text = b"a\\n" * MIB

    def body(model: bytes | None) -> bytes:
        return b"{" + (b"" if model is None else b'"model":%b,' % model) + b'"prompt":"%b"}' % text

    async def main() -> None:
        async with (
            ScriptedEndpoint(answer(b"{}", status=503)) as first,
            ScriptedEndpoint(answer(b"{}", status=503)) as second,
            ScriptedEndpoint(answer(ANSWER)) as third,
            rig(
                (first.url, "models: [m], model: a/first-name"),
                (second.url, "models: [m], model: '2', tier: 2"),
                (third.url, "tier: 3"),
                more=MODELS,
            ) as it,
        ):
            assert (await it.ask(post(body(named), "/v1/completions"))).status == 200
            asked = [(one, (b'"a/first-name"', b'"2"', b'"m"')[n]) for n, one in enumerate((first, second, third))]
            for endpoint, name in asked:
                (request,) = endpoint.requests
                assert request.body == body(name)
                assert request.field("content-length") == str(len(body(name)))
            assert it.front.overload.held_bytes == 0

    run(main())


def test_a_large_body_whose_model_cannot_be_replaced_is_refused_where_it_must_be() -> None:
    """Not where the endpoint takes the client's name."""
    body = b'{"model":%b"m","prompt":"%b"}' % (b" " * (16 << 10), b"x" * (5 * MIB))  # more than is parsed at once

    async def main() -> None:
        async with ScriptedEndpoint(answer(ANSWER)) as server:
            async with rig((server.url, "models: [m], model: own")) as it:
                reply = await it.ask(post(body))
                assert reply.status == 400
                assert json.loads(reply.body)["error"]["code"] == "invalid_json"
            assert server.requests == []
            async with rig(server.url) as it:
                assert (await it.ask(post(body))).status == 200
            assert server.requests[0].body == body

    run(main())


def test_a_split_over_two_endpoints_keeps_sessions_together() -> None:
    """Each endpoint gets its model's requests only; a session never changes."""

    async def main() -> None:
        async with ScriptedEndpoint() as old, ScriptedEndpoint() as new, rig(old.url, new.url, more=MODELS) as it:
            serve(it, e1="old", e2="new")
            client = await it.connect()
            by_session: dict[int, set[str]] = {}
            for n in range(300):
                client.send(post(b'{"model":"chat"}', more=f"x-session-id: s{n % 100}\r\n"))
                reply = await client.reply()
                assert reply.status == 200
                by_session.setdefault(n % 100, set()).add(reply.field("x-lbproxy-endpoint") or "")
            assert {len(one) for one in by_session.values()} == {1}
            counts = Counter(next(iter(one)) for one in by_session.values())
            assert 1 <= counts["e2"] <= 22, "10 of 100, within four standard deviations"
            assert {json.loads(one.body)["model"] for one in old.requests} == {"old"}
            assert {json.loads(one.body)["model"] for one in new.requests} == {"new"}

    run(main())


def test_without_a_session_each_request_is_drawn() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as old, ScriptedEndpoint() as new, rig(old.url, new.url, more=MODELS) as it:
            serve(it, e1="old", e2="new")
            client = await it.connect()
            for n in range(300):
                client.send(post(b'{"model":"chat"}', more=f"x-request-id: r{n}\r\n"))
                await client.reply()
            assert 10 <= len(new.requests) <= 51, "30 of 300, within four standard deviations"

    run(main())


def test_a_canary_that_is_gone_takes_no_request_with_it() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as old, rig(old.url, more=MODELS) as it:
            serve(it, e1="old")
            for n in range(60):
                reply = await it.ask(post(b'{"model":"chat"}', more=f"x-session-id: s{n}\r\n"))
                assert reply.status == 200
            assert len(old.requests) == 60

    run(main())


def test_what_nobody_serves_is_refused_by_the_name_that_the_client_used() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as server, rig(server.url, more=MODELS) as it:
            for name in ("gone", "never-heard"):
                reply = await it.ask(post(json.dumps({"model": name}).encode()))
                assert reply.status == 404
                error = json.loads(reply.body)["error"]
                assert error["code"] == "model_not_found"
                assert f"`{name}`" in error["message"]
                for secret in (b"secret-target", b"127.0.0.1", b"e1", b"old"):
                    assert secret not in reply.body
            assert server.requests == []

    run(main())


def test_the_list_of_models_has_what_can_be_asked_for() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as server, rig(server.url, more=MODELS) as it:
            reply = await it.ask(b"GET /v1/models HTTP/1.1\r\nHost: lb\r\n\r\n")
            assert [one["id"] for one in json.loads(reply.body)["data"]] == ["m", "fast"]
            reply = await it.ask(b"GET /v1/models/fast HTTP/1.1\r\nHost: lb\r\n\r\n")
            assert json.loads(reply.body) == {
                "id": "fast",
                "object": "model",
                "created": 0,
                "owned_by": "lbproxy",
                "root": "m",
            }
            reply = await it.ask(b"GET /v1/models/gone HTTP/1.1\r\nHost: lb\r\n\r\n")
            assert reply.status == 404

    run(main())


PATTERNS = "models: {gpt-4o: m, 'claude-*': {to: m}, 'claude-*-haiku*': small, '*': {split: {m: 1}}}\n"


def test_patterns_take_the_names_that_nobody_serves() -> None:
    """A pattern never takes a model from its server, also while that is down; it is no model that clients can see."""

    async def main() -> None:
        async with (
            ScriptedEndpoint(answer(ANSWER)) as one,
            ScriptedEndpoint(answer(ANSWER)) as two,
            rig(one.url, (two.url, "models: [small, claude-local]"), more=PATTERNS) as it,
        ):
            for name, model in (
                ("gpt-4o", "m"),
                ("claude-sonnet-5", "m"),
                ("claude-4-haiku-5", "small"),
                ("x y", "m"),
                ("claude-local", "claude-local"),
            ):
                assert (await it.ask(post(json.dumps({"model": name}).encode()))).status == 200
                assert it.records.requests[-1].model == model
                assert it.records.requests[-1].alias == (None if name == model else name)
            assert [json.loads(one.body)["model"] for one in two.requests] == ["small", "claude-local"]
            reply = await it.ask(b"GET /v1/models HTTP/1.1\r\nHost: lb\r\n\r\n")
            assert {one["id"] for one in json.loads(reply.body)["data"]} == {"m", "small", "claude-local", "gpt-4o"}
            it.take_down("e2")
            await it.settle()
            assert (await it.ask(post(b'{"model":"claude-local"}'))).status == 503, (
                "it is not there; no other stands in"
            )
            assert len(one.requests) == 3

    run(main())


@pytest.mark.parametrize("size", [10, 2 * MIB], ids=["fast lane", "slow lane"])
@pytest.mark.parametrize("lists", [True, False], ids=["listed", "not listed"])
def test_a_name_waits_for_the_first_lists_before_a_pattern_takes_it(size: int, lists: bool) -> None:
    body = json.dumps({"model": "claude-local", "prompt": "x" * size}).encode()

    async def main() -> None:
        async with (
            ScriptedEndpoint(answer(ANSWER)) as one,
            ScriptedEndpoint(answer(ANSWER)) as two,
            rig(one.url, two.url, more="models: {'*': m}\n") as it,
        ):
            specs = [
                spec_of(entry, entry.name, NO_CERTIFICATES) for entry in settings_for([one.url, two.url]).endpoints
            ]
            it.runtime.set_endpoints(specs[:1])
            new = it.runtime.set_endpoints(specs).added[0].uid
            await it.settle()
            asked = asyncio.ensure_future(it.ask(post(body)))
            await asyncio.sleep(4 * LISTS_S)
            assert not asked.done()
            assert one.requests == two.requests == []
            it.runtime.report_models(new, [card("claude-local" if lists else "other")])
            it.runtime.report_health(new, True, "")
            assert (await asked).status == 200
            assert (len(one.requests), len(two.requests)) == ((0, 1) if lists else (1, 0))

    run(main())


def test_a_reload_takes_other_names() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as server, rig(server.url, more=MODELS) as it:
            it.front.reconfigure(settings_for([server.url], "models: {other: {to: m}}\n"))
            assert (await it.ask(post(b'{"model":"fast"}'))).status == 404
            assert (await it.ask(post(b'{"model":"other"}'))).status == 200

    run(main())
