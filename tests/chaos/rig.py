# SPDX-License-Identifier: Apache-2.0
"""Rig R4: four simulated servers and the proxy, each a process; the load client is another (`load.py`).

The servers live as long as the test session and are given back as they were: faults ended, the dead replaced under
their old address. The proxy is each test's own, with the settings that it needs.

What every test asserts of lbproxy (ACC, LAG) is checked when its `with` block ends: nothing in flight or waiting, every
descriptor and task accounted for, no traceback, the event loop never late by more than its bound, and no turn of it
with more CPU time than that.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.chaos import peers
from tests.chaos.client import Plan
from tests.chaos.load import Load
from tests.chaos.verdict import FORM, PROXY, Case
from tests.support.docs import ROOT
from tests.support.ports import free_port
from tests.support.process import LBPROXY, Process, Program, children_of
from tests.support.workers import WORKERS, with_workers

SPEED = 0.4
"""Of the servers: a token each 20 ms, nearly."""
QUICK = """
health: {interval: 500ms, timeout: 1s, fall: 3, rise: 2, down_interval: 500ms}
timeouts: {connect: 1s, first_byte: 20s, stream_idle: 3s}
drain: {deadline: 3s}
log: {access: false}
"""
"""Settings in which detection takes seconds."""


HTTP = httpx.Client(verify=False, limits=httpx.Limits(max_keepalive_connections=0), timeout=20)
"""A connection for each question; `httpx.get` would also read the machine's certificates each time, for 20 ms."""


def wait(condition: Callable[[], object], what: str, within_s: float = 60.0) -> float:
    """Seconds until it came true."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, f"did not happen within {within_s} s: {what}"
        time.sleep(0.01)
    return time.monotonic() - began


def of_config(config: Path) -> list[int]:
    """The processes that were started with this file, but for those that ended and nobody asked how."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(config).encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


ILL = re.compile(r"break|garbage|refuse|freeze|slow-head|status code=5(?!03)")
"""Faults for which a server may be ejected. One that is slow, refuses for load, or whose metrics lie is well."""
LINGERS_S = 30.0
"""After its end a fault may still show: the breaker's window."""


class Server:
    """One simulated model server, on a port that stays its own."""

    def __init__(self, log: Path, *options: str) -> None:
        """`options`: further ones of `lbproxy mock`."""
        self.port = free_port()
        self.log = log
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._harms: list[list[float]] = []
        """Of each harm that was done to it: when it began, and ended, as the wall clock says."""
        self.launch()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        """What lbproxy calls it."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def launch(self) -> None:
        """Start it; `ready` waits."""
        self.close()
        command = [
            sys.executable,
            "-m",
            "lbproxy",
            "mock",
            "--port",
            str(self.port),
            "--model",
            "sim",
            "--speed",
            str(SPEED),
            *self._options,
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)

    def ready(self) -> None:
        wait(self._answers, f"the simulated server is there: {self.log}")
        self.healed()

    def _answers(self) -> bool:
        try:
            return HTTP.get(f"{self.url}/health", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        """As `kill -9` does."""
        assert self._process is not None
        self.harm()
        self._process.kill()
        self._process.wait()

    def harm(self) -> None:
        """From now until `restore`, `go_on` or `ready` it may be ejected."""
        self._harms.append([time.time(), float("inf")])

    def healed(self) -> None:
        """It is well again."""
        for harm in self._harms:
            harm[1] = min(harm[1], time.time())

    def was_well(self, at: float) -> bool:
        """At this time, and for so long that nothing of an earlier harm shows any more."""
        return not any(began <= at <= ended + LINGERS_S for began, ended in self._harms)

    def stop(self) -> None:
        """As `kill -STOP` does: the kernel still accepts connections."""
        self.harm()
        os.kill(self.pid, signal.SIGSTOP)
        self._stopped = True

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self._stopped = False
        self.healed()

    def fault(self, text: str) -> None:
        """Replace what it does wrong: see docs/simulator.md."""
        if ILL.match(text) and "on=metrics" not in text:
            self.harm()
        HTTP.post(f"{self.url}/faults", content=text, timeout=10).raise_for_status()

    def metric(self, name: str) -> float:
        """A sample of its own metrics page."""
        page = HTTP.get(f"{self.url}/metrics", timeout=10).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if re.match(rf"{name}(\{{| )", line))

    def running(self) -> float:
        """Requests that it computes."""
        return self.metric("vllm:num_requests_running")

    def restore(self) -> None:
        """As it was: alive, and nothing wrong."""
        if self._stopped:
            self.go_on()
        if self._process is None or self._process.poll() is not None:
            self.launch()
        self.ready()
        self.fault("")

    def close(self) -> None:
        if self._process is not None:
            self.kill()
            self._process = None


class Sight(NamedTuple):
    """One look of a ticker (`ticker.py`)."""

    at: float
    lag_s: float
    own_lag_s: float
    cpu_s: float
    """Of the busiest turn of its event loop."""
    tasks: int


class Proxy:
    """A running proxy; for peers only what all have."""

    def __init__(self, running: Process, url: str, admin: str = "", watch: Path | None = None) -> None:
        self.process = running
        self.url = url
        self.admin = admin
        self._watch = watch
        self._blocked = 0
        self.began = self.ready_at = time.monotonic()
        self.pid = running.process.pid

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def samples(self, name: str) -> dict[str, float]:
        """A family of lbproxy's metrics page, by labels."""
        page = HTTP.get(f"{self.admin}/metrics", timeout=20).text
        lines = [line.rsplit(" ", 1) for line in page.splitlines() if re.match(rf"{name}(\{{| )", line)]
        return {labels.removeprefix(name): float(value) for labels, value in lines}

    def total(self, name: str, having: str = "") -> float:
        """The sum of a family's samples whose labels have this text."""
        return sum(value for labels, value in self.samples(name).items() if having in labels)

    def in_flight(self) -> float:
        return self.total("lbproxy_endpoint_in_flight")

    def up(self, server: Server) -> bool:
        return self.total("lbproxy_endpoint_up", f'"{server.name}"') == 1

    def answered(self, server: Server) -> float:
        """Requests that this endpoint had last."""
        return self.total("lbproxy_endpoint_requests_total", f'"{server.name}"')

    @property
    def pids(self) -> list[int]:
        """Of all its processes: the supervisor, the balancer process, its standby and the workers; or the only one."""
        return [self.pid, *children_of(self.pid)]

    def _working_pids(self) -> list[int]:
        """Without the standby, which comes some time after the start and does nothing."""
        pids = self.pids
        if not self.admin or len(pids) == 1:
            return pids
        state = HTTP.get(f"{self.admin}/admin/state", timeout=20).json()
        working = {self.pid, state["pid"], *(one["pid"] for one in state["workers"])}
        return [pid for pid in pids if pid in working]

    def _watches(self) -> list[Path]:
        """What the tickers of its processes write to."""
        if self._watch is None:
            return []
        files = [self._watch, *(Path(f"{self._watch}.{pid}") for pid in children_of(self.pid))]
        return [one for one in files if one.exists()]

    def sights(self, since: float = 0.0) -> list[Sight]:
        """What the tickers saw."""
        return [one for file in self._watches() for one in _sights(file) if one.at >= since]

    def waited_s(self) -> float:
        """The longest time in which one of its processes merely waited for a CPU."""
        return max((one.lag_s - one.own_lag_s for one in self.sights(self.ready_at)), default=0.0)

    def tasks(self) -> int:
        """How many tasks there are in all event loops."""
        return sum(seen[-1].tasks for seen in map(_sights, self._watches()) if seen)

    def most_tasks(self) -> int:
        """How many there were at most in each."""
        return sum(max(one.tasks for one in seen) for seen in map(_sights, self._watches()) if seen)

    def block(self, seconds: float) -> None:
        """Block an event loop once, soon: each time another process's."""
        served = self._watches()[-WORKERS - 1 :]
        _order(Path(f"{served[self._blocked % len(served)]}.block"), seconds)
        self._blocked += 1

    def jump(self, seconds: float) -> None:
        """Set its wall clock forward, or back, soon."""
        orders = [Path(f"{one}.jump") for one in self._watches()]
        for order in orders:
            _order(order, seconds)
        wait(lambda: not any(order.exists() for order in orders), "its clock jumped")

    def fds(self) -> list[int]:
        """How many descriptors each process has."""
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in self._working_pids()]

    def unaccounted_fds(self) -> float:
        """Descriptors that are neither a client's connection nor one to an endpoint."""
        gauges = self.total("lbproxy_client_connections") + self.total("lbproxy_upstream_connections")
        return sum(self.fds()) - gauges

    def rss_mib(self) -> float:
        """Memory of all its processes."""
        pages = [Path(f"/proc/{pid}/status").read_text() for pid in self._working_pids()]
        return sum(int(re.findall(r"VmRSS:\s+(\d+)", page)[0]) for page in pages) / 1024

    def cpu_s(self) -> float:
        """CPU time used so far, of all its processes."""
        stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split() for pid in self._working_pids()]
        return sum(int(one[11]) + int(one[12]) for one in stats) / os.sysconf("SC_CLK_TCK")


def _order(file: Path, seconds: float) -> None:
    """Tell a ticker to do something. It never finds the file without its contents."""
    draft = file.with_suffix(f"{file.suffix}-draft")
    draft.write_text(str(seconds))
    draft.rename(file)


def _sights(file: Path) -> list[Sight]:
    lines = [line.split() for line in file.read_text().splitlines()]
    return [Sight(float(a), float(b), float(c), float(d), int(e)) for a, b, c, d, e in lines]


class Rig:
    """What a test holds."""

    def __init__(self, case: Case, servers: list[Server], folder: Path) -> None:
        self.case = case
        self.servers = servers
        self.folder = folder

    @property
    def config(self) -> Path:
        """The proxy's settings file."""
        return self.folder / "cfg.yaml"

    @contextmanager
    def proxy(
        self,
        settings: str = QUICK,
        *,
        endpoints: list[str] | None = None,
        lag_ms: float = 100.0,
        settle: bool = True,
        wrap: list[str] | None = None,
    ) -> Iterator[Proxy]:
        """The proxy before the servers, or before `endpoints`; every endpoint is up.

        `settle` False: the test ends the proxy itself. `wrap`: words before its command.
        """
        urls = endpoints or [server.url for server in self.servers]
        if PROXY != "lbproxy":
            with peers.PEERS[PROXY].start(urls, self.folder) as (running, url):
                yield Proxy(running, url)
            return
        with self._lbproxy(urls, settings, wrap or []) as proxy:
            self.case.waited_s = proxy.waited_s
            wait(lambda: proxy.total("lbproxy_endpoint_up") >= min(1, len(urls)), "endpoints are up")
            if endpoints is None:
                wait(lambda: proxy.total("lbproxy_endpoint_up") == len(urls), "all endpoints are up")
            baseline = proxy.unaccounted_fds()
            proxy.ready_at = time.monotonic()
            wait(lambda: not proxy.sights() or proxy.sights(proxy.ready_at), "the ticker looked at it")
            tasks = proxy.most_tasks()
            yield proxy
            if settle:
                self._settle(proxy, baseline, tasks, lag_ms)
            self._no_false_ejections(proxy.process.read())

    @contextmanager
    def _lbproxy(self, urls: list[str], settings: str, wrap: list[str]) -> Iterator[Proxy]:
        watch = self.folder / "watch"
        watched = "LBPROXY_COMMAND" not in os.environ
        path = os.pathsep.join(str(one) for one in (Path(__file__).parent / "children", ROOT))
        env = {"LBPROXY_CHAOS_WATCH": str(watch), "PYTHONPATH": path} if watched else {}
        command = [sys.executable, "-m", "tests.chaos.watched"] if watched else LBPROXY
        listing = "".join(f"  - {url}\n" for url in urls)
        config = self.config
        # Said, not 0: so that a restarted one is found again.
        listen, admin = (f"127.0.0.1:{free_port()}" for _ in range(2))
        settings += "\n" + os.environ.get("LBPROXY_CHAOS_SETTINGS", "")
        config.write_text(with_workers(f"listen: {listen}\nadmin: {admin}\n{settings}\nendpoints:\n{listing}"))
        with Program([*wrap, *command, "--config", str(config)], env=env) as running:
            match = running.wait_for(r"listens on (http://[\w.:]+), admin on (http://[\w.:]+)")
            try:
                yield Proxy(running, match[1], match[2], watch if watched else None)
            finally:
                for pid in of_config(config):
                    for one in (*children_of(pid), pid):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(one, signal.SIGKILL)

    def _settle(self, proxy: Proxy, baseline: float, tasks: int, lag_ms: float) -> None:
        """ACC and LAG."""
        case = self.case

        def left() -> dict[str, float]:
            families = ("endpoint_in_flight", "endpoint_awaiting_first_byte", "waiting_requests")
            return {name: value for name in families if (value := proxy.total(f"lbproxy_{name}"))}

        with contextlib.suppress(AssertionError):
            wait(lambda: not left(), "nothing is in flight")
        with contextlib.suppress(AssertionError):
            wait(lambda: abs(proxy.unaccounted_fds() - baseline) <= 2, "descriptors are back", 8)
        case.expect("left in flight", sum(left().values()), at_most=0)
        case.expect("descriptors too many", proxy.unaccounted_fds() - baseline, at_most=2)
        if proxy.sights():
            with contextlib.suppress(AssertionError):
                wait(lambda: proxy.tasks() - tasks <= 2, "tasks are back", 8)
            case.expect("tasks too many", max(0, proxy.tasks() - tasks), at_most=2)
            served = proxy.sights(proxy.ready_at)  # to start takes 17 ms in one go
            case.figure("lag, ms", round(1000 * max(sight.lag_s for sight in served), 1))
            own_ms = round(1000 * max(sight.own_lag_s for sight in served), 1)
            # What a hypervisor takes is in it: beside other tests only CPU time is bounded, and a core that is shared
            # with another thread needs more of that for the same work.
            seen = case.seen
            most_ms = seen.dearer * lag_ms + 1000 * seen.blocked_s
            case.expect("lag of our own, ms", own_ms, at_most=float("inf") if FORM == "short" else most_ms)
            busiest = max(sight.cpu_s for sight in served)
            most_ms = seen.dearer * (4 * lag_ms if FORM == "short" else lag_ms)
            case.expect("CPU of the busiest turn, ms", round(1000 * busiest, 1), at_most=most_ms)
        case.expect("internal errors", proxy.total("lbproxy_internal_errors_total"), at_most=0)
        self.no_traceback(proxy.process)

    def _no_false_ejections(self, log: str) -> None:
        """Of servers that were well, by what lbproxy logged."""
        found = []
        for line in log.splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and entry.get("to") in {"ejected", "down"}:
                    at = datetime.fromisoformat(entry["time"]).timestamp()
                    wells = [one for one in self.servers if one.name == entry["endpoint"] and one.was_well(at)]
                    found += [entry["message"]] * len(wells)
        print(*found, sep="\n")
        self.case.expect("false ejections", len(found), at_most=0)

    def no_traceback(self, running: Process) -> None:
        """Nothing in what it printed says that something was lost."""
        output = running.read()
        for text in ("Traceback", "never retrieved", "was never awaited"):
            self.case.expect(f"`{text}` in the log", output.count(text), at_most=0)
            if text in output:
                at = output.index(text)
                print(output[max(0, at - 500) : at + 3000])

    def load(self, proxy: Proxy, **plan: object) -> Load:
        """Start load on the proxy."""
        return Load(Plan(url=proxy.url, **plan), self.folder)  # type: ignore[arg-type]
