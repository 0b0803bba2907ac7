# SPDX-License-Identifier: Apache-2.0
"""Real Redis and Valkey servers, where they are installed (make test-tools): started, paused, broken, killed."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import AuthenticationError, RedisError

from tests.support.ports import free_port

PROGRAMS = ("redis-server", "valkey-server")
INSTALLED = [one for one in PROGRAMS if shutil.which(one)]
needs_redis = pytest.mark.skipif(not INSTALLED, reason="neither redis-server nor valkey-server: make test-tools")


def use(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run one of `PROGRAMS` where a test names none; a test is skipped if it is not installed."""
    if program not in INSTALLED:
        pytest.skip(f"NOT TESTED here: no {program} on this machine (make test-tools)")
    monkeypatch.setattr(f"{__name__}.INSTALLED", [program])


class RedisServer:
    """One server that keeps nothing on disk."""

    def __init__(self, folder: Path, *options: str, program: str = "", port: int | None = None) -> None:
        self.folder = folder
        self.port = port or free_port()
        self._program = program or INSTALLED[0]
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self, **more: Any) -> Redis:
        return Redis(port=self.port, socket_timeout=5.0, **more)

    def call(self, *words: object) -> Any:
        """One command; its response."""
        with self.client() as client:
            return client.execute_command(*words)

    def start(self) -> None:
        """Start it, and wait until it responds."""
        always = ["--save", "", "--appendonly", "no", "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command = [self._program, "--port", str(self.port), *always, *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 30.0
        while time.monotonic() < end:
            try:
                self.call("PING")
            except AuthenticationError:
                return
            except RedisError:
                time.sleep(0.02)
            else:
                return
        self.kill()
        raise AssertionError(f"{self._program} does not respond")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """It accepts and never responds."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def redis_server(folder: Path, *options: str, program: str = "") -> Iterator[RedisServer]:
    """A server for the duration of the block."""
    server = RedisServer(folder, *options, program=program)
    try:
        yield server
    finally:
        server.kill()
