# SPDX-License-Identifier: Apache-2.0
"""A short form of the benchmark that tells whether lbproxy became slower: its CPU per request beside nginx's.

    .venv/bin/python -m benchmarks.overhead.guard              # measures, and compares with guard.json
    .venv/bin/python -m benchmarks.overhead.guard --record     # measures longer, and writes guard.json

Both in build/compiled: what is recorded is lbproxy as installed. It is made for machines that have other work. CPU time
counts, not time; both proxies take turns; and of each the best round counts, since what others do can only add to it.
What is compared is the ratio, so that a machine that is slower for all does not matter. But one that is full of other
work takes the caches away, of which Python needs more: as Python the ratio was seen to rise from 7.3 to 9.4. Then only
much more than was recorded says something, and what lies between says nothing. Needs nginx and a C compiler, and two
cores, or else the ratio is that of another load.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TypedDict

from benchmarks.overhead.load import BENCH, WORKLOADS, build, run_load, server
from benchmarks.overhead.plan import machine, python_of, today
from benchmarks.overhead.process import CORES, LOAD_CORE
from benchmarks.overhead.subjects import PEERS, lbproxy

RECORDED = Path(__file__).with_name("guard.json")
WORSE = 1.5
"""By what factor the ratio may exceed the recorded one."""
BUSY, WORSE_IF_BUSY = 0.2, 2.5
"""Others' share of the machine from which on that factor proves nothing; and the one that does."""
ROUNDS, RECORD_ROUNDS, SECONDS = 5, 15, 0.6
LOAD = replace(WORKLOADS[0], warm_s=0.3)


class Record(TypedDict):
    """What is kept, beside what it was measured on."""

    ratio: float
    date: str
    machine: str
    python: str


class Verdict(Enum):
    """Whether lbproxy became slower."""

    GOOD = "no"
    SLOWER = "yes"
    TOO_BUSY = "the machine was too busy to tell"


@dataclass(frozen=True, slots=True)
class Measured:
    """Microseconds of CPU per request, one figure a round."""

    nginx_us: list[float]
    lbproxy_us: list[float]
    others: float
    """The share of the machine that others had, the median of the windows."""
    python: str

    @property
    def ratio(self) -> float:
        """Of the best rounds."""
        return min(self.lbproxy_us) / min(self.nginx_us)

    def verdict(self, recorded: float) -> Verdict:
        """By the recorded ratio."""
        if self.ratio <= WORSE * recorded:
            return Verdict.GOOD
        if self.others > BUSY and self.ratio <= WORSE_IF_BUSY * recorded:
            return Verdict.TOO_BUSY
        return Verdict.SLOWER

    def __str__(self) -> str:
        ours, theirs = (", ".join(f"{one:.1f}" for one in sorted(some)) for some in (self.lbproxy_us, self.nginx_us))
        busy = f"others had {self.others:.0%} of the machine"
        return f"{self.ratio:.2f} times nginx's CPU per request: {ours} us; nginx {theirs} us; {busy}"


def missing() -> str | None:
    """Why it cannot be measured here; None: it can."""
    tools = [tool for tool in ("nginx", "cc", "make", "taskset") if shutil.which(tool) is None]
    if tools:
        return f"for want of {' and '.join(tools)}"
    if "compiled" not in lbproxy("lbproxy", None).version():
        return "for want of a compiled lbproxy, which the recorded ratio is of: run it in build/compiled"
    return "for want of a second core" if len(CORES) < 2 else None


def measure(rounds: int) -> Measured:
    """Only if nothing is missing. Raises StartError, LoadError."""
    build()
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {int(LOAD_CORE)})
    try:
        return _measure(rounds)
    finally:
        os.sched_setaffinity(0, before)


def _measure(rounds: int) -> Measured:
    (nginx,) = [peer for peer in PEERS if peer.name == "nginx"]
    found: dict[str, list[float]] = {"nginx": [], "lbproxy": []}
    others = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=BENCH)))
        port, server_pid = stack.enter_context(server())
        proxies = {
            one.name: stack.enter_context(one.start(port, folder / one.name))
            for one in (nginx, lbproxy("lbproxy", None))
        }
        for proxy in proxies.values():
            proxy.warm_up(LOAD.body())
        python = python_of(proxies["lbproxy"].usage().pids)
        for proxy in proxies.values():
            proxy.pause()
        for number in range(rounds):
            for name in sorted(proxies, reverse=bool(number % 2)):
                proxy = proxies[name]
                proxy.resume()
                figures = run_load(LOAD, proxy.port, SECONDS, server_pid=server_pid, proxy=proxy.usage())
                proxy.pause()
                found[name].append((figures["proxy_cpu_s"] or 0.0) / max(1, figures["requests"]) * 1e6)
                others.append(figures["others_cpu_s"] / figures["seconds"] / (os.cpu_count() or 1))
    return Measured(found["nginx"], found["lbproxy"], statistics.median(others), python)


def recorded() -> Record:
    """What guard.json says."""
    record: Record = json.loads(RECORDED.read_text())
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="what is measured is the ratio to keep from now on")
    args = parser.parse_args()
    if why := missing():
        raise SystemExit(f"cannot be measured {why}")
    found = measure(RECORD_ROUNDS if args.record else ROUNDS)
    print(found)
    if args.record:
        record: Record = {
            "ratio": round(found.ratio, 2),
            "date": today(),
            "machine": machine(),
            "python": found.python,
        }
        RECORDED.write_text(json.dumps(record, indent=1) + "\n")
        return
    verdict = found.verdict(recorded()["ratio"])
    print(f"recorded: {recorded()['ratio']:.2f}; slower than {WORSE:g} times that: {verdict.value}")
    if verdict is Verdict.SLOWER:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
