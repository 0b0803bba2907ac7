# SPDX-License-Identifier: Apache-2.0
"""WebSockets of clients that have models of their own: no message gets a server to use another one."""

from __future__ import annotations

import json

import pytest

from lbproxy.core.requests.models import Allowed
from lbproxy.core.requests.outcome import Outcome
from lbproxy.proxy.sockets.frames import FrameError, FrameReader
from lbproxy.proxy.sockets.own_models import MAX_MESSAGE_BYTES, OwnModels
from tests.support.aio import run, until
from tests.support.endpoint import ScriptedEndpoint, Wire
from tests.support.pool import card
from tests.support.rig import Rig, rig
from tests.support.sockets import (
    BINARY,
    CLOSE,
    CONT,
    PING,
    PONG,
    TEXT,
    after_switch,
    close_of,
    frame,
    raw_socket,
    read_frame,
    upgrade,
)

FLOWS = "flows: {default: {models: [m]}, named: {all: {models: null}}}\n"
UPDATE = b'{"type":"session.update","model":"%b"}'


@pytest.fixture(autouse=True)
def way() -> str:
    """Upgrades never come by the fast lane."""
    return "aiohttp"


def text(payload: bytes, **more: bool) -> bytes:
    return frame(TEXT, payload, masked=True, **more)


OTHERS = {
    "vLLM's": [text(UPDATE % b"other")],
    "OpenAI's": [text(b'{"type":"session.update","session":{"model":"other"}}')],
    "of a transcription": [text(b'{"session":{"input_audio_transcription":{"model": "other"}}}')],
    "in a list": [text(b'{"a":[{"model":"m"},{"b":{"model":"other"}}]}')],
    "of two": [text(b'{"model":"other","model":"m"}')],
    "in other case": [text(b'{"Model":"other","model":"m"}')],
    "as an escape": [text(b'{"mod\\u0065l":"other"}')],
    "with an escape": [text(b'{"model":"\\u006fther"}')],
    "that is no text": [text(b'{"model":"\\ud800"}')],
    "in fragments": [
        text(b'{"mod', fin=False),
        frame(CONT, b'el":"oth', fin=False, masked=True),
        frame(CONT, b'er"}', masked=True),
    ],
    "around a ping": [
        text(b'{"model":', fin=False),
        frame(PING, b"x", masked=True),
        frame(CONT, b'"other"}', masked=True),
    ],
    "as bytes": [frame(BINARY, UPDATE % b"other", masked=True)],
    "in a large frame": [text(b'{"audio":"%b","model":"other"}' % (b"A" * 200_000))],
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_message_that_names_another_model_never_arrives(what: str) -> None:
    heard: list[tuple[int, bool, bytes]] = []

    async def listen(wire: Wire) -> None:
        while True:
            kind, fin, payload = await read_frame(wire.reader)
            heard.append((kind, fin, payload))
            if kind == PING:
                await wire.send(frame(PONG, payload))
            if kind == CLOSE:
                return

    async def main() -> None:
        async with ScriptedEndpoint(after_switch(listen)) as server, rig(server.url, more=FLOWS) as it:
            serve_both(it)
            client = await raw_socket(it, upgrade())
            client.send(text(UPDATE % b"m") + text(b'{"type":"x","delta":"model"}') + b"".join(OTHERS[what]))
            kind, _, payload = await read_frame(client.reader)
            while kind == PONG:
                kind, _, payload = await read_frame(client.reader)
            assert (kind, close_of(payload)) == (CLOSE, (1008, "model_not_found"))
            await until(lambda: heard and heard[-1][0] == CLOSE)
            whole = [payload for kind, fin, payload in heard if kind in {TEXT, BINARY, CONT} and fin]
            assert whole == [UPDATE % b"m", b'{"type":"x","delta":"model"}']
            await until(lambda: it.records.requests)
            assert it.records.requests[0].outcome is Outcome.BAD_REQUEST

    run(main())


def serve_both(it: Rig) -> None:
    it.runtime.report_models(it.endpoints[0].uid, [card("m"), card("other", parent="m")])


def test_who_may_name_all_models_may_do_so_in_messages() -> None:
    heard: list[bytes] = []

    async def listen(wire: Wire) -> None:
        while True:
            kind, _, payload = await read_frame(wire.reader)
            if kind == CLOSE:
                return
            heard.append(payload)

    async def main() -> None:
        async with ScriptedEndpoint(after_switch(listen)) as server, rig(server.url, more=FLOWS) as it:
            serve_both(it)
            client = await raw_socket(it, upgrade(more="x-lbproxy-flow: all\r\n"))
            client.send(text(UPDATE % b"other"))
            await until(lambda: heard == [UPDATE % b"other"])

    run(main())


def check(*pieces: bytes) -> None:
    """The fragments of one message, at a client that may name `m` and patterns."""
    guard = OwnModels((Allowed(["m", "q*"]), Allowed(["m", "*2"])))
    reader = FrameReader(masked=False, max_bytes=1 << 24)
    for n, piece in enumerate(pieces):
        for one in reader.feed(frame(CONT if n else TEXT, piece, fin=n == len(pieces) - 1)):
            guard.check(one)


@pytest.mark.parametrize(
    "message",
    [
        UPDATE % b"m",
        UPDATE % b"q2",
        b'{"models":"x","text":"model","x":"\\"model\\": \\"other\\""}',
        b'{"parameters":{"properties":{"model":{"type":"string"}}}}',
        b"\xff\xfe no JSON",
        json.dumps({"text": "it\\", "model": "m"}).encode(),
    ],
)
def test_what_only_looks_like_the_name_of_another_model_passes(message: bytes) -> None:
    check(message)
    check(message[:5], message[5:9], message[9:])


def test_a_model_must_be_in_each_list() -> None:
    for name in (b"q1", b"x2", b""):
        with pytest.raises(FrameError, match="model_not_found"):
            check(UPDATE % name)


def test_what_is_held_is_bounded_and_each_message_begins_anew() -> None:
    guard = OwnModels((Allowed(["m"]),))
    reader = FrameReader(masked=False, max_bytes=1 << 24)
    piece = bytes(MAX_MESSAGE_BYTES // 2)

    def take(data: bytes, *, fin: bool = True) -> None:
        for one in reader.feed(frame(BINARY, data, fin=fin)):
            guard.check(one)

    for _ in range(5):
        take(piece)
    assert not guard.held
    with pytest.raises(FrameError, match="too large") as error:
        take(piece + piece + b"x")
    assert error.value.code == 1009
    assert len(guard.held) <= MAX_MESSAGE_BYTES
