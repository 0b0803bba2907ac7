"""The permissions that docs/replicas.md gives lbproxy's user are enough, and none of them is too many."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lbproxy.extras.redis_store import RedisStore
from lbproxy.extras.store import StoreError
from tests.extras.test_redis_store import exchange
from tests.support.aio import run
from tests.support.docs import DOCS
from tests.support.redis_server import RedisServer, needs_redis, redis_server

pytestmark = needs_redis
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


def test_they_are_enough(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
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
