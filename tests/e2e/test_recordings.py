# SPDX-License-Identifier: Apache-2.0
"""Every answer that we recorded from a real server, sent again read by read: the client gets the same body bytes, and
gets each read before the endpoint sends the next one. Nothing is buffered, nothing is re-framed.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import h11
import pytest

from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.proxy.request.routes import find_route
from tests.support.aio import run
from tests.support.endpoint import Received, ScriptedEndpoint, Wire
from tests.support.pool import MODEL, card
from tests.support.rig import post, rig

FOLDER = Path(__file__).parent.parent / "fixtures" / "http"
RECORDINGS = sorted(FOLDER.rglob("*.response.http"))
MODELS = (MODEL, "tiny", "no-such-model")
"""Served here, as far as lbproxy knows: that a model is unknown is then said by the endpoint."""

NO_ANSWER = "the recording client got no byte: there is nothing to pass on"
CUT = "the recording client left, or the server died, in the middle: not a whole answer (tests/proxy has broken ones)"
FAILED = "vLLM fails after the head: no event, no last chunk"
TWO = "two answers to two pipelined requests: lbproxy asks one at a time, so a second answer is an intruder"
EXCLUDED = {
    "llama.cpp-b11434/disconnect-nonstream": NO_ANSWER,
    "llama.cpp-b11434/disconnect-stream": CUT,
    "llama.cpp-b11434/shutdown-sigterm-inflight-stream": CUT,
    "sglang-0.5.23/disconnect-nonstream": NO_ANSWER,
    "sglang-0.5.23/disconnect-stream": CUT,
    "vllm-0.32.0-agents/responses-get-stream": FAILED,
    "vllm-0.32.0-dp2/sse-keepalive-while-queued": CUT,
    "vllm-0.32.0-dp2/truncated-stream-server-force-killed": CUT,
    "vllm-0.32.0/conn-half-close-stream": NO_ANSWER,
    "vllm-0.32.0/conn-pipelined-2": TWO,
    "vllm-0.32.0/disconnect-nonstream": NO_ANSWER,
    "vllm-0.32.0/disconnect-stream": CUT,
    "vllm-0.32.0/hung-engine-new-request": NO_ANSWER,
}


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.name.removesuffix('.response.http')}"


def final_head_end(data: bytes) -> int:
    """Where the head of the real answer ends, after 1xx ones."""
    end = 0
    while True:
        begin, end = end, data.index(b"\r\n\r\n", end) + 4
        if not data.startswith(b"HTTP/1.1 1", begin):
            return end


def reads(path: Path) -> list[bytes]:
    """The recorded bytes, cut as they were read; in one piece if no timing was recorded."""
    data = path.read_bytes()
    timing = path.with_name(path.name.replace(".response.http", ".timing.json"))
    sizes = [size for _, size in json.loads(timing.read_text())["recv"]] if timing.exists() else [len(data)]
    assert sum(sizes) == len(data)
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return pieces


def request_of(path: Path) -> bytes:
    """The recorded request where there is one, with the path and the body that its response belongs to. A plain
    completion for those that lbproxy refuses or answers by itself: other routes, ids of responses that it never saw,
    handshakes.
    """
    recorded = path.with_name(path.name.replace(".response.http", ".request.http"))
    if not recorded.exists():
        return post(path="/v1/completions")
    request = recorded.read_bytes()
    method, target, _ = request.split(b" ", 2)
    try:
        find_route(method.decode(), target.decode().partition("?")[0])
    except LbError:
        return post(path="/v1/completions")
    return post(path="/v1/completions") if b"resp_" in request or b"Upgrade:" in request else request


def is_one_whole_answer(data: bytes) -> bool:
    """The oracle's view: h11 as the client."""
    client = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    client.send(h11.Request(method="POST", target="/", headers=[("Host", "x"), ("Content-Length", "0")]))
    client.send(h11.EndOfMessage())
    client.receive_data(data)
    client.receive_data(b"")
    try:
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA or event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                return False
    except h11.RemoteProtocolError:
        return False
    return client.trailing_data[0] == b""


def test_what_is_left_out_is_what_is_no_whole_answer() -> None:
    """The list above can neither hide a recording nor go stale."""
    broken = {name_of(path) for path in RECORDINGS if not is_one_whole_answer(path.read_bytes())}
    assert broken == set(EXCLUDED)
    assert len(RECORDINGS) - len(broken) > 100


@pytest.mark.parametrize("path", [path for path in RECORDINGS if name_of(path) not in EXCLUDED], ids=name_of)
def test_a_recorded_answer_passes_read_by_read(path: Path) -> None:
    pieces, request = reads(path), request_of(path)
    whole = b"".join(pieces)
    body_at = final_head_end(whole)
    arrived = asyncio.Semaphore(0)

    async def script(wire: Wire, _: Received) -> None:
        for piece in pieces:
            await wire.send(piece)
            await arrived.acquire()

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            for spec in it.endpoints:
                it.runtime.report_models(spec.uid, [card(name) for name in MODELS])
            client = await it.connect()
            client.send(request)
            sent = 0
            for piece in pieces:
                body = whole[max(sent, body_at) : sent + len(piece)]
                if sent < body_at <= sent + len(piece):
                    head = await client.head()
                    assert head.split(b" ")[1] == whole[whole.rindex(b"HTTP/1.1 ", 0, body_at) :].split(b" ")[1]
                assert await client.reader.readexactly(len(body)) == body
                sent += len(piece)
                arrived.release()
            await it.settle()
            (record,) = it.records.requests
            assert record.outcome is Outcome.COMPLETED

    run(main())
