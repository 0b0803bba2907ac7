# SPDX-License-Identifier: Apache-2.0
"""Large bodies are read in many short turns of the event loop, in which other requests are served."""

from __future__ import annotations

import asyncio

import pytest

from lbproxy.core.requests.outline import PARSE_AT_ONCE_BYTES
from lbproxy.proxy.front import server
from lbproxy.proxy.front.bodies import read_large
from lbproxy.proxy.front.overload import Overload
from lbproxy.proxy.front.turn import Turn
from lbproxy.proxy.request.client_request import ClientRequest
from lbproxy.proxy.request.reading import LargeFacts, Reading
from tests.support.aio import run
from tests.support.endpoint import ScriptedEndpoint
from tests.support.rig import post, rig

LARGE = 16 * PARSE_AT_ONCE_BYTES


def upload(size: int) -> bytes:
    """A form with the file before the model."""
    part = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    body = part % (b"file", b"x" * size) + part % (b"model", b"m") + b"--b--\r\n"
    head = b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: lb\r\nContent-Length: %d\r\n" % len(body)
    return head + b"Content-Type: multipart/form-data; boundary=b\r\n\r\n" + body


def prompt(size: int) -> bytes:
    return post(b'{"model":"m","prompt":"%b"}' % (b"word " * (size // 5)), "/v1/completions")


@pytest.mark.parametrize("send", [prompt(LARGE), upload(LARGE)], ids=["JSON", "form"])
def test_a_large_body_leaves_turns_of_the_loop_to_others(send: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies of 15 to 47 MB held the loop for 80 to 176 ms."""
    turns, taken = 0, []

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def counted(
        request: ClientRequest, reading: Reading, turn: Turn, overload: Overload
    ) -> tuple[ClientRequest, LargeFacts]:
        began = turns
        try:
            return await read_large(request, reading, turn, overload)
        finally:
            taken.append(turns - began)

    monkeypatch.setattr(server, "read_large", counted)

    async def main() -> None:
        counting = asyncio.create_task(count())
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            assert (await it.ask(send)).status == 200
            assert endpoint.requests[0].body == send.partition(b"\r\n\r\n")[2]
        counting.cancel()

    run(main())
    assert len(taken) == 1
    assert taken[0] >= 4, "a turn for each MiB"


def test_a_small_body_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of the loop cost each request more than its few bytes."""

    async def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(server, "read_large", never)

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            for send in (prompt(PARSE_AT_ONCE_BYTES - 1000), upload(PARSE_AT_ONCE_BYTES - 1000)):
                assert (await it.ask(send)).status == 200

    run(main())
