# SPDX-License-Identifier: Apache-2.0
"""What worker processes cost: `python -m benchmarks.overhead.workers`, side by side with one process, interleaved.

For a 1 KB request and for an event of a stream: the CPU time of each process apart. Proxies run on one core
(`--spread`: on all, beside the load), so that the sums are comparable; how it scales follows from them: N workers
relay N times what one core can, until the balancer process is full. The time to the first event at low load is measured
with proxies on all cores, which they share with the load and its server: a process need not wait for another one then.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.overhead import process
from benchmarks.overhead.load import BENCH, ROOT, WORKLOADS, Workload, build, run_load, server
from benchmarks.overhead.plan import machine, today
from benchmarks.overhead.process import CORES, LOAD_CORE, PROXY_CORE, Proxy, cpu_s, session
from benchmarks.overhead.report import insert, table
from benchmarks.overhead.subjects import LBPROXY, Subject, lbproxy, with_workers

PAGE = ROOT / "benchmarks/CORES.md"
LOADS = "1k,sse,ttft"


@dataclass
class Window:
    """One window of one subject."""

    unit_us: dict[str, float]
    """CPU per request or event, by kind of process; "all" is the sum."""
    per_s: float
    ttft_ms: float
    latency_ms: float


def roles(proxy: Proxy, admin: int) -> dict[int, str]:
    """What each process is, by its pid."""
    with urllib.request.urlopen(f"http://127.0.0.1:{admin}/admin/state", timeout=5) as reply:
        workers = {one["pid"] for one in json.load(reply)["workers"]}
    pids = session(proxy.process.pid)
    if not workers:
        return dict.fromkeys(pids, "process")
    found = {pid: "worker" if pid in workers else "balancer" for pid in pids}
    found[proxy.process.pid] = "supervisor"
    return found


def measure(proxy: Proxy, admin: int, load: Workload, seconds: float, server_pid: int) -> Window:
    """One window."""
    kinds = roles(proxy, admin)
    usage = Sampled(kinds)
    figures = run_load(load, proxy.port, seconds, server_pid=server_pid, proxy=usage)
    count = figures["events"] if load.unit == "event" else figures["requests"]
    used: defaultdict[str, float] = defaultdict(float)
    for pid, before in usage.first.items():
        used[kinds[pid]] += usage.last[pid] - before
    unit_us = {kind: 1e6 * spent / count for kind, spent in used.items()}
    unit_us["all"] = sum(unit_us.values())
    return Window(unit_us, count / figures["seconds"], figures["ttft_ms"]["p50"], figures["latency_ms"]["p50"])


class Sampled(process.Usage):
    """Looks at each process apart: at the window's begin and its end."""

    def __init__(self, kinds: dict[int, str]) -> None:
        super().__init__(list(kinds))
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}

    def cpu_s(self) -> float:
        seen = {pid: cpu_s([pid]) for pid in self.pids}
        if not self.first:
            self.first = seen
        self.last = seen
        return sum(seen.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--spread", action="store_true", help="proxies on both cores, beside the load")
    parser.add_argument("--loads", default=LOADS)
    parser.add_argument("--write", action="store_true", help="write the tables of benchmarks/CORES.md")
    args = parser.parse_args()
    if args.write and (args.spread or args.loads != LOADS):
        parser.error("the tables are of all loads, and without --spread")
    build()
    os.sched_setaffinity(0, {int(LOAD_CORE)})
    one = lbproxy("one process", Path())
    subjects = [one, replace(with_workers(one, args.workers), name=f"{args.workers} workers")]
    measured = {
        load.key: (load, run(load, subjects, rounds=args.rounds, seconds=args.seconds, spread=args.spread))
        for load in WORKLOADS
        if load.key in args.loads.split(",")
    }
    if args.write:
        text = PAGE.read_text("utf-8")
        text = insert(text, costs(measured, args.rounds), "<!-- generated: workers -->")
        PAGE.write_text(insert(text, saturation(measured), "<!-- generated: saturation -->"), "utf-8")


Seen = dict[str, list[Window]]
"""The windows of each subject: one process first."""


def middle(windows: list[Window], kind: str) -> float:
    """The median CPU time of a kind of process."""
    return statistics.median(one.unit_us.get(kind, 0.0) for one in windows)


def costs(measured: dict[str, tuple[Workload, Seen]], rounds: int) -> str:
    """The table of what it costs."""
    heads = ["us of CPU per", "one process", "workers", "balancer process", "sum", "x one process", "p50 later by"]
    rows = []
    for load, seen in measured.values():
        (_, one), (_, many) = seen.items()
        if load.kind == "ttft":
            later = statistics.median(w.ttft_ms for w in many) - statistics.median(w.ttft_ms for w in one)
        else:
            later = statistics.median(w.latency_ms for w in many) - statistics.median(w.latency_ms for w in one)
        parts = [middle(one, "all"), middle(many, "worker"), middle(many, "balancer"), middle(many, "all")]
        ratio = f"{parts[3] / parts[0]:.2f}"
        delay = "" if load.unit == "event" else f"{later:.2f} ms"
        rows.append([f"{load.unit}: {load.title}", *(f"{one:.1f}" for one in parts), ratio, delay])
    note = (
        f"\nMedians of {rounds} rounds, interleaved; {today()}, {machine()}. In the first two rows all processes"
        " share one core, where\n64 clients or 500 streams keep it busy: the delay of the 1 KB request is that of"
        " a full core. In the last row they have both.\n"
    )
    return table(heads, rows) + "\n" + note


def saturation(measured: dict[str, tuple[Workload, Seen]]) -> str:
    """What N workers can do, by arithmetic."""
    request, event = measured["1k"][1], measured["sse"][1]
    (_, one), (_, many) = request.items()
    (_, one_event), (_, many_events) = event.items()
    decides = 1e6 / middle(many, "balancer")
    rows = [["one process", f"{1e6 / middle(one, 'all'):,.0f}", f"{1e6 / middle(one_event, 'all'):,.0f}"]]
    for count in (2, 4, 8, 16, 32):
        relayed = count * 1e6 / middle(many, "worker")
        what = "" if relayed <= decides else " (the balancer process is full)"
        progressed = min(count * 1e6 / middle(many_events, "worker"), 1e6 / max(0.01, middle(many_events, "balancer")))
        rows.append([f"{count} workers", f"{min(relayed, decides):,.0f}{what}", f"{progressed:,.0f}"])
    return table(["cores for lbproxy", "1 KB requests/s", "events/s"], rows) + "\n"


def run(load: Workload, subjects: list[Subject], *, rounds: int, seconds: float, spread: bool) -> Seen:
    """All rounds of one load; prints a line for each subject. `spread`: proxies on all cores, whatever the load."""
    core = ",".join(map(str, CORES)) if spread or load.kind == "ttft" else PROXY_CORE
    folder = Path(tempfile.mkdtemp(dir=BENCH))
    windows: defaultdict[str, list[Window]] = defaultdict(list)
    try:
        with server() as (port, server_pid):
            proxies = {}
            for number, subject in enumerate(subjects):
                proxy = subject.start(port, folder / str(number), core)
                proxies[subject.name] = proxy, admin_port(folder / str(number))
                proxy.warm_up(WORKLOADS[0].body())
                proxy.pause()
            for index in range(rounds):
                for subject in subjects if index % 2 == 0 else subjects[::-1]:
                    proxy, admin = proxies[subject.name]
                    proxy.resume()
                    windows[subject.name].append(measure(proxy, admin, load, seconds, server_pid))
                    proxy.pause()
            for proxy, _ in proxies.values():
                proxy.__exit__(None, None, None)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{load.title}: median of {rounds} rounds, us of CPU per {load.unit}")
    base = statistics.median(one.unit_us["all"] for one in windows[subjects[0].name])
    for subject in subjects:
        seen = windows[subject.name]
        parts = {kind: statistics.median(one.unit_us[kind] for one in seen) for kind in seen[0].unit_us}
        text = ", ".join(f"{kind} {value:.1f}" for kind, value in parts.items())
        print(
            f"{subject.name}: {text}; {parts['all'] / base:.2f}x; "
            f"{statistics.median(one.per_s for one in seen):,.0f} {load.unit}s/s, "
            f"latency p50 {statistics.median(one.latency_ms for one in seen):.3f} ms, "
            f"TTFT p50 {statistics.median(one.ttft_ms for one in seen):.3f} ms",
            flush=True,
        )
    return dict(windows)


def admin_port(folder: Path) -> int:
    """The admin port, from the settings that the proxy got."""
    assert LBPROXY
    line = next(one for one in (folder / "cfg.yaml").read_text().splitlines() if one.startswith("admin"))
    return int(line.rpartition(":")[2])


if __name__ == "__main__":
    main()
