# SPDX-License-Identifier: Apache-2.0
"""Streams whose events cannot be read: their bytes are progress, and their end is what the framing says."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest

from lbproxy.core.endpoints.health import Health
from lbproxy.core.requests.outcome import Outcome
from tests.support.aio import run, until
from tests.support.endpoint import LAST, STREAM_HEAD, Received, ScriptedEndpoint, Wire, chunk
from tests.support.rig import post, rig

STREAM = b'{"model":"m","stream":true}'
ENCODED_HEAD = STREAM_HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
PACKED = gzip.compress(b"".join(b"data: %d\n\n" % n for n in range(5000)))
FORMS = {
    "compressed": (ENCODED_HEAD, [PACKED[at : at + 200] for at in range(0, 2400, 200)]),
    "ended by CR": (STREAM_HEAD, [b"data: 1\r\r"] * 12),
    "ended by CR, in pieces of their own": (STREAM_HEAD, [b"data: 1\r\rdata: "] * 12),
    "JSON lines": (STREAM_HEAD, [b'{"a":1}\n'] * 12),
    "JSON lines in pieces": (STREAM_HEAD, [b'{"a":1', b"}\n"] * 6),
    "numbers behind a comment": (STREAM_HEAD, [b": hello\n\n", *([b"1\n"] * 11)]),
    "a byte order mark": (STREAM_HEAD, [b"\xef\xbb\xbfdata: 1\n\n", *([b"data: 2\n\n"] * 11)]),
}


@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_progress_whatever_their_form(form: str) -> None:
    """Each stream lasts for longer than `first_byte`, and one endpoint serves nothing else."""
    head, parts = FORMS[form]

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(head)
        for part in parts:
            await wire.send(chunk(part))
            await asyncio.sleep(0.08)
        await wire.send(LAST)

    async def main() -> None:
        limits = "timeouts: {first_byte: 400ms, stream_idle: 400ms}\nbreaker: {consecutive_failures: 3}"
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url, more=limits) as it:
            replies = await asyncio.gather(*(it.ask(post(STREAM)) for _ in range(4)))
            assert [reply.body for reply in replies] == [b"".join(parts)] * 4
            assert {record.outcome for record in it.records.requests} == {Outcome.COMPLETED}
            assert all(record.first_byte_at is not None for record in it.records.requests)
            assert [one.health for one in it.snapshots()] == [Health.UP]

    run(main())


@pytest.mark.parametrize("form", FORMS)
def test_each_piece_of_it_reaches_the_client_at_once(form: str) -> None:
    head, parts = FORMS[form]
    go = asyncio.Queue[bytes]()

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(head)
        while piece := await go.get():
            await wire.send(chunk(piece))

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post(STREAM))
            for number, part in enumerate(parts):
                go.put_nowait(part)
                if not number:
                    await client.head()
                assert await client.reader.readexactly(len(chunk(part))) == chunk(part)
            go.put_nowait(b"")
            await client.settle()

    run(main())


def typed(kind: str, **more: object) -> str:
    return json.dumps({"type": kind, **more})


ENDS = {
    "/v1/audio/speech": [typed("speech.audio.delta", audio="AAAA"), typed("speech.audio.done")],
    "/v1/audio/transcriptions": [typed("transcript.text.delta", delta="a"), typed("transcript.text.done", text="a")],
    "/v1/images/generations": [typed("image_generation.partial_image"), typed("image_generation.completed")],
    "/completion": ['{"content":"a","stop":false}', '{"content":"","stop":true}'],
    "/infill": ['{"content":"a","stop":false}', '{"content":"","stop":true,"tokens_predicted":2}'],
    "/v1/responses": [typed("response.created"), typed("response.output_text.done"), typed("response.completed")],
    "/v1/chat/completions": ['{"choices":[{"delta":{}}]}', '{"error":{"message":"no","code":400}}'],
    "/v1/messages": [typed("message_start"), typed("content_block_stop"), typed("message_stop")],
}


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("path", ENDS)
def test_a_stream_that_only_closing_ends_is_whole_by_its_servers_last_word(path: str, is_whole: bool) -> None:
    events = ENDS[path] if is_whole else ENDS[path][:-1]
    sent = "".join(f"data: {event}\n\n" for event in events).encode()

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + sent)
        await relayed.wait()
        wire.close()

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post(STREAM, path))
            await client.head()
            assert await client.reader.readexactly(len(sent)) == sent
            relayed.set()
            await until(lambda: it.records.requests)
            assert it.records.requests[0].outcome is (Outcome.COMPLETED if is_whole else Outcome.UPSTREAM_BROKE)
            await client.settle()

    relayed = asyncio.Event()
    run(main())


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/event-stream\r\nContent-Encoding: gzip", PACKED),
        ("text/event-stream", b"data: 1\r\rdata: 2\r\r"),
        ("text/event-stream", b'{"a":1}\n{"b":2}\n'),
        ("application/json\r\nContent-Encoding: gzip", PACKED),
        ("application/x-ndjson", b'{"a":1}\n{"b":2}\n'),
        ("audio/mpeg", b"\xff\xfb\x90" * 50),
    ],
)
def test_the_end_of_what_cannot_be_read_is_that_of_its_framing(kind: str, body: bytes) -> None:
    async def script(wire: Wire, _: Received) -> None:
        await wire.send(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n\r\n".encode(), body)
        wire.close()

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post(STREAM))
            await client.head()
            assert await client.reader.read(-1) == body
            await until(lambda: it.records.requests)
            assert it.records.requests[0].outcome is Outcome.COMPLETED

    run(main())
