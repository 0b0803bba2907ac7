# SPDX-License-Identifier: Apache-2.0
"""One run: fresh servers, one router, one replay; and whether it can be believed.

The router has core 0 to itself; servers and client share core 1. Before the replay the router gets small requests until
each server has answered one, so that nobody is measured while it still looks for its servers.

A run is believed if neither servers nor client were late: the 99th percentile of lateness within `MAX_LAG_S` for each.
The router's own time is not limited (that is what is measured), but how long its threads waited for a core is written
down. Runs may go on side by side (`runs.py`), every second one with the cores swapped.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict

import orjson

from benchmarks.http_routing import several
from benchmarks.http_routing.apis import APIS, Api, prompt_of, written
from benchmarks.http_routing.cells import CELLS, MODEL, Cell
from benchmarks.http_routing.client import Answer, Counters, Request, counters
from benchmarks.http_routing.routers import local, routers
from benchmarks.overhead.load import BENCH, ROOT
from benchmarks.overhead.process import LOAD_CORE, PROXY_CORE, Proxy, StartError, Usage, busy_s
from lbproxy.sim.workloads.prompts import Piece
from lbproxy.sim.workloads.workload import Job

PACKAGE = "benchmarks.http_routing"
MAX_LAG_S = 0.005
READY_S = 60.0
"""How long a router may take until it has sent each server a request."""
CLIENT_S = 1800.0
"""More than any replay takes, drained phases included."""


@dataclass(frozen=True, slots=True)
class Task:
    """A run to be done."""

    cell: str
    seed: int
    router: str


class Trial(TypedDict):
    """A run that was done."""

    cell: str
    seed: int
    router: str
    answer: Answer
    router_cpu_s: float
    router_waited_s: float
    """Its threads, all together: ready to run, but not running."""
    servers_cpu_s: float
    others_cpu_s: float
    """What else ran on the machine."""
    shares: list[int]
    """Requests of each of several lbproxies; of one, all; of another router, none."""
    seconds: float
    """Of the replay."""


class TrialError(Exception):
    """A run that gave no figures; the text says why."""


def lateness(answer: Answer, most_s: float = MAX_LAG_S) -> str | None:
    """Who was later than this in a replay; None: nobody."""
    sides = (("servers", answer["server_lag_s"]), ("client", answer["client_lag_s"]))
    found = [f"{who} {lag_s * 1000:.1f} ms late" for who, lag_s in sides if lag_s > most_s]
    return ", ".join(found) or None


def run(task: Task, *, short: bool, trace: str | None, swapped: bool = False) -> Trial:
    """Do it once. `swapped`: the router has the core of the servers and the client, and they have its. Raises
    TrialError, StartError.
    """
    BENCH.mkdir(exist_ok=True)
    core, load_core = (LOAD_CORE, PROXY_CORE) if swapped else (PROXY_CORE, LOAD_CORE)
    fleet = servers(CELLS[task.cell].servers, task.seed, load_core)
    with tempfile.TemporaryDirectory(dir=BENCH) as name, fleet as running:
        ports, process = running
        urls = local(ports)
        (router,) = [one for one in routers(urls) if one.name == task.router]
        with router.subject.start(0, Path(name) / "router", core) as proxy:
            get_ready(proxy, urls)
            _speaks(CELLS[task.cell], proxy.port, ports[0])
            several.wait_until_joined(several.admins(proxy.output()))
            request = Request(cell=task.cell, seed=task.seed, short=short, trace=trace, port=proxy.port, servers=urls)
            return _replay(task, request, proxy, process, load_core)


def _replay(task: Task, request: Request, proxy: Proxy, servers: subprocess.Popen[str], core: str) -> Trial:
    used, others = proxy.usage(), Usage([servers.pid])
    begin, busy = time.monotonic(), busy_s()
    waited, cpu, servers_cpu = waited_s(used.pids), used.cpu_s(), others.cpu_s()
    admins = several.admins(proxy.output())
    ended = several.ended(admins)
    answer = ask_client(f"{PACKAGE}.{'client' if CELLS[task.cell].api is None else 'sessions'}", request, core)
    if proxy.process.poll() is not None:
        raise TrialError(f"the router ended: {proxy.last_words()}")
    router_cpu, servers_cpu = used.cpu_s() - cpu, others.cpu_s() - servers_cpu
    return Trial(
        cell=task.cell,
        seed=task.seed,
        router=task.router,
        answer=answer,
        router_cpu_s=router_cpu,
        router_waited_s=waited_s(used.pids) - waited,
        servers_cpu_s=servers_cpu,
        others_cpu_s=busy_s() - busy - router_cpu - servers_cpu - answer["client_cpu_s"],
        shares=[after - before for before, after in zip(ended, several.ended(admins), strict=True)],
        seconds=time.monotonic() - begin,
    )


def ask_client(module: str, request: Request, core: str = LOAD_CORE) -> Answer:
    """Run a client's process to its end. Raises TrialError."""
    with subprocess.Popen(_python(core, module), stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            out, _ = process.communicate(orjson.dumps(request), timeout=CLIENT_S)
        except subprocess.TimeoutExpired:
            raise TrialError(f"the replay took more than {CLIENT_S:.0f} s") from None
        finally:
            process.kill()
    if process.returncode:
        raise TrialError("the client failed: see above")
    answer: Answer = orjson.loads(out)
    return answer


def waited_s(pids: Sequence[int]) -> float:
    """How long the threads of processes have been ready to run without running."""
    waited = 0
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                waited += int(path.read_text().split()[1])
    return waited / 1e9


# Processes


def _python(core: str, module: str, *arguments: str) -> list[str]:
    return ["taskset", "-c", core, sys.executable, "-m", module, *arguments]


@contextmanager
def servers(count: int, seed: int, core: str = LOAD_CORE) -> Iterator[tuple[list[int], subprocess.Popen[str]]]:
    """Simulated servers: their ports and their process. Raises TrialError."""
    command = _python(core, f"{PACKAGE}.servers", str(count), str(seed))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            ports = [int(word) for word in process.stdout.readline().split()]
            if len(ports) != count:
                raise TrialError("the servers did not start: see above")
            yield ports, process
        finally:
            process.kill()


def get_ready(proxy: Proxy, urls: Sequence[str], model: str = MODEL) -> None:
    """Wait until the router has sent each server a request. Raises StartError."""
    end = time.monotonic() + READY_S
    before = [served(url)["finished"] for url in urls]
    numbers = itertools.count()
    answered = 0
    # Several at a time: some policies send whatever comes to an idle fleet to the first server.
    crowd = 4 * len(urls)
    with ThreadPoolExecutor(crowd) as pool:
        while any(served(url)["finished"] <= since for url, since in zip(urls, before, strict=True)):
            answered += sum(pool.map(partial(_relays, proxy.port, model), itertools.islice(numbers, crowd)))
            if proxy.process.poll() is not None or time.monotonic() > end:
                if answered:
                    raise StartError(f"after {answered} requests some of the servers have had none")
                raise StartError(proxy.last_words() or "it ended without a word")


def _speaks(cell: Cell, router: int, server: int) -> None:
    """Raise TrialError if the router, or a server itself, does not answer the API of a cell of coding agents."""
    if cell.api is None:
        return
    api = APIS[cell.api]
    for who, port in (("a server", server), ("it", router)):
        said = refusal(api, port)
        if said is not None:
            raise TrialError(f"{who} answers {api.path} with {said}")


def refusal(api: Api, port: int) -> str | None:
    """What comes instead of a stream in this API; None: a stream, to its end."""
    job = Job("ask", (Piece(0, 64), Piece(1, 16), Piece(9, 16)), Piece(10, 4), session="ask", roles="TSU")
    asked = orjson.dumps(api.body(prompt_of(job, written), job, 0))
    headers = {"Content-Type": "application/json", "X-Session-ID": "ask"}
    headers |= dict(line.split(": ", 1) for line in api.headers.splitlines())
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        try:
            connection.request("POST", api.path, asked, headers)
            response = connection.getresponse()
            said = response.read()
        except (OSError, http.client.HTTPException) as error:
            return f"{type(error).__name__}: {error}"
    if response.status != 200:
        return f"{response.status}: {said[:100].decode(errors='replace')}"
    return None if any(end in said for end in api.ends) else "a stream without its end"


def served(url: str) -> Counters:
    """What a server counted."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        return counters(connection.getresponse().read())


def _relays(port: int, model: str, number: int) -> bool:
    """Ask it something that it has not been asked before, as another user; whether it answered."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    # The number comes first, so that a policy that goes by beginnings sees another one each time.
    text = f"{number} is a number. " * 20
    asked = orjson.dumps({"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4})
    headers = {"Content-Type": "application/json", "X-Session-ID": f"ready-{number}"}
    with contextlib.closing(connection):
        try:
            connection.request("POST", "/v1/chat/completions", asked, headers)
            answer = connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException):
            time.sleep(0.1)
            return False
        if answer.status != 200:
            time.sleep(0.1)
        return answer.status == 200
