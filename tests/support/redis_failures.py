# SPDX-License-Identifier: Apache-2.0
"""How a Redis server fails, and how that ends."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.redis_server import RedisServer


def kill(server: RedisServer) -> None:
    server.kill()


def full(server: RedisServer) -> None:
    server.call("CONFIG", "SET", "maxmemory-policy", "noeviction")
    server.call("CONFIG", "SET", "maxmemory", "1")


def enough(server: RedisServer) -> None:
    server.call("CONFIG", "SET", "maxmemory", "0")


def read_only(server: RedisServer) -> None:
    server.call("REPLICAOF", "127.0.0.1", "1")


def writable(server: RedisServer) -> None:
    server.call("REPLICAOF", "NO", "ONE")


def without_the_word(server: RedisServer) -> None:
    with server.client() as client:
        client.execute_command("CONFIG", "SET", "requirepass", "changed")
        client.execute_command("AUTH", "changed")
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


def with_the_word(server: RedisServer) -> None:
    with server.client(password="changed") as client:
        client.execute_command("CONFIG", "SET", "requirepass", "")


def forbidden(server: RedisServer) -> None:
    server.call("ACL", "SETUSER", "default", "-xadd")


def allowed(server: RedisServer) -> None:
    server.call("ACL", "SETUSER", "default", "+xadd")


FAILURES: dict[str, tuple[Callable[[RedisServer], None], Callable[[RedisServer], None]]] = {
    "gone, and back empty": (kill, RedisServer.start),
    "never responds": (RedisServer.pause, RedisServer.resume),
    "full": (full, enough),
    "read-only": (read_only, writable),
    "another password": (without_the_word, with_the_word),
    "a command is forbidden": (forbidden, allowed),
}
