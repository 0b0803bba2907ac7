# SPDX-License-Identifier: Apache-2.0
"""API keys: who is let through, what the endpoint sees of the key, and what those get who have none."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256

import pytest

from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.proxy.request.keys import KeyRing
from tests.support.aio import run
from tests.support.endpoint import OK, ScriptedEndpoint
from tests.support.rig import Reply, Rig, post, rig

KEY = "sk-team-a-0123456789abcdef"
OTHER = "sk-team-b-fedcba9876543210"


def ring(*keys: str) -> KeyRing:
    return KeyRing({sha256(key.encode()).digest(): f"team-{n}" for n, key in enumerate(keys, 1)})


RING = ring(KEY, OTHER)


@asynccontextmanager
async def guarded() -> AsyncIterator[tuple[ScriptedEndpoint, Rig]]:
    async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
        it.front.requests.keys = RING
        yield endpoint, it


def refused(reply: Reply) -> bool:
    """The answer to who has no key, all of it."""
    error = json.loads(reply.body)["error"]
    assert (reply.status, error["code"], error["type"]) == (401, "invalid_api_key", "invalid_request_error")
    assert reply.field("x-should-retry") == "false"
    assert reply.field("www-authenticate") == "Bearer"
    assert reply.field("connection") == "close"
    return reply.status == 401


RIGHT = [
    *(f"Authorization: Bearer {KEY}\r\n", f"authorization:bearer   {KEY}  \r\n", f"AUTHORIZATION: BEARER {KEY}\r\n"),
    *(f"x-api-key: {KEY}\r\n", f"X-Api-Key:{KEY}\r\n", f"X-A: 1\r\nAuthorization: Bearer {KEY}\r\nX-B: 2\r\n"),
    f"Authorization: Bearer {KEY}\r\nX-Api-Key: {KEY}\r\n",  # Claude Code
    f"X-Api-Key: {KEY} \r\nAuthorization: Bearer {KEY}\r\nX-Api-Key: {KEY}\r\n",
]


@pytest.mark.parametrize("line", RIGHT)
def test_a_key_lets_its_bearer_through_and_stays_here(line: str) -> None:
    """The endpoint would be told what opens all others."""

    async def main() -> None:
        async with guarded() as (endpoint, it):
            assert (await it.ask(post(more=line))).status == 200
            (received,) = endpoint.requests
            assert b"authorization" not in received.head.lower()
            assert KEY.encode() not in received.head
            assert (b"X-A: 1\r\nX-B: 2\r\n" in received.head) == ("X-A:" in line)
            assert it.records.requests[-1].key == "team-1"
            assert (await it.ask(post(more=f"Authorization: Bearer {OTHER}\r\n"))).status == 200
            assert it.records.requests[-1].key == "team-2"

    run(main())


WRONG = [
    *("", "Authorization:\r\n", "Authorization: Bearer\r\n", "Authorization: Bearer \r\n", "X-Api-Key:\r\n"),
    *(f"Authorization: {KEY}\r\n", f"Authorization: Basic {KEY}\r\n", f"Authorization: Bearer{KEY}\r\n"),
    *(
        f"Authorization: Bearer {KEY}x\r\n",
        f"Authorization: Bearer {KEY[:-1]}\r\n",
        f"Authorization: Bearer x{KEY}\r\n",
    ),
    *(f"Authorization: Bearer {KEY.upper()}\r\n", f"Authorization: Bearer {KEY},\r\n", f"Cookie: {KEY}\r\n"),
    *(f"Authorization: Bearer {KEY} {KEY}\r\n", f"Authorization: Bearer, Bearer {KEY}\r\n"),
    *(f"Authorization: Bearer {KEY}é\r\n", "Authorization: Bearer é\r\n", f"Proxy-Authorization: Bearer {KEY}\r\n"),
    f"Authorization: Bearer sha256:{sha256(KEY.encode()).hexdigest()}\r\n",
    f"Authorization: Bearer {KEY}\r\nauthorization: Bearer wrong\r\n",
    f"Authorization: Bearer wrong\r\nAuthorization: Bearer {KEY}\r\n",
    f"Authorization: Bearer {KEY}\r\nX-Api-Key: {OTHER}\r\n",
    f"Authorization: Bearer {KEY}\r\nX-Api-Key: {KEY}x\r\n",
    f"Authorization: Bearer {KEY}\r\nX-Api-Key: {KEY.upper()}\r\n",
    f"Authorization: Bearer {KEY}\r\nX-Api-Key:\r\n",
    f"Authorization: Bearer {KEY}\r\nX-Api-Key: {KEY}\r\nX-Api-Key: x\r\n",
    f"Authorization: Bearer {KEY}\r\nConnection: authorization\r\n",
    f"Authorization: Bearer {KEY}{'x' * 5000}\r\n",
]


@pytest.mark.parametrize("line", WRONG, ids=range(len(WRONG)))
def test_what_is_not_exactly_one_key_is_refused_and_reaches_nobody(line: str) -> None:
    async def main() -> None:
        async with guarded() as (endpoint, it):
            reply = await it.ask(post(more=line))
            assert refused(reply)
            several = line.count("\r\n") > 1 and "Connection" not in line
            assert (b"several credentials" in reply.body) == several
            assert endpoint.requests == []
            assert it.records.requests[-1].outcome is Outcome.UNAUTHORIZED
            assert it.records.requests[-1].key is None

    run(main())


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", "/v1/models"), ("GET", "/v1/models/m"), ("OPTIONS", "/v1/models"), ("OPTIONS", "/v1/completions")),
        *(("GET", "/"), ("GET", "/metrics"), ("GET", "/v1/files"), ("POST", "/v1/load_lora_adapter")),
        *(("CONNECT", "lb:443"), ("HEAD", "/v1/models"), ("DELETE", "/v1/x"), ("GET", "http://lb/v1/models")),
    ],
)
def test_no_path_or_method_is_free(method: str, path: str) -> None:
    """Not even to say whether it exists."""

    async def main() -> None:
        async with guarded() as (endpoint, it):
            client = await it.connect()
            client.send(f"{method} {path} HTTP/1.1\r\nHost: lb\r\n\r\n".encode())
            reply = await client.reply(bodiless=method == "HEAD")
            assert reply.status == 401
            assert reply.field("connection") == "close"
            assert endpoint.requests == []

    run(main())


def test_the_model_list_is_for_who_has_a_key() -> None:
    async def main() -> None:
        async with guarded() as (_, it):
            ask = f"GET /v1/models HTTP/1.1\r\nHost: lb\r\nAuthorization: Bearer {KEY}\r\n\r\n"
            reply = await it.ask(ask.encode())
            assert [one["id"] for one in json.loads(reply.body)["data"]] == ["m"]
            assert it.records.requests[-1].key == "team-1"

    run(main())


@pytest.mark.parametrize("more", ["Content-Length: 50000000\r\n", "Transfer-Encoding: chunked\r\n"])
@pytest.mark.parametrize("expects", ["", "Expect: 100-continue\r\n"])
def test_nothing_of_a_body_is_waited_for(more: str, expects: str) -> None:
    """Who has no key gets no memory: the refusal comes while the body is still to come, and no 100."""

    async def main() -> None:
        async with guarded() as (endpoint, it):
            client = await it.connect()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: lb\r\nContent-Type: application/json\r\n{more}{expects}\r\n"
            client.send(head.encode())
            assert refused(await client.reply())
            assert await client.reader.read() == b""
            assert it.front.overload.held_bytes == 0
            assert endpoint.requests == []

    run(main())


def test_a_body_that_goes_on_after_the_refusal_is_read_for_a_moment_and_held_never() -> None:
    """So that the refusal arrives; then the connection ends under the sender's hands."""

    async def main() -> None:
        async with guarded() as (_, it):
            client = await it.connect()
            client.send(b"POST /v1/completions HTTP/1.1\r\nHost: lb\r\nContent-Length: 60000000\r\n\r\n")
            sent = 0
            try:
                while sent < 60_000_000:
                    client.send(b"x" * 100_000)
                    sent += 100_000
                    await client.writer.drain()
                    assert it.front.overload.held_bytes == 0
                    await asyncio.sleep(0)
            except ConnectionError:
                pass
            assert it.records.requests[-1].outcome is Outcome.UNAUTHORIZED
            assert it.records.requests[-1].request_bytes == 0

    run(main())


def test_without_keys_credentials_are_the_endpoints_affair() -> None:
    """All of them, as they came."""
    lines = "Authorization: Bearer one\r\nX-Api-Key: two\r\nauthorization: three\r\n"

    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            for more in ("Authorization: Bearer one\r\n", lines):
                assert (await it.ask(post(more=more))).status == 200
                assert more.encode() in endpoint.requests[-1].head
                assert it.records.requests[-1].key is None
            assert (await it.ask(post(more="Authorization: a\r\nConnection: authorization\r\n"))).status == 200
            assert b"uthorization" not in endpoint.requests[-1].head

    run(main())


def test_other_keys_hold_for_the_next_request_of_a_connection_too() -> None:
    async def main() -> None:
        async with guarded() as (_, it):
            client = await it.connect()
            asks = post(more=f"Authorization: Bearer {KEY}\r\n")
            client.send(asks)
            assert (await client.reply()).status == 200
            it.front.requests.keys = ring(OTHER)
            client.send(asks)
            assert refused(await client.reply())

    run(main())


def test_ten_thousand_guesses_open_nothing() -> None:
    """Near misses, all lengths, all bytes; a hundredth of them also over the wire."""
    rng = random.Random(1)

    def guess() -> bytes:
        made = bytearray(KEY.encode())
        for _ in range(rng.randrange(1, 3)):
            match rng.randrange(4):
                case 0:
                    made[rng.randrange(len(made))] = rng.choice([*range(0x20), *range(0x21, 0x100)])
                case 1:
                    del made[rng.randrange(len(made)) :]
                case 2:
                    made += rng.randbytes(rng.randrange(1, 40)).replace(b"\r", b"").replace(b"\n", b"")
                case _:
                    made[:] = rng.randbytes(rng.randrange(1, 64)).replace(b"\r", b"").replace(b"\n", b"")
            made = made or bytearray(b"x")
        return bytes(made)

    guesses = {one for one in (guess() for _ in range(12_000)) if one.strip() != KEY.encode()}
    assert len(guesses) > 8_000
    for one in guesses:
        with pytest.raises(LbError):
            RING.name_of(b"authorization: Bearer " + one + b"\r\n")

    async def main() -> None:
        async with guarded() as (endpoint, it):
            for one in sorted(guesses)[::100]:
                head, _, body = post().partition(b"\r\n\r\n")
                try:
                    reply = await it.ask(head + b"\r\nAuthorization: Bearer " + one + b"\r\n\r\n" + body)
                except (asyncio.IncompleteReadError, ConnectionError):
                    raise AssertionError(one) from None
                assert reply.status in {400, 401}, one
            assert endpoint.requests == []

    run(main())
