# SPDX-License-Identifier: Apache-2.0
"""A stream that goes on at another server when its own dies, before simulated servers whose text is always the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.responses.continued import read_continued
from lbproxy.proxy.exchange import continuation
from lbproxy.proxy.exchange.steps import Step
from lbproxy.sim.mock.http import MockServer
from lbproxy.sim.mock.mock_options import MockOptions
from lbproxy.sim.mock.text import TOKEN_BYTES
from tests.proxy.conftest import Steps
from tests.support.aio import run, until
from tests.support.compiled import interpreted
from tests.support.endpoint import LAST, STREAM_HEAD, Received, ScriptedEndpoint, Wire, answer, chunk, event
from tests.support.rig import Reply, Rig, post, rig
from tests.support.state_tables import STEPS

CONTINUE = "x-lbproxy-continue: 1\r\n"
WAYS = ["how=fin at=event", "how=rst at=event", "how=rst at=chunk", "how=rst at=line", "how=fin framing=close"]
TOKENS = (4, 7, 8, 11, 13, 16, 19, 23, 29)
"""After so many each server dies, again and again."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@asynccontextmanager
async def fleet(
    *faults: str, more: str = "", engines: Sequence[str] = (), speed: float = 50, interval: int = 1
) -> AsyncIterator[tuple[Rig, list[MockServer]]]:
    """A rig before simulated servers, each with a fault, or none."""
    async with AsyncExitStack() as stack:
        given: dict[str, Any] = {"model": "m", "speed": speed, "stream_interval": interval}
        options = [MockOptions(**given, faults=(one,) if one else ()) for one in faults]
        servers = [await stack.enter_async_context(MockServer(one)) for one in options]
        names = engines or ["vllm"] * len(servers)
        entries = [(one.url, f"engine: {name}") for one, name in zip(servers, names, strict=True)]
        it = await stack.enter_async_context(rig(*entries, more=f"routing: {{policy: round-robin}}\n{more}"))
        yield it, servers


def asked(path: str, number: int = 0, **fields: object) -> bytes:
    text = f"Tell me something about {number}."
    prompt: dict[str, object] = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    said = {"model": "m", "stream": True, "max_tokens": 30, "stream_options": {"include_usage": True}}
    return json.dumps(said | prompt | fields).encode()


def read(reply: Reply, path: str) -> tuple[str, list[dict[str, Any]]]:
    """The text of a stream, and its events."""
    lines = [line[6:] for line in reply.body.decode().split("\n") if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    choices = [one["choices"][0] for one in events if one.get("choices")]
    pieces = [one["delta"].get("content") if path == CHAT else one["text"] for one in choices]
    return "".join(one or "" for one in pieces), events


def check_one(reply: Reply, path: str, whole: Reply) -> None:
    """It is one stream, and says what the undisturbed one said."""
    text, events = read(reply, path)
    expected, undisturbed = read(whole, path)
    assert text == expected
    assert len({(one["id"], one["created"], one["model"]) for one in events}) == 1
    assert reply.body.count(b"data: [DONE]") == 1
    reasons = [one["choices"][0]["finish_reason"] for one in events if one["choices"]]
    assert reasons == [*[None] * (len(reasons) - 1), undisturbed[-2]["choices"][0]["finish_reason"]]
    assert sum("role" in one["choices"][0].get("delta", {}) for one in events if one["choices"]) == (path == CHAT)
    used, expected_use = events[-1]["usage"], undisturbed[-1]["usage"]
    assert used["completion_tokens"] == expected_use["completion_tokens"]
    assert used["total_tokens"] == expected_use["total_tokens"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("way", WAYS)
def test_it_goes_on_where_it_broke(path: str, way: str) -> None:
    async def main() -> None:
        async with fleet("") as (it, _):
            wholes = [await it.ask(post(asked(path, number), path)) for number in TOKENS]
        for tokens, whole in zip(TOKENS, wholes, strict=True):
            async with fleet(*[f"break {way} events={tokens + (path == CHAT)}"] * 2) as (it, _):
                reply = await it.ask(post(asked(path, tokens), path, CONTINUE))
                check_one(reply, path, whole)
                await until(lambda: it.records.requests, "it is recorded")
                (record,) = it.records.requests
                assert (record.outcome, record.usage and record.usage.completion_tokens) == (Outcome.COMPLETED, 30)

    run(main())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("events", "tokens"), [(2, 30), (3, 30), (3, 15), (2, 11), (4, 11)])
def test_a_server_that_sends_several_tokens_at_once_is_asked_how_many_there_were(
    path: str, events: int, tokens: int
) -> None:
    """As vLLM does under load, and with --stream-interval: by events the response would be longer than asked for. With
    15 tokens, and 11, all may have come but the end.
    """

    async def main() -> None:
        async with fleet("", interval=5) as (it, _):
            whole = await it.ask(post(asked(path, 1, max_tokens=tokens), path))
        events_of_text = [one["choices"][0] for one in read(whole, path)[1] if one["choices"]]
        assert len(events_of_text) - (path == CHAT) == 1 + -(-(tokens - 1) // 5)
        async with fleet(*[f"break how=rst at=event events={events + (path == CHAT)}"] * 2, interval=5) as (it, _):
            reply = await it.ask(post(asked(path, 1, max_tokens=tokens), path, CONTINUE))
            check_one(reply, path, whole)
            await until(lambda: it.records.requests, "it is recorded")
            (record,) = it.records.requests
            assert record.outcome is Outcome.COMPLETED
            assert record.usage is None or record.usage.completion_tokens == tokens  # None: no server lived to tell it

    run(main())


@pytest.mark.parametrize("fault", ["status code=404", "status code=500", "slow-head every=1", "garbage"])
def test_without_a_count_each_event_is_a_token(fault: str) -> None:
    async def main() -> None:
        async with fleet("") as (it, _):
            whole = await it.ask(post(asked(CHAT, 1)))
        faults = "break how=rst events=9", f"{fault} on=all having=add_special_tokens"
        async with fleet(*faults, more="timeouts: {connect: 300ms}") as (it, _):
            check_one(await it.ask(body_of()), CHAT, whole)

    run(main())


async def ends_with_its_last_token() -> None:
    """All tokens came, in one event: what is missing is the end alone."""
    delta = {"role": "assistant", "content": "words" * 24}
    said = {"id": "chatcmpl-1", "created": 1, "model": "m", "choices": [{"index": 0, "delta": delta}]}

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD + event(json.dumps(said)))
        await asyncio.sleep(0.1)
        wire.reset()

    async with ScriptedEndpoint(script) as first, MockServer(MockOptions(model="m", speed=50)) as other:
        urls = (first.url, "engine: vllm"), (other.url, "engine: vllm")
        more = "routing: {policy: round-robin}\nflows: {default: {tokens_per_minute: 120}}"
        async with rig(*urls, more=more) as it:
            text, events = read(await it.ask(body_of()), CHAT)
            assert text == delta["content"]
            assert [one["choices"][0].get("finish_reason") for one in events if one["choices"]] == [None, "length"]
            assert events[-1]["usage"]["completion_tokens"] == 30
            await until(lambda: it.records.requests, "it is recorded")
            said = events[-1]["usage"]["total_tokens"]
            assert used_tokens(it) == pytest.approx(said, abs=25), "its prompt is estimated, and no token counts twice"


def test_a_response_that_has_all_its_tokens_ends() -> None:
    run(ends_with_its_last_token())


@interpreted
def test_every_step_of_a_count_is_taken(steps: Steps) -> None:
    """While it goes on its server goes down, or its client leaves; its connection is used again, or is closed."""
    dies, slow = "break how=rst events=9", "slow-head every=1 on=all having=add_special_tokens"

    async def main() -> None:
        async with fleet("") as (it, _):
            whole = await it.ask(post(asked(CHAT, 1)))
        for faults in ((dies, ""), (dies, slow)):
            async with fleet(*faults, more="timeouts: {connect: 300ms}") as (it, _):
                check_one(await it.ask(body_of()), CHAT, whole)
        await ends_with_its_last_token()
        async with fleet(dies, slow, "", more="retry: {budget_per_second: 100}") as (it, _):
            client = await it.connect()
            client.send(body_of())
            await client.head()
            await until(lambda: (Step.PLACING, Step.COUNTING) in steps.taken)
            await asyncio.sleep(0.1)
            it.take_down("e2")
            it.runtime.check()
            await client.reader.readuntil(b"\r\n0\r\n\r\n")
        async with fleet(dies, slow) as (it, _):
            client = await it.connect()
            client.send(body_of())
            await client.head()
            await until(lambda: it.snapshots()[1].in_flight == 1)
            client.writer.transport.abort()
            await until(lambda: it.snapshots()[1].in_flight == 0)

    run(main())
    assert {step for step in STEPS if Step.COUNTING in step} <= steps.taken


@asynccontextmanager
async def dies_before_its_usage(
    path: str, other: str, more: str = "", engine: str = "vllm", stop: str | None = None
) -> AsyncIterator[tuple[Rig, str]]:
    """A rig before a server that ends its response by itself, with several tokens in an event, and dies before it tells
    the usage; and another with a fault. With the text of the response.
    """
    text = "words, and more. " * 4

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD)
        for piece, reason in ((text[:40], None), (text[40:], None), ("", "stop")):
            said = {"delta": {"content": piece}} if path == CHAT else {"text": piece}
            choice = {"index": 0, **said, "finish_reason": reason, "stop_reason": stop if reason else None}
            await wire.send(event(json.dumps({"id": "1", "created": 1, "model": "m", "choices": [choice]})))
        await asyncio.sleep(0.1)
        wire.reset()

    options = MockOptions(model="m", speed=50, faults=(other,) if other else ())
    async with ScriptedEndpoint(script) as first, MockServer(options) as second:
        urls = (first.url, "engine: vllm"), (second.url, f"engine: {engine}")
        async with rig(*urls, more=f"routing: {{policy: round-robin}}\n{more}") as it:
            yield it, text


@pytest.mark.parametrize(
    ("stop", "beside", "model"), [(None, 1, "m"), ("the end of the text ", 5, "m"), (None, 1, "alias")]
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_where_the_usage_alone_is_missing_another_server_counts(
    path: str, stop: str | None, beside: int, model: str
) -> None:
    """A token ends it that has no text, or a text that the client does not get. It knows no aliases."""

    async def main() -> None:
        async with fleet("") as (it, _):
            prompt = read(await it.ask(post(asked(path, 1), path)), path)[1][-1]["usage"]["prompt_tokens"]
        async with dies_before_its_usage(path, "", "models: {alias: m}", stop=stop) as (it, text):
            said, events = read(await it.ask(body_of(path, model=model)), path)
            assert said == text
            own = len(text) // TOKEN_BYTES + beside
            used = {"prompt_tokens": prompt, "completion_tokens": own, "total_tokens": prompt + own}
            assert events[-1]["usage"] == used
            assert [one["choices"][0]["finish_reason"] for one in events if one["choices"]] == [None, None, "stop"]

    run(main())


@pytest.mark.parametrize(
    ("fault", "engine"),
    [("status code=404", "vllm"), ("garbage", "vllm"), ("slow-head every=1", "vllm"), ("", "trtllm-serve")],
)
def test_where_nobody_counts_the_usage_is_estimated(fault: str, engine: str) -> None:
    async def main() -> None:
        more, fault_of_counts = "timeouts: {connect: 300ms}", fault and f"{fault} on=all having=add_"
        async with dies_before_its_usage(CHAT, fault_of_counts, more, engine) as (it, text):
            said, events = read(await it.ask(body_of()), CHAT)
            assert (said, events[-1]["usage"]["completion_tokens"]) == (text, 3)
            await until(lambda: it.records.requests, "it is recorded")
            assert it.records.requests[0].outcome is Outcome.COMPLETED

    run(main())


def test_a_stop_text_across_the_place_where_servers_change_ends_the_response() -> None:
    """The client has the first half of it already. What its server goes on with is not for anybody; it counts."""
    said = {"first": "one, two, EN", "second": "D and more"}

    async def main() -> None:
        def server(name: str) -> ScriptedEndpoint:
            async def script(wire: Wire, asked: Received) -> None:
                if asked.path == "/tokenize":
                    await wire.send(answer(b'{"tokens":[1,2,3,4,5,6,7]}'))
                    return
                choice = {"index": 0, "delta": {"content": said[name]}, "finish_reason": None}
                one = {"id": name, "created": 1, "model": "m", "choices": [choice]}
                await wire.send(STREAM_HEAD + event(json.dumps(one)))
                await asyncio.sleep(0.1 if name == "first" else 30)
                wire.reset()

            return ScriptedEndpoint(script)

        async with server("first") as first, server("second") as second:
            urls = (first.url, "engine: vllm"), (second.url, "engine: vllm")
            async with rig(*urls, more="routing: {policy: round-robin}") as it:
                text, events = read(await it.ask(body_of(stop=["END"], temperature=1)), CHAT)
                assert text == said["first"]
                assert [one["choices"][0]["finish_reason"] for one in events if one["choices"]] == [None, "stop"]
                assert {one["id"] for one in events} == {"first"}
                assert events[-1]["usage"]["prompt_tokens"] == 7

    run(main())


@pytest.mark.parametrize("how", ["leaves", "cut"])
def test_a_count_for_the_usage_ends_with_its_request(how: str) -> None:
    """Nobody waits for it when lbproxy stops, or its client is gone."""

    async def main() -> None:
        async with dies_before_its_usage(CHAT, "slow-head every=1 on=all having=add") as (it, text):
            client = await it.connect()
            client.send(body_of())
            began = await client.reader.readuntil(b'"stop"')
            await asyncio.sleep(0.3)
            (front,) = it.front._clients()
            if how == "leaves":
                client.writer.transport.abort()
            else:
                front.cut(Outcome.DRAINING)
                rest = await client.reader.readuntil(b"\r\n0\r\n\r\n")
                assert text[:40] in began.decode()
                assert b'"completion_tokens":3' in rest
            await until(lambda: it.records.requests, "it is recorded")
            expected = Outcome.CLIENT_CLOSED if how == "leaves" else Outcome.COMPLETED
            assert it.records.requests[0].outcome is expected
            await until(lambda: not it.connections._busy, "nothing is counted any more")

    run(main())


def test_the_text_is_counted_as_llamacpp_is_asked_to() -> None:
    async def main() -> None:
        async with fleet("", interval=5) as (it, _):
            whole = await it.ask(post(asked(CHAT, 1)))
        async with fleet("break how=rst events=3", "", engines=["llamacpp"] * 2, interval=5) as (it, _):
            check_one(await it.ask(body_of()), CHAT, whole)

    run(main())


DIES = "break how=rst events=9"


@pytest.mark.parametrize(
    ("faults", "interval"),
    [(("", ""), 1), ((DIES, ""), 1), ((DIES, DIES), 1), (("break how=rst at=event events=4", ""), 5)],
)
def test_the_client_is_charged_for_what_it_got(faults: tuple[str, str], interval: int) -> None:
    """Once, however many servers wrote it, with an event for each token or not. If nobody goes on, for what came."""
    flows = "flows: {default: {tokens_per_minute: 120}}"

    async def main() -> None:
        async with fleet("", more=flows) as (it, _):
            whole = await it.ask(post(asked(CHAT, 1)))
            await until(lambda: it.records.requests, "it is recorded")
            expected = used_tokens(it)
        async with fleet(*faults, more=flows, interval=interval) as (it, _):
            check_one(await it.ask(body_of()), CHAT, whole)
            await until(lambda: it.records.requests, "it is recorded")
            assert used_tokens(it) == pytest.approx(expected, abs=5)  # a role counts as a token
        async with fleet("break how=rst events=9", "status code=400", more=flows) as (it, _):
            await broken(it, body_of())
            await until(lambda: it.records.requests, "it is recorded")
            assert used_tokens(it) == pytest.approx(8, abs=2)

    run(main())


@pytest.mark.parametrize("field", ["content", "reasoning_content"])
def test_a_client_that_leaves_is_charged_as_without_continuation(field: str) -> None:
    """By the text, where events have many tokens; also of a response that cannot go on."""

    async def script(wire: Wire, _: Received) -> None:
        choice = {"index": 0, "delta": {field: "some words more " * 30}}
        said = event(json.dumps({"id": "1", "created": 1, "model": "m", "choices": [choice]}))
        await wire.send(STREAM_HEAD, *[said] * 9, event(json.dumps({"choices": [], "last": 1})))
        await asyncio.sleep(30)

    async def charged(more: str) -> float:
        flows = "flows: {default: {tokens_per_minute: 2400}}"
        async with ScriptedEndpoint(script) as one, rig((one.url, "engine: vllm"), more=flows) as it:
            client = await it.connect()
            client.send(post(asked(CHAT), CHAT, more))
            await client.reader.readuntil(b'"last"')
            client.writer.transport.abort()
            await until(lambda: it.records.requests, "it is recorded")
            return used_tokens(it)

    async def main() -> None:
        assert await charged(CONTINUE) == pytest.approx(await charged(""), abs=100)

    run(main())


@pytest.mark.parametrize("queue", [10, 0])
def test_where_the_other_server_is_busy_it_waits_its_turn(queue: int) -> None:
    """The client has half of its stream meanwhile. With no room in the queue it is told so, as any request is."""
    more = f"admission: {{max_in_flight_per_endpoint: 1, queue_requests: {queue}}}"

    async def main() -> None:
        async with fleet("") as (it, _):
            whole = await it.ask(post(asked(CHAT, 1)))
        async with fleet("", "break how=rst events=6 having=1.", more=more, speed=5 if queue else 1) as (it, _):
            busy = await it.connect()
            busy.send(post(asked(CHAT, 2, max_tokens=200 if queue else 4000)))
            await busy.head()
            if queue:
                check_one(await it.ask(body_of()), CHAT, whole)
                await until(lambda: len(it.records.requests) == 2, "both are recorded")
                assert [one.outcome for one in it.records.requests] == [Outcome.COMPLETED] * 2
                assert it.records.requests[1].queue_s > 0.0
            else:
                assert await broken(it, body_of()) == "All model servers are busy, and the queue is full or too long."
            busy.writer.close()

    run(main())


def test_a_stream_that_nobody_goes_on_with_says_why() -> None:
    async def main() -> None:
        async with fleet("break how=rst events=6") as (it, _):
            said = await broken(it, body_of())
            assert said.startswith("upstream connection lost after 6 events; not continued: ")
        async with fleet("break how=rst events=6", "status code=400") as (it, _):
            said = await broken(it, body_of())
            assert said == "upstream connection lost after 6 events; not continued: the next server refused"

    run(main())


@pytest.mark.parametrize(
    "sent",
    [event('{"error":{"message":"overloaded","code":503}}'), chunk(b'data: {"id":"1","cho')],
    ids=["error", "cut"],
)
@pytest.mark.parametrize("whole", [False, True])
def test_what_a_server_sent_in_vain_is_nothing_to_the_next(sent: bytes, whole: bool) -> None:
    """It fails before anything new of it went to the client: the next one is neither blamed for that nor garbled."""

    def said(text: str, reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
        return event(json.dumps({"id": "1", "created": 1, "model": "m", "choices": [choice]}))

    def server(stream: bytes) -> ScriptedEndpoint:
        async def script(wire: Wire, asked: Received) -> None:
            if asked.path == "/tokenize":
                await wire.send(answer(b"{}", status=404))
                return
            await wire.send(stream if stream.startswith(b"HTTP") else STREAM_HEAD + stream)
            await asyncio.sleep(0.1)
            wire.reset()

        return ScriptedEndpoint(script)

    async def main() -> None:
        last = said(" two") + said("", "stop") + event("[DONE]") + LAST
        if whole:  # one message with a Content-Length, in one read
            last = answer(b"".join(last.split(b"\r\n")[1::2]), kind="text/event-stream")
        async with server(said("one,")) as first, server(sent) as second, server(last) as third:
            urls = [(one.url, "engine: vllm") for one in (first, second, third)]
            more = "routing: {policy: round-robin}\nretry: {budget_per_second: 100}"
            async with rig(*urls, more=more) as it:
                reply = await asyncio.wait_for(it.ask(body_of(stream_options=None)), 10)
                assert read(reply, CHAT)[0] == "one, two"
                assert reply.body.endswith(b"data: [DONE]\n\n")

    run(main())


PING, BAD, END = b": ping\n\n", b'data: {"error":{"message":"bad","code":400}}\n\n', b"data: [DONE]\n\n"
TOOL = b'data: {"id":"1","choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]}}]}\n\n'
WORD = b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"a"}}]}'


@pytest.mark.parametrize(
    "pieces",
    [[BAD], [BAD, END], [PING, BAD], [PING + BAD + END], [TOOL, END[:-1]], [WORD + b"\r\r", END[:-2] + b"\r\r"]],
    ids=["error", "error and end", "comment", "at once", "no last line", "CR"],
)
def test_what_cannot_be_continued_passes_as_it_is(pieces: list[bytes]) -> None:
    """An error about the request is the client's, and not the server's fault; nor does the end have to be an event."""
    calls: list[bytes] = []

    async def script(wire: Wire, request: Received) -> None:
        calls.append(request.body)
        await wire.send(STREAM_HEAD)
        for piece in pieces:
            await wire.send(chunk(piece))
            await asyncio.sleep(0.02)
        await wire.send(LAST)

    async def main() -> None:
        async with (
            ScriptedEndpoint(script) as one,
            ScriptedEndpoint(script) as two,
            rig((one.url, "engine: vllm"), (two.url, "engine: vllm")) as it,
        ):
            reply = await asyncio.wait_for(it.ask(body_of()), 10)
            assert (reply.status, reply.body) == (200, b"".join(pieces))
            await until(lambda: it.records.requests, "it is recorded")
            assert it.records.requests[0].outcome is Outcome.COMPLETED

    run(main())
    assert len(calls) == 1


def used_tokens(it: Rig) -> float:
    """Of the minute of the only flow."""
    (flow,) = it.balancer._flows
    return flow.allowance.use(it.runtime.now()).tokens


def body_of(path: str = CHAT, **fields: object) -> bytes:
    return post(asked(path, 1, **fields), path, CONTINUE)


async def broken(it: Rig, request: bytes) -> str:
    """What the client of a stream that breaks is told."""
    client = await it.connect()
    client.send(request)
    head = await client.head()
    assert head.startswith(b"HTTP/1.1 200"), head
    rest = await client.reader.read(-1)
    assert not rest.endswith(b"0\r\n\r\n"), "it looks complete"
    (error,) = [line for line in rest.split(b"\n") if line.startswith(b'data: {"error"')]
    said: str = json.loads(error[6:])["error"]["message"]
    return said


@pytest.mark.parametrize(
    ("path", "fields", "why"),
    [
        (CHAT, {"n": 2}, "the request has `n`"),
        (CHAT, {"logprobs": True}, "the request has `logprobs`"),
        (CHAT, {"frequency_penalty": 0.1}, "the request has `frequency_penalty`"),
        (CHAT, {"min_tokens": 5}, "the request has `min_tokens`"),
        (CHAT, {"response_format": {"type": "json_object"}}, "the request has `response_format`"),
        (CHAT, {"guided_regex": "[a-z]+"}, "the request has `guided_regex`"),
        (CHAT, {"something new": 1}, "a field is not known"),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": True}}, "it has `reasoning`"),
        (CHAT, {"messages": [{"role": "assistant", "content": "The"}]}, "the client itself began"),
        (COMPLETIONS, {"echo": True}, "the request has `echo`"),
        (COMPLETIONS, {"suffix": "the end"}, "the request has `suffix`"),
        (COMPLETIONS, {"prompt": ["one"]}, "the prompt is no text"),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, "the prompt is no text"),
    ],
)
def test_what_cannot_go_on_breaks_and_says_why(path: str, fields: dict[str, Any], why: str) -> None:
    async def main() -> None:
        async with fleet("break how=rst events=4", "break how=rst events=4") as (it, _):
            said = await broken(it, body_of(path, **fields))
            assert said.startswith("upstream connection lost after ")
            assert f"; not continued: {why}" in said

    run(main())


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "frequency_penalty": 0, "repetition_penalty": 1.0, "suffix": None, "logprobs": False},
        {"temperature": 0, "top_p": 0.5, "seed": 7, "stop": ["zebra"], "user": "u", "metadata": {"a": "b"}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "tool_choice": "auto"},
        {"response_format": {"type": "text"}, "stop": "zebra", "max_completion_tokens": 30},
    ],
)
def test_what_says_nothing_that_looks_back_goes_on(fields: dict[str, Any]) -> None:
    async def main() -> None:
        async with fleet("") as (it, _):
            whole = await it.ask(post(asked(CHAT, 1, **fields)))
        # Simulated servers keep nothing back for `stop`, as vLLM does: tests/core/responses/test_joined.py.
        async with fleet(*["break how=rst events=9"] * 2, engines=("sglang", "sglang")) as (it, _):
            check_one(await it.ask(body_of(**fields)), CHAT, whole)

    run(main())


def test_only_engines_that_are_known_to_go_on_are_asked_to() -> None:
    async def main() -> None:
        async with fleet("break how=rst events=4", "", engines=("auto", "auto")) as (it, _):
            assert (await broken(it, body_of())).endswith("its engine is not known to go on with a text")
        async with fleet("break how=rst events=4", "", engines=("vllm", "auto")) as (it, _):
            assert "after 4 events" in await broken(it, body_of())
            await until(lambda: it.records.requests, "it is recorded")
            assert [name for name, _ in it.records.requests[0].failed] == ["e1"]
        async with fleet("") as (it, _):
            whole = await it.ask(post(asked(CHAT, 1)))
        async with fleet("break how=rst events=4", "", "", "", engines=("vllm", "auto", "auto", "vllm")) as (it, _):
            check_one(await it.ask(body_of()), CHAT, whole)

    run(main())


def test_without_the_header_bytes_are_as_ever() -> None:
    async def main() -> None:
        async with fleet("break how=rst events=4", "") as (it, _):
            said = await broken(it, post(asked(CHAT)))
            assert said == "upstream connection lost after 4 events"
            assert (await it.ask(post(asked(CHAT), more="x-lbproxy-continue: yes\r\n"))).status == 400

    run(main())


def test_ten_moves_and_no_more() -> None:
    async def main() -> None:
        async with fleet("break how=rst events=3", "break how=rst events=3") as (it, _):
            said = await broken(it, body_of(max_tokens=60))
            assert said.endswith("not continued: it moved 10 times")
            await until(lambda: it.records.requests, "it is recorded")
            (record,) = it.records.requests
            assert [what for _, what in record.failed] == ["upstream_broke"] * 10

    run(main())


def test_a_server_that_refuses_to_go_on_is_not_the_clients_business() -> None:
    """Its 4xx is not relayed; one that is busy is left for the next."""

    async def main() -> None:
        async with fleet("break how=rst events=6", "status code=400") as (it, _):
            assert "after 6 events" in await broken(it, body_of())
            await until(lambda: it.records.requests, "it is recorded")
            (record,) = it.records.requests
            assert record.error == "returned 400 instead of going on"
        async with fleet("") as (it, _):
            whole = await it.ask(post(asked(CHAT, 1)))
        async with fleet("break how=rst events=20", "status code=503", "") as (it, _):
            check_one(await it.ask(body_of()), CHAT, whole)

    run(main())


def test_a_server_that_falls_silent_is_left() -> None:
    async def main() -> None:
        async with fleet("") as (it, _):
            whole = await it.ask(post(asked(CHAT, 1)))
        async with fleet("slow-stream every=30", "", more="timeouts: {stream_idle: 1s}") as (it, _):
            check_one(await it.ask(body_of()), CHAT, whole)
            await until(lambda: it.records.requests, "it is recorded")
            assert it.records.requests[0].attempts == 2

    run(main())


@interpreted
def test_what_stays_while_its_endpoint_drains_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its body may be large, and so may be the number of streams that are looked at every second."""
    bodies: list[bytes] = []

    def reading(body: bytes, *, chat: bool) -> dict[str, object]:
        bodies.append(body)
        return read_continued(body, chat=chat)

    monkeypatch.setattr(continuation, "read_continued", reading)

    async def main() -> None:
        async with fleet("", "", speed=1) as (it, _):
            client = await it.connect()
            client.send(body_of(max_tokens=400, logprobs=True))
            await client.head()
            await client.reader.readuntil(b"}]}\n\n")
            it.runtime.drain(it.snapshots()[0].endpoint.uid, move_after_s=0.0)
            for _ in range(5):
                it.runtime.check()
            assert len(bodies) == 1
            client.writer.close()

    run(main())


def test_streams_leave_an_endpoint_that_drains() -> None:
    """At once with 0 s; what cannot go on stays, and so do all without `move_after`."""

    async def main() -> None:
        async with fleet("") as (it, _):
            whole = await it.ask(post(asked(CHAT, 1, max_tokens=400)))
        async with fleet("", "", speed=1) as (it, _):
            first, other, stays = await it.connect(), await it.connect(), await it.connect()
            uid = it.snapshots()[0].endpoint.uid
            first.send(body_of(max_tokens=400))
            await first.head()
            other.send(body_of(max_tokens=400))
            await other.head()
            stays.send(body_of(max_tokens=400, logprobs=True))
            await stays.head()
            it.runtime.drain(uid)
            it.runtime.check()
            assert [one.in_flight for one in it.snapshots()] == [2, 1]
            began = await first.reader.readuntil(b"}]}\n\n")
            it.runtime.drain(uid, move_after_s=0.0)

            def one_has_left() -> bool:
                it.runtime.check()
                return [one.in_flight for one in it.snapshots()] == [1, 2]

            await until(one_has_left)
            rest = await first.reader.readuntil(b"\r\n0\r\n\r\n")
            check_one(Reply(b"", began + rest), CHAT, whole)
            stays.writer.close()
            other.writer.close()
            await until(lambda: len(it.records.requests) == 3, "all are recorded")
            assert sorted(one.failed for one in it.records.requests) == [(), (), (("e1", "moved"),)]

    run(main())
