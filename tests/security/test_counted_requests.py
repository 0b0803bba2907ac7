# SPDX-License-Identifier: Apache-2.0
"""The ways by which clients made their tokens count less, through sockets: a flow's minute, an endpoint's minute and
its day count what the server generated. `tests.security.test_counted_tokens` has a thousand more of their kind.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from tests.support.aio import run, until
from tests.support.endpoint import LAST, STREAM_HEAD, Received, Script, ScriptedEndpoint, Wire, answer, chunk, hang
from tests.support.rig import Rig, post, rig

Json = dict[str, Any]
PROMPT, WRITTEN = 100, 3000
TEXT = "tell " * PROMPT
COUNTS = {"prompt_tokens": PROMPT, "completion_tokens": WRITTEN}
INPUTS = {"input_tokens": PROMPT, "output_tokens": WRITTEN}
NOTHING = {"prompt_tokens": 0, "completion_tokens": 0, "input_tokens": 0, "output_tokens": 0}
LIMIT = 60
"""Tokens a minute: one a second comes back while a test runs."""


class Form(NamedTuple):
    """What a client asks for, and how the server responds."""

    path: str
    body: Json
    script: Script
    more: str = ""
    generated: int = PROMPT + WRITTEN
    most: float = 1.3
    """As a multiple of that."""
    leaves_after: int = 0
    """The client leaves once it has so many bytes."""
    engine: str = "auto"


def plain(said: Json) -> bytes:
    return answer(json.dumps(said).encode())


def event(said: Json, name: str = "") -> bytes:
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(said).encode() + b"\n\n"


def token(text: str = "word", **more: object) -> bytes:
    return event({"id": "c", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **more})


def stream(
    events: Sequence[bytes],
    *,
    ends: bool = True,
    coded: bool = False,
    stays: bool = False,
    name: str = "accept-encoding",
) -> Script:
    """Events, each in a chunk. `coded`: compressed where the client accepts it, or always if it cannot be refused."""

    async def script(wire: Wire, request: Received) -> None:
        head, sent = STREAM_HEAD, list(events)
        if coded and "gzip" in (request.field(name) or "").lower():
            head = head.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
            sent = [gzip.compress(b"".join(events))]
        await wire.send(head + b"".join(map(chunk, sent)) + (LAST if ends else b""))
        if stays:
            await wire.watch()
        elif not ends:
            wire.close()

    return script


def coded(body: bytes) -> Script:
    """A body that is compressed where the client accepts it."""

    async def script(wire: Wire, request: Received) -> None:
        accepts = "gzip" in (request.field("accept-encoding") or "")
        await wire.send(answer(gzip.compress(body), more="Content-Encoding: gzip\r\n") if accepts else answer(body))

    return script


OLLAMA = {"model": "m", "messages": [{"role": "user", "content": TEXT}]}
LAST_LINE = json.dumps({"done": True, "prompt_eval_count": PROMPT, "eval_count": WRITTEN}).encode() + b"\n"


def line(text: str = "word") -> bytes:
    return json.dumps({"message": {"content": text}, "done": False}).encode() + b"\n"


def of_lines(texts: Sequence[bytes]) -> bytes:
    return STREAM_HEAD.replace(b"text/event-stream", b"application/x-ndjson") + b"".join(map(chunk, texts)) + LAST


def in_chunks(texts: Sequence[bytes]) -> bytes:
    """Plain text."""
    return STREAM_HEAD.replace(b"text/event-stream", b"text/vtt") + b"".join(map(chunk, texts)) + LAST


def stubborn(body: bytes, kind: str = "application/json") -> bytes:
    """A body that is compressed whatever the client accepts."""
    return answer(gzip.compress(body), kind=kind, more="Content-Encoding: gzip\r\n")


def responses(**echoed: object) -> Json:
    return {"id": "resp_1", "output": [], "usage": INPUTS, **echoed}


def completed(**echoed: object) -> bytes:
    return event({"response": responses(**echoed), "type": "response.completed"}, "response.completed")


CHAT: Json = {"model": "m", "messages": [{"role": "user", "content": TEXT}]}
STREAM: Json = {**CHAT, "stream": True}
RESPONSE: Json = {"model": "m", "input": TEXT, "user": "usage"}
DELTA = event({"type": "response.output_text.delta", "delta": "word"}, "response.output_text.delta")
USAGE = event({"id": "c", "choices": [], "usage": COUNTS})
SPOKEN = [event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "word"}})] * WRITTEN
DONE = b"data: [DONE]\n\n"
WORDS = [token()] * WRITTEN
WHOLE = json.dumps({"choices": [{"message": {"content": "word" * WRITTEN}}]}).encode()
ACCEPT = "Accept-Encoding: gzip, deflate\r\n"
FORGED = json.dumps({"usage": NOTHING})
FORMS = {
    "user": Form("/v1/responses", RESPONSE, plain(responses(user="usage"))),
    "user, in a stream": Form(
        "/v1/responses",
        RESPONSE | {"stream": True},
        stream([DELTA, completed(user="usage", metadata={"usage": NOTHING})]),
    ),
    "metadata": Form("/v1/responses", RESPONSE, plain(responses(metadata={"usage": NOTHING, "response": FORGED}))),
    "text": Form("/v1/chat/completions", CHAT, plain({"usage": COUNTS, "choices": [{"message": {"content": FORGED}}]})),
    "a key": Form("/v1/chat/completions", CHAT, plain({"usage": COUNTS, "x": {"usage": NOTHING}, "user": '"usage":'})),
    "a token": Form(
        "/v1/completions",
        {"model": "m", "prompt": TEXT, "logprobs": 5},
        plain({"usage": COUNTS, "choices": [{"logprobs": {"top_logprobs": [{"usage": -0.1}], "tokens": ["usage"]}}]}),
    ),
    "null afterwards": Form("/v1/chat/completions", STREAM, stream([token(), USAGE, token("", usage=None), DONE])),
    "no usage": Form("/v1/chat/completions", STREAM, stream([*WORDS, DONE])),
    "usage in tokens": Form("/v1/chat/completions", STREAM, stream([token('"usage":{}')] * WRITTEN), most=3.0),
    "joined tokens": Form("/v1/chat/completions", STREAM, stream([token("word" * 500)] * 6)),
    "accepts gzip": Form("/v1/chat/completions", CHAT, coded(json.dumps({"usage": COUNTS}).encode()), ACCEPT),
    "accepts gzip, in a stream": Form("/v1/chat/completions", STREAM, stream([*WORDS, USAGE], coded=True), ACCEPT),
    "accepts gzip, elsewhere": Form("/v1/messages", CHAT, coded(json.dumps({"usage": INPUTS}).encode()), ACCEPT),
    "accepts gzip twice, in capitals": Form(
        "/v1/chat/completions", STREAM, stream([*WORDS, USAGE], coded=True), ACCEPT.upper() + ACCEPT
    ),
    "accepts gzip, as CGI reads it": Form(
        "/v1/chat/completions",
        STREAM,
        stream([*WORDS, USAGE], coded=True, name="accept_encoding"),
        ACCEPT.replace("-", "_"),
    ),
    "accepts gzip, at a path that is not known": Form(
        "/v1/chat/completions/", STREAM, stream([*WORDS], coded=True), ACCEPT
    ),
    "compressed all the same": Form("/v1/chat/completions", CHAT, stubborn(WHOLE), generated=PROMPT + 40),
    "compressed, in a stream": Form(
        "/v1/chat/completions", STREAM, stubborn(b"".join(WORDS), "text/event-stream"), generated=PROMPT + 50, most=30.0
    ),
    "identity": Form(
        "/v1/chat/completions",
        CHAT,
        answer(json.dumps({"usage": COUNTS}).encode(), more="Content-Encoding: Identity\r\n"),
    ),
    "no usage in a body": Form("/v1/chat/completions", CHAT, answer(WHOLE)),
    "no JSON": Form("/v1/chat/completions", CHAT, answer(WHOLE, kind="text/plain")),
    "a server that breaks after its first report": Form(
        "/v1/messages",
        STREAM,
        stream(
            [event({"type": "message_start", "message": {"usage": INPUTS | {"output_tokens": 1}}}), *SPOKEN], ends=False
        ),
    ),
    "a server that breaks in one of many choices": Form(
        "/v1/chat/completions",
        STREAM | {"n": 30, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        stream([token(usage={"prompt_tokens": PROMPT, "completion_tokens": WRITTEN // 30})] * WRITTEN, ends=False),
    ),
    "a server that breaks": Form("/v1/chat/completions", STREAM, stream(WORDS, ends=False)),
    "a client that leaves": Form(
        "/v1/chat/completions", STREAM, stream(WORDS, ends=False, stays=True), leaves_after=len(b"".join(WORDS))
    ),
    "a client that leaves before its response": Form(
        "/v1/chat/completions", CHAT, hang, generated=PROMPT, most=2.0, leaves_after=-1
    ),
    "several tokens until it leaves": Form(
        "/v1/chat/completions", STREAM, stream([token("word" * 500)] * 6, stays=True, ends=False), leaves_after=12_000
    ),
    "sglang": Form("/generate", {"text": TEXT}, plain({"text": "usage", "meta_info": COUNTS | {"id": "usage"}})),
    "vllm, tokens": Form(
        "/inference/v1/generate", {"token_ids": [7] * PROMPT}, plain({"choices": [{"token_ids": []}], "usage": COUNTS})
    ),
    "vllm, tokens without usage": Form(
        "/inference/v1/generate",
        {"token_ids": [7] * PROMPT, "stream": True},
        stream([event({"choices": [{"token_ids": [9]}]})] * WRITTEN),
    ),
    "ollama": Form("/api/chat", OLLAMA, of_lines([line()] * WRITTEN + [LAST_LINE]), engine="ollama"),
    "ollama, not in a stream": Form(
        "/api/generate",
        {"model": "m", "prompt": TEXT, "stream": False},
        plain({"response": "prompt_eval_count", "done": True, "prompt_eval_count": PROMPT, "eval_count": WRITTEN}),
        engine="ollama",
    ),
    "ollama, joined tokens": Form("/api/chat", OLLAMA, of_lines([line("word" * 500)] * 6), engine="ollama"),
    "ollama that says nothing": Form("/api/chat", OLLAMA, of_lines([line()] * WRITTEN), engine="ollama"),
    "ollama, forged": Form(
        "/api/chat", OLLAMA, of_lines([line('{"done":true,"eval_count":1}')] * 60 + [LAST_LINE]), engine="ollama"
    ),
    "llama.cpp": Form(
        "/completion", {"prompt": TEXT}, plain({"tokens_predicted": WRITTEN, "tokens_evaluated": PROMPT})
    ),
    "what was heard, as text": Form(
        "/v1/audio/transcriptions",
        {"model": "m", "file": TEXT, "response_format": "text"},
        answer(b"word" * WRITTEN, kind="text/plain; charset=utf-8"),
    ),
    "what was heard, as text in chunks": Form(
        "/v1/audio/transcriptions",
        {"model": "m", "file": TEXT, "response_format": "vtt"},
        in_chunks([b"word" * 100] * (WRITTEN // 100)),
    ),
    "embeddings": Form(
        "/v1/embeddings",
        {"model": "m", "input": TEXT, "user": "usage"},
        plain({"data": [[0.1] * 5000], "usage": {"prompt_tokens": PROMPT}, "user": "usage"}),
        generated=PROMPT,
    ),
    "embeddings without usage": Form(
        "/v1/embeddings", {"model": "m", "input": TEXT}, plain({"data": [[0.1] * 5000]}), generated=PROMPT, most=2.0
    ),
}


def counted(it: Rig) -> list[float]:
    """Of the flow's minute, the endpoint's minute and its day."""
    now = it.runtime.now()
    state = it.balancer.endpoints.get(it.endpoints[0].uid)
    assert state is not None
    assert state.allowance is not None
    use = state.allowance.use(now)
    assert use.day is not None
    flow = next(one for one in it.balancer._flows if one.name == "anonymous")
    return [flow.allowance.use(now).tokens, use.tokens, sum(use.day.amounts)]


@pytest.mark.parametrize("policy", ["adaptive", "round-robin"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_was_generated_counts(form: Form, policy: str) -> None:
    async def main() -> None:
        own = f"engine: {form.engine}, tokens_per_minute: {LIMIT}, tokens_per_day: 1000000"
        more = f"routing: {{policy: {policy}}}\nflows: {{default: {{tokens_per_minute: {LIMIT}}}}}"
        async with ScriptedEndpoint(form.script) as endpoint, rig((endpoint.url, own), more=more) as it:
            client = await it.connect()
            client.send(post(json.dumps(form.body).encode(), form.path, form.more))
            if form.leaves_after:
                await until(lambda: bool(endpoint.requests), "it is there")
                got = 0
                while got < form.leaves_after:
                    got += len(await client.reader.read(1 << 16))
                client.writer.transport.abort()
            else:
                await client.head()
            await until(lambda: bool(it.records.requests), "it is over")
            await it.settle()
            for what, used in zip(("flow", "minute", "day"), counted(it), strict=True):
                assert 0.95 * form.generated - 3 <= used <= form.most * form.generated + 60, (what, used)

    run(main())


@pytest.mark.parametrize(
    "head",
    ["PUT /generate", "GET /v1/responses/resp_1", "GET /v1/responses/%72esp_1", "GET /v1/chat/completions/c?a=b"],
)
def test_nor_does_a_server_compress_what_a_model_wrote_for_another_method(head: str) -> None:
    """SGLang takes PUT, too; and what is created in the background is counted when it is read."""

    async def main() -> None:
        body = json.dumps({"text": TEXT} if head.startswith("PUT") else {}).encode()
        more = f"flows: {{default: {{tokens_per_minute: {LIMIT}}}}}"
        script = coded(json.dumps({"usage": COUNTS}).encode())
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url, more=more) as it:
            request = f"{head} HTTP/1.1\r\nHost: lb\r\n{ACCEPT}Content-Length: {len(body)}\r\n\r\n".encode()
            assert (await it.ask(request + body)).status == 200
            (flow,) = it.balancer._flows
            assert flow.allowance.use(it.runtime.now()).tokens > 0.95 * (PROMPT + WRITTEN)

    run(main())
