# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode apart, on the wire: what each end is sent, and what follows whatever fails between them."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.observed.trace import Sampling
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import DECODE, PREFILL, Usage
from lbproxy.net.connections.pool import Connection
from lbproxy.net.dialing.origin import Origin
from lbproxy.proxy.exchange.steps import Step
from tests.proxy.conftest import Steps
from tests.support.aio import run, until
from tests.support.compiled import interpreted
from tests.support.endpoint import (
    LAST,
    OK,
    STREAM_HEAD,
    Received,
    Script,
    ScriptedEndpoint,
    Wire,
    answer,
    chunk,
    event,
    hang,
    reset,
)
from tests.support.rig import Reply, Rig, post, rig
from tests.support.state_tables import STEPS

ALWAYS = "routing: {split: always}\nretry: {budget_per_second: 100}"
BODY = b'{"model":"m","stream":true,"max_tokens":50,"messages":[{"role":"user","content":"' + b"word " * 100 + b'"}]}'
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "engine-1",
    "remote_request_id": "chatcmpl-1",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}
USAGE = {"prompt_tokens": 100, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 64}}


Scripts: TypeAlias = list[tuple[str, Script]]


def prefilled(params: object = PARAMS) -> bytes:
    return answer(json.dumps({"choices": [{"text": "x"}], "usage": USAGE, "kv_transfer_params": params}).encode())


async def stream(wire: Wire, _: Received) -> None:
    done = '{"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":2}}'
    await wire.send(STREAM_HEAD + event('{"text":"Hello"}') + event(done) + event("[DONE]") + LAST)


def status(code: int, body: bytes = b'{"error":{"message":"no"}}') -> bytes:
    return answer(body, status=code)


@asynccontextmanager
async def apart(
    *scripts: tuple[str, Script], connector: str = "nixl", more: str = ALWAYS
) -> AsyncIterator[tuple[Rig, list[ScriptedEndpoint]]]:
    """Endpoints with these roles and scripts: e1, e2 ..."""
    servers = [ScriptedEndpoint(script) for _, script in scripts]
    async with asyncio.TaskGroup():
        for server in servers:
            await server.__aenter__()
        try:
            entries = [
                (server.url, f"role: {role}" if role == "both" else f"role: {role}, connector: {connector}")
                for server, (role, _) in zip(servers, scripts, strict=True)
            ]
            async with rig(*entries, more=more) as it:
                yield it, servers
        finally:
            for server in servers:
                await server.stop()


def sent(server: ScriptedEndpoint, index: int = 0) -> dict[str, Any]:
    read = json.loads(server.requests[index].body)
    assert isinstance(read, dict)
    return read


def used_tokens(it: Rig) -> float:
    """Of the minute of the only flow."""
    (flow,) = it.balancer._flows
    return flow.allowance.use(it.runtime.now()).tokens


def complete(reply: Reply) -> bool:
    return reply.status == 200 and reply.body.endswith(b"data: [DONE]\n\n")


# --- NIXL -------------------------------------------------------------------------------------------------------------


def test_what_prefill_returned_goes_to_decode_with_the_clients_own_bytes() -> None:
    async def main() -> None:
        async with apart(("prefill", prefilled()), ("decode", stream)) as (it, (first, second)):
            assert complete(await it.ask(post(BODY, more="x-request-id: mine\r\n")))
            prompt = json.loads(BODY)["messages"]
            assert sent(first) == {
                "model": "m",
                "stream": False,
                "max_tokens": 1,
                "messages": prompt,
                "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
            }
            assert second.requests[0].body.startswith(BODY[:-1])
            assert sent(second) == {**json.loads(BODY), "kv_transfer_params": PARAMS}
            ids = {one.requests[0].field("x-request-id") for one in (first, second)}
            assert len(ids) == 1
            assert str(ids.pop()).startswith("mine-")
            (record,) = it.records.requests
            assert (record.prefill, record.endpoint, record.attempts) == ("e1", "e2", 1)
            assert record.outcome is Outcome.COMPLETED
            assert record.prefill_usage is not None
            assert record.prefill_usage.cached_tokens == 64

    run(main())


@pytest.mark.parametrize("words", [100, 100_000], ids=["small", "read in turns"])
def test_both_legs_name_the_model_behind_an_alias(words: int) -> None:
    body = BODY.replace(b'"m"', b'"fast"').replace(b"word " * 100, b"word " * words)

    async def main() -> None:
        models = f"{ALWAYS}\nmodels: {{fast: {{to: m}}}}"
        async with apart(("prefill", prefilled()), ("decode", stream), more=models) as (it, (first, second)):
            assert complete(await it.ask(post(body)))
            asked = json.loads(body) | {"model": "m"}
            assert sent(first)["model"] == "m"
            assert sent(first)["messages"] == asked["messages"]
            assert second.requests[0].body.startswith(body.replace(b'"fast"', b'"m"')[:-1])
            assert sent(second) == {**asked, "kv_transfer_params": PARAMS}
            assert it.front.overload.held_bytes == 0

    run(main())


RECORDED = Path(__file__).parents[2] / "fixtures" / "http" / "vllm-0.32.0-nixl"


def test_what_prefill_used_contains_what_it_put_into_its_cache() -> None:
    """Recorded: vLLM's /v1/messages counts 15 tokens of input, and 192 beside them that were written to the cache."""

    async def main() -> None:
        body = (RECORDED / "messages-prefill.response.http").read_bytes().partition(b"\r\n\r\n")[2]
        asked = (RECORDED / "messages-decode.request.http").read_bytes().partition(b"\r\n\r\n")[2]
        own = json.dumps(json.loads(asked) | {"model": "m", "kv_transfer_params": None}).encode()
        async with apart(("prefill", answer(body)), ("decode", OK)) as (it, _):
            assert (await it.ask(post(own, "/v1/messages"))).status == 200
            assert it.records.requests[0].prefill_usage == Usage(207, 0, None)

    run(main())


@pytest.mark.parametrize(
    ("path", "limits", "wanted"),
    [
        ("/v1/completions", {"max_tokens": 9}, {"max_tokens": 1}),
        ("/v1/completions", {}, {"max_tokens": 1}),
        ("/v1/chat/completions", {"max_completion_tokens": 9}, {"max_completion_tokens": 1}),
        ("/v1/chat/completions", {"max_completion_tokens": 9, "max_tokens": 9}, {"max_completion_tokens": 1}),
        ("/v1/responses", {"max_output_tokens": 9, "store": False}, {"max_output_tokens": 1, "store": False}),
        ("/v1/messages", {"max_tokens": 9, "stream": True}, {"max_tokens": 1}),
        (
            "/v1/completions",
            {"min_tokens": 5, "stream": True, "stream_options": {"include_usage": True}},
            {"max_tokens": 1},
        ),
    ],
)
def test_prefill_makes_one_token_by_every_name_of_that(path: str, limits: object, wanted: dict[str, object]) -> None:
    async def main() -> None:
        async with apart(("prefill", prefilled()), ("decode", OK)) as (it, (first, second)):
            assert isinstance(limits, dict)
            body = {"model": "m", "prompt": "x", "input": "x", "messages": [], **limits}
            assert (await it.ask(post(json.dumps(body).encode(), path))).status == 200
            for name in ("prompt", "input", "messages", "model"):
                body.pop(name)
            got = {
                name: value
                for name, value in sent(first).items()
                if "token" in name or "stream" in name or name == "store"
            }
            assert got == {"stream": False, **wanted}
            assert sent(second)["kv_transfer_params"] == PARAMS

    run(main())


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"best_of": 2},
        {"use_beam_search": True},
        {"echo": True},
        {"prompt_logprobs": 0},
        {"max_tokens": 1},
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
    ],
    ids=str,
)
def test_what_an_engine_cannot_hand_over_is_served_whole(more: dict[str, object]) -> None:
    async def main() -> None:
        async with apart(("prefill", prefilled()), ("decode", OK)) as (it, (first, second)):
            body = json.dumps({"model": "m", "prompt": "x", **more}).encode()
            assert (await it.ask(post(body, "/v1/completions"))).status == 200
            assert not first.requests
            assert [one.body for one in second.requests] == [body]

    run(main())


@pytest.mark.parametrize(
    "params",
    [
        None,
        "text",
        {},
        {**PARAMS, "remote_block_ids": []},
        {**PARAMS, "remote_block_ids": [[], []]},
        {**PARAMS, "remote_block_ids": 7},
        {**PARAMS, "remote_engine_id": None},
        {**PARAMS, "remote_host": ""},
        {**PARAMS, "remote_port": "5600"},
        {**PARAMS, "remote_port": True},
        {**PARAMS, "do_remote_prefill": False},
    ],
    ids=str,
)
def test_an_incomplete_hand_over_never_reaches_an_engine(params: object) -> None:
    """vLLM would wait for the rest for ever, or die of it."""

    async def main() -> None:
        async with apart(("prefill", prefilled(params)), ("decode", stream)) as (it, (_, second)):
            assert complete(await it.ask(post(BODY)))
            assert [one.body for one in second.requests] == [BODY]

    run(main())


@pytest.mark.parametrize(
    "script", [b"", reset, status(500), status(503), status(429), status(502), answer(b"x" * (9 << 20))]
)
def test_a_prefill_endpoint_that_fails_is_replaced_by_another_or_by_decode_itself(script: Script) -> None:
    async def main() -> None:
        for others in (1, 0):
            scripts: Scripts = [
                ("prefill", script),
                *[("prefill", prefilled())] * others,
                ("decode", stream),
            ]
            async with apart(*scripts) as (it, servers):
                if script == b"":
                    await servers[0].stop()
                for _ in range(3):
                    assert complete(await it.ask(post(BODY)))
                assert len(servers[-1].requests) == 3
                assert sum(one.outcome is Outcome.COMPLETED for one in it.records.requests) == 3

    run(main())


@pytest.mark.parametrize(("code", "ours"), [(500, 502), (502, 502), (503, 503), (529, 503), (429, 429), (504, 504)])
def test_a_first_leg_that_fails_for_good_is_an_error_of_ours(code: int, ours: int) -> None:
    """Its response is not the client's: without a retry the client got status 0, recorded as completed."""
    no_budget = "routing: {split: always}\nretry: {budget_ratio: 0, budget_per_second: 0}"

    async def main() -> None:
        async with apart(("prefill", status(code)), ("decode", stream), more=no_budget) as (it, (_, second)):
            reply = await it.ask(post(BODY))
            (record,) = it.records.requests
            assert (reply.status, record.outcome.value.status) == (ours, ours)
            assert reply.field("x-lbproxy-reason") == record.outcome.label
            assert not second.requests

    run(main())


@pytest.mark.parametrize("code", [400, 401, 404, 413, 422])
def test_a_first_leg_that_is_refused_as_wrong_is_no_verdict_on_the_request(code: int) -> None:
    """Its body is not the client's: decode gets that, and its word is final."""

    async def main() -> None:
        async with apart(("prefill", status(code)), ("decode", stream)) as (it, (_, second)):
            assert complete(await it.ask(post(BODY)))
            assert [one.body for one in second.requests] == [BODY]
        async with apart(("prefill", status(code)), ("decode", status(400, b'{"error":"wrong"}'))) as (it, _):
            reply = await it.ask(post(BODY))
            assert (reply.status, reply.body) == (400, b'{"error":"wrong"}')

    run(main())


def test_what_was_prefilled_goes_to_another_decode_endpoint_if_the_first_cannot_be_reached() -> None:
    async def main() -> None:
        scripts: Scripts = [("prefill", prefilled()), ("decode", stream), ("decode", stream)]
        async with apart(*scripts) as (it, (first, gone, other)):
            await gone.stop()
            for n in range(1, 5):
                assert complete(await it.ask(post(BODY)))
                assert len(first.requests) == n, "prefilled once each"
            assert all(sent(other, n)["kv_transfer_params"] == PARAMS for n in range(4))

    run(main())


def test_a_decode_endpoint_that_breaks_has_perhaps_fetched_it_so_all_begins_anew() -> None:
    broken: list[bool] = []

    async def script(wire: Wire, request: Received) -> None:
        if broken:
            await stream(wire, request)
        else:
            broken.append(True)
            wire.reset()

    async def main() -> None:
        scripts: Scripts = [("prefill", prefilled()), ("decode", script), ("decode", script)]
        async with apart(*scripts) as (it, (first, one, two)):
            assert complete(await it.ask(post(BODY)))
            assert len(first.requests) == 2
            assert (len(one.requests), len(two.requests)) == (1, 1)

    run(main())


ROLE = '{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}'
LOAD_FAILED = (
    event('{"error": {"message": "Internal server error", "param": null, "code": 500}}') + event("[DONE]") + LAST
)
CREATED = chunk(b'event: response.created\ndata: {"type":"response.created"}\n\n')
MESSAGE_START = chunk(b'event: message_start\ndata: {"type":"message_start"}\n\n')
MESSAGE_ERROR = chunk(b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"no"}}\n\n')
NOT_FETCHED: dict[str, tuple[str, list[bytes]]] = {
    "status": ("/v1/chat/completions", [status(500)]),
    "event": ("/v1/completions", [STREAM_HEAD + LOAD_FAILED]),
    "role, event": ("/v1/chat/completions", [STREAM_HEAD + event(ROLE) + LOAD_FAILED]),
    "role; event": ("/v1/chat/completions", [STREAM_HEAD, event(ROLE), LOAD_FAILED]),
    "created; reset": ("/v1/responses", [STREAM_HEAD, CREATED]),
    "start, event": ("/v1/messages", [STREAM_HEAD + MESSAGE_START + MESSAGE_ERROR + LAST]),
    "start; event": ("/v1/messages", [STREAM_HEAD, MESSAGE_START, MESSAGE_ERROR + LAST]),
}
"""What vLLM 0.32 says where it cannot fetch the KV cache, by its API."""


@pytest.mark.parametrize("how", NOT_FETCHED)
def test_what_decode_could_not_fetch_is_served_whole_also_by_itself(how: str) -> None:
    """Prefill is gone, and there is no other decode endpoint: none of the failure reaches the client."""
    path, pieces = NOT_FETCHED[how]
    body = json.dumps(json.loads(BODY) | {"input": "x", "prompt": "x", "store": False}).encode()
    failed: list[bool] = []

    async def main() -> None:
        async def script(wire: Wire, request: Received) -> None:
            if failed:
                await stream(wire, request)
                return
            failed.append(True)
            await first.stop()
            for piece in pieces:
                await wire.send(piece)
                await asyncio.sleep(0)
            if "reset" in how:
                await until(lambda: it.records is not None)
                wire.reset()

        async with apart(("prefill", prefilled()), ("decode", script)) as (it, (first, second)):
            reply = await it.ask(post(body, path))
            assert complete(reply)
            assert reply.body.count(b"data:") == 3
            assert [b"kv_transfer_params" in one.body for one in second.requests] == [True, False]
            (record,) = it.records.requests
            assert record.outcome is Outcome.COMPLETED
            wrong = ["e2", "e1"] if "reset" in how else ["e2"]  # after a reset, any other endpoint is tried before it
            assert [name for name, _ in record.failed] == wrong
            await until(lambda: it.in_flight() == 0)

    run(main())


def test_after_a_second_leg_that_broke_before_a_token_another_decode_endpoint_is_better() -> None:
    """The endpoint itself may be what breaks; it would be picked again, as nothing else runs anywhere."""

    async def broken(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD)
        await asyncio.sleep(0)
        wire.reset()

    async def main() -> None:
        for decode in (broken, stream), (stream, broken):
            async with apart(("prefill", prefilled()), *(("decode", one) for one in decode)) as (it, _):
                for _ in range(6):
                    assert complete(await it.ask(post(BODY)))

    run(main())


def test_a_stream_whose_first_events_are_held_is_relayed_unchanged() -> None:
    """Also if it ends before any token, or its first events are large."""
    for events in ([ROLE], [ROLE, '{"choices":[]}'], ['{"x":"%s"}' % ("x" * 300_000)]):
        body = b"".join(event(one) for one in events)

        async def script(wire: Wire, _: Received, body: bytes = body) -> None:
            await wire.send(STREAM_HEAD + body + LAST)

        async def main(script: Script = script, events: list[str] = events) -> None:
            async with apart(("prefill", prefilled()), ("decode", script)) as (it, _):
                reply = await it.ask(post(BODY))
                assert (reply.status, reply.body.decode()) == (200, "".join(f"data: {one}\n\n" for one in events))

        run(main())


def test_without_another_decode_endpoint_nothing_is_left_to_ask() -> None:
    async def main() -> None:
        async with apart(("prefill", prefilled()), ("decode", reset)) as (it, (first, second)):
            reply = await it.ask(post(BODY))
            assert reply.status in {200, 502}, "prefill serves it whole, or the error of decode is said"
            assert len(second.requests) == 1
            await until(lambda: it.in_flight() == 0)
            assert first.requests

    run(main())


def test_a_client_that_leaves_while_it_is_prefilled_ends_that_at_once() -> None:
    """And its prompt counts."""

    async def main() -> None:
        limited = f"{ALWAYS}\nflows: {{default: {{tokens_per_minute: 60}}}}"
        async with apart(("prefill", hang), ("decode", stream), more=limited) as (it, (first, second)):
            client = await it.connect()
            client.send(post(BODY))
            await until(lambda: first.requests)
            client.writer.transport.abort()
            await until(first.wires[0].gone.is_set, "the engine is told")
            await until(lambda: it.records.requests)
            assert it.records.requests[0].outcome is Outcome.CLIENT_CLOSED
            assert not second.requests
            assert used_tokens(it) > len(json.loads(BODY)["messages"][0]["content"]) / 4 - 3

    run(main())


@interpreted
def test_a_client_that_leaves_between_the_legs_has_decode_free_what_prefill_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prefill would keep it for 30 s: decode fetches it, and is left."""

    async def main() -> None:
        async with apart(("prefill", prefilled()), ("decode", hang)) as (it, (_, second)):
            dialling, real = asyncio.Event(), it.connections.connect

            async def dial(origin: Origin, timeout_s: float) -> Connection:
                if origin[1] == second.port and not dialling.is_set():
                    dialling.set()
                    await asyncio.Event().wait()
                return await real(origin, timeout_s)

            monkeypatch.setattr(it.connections, "connect", dial)
            client = await it.connect()
            client.send(post(BODY))
            await dialling.wait()
            client.writer.transport.abort()
            await until(lambda: second.requests, "decode is sent the second leg")
            assert sent(second)["kv_transfer_params"] == PARAMS
            await until(second.wires[0].gone.is_set, "and left")

    run(main())


def test_prefill_that_takes_too_long_is_a_time_out_like_any_other() -> None:
    async def main() -> None:
        more = ALWAYS + "\ntimeouts: {first_byte: 300ms}"
        async with apart(("prefill", hang), ("decode", stream), more=more) as (it, (first, second)):
            assert (await it.ask(post(BODY))).status == 504
            assert (len(first.requests), len(second.requests)) == (1, 0)

    run(main())


def test_a_request_that_is_stranded_at_prefill_goes_elsewhere() -> None:
    async def main() -> None:
        async with apart(("prefill", hang), ("decode", stream)) as (it, (first, _)):
            client = await it.connect()
            client.send(post(BODY))
            await until(lambda: first.requests)
            it.take_down("e1")
            it.runtime.check()
            assert complete(await client.reply())
            await until(first.wires[0].gone.is_set)

    run(main())


def test_a_client_cannot_set_what_legs_find_each_other_by() -> None:
    """It could read what belongs to another request, or kill an engine."""

    async def main() -> None:
        own = json.loads(BODY) | {"kv_transfer_params": PARAMS}
        async with apart(("prefill", prefilled()), ("decode", stream)) as (it, (first, second)):
            reply = await it.ask(post(json.dumps(own).encode()))
            assert reply.status == 400
            assert json.loads(reply.body)["error"]["code"] == "reserved_field"
            assert not first.requests
            assert not second.requests
            nothing = json.dumps(json.loads(BODY) | {"kv_transfer_params": None}).encode()
            assert complete(await it.ask(post(nothing)))
            assert second.requests[0].body.count(b"kv_transfer_params") == 1
        async with ScriptedEndpoint(stream) as plain, rig(plain.url) as it:
            assert complete(await it.ask(post(json.dumps(own).encode())))

    run(main())


@pytest.mark.parametrize(
    "path", ["/v1/%63hat/completions", "/v1/chat%2Fcompletions", "/v1/chat/completions/", "/v1/responses", "/v1/new"]
)
@pytest.mark.parametrize("kind", ["", "Content-Type: text/plain\r\n"])
@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_nor_by_another_spelling_of_the_path_another_method_or_no_content_type(
    path: str, kind: str, method: str
) -> None:
    """Servers read what the check did not."""

    async def main() -> None:
        own = json.dumps(json.loads(BODY) | {"kv_transfer_params": PARAMS}).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: lb\r\n{kind}Content-Length: {len(own)}\r\n\r\n".encode()
        async with apart(("prefill", prefilled()), ("decode", stream)) as (it, (first, second)):
            assert (await it.ask(head + own)).status in {400, 405}
            assert not first.requests
            assert not second.requests

    run(main())


@pytest.mark.parametrize("value", [b"[1]", b"[]", b"{}", b"[[]]"])
@pytest.mark.parametrize("name", [b"n", b"best_of", b"max_tokens", b"min_tokens", b"stream", b"store", b"prompt"])
def test_a_value_of_any_type_is_the_servers_to_judge(name: bytes, value: bytes) -> None:
    """It was a 500 and a traceback."""

    async def main() -> None:
        own = BODY.removesuffix(b"}") + b',"%b":%b}' % (name, value)
        async with apart(("prefill", prefilled()), ("decode", OK)) as (it, _):
            assert (await it.ask(post(own))).status == 200

    run(main())


def test_a_body_that_cannot_be_written_again_is_served_whole() -> None:
    """It was read, and orjson writes no more than 254 levels."""

    async def main() -> None:
        own = BODY.removesuffix(b"}") + b',"x":%b}' % (b"[" * 300 + b"]" * 300)
        async with apart(("prefill", OK), ("decode", OK)) as (it, servers):
            assert (await it.ask(post(own))).status == 200
            assert [one.body for server in servers for one in server.requests] == [own]

    run(main())


@pytest.mark.parametrize("connector", ["nixl", "shared-storage", "sglang"])
def test_a_bound_of_tiers_is_told_to_both_legs(connector: str) -> None:
    async def main() -> None:
        servers = ("prefill", prefilled()), ("decode", stream)
        async with apart(*servers, connector=connector) as (it, (first, second)):
            await it.ask(post(BODY, more="x-lbproxy-tier: 2\r\n"))
            assert [one.requests[0].field("x-lbproxy-tier") for one in (first, second)] == ["2", "2"]

    run(main())


def test_a_response_that_is_not_streamed_comes_whole() -> None:
    async def main() -> None:
        async with apart(("prefill", prefilled()), ("decode", OK)) as (it, (_, second)):
            body = BODY.replace(b'"stream":true', b'"stream":false')
            reply = await it.ask(post(body))
            assert (reply.status, reply.body) == (200, b'{"ok":true}')
            assert sent(second)["kv_transfer_params"] == PARAMS

    run(main())


def test_shared_storage_gets_the_body_twice_and_no_parameters() -> None:
    async def main() -> None:
        scripts: Scripts = [("prefill", prefilled(None)), ("decode", stream)]
        async with apart(*scripts, connector="shared-storage") as (it, (first, second)):
            assert complete(await it.ask(post(BODY)))
            assert "kv_transfer_params" not in sent(first)
            assert sent(first)["max_tokens"] == 1
            assert [one.body for one in second.requests] == [BODY]

    run(main())


# --- Both at once: SGLang and Mooncake --------------------------------------------------------------------------------


class Meeting:
    """Prefill that responds once decode was asked, and the other way round, as engines that wait for each other."""

    def __init__(self) -> None:
        self.rooms: dict[str, set[object]] = {"prefill": set(), "decode": set()}

    def script(self, role: str, then: Script) -> Script:
        other = {"prefill": "decode", "decode": "prefill"}[role]

        async def script(wire: Wire, request: Received) -> None:
            body = json.loads(request.body)
            room = body.get("bootstrap_room") or body["kv_transfer_params"]["transfer_id"]
            self.rooms[role].add(room)
            await until(lambda: room in self.rooms[other])
            if isinstance(then, bytes):
                await wire.send(then)
            else:
                await then(wire, request)

        return script


def test_sglang_gets_the_same_body_at_both_ends_at_once() -> None:
    async def main() -> None:
        met = Meeting()
        scripts: Scripts = [
            ("prefill", met.script("prefill", prefilled(None))),
            ("decode", met.script("decode", stream)),
        ]
        async with apart(*scripts, connector="sglang") as (it, (first, second)):
            for _ in range(3):
                assert complete(await it.ask(post(BODY)))
            assert [sent(first, n) for n in range(3)] == [sent(second, n) for n in range(3)]
            assert len({sent(first, n)["bootstrap_room"] for n in range(3)}) == 3
            assert (sent(first)["bootstrap_host"], sent(first)["bootstrap_port"]) == ("127.0.0.1", 8998)
            assert first.requests[0].body.startswith(BODY[:-1])
            assert {one.prefill for one in it.records.requests} == {"e1"}

    run(main())


def test_mooncake_asks_prefill_for_its_engine_once() -> None:
    async def main() -> None:
        met = Meeting()
        page = answer(b'{"0":{"engine_id":"engine-7","worker_addr":{}}}')
        async with ScriptedEndpoint({"/query": page}) as bootstrap:
            first = ScriptedEndpoint(met.script("prefill", prefilled(None)))
            second = ScriptedEndpoint(met.script("decode", stream))
            async with first, second:
                entries = [
                    (first.url, f"role: prefill, connector: mooncake, bootstrap_port: {bootstrap.port}"),
                    (second.url, "role: decode, connector: mooncake"),
                ]
                async with rig(*entries, more=ALWAYS) as it:
                    for _ in range(3):
                        assert complete(await it.ask(post(BODY)))
                    assert [one.path for one in bootstrap.requests] == ["/query"]
                    ours, theirs = sent(first)["kv_transfer_params"], sent(second)["kv_transfer_params"]
                    assert ours["transfer_id"] == theirs["transfer_id"]
                    assert theirs["remote_engine_id"] == "engine-7"
                    assert theirs["remote_bootstrap_addr"] == f"http://127.0.0.1:{bootstrap.port}"
                    assert sent(first)["min_tokens"] == 1

    run(main())


class Mooncake:
    """A prefill process that can be started anew, and a decode server that knows its engine by its id alone."""

    def __init__(self) -> None:
        self.number = 1
        self.met = Meeting()

    async def bootstrap(self, wire: Wire, request: Received) -> None:
        await wire.send(answer(b'{"0":{"engine_id":"engine-%d","worker_addr":{}}}' % self.number))

    async def decode(self, wire: Wire, request: Received) -> None:
        asked = json.loads(request.body).get("kv_transfer_params", {}).get("remote_engine_id")
        if asked in {None, f"engine-{self.number}"}:
            await stream(wire, request)
        else:
            await wire.send(status(500))


@pytest.mark.parametrize("seen", [True, False])
def test_ids_of_an_engine_end_with_its_process(seen: bool) -> None:
    """They were kept by URL: after a restart nothing was split, and two thirds of all requests were 500 and made a
    healthy decode server look ill. `seen`: a page with another start time shows it; else the first leg that fails.
    """

    async def main() -> None:
        fleet = Mooncake()
        async with (
            ScriptedEndpoint({"/query": fleet.bootstrap}) as bootstrap,
            ScriptedEndpoint(prefilled(None)) as first,
            ScriptedEndpoint(fleet.decode) as second,
        ):
            entries = [
                (first.url, f"role: prefill, connector: mooncake, bootstrap_port: {bootstrap.port}"),
                (second.url, "role: decode, connector: mooncake"),
            ]
            async with rig(*entries, more=ALWAYS) as it:
                uid = it.endpoints[0].uid
                it.runtime.report_scrape(uid, LoadMetrics(scraped_at=it.runtime.now(), started_at=1000.0))
                for number in (1, 2, 3):
                    fleet.number = number
                    if seen:
                        metrics = LoadMetrics(scraped_at=it.runtime.now(), started_at=1000.0 * number)
                        it.runtime.report_scrape(uid, metrics)
                    for _ in range(6):
                        assert complete(await it.ask(post(BODY)))
                assert len(bootstrap.requests) == 3
                whole = [one for one in it.records.requests if one.failed]
                assert len(whole) == (0 if seen else 2), "one for each restart that nothing else has shown"
                assert it.seen("e2").health.value == "up"
                state = it.balancer.endpoints.get(it.endpoints[1].uid)
                assert state is not None
                assert not state.standing.breaker.failures, "it is not to blame"

    run(main())


@pytest.mark.parametrize("page", [b"{}", b"[]", b"<html>", b'{"0":{"engine_id":7}}', b'{"x":{"engine_id":"e"}}'])
def test_a_bootstrap_page_that_says_nothing_sends_the_request_elsewhere(page: bytes) -> None:
    async def main() -> None:
        async with ScriptedEndpoint(answer(page)) as bootstrap, ScriptedEndpoint(stream) as second:
            entries = [
                (bootstrap.url, f"role: prefill, connector: mooncake, bootstrap_port: {bootstrap.port}"),
                (second.url, "role: decode, connector: mooncake"),
            ]
            async with rig(*entries, more=ALWAYS) as it:
                assert complete(await it.ask(post(BODY)))
                assert [one.body for one in second.requests] == [BODY]

    run(main())


@pytest.mark.parametrize("script", [reset, status(500), status(503)])
def test_a_first_leg_that_fails_takes_the_second_with_it_and_both_begin_anew(script: Script) -> None:
    """Decode would wait for it, for minutes."""

    async def decode(wire: Wire, request: Received) -> None:
        if json.loads(request.body)["bootstrap_room"] in failed:
            await wire.watch()
        else:
            await stream(wire, request)

    failed: set[int] = set()

    async def prefill(wire: Wire, request: Received) -> None:
        if failed:
            await wire.send(prefilled(None))
        else:
            failed.add(json.loads(request.body)["bootstrap_room"])
            await wire.send(script) if isinstance(script, bytes) else await script(wire, request)

    async def main() -> None:
        scripts: Scripts = [("prefill", prefill), ("prefill", prefill), ("decode", decode)]
        async with apart(*scripts, connector="sglang") as (it, servers):
            assert complete(await it.ask(post(BODY)))
            (record,) = it.records.requests
            assert [name for name, _ in record.failed] != ["e3"], "not the fault of decode"
            assert len(servers[2].requests) >= 1

    run(main())


def test_a_first_leg_that_is_refused_is_the_response_where_decode_waits_for_it() -> None:
    async def main() -> None:
        scripts: Scripts = [("prefill", status(400, b'{"error":"too long"}')), ("decode", hang)]
        async with apart(*scripts, connector="sglang") as (it, (_, second)):
            reply = await it.ask(post(BODY))
            assert (reply.status, reply.body) == (400, b'{"error":"too long"}')
            await until(lambda: not second.requests or second.wires[0].gone.is_set())

    run(main())


def test_a_prefill_that_ends_badly_after_decode_began_harms_nothing() -> None:
    began = asyncio.Event()

    async def decode(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD + event('{"text":"Hello"}'))
        began.set()
        await asyncio.sleep(0.2)
        await wire.send(event("[DONE]") + LAST)

    async def prefill(wire: Wire, _: Received) -> None:
        await began.wait()
        wire.reset()

    async def main() -> None:
        async with apart(("prefill", prefill), ("decode", decode), connector="sglang") as (it, _):
            assert complete(await it.ask(post(BODY)))

    run(main())


def test_a_client_that_leaves_ends_both_legs() -> None:
    """And its prompt counts."""

    async def main() -> None:
        servers = ("prefill", hang), ("decode", hang)
        limited = f"{ALWAYS}\nflows: {{default: {{tokens_per_minute: 60}}}}"
        async with apart(*servers, connector="sglang", more=limited) as (it, (first, second)):
            client = await it.connect()
            client.send(post(BODY))
            await until(lambda: first.requests and second.requests)
            client.writer.transport.abort()
            await until(lambda: first.wires[0].gone.is_set() and second.wires[0].gone.is_set())
            await until(lambda: it.in_flight() == 0)
            assert used_tokens(it) > len(json.loads(BODY)["messages"][0]["content"]) / 4 - 3

    run(main())


def test_prefill_may_stream_its_response() -> None:
    """SGLang gets the client's body, and streams one token."""

    async def prefill(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD + chunk(b'data: {"text":"x"}\n\n') + event("[DONE]") + LAST)

    async def main() -> None:
        async with apart(("prefill", prefill), ("decode", stream), connector="sglang") as (it, _):
            assert complete(await it.ask(post(BODY)))

    run(main())


WHOLE_AGAIN = {(before, Step.PLACING) for before in (Step.PLACING, Step.SENT, Step.RELAYING)}


@interpreted
def test_every_step_of_a_split_in_the_table_is_taken(steps: Steps) -> None:
    """See tests/proxy/exchange/test_patience.py."""

    async def main() -> None:
        scripts: Scripts = [("prefill", prefilled()), ("decode", stream)]
        async with apart(*scripts) as (it, _):
            await it.ask(post(BODY))
        async with apart(*scripts, connector="sglang") as (it, _):
            for _ in range(2):
                await it.ask(post(BODY))
        async with apart(("prefill", status(503)), ("decode", stream)) as (it, _):
            await it.ask(post(BODY))
        for failure in (status(500), STREAM_HEAD + event(ROLE) + LOAD_FAILED):
            async with apart(("prefill", prefilled()), ("decode", failure)) as (it, _):
                await it.ask(post(BODY))
        async with apart(("prefill", prefilled()), ("decode", stream)) as (it, (_, second)):
            await second.stop()
            await it.ask(post(BODY))
        async with apart(("prefill", hang), ("decode", stream)) as (it, (first, _)):
            client = await it.connect()
            client.send(post(BODY))
            await until(lambda: first.requests)
            client.writer.transport.abort()
            await until(lambda: it.records.requests)

    run(main())
    own = {step for step in STEPS if Step.PREFILLING in step} | WHOLE_AGAIN
    assert own <= steps.taken


# --- What is recorded -------------------------------------------------------------------------------------------------


def test_the_client_and_the_record_see_both_endpoints() -> None:
    """The cached tokens are those of prefill: decode says that all of the prompt was."""
    whole = {"prompt_tokens": 100, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 100}}

    async def main() -> None:
        decode = answer(json.dumps({"choices": [], "usage": whole}).encode())
        for connector in ("nixl", "sglang"):
            async with apart(("prefill", prefilled()), ("decode", decode), connector=connector) as (it, _):
                reply = await it.ask(post(BODY))
                assert b"\r\nx-lbproxy-endpoint: e2\r\nx-lbproxy-prefill: e1\r\n" in reply.head
                await until(lambda: it.records.requests)
                (record,) = it.records.requests
                assert (record.prefill, record.endpoint, record.attempts) == ("e1", "e2", 1)
                if connector == "nixl":
                    assert record.first_legs == (("e1", "completed"),)
                    assert record.prefill_s is not None
                    assert record.cached_tokens == 64
                else:
                    assert record.cached_tokens in {64, None}, "decode may have been faster"
        async with apart(("prefill", prefilled()), ("decode", decode), more=f"{ALWAYS}\nexpose_endpoint: false") as (
            it,
            _,
        ):
            assert b"x-lbproxy-prefill" not in (await it.ask(post(BODY))).head

    run(main())


@pytest.mark.parametrize(("script", "result"), [(status(503), "failed"), (status(400), "refused")])
def test_a_first_leg_that_did_not_work_is_recorded_and_leaves_nothing_else(script: Script, result: str) -> None:
    async def main() -> None:
        async with apart(("prefill", script), ("decode", stream)) as (it, _):
            reply = await it.ask(post(BODY))
            assert b"x-lbproxy-endpoint: e2" in reply.head
            assert b"x-lbproxy-prefill" not in reply.head
            (record,) = it.records.requests
            assert record.first_legs == (("e1", result),)
            assert (record.prefill, record.prefill_s, record.prefill_usage) == (None, None, None)

    run(main())


def test_the_legs_of_an_attempt_are_both_traced() -> None:
    async def main() -> None:
        for connector in ("nixl", "sglang"):
            async with apart(("prefill", prefilled()), ("decode", stream), connector=connector) as (
                it,
                (first, second),
            ):
                it.front.requests.sampling = Sampling(1.0, follow_clients=True, rng=random.Random(1))
                assert complete(await it.ask(post(BODY)))
                (record,) = it.traced
                assert record.trace is not None
                attempts = record.trace.attempts
                assert [(one.endpoint.name, one.leg) for one in attempts] == [("e1", PREFILL), ("e2", DECODE)]
                parents = [(one.requests[0].field("traceparent") or "").split("-")[2] for one in (first, second)]
                assert parents == [f"{one.span_id:016x}" for one in attempts]

    run(main())


def test_an_lbproxy_behind_this_one_does_not_name_its_own() -> None:
    async def script(wire: Wire, _: Received) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\nx-lbproxy-prefill: inner\r\ncontent-length: 2\r\n\r\n{}")

    async def main() -> None:
        async with apart(("both", script)) as (it, _):
            reply = await it.ask(post(BODY))
            assert b"x-lbproxy-endpoint: e1\r\n" in reply.head
            assert b"inner" not in reply.head

    run(main())
