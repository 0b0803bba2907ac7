# SPDX-License-Identifier: Apache-2.0
"""What systemd hears. Real datagrams; the other side of them is in tests/e2e/test_supervised.py."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from lbproxy.net.listening.notify import Notifier


@pytest.fixture(params=["path", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """Its socket, and what it calls it."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@{tmp_path}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0{name[1:]}" if name.startswith("@") else name)
        sock.setblocking(False)
        yield sock, name


def test_each_state_is_one_message(systemd: tuple[socket.socket, str]) -> None:
    sock, name = systemd
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": name})
    notifier.ready("3 endpoints")
    assert sock.recv(1000) == b"READY=1\nSTATUS=3 endpoints"
    notifier.reloading()
    first, second = sock.recv(1000).split(b"\n")
    assert first == b"RELOADING=1"
    assert int(second.removeprefix(b"MONOTONIC_USEC=")) > 0
    notifier.stopping("0 requests run")
    assert sock.recv(1000) == b"STOPPING=1\nSTATUS=0 requests run"


def test_who_handed_over_is_silent(systemd: tuple[socket.socket, str]) -> None:
    """Its STOPPING would be taken for the successor's."""
    sock, name = systemd
    notifier = Notifier(name)
    notifier.succeeded_by(4711)
    assert sock.recv(1000) == b"MAINPID=4711"
    notifier.stopping("")
    with pytest.raises(BlockingIOError):
        sock.recv(1000)


def test_signs_of_life_come_as_often_as_the_watchdog_needs_them(systemd: tuple[socket.socket, str]) -> None:
    sock, name = systemd
    an_hour = Notifier.from_environment({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "3600000000"})
    for _ in range(100):
        an_hour.beat()
    assert sock.recv(1000) == b"WATCHDOG=1"
    with pytest.raises(BlockingIOError):
        sock.recv(1000)
    no_time = Notifier.from_environment({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "1"})
    for _ in range(3):
        no_time.beat()
        assert sock.recv(1000) == b"WATCHDOG=1"


@pytest.mark.parametrize("said", [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "soon"}])
def test_without_a_watchdog_nobody_is_told_of_life(systemd: tuple[socket.socket, str], said: dict[str, str]) -> None:
    sock, name = systemd
    Notifier.from_environment({"NOTIFY_SOCKET": name, **said}).beat()
    with pytest.raises(BlockingIOError):
        sock.recv(1000)


@pytest.mark.parametrize("name", ["", "relative/path", "/nowhere/at/all", "@nobody"])
def test_nobody_there_is_no_error(name: str) -> None:
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "1"})
    notifier.ready("")
    notifier.beat()


def test_a_supervisor_that_does_not_read_is_not_waited_for(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        notifier = Notifier(str(tmp_path / "notify"), watchdog_s=1e-6)
        for _ in range(10_000):  # more than fits in any queue
            notifier.beat()
