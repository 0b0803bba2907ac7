# SPDX-License-Identifier: Apache-2.0
"""lbproxy as its users run it: the installed command, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import TracebackType

import httpx

from lbproxy.control.admin.made_token import read_token
from tests.support.workers import WORKERS, with_workers

LBPROXY = shlex.split(os.environ.get("LBPROXY_COMMAND", "")) or [sys.executable, "-m", "lbproxy"]
"""What is tested. LBPROXY_COMMAND names another: an installed release, or a build from another folder."""
LISTEN = "listen: {host: 127.0.0.1, port: 0, allowed_hosts: [lb]}"
"""The clients' listener of a process; `lb` is the Host of the requests that tests write themselves."""
TOKENS = tempfile.TemporaryDirectory(prefix="lbproxy-tokens-")
"""Where lbproxy puts the token for changes by its admin API."""


class Process:
    """A running command whose output is read as it comes. Ended with the `with` block, and its successors too."""

    _has_workers = False
    """In a run with LBPROXY_TEST_WORKERS."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        if WORKERS and arguments[:1] == ("--config",) and (config := Path(arguments[1])).exists():
            config.write_text(with_workers(config.read_text()))
        self._start([*LBPROXY, *arguments], env)

    def _start(self, command: list[str], env: dict[str, str] | None) -> None:
        if WORKERS and "--config" in command and (config := Path(command[command.index("--config") + 1])).exists():
            self._has_workers = re.search(r"^workers: *[2-9]", config.read_text(), re.MULTILINE) is not None
        environ = {**os.environ, "PYTHONUNBUFFERED": "1", "XDG_RUNTIME_DIR": TOKENS.name, **(env or {})}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environ)
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._raw = b""
        self.output = ""

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None) -> None:
        self.kill()
        for successor in re.findall(r"the new process accepts connections: process (\d+)", self.read()):
            _kill(int(successor), *children_of(int(successor)))
        assert self.process.stdout is not None
        self.process.stdout.close()

    def read(self) -> str:
        """All output so far."""
        assert self.process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.process.stdout.fileno(), 1 << 16):
                self._raw += data
        self.output = self._raw.decode("utf-8", "replace")
        return self.output

    def wait_for(self, pattern: str, *, within_s: float = 90.0) -> re.Match[str]:
        """Wait until the output matches; after `listens on`, until its workers accept connections too."""
        end = time.monotonic() + within_s
        if self._has_workers and "listens on" in pattern:
            self.wait_for(r"workers accept connections|\"stop\"", within_s=within_s)
        while (match := re.search(pattern, self.read())) is None:
            assert self.process.poll() is None, f"it ended:\n{self.read()}"
            assert time.monotonic() < end, f"no {pattern!r} in:\n{self.output}"
            time.sleep(0.02)
        return match

    def kill(self) -> None:
        """Kill it and its children, which would finish what runs: as when their machine dies."""
        children = children_of(self.process.pid)
        self.process.kill()
        self.process.wait()
        _kill(*children)

    def stop(self, number: int = signal.SIGTERM, *, within_s: float = 90.0) -> int:
        """Signal it and wait for its end; returns the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(within_s)
        self.read()
        return code

    def lines(self, event: str) -> list[dict[str, object]]:
        """The log lines of one kind."""
        # A batch of lines is more than a pipe holds: the last may have come in part.
        logged = [json.loads(line) for line in self.read().splitlines() if line[:1] + line[-1:] == "{}"]
        return [line for line in logged if line["event"] == event]


class Program(Process):
    """The same of any other program."""

    def __init__(self, command: list[str], env: dict[str, str] | None = None) -> None:
        self._start(command, env)


def _kill(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    """The processes that a process started: lbproxy's balancer process and workers, in the order of their start."""
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def changing(admin: str) -> dict[str, str]:
    """The header fields of a request that changes something, for the admin listener at this URL."""
    token_file = httpx.get(f"{admin}/admin/state").json()["token_file"]
    return {"content-type": "application/json", "authorization": f"Bearer {read_token(token_file)}"}


def exists(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@contextmanager
def mock(*arguments: str) -> Iterator[tuple[Process, str]]:
    """A simulated server on a free port, and its URL."""
    with Process("mock", "--port", "0", *arguments) as process:
        yield process, process.wait_for(r"at (http://\S+)")[1]


@contextmanager
def lbproxy(folder: Path, endpoints: list[str], more: str = "") -> Iterator[tuple[Process, str, str]]:
    """lbproxy on free ports; the URLs of its two listeners. It stops without a lame duck's time unless `more` says."""
    with Process("--config", _settings(folder, endpoints, more)) as process:
        yield process, *_listeners(process)


@asynccontextmanager
async def lbproxy_beside(folder: Path, endpoints: list[str], more: str = "") -> AsyncIterator[tuple[Process, str, str]]:
    """The same where the endpoints run in the test's own event loop: they respond to probes while lbproxy starts."""
    with Process("--config", _settings(folder, endpoints, more)) as process:
        yield process, *await asyncio.to_thread(_listeners, process)


def _settings(folder: Path, endpoints: list[str], more: str) -> str:
    """The path of a file of settings."""
    more = more if "drain:" in more else f"drain: {{lame_duck: 0s}}\n{more}"
    config = folder / "cfg.yaml"
    listing = "".join(f"  - {url}\n" for url in endpoints)
    config.write_text(f"{LISTEN}\nadmin: 127.0.0.1:0\n{more}\nendpoints:\n{listing}")
    return str(config)


def _listeners(process: Process) -> tuple[str, str]:
    match = process.wait_for(r"listens on (http://[\w.:]+), admin on (http://[\w.:]+)")
    return match[1], match[2]
