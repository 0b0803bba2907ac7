# SPDX-License-Identifier: Apache-2.0
"""The server and the user of docs/replicas.md: its permissions are enough, and none of them is too many."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lbproxy.extras.redis_store import RedisStore
from lbproxy.extras.store import StoreError
from tests.extras.test_redis_store import exchange
from tests.support.aio import run, until
from tests.support.docs import DOCS, blocks
from tests.support.redis_server import RedisServer, needs_redis, redis_server

pytestmark = needs_redis
(SERVER,) = (block.text for block in blocks(DOCS / "replicas.md") if "maxmemory-policy" in block.text)
RULES = re.findall(r"^ACL SETUSER (lbproxy .*)$", (DOCS / "replicas.md").read_text(), re.MULTILINE)


def permit(server: RedisServer, without: str = "") -> str:
    """Make the user, but for one of its permissions; returns the URL to use it by."""
    (rules,) = RULES
    words = [word for word in rules.replace("{lbproxy:default}:*", "{lbproxy:test*").split() if word != f"+{without}"]
    server.call("ACL", "SETUSER", *words)
    password = next(word[1:] for word in words if word.startswith(">"))
    return server.url.replace("//", f"//lbproxy:{password}@")


async def dial(url: str) -> None:
    store = RedisStore(url, "test")
    try:
        assert await store.ping() == {}
    finally:
        await store.close()


def test_they_are_enough_with_the_options_of_the_page(tmp_path: Path) -> None:
    options = [word.strip('"') for line in SERVER.splitlines() for word in f"--{line}".split()]
    with redis_server(tmp_path, *options) as server:
        assert server.call("CONFIG", "GET", "maxmemory") == {b"maxmemory": b"%d" % (256 << 20)}
        url = permit(server)
        run(dial(url))
        run(exchange(url))
        run(exchange(url.replace("/0", "/1")))
        assert server.call("ACL", "LOG") == []


def test_check_misses_each_of_them(tmp_path: Path) -> None:
    """`ping` tries every command. SELECT is only sent for another database than 0."""
    commands = re.findall(r" \+(\S+)", RULES[0])
    assert len(commands) > 10
    with redis_server(tmp_path) as server:
        for command in commands:
            server.call("ACL", "DELUSER", "lbproxy")
            url = permit(server, without=command)
            if command == "select":
                url = url.replace("/0", "/1")
            with pytest.raises(StoreError, match=rf"lacks a permission: .*'{re.escape(command)}'"):
                run(dial(url))


def test_a_cluster_needs_those_of_the_page_in_addition(tmp_path: Path) -> None:
    (more,) = re.findall(r"A cluster needs `([^`]+)` in addition", (DOCS / "replicas.md").read_text())
    with redis_server(tmp_path, "--cluster-enabled", "yes") as server:
        server.call("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        run(until(lambda: "cluster_state:ok" in str(server.call("CLUSTER", "INFO")), "the cluster is up"))
        url = permit(server).replace("redis://", "redis+cluster://").removesuffix("/0")
        with pytest.raises(StoreError):
            run(exchange(url))
        server.call("ACL", "SETUSER", "lbproxy", *more.split())
        run(exchange(url))
        run(dial(url))


def test_other_keys_are_out_of_reach(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        url = permit(server)

        async def elsewhere() -> None:
            store = RedisStore(url, "another-pool")
            try:
                with pytest.raises(StoreError, match=r"lacks a permission: .*keys"):
                    await store.ping()
            finally:
                await store.close()

        run(elsewhere())


def test_a_cluster_without_a_node_is_an_error_of_the_store() -> None:
    """redis-py's own for that is none of its RedisErrors."""

    async def call() -> None:
        store = RedisStore("redis+cluster://127.0.0.1:1", "test")
        try:
            with pytest.raises(StoreError, match="cannot be connected"):
                await store.ping()
        finally:
            await store.close()

    run(call())
