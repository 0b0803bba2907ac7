# SPDX-License-Identifier: Apache-2.0
"""The store of replicas against real servers: every way to reach one, and what it does when one fails."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from redis import Redis

from lbproxy.extras.redis_store import KEPT_ENTRIES, RedisStore
from lbproxy.extras.store import StoreError
from tests.support.aio import run, until
from tests.support.certificates import CA, FOLDER
from tests.support.ports import free_port
from tests.support.redis_server import INSTALLED, PROGRAMS, needs_redis, redis_server

pytestmark = needs_redis
STRANGE = b"*3\r\n:1\r\n$-1\r\n+x\r\n" * 9
"""Redis's words without their meaning."""


async def exchange(url: str) -> None:
    """Two replicas find each other, and one hears the other."""
    pool = f"test-{random.random()}"
    one, two = RedisStore(url, pool), RedisStore(url, pool)
    try:
        assert (await one.beat("one", b"1"))[0] == {"one": b"1"}
        assert (await two.beat("two", b"2"))[0] == {"one": b"1", "two": b"2"}
        assert await two.last("one") == b"0-0"
        await one.append("one", b"first")
        position = await two.last("one")
        await one.append("one", b"second")
        ((replica, newer, data),) = await two.read({"one": position, "two": b"0-0"})
        assert (replica, data) == ("one", b"second")
        assert await two.read({"one": newer}) == []
        await two.want("one", "two")
        assert (await one.beat("one", b"1"))[1] == ["two"]
        assert (await one.beat("one", b"1"))[1] == []
        await one.give("two", b"known")
        assert await two.receive("two") == b"known"
        await one.leave("one")
        assert list((await two.beat("two", b"2"))[0]) == ["two"]
    finally:
        await one.close()
        await two.close()


def test_days_are_kept_for_as_long_as_they_are_shown(tmp_path: Path) -> None:
    """What is older, or was written by somebody else, is not listed for ever."""
    today = time.strftime("%Y-%m-%d", time.gmtime())

    async def days(store: RedisStore) -> None:
        for name in ("2020-01-01.a", f"{today}.a", f"{today}.b"):
            await store.keep_day(name, name.encode())
        assert sorted(await store.days("2020-01-01")) == [f"{today}.{one}".encode() for one in "ab"]
        assert await store.days("9999-01-01") == []
        await store.close()

    with redis_server(tmp_path) as server:
        server.call("SADD", "{lbproxy:p}:days", "no name \n")
        run(days(RedisStore(server.url, "p")))
        assert len(server.call("SMEMBERS", "{lbproxy:p}:days")) == 2
        left_s = [int(server.call("TTL", key)) for key in server.call("KEYS", "*")]
        assert all(399 * 86_400 < one <= 400 * 86_400 for one in left_s), left_s


@pytest.mark.parametrize("program", PROGRAMS)
def test_two_replicas_exchange_batches(tmp_path: Path, program: str) -> None:
    if program not in INSTALLED:
        pytest.skip(f"{program} is not installed: make test-tools")
    with redis_server(tmp_path, program=program) as server:
        run(exchange(server.url))
        run(exchange(server.url.replace("redis://", "valkey://")))


def test_over_a_unix_socket_with_a_password(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with redis_server(tmp_path, "--unixsocket", str(path), "--requirepass", "s3cret") as server:
        run(exchange(f"unix://:s3cret@{path}?db=1"))
        run(exchange(server.url.replace("//", "//:s3cret@")))
        for url, why in ((server.url, "Authentication required"), (server.url.replace("//", "//:no@"), "invalid")):
            with pytest.raises(StoreError, match=why):
                run(exchange(url))


def test_over_tls(tmp_path: Path) -> None:
    port = free_port()
    pem = str(FOLDER / "server.pem")
    options = ("--tls-port", str(port), "--tls-cert-file", pem, "--tls-key-file", pem, "--tls-ca-cert-file", str(CA))
    with redis_server(tmp_path, *options, "--tls-auth-clients", "no"):
        run(exchange(f"rediss://localhost:{port}?ssl_ca_certs={CA}"))
        with pytest.raises(StoreError, match="certificate verify failed"):
            run(exchange(f"rediss://localhost:{port}"))


def test_by_sentinels(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with redis_server(tmp_path / "one") as first, redis_server(tmp_path / "two") as second:
        second.call("REPLICAOF", "127.0.0.1", first.port)
        port = free_port()
        config = tmp_path / "sentinel.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\nsentinel monitor pool 127.0.0.1 {first.port} 1\n"
            "sentinel down-after-milliseconds pool 1000\nsentinel failover-timeout pool 4000\n"
        )
        sentinel = subprocess.Popen([INSTALLED[0], str(config), "--sentinel"], stdout=subprocess.DEVNULL)
        try:
            url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{port}/pool/0"
            run(_succeeds(lambda: exchange(url)))
            replicas = "SENTINEL", "REPLICAS", "pool"
            run(until(lambda: _knows_replica(port, replicas), "the sentinel knows the replica", every_s=0.1))
            first.kill()
            run(_succeeds(lambda: exchange(url)))  # at the other server, once it was promoted
            assert second.call("ROLE")[0] == b"master"
            first.start()
        finally:
            sentinel.kill()
            sentinel.wait()


def _knows_replica(port: int, words: tuple[str, ...]) -> bool:
    with Redis(port=port) as client:
        return len(client.execute_command(*words)) == 1


def test_in_a_cluster(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--cluster-enabled", "yes") as server:
        server.call("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        run(until(lambda: "ok" in str(server.call("CLUSTER", "INFO")), "the cluster is up"))
        run(_succeeds(lambda: exchange(f"redis+cluster://127.0.0.1:{server.port}")))


async def _succeeds(attempt: Callable[[], Awaitable[None]], within_s: float = 30.0) -> None:
    end = time.monotonic() + within_s
    while True:
        try:
            await attempt()
        except StoreError:
            assert time.monotonic() < end
            await asyncio.sleep(0.2)
        else:
            return


def test_a_stream_is_bounded_and_expires(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:

        async def fill() -> None:
            store = RedisStore(server.url, "test")
            for _ in range(3 * KEPT_ENTRIES):
                await store.append("one", b"x" * 10_000)
            await store.close()

        run(fill())
        key = "{lbproxy:test}:stream:one"
        assert KEPT_ENTRIES <= server.call("XLEN", key) < KEPT_ENTRIES + 200
        assert 0 < server.call("TTL", key) <= 60
        assert server.call("MEMORY", "USAGE", key) < 6_000_000


def test_a_server_that_never_responds_is_an_error_in_time(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:

        async def calls() -> None:
            store = RedisStore(server.url, "test")
            await store.beat("one", b"1")
            server.pause()
            for call in (store.beat("one", b"1"), store.read({"one": b"0-0"}), store.append("one", b"x")):
                with pytest.raises(StoreError, match=r"no response|Timeout"):
                    await call
            await store.close()

        run(calls())
        server.resume()


@pytest.mark.parametrize(
    "response", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"+OK\r\n" * 50, b"*3\r\n:1\r\n$-1\r\n+x\r\n" * 9]
)
def test_what_is_no_redis_is_an_error(response: bytes) -> None:
    async def calls() -> None:
        async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(100)
            writer.write(response)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(respond, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        store = RedisStore(f"redis://127.0.0.1:{port}", "test")
        for call in (
            store.beat("one", b"1"),
            store.read({"one": b"0-0"}),
            store.append("one", b"x"),
            store.last("one"),
            store.receive("one"),
        ):
            with pytest.raises(StoreError):
                await call
        await store.close()
        server.close()

    run(calls())


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]

    async def call() -> None:
        store = RedisStore(f"redis://127.0.0.1:{port}", "test")
        with pytest.raises(StoreError, match="refused"):
            await store.beat("one", b"1")
        await store.close()

    run(call())


@pytest.mark.parametrize(
    "url", ["redis://h:1/0?no_such_option=1", "redis://h:1/0?socket_timeout=x", "redis+sentinel://h/s?no_such_option=1"]
)
def test_wrong_options_are_told_at_once(url: str) -> None:
    with pytest.raises(StoreError):
        RedisStore(url, "test")


def test_what_others_wrote_among_the_ids_is_none(tmp_path: Path) -> None:
    """Whoever can write to the server chooses neither the size nor the form of what we keep by id."""

    async def body(store: RedisStore) -> None:
        try:
            await store.beat("a-1", b"{}")
            alive, wanting = await store.beat("a-1", b"{}")
            assert (sorted(alive), wanting) == (["a-1"], [])
        finally:
            await store.close()

    with redis_server(tmp_path) as server:
        store = RedisStore(server.url, "default")
        for name in (b"x" * 100_000, b"\xff\xfe", b"a b", b"", b"a\n"):
            server.call("SADD", "{lbproxy:default}:replicas", name)
            server.call("SET", b"{lbproxy:default}:alive:" + name, b"{}")
            server.call("RPUSH", "{lbproxy:default}:wants:a-1", name)
        run(body(store))
