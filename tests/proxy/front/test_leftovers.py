# SPDX-License-Identifier: Apache-2.0
"""What is left of a connection that ended, before any garbage is collected: nothing.

lbproxy looks at old objects very seldom (`process.COLLECT_AFTER`), so what a cycle of references holds is held for
hours: with all that came after it, a refused request of 4 MB was 4 MB.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from tests.support.aio import run, until
from tests.support.endpoint import ScriptedEndpoint, answer
from tests.support.rig import RawClient, post, rig
from tests.support.sockets import upgrade

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = b'{"model":"m"}'
FILLER = b"leftover" * 20_000
"""Sent behind everything."""


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def leftovers() -> list[str]:
    """What holds bytes that a client sent."""
    return [
        f"{len(held)} bytes of {type(one)} {one!r:.200}"
        for one in gc.get_objects()
        for held in gc.get_referents(one)
        if isinstance(held, bytes | bytearray) and held is not FILLER and FILLER[:1000] in held
    ]


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(post(), id="a request"),
        pytest.param(CHUNKED + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY), id="a request of the other lane"),
        pytest.param(b"\x00" * 1000, id="no request"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: a\r\nbad line\r\n\r\n", id="a bad head"),
        pytest.param(b"\r\n" * 1000, id="empty lines"),
        pytest.param(b"GET /", id="a long line"),
        pytest.param(HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}", id="two lengths"),
        pytest.param(CHUNKED + b"zz\r\n", id="a bad chunk"),
        pytest.param(
            CHUNKED + (b"%x\r\n%s\r\n" % (len(FILLER), FILLER)) * 3 + b"zz\r\n", id="a bad chunk behind a body"
        ),
        pytest.param(CHUNKED + (b"1;a=" + b"b" * 5000 + b"\r\n \r\n") * 50, id="long extensions"),
        pytest.param(CHUNKED + b"1\r\n \r\n0\r\nbad trailer\r\n\r\n", id="a bad trailer"),
        pytest.param(HEAD + b"Content-Length: 100000000\r\n\r\n", id="a large body"),
        pytest.param(HEAD + b"Content-Length: 1000\r\n\r\n", id="half a body"),
        pytest.param(b"POST /nowhere HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n", id="an unread body"),
        pytest.param(post(b"{"), id="a bad body"),
        pytest.param(upgrade(), id="a WebSocket that is refused"),
        pytest.param(post() + b"bad\r\n\r\n", id="nonsense behind a request"),
    ],
)
def test_nothing_is_left_of_a_connection(sent: bytes) -> None:
    run(_leftovers_of(sent))


async def _leftovers_of(sent: bytes) -> None:
    async with ScriptedEndpoint(answer(b"{}")) as server, rig(server.url) as it:
        client = await it.connect()
        for _ in range(3):
            client.send(sent + FILLER)
            await asyncio.sleep(0.02)
        await _leave(client)
        del client
        it.clients.clear()
        server.requests.clear()
        await until(lambda: it.front.open_connections == 0, "it is gone")
        await asyncio.sleep(0.05)
        assert leftovers() == []


@pytest.mark.usefixtures("uncollected")
def test_nothing_is_left_of_a_body_that_was_given_up() -> None:
    """Its error is kept in its reader, and its traceback has the frames with all that had arrived."""
    run(_leftovers_of_a_given_up_body())


async def _leftovers_of_a_given_up_body() -> None:
    async with ScriptedEndpoint(answer(b"{}")) as server, rig(server.url) as it:
        client = await it.connect()
        client.send(HEAD + b"Content-Length: 1000000\r\n\r\n" + FILLER)
        arrivals = it.front.overload.arrivals
        await until(lambda: len(arrivals) > 0, "it arrives")
        client.send(FILLER)
        await asyncio.sleep(0.05)
        (arrival,) = arrivals._of.values()
        arrival.due_at = 0.0
        arrivals.end_overdue()
        assert b" 408 " in await client.head()
        del arrival
        await _leave(client)
        it.clients.clear()
        await until(lambda: it.front.open_connections == 0, "it is gone")
        assert leftovers() == []


async def _leave(client: RawClient) -> None:
    """After what was answered, if anything was."""
    try:
        async with asyncio.timeout(0.3):
            await client.reader.read()
    except (OSError, TimeoutError):
        pass
    client.writer.transport.abort()
