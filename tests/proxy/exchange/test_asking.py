# SPDX-License-Identifier: Apache-2.0
"""Servers are asked how much a stream used where a limit needs it, and clients that did not ask see nothing of that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import openai
import pytest

from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import Usage
from lbproxy.sim.mock.http import MockServer
from lbproxy.sim.mock.mock_options import MockOptions
from tests.support.aio import run, until
from tests.support.endpoint import LAST, STREAM_HEAD, Received, ScriptedEndpoint, Wire, answer, chunk
from tests.support.rig import Reply, Rig, post, rig

LIMITED = "flows: {default: {tokens_per_minute: 1000000}}\n"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PLAIN: dict[str, object] = {"model": "m", "stream": True, "prompt": 'é "stream_options" }'}
EVENTS = [b'data: {"id":"1","choices":[{"index":0,"text":" a"}]}\n\n'] * 3
END = b'data: {"id":"1","choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"id":"1","choices":[],"usage":{"prompt_tokens":17,"completion_tokens":23,"total_tokens":40}}\n\n'
DONE = b"data: [DONE]\n\n"
UNASKED = b"".join([*EVENTS, END, DONE])
ASKED = b"".join([*EVENTS, END, USAGE, DONE])
USED = Usage(17, None, 23)
REFUSAL = b'{"error":{"message":"Unsupported parameter: stream_options"}}'


class Engine:
    """Says what it used if it is asked, in pieces of `size` bytes. `asked`: which requests did."""

    def __init__(
        self, unasked: bytes = UNASKED, asked: bytes = ASKED, *, refusal: bytes = b"", size: int = 1000
    ) -> None:
        self.unasked, self.with_usage, self.refusal, self.size = unasked, asked, refusal, size
        self.asked: list[bool] = []
        self.bodies: list[bytes] = []

    async def __call__(self, wire: Wire, request: Received) -> None:
        options = json.loads(request.body).get("stream_options") or {}
        asks = options.get("include_usage") is True
        self.asked.append(asks)
        self.bodies.append(request.body)
        if asks and self.refusal:
            await wire.send(self.refusal)
            return
        stream = self.with_usage if asks else self.unasked
        pieces = [stream[at : at + self.size] for at in range(0, len(stream), self.size)]
        await wire.send(STREAM_HEAD, *map(chunk, pieces), LAST)


@asynccontextmanager
async def before(engine: Engine, more: str = LIMITED, own: str = "") -> AsyncIterator[Rig]:
    async with ScriptedEndpoint(engine) as endpoint, rig((endpoint.url, own), more=more) as it:
        yield it


def asking(path: str = COMPLETIONS, more: str = "", version: str = "1.1", **fields: object) -> bytes:
    return post(json.dumps({**PLAIN, **fields}).encode(), path, more, version)


async def used(it: Rig, number: int) -> Usage | None:
    """What the client's nth request used, as its server reported it."""
    await until(lambda: len(it.records.requests) >= number, "it is recorded")
    record = it.records.requests[number - 1]
    assert record.outcome is Outcome.COMPLETED
    return record.usage


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_second_stream_of_a_server_is_asked_and_shows_nothing_of_it(size: int) -> None:
    """The first one shows what it writes unasked."""
    engine = Engine(size=size)

    async def main() -> None:
        async with before(engine) as it:
            replies = [await it.ask(asking()) for _ in range(3)]
            assert [one.body for one in replies] == [UNASKED] * 3
            assert [await used(it, number) for number in (1, 2, 3)] == [None, USED, USED]

    run(main())
    assert engine.asked == [False, True, True]
    own = json.dumps(PLAIN).encode()
    assert engine.bodies[0] == own
    assert engine.bodies[1] == own[:-1] + b',"stream_options":{"include_usage":true}}'


@pytest.mark.parametrize(
    ("more", "own", "asked"),
    [
        (LIMITED, "", True),
        ("", "tokens_per_minute: 100000", True),
        ("", "tokens_per_day: 100000", True),
        ("models: {m: {continue: true}}\n", "engine: vllm", True),
        ("usage: {ask: always}\n", "", True),
        ("", "", False),
        ("flows: {default: {requests_per_minute: 100}}\n", "requests_per_minute: 100", False),
        (f"{LIMITED}usage: {{ask: never}}\n", "tokens_per_minute: 100000", False),
    ],
)
def test_where_it_applies(more: str, own: str, asked: bool) -> None:
    engine = Engine()

    async def main() -> None:
        async with before(engine, more, own) as it:
            assert [(await it.ask(asking())).body for _ in range(2)] == [UNASKED] * 2
            assert await used(it, 2) == (USED if asked else None)

    run(main())
    assert engine.asked == [False, asked]


def test_what_is_no_stream_of_text_is_sent_as_it_is() -> None:
    engine = Engine()

    async def main() -> None:
        async with before(engine, "usage: {ask: always}\n") as it:
            for path in (COMPLETIONS, CHAT, "/v1/responses", "/v1/messages"):
                for _ in range(2):
                    assert (await it.ask(asking(path, stream=path in {"/v1/responses", "/v1/messages"}))).status == 200

    run(main())
    assert not any(engine.asked)


@pytest.mark.parametrize(
    ("options", "sent", "shown"),
    [
        ({"include_usage": True}, {"include_usage": True}, ASKED),
        ({"include_usage": False, "a": 1}, {"include_usage": True, "a": 1}, UNASKED),
        (None, {"include_usage": True}, UNASKED),
        ({}, {"include_usage": True}, UNASKED),
        ("all", "all", UNASKED),
    ],
)
def test_what_the_client_says_of_its_stream_stays(options: object, sent: object, shown: bytes) -> None:
    """It gets the usage only if it wants that, and what else it says is kept."""
    bodies: list[bytes] = []

    async def script(wire: Wire, request: Received) -> None:
        bodies.append(request.body)
        said = json.loads(request.body)["stream_options"] if b'"stream_options"' in request.body else None
        asks = isinstance(said, Mapping) and bool(said.get("include_usage"))
        await wire.send(STREAM_HEAD, chunk(ASKED if asks else UNASKED), LAST)

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url, more=LIMITED) as it:
            await it.ask(asking())
            assert (await it.ask(asking(stream_options=options))).body == shown

    run(main())
    assert json.loads(bodies[1])["stream_options"] == sent


@pytest.mark.parametrize(
    "said",
    [
        b'"stream_options":null,"stream_options":{"include_usage":true}',
        b'"stream\\u005foptions":{"include_usage":true}',
    ],
)
def test_a_client_that_asks_gets_it_however_it_writes_that(said: bytes) -> None:
    async def main() -> None:
        async with before(Engine()) as it:
            await it.ask(asking())
            body = b'{"stream":true,"model":"m",%b,"prompt":"\\u00e9"} \n' % said
            assert (await it.ask(post(body, COMPLETIONS))).body == ASKED

    run(main())


@pytest.mark.parametrize("bytes_", [300 << 10, 2 << 20])
def test_a_large_body_is_asked_as_far_as_that_takes_no_time(bytes_: int) -> None:
    engine = Engine()
    more = f"{LIMITED}models: {{alias: m}}\n"

    async def main() -> None:
        async with before(engine, more) as it:
            for _ in range(2):
                body = json.dumps(PLAIN | {"model": "alias", "prompt": "x" * bytes_}).encode()
                assert (await it.ask(post(body, COMPLETIONS))).body == UNASKED

    run(main())
    assert engine.asked == [False, bytes_ < 1 << 20]
    assert [json.loads(one)["model"] for one in engine.bodies] == ["m", "m"]


def test_an_http10_client_gets_the_same() -> None:
    async def main() -> None:
        async with before(Engine(size=9)) as it:
            for _ in range(2):
                assert (await it.ask(asking(version="1.0"))).body == UNASKED
            assert await used(it, 2) == USED

    run(main())


@pytest.mark.parametrize("status", [400, 422])
@pytest.mark.parametrize("framed", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_server_that_refuses_to_be_asked_is_asked_without_once_and_for_all(
    status: int, framed: bool, at_once: bool
) -> None:
    """Another attempt at the same server, free of the budget: the client and the breaker hear nothing of it."""
    refusal = answer(REFUSAL, status=status)
    if not framed:
        head = b"HTTP/1.1 %d No\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n" % status
        refusal = head + chunk(REFUSAL) + LAST
    engine = Engine(refusal=refusal)

    async def slowly(wire: Wire, request: Received) -> None:
        if at_once or b"include_usage" not in request.body:
            await engine(wire, request)
            return
        engine.asked.append(True)
        begin, _, rest = refusal.partition(b"\r\n\r\n")
        await wire.send(begin + b"\r\n\r\n")
        await until(lambda: True)
        await wire.send(rest)

    async def main() -> None:
        more = f"{LIMITED}retry: {{attempts: 1}}\n"
        async with ScriptedEndpoint(slowly) as endpoint, rig(endpoint.url, more=more) as it:
            replies = [await it.ask(asking()) for _ in range(4)]
            assert [(one.status, one.body) for one in replies] == [(200, UNASKED)] * 4
            assert [one.field("x-lbproxy-attempts") for one in replies] == ["1"] * 4

    run(main())
    assert engine.asked == [False, True, False, False, False]


def test_what_one_server_refuses_another_is_asked_for() -> None:
    """Where a request goes on to another server, that one has refused nothing."""
    calls: list[bool] = []
    other = Engine()

    async def script(wire: Wire, request: Received) -> None:
        calls.append(b"include_usage" in request.body)
        if calls[-1]:
            await wire.send(answer(REFUSAL, status=400))
        elif len(calls) > 1:
            await wire.send(answer(b"{}", status=503))
        else:
            await wire.send(STREAM_HEAD, chunk(UNASKED), LAST)

    async def main() -> None:
        more = f"{LIMITED}routing: {{policy: round-robin}}\n"
        async with (
            ScriptedEndpoint(script) as one,
            ScriptedEndpoint(other) as two,
            rig(one.url, two.url, more=more) as it,
        ):
            for _ in range(3):
                assert (await it.ask(asking())).body == UNASKED
            assert await used(it, 3) == USED

    run(main())
    assert (calls, other.asked) == ([False, True, False], [False, True])


def test_an_error_at_the_end_of_a_stream_is_one_at_its_beginning() -> None:
    """It may be all that there is, without an empty line after it: another server is asked."""
    calls: list[bool] = []

    async def script(wire: Wire, request: Received) -> None:
        calls.append(b"include_usage" in request.body)
        busy = b'data: {"error":{"message":"busy","code":503}}\n'
        stream = busy if len(calls) == 3 else ASKED if calls[-1] else UNASKED
        await wire.send(STREAM_HEAD, chunk(stream), LAST)

    async def main() -> None:
        more = f"{LIMITED}routing: {{policy: round-robin}}\n"
        async with (
            ScriptedEndpoint(script) as one,
            ScriptedEndpoint(script) as two,
            rig(one.url, two.url, more=more) as it,
        ):
            for _ in range(3):
                assert (await it.ask(asking())).body == UNASKED
            assert await used(it, 3) == USED

    run(main())
    assert calls == [False, False, True, True]


def test_a_refusal_for_another_reason_is_the_clients() -> None:
    refusal = b'{"error":{"message":"the prompt is bad"}}'
    engine = Engine(refusal=answer(refusal, status=400))

    async def main() -> None:
        async with before(engine) as it:
            await it.ask(asking())
            reply = await it.ask(asking())
            assert (reply.status, reply.body) == (400, refusal)

    run(main())
    assert engine.asked == [False, True]


def test_who_refuses_whatever_it_is_sent_is_not_taken_for_one_that_cannot_be_asked() -> None:
    """A client may write the words itself, so that the error has them."""
    engine = Engine()

    async def script(wire: Wire, request: Received) -> None:
        await (wire.send(answer(REFUSAL, status=400)) if b'"bad"' in request.body else engine(wire, request))

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url, more=LIMITED) as it:
            await it.ask(asking())
            reply = await it.ask(asking(n="bad"))
            assert (reply.status, reply.body) == (400, REFUSAL)
            await it.ask(asking())

    run(main())
    assert engine.asked == [False, True]


def test_another_process_of_an_endpoint_is_looked_at_anew() -> None:
    engine = Engine(refusal=answer(REFUSAL, status=400))

    async def main() -> None:
        async with before(engine) as it:
            for _ in range(3):
                await it.ask(asking())
            for one in it.data_runtime.members():
                one.standing.process += 1
            engine.refusal = b""
            for number in (4, 5):
                assert (await it.ask(asking())).body == UNASKED
                assert await used(it, number) == (USED if number == 5 else None)

    run(main())
    assert engine.asked == [False, True, False, False, False, True]


def test_another_model_in_its_place_is_asked_as_well() -> None:
    """And each attempt by what its own server writes."""
    small, refused = Engine(), answer(b"{}", status=503)

    async def main() -> None:
        more = f"{LIMITED}models: {{big: {{fallback: [small]}}}}\n"
        async with (
            ScriptedEndpoint(refused) as one,
            ScriptedEndpoint(small) as two,
            rig((one.url, "models: [big]"), (two.url, "models: [small]"), more=more) as it,
        ):
            for number in (1, 2):
                reply = await it.ask(asking(model="big"))
                assert (reply.body, reply.field("x-lbproxy-model")) == (UNASKED, "small")
                assert await used(it, number) == (USED if number == 2 else None)

    run(main())
    assert [json.loads(one)["model"] for one in small.bodies] == ["small"] * 2


@pytest.mark.parametrize(
    "stream",
    [
        UNASKED.replace(b'"finish_reason":"stop"}]', b'"finish_reason":"stop"}],"usage":{"completion_tokens":3}'),
        UNASKED.replace(b'"finish_reason":"stop"}]', b'"finish_reason":"stop"}],"timings":{"prompt_n":3}'),
    ],
    ids=["transformers", "llama.cpp"],
)
def test_who_says_more_unasked_is_never_asked(stream: bytes) -> None:
    engine = Engine(unasked=stream)

    async def main() -> None:
        async with before(engine) as it:
            assert [(await it.ask(asking())).body for _ in range(3)] == [stream] * 3

    run(main())
    assert engine.asked == [False] * 3


def test_null_stays_where_it_is_written_unasked() -> None:
    """As SGLang does."""
    stream = UNASKED.replace(b"}]}\n", b'}],"usage":null}\n')
    engine = Engine(unasked=stream, asked=stream.replace(DONE, USAGE + DONE))

    async def main() -> None:
        async with before(engine) as it:
            assert [(await it.ask(asking())).body for _ in range(2)] == [stream] * 2
            assert await used(it, 2) == USED

    run(main())


@pytest.mark.parametrize(
    ("more", "own"), [(LIMITED, ""), ("models: {m: {continue: true}}\n", "engine: vllm")], ids=["limited", "continued"]
)
def test_null_that_is_written_because_it_was_asked_for_is_taken_out(more: str, own: str) -> None:
    """As OpenAI does, in each event."""
    asked = UNASKED.replace(b"}]}\n", b'}],"usage":null}\n').replace(DONE, USAGE + DONE)
    engine = Engine(asked=asked, size=asked.index(b"\n\n") + 2)  # the first events are alike, and come one by one

    async def main() -> None:
        async with before(engine, more, own) as it:
            assert [(await it.ask(asking())).body for _ in range(2)] == [UNASKED] * 2
            assert await used(it, 2) == USED

    run(main())


def test_a_stream_that_breaks_before_its_usage_breaks_as_it_does_unasked() -> None:
    """In whole events, so that the client is told in one."""
    streams: list[bytes] = []

    async def script(wire: Wire, request: Received) -> None:
        if len(streams) < 2:
            streams.append(UNASKED)
            await wire.send(STREAM_HEAD, chunk(UNASKED), LAST)
            return
        await wire.send(STREAM_HEAD, *map(chunk, EVENTS), chunk(USAGE[:-9]))
        wire.close()

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url, more=LIMITED) as it:
            for _ in range(2):
                await it.ask(asking())
            client = await it.connect()
            client.send(asking())
            await client.head()
            got = await client.reader.read(-1)
            assert b'"usage"' not in got
            assert got.count(b'" a"') == 3
            assert b"upstream connection lost" in got
            assert not got.endswith(LAST)
            await until(lambda: len(it.records.requests) == 3)
            assert it.records.requests[2].outcome is Outcome.UPSTREAM_BROKE

    run(main())


@pytest.mark.parametrize("at_once", [True, False])
def test_a_stream_with_a_length_is_like_any_other(at_once: bool) -> None:
    """The client's is another one, and HTTP/1.0 has no chunks."""

    async def script(wire: Wire, request: Received) -> None:
        if b"first" in request.body:
            await wire.send(STREAM_HEAD, chunk(UNASKED), LAST)
        elif at_once:
            await wire.send(answer(ASKED, kind="text/event-stream"))
        else:
            whole = answer(ASKED, kind="text/event-stream")
            await wire.send(whole[:-90])
            await asyncio.sleep(0.05)
            await wire.send(whole[-90:])

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url, more=LIMITED) as it:
            await it.ask(asking(user="first"))
            for version in ("1.1", "1.0"):
                reply = await asyncio.wait_for(it.ask(asking(version=version)), 10)
                assert reply.body == UNASKED
            assert await used(it, 2) == await used(it, 3) == USED

    run(main())


def test_a_stream_with_a_length_that_breaks_is_reset_for_a_client_that_was_not_told_it() -> None:
    """To HTTP/1.0 a close would look like the end."""

    async def script(wire: Wire, request: Received) -> None:
        if b"first" in request.body:
            await wire.send(STREAM_HEAD, chunk(UNASKED), LAST)
        else:
            await wire.send(answer(ASKED, kind="text/event-stream")[:-90])
            await asyncio.sleep(0.05)
            wire.reset()

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url, more=LIMITED) as it:
            await it.ask(asking(user="first"))
            client = await it.connect()
            client.send(asking(version="1.0"))
            assert b"content-length" not in (await client.head()).lower()
            with pytest.raises(ConnectionResetError):
                await client.reader.read(-1)

    run(main())


def test_the_tokens_of_simulated_servers_are_counted_and_not_estimated() -> None:
    """By an alias, under the endpoint's own name of the model, with comments in between, as the SDK reads them."""
    more = f"{LIMITED}models: {{big: m}}\nstream_keepalive: 1s\n"

    async def main() -> None:
        options = MockOptions(model="own", speed=50.0)
        async with MockServer(options) as server, rig((server.url, "models: [m], model: own"), more=more) as it:
            url = f"http://127.0.0.1:{it.port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                for number in range(3):
                    stream = await client.chat.completions.create(
                        model="big", messages=[{"role": "user", "content": "Hi"}], stream=True, max_tokens=9
                    )
                    chunks = [one async for one in stream]
                    assert all(one.usage is None and len(one.choices) == 1 for one in chunks)
                    said = await used(it, number + 1)
                    assert (said and said.completion_tokens) == (9 if number else None)
                stream = await client.chat.completions.create(
                    model="big",
                    messages=[{"role": "user", "content": "Hi"}],
                    stream=True,
                    max_tokens=9,
                    stream_options={"include_usage": True},
                )
                last = [one async for one in stream][-1]
                assert last.usage is not None
                assert last.usage.completion_tokens == 9

    run(main())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_that_goes_on_elsewhere_shows_no_usage_either(path: str) -> None:
    """And all of it is counted."""
    body: dict[str, object] = {"model": "m", "stream": True, "max_tokens": 30}
    body |= {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}

    def text(reply: Reply) -> str:
        events = [json.loads(one[6:]) for one in reply.body.decode().split("\n") if one.startswith("data: {")]
        assert all("usage" not in one and one["choices"] for one in events)
        choices = [one["choices"][0] for one in events]
        return "".join((one["delta"].get("content") or "") if path == CHAT else one["text"] for one in choices)

    async def main() -> None:
        more = "models: {m: {continue: true}}\nrouting: {policy: round-robin}\n"
        broken = MockOptions(model="m", speed=50.0, faults=("break how=rst at=event events=9 having=moves",))
        async with (
            MockServer(broken) as one,
            MockServer(broken) as two,
            rig((one.url, "engine: vllm"), (two.url, "engine: vllm"), more=more) as it,
        ):
            for _ in range(2):  # both show what they write
                await it.ask(post(json.dumps(body).encode(), path))
            whole = await it.ask(post(json.dumps(body).encode(), path))
            reply = await it.ask(post(json.dumps(body | {"user": "moves"}).encode(), path))
            assert text(reply) == text(whole)
            assert reply.body.endswith(DONE)
            assert [await used(it, number) for number in (1, 2)] == [None, None]
            said = [await used(it, number) for number in (3, 4)]
            assert [one and one.completion_tokens for one in said] == [30, 30]

    run(main())
