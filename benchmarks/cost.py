# SPDX-License-Identifier: Apache-2.0
"""What an event and a request cost, step by step: instructions, system calls, and the share of CPU time.

    python -m benchmarks.cost [--load event] [--seconds 4] [--write]

Run it in build/compiled (`make compiled`). Instructions are counted by valgrind between transports that lead nowhere
(`benchmarks.instructions`): each step without the steps below it in its table. System calls are counted, and shares of
time sampled, by perf while the load of `benchmarks.overhead` runs, in a window each; that needs root, and
`apt-get install linux-perf`. (strace would slow lbproxy down so far that events arrive in heaps.) `--write` puts the
tables into benchmarks/COST.md.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import instructions
from benchmarks.overhead.__main__ import candidates
from benchmarks.overhead.__main__ import prepare as prepare_load
from benchmarks.overhead.load import BENCH, WARM, WORKLOADS, Figures, Workload, run_load, server
from benchmarks.overhead.plan import machine, today
from benchmarks.overhead.process import LOAD_CORE, Proxy
from benchmarks.overhead.report import insert, table

PAGE = Path(__file__).parent / "COST.md"
MARK = "<!-- generated: cost of an event -->"
SAMPLES_PER_S = 1999
SYSTEM_CALLS = (
    *("read", "write", "writev", "recvfrom", "sendto", "sendmsg", "epoll_wait", "epoll_pwait", "epoll_ctl", "futex"),
    *("getpid", "clock_gettime", "mmap", "munmap", "brk", "accept4", "connect", "close", "setsockopt"),
)
COUNTED_CALLS = ",".join(["raw_syscalls:sys_enter", *(f"syscalls:sys_enter_{name}" for name in SYSTEM_CALLS)])
ALL = "all system calls"
ATTACH_S = 0.5
"""Until a tool is attached."""


@dataclass(frozen=True, slots=True)
class Step:
    """A function, with all that it calls but the steps within it."""

    what: str
    function: str
    """As the C compiler knows it: mypyc writes `CPyDef_module___Class___method`."""
    inner: tuple[Step, ...] = ()


_FLUSH = Step("what was held is handed to the transports at the end of the turn", "CPyPy_corked___Cork___flush")
_WRITE = Step("written: held until the end of the turn", "CPyDef_corked___Corked___write")
EVENT = (
    Step(
        "the endpoint's connection: one read, the clock of its silence, where the chunk ends",
        "CPyPy_pool___Connection___data_received",
        (
            Step("scanned: one event? usage?", "CPyDef_relay___Relay___feed"),
            Step("relay: counted, progress due?", "CPyDef_relay___Relay___body", (_WRITE,)),
        ),
    ),
    _FLUSH,
)
REQUEST = (
    Step("the client's head, parsed or found", "CPyPy_plain___read_plain"),
    Step(
        "a turn begins: record, id, the request as the balancer sees it",
        "CPyPy_front___requests___Requests___serve_plain",
        (
            Step("the body's JSON", "CPyDef_openai___read_json_body"),
            Step("the prompt, flattened", "CPyPy_prompts___PromptFormat_____call__"),
            Step("its blocks hashed", "CPyDef_prompt_keys___hash_prompt"),
            Step("the decision, and the place counted", "CPyDef_balancer___Balancer___submit"),
            Step("the head for the endpoint", "CPyPy_client_request___head_for_ClientRequest_obj_____call__"),
            Step("a kept connection, and the request written", "CPyDef_pool___Connection___send"),
        ),
    ),
    Step(
        "the endpoint's connection: one read, back to the pool",
        "CPyPy_pool___Connection___data_received",
        (
            Step("the response's head, parsed or found", "CPyDef_h1___parse_head"),
            Step("the client's head", "CPyDef_headers___client_head"),
            Step("usage", "CPyDef_usage___read_usage"),
            Step("the balancer learns, and counts the end", "CPyDef_runtime___Runtime___answered"),
            Step("the record's end", "CPyDef_exchange___Exchange___finish"),
        ),
    ),
    _FLUSH,
    Step("metrics and the line of the access log", "CPyPy_runtime___Runtime___hand_out"),
)


@dataclass(frozen=True, slots=True)
class Load:
    """One thing that is counted."""

    title: str
    unit: str
    counted: str
    """The load of `benchmarks.instructions`."""
    timed: str
    """The workload of `benchmarks.overhead`."""
    steps: tuple[Step, ...]


LOADS = {
    "event": Load("An event, 500 streams x 20 ms", "event", "sse", "sse", EVENT),
    "1k": Load("A request of 1 KB", "request", "1k", "1k", REQUEST),
    "32k": Load("A request of 32 KB", "request", "32k", "32k", REQUEST),
}


# Instructions


def inclusive(load: str) -> tuple[float, dict[str, float]]:
    """Instructions for each request or event: all, and by function with all that it calls."""
    with tempfile.NamedTemporaryFile() as file:
        total = instructions.measured(load, instructions.How(profile=file.name))
        options = ["--inclusive=yes", "--threshold=100", "--show-percs=no", "--auto=no"]
        command = ["callgrind_annotate", *options, file.name]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [re.match(r" *([0-9,]+)  (?:\S*?:)?(\S.*?)(?: \[(\S+)\])?$", line) for line in lines]
    found: dict[str, float] = {}
    for row in rows:
        if row is not None:
            found.setdefault(row[2], int(row[1].replace(",", "")) / instructions.COUNTED)
    return total, found


def step_rows(steps: tuple[Step, ...], found: dict[str, float], depth: int = 0) -> Iterator[tuple[str, float]]:
    """Each step's own instructions, the outer ones before those within them."""
    for step in steps:
        own = found.get(step.function, 0.0) - sum(found.get(inner.function, 0.0) for inner in step.inner)
        yield "- " * depth + step.what, own
        yield from step_rows(step.inner, found, depth + 1)


def instruction_table(load: Load) -> str:
    total, found = inclusive(load.counted)
    rows = list(step_rows(load.steps, found))
    rows.append(("the client's connection, and the harness in place of the loop", total - sum(own for _, own in rows)))
    shown = [[what, f"{own:,.0f}", f"{own / total:.0%}"] for what, own in rows]
    return table(["step", "instructions", "share"], [*shown, ["all", f"{total:,.0f}", ""]])


# Under load


@contextmanager
def loaded(load: Workload) -> Iterator[tuple[Proxy, Callable[[float], Figures]]]:
    """lbproxy, warmed up; and what loads it for so many seconds."""
    (subject,) = candidates(["."])
    with (
        tempfile.TemporaryDirectory(dir=BENCH) as name,
        server() as (port, pid),
        subject.start(port, Path(name) / "proxy") as proxy,
    ):
        proxy.warm_up(WARM.body())
        usage = proxy.usage()
        yield proxy, lambda seconds: run_load(load, proxy.port, seconds, server_pid=pid, proxy=usage)


def system_calls(load: Load, seconds: float) -> dict[str, float]:
    """For each request or event.

    Of requests there were as many as the access log has from then. Events come at their pace, whoever looks on.
    """
    workload = _workload(load)
    with loaded(workload) as (proxy, run), ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, seconds + 3 * ATTACH_S)
        time.sleep(workload.warm_s + ATTACH_S)
        pid = str(proxy.usage().pids[-1])
        began, logged = time.monotonic(), len(proxy.log.read_bytes())
        counting = ["perf", "stat", "-x", ";", "-e", COUNTED_CALLS, "-p", pid, "--", "sleep", str(seconds)]
        lines = subprocess.run(counting, capture_output=True, text=True, check=True).stderr.splitlines()
        took_s, log = time.monotonic() - began, proxy.log.read_bytes()[logged:]
        figures = running.result()
    ended = sum(b'"event":"request"' in line for line in log.splitlines()) * seconds / took_s
    units = figures["events"] / figures["seconds"] * seconds if load.unit == "event" else ended
    rows = [line.split(";") for line in lines]
    counts = {
        row[2].removeprefix("syscalls:sys_enter_").replace("raw_syscalls:sys_enter", ALL): int(row[0])
        for row in rows
        if len(row) > 2 and row[0].isdigit()
    }
    return {name: count / units for name, count in counts.items() if count}


def shares(load: Load, seconds: float) -> tuple[dict[str, float], dict[str, float], float]:
    """Of CPU time: by system call, and by library outside the kernel. And the CPU of a request or event, in us."""
    workload = _workload(load)
    with tempfile.NamedTemporaryFile() as file, loaded(workload) as (proxy, run):
        pid = str(proxy.usage().pids[-1])
        record = f"perf record -e cpu-clock -F {SAMPLES_PER_S} -g -o {file.name} -p {pid} -- sleep {seconds}"
        command = ["taskset", "-c", LOAD_CORE, "sh", "-c", f"sleep {workload.warm_s + ATTACH_S}; exec {record}"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            figures = run(seconds + 2 * ATTACH_S)
        calls = _report(file.name, "--children", "symbol")
        libraries = _report(file.name, "--no-children", "dso")
    names = {name: re.fullmatch(r"(?:__(?:x64|arm64)_sys|ksys|do)_(\w+)", name) for name in calls}
    within = {match[1]: calls[name] for name, match in names.items() if match and match[1] in SYSTEM_CALLS}
    done = figures["events"] if load.unit == "event" else figures["requests"]
    return within, libraries, (figures["proxy_cpu_s"] or 0.0) / max(1, done) * 1e6


def _report(path: str, children: str, key: str) -> dict[str, float]:
    command = ["perf", "report", "-i", path, children, "--sort", key, "-g", "none", "--stdio"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [re.match(r" +(\d+\.\d+)%(?: +\d+\.\d+%)? +(?:\[[k.]\] +)?(\S+)", line) for line in text.splitlines()]
    return {row[2]: float(row[1]) / 100 for row in rows if row}


def _workload(load: Load) -> Workload:
    return next(one for one in WORKLOADS if one.key == load.timed)


LIBRARIES = (
    ("kernel", "the kernel"),
    ("libpython", "Python"),
    ("lbproxy__mypyc", "lbproxy, compiled"),
    ("loop.cpython", "uvloop"),
    ("libc.so", "libc: memory, copies"),
    ("orjson", "orjson"),
    ("_xxhash", "xxhash"),
)


def time_table(load: Load, seconds: float) -> str:
    calls = system_calls(load, seconds)
    within, libraries, cpu_us = shares(load, seconds)
    names = sorted({*calls, *within}, key=lambda name: (-within.get(name, 0.0), -calls.get(name, 0.0)))
    rows = [
        [f"`{name}`", f"{calls.get(name, 0.0):.3f}", f"{within.get(name, 0.0):.1%}" if name in within else ""]
        for name in names
        if calls.get(name, 0.0) >= 0.001 or within.get(name, 0.0) >= 0.005
    ]
    for part, what in LIBRARIES[1:]:
        share = sum(share for name, share in libraries.items() if part in name)
        rows.append([what, "", f"{share:.1%}"])
    rest = 1.0 - sum(share for name, share in libraries.items() if any(part in name for part, _ in LIBRARIES))
    kernel = sum(share for name, share in libraries.items() if LIBRARIES[0][0] in name)
    rows.append(["others", "", f"{max(0.0, rest):.1%}"])
    rows.append(["the kernel in all, with interrupts", "", f"{kernel:.1%}"])
    heads = ["where", f"system calls for each {load.unit}", "share of CPU time"]
    return f"{table(heads, rows)}\n\n{cpu_us:.1f} us of CPU for each {load.unit} while it was sampled."


def page(names: list[str], seconds: float) -> str:
    """All tables."""
    about = f"`python -m benchmarks.cost --write`, {today()}. {machine()}."
    parts = [about]
    for name in names:
        load = LOADS[name]
        parts += [f"**{load.title}**", instruction_table(load), time_table(load, seconds)]
        print(f"{name}: done", file=sys.stderr, flush=True)
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", action="append", choices=LOADS, help="may be said several times; default: all")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a window under strace or perf")
    parser.add_argument("--write", action="store_true", help="into COST.md")
    args = parser.parse_args()
    if why := instructions.missing():
        raise SystemExit(f"not measured, {why}")
    if shutil.which("perf") is None:
        raise SystemExit("not measured, for want of perf: apt-get install linux-perf")
    instructions.prepare()
    prepare_load()
    text = page(args.load or list(LOADS), args.seconds)
    print(text)
    if args.write:
        PAGE.write_text(insert(PAGE.read_text(), text, MARK))


if __name__ == "__main__":
    main()
