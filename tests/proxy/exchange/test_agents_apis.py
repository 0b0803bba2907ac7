# SPDX-License-Identifier: Apache-2.0
"""/v1/responses and /v1/messages through real sockets: prompts find their home, stored responses their owner, and what
an engine reports is understood whatever its conventions.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from lbproxy.core.requests.outcome import Outcome
from tests.support.aio import run, until
from tests.support.endpoint import LAST, STREAM_HEAD, Received, ScriptedEndpoint, Wire, answer, chunk
from tests.support.rig import Rig, post, rig

TEXT = "The quick brown fox jumps over the lazy dog. " * 250
"""11 KB: eleven blocks."""


def body(**fields: object) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def chat(turns: list[str], n: int) -> bytes:
    del n
    return body(messages=[{"role": "system", "content": _system(turns)}, *_messages(turns)])


def messages(turns: list[str], n: int) -> bytes:
    said: list[dict[str, Any]] = [
        {"role": one["role"], "content": [{"type": "text", "text": one["content"]}]} for one in _messages(turns)
    ]
    said[-1]["content"][0]["cache_control"] = {"type": "ephemeral"}
    billing = f"x-anthropic-billing-header: cc_version=2.1; cch={n:05x};"
    return body(system=[{"type": "text", "text": billing}, {"type": "text", "text": _system(turns)}], messages=said)


def responses(turns: list[str], n: int) -> bytes:
    kinds = {"user": "input_text", "assistant": "output_text"}
    items = [
        {"role": one["role"], "content": [{"type": kinds[one["role"]], "text": one["content"]}], "id": f"msg_{n}_{i}"}
        for i, one in enumerate(_messages(turns))
    ]
    return body(instructions=_system(turns), input=items, store=False)


def _system(turns: list[str]) -> str:
    return f"{turns[0][:10]} {TEXT}"


def _messages(turns: list[str]) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


APIS: list[tuple[str, Callable[[list[str], int], bytes]]] = [
    ("/v1/chat/completions", chat),
    ("/v1/messages?beta=true", messages),
    ("/v1/responses", responses),
]


@pytest.mark.parametrize(("path", "make"), APIS)
def test_the_next_turn_of_a_conversation_returns_home(path: str, make: Callable[[list[str], int], bytes]) -> None:
    """What changes on each call, ids and marks and a billing line, is no part of the prompt."""

    async def main() -> None:
        async with (
            ScriptedEndpoint() as one,
            ScriptedEndpoint() as two,
            ScriptedEndpoint() as three,
            rig(one.url, two.url, three.url) as it,
        ):
            homes: dict[int, set[str | None]] = {}
            for turn in range(3):
                for user in range(9):
                    turns = [f"question {user}, turn {n} {user}" * 40 for n in range(2 * turn + 1)]
                    turns[0] = f"{user} " * 2000 + turns[0]
                    reply = await it.ask(post(make(turns, 100 * turn + user), path))
                    assert reply.status == 200
                    homes.setdefault(user, set()).add(reply.field("x-lbproxy-endpoint"))
            assert {len(home) for home in homes.values()} == {1}
            assert len(set.union(*homes.values())) == 3, "and they are spread"

    run(main())


def test_an_image_conversation_keeps_its_home() -> None:
    """A turn with 3 MB of base64, read in many turns of the loop, is placed by the hash of it."""

    def turn(user: int, turns: int) -> bytes:
        image = {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64," + f"{user}ABC" * 750_000}}
        texts = [{"type": "text", "text": f"what is it, {n}? " * 100} for n in range(turns)]
        return body(messages=[{"role": "user", "content": [image, *texts]}])

    async def main() -> None:
        async with (
            ScriptedEndpoint() as one,
            ScriptedEndpoint() as two,
            rig(one.url, two.url) as it,
        ):
            for user in range(4):
                homes = [(await it.ask(post(turn(user, n)))).field("x-lbproxy-endpoint") for n in (1, 2, 3)]
                assert len(set(homes)) == 1
            assert {len(endpoint.requests) for endpoint in (one, two)} == {6}

    run(main())


# --- Stored responses -------------------------------------------------------------------------------------------------


def stores(name: str, *, known: bool = True) -> Callable[[Wire, Received], Any]:
    """A server that stores what it answers, each under an id of its own, and knows no other id."""
    ids: set[str] = set()

    async def script(wire: Wire, request: Received) -> None:
        fields = json.loads(request.body or b"{}")
        about = (
            fields.get("previous_response_id") or request.path.removeprefix("/v1/responses").strip("/").split("/")[0]
        )
        if about and about not in ids:
            wire.writer.write(answer(b'{"error":{"message":"not found","code":404}}', status=404))
            return
        if request.path != "/v1/responses":
            wire.writer.write(answer(b'{"id":"%s","object":"response"}' % about.encode()))
            return
        made = f"resp_{name}{len(ids)}"
        ids.add(made)
        usage = {"input_tokens": 3000, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 0}}
        if not fields.get("stream"):
            wire.writer.write(answer(json.dumps({"id": made, "output": [], "usage": usage}).encode()))
            return
        created = f'event: response.created\ndata: {{"response":{{"id":"{made}","usage":null}}}}\n\n'
        delta = 'event: response.output_text.delta\ndata: {"delta":"a"}\n\n'
        end = {"response": {"id": made, "usage": usage}}
        done = f"event: response.completed\ndata: {json.dumps(end)}\n\n"
        await wire.send(STREAM_HEAD, chunk(created.encode()), chunk((delta + done).encode()), LAST)

    return script


@pytest.mark.parametrize("stream", [False, True])
def test_what_goes_on_with_a_response_and_what_is_about_it_goes_to_its_owner(stream: bool) -> None:
    async def main() -> None:
        async with (
            ScriptedEndpoint(stores("a")) as one,
            ScriptedEndpoint(stores("b")) as two,
            rig(one.url, two.url) as it,
        ):
            for n in range(20):
                first = await it.ask(post(body(input=f"hi {n}", stream=stream), "/v1/responses"))
                text = first.body.decode()
                made = text[text.index("resp_") :].split('"')[0]
                home = first.field("x-lbproxy-endpoint")
                for _ in range(2):
                    more = body(input="and?", previous_response_id=made, stream=stream)
                    reply = await it.ask(post(more, "/v1/responses"))
                    assert (reply.status, reply.field("x-lbproxy-endpoint")) == (200, home)
                    got = await it.ask(f"GET /v1/responses/{made}?include=x HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                    assert (got.status, got.field("x-lbproxy-endpoint")) == (200, home)
                for action in ("cancel", "input_items"):
                    reply = await it.ask(post(b"", f"/v1/responses/{made}/{action}"))
                    assert (reply.status, reply.field("x-lbproxy-endpoint")) == (200, home)

    run(main())


def test_a_thousand_responses_over_four_endpoints_are_each_found_at_their_owner() -> None:
    """In another order than they were made in; after an owner's death its own are 404, and no other is."""

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            servers = [await stack.enter_async_context(ScriptedEndpoint(stores(letter))) for letter in "abcd"]
            it = await stack.enter_async_context(rig(*(server.url for server in servers)))
            client = await it.connect()

            async def ask(data: bytes) -> tuple[int, str | None, bytes]:
                client.send(data)
                reply = await client.reply()
                return reply.status, reply.field("x-lbproxy-endpoint"), reply.body

            homes: dict[str, str | None] = {}
            for n in range(1000):
                status, home, text = await ask(post(body(input=f"hi {n} " * 300), "/v1/responses"))
                assert status == 200
                homes[json.loads(text)["id"]] = home
            assert len(homes) == 1000
            assert min(Counter(homes.values()).values()) > 50, "they are spread over all four"
            order = random.Random(5).sample(sorted(homes), len(homes))
            for made in order:
                status, home, _ = await ask(post(body(input="and?", previous_response_id=made), "/v1/responses"))
                assert (status, home) == (200, homes[made])
            await servers[0].stop()
            for made in order[:100]:
                status, _, _ = await ask(post(body(input="and?", previous_response_id=made), "/v1/responses"))
                assert status == (404 if homes[made] == "e1" else 200)

    run(main())


async def one_response_each(it: Rig) -> dict[str | None, str]:
    """The id of a response that each of two endpoints has stored, by the endpoint's name."""
    made: dict[str | None, str] = {}
    while len(made) < 2:
        reply = await it.ask(post(body(input="hi"), "/v1/responses"))
        made[reply.field("x-lbproxy-endpoint")] = json.loads(reply.body)["id"]
    return made


def test_a_response_whose_owner_is_dead_is_404_in_the_engines_words() -> None:
    async def main() -> None:
        async with (
            ScriptedEndpoint(stores("a")) as one,
            ScriptedEndpoint(stores("b")) as two,
            rig(one.url, two.url) as it,
        ):
            made = await one_response_each(it)
            await one.stop()
            for _ in range(3):
                reply = await it.ask(post(body(input="and?", previous_response_id=made["e1"]), "/v1/responses"))
                assert (reply.status, reply.field("x-lbproxy-reason")) == (404, "response_not_found")
                error = json.loads(reply.body)["error"]
                assert "Send what it held again" in error["message"]
                assert (error["type"], error["param"]) == ("invalid_request_error", "response_id")
                assert reply.field("x-should-retry") == "false"
            reply = await it.ask(post(body(input="and?", previous_response_id=made["e2"]), "/v1/responses"))
            assert reply.status == 200
            assert len(two.requests) == two.asked("/v1/responses") <= 20

    run(main())


def test_a_response_that_nobody_remembers_is_looked_for() -> None:
    """As after a restart of lbproxy: an endpoint that does not have it says so at once, another is asked."""

    async def main() -> None:
        async with (
            ScriptedEndpoint(stores("a")) as one,
            ScriptedEndpoint(stores("b")) as two,
            rig(one.url, two.url) as before,
        ):
            made = await one_response_each(before)
            async with rig(one.url, two.url) as it:
                for home, response_id in sorted(made.items(), key=str):
                    for _ in range(4):
                        reply = await it.ask(
                            post(body(input="and?", previous_response_id=response_id), "/v1/responses")
                        )
                        assert (reply.status, reply.field("x-lbproxy-endpoint")) == (200, home)
                reply = await it.ask(post(body(input="?", previous_response_id="resp_never"), "/v1/responses"))
                assert reply.status == 404
                assert json.loads(reply.body)["error"]["code"] == 404, "the last endpoint's own words"

    run(main())


@pytest.mark.parametrize("status", [500, 502, 504])
def test_a_response_in_the_background_is_made_once(status: int) -> None:
    """Each copy would run to its end, whoever waits for it."""

    async def main() -> None:
        bad = answer(b"{}", status=status)
        async with ScriptedEndpoint(bad) as one, ScriptedEndpoint(bad) as two, rig(one.url, two.url) as it:
            for background, asked in ((True, 1), (False, 1 if status == 504 else 2)):
                before = one.asked("/v1/responses") + two.asked("/v1/responses")
                reply = await it.ask(post(body(input="hi", background=background), "/v1/responses"))
                assert reply.status == status
                assert one.asked("/v1/responses") + two.asked("/v1/responses") - before == asked

    run(main())


# --- What engines report ----------------------------------------------------------------------------------------------


def test_the_first_token_is_not_the_event_that_says_a_response_was_created() -> None:
    """vLLM sends it before the prompt is computed. A prompt that takes seconds looked as if it took none."""

    async def main() -> None:
        go = asyncio.Event()

        async def script(wire: Wire, _: Received) -> None:
            created = b'event: response.created\ndata: {"response":{"id":"resp_1"}}\n\n'
            await wire.send(STREAM_HEAD, chunk(created))
            await go.wait()
            await wire.send(chunk(b'event: response.output_text.delta\ndata: {"delta":"a"}\n\n'), LAST)

        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post(body(input="hi", stream=True), "/v1/responses"))
            await client.head()
            assert b"response.created" in await client.reader.readuntil(b"\n\n"), "the client has it at once"
            assert it.snapshots()[0].awaiting_first_byte == 1
            go.set()
            await until(lambda: bool(it.records.requests))
            record = it.records.requests[-1]
            assert record.outcome is Outcome.COMPLETED
            assert record.first_byte_at is not None
            assert record.events == 2

    run(main())


@pytest.mark.parametrize(
    ("usage", "prompt", "cached"),
    [
        ({"input_tokens": 2800, "cache_read_input_tokens": 2000, "output_tokens": 5}, 2800, 2000),
        ({"input_tokens": 800, "cache_read_input_tokens": 2000, "output_tokens": 5}, 2800, 2000),  # vLLM, SGLang
        ({"input_tokens": 2800, "output_tokens": 5}, 2800, None),
    ],
)
def test_the_whole_prompt_is_counted_by_either_convention(
    usage: dict[str, int], prompt: int, cached: int | None
) -> None:
    async def main() -> None:
        reply = answer(json.dumps({"type": "message", "content": [], "usage": usage}).encode())
        async with ScriptedEndpoint(reply) as endpoint, rig(endpoint.url) as it:
            asked = post(body(messages=[{"role": "user", "content": TEXT}]), "/v1/messages")
            assert (await it.ask(asked)).status == 200
            used = it.records.requests[-1].usage
            assert used is not None
            assert (used.prompt_tokens, used.cached_tokens, used.completion_tokens) == (prompt, cached, 5)

    run(main())


# --- Errors of our own in Anthropic's form ----------------------------------------------------------------------------


def test_errors_are_in_the_form_of_the_api_that_was_asked() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            said = json.loads((await it.ask(post(b'{"model":"nope"}', "/v1/messages"))).body)
            assert said["type"] == "error"
            assert said["error"]["type"] == "not_found_error"
            assert said["error"]["code"] == "model_not_found"
            said = json.loads((await it.ask(post(b'{"model":"nope"}', "/v1/responses"))).body)
            assert set(said) == {"error"}
            assert said["error"]["code"] == "model_not_found"

    run(main())


def test_a_stream_of_anthropics_that_breaks_ends_with_their_error_event() -> None:
    """Their SDK raises on events of the name `error` and on no other."""

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD, chunk(b'event: message_start\ndata: {"type":"message_start"}\n\n'))
        wire.reset()

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post(body(messages=[], stream=True), "/v1/messages"))
            await client.head()
            data = await client.reader.read(-1)
            assert b"event: error\ndata: {" in data
            assert b'"type":"api_error"' in data
            assert not data.endswith(LAST)

    run(main())
