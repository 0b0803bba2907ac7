# SPDX-License-Identifier: Apache-2.0
"""A proxy that runs on its core: started, made ready, paused and resumed, measured, stopped.

A proxy is one session of processes: launchers, masters, workers and threads all count. CPU is read from the processes'
CPU clocks (nanoseconds, threads that have ended included), memory is the sum of their VmRSS. Pausing is SIGSTOP for all
of them, so that scraping and probing of one proxy never falls into another one's window.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

CORES = sorted(os.sched_getaffinity(0))
PROXY_CORE, LOAD_CORE = str(CORES[0]), str(CORES[-1])
"""The same one if there is but one: then only CPU per request means something."""
READY_S = 60.0
"""How long a proxy may take until it relays a request."""
WARM_REQUESTS = 100
QUIET_S = 0.1
"""A proxy that uses less than a tenth of this much CPU in this time is at rest."""


class StartError(Exception):
    """A proxy did not get ready; the text says what it wrote last."""


def cpu_s(pids: Sequence[int]) -> float:
    """User and system time of processes so far. One that has ended counts as 0."""
    used = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            # The process-wide CPU clock of another process, as clock_getcpuclockid(3) computes it.
            used += time.clock_gettime((~pid << 3) | 2)
    return used


def rss_bytes(pids: Sequence[int]) -> int:
    """Resident memory of processes; pages that they share count for each."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def busy_s() -> float:
    """Time that all cores together have worked so far, for whomever, in ticks of 10 ms."""
    user, nice, system, _, _, *others = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


def session(leader: int) -> list[int]:
    """The processes of a session that live."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[3]) == leader:
                pids.append(int(stat.parent.name))
    return pids


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Usage:
    """What a fixed set of processes uses: cheap enough to be asked within a window."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = pids

    def cpu_s(self) -> float:
        """User and system time so far."""
        return cpu_s(self.pids)

    def rss_bytes(self) -> int:
        """Resident memory now."""
        return rss_bytes(self.pids)


class Proxy:
    """One running proxy. Ended with the `with` block."""

    def __init__(
        self, command: Sequence[str], port: int, folder: Path, *, cwd: Path | None = None, core: str = PROXY_CORE
    ) -> None:
        self.port = port
        self.log = folder / "output.log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                ["taskset", "-c", core, *command],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                start_new_session=True,
            )

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None) -> None:
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(3)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def warm_up(self, body: bytes) -> None:
        """Wait until it relays, then send it WARM_REQUESTS. Raises StartError."""
        end = time.monotonic() + READY_S
        while not self._relays(body, 1):
            if self.process.poll() is not None or time.monotonic() > end:
                raise StartError(self.last_words() or "it ended without a word")
            time.sleep(0.1)
        if not self._relays(body, WARM_REQUESTS):
            raise StartError(f"a request failed: {self.last_words()}")

    def last_words(self) -> str:
        """The end of its output, on one line."""
        return " ".join(self.output()[-600:].split())

    def output(self) -> str:
        """All that it wrote."""
        return self.log.read_bytes().decode("utf-8", "replace")

    def usage(self) -> Usage:
        """Of all its processes of now."""
        return Usage(session(self.process.pid))

    def pause(self) -> None:
        """Stop it, once it has digested what the load left behind."""
        usage = self.usage()
        for _ in range(30):
            before = usage.cpu_s()
            time.sleep(QUIET_S)
            if usage.cpu_s() - before < QUIET_S / 10:
                break
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run again."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _relays(self, body: bytes, requests: int) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            for _ in range(requests):
                connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
                answer = connection.getresponse()
                answer.read()
                if answer.status != 200:
                    return False
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        return True
