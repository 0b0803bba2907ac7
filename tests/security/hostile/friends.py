# SPDX-License-Identifier: Apache-2.0
"""The others: clients that ask a little, at a steady pace, and whose answers must be their own, whole, and in time.

A friend sends its next request when the last one ended, but not before its time has come, so that one that waits long
is one sample and not many. Like a client library it asks once more where a kept connection turned out closed.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.security.hostile.clients.material import LAST_CHUNK, chat, chunk, chunked, post
from tests.security.hostile.clients.wire import Prey
from tests.security.hostile.honest import MARK
from tests.support.rig import RawClient

TIMEOUT_S = 60.0
"""What a friend gives a request: longer than any stall on a busy machine that is not a fault."""


@dataclass(slots=True)
class Seen:
    """What friends saw in a phase."""

    waits_ms: list[float] = field(default_factory=list)
    """From the request to the end of its answer, of those that were answered."""
    failures: Counter[str] = field(default_factory=Counter)
    mixed: list[str] = field(default_factory=list)
    """Answers with anything of somebody else's: what was expected, and what there was."""
    lags_ms: list[float] = field(default_factory=list)
    """How late the friends' own loop was: what they measure beyond lbproxy."""


def _small(prey: Prey, mark: str) -> bytes:
    return post(prey, chat(prey, mark))


def _streamed(prey: Prey, mark: str) -> bytes:
    return post(prey, chat(prey, mark, stream=True, answer_events=20))


def _long(prey: Prey, mark: str) -> bytes:
    return post(prey, chat(prey, f"{mark} {'word ' * 6000}"))


def _in_chunks(prey: Prey, mark: str) -> bytes:
    body = chat(prey, mark)
    return chunked(prey) + chunk(body[:10]) + chunk(body[10:]) + LAST_CHUNK


_FORMS: tuple[Callable[[Prey, str], bytes], ...] = (*(_small,) * 5, *(_streamed,) * 3, _long, _in_chunks)


class Friends:
    """`count` of them, for as long as `run` is awaited. What they see goes to `seen`, which a phase may replace."""

    def __init__(self, prey: Prey, *, count: int, rate: float, seed: int, strict: bool = True) -> None:
        """`rate`: requests a second of each. `strict`: any answer but a whole one of status 200 is a failure."""
        self.seen = Seen()
        self._prey = prey
        self._count = count
        self._rate = rate
        self._seed = seed
        self._strict = strict

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._measure_lag())
            for number in range(self._count):
                tasks.create_task(self._friend(number))

    async def _measure_lag(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            self.seen.lags_ms.append(1000 * (time.monotonic() - began - 0.01))

    async def _friend(self, number: int) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        client: RawClient | None = None
        due = time.monotonic() + rng.random() / self._rate
        asked = 0
        try:
            while True:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                due = max(due, time.monotonic() - 1 / self._rate) + 1 / self._rate
                asked += 1
                mark = f"mark-{self._prey.model}{number}-{asked}"
                client = await self._ask(client, rng.choice(_FORMS)(self._prey, mark), mark.encode())
                if client is not None and rng.random() < 0.2:
                    client.writer.transport.abort()
                    client = None
        finally:
            if client is not None:
                client.writer.transport.abort()

    async def _ask(self, client: RawClient | None, request: bytes, mark: bytes) -> RawClient | None:
        """The connection for the next request."""
        began = time.monotonic()
        kept = client is not None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                for again in (kept, False):
                    try:
                        client = client or RawClient(
                            *await asyncio.open_connection("127.0.0.1", self._prey.port, limit=1 << 20)
                        )
                        client.send(request)
                        reply = await client.reply()
                        break
                    except (OSError, EOFError):
                        if client is not None:
                            client.writer.transport.abort()
                        client = None
                        if not again:
                            raise
        except asyncio.CancelledError:
            if client is not None:
                client.writer.transport.abort()
            raise
        except (OSError, EOFError, TimeoutError) as error:
            self.seen.failures[type(error).__name__] += 1
            if client is not None:
                client.writer.transport.abort()
            return None
        assert client is not None
        self._judge(reply.status, reply.head + reply.body, mark, 1000 * (time.monotonic() - began))
        if reply.field("connection") == "close":
            client.writer.transport.abort()
            return None
        return client

    def _judge(self, status: int, answer: bytes, mark: bytes, wait_ms: float) -> None:
        marks = set(MARK.findall(answer))
        if marks - {mark} or (self._strict and status == 200 and not marks):
            self.seen.mixed.append(f"{mark!r}: {sorted(marks)} {status}")
        elif status != 200:
            code = re.search(rb'"code": ?"(\w+)"', answer)
            self.seen.failures[f"{status} {code[1].decode() if code else ''}".strip()] += 1
        else:
            self.seen.waits_ms.append(wait_ms)
