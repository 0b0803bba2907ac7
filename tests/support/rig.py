# SPDX-License-Identifier: Apache-2.0
"""lbproxy's data path between scripted endpoints and raw clients, in one loop, without the control plane: endpoints are
declared up and serve MODEL, so that each test decides everything that happens.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

from lbproxy.config.parse import parse
from lbproxy.config.tree import Settings
from lbproxy.control.discovery.discovery import NO_CERTIFICATES, spec_of
from lbproxy.core.balancer import Balancer
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.requests.retry import Retries
from lbproxy.driver.runtime import Runtime
from lbproxy.proxy.exchange.exchanger import Exchanger
from lbproxy.proxy.front.server import FrontEnd
from lbproxy.workers import messages as m
from lbproxy.workers.link import Link
from lbproxy.workers.remote import RemoteRuntime
from lbproxy.workers.server import Session, WorkerServer
from tests.support.aio import until
from tests.support.endpoint import Message
from tests.support.links import connect
from tests.support.pool import Pool, Records
from tests.support.workers import WORKERS

RUNTIME = RemoteRuntime if WORKERS else Runtime
"""Of the data path."""


class Rig(Pool):
    """What a test holds."""

    tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None
    """The server's and the clients', where all are to speak TLS."""

    def __init__(self, settings: Settings) -> None:
        rng = random.Random(1)
        balancer = Balancer(make_policy(settings.routing, rng), settings.balancing, rng=rng)
        super().__init__(balancer, [spec_of(entry, entry.name, NO_CERTIFICATES) for entry in settings.endpoints])
        self.own_records = Records(balancer)
        """What the worker itself tells its sinks, where there is one."""
        self.remote = RemoteRuntime(settings, rng, [self.own_records]) if WORKERS else None
        """The data path's, if that is a worker's (support/workers.py); `runtime` is then the balancer process's."""
        self.data_runtime = seen = self.remote or self.runtime
        """The data path's runtime."""
        self.front = FrontEnd(settings, seen, Exchanger(settings, seen, self.connections), rng)
        seen.move_stranded = self.front.move_stranded
        self.links: tuple[Link[m.ToWorker], Link[m.FromWorker]] | None = None
        self.server = None if self.remote is None else WorkerServer(self.runtime)
        if self.server is not None:
            self.sinks.append(self.server)
        self.port = 0
        self.clients: list[RawClient] = []
        """All that were connected: closed at the end."""

    async def link(self) -> None:
        """Connect the data path with the balancer, if they are apart."""
        if self.remote is None or self.server is None:
            return
        session = Session(self.server)
        mine: Link[m.ToWorker] = Link(m.ToWorker, self.remote.received, self.remote.detach)
        await connect(mine, session.link)
        self.remote.attach(mine)
        self.links = mine, session.link
        mine.send(m.Hello(0, 1))
        self.server.ready()
        await until(lambda: self.remote is not None and not self.remote.alone)

    def tell(self) -> None:
        """Have a worker's side learn at once what a test changed of endpoints: before what clients send from now on."""
        if self.server is not None and self.links is not None:
            self.server.tell()
            self.links[1].flush()

    async def settle(self) -> None:
        """Wait until both sides know the same."""
        if self.links is not None:
            self.tell()
            here, there = self.links
            for _ in range(3):  # what is sent at the end of a turn, and what that leads to
                await asyncio.sleep(0)
            await until(lambda: here.sent == there.arrived and there.sent == here.arrived)
            await asyncio.sleep(0)  # sinks hear at the end of a turn

    @property
    def traced(self) -> list[RequestRecord]:
        """The records that have traces: those of the data path."""
        return self.records.requests if self.remote is None else self.own_records.requests

    @property
    def retries(self) -> Retries:
        """The budget by which the data path judges failures."""
        return self.balancer._retries if self.remote is None else self.remote._retries

    def in_flight(self) -> int:
        return sum(one.in_flight for one in self.snapshots())

    def take_down(self, name: str) -> None:
        """By its probes; its metrics were read until then, and are not any more."""
        uid = next(one.uid for one in self.endpoints if one.name == name)
        self.runtime.report_scrape(uid, LoadMetrics(scraped_at=self.runtime.now() - 1.0, running=1.0))
        for _ in range(3):
            self.runtime.report_health(uid, False, "it does not answer")

    async def connect(self) -> RawClient:
        tls = None if self.tls is None else self.tls[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26, ssl=tls)
        self.clients.append(RawClient(reader, writer, self))
        return self.clients[-1]

    async def ask(self, data: bytes) -> Reply:
        """One raw request on a connection of its own; the reply up to its end."""
        client = await self.connect()
        client.send(data)
        try:
            return await client.reply()
        finally:
            client.writer.close()


class Reply(Message):
    """A whole response."""

    @property
    def status(self) -> int:
        return int(self.head.split(b" ", 2)[1])


class RawClient:
    """A client of which a test writes and reads every byte."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        rig: Rig | None = None,
    ) -> None:
        self.reader = reader
        self.writer = writer
        self._rig = rig

    def send(self, data: bytes) -> None:
        if self._rig is not None:
            self._rig.tell()
        self.writer.write(data)

    async def fill(self, piece: bytes) -> None:
        """Send it again and again, until nobody takes any more."""
        taken = 0.0
        while taken < 0.1:
            while not self.writer.transport.get_write_buffer_size():
                self.send(piece)
                taken = 0.0
            await asyncio.sleep(0.02)
            taken += 0.02

    async def head(self) -> bytes:
        """The next one, also of an informational response."""
        return await self.reader.readuntil(b"\r\n\r\n")

    async def settle(self) -> None:
        """Wait until what lbproxy knows of its requests is known to all of its processes."""
        if self._rig is not None:
            await self._rig.settle()

    async def reply(self, *, bodiless: bool = False) -> Reply:
        """The next whole response, an informational one too; IncompleteReadError or ConnectionError if it broke."""
        try:
            return await self._reply(bodiless=bodiless)
        finally:
            await self.settle()

    async def _reply(self, *, bodiless: bool) -> Reply:
        reply = Reply(await self.head(), b"")
        if bodiless or reply.status < 200:
            return reply
        if reply.field("transfer-encoding") == "chunked":
            reply.body = await self._chunks()
        elif (length := reply.field("content-length")) is not None:
            reply.body = await self.reader.readexactly(int(length))
        else:
            reply.body = await self.reader.read(-1)
        return reply

    async def _chunks(self) -> bytes:
        body = b""
        while True:
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            data = await self.reader.readexactly(size + 2)
            if not size:
                return body
            body += data[:-2]


def post(
    body: bytes = b'{"model":"m"}', path: str = "/v1/chat/completions", more: str = "", version: str = "1.1"
) -> bytes:
    """A JSON POST."""
    return (
        f"POST {path} HTTP/{version}\r\nHost: lb\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{more}\r\n"
    ).encode() + body


Entry: TypeAlias = str | tuple[str, str]
"""The URL of an endpoint, perhaps with further settings of it."""


def settings_for(urls: Sequence[Entry], more: str = "") -> Settings:
    entries = [(one, "") if isinstance(one, str) else one for one in urls]
    listing = "".join(f"  - {{url: '{url}', name: e{n}, {own}}}\n" for n, (url, own) in enumerate(entries, 1))
    return parse(f"{more}\nendpoints:\n{listing}", environ={})


@asynccontextmanager
async def rig(*urls: Entry, more: str = "", up: bool = True) -> AsyncIterator[Rig]:
    """The data path before `urls`; `more` is further settings text. At the end nothing may be left in flight."""
    it = Rig(settings_for(list(urls), more))
    if up:
        it.bring_up()
    it.front.listener.use_tls(it.tls and it.tls[0])
    await it.link()
    it.port = await it.front.listen("127.0.0.1", 0)
    it.front.requests.local.applies = False  # what it refuses then has a test of its own; here Host is any name
    try:
        yield it
    finally:
        for client in it.clients:
            client.writer.transport.abort()
        await it.front.stop(2.0)
        await it.settle()
        if it.server is not None:
            it.server.close()
        it.connections.close()
    assert it.in_flight() == 0
    assert all(one.awaiting_first_byte == 0 for one in it.snapshots())
