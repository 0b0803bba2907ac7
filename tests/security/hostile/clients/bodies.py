# SPDX-License-Identifier: Apache-2.0
"""Kinds that abuse the body of a request: its pace, its framing, its end, and what it costs to read."""

from __future__ import annotations

import asyncio
import gzip
import itertools

from tests.security.hostile.clients.material import (
    CHAT,
    LAST_CHUNK,
    MIB,
    chat,
    chunk,
    chunked,
    deep,
    form,
    head,
    many_keys,
    post,
    short_strings,
    sized,
)
from tests.security.hostile.clients.wire import Attacker, Kind

AUDIO = "/v1/audio/transcriptions"
FAST = 60 * MIB
"""Just below the limit of a body: three of them are the whole budget (A3)."""
_CHUNK = chunk(b" " * (64 << 10))


async def fast_then_silent(a: Attacker) -> None:
    """60 MiB at once, of an announced body or in chunks, then nothing."""
    async with a.connect() as it:
        if a.rng.random() < 0.5:
            await it.send(sized(a.prey, FAST + 1))
            await it.fill(b" ", FAST)
        else:
            await it.send(chunked(a.prey))
            await it.fill(_CHUNK, FAST)
        await it.read_to_end()


async def trickle(a: Attacker) -> None:
    """A byte every now and then, also behind a fast beginning."""
    async with a.connect() as it:
        size = int(a.often(100, MIB))
        await it.send(sized(a.prey, size) + b" " * a.rng.choice((0, size // 2)))
        async with asyncio.TaskGroup() as both:
            both.create_task(it.read_to_end())
            both.create_task(it.send_pieces(itertools.repeat(b" ", size), 0.2))


async def slow_as_allowed(a: Attacker) -> None:
    """A large body, just above the least rate: what a phone does, a thousand times."""
    async with a.connect() as it:
        await it.send(sized(a.prey, FAST))
        async with asyncio.TaskGroup() as both:
            both.create_task(it.read_to_end())
            both.create_task(it.send_pieces(itertools.repeat(b" " * (5 << 10), FAST // (5 << 10)), 0.25))


async def chunks_of_one(a: Attacker) -> None:
    """A body in chunks of a byte, as fast as they are taken."""
    async with a.connect() as it:
        await it.send(chunked(a.prey))
        await it.fill(chunk(b" "), MIB)
        await it.send(chunk(chat(a.prey)) + LAST_CHUNK)
        await it.read_some(5)


async def chunk_extensions(a: Attacker) -> None:
    """Chunks that are mostly extension."""
    async with a.connect() as it:
        await it.send(chunked(a.prey))
        await it.fill(chunk(b" ", b";a=" + b"b" * a.rng.choice((10, 1000, 5000))), 4 * MIB)
        await it.read_to_end()


async def trailers(a: Attacker) -> None:
    """A body whose trailers do not end."""
    async with a.connect() as it:
        await it.send(chunked(a.prey) + chunk(chat(a.prey)) + b"0\r\n")
        await it.fill(b"X-Trailer: yes\r\n", 4 * MIB)
        await it.read_to_end()


async def expect(a: Attacker) -> None:
    """Waits to be told to go on, and then does not."""
    async with a.connect() as it:
        await it.send(sized(a.prey, MIB, more="Expect: 100-continue\r\n"))
        await it.read_to_end()


async def unwanted(a: Attacker) -> None:
    """A large body to a path or method that wants none; its answer is not waited for."""
    async with a.connect() as it:
        method, path = a.rng.choice((("GET", "/v1/models"), ("GET", "/health"), ("POST", "/nowhere"), ("PUT", CHAT)))
        await it.send(head(a.prey, path, f"Content-Length: {FAST}\r\n", method=method))
        await it.fill(b" ", FAST)
        await it.read_to_end()


async def strings(a: Attacker) -> None:
    """A megabyte of short strings (A11): legal."""
    await _ask(a, short_strings(a.prey, MIB))


async def nested(a: Attacker) -> None:
    """JSON as deep as it is long, or so deep as may be."""
    await _ask(a, deep(a.prey, a.rng.choice((60, 500, 100_000))))


async def keys(a: Attacker) -> None:
    """JSON of very many keys."""
    await _ask(a, many_keys(a.prey, 50_000))


async def numbers(a: Attacker) -> None:
    """A prompt of token ids."""
    body = b'{"model": "%s", "prompt": [%s0]}' % (a.prey.model.encode(), b"1," * (MIB // 2))
    await _ask(a, body, "/v1/completions")


async def parts(a: Attacker) -> None:
    """Forms of many parts, or of many parameters (A11)."""
    many = a.rng.random() < 0.5
    body, kind = form(a.prey, 8000, 20)
    if not many:
        parameters = b"".join(b'; p%d="%s"' % (n, b"x" * 20) for n in range(40_000))
        body = body.replace(b'; name="model"', parameters + b'; name="model"', 1)
    await _ask(a, body, AUDIO, kind=kind)


async def large(a: Attacker) -> None:
    """A legal prompt of some megabytes."""
    await _ask(a, chat(a.prey, "word " * (MIB + a.rng.randrange(MIB))))


async def compressed(a: Attacker) -> None:
    """A body that would be a hundred times as large."""
    await _ask(a, gzip.compress(chat(a.prey, " " * 8 * MIB)), more="Content-Encoding: gzip\r\n")


async def cut(a: Attacker) -> None:
    """A body that ends early: RST, FIN, or half-closed."""
    async with a.connect() as it:
        body = chat(a.prey, "x" * int(a.often(10, MIB)))
        whole = a.rng.choice((post(a.prey, body), chunked(a.prey) + chunk(body) + LAST_CHUNK))
        await it.send(whole[: a.rng.randrange(len(whole))])
        await asyncio.sleep(a.rng.choice((0.0, 0.05)))
        how = a.rng.randrange(3)
        if how == 0:
            it.reset()
        elif how == 1:
            it.half_close()
            await it.read_to_end()


async def _ask(a: Attacker, body: bytes, path: str = CHAT, more: str = "", *, kind: str = "application/json") -> None:
    """Over and over on one connection, by a size or in chunks."""
    async with a.connect() as it:
        while True:
            if a.rng.random() < 0.7:
                await it.send(post(a.prey, body, path, more, kind=kind))
            else:
                fields = f"Transfer-Encoding: chunked\r\n{more}"
                await it.send(head(a.prey, path, fields, kind=kind) + chunk(body) + LAST_CHUNK)
            if not await it.read():
                return


KINDS: tuple[Kind, ...] = (
    *(fast_then_silent, trickle, slow_as_allowed, chunks_of_one, chunk_extensions, trailers, expect, unwanted, strings),
    *(nested, keys, numbers, parts, large, compressed, cut),
)
