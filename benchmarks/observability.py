# SPDX-License-Identifier: Apache-2.0
"""What it costs to be seen: lbproxy's CPU with all of its observability on, beside the same with it off.

    python -m benchmarks.observability              nine minutes; needs a C compiler and two cores
    python -m benchmarks.observability --write      and into RESULTS.md
    python -m benchmarks.observability --parts      what each part of it costs alone, for a request

Processes of the installed product before three model servers, loaded by the programs of benchmarks.overhead, with it on
and off in turns. Each window has a process of its own: two that are started alike differ by up to a twentieth for as
long as they live, which is half of what is to be measured. Off: no access log, no remembered decisions,
nobody who asks. On: an access log into a file, 1,000 remembered requests with their decisions, /metrics read as often
as docker-compose.yml has it, and a viewer of the dashboard's events. The Prometheus counters themselves cannot be
switched off, so they are in both. CPU is that of the process by /proc; each round gives a ratio of on to off.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import math
import os
import statistics
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from benchmarks.overhead.__main__ import PAGE, prepare
from benchmarks.overhead.load import BENCH, WARM, WORKLOADS, Figures, LoadError, Workload, run_load, server
from benchmarks.overhead.plan import machine, python_of, say
from benchmarks.overhead.process import Proxy, StartError, free_port
from benchmarks.overhead.report import table
from benchmarks.overhead.subjects import lbproxy
from lbproxy import __version__

SERVERS = 3
ROUNDS = {"1k": (21, 2.0), "sse": (9, 3.0)}
"""And seconds of a window."""
WARM_S = 1.0
"""Before it: caches and tables get the size that they keep."""
SCRAPE_S = 5.0
"""As the Prometheus of docker-compose.yml does."""
BEGIN, END = "<!-- generated: observability -->", "<!-- end -->"
COMMON = "listen: 127.0.0.1:$port\nadmin: 127.0.0.1:$spare\nendpoints: [ENDPOINTS]\n"
QUIET = "log: {access: false, level: error}\n"
LOGGED = "log: {access: true, level: info}\n"
FORGETTING = "explain: {requests: 0}\n"
REMEMBERING = "explain: {requests: 1000}\n"
OFF, ON = "off", "on"


class Observed(NamedTuple):
    """What is on."""

    settings: str
    scraped: bool = False
    viewed: bool = False


SIDES = {OFF: Observed(QUIET + FORGETTING), ON: Observed(LOGGED + REMEMBERING, scraped=True, viewed=True)}
PARTS = {
    "access log": Observed(LOGGED + FORGETTING),
    "decisions": Observed(QUIET + REMEMBERING),
    "/metrics": Observed(QUIET + FORGETTING, scraped=True),
    "viewer": Observed(QUIET + FORGETTING, viewed=True),
}
CONFIDENCE = 0.95


class Side:
    """One kind of lbproxy, and what it used per request or event in each round."""

    def __init__(self, observed: Observed) -> None:
        self.observed = observed
        self.micros: list[float] = []
        self.rates: list[float] = []

    def measure(self, load: Workload, proxy: Proxy, admin: int, seconds: float, server_pid: int) -> None:
        """One window of a process that is warm. Raises LoadError."""
        with watching(admin, self.observed) as seen:
            figures = run_load(load, proxy.port, seconds, server_pid=server_pid, proxy=proxy.usage())
        if [count > 0 for count in seen] != [*self.observed[1:]]:
            raise LoadError(f"pages, and bytes of events, that were read: {seen}")
        count = counted(load, figures)
        if figures["errors"] or not count:
            raise LoadError(f"{figures['errors']} errors: {figures['complaints']}")
        assert figures["proxy_cpu_s"] is not None
        self.micros.append(figures["proxy_cpu_s"] / count * 1e6)
        self.rates.append(count / figures["seconds"])


def counted(load: Workload, figures: Figures) -> int:
    return figures["events"] if load.events else figures["requests"]


@contextmanager
def watching(admin: int, observed: Observed) -> Iterator[list[int]]:
    """Whoever is to read reads /metrics each SCRAPE_S, the dashboard's events; how many pages, and bytes of events."""
    done = threading.Event()
    seen = [0, 0]

    def scrape() -> None:
        while not done.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", admin, timeout=10)
            connection.request("GET", "/metrics")
            seen[0] += connection.getresponse().read().startswith(b"# HELP")
            connection.close()
            done.wait(SCRAPE_S)

    def view() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", admin, timeout=10)
        connection.request("GET", "/admin/events")
        answer = connection.getresponse()
        while not done.is_set():
            seen[1] += len(answer.read1(1 << 16))
        connection.close()

    readers = [one for one, wanted in ((scrape, observed.scraped), (view, observed.viewed)) if wanted]
    threads = [threading.Thread(target=one, daemon=True) for one in readers]
    for one in threads:
        one.start()
    try:
        yield seen
    finally:
        done.set()
        for one in threads:
            one.join(10.0)


def run(load: Workload, wanted: Mapping[str, Observed], rounds: int, seconds: float) -> tuple[dict[str, Side], str]:
    """Each side after its rounds, and which Python they ran on. Raises LoadError and StartError."""
    sides = {name: Side(observed) for name, observed in wanted.items()}
    python = ""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=BENCH)))
        servers = [stack.enter_context(server()) for _ in range(SERVERS)]
        urls = ", ".join(f"'http://127.0.0.1:{port}'" for port, _ in servers)
        folders = itertools.count()
        for number in range(rounds):
            for name in list(sides)[:: -1 if number % 2 else 1]:
                side, admin = sides[name], free_port()
                settings = COMMON.replace("ENDPOINTS", urls).replace("$spare", str(admin)) + side.observed.settings
                subject = replace(lbproxy(name, None), files={"cfg.yaml": settings})
                with subject.start(servers[0][0], folder / str(next(folders))) as proxy:
                    proxy.warm_up(WARM.body())
                    python = python_of(proxy.usage().pids)
                    run_load(load, proxy.port, WARM_S, server_pid=servers[0][1], proxy=proxy.usage())
                    side.measure(load, proxy, admin, seconds, servers[0][1])
                say(f"{load.key} {number + 1}/{rounds} {name}: {side.micros[-1]:.1f} us")
    return sides, python


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median lies with a confidence of 95 % or more, by the sign test; all of the range if they are few."""
    ordered, count = sorted(values), len(values)
    below, cut = 0.0, 0
    for k in range(count // 2):
        below += math.comb(count, k) / 2**count
        if below > (1.0 - CONFIDENCE) / 2:
            break
        cut = k
    return ordered[cut], ordered[count - 1 - cut]


def row(title: str, off: Side, on: Side) -> list[str]:
    ratios = [after / before for before, after in zip(off.micros, on.micros, strict=True)]
    low, high = interval(ratios)
    return [
        title,
        f"{statistics.median(off.micros):.1f}",
        f"{statistics.median(on.micros):.1f}",
        f"{statistics.median(ratios):.3f}",
        f"{low:.3f} to {high:.3f}",
        str(len(ratios)),
        f"{statistics.median(on.rates):,.0f}",
    ]


def section(rows: Sequence[Sequence[str]], *, command: str, python: str, busy: Sequence[float]) -> str:
    """For RESULTS.md."""
    average = ", ".join(f"{value:.1f}" for value in busy)
    heads = ["", "off, us", "on, us", "on / off", "95% interval", "rounds", "rate when on, 1/s"]
    return (
        f"## Observability\n\n`{command}`, {datetime.now(UTC):%Y-%m-%d}. {machine()}; load average before the run "
        f"{average}.\nlbproxy {__version__}, {python}, {SERVERS} endpoints. Medians of rounds\n"
        "([what is on and off](../docs/benchmarks.md#parts)).\n\n"
        f"{table(heads, rows)}\n"
    )


def insert(page: str, text: str) -> str:
    """The page with the section between its marks; at its end if it has none."""
    before, begin, rest = page.partition(BEGIN)
    after = rest.partition(END)[2] if begin else "\n"
    return f"{before if begin else before.rstrip() + chr(10) * 2}{BEGIN}\n{text}{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observability", description=__doc__)
    parser.add_argument("--rounds", type=int, help="in place of each workload's own")
    parser.add_argument("--seconds", type=float, help="of a window, in place of each workload's own")
    parser.add_argument("--parts", action="store_true", help="each alone as well, for requests; not for RESULTS.md")
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    args = parser.parse_args()
    busy, rows, python = os.getloadavg(), [], ""
    try:
        prepare()
        for load in (one for one in WORKLOADS if one.key in ROUNDS):
            if args.parts and load.events:
                continue
            rounds, seconds = ROUNDS[load.key]
            wanted = SIDES | PARTS if args.parts else SIDES
            sides, python = run(load, wanted, args.rounds or rounds, args.seconds or seconds)
            off = sides.pop(OFF)
            rows += [row(f"{load.title}: {name}" if args.parts else load.title, off, on) for name, on in sides.items()]
    except (LoadError, StartError) as e:
        raise SystemExit(str(e)) from e
    text = section(rows, command="python -m benchmarks.observability", python=python, busy=busy)
    print(text)
    if args.write and not args.parts:
        PAGE.write_text(insert(PAGE.read_text("utf-8"), text), "utf-8")


if __name__ == "__main__":
    main()
