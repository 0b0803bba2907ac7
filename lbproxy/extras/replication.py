# SPDX-License-Identifier: Apache-2.0
"""Tells the other replicas what this one places, and the Balancer what they place, over a `Store`.

No request ever waits for it. While the store cannot be used, this replica goes on alone with what it knows, tries again
by itself, and tells all of its requests in flight anew when it is back. What others have in flight is taken out as soon
as they have not been heard of for `SILENT_S`: then the engines' gauges show it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

import orjson

from lbproxy import __version__
from lbproxy.config.sections.replicas import ReplicasSettings
from lbproxy.config.shown import without_parts_of
from lbproxy.config.text import ConfigError, one_line
from lbproxy.core.balancer import Balancer
from lbproxy.core.replicas.batches import BatchError, decode, encode
from lbproxy.core.replicas.peers import MAX_PEERS
from lbproxy.core.replicas.shown import ReplicaFacts, ReplicationFacts, ReplicationStats
from lbproxy.core.requests.request import DayUse
from lbproxy.core.saved.reading import Saved, SavedError, day_lines, read_lines
from lbproxy.core.saved.reading import encode as encode_piece
from lbproxy.driver.runtime import Runtime
from lbproxy.extras.installing import needs
from lbproxy.extras.store import Store, StoreError

if TYPE_CHECKING:
    from lbproxy.extras.redis_store import RedisStore

logger = logging.getLogger("lbproxy")

BEAT_S: Final = 0.5
SILENT_S: Final = 2.5
"""A replica that is not heard of for this long has nothing in flight."""
JOIN_WITHIN_S: Final = 10.0
"""A start does not wait longer for what another replica knows."""
FIRST_CALL_S: Final = 3.0
"""Nor for a store that does not respond."""
RETRY_FIRST_S, RETRY_MAX_S = 0.2, 2.0
IDLE_S: Final = 1.0
"""How often flows are looked at while nothing else is to be told."""
SILENT_BATCH_S: Final = 3.0
"""An empty batch is sent after so long without any: others see by its number whether they missed the last one."""
TURN_S: Final = 0.002
"""How long the export of what is known holds up the event loop at one time."""
CHUNK_BYTES: Final = 1 << 18
DAYS_EVERY_S: Final = 5.0
MAX_KNOWLEDGE_BYTES: Final = 256 << 20
MAX_PROBLEM_CHARS: Final = 200
MAX_STORED: Final = 10_000
"""Stored responses of which one who joins is told."""


class Replication:
    """This replica's part. `join` at the start, `run` as a loop, `leave` at the end."""

    def __init__(
        self,
        settings: ReplicasSettings,
        balancer: Balancer,
        runtime: Runtime,
        make_store: Callable[[], Store],
    ) -> None:
        """`make_store` may raise StoreError."""
        self._settings = settings
        self._balancer = balancer
        self._runtime = runtime
        self._make_store = make_store
        self.name = settings.name or _host_name()
        self.replica = f"{self.name}-{secrets.token_hex(4)}"
        """The id of this one: another one for each process."""
        self._journal, self._peers = balancer.share(self.replica)
        self._news = asyncio.Event()
        self._journal.on_news = self._news.set
        self._started_at = time.time()
        self._is_running = False
        """It can tell others what it knows."""
        self._others: dict[str, _Other] = {}
        """Replicas that live, by id."""
        self._beat_at = -SILENT_S
        """When the store last told who lives."""
        self.problem: str | None = "not connected yet"
        """Why the store cannot be used now; None = it can."""
        self.stats = ReplicationStats()

    def _info(self) -> bytes:
        """What others are told of this one as long as it lives."""
        facts = {"name": self.name, "version": __version__, "started_at": self._started_at, "running": self._is_running}
        return orjson.dumps(facts)

    # What is shown

    def facts(self) -> ReplicationFacts:
        """How the exchange is, and what is known of the other replicas."""
        known = {one.replica: one for one in self._peers.snapshot(self._runtime.now())}
        names = {replica: (one.info.name, one.info.version) for replica, one in self._others.items()}
        names = {**{replica: (replica, "") for replica in known}, **names}
        others = [ReplicaFacts(replica, *who, known.get(replica)) for replica, who in sorted(names.items())]
        age_s = None if self._beat_at < 0.0 else self._runtime.now() - self._beat_at
        return ReplicationFacts(self.replica, self.name, self._url, self.problem, self.stats, age_s, others)

    @property
    def _url(self) -> str:
        """Where the store is, without a password."""
        return "" if self._settings.url is None else without_password(self._settings.url.get_secret_value())

    # The start

    async def join(self) -> Saved | None:
        """What the replica knows that has lived longest; None if there is no other, or it does not tell."""
        store = None
        try:
            store = self._make_store()
            async with asyncio.timeout(FIRST_CALL_S):
                alive, _ = await store.beat(self.replica, self._info())
            oldest = min((_Info.read(info, replica) for replica, info in alive.items()), key=_Info.order)
            if not oldest.is_running:
                return None  # all start now
            async with asyncio.timeout(JOIN_WITHIN_S):
                return await self._receive(store, oldest)
        except (StoreError, SavedError, TimeoutError) as error:
            text = "replicas: this one starts without what others know: %s"
            logger.warning(text, error or f"no response within {JOIN_WITHIN_S:g} s", extra={"event": "replicas"})
            return None
        finally:
            if store is not None:
                await store.close()

    async def _receive(self, store: Store, info: _Info) -> Saved | None:
        oldest = info.replica
        await self._hear_of(store, info)  # what it tells besides comes after this
        await store.want(oldest, self.replica)
        lines: list[bytes] = []
        size = 0
        while not (lines and _is_end(lines[-1])):
            piece = await store.receive(self.replica)
            if piece is None:
                alive, _ = await store.beat(self.replica, self._info())
                if oldest not in alive:
                    raise SavedError(f"{oldest} is gone")
                continue
            if not piece:
                return None  # under its policy nothing is learned
            size += len(piece)
            if size > MAX_KNOWLEDGE_BYTES:
                raise SavedError("it is too large")
            lines += piece.splitlines(keepends=True)
        logger.info("replicas: %s told what it knows: %d bytes", oldest, size, extra={"event": "replicas"})
        return await asyncio.to_thread(read_lines, lines)

    # Between

    async def run(self) -> None:
        """Until cancelled: a loop for `supervise`."""
        self._is_running = True
        retry_s = RETRY_FIRST_S
        while True:
            began_at = self._runtime.now()
            try:
                store = self._make_store()
                try:
                    await self._exchange(store)
                finally:
                    await store.close()
            except* StoreError as errors:
                self._failed(errors.exceptions[0])
            except* Exception as errors:  # requests that others told of must end, and whoever looks must see it
                logger.exception("replicas: the exchange failed", extra={"event": "replicas"})
                self._failed(StoreError(f"an internal error, see the log: {_first(errors)!r}"[:MAX_PROBLEM_CHARS]))
            retry_s = RETRY_FIRST_S if self._runtime.now() - began_at > RETRY_MAX_S else min(RETRY_MAX_S, 2.0 * retry_s)
            await self._pause(retry_s * random.uniform(0.75, 1.25))  # noqa: S311 - spreads load

    async def _pause(self, for_s: float) -> None:
        until = self._runtime.now() + for_s
        while (left_s := until - self._runtime.now()) > 0.0:
            await asyncio.sleep(min(left_s, BEAT_S))
            self._forget_silent()

    def _failed(self, error: BaseException) -> None:
        self.stats.failures += 1
        url = self._settings.url
        text = str(_first(error)) if url is None else without_parts_of(str(_first(error)), url.get_secret_value())
        if self.problem != text:
            self.problem = text
            told = "replicas: %s cannot be used, so this one goes on alone: %s"
            logger.warning(told, self._url, text, extra={"event": "replicas"})

    async def _exchange(self, store: Store) -> None:
        await store.ping()  # a store that allows only some of the calls is not told as connected, and again, and again
        await self._beat(store)
        self._journal.reset_due = True
        self._news.set()
        if self.problem is not None:
            self.problem = None
            text = "replicas: connected to %s as %s; others: %s"
            others = ", ".join(sorted(self._others)) or "none"
            logger.info(text, self._url, self.replica, others, extra={"event": "replicas"})
        async with asyncio.TaskGroup() as tasks:
            wanting: asyncio.Queue[str] = asyncio.Queue(MAX_PEERS)
            tasks.create_task(self._keep_beating(store, wanting))
            tasks.create_task(self._keep_giving(store, wanting))
            tasks.create_task(self._keep_sending(store))
            tasks.create_task(self._keep_reading(store))
            tasks.create_task(self._keep_days(store))

    async def _keep_beating(self, store: Store, wanting: asyncio.Queue[str]) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            for replica in dict.fromkeys(await self._beat(store)):
                if not wanting.full():
                    wanting.put_nowait(replica)

    async def _keep_giving(self, store: Store, wanting: asyncio.Queue[str]) -> None:
        """One after the other, while beats go on."""
        while True:
            await self._give(store, await wanting.get())

    async def _beat(self, store: Store) -> list[str]:
        """Say that we live, and learn who else does. Returns who wants to be told what we know."""
        alive, wanting = await store.beat(self.replica, self._info())
        self._beat_at = self._runtime.now()
        alive.pop(self.replica, None)
        for replica in [one for one in self._others if one not in alive]:
            self._lose(replica)
        for replica, info in alive.items():
            if replica not in self._others:
                await self._hear_of(store, _Info.read(info, replica))
        return wanting

    async def _hear_of(self, store: Store, info: _Info) -> None:
        """Read what a new one tells from now on, and have it tell what it has in flight."""
        self._others[info.replica] = _Other(info, await store.last(info.replica))
        self._journal.ask(info.replica)

    def _lose(self, replica: str) -> None:
        del self._others[replica]
        self._peers.lose(replica, self._runtime.now())
        self._runtime.pump_soon()
        logger.info("replicas: %s is gone", replica, extra={"event": "replicas"})

    def _forget_silent(self) -> None:
        """Nobody is heard of while the store cannot be used."""
        if self._runtime.now() - self._beat_at > SILENT_S:
            for replica in list(self._others):
                self._lose(replica)

    async def _keep_sending(self, store: Store) -> None:
        sent_at = self._runtime.now()
        while True:
            try:
                async with asyncio.timeout(IDLE_S):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()
            is_silent = self._runtime.now() - sent_at > SILENT_BATCH_S
            while (batch := self._journal.take(self._runtime.now(), even_empty=is_silent)) is not None:
                is_silent, sent_at = False, self._runtime.now()
                data = encode(batch)
                began_at = time.monotonic()
                await store.append(self.replica, data)
                self.stats.append_s = time.monotonic() - began_at
                self.stats.batches_sent += 1
                self.stats.bytes_sent += len(data)
            await asyncio.sleep(self._settings.interval)

    async def _keep_reading(self, store: Store) -> None:
        while True:
            positions = {replica: one.position for replica, one in self._others.items()}
            if not positions:
                await asyncio.sleep(BEAT_S / 5.0)
                continue
            for replica, position, data in await store.read(positions):
                other = self._others.get(replica)
                if other is None:
                    continue  # gone meanwhile
                other.position = position
                self._read(other, replica, data)
                await asyncio.sleep(0)

    async def _keep_days(self, store: Store) -> None:
        """Have the store keep who used how many tokens, so that each replica knows it of all."""
        sent: list[DayUse] = []
        while True:
            sent = await self._send_days(store, sent)
            await asyncio.sleep(DAYS_EVERY_S)

    async def _send_days(self, store: Store, sent: Sequence[DayUse] = ()) -> list[DayUse]:
        """`sent`: what the store has. Returns what it has then: the present day and the one that ended last."""
        ledger = self._balancer.ledger
        days = [use for use in (ledger.yesterday, ledger.today()) if use is not None and use.day and use.rows]
        for use in days:
            if use not in sent:
                await store.keep_day(f"{use.day}.{use.id}", day_lines(use))
        return days

    async def days(self, first: str) -> list[bytes] | None:
        """A line for each day from `first` on and each process that counted in it; None: the store cannot be used."""
        try:
            store = self._make_store()
            try:
                return await store.days(first)
            finally:
                await store.close()
        except StoreError:
            return None

    def _read(self, other: _Other, replica: str, data: bytes) -> None:
        self.stats.batches_received += 1
        self.stats.bytes_received += len(data)
        try:
            batch = decode(data)
            if batch.replica != replica:
                raise BatchError("a batch is of another replica than its stream")
        except BatchError as error:
            self.stats.malformed += 1
            if not other.is_malformed:
                other.is_malformed = True
                logger.warning("replicas: %s: %s", replica, error, extra={"event": "replicas"})
            return
        self._peers.hear(batch, self._runtime.now())
        self._runtime.pump_soon()
        if self._journal.has_news:
            self._news.set()  # somebody asks, or is asked, for a reset

    async def _give(self, store: Store, replica: str) -> None:
        """Tell one who joins what we know, in turns with pauses as long."""
        lines: list[bytes] = []
        size, began_at = 0, time.monotonic()
        for piece in self._balancer.restarts.save(saved_at=time.time(), prefixes=True, now=self._runtime.now()):
            if piece is not None:
                lines.append(encode_piece(piece))
                size += len(lines[-1])
            if size >= CHUNK_BYTES:
                await store.give(replica, b"".join(lines))
                lines, size = [], 0
            if time.monotonic() - began_at > TURN_S:
                await asyncio.sleep(TURN_S)
                began_at = time.monotonic()
        await store.give(replica, b"".join(lines))
        self._peers.tell_stored(MAX_STORED)

    # The end

    async def leave(self) -> None:
        """Say that we are gone, so that nobody waits to notice it."""
        try:
            store = self._make_store()
        except StoreError:
            return
        try:
            while (batch := self._journal.take(self._runtime.now())) is not None:
                await store.append(self.replica, encode(batch))
            await self._send_days(store)
            await store.leave(self.replica)
        except StoreError as error:
            logger.debug("replicas: others will notice by themselves: %s", error, extra={"event": "replicas"})
        finally:
            await store.close()


def make_replication(settings: ReplicasSettings, balancer: Balancer, runtime: Runtime) -> Replication | None:
    """What the settings ask for; None = there are no other replicas. Raises ConfigError."""
    kind = find_store(settings)
    if kind is None or settings.url is None:
        return None
    url, pool = settings.url.get_secret_value(), settings.pool
    return Replication(settings, balancer, runtime, lambda: kind(url, pool))


def find_store(settings: ReplicasSettings) -> type[RedisStore] | None:
    """What its store is made of. Raises ConfigError, also if options of the URL are wrong."""
    if settings.url is None:
        return None
    try:
        from lbproxy.extras.redis_store import RedisStore  # noqa: PLC0415 - for those who want it
    except ImportError as error:
        if error.name is None or not error.name.startswith("redis"):
            raise
        problem = f"replicas.url: {needs('replicas')}"
        raise ConfigError("settings", [problem]) from None
    try:
        RedisStore(settings.url.get_secret_value(), settings.pool)
    except StoreError as error:
        raise ConfigError("settings", [f"replicas.url: {error}"]) from None
    return RedisStore


async def dial(settings: ReplicasSettings) -> list[tuple[str, str]]:
    """Try the store once, without being a replica. Returns name and version of those that live. Raises StoreError, and
    ConfigError as `find_store` does.
    """
    kind = await asyncio.to_thread(find_store, settings)
    if kind is None or settings.url is None:
        return []
    store = kind(settings.url.get_secret_value(), settings.pool)
    try:
        found = [_Info.read(info, replica) for replica, info in (await store.ping()).items()]
        return sorted((one.name or one.replica, one.version) for one in found)
    finally:
        await store.close()


def without_password(url: str) -> str:
    """The URL of a store as it is shown: no user, no password, no options."""
    scheme, _, rest = url.partition("://")
    parts = urlsplit(f"redis://{rest}")
    return f"{scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _host_name() -> str:
    return re.sub("[^A-Za-z0-9._-]", "-", socket.gethostname())[:64] or "lbproxy"


def _first(error: BaseException) -> BaseException:
    """The first of a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _is_end(line: bytes) -> bool:
    return len(line) < 64 and b'"end"' in line


@dataclass(slots=True)
class _Other:
    """What is known of another replica, apart from its requests."""

    info: _Info
    position: bytes
    """Up to where its batches were read."""
    is_malformed: bool = False
    """A batch could not be read, and a warning said so."""


class _Info(NamedTuple):
    """What a replica says of itself. It is for people, and to choose one that tells what it knows."""

    replica: str
    name: str = ""
    version: str = ""
    started_at: float = inf
    is_running: bool = False

    @classmethod
    def read(cls, info: bytes, replica: str) -> _Info:
        """What is not understood is empty."""
        try:
            read = orjson.loads(info)
            name, version = one_line(str(read["name"]), 64), one_line(str(read["version"]), 32)
            return cls(replica, name, version, float(read["started_at"]), read["running"] is True)
        except (ValueError, TypeError, KeyError):
            return cls(replica)

    def order(self) -> tuple[bool, float, str]:
        """Those that can tell most first."""
        return not self.is_running, self.started_at, self.replica
