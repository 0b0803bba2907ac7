# SPDX-License-Identifier: Apache-2.0
"""One workload, measured: who is asked in which order; collects the raw figures.

For each workload every proxy is started afresh (so that memory is of this workload), warmed up and paused. Then rounds:
in each, every subject has one window, and every second round goes backwards, so that nobody is always first after a
pause or always last. A subject that fails is left out of the rest of that workload, with the reason; the others go on.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict

from benchmarks.overhead.load import BENCH, WARM, Figures, Kind, LoadError, Workload, run_load, server
from benchmarks.overhead.process import Proxy, StartError
from benchmarks.overhead.subjects import Subject

DIRECT = "direct"
"""The subject that is none: the load asks the server itself."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A workload, and how long it is looked at."""

    workload: Workload
    rounds: int
    seconds: float
    """Of each window."""


class Round(TypedDict):
    """One window of one subject."""

    subject: str
    number: int
    figures: Figures


class AboutSubject(TypedDict):
    """A subject, for the report."""

    version: str
    note: str


class Section(TypedDict):
    """All of one workload: what it was, on what, and what was seen."""

    title: str
    kind: Kind
    unit: str
    connections: int
    events_per_s: float
    body_bytes: int
    planned: int
    """Rounds."""
    seconds: float
    """Of each window."""
    date: str
    command: str
    machine: str
    load_average: list[float]
    """Before it began: what else the machine did."""
    subjects: dict[str, AboutSubject]
    missing: dict[str, str]
    """Why a peer was not measured at all."""
    failed: dict[str, str]
    """Why a subject was not measured to the end."""
    idle_rss_bytes: dict[str, int]
    """By subject: after the start and the warm-up."""
    rounds: list[Round]


def measure(stage: Stage, subjects: Sequence[Subject], *, command: str) -> Section:
    """One section, with those of the subjects that take part in it. Raises LoadError if nothing can be measured."""
    load = stage.workload
    takers = [one for one in subjects if _takes_part(one, load)]
    missing = {one.name: why for one in takers if (why := one.missing())}
    there = [one for one in takers if one.name not in missing]
    section: Section = {
        "title": load.title,
        "kind": load.kind,
        "unit": load.unit,
        "connections": load.connections,
        "events_per_s": load.events_per_s,
        "body_bytes": len(load.body()),
        "planned": stage.rounds,
        "seconds": stage.seconds,
        "date": today(),
        "command": command,
        "machine": machine(),
        "load_average": list(os.getloadavg()),
        "subjects": {
            DIRECT: {"version": "", "note": "no proxy: what the load and the server do by themselves"},
            **{one.name: {"version": one.version(), "note": one.note} for one in there},
        },
        "missing": missing,
        "failed": {},
        "idle_rss_bytes": {},
        "rounds": [],
    }
    for name, why in missing.items():
        say(f"{load.key} {name} is left out: {why}")
    _run(stage, there, section)
    return section


def _takes_part(subject: Subject, load: Workload) -> bool:
    wanted = load.peers is None or subject.name in load.peers or subject.name.startswith("lbproxy")
    return wanted and (subject.sections is None or load.key in subject.sections)


def _run(stage: Stage, subjects: Sequence[Subject], section: Section) -> None:
    load = stage.workload
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=BENCH)))
        port, server_pid = stack.enter_context(server())
        started = {one.name: stack.enter_context(one.start(port, folder / one.name)) for one in subjects}
        running: dict[str, Proxy | None] = {DIRECT: None}
        for name, proxy in started.items():
            try:
                _get_ready(name, proxy, section)
                running[name] = proxy
            except StartError as e:
                _fail(section, load, name, str(e))
        for number in range(stage.rounds):
            for name in list(running)[:: -1 if number % 2 else 1]:
                target = running[name]
                try:
                    figures = _window(stage, port, server_pid, target)
                except LoadError as e:
                    if target:
                        say(f"{name}: {target.last_words()}")
                    _fail(section, load, name, str(e).partition(";")[0])
                    del running[name]
                    continue
                section["rounds"].append({"subject": name, "number": number, "figures": figures})
                say(f"{load.key} {number + 1}/{stage.rounds} {name}: {summary(load, figures)}")


def _get_ready(name: str, proxy: Proxy, section: Section) -> None:
    proxy.warm_up(WARM.body())
    usage = proxy.usage()
    section["idle_rss_bytes"][name] = usage.rss_bytes()
    about = section["subjects"][name]
    if name.startswith("lbproxy") and "Python" not in about["version"]:
        about["version"] += f", {python_of(usage.pids)}"
    proxy.pause()


def _window(stage: Stage, server_port: int, server_pid: int, proxy: Proxy | None) -> Figures:
    if proxy is None:
        return run_load(stage.workload, server_port, stage.seconds, server_pid=server_pid, proxy=None)
    proxy.resume()
    try:
        return run_load(stage.workload, proxy.port, stage.seconds, server_pid=server_pid, proxy=proxy.usage())
    finally:
        proxy.pause()


def _fail(section: Section, load: Workload, name: str, why: str) -> None:
    section["failed"][name] = why
    say(f"{load.key} {name} FAILED: {why}")


def say(line: str) -> None:
    """Progress, for whoever waits."""
    print(line, file=sys.stderr, flush=True)


def summary(load: Workload, figures: Figures) -> str:
    """One window in one line."""
    count = figures["events"] if load.unit == "event" else figures["requests"]
    rate = f"{count / figures['seconds']:,.0f} {load.unit}s/s"
    cpu = figures["proxy_cpu_s"]
    return rate if cpu is None or not count else f"{cpu / count * 1e6:.1f} us per {load.unit}, {rate}"


# --- What it ran on ---------------------------------------------------------------------------------------------------


def today() -> str:
    """In UTC."""
    return f"{datetime.now(UTC):%Y-%m-%d}"


def machine() -> str:
    """Processor, cores, memory, kernel."""
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    processor = found[1] if found else platform.machine()
    release = platform.release().partition("-")[0]
    return f"{processor}, {os.cpu_count()} cores, {memory_gb:.0f} GB, Linux {release}"


def python_of(pids: Sequence[int]) -> str:
    """The Python that a process runs, and whether it was built with profile-guided optimisation: 10 % and more."""
    code = (
        "import platform, sysconfig; pgo = '--enable-optimizations' in (sysconfig.get_config_var('CONFIG_ARGS') or '');"
        "print('Python', platform.python_version(), 'with PGO' if pgo else 'without PGO')"
    )
    program = str(Path(f"/proc/{pids[0]}/exe").resolve())
    return subprocess.run([program, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
