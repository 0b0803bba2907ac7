# SPDX-License-Identifier: Apache-2.0
"""Ollama's own API through real sockets: its lines of JSON are read, and only its servers are asked."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.mock.http import MockOptions, MockServer
from tests.support.aio import run
from tests.support.endpoint import Received, ScriptedEndpoint, Wire, answer, chunk
from tests.support.pool import MODEL, card
from tests.support.rig import Reply, Rig, post, rig

OLLAMA = "engine: ollama"
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hello"}],
    "options": {"num_predict": 9},
}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
LINE = b'{"model":"m","message":{"role":"assistant","content":"four"},"done":false}\n'
LAST = b'{"model":"m","done":true,"done_reason":"stop","prompt_eval_count":7,"eval_count":2}\n'


def ask(body: dict[str, Any], path: str = "/api/chat") -> bytes:
    return post(json.dumps(body).encode(), path)


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: lb\r\n\r\n".encode()


async def head_of(it: Rig, path: str) -> bytes:
    client = await it.connect()
    client.send(get(path, "HEAD"))
    return await client.reader.readuntil(b"\r\n\r\n")


@asynccontextmanager
async def pool(more: str = "") -> AsyncIterator[tuple[Rig, MockServer, ScriptedEndpoint]]:
    """A simulated Ollama, and another server of the same model, and of the model `other`."""
    options = MockOptions(model=MODEL, engine="ollama", speed=50.0)
    async with (
        MockServer(options) as ollama,
        ScriptedEndpoint(answer(status=500)) as vllm,
        rig((ollama.url, OLLAMA), (vllm.url, "engine: vllm"), more=more) as it,
    ):
        it.runtime.report_models(it.endpoints[1].uid, [card(MODEL), card("other")])
        it.tell()
        yield it, ollama, vllm


def lines(reply: Reply) -> list[dict[str, Any]]:
    return [json.loads(one) for one in reply.body.decode().splitlines()]


def test_a_stream_is_one_unless_that_is_denied() -> None:
    """Its lines pass as they are, and what they say is counted: model, tokens, the first of them."""

    async def main() -> None:
        async with pool() as (it, _, vllm):
            replies = [await it.ask(ask(CHAT)) for _ in range(4)]
            *said, last = lines(replies[0])
            assert [one["message"]["content"] for one in said]
            assert (len(said), last["done"], last["eval_count"]) == (9, True, 9)
            whole = json.loads((await it.ask(ask(CHAT | {"stream": False}))).body)
            assert whole["message"]["content"] == "".join(one["message"]["content"] for one in said)
            assert not vllm.requests
            await it.settle()
            streamed, *_, single = it.records.requests
            for record, stream in ((streamed, True), (single, False)):
                assert record.usage is not None
                assert (record.route, record.model, record.stream) == ("ollama_chat", MODEL, stream)
                assert (record.usage.prompt_tokens, record.usage.completion_tokens) == (last["prompt_eval_count"], 9)
            assert (streamed.events, streamed.outcome) == (10, Outcome.COMPLETED)

    run(main())


@pytest.mark.parametrize(
    ("path", "body", "route", "key"),
    [
        ("/api/generate", {"prompt": "Hello", "options": {"num_predict": 3}}, "ollama_generate", "response"),
        ("/api/embed", {"input": ["a", "b"]}, "ollama_embed", "embeddings"),
        ("/api/embeddings", {"prompt": "a"}, "ollama_embed", "embedding"),
        ("/api/show", {}, "ollama", "model_info"),
    ],
)
def test_other_paths_go_to_its_servers_alone(path: str, body: dict[str, Any], route: str, key: str) -> None:
    async def main() -> None:
        async with pool() as (it, _, vllm):
            for _ in range(4):
                reply = await it.ask(ask({"model": MODEL} | body, path))
                assert (reply.status, key in lines(reply)[0]) == (200, True)
            for one in (get("/api/version"), get("/")):
                assert (await it.ask(one)).status == 200
            assert b" 200 " in await head_of(it, "/")
            older = await it.ask(ask({"name": MODEL}, "/api/show"))
            assert older.status == 200
            assert not vllm.requests
            await it.settle()
            assert it.records.requests[0].route == route

    run(main())


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (ask(CHAT | {"model": "other"}), 404),
        (ask(CHAT | {"model": "none"}), 404),
        (ask(CHAT | {"model": 5}), 400),
        (ask({"name": "other"}, "/api/show"), 404),
        (ask({"name": "m", "NAME": "other"}, "/api/show"), 400),
        (post(b"{", "/api/chat"), 400),
        *(
            (ask({"model": MODEL}, f"/api/{name}"), 403)
            for name in ("pull", "push", "create", "copy", "blobs/sha256:1")
        ),
        (get("/api/delete", "DELETE"), 403),
        (get("/api/chat"), 405),
        (get("/api/%74ags"), 400),
    ],
)
def test_refusals_are_in_its_form(request_: bytes, status: int) -> None:
    """Which its client library raises with the text."""

    async def main() -> None:
        async with pool() as (it, _, vllm):
            reply = await it.ask(request_)
            said = json.loads(reply.body)
            if b"%74" not in request_:
                assert list(said) == ["error"]
                assert isinstance(said["error"], str)
            assert reply.status == status
            assert not vllm.requests

    run(main())


def test_without_such_a_server_its_paths_are_unknown() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as vllm, rig(vllm.url) as it:
            for one in (ask(CHAT), get("/"), get("/api/version"), get("/api/tags"), get("/api/ps")):
                assert (await it.ask(one)).status == 404
            assert not vllm.requests

    run(main())


@pytest.mark.parametrize("allows", [False, True])
@pytest.mark.parametrize(
    "spelled", [b'"keep_alive": -1', b'"KEEP_alive": -1', b'"keep\\u005falive": -1', b'"a": 1, "keep_alive":"24h" ']
)
def test_how_long_a_model_stays_is_not_for_clients_to_say(allows: bool, spelled: bytes) -> None:
    """As Ollama reads it: whatever the case, and the last one counts. All else of the body stays."""

    async def main() -> None:
        own = f"{OLLAMA}, client_keep_alive: {str(allows).lower()}"
        body = b'{"model": "m", "messages": [], %b}' % spelled
        async with ScriptedEndpoint(answer(LAST)) as server, rig((server.url, own)) as it:
            for large in (b"", b" " * (300 << 10)):
                assert (await it.ask(post(large + body, "/api/chat"))).status == 200
                sent = server.requests[-1].body
                read = {name.lower(): value for name, value in json.loads(sent).items()}
                assert sent.startswith(large + body[:-1])
                if allows:
                    assert sent == large + body
                else:
                    assert read["keep_alive"] is None
            assert (await it.ask(post(b'{"model": "m"}', "/api/chat"))).status == 200
            assert server.requests[-1].body == b'{"model": "m"}'

    run(main())


def test_a_stream_that_breaks_ends_with_an_error_in_a_line() -> None:
    async def main() -> None:
        async def breaks(wire: Wire, _: Received) -> None:
            await wire.send(HEAD, chunk(LINE), chunk(LINE))
            wire.writer.transport.abort()

        async with ScriptedEndpoint(breaks) as server, rig((server.url, OLLAMA)) as it:
            client = await it.connect()
            client.send(ask(CHAT))
            got = b""
            while piece := await client.reader.read(1 << 16):
                got += piece
            last = got.splitlines()[-1] if got.endswith(b"\n") else got
            assert got.count(LINE) == 2
            assert b'{"error":"upstream connection lost after 2 events"}' in got, last
            await it.settle()
            (record,) = it.records.requests
            assert (record.outcome, record.events) == (Outcome.UPSTREAM_BROKE, 2)
            assert record.usage is None

    run(main())


def test_before_its_first_line_another_server_is_asked() -> None:
    async def main() -> None:
        async def dies(wire: Wire, _: Received) -> None:
            wire.writer.transport.abort()

        async with (
            ScriptedEndpoint(dies) as one,
            ScriptedEndpoint(HEAD + chunk(LINE) + chunk(LAST) + b"0\r\n\r\n") as two,
            ScriptedEndpoint() as vllm,
            rig((one.url, OLLAMA), vllm.url, (two.url, OLLAMA)) as it,
        ):
            for _ in range(3):
                reply = await it.ask(ask(CHAT))
                assert (reply.status, reply.body) == (200, LINE + LAST)
            assert one.requests
            assert not vllm.requests

    run(main())


def test_where_all_its_servers_fail_no_other_is_asked() -> None:
    async def main() -> None:
        async def dies(wire: Wire, _: Received) -> None:
            wire.writer.transport.abort()

        async with (
            ScriptedEndpoint(dies) as one,
            ScriptedEndpoint() as vllm,
            rig((one.url, OLLAMA), vllm.url) as it,
        ):
            reply = await it.ask(ask(CHAT))
            assert (reply.status, list(json.loads(reply.body))) == (502, ["error"])
            assert not vllm.requests

    run(main())


def page(*names: str, **more: object) -> bytes:
    return json.dumps({"models": [{"name": name, "model": name, **more} for name in names]}).encode()


def lists(*names: str, context: int = 4096) -> Any:
    """A server of these models, the first of which is loaded."""

    async def script(wire: Wire, request: Received) -> None:
        loaded = page(*names[:1], context_length=context)
        await wire.send(answer(page(*names) if request.path == "/api/tags" else loaded))

    return script


@asynccontextmanager
async def several(more: str = "") -> AsyncIterator[Rig]:
    """Servers of a and b, of b and c, of nothing that can be read; and one without the API."""
    async with (
        ScriptedEndpoint(lists("a:latest", "b")) as one,
        ScriptedEndpoint(lists("b", "c", "hidden")) as two,
        ScriptedEndpoint(answer(b"[]")) as broken,
        ScriptedEndpoint(answer(status=500)) as vllm,
        rig((one.url, OLLAMA), (two.url, OLLAMA), (broken.url, OLLAMA), vllm.url, more=more) as it,
    ):
        served = [["a:latest", "b"], ["b", "c"], ["x"], ["m"]]
        for endpoint, names in zip(it.endpoints, served, strict=True):
            it.runtime.report_models(endpoint.uid, [card(name) for name in names])
        it.tell()
        yield it
        assert not vllm.requests


async def names_in(it: Rig, path: str) -> list[str]:
    reply = await it.ask(get(path))
    assert reply.status == 200
    return [one["name"] for one in json.loads(reply.body)["models"]]


def test_lists_are_those_of_all_its_servers() -> None:
    async def main() -> None:
        async with several("models: {gpt: c, all: {split: {b: 1, m: 1}}, none: m, 'x*': b}") as it:
            assert await names_in(it, "/api/tags") == ["gpt", "all", "a:latest", "b", "c"]
            assert await names_in(it, "/api/ps") == ["a:latest", "b"]
            assert await names_in(it, "/api/tags/") == ["gpt", "all", "a:latest", "b", "c"]
            assert b" 200 " in await head_of(it, "/api/tags")

    run(main())


def test_a_client_sees_and_names_its_own_models_alone() -> None:
    async def main() -> None:
        async with several("flows: {default: {models: [a, c]}}") as it:
            assert await names_in(it, "/api/tags") == ["a:latest", "c"]
            assert await names_in(it, "/api/ps") == ["a:latest"]
            for name in ("a", "c"):
                assert (await it.ask(ask(CHAT | {"model": name}))).status == 200
            hidden = (ask(CHAT | {"model": "b"}), ask({"name": "b"}, "/api/show"), ask({"model": "b"}, "/api/embed"))
            for one in (*hidden, post(b'{"model":"c","Model":"b"}', "/api/chat")):
                reply = await it.ask(one)
                assert reply.status in {400, 404}, reply.body
            assert (await it.ask(get("/"))).status == 200
            await it.settle()
            assert {one.model for one in it.records.requests if one.status == 200} == {None, "a:latest", "c"}

    run(main())


def test_the_lists_are_asked_for_once_for_many() -> None:
    """Clients ask every few seconds, each of them."""

    async def main() -> None:
        async with ScriptedEndpoint(lists("m")) as server, rig((server.url, OLLAMA)) as it:
            now = it.data_runtime.now()
            it.data_runtime.now = lambda: now
            for _ in range(5):
                assert await names_in(it, "/api/tags") == ["m"]
            assert len(server.requests) == 1
            it.data_runtime.now = lambda: now + 1.5
            assert await names_in(it, "/api/tags") == ["m"]
            assert len(server.requests) == 2

    run(main())


def test_one_model_loaded_twice_is_listed_with_each_context() -> None:
    async def main() -> None:
        async with (
            ScriptedEndpoint(lists("m", context=4096)) as one,
            ScriptedEndpoint(lists("m", context=8192)) as two,
            ScriptedEndpoint(lists("m", context=8192)) as three,
            rig(*((each.url, OLLAMA) for each in (one, two, three))) as it,
        ):
            said = json.loads((await it.ask(get("/api/ps"))).body)["models"]
            assert [each["context_length"] for each in said] == [4096, 8192]

    run(main())
