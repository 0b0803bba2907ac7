# SPDX-License-Identifier: Apache-2.0
"""lbproxy under systemd: what it tells, when. systemd itself is a socket here."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.process import Process, mock


class Systemd:
    """Hears what its service tells, in order; signs of life apart."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(30.0)
        self.beats = 0

    def hears(self, key: str) -> str:
        """The next message, which must be about `key`: its value."""
        while True:
            text = self._socket.recv(4096).decode()
            if text == "WATCHDOG=1":
                self.beats += 1
                continue
            name, _, value = text.partition("=")
            assert name == key, text
            return value

    def hears_life(self) -> None:
        while self._socket.recv(4096) != b"WATCHDOG=1":
            pass

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    one = Systemd(tmp_path / "notify")
    yield one
    one.close()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with mock("--speed", "20") as (_, url):
        yield url


def test_a_service_says_what_it_does(systemd: Systemd, server: str, tmp_path: Path) -> None:
    """Ready once it accepts, not ready while it reloads, good or bad; alive; and at the end that it stops."""
    config = tmp_path / "cfg.yaml"
    config.write_text(f"listen: 127.0.0.1:0\nadmin: null\nendpoints: ['{server}']\ndrain: {{lame_duck: 0s}}\n")
    env = {"NOTIFY_SOCKET": str(systemd.path), "WATCHDOG_USEC": "300000"}
    with Process("--config", str(config), env=env) as process:
        assert systemd.hears("READY") == "1\nSTATUS=1 endpoints by adaptive"
        process.wait_for("listens on")
        config.write_text(config.read_text() + "routing: {policy: least-request}\n")
        os.kill(process.process.pid, signal.SIGHUP)
        assert re.fullmatch(r"1\nMONOTONIC_USEC=\d+", systemd.hears("RELOADING"))
        assert systemd.hears("READY") == "1\nSTATUS=1 endpoints by least-request"
        config.write_text("nonsense")
        os.kill(process.process.pid, signal.SIGHUP)
        systemd.hears("RELOADING")
        assert systemd.hears("READY") == "1\nSTATUS=1 endpoints by least-request", "the old ones hold"
        systemd.hears_life()
        systemd.hears_life()
        assert process.stop() == 0
        assert re.fullmatch(r"1\nSTATUS=.*running requests.*", systemd.hears("STOPPING"))


def test_a_successor_is_named_as_the_service(systemd: Systemd, server: str, tmp_path: Path) -> None:
    """So that SIGUSR2 is no end of the service, and later signals reach the right process."""
    config = tmp_path / "cfg.yaml"
    config.write_text(f"listen: 127.0.0.1:0\nadmin: null\nendpoints: ['{server}']\ndrain: {{lame_duck: 0s}}\n")
    with Process("--config", str(config), env={"NOTIFY_SOCKET": str(systemd.path)}) as process:
        systemd.hears("READY")
        os.kill(process.process.pid, signal.SIGUSR2)
        assert systemd.hears("READY") == "1\nSTATUS=1 endpoints by adaptive"
        successor = int(systemd.hears("MAINPID"))
        assert successor != process.process.pid
        assert process.process.wait(30) == 0
        os.kill(successor, signal.SIGTERM)
        systemd.hears("STOPPING")
