# SPDX-License-Identifier: Apache-2.0
"""What replicas keep in a Redis or Valkey server: the one module that knows redis-py.

Under the prefix `{lbproxy:POOL}`, one hash slot of a cluster:

- `:stream:ID`, a stream with the batches of one replica, of bounded length. It expires soon after the last batch.
- `:alive:ID`, which expires after `ALIVE_S`: the replica lives as long as the key is there. `:replicas` is the set of
  ids to look for.
- `:wants:ID`, a list of replicas that want to be told what this one knows, and `:knowledge:ID`, the list of pieces of
  that for the one who asked.

Every call is bounded in time and raises StoreError, whatever the server does.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
)

from lbproxy.config.shown import without_parts_of
from lbproxy.config.text import one_line
from lbproxy.extras.store import DAYS_KEPT, StoreError

CALL_S: Final = 2.0
"""How long one call may take, a connection included."""
BLOCK_MS: Final = 500
"""How long a read waits for batches."""
ALIVE_S: Final = 2.0
"""Without a beat for this long a replica counts as gone."""
KEPT_ENTRIES: Final = 256
"""Batches that a stream keeps, about: 13 s at 20 a second. Who reads later than that needs a reset."""
KEPT_S: Final = 60
READ_ENTRIES: Final = 64
"""Batches that one read returns of each stream."""
MAX_REPLICAS: Final = 64
MAX_DAYS: Final = 10_000
"""Of all replicas together: one for each day and process."""
MAX_INFO_BYTES: Final = 1024
_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,80}")
KNOWLEDGE_S: Final = 30
"""How long knowledge that nobody fetches is kept."""


class RedisStore:
    """The keys of one pool."""

    def __init__(self, url: str, pool: str) -> None:
        """Raises StoreError if the URL's options are wrong. Connects at the first call."""
        self._prefix = f"{{lbproxy:{pool}}}"
        try:
            self._redis, self._others = _client(url)
            if not isinstance(self._redis, RedisCluster):
                self._redis.connection_pool.make_connection()  # checks the options, and connects nowhere
        except (ValueError, TypeError, RedisError) as error:
            raise StoreError(without_parts_of(_why(error), url)) from None

    def _key(self, kind: str, replica: str = "") -> str:
        return f"{self._prefix}:{kind}:{replica}" if replica else f"{self._prefix}:{kind}"

    async def append(self, replica: str, batch: bytes) -> None:
        key = self._key("stream", replica)
        async with _bounded():
            pipe = self._redis.pipeline(transaction=False)
            pipe.xadd(key, {"b": batch}, maxlen=KEPT_ENTRIES, approximate=True)
            pipe.expire(key, KEPT_S)
            await pipe.execute()

    async def last(self, replica: str) -> bytes:
        async with _bounded():
            found = await self._redis.xrevrange(self._key("stream", replica), count=1)
        return found[0][0] if found else b"0-0"

    async def read(self, positions: Mapping[str, bytes]) -> list[tuple[str, bytes, bytes]]:
        """Wait for batches of these replicas after these positions: replica, position, batch. Empty after `BLOCK_MS`
        without any.
        """
        keys = {self._key("stream", replica): replica for replica in positions}
        wanted: dict[Any, Any] = {key: positions[replica] for key, replica in keys.items()}
        async with _bounded(CALL_S + BLOCK_MS / 1000.0):
            found = await self._redis.xread(wanted, count=READ_ENTRIES, block=BLOCK_MS)
        read = []
        for key, entries in found or ():
            replica = keys.get(key.decode(errors="replace"))
            for position, fields in entries:
                if replica is not None:
                    read.append((replica, position, (fields or {}).get(b"b", b"")))
        return read

    async def beat(self, replica: str, info: bytes) -> tuple[dict[str, bytes], list[str]]:
        """Say that a replica lives. Returns those that live, each with its info, and those that want its knowledge."""
        async with _bounded():
            pipe = self._redis.pipeline(transaction=False)
            pipe.set(self._key("alive", replica), info, px=round(1000 * ALIVE_S))
            pipe.sadd(self._key("replicas"), replica)
            pipe.expire(self._key("replicas"), KEPT_S)
            pipe.smembers(self._key("replicas"))
            pipe.lrange(self._key("wants", replica), 0, MAX_REPLICAS)
            pipe.delete(self._key("wants", replica))
            done = await pipe.execute()
            alive = await self._infos(done[3])
            gone = [name for name in _ids(done[3]) if name not in alive and name != replica]
            if gone:
                await self._redis.srem(self._key("replicas"), *gone)
        return alive, _ids(done[4])

    async def leave(self, replica: str) -> None:
        async with _bounded():
            pipe = self._redis.pipeline(transaction=False)
            pipe.delete(self._key("alive", replica), self._key("wants", replica))
            pipe.srem(self._key("replicas"), replica)
            pipe.expire(self._key("stream", replica), round(2 * ALIVE_S))  # its last events are still read
            await pipe.execute()

    # What one knows, for one who joins

    async def want(self, of: str, replica: str) -> None:
        async with _bounded():
            pipe = self._redis.pipeline(transaction=False)
            pipe.rpush(self._key("wants", of), replica)
            pipe.expire(self._key("wants", of), KNOWLEDGE_S)
            await pipe.execute()

    async def give(self, to: str, data: bytes) -> None:
        async with _bounded():
            pipe = self._redis.pipeline(transaction=False)
            pipe.rpush(self._key("knowledge", to), data)
            pipe.expire(self._key("knowledge", to), KNOWLEDGE_S)
            await pipe.execute()

    async def receive(self, replica: str) -> bytes | None:
        """The next piece; None if there is none within a second."""
        async with _bounded(CALL_S + 1.0):
            found = await self._redis.blpop([self._key("knowledge", replica)], timeout=1)
        return None if found is None else found[1]

    # Who used how much

    async def keep_day(self, name: str, use: bytes) -> None:
        async with _bounded():
            pipe = self._redis.pipeline(transaction=False)
            pipe.set(self._key("day", name), use, px=DAYS_KEPT * 86_400_000)
            pipe.sadd(self._key("days"), name)
            pipe.expire(self._key("days"), DAYS_KEPT * 86_400)
            await pipe.execute()

    async def days(self, first: str) -> list[bytes]:
        oldest = time.strftime("%Y-%m-%d", time.gmtime(time.time() - DAYS_KEPT * 86_400))
        async with _bounded():
            listed = await self._redis.smembers(self._key("days"))
            known = [name for name in _ids(listed, MAX_DAYS) if name >= oldest]
            wanted = [self._key("day", name) for name in known if name >= first]
            uses = await self._redis.mget(wanted) if wanted else []
            if gone := listed.difference(name.encode() for name in known):
                await self._redis.srem(self._key("days"), *gone)
        return [use for use in uses if use is not None]

    async def ping(self) -> dict[str, bytes]:
        """Call every command that is used once, on keys of its own that expire. Returns those that live, each with its
        info.
        """
        own = f"check-{secrets.token_hex(4)}"
        stream, alive, wants, names = (self._key(kind, own) for kind in ("stream", "alive", "wants", "replicas"))
        async with _bounded():
            pipe = self._redis.pipeline(transaction=False)
            pipe.smembers(self._key("replicas"))
            pipe.set(alive, own, px=round(1000 * ALIVE_S))
            pipe.xadd(stream, {"b": b""})
            pipe.rpush(wants, own)
            pipe.sadd(names, own)
            for key in (stream, wants, names):
                pipe.expire(key, round(ALIVE_S))
            pipe.xrevrange(stream, count=1)
            pipe.xread({stream: "0-0"}, count=1)
            pipe.lrange(wants, 0, 1)
            pipe.blpop([wants], timeout=1)
            pipe.srem(names, own)
            pipe.delete(stream, alive, wants, names)
            done = await pipe.execute()
            return await self._infos([*done[0], own.encode()])  # of which the latter is gone

    async def _infos(self, found: Iterable[bytes]) -> dict[str, bytes]:
        """The infos of those of these that live."""
        names = _ids(found)
        infos = await self._redis.mget([self._key("alive", name) for name in names]) if names else []
        return {name: one for name, one in zip(names, infos, strict=True) if one and len(one) <= MAX_INFO_BYTES}

    async def close(self) -> None:
        for client in (self._redis, *self._others):
            try:
                async with asyncio.timeout(CALL_S):
                    await client.aclose()
            except (*_ERRORS, TimeoutError):
                pass  # it is gone anyway


def _ids(found: Iterable[bytes], most: int = MAX_REPLICAS) -> list[str]:
    """Those that can be ids of replicas, or of their days, of what anybody may have written there: the last `most`."""
    return sorted(name.decode() for name in found if _ID.fullmatch(name))[-most:]


_ERRORS: Final = (RedisError, RedisClusterException, OSError)
"""The second is none of the first, although it tells that no node can be reached."""


@asynccontextmanager
async def _bounded(within_s: float = CALL_S) -> AsyncIterator[None]:
    task = asyncio.current_task()
    cancelled = 0 if task is None else task.cancelling()
    try:
        async with asyncio.timeout(within_s):
            yield
    except TimeoutError:
        raise StoreError(f"no response within {within_s:g} s") from None
    except (*_ERRORS, UnicodeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise StoreError(_why(error)) from None  # the latter: responses that are none of Redis
    finally:
        if task is not None and task.cancelling() > cancelled:
            raise asyncio.CancelledError


def _why(error: Exception) -> str:
    """In words, without what redis-py puts before it: the command with its data."""
    text = str(error) or type(error).__name__
    if (cut := text.rpartition(" of pipeline caused error: "))[1]:
        text = cut[2].strip("()\"',")
    meaning = next((f"{words}: " for kind, words in _MEANINGS if isinstance(error, kind)), "")
    return one_line(meaning + text, 200)


_MEANINGS: Final = (
    (NoPermissionError, "the user lacks a permission"),
    (AuthenticationError, "wrong user or password"),
    (ReadOnlyError, "the server is read-only"),
    (OutOfMemoryError, "the server's memory is full"),
)
"""What the server's own words mean, for those who do not know them."""


_OPTIONS: Final[dict[str, Any]] = {
    "socket_timeout": CALL_S + BLOCK_MS / 1000.0,
    "socket_connect_timeout": CALL_S,
    "protocol": 2,
    "client_name": "lbproxy",
}


def _client(url: str) -> tuple[Any, list[Any]]:
    """A client, and others that it uses. Our loops try again, so it does not."""
    scheme, _, rest = url.partition("://")
    kind = scheme.lower().replace("valkey", "redis")
    once = Retry(NoBackoff(), 0)
    if kind.endswith("+sentinel"):
        return _sentinel(kind, rest, once)
    if kind.endswith("+cluster"):
        made = RedisCluster.from_url(f"{kind.removesuffix('+cluster')}://{rest}", retry=once, **_OPTIONS)
        return made, []
    return Redis.from_url(f"{kind}://{rest}", retry=once, max_connections=8, **_OPTIONS), []


def _sentinel(kind: str, rest: str, once: Retry) -> tuple[Any, list[Any]]:
    """`user:password@` is for the server; that of the sentinels are the options sentinel_username and -password."""
    parts = urlsplit(f"redis://{rest}")
    user_info, _, hosts = parts.netloc.rpartition("@")
    options: dict[str, Any] = dict(parse_qsl(parts.query))
    own = {key.removeprefix("sentinel_"): options.pop(key) for key in list(options) if key.startswith("sentinel_")}
    service, _, number = unquote(parts.path).strip("/").partition("/")
    shared: dict[str, Any] = {**_OPTIONS, "ssl": True} if kind.startswith("rediss") else dict(_OPTIONS)
    user, _, password = user_info.partition(":")
    if password:
        options["password"] = unquote(password)
    if user:
        options["username"] = unquote(user)
    sentinels = [_host_and_port(one) for one in hosts.split(",")]
    options = {**shared, **options, "retry": once, "db": int(number or 0)}
    made: Any = Sentinel(sentinels, sentinel_kwargs={**shared, "retry": once, **own}, **options)  # type: ignore[no-untyped-call]
    return made.master_for(service), list(made.sentinels)


def _host_and_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"redis://{text}")
    return parts.hostname or "", parts.port or 26379
