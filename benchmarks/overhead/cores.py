# SPDX-License-Identifier: Apache-2.0
"""How throughput grows with cores: `python -m benchmarks.overhead.cores`, on a machine with eight cores or more.

One process, then 2, 4 and 8 worker processes, one after the other in each round. N workers get N + 1 cores, one of them
for the balancer process; the model servers and the load have `PAIRS` pairs of the other cores. `--render FILE` writes
the tables of benchmarks/CORES.md from what `--json FILE` kept, so that machine needs no checkout of ours.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.overhead import process
from benchmarks.overhead.load import BENCH, WARM, WORKLOADS, Figures, Workload, build, run_load, server
from benchmarks.overhead.plan import machine, today
from benchmarks.overhead.process import CORES, Proxy
from benchmarks.overhead.report import insert, table
from benchmarks.overhead.subjects import LBPROXY, Subject, lbproxy
from benchmarks.overhead.workers import PAGE, Sampled, admin_port, roles

PAIRS = 3
"""Model servers, each with a load of its own."""
STREAMS = 800
"""For each worker, 20 ms from event to event: most of a core."""
COUNTS = (1, 2, 4, 8)
TIMES = {"requests": "latency p50", "ttft": "first event p50"}
LOADS = {one.key: one for one in WORKLOADS if one.key in ("1k", "32k", "sse", "ttft")}


@dataclass
class Window:
    """One window of one subject: all loads together."""

    load: str
    workers: int
    """1: one process."""
    per_s: float
    """Requests, or events."""
    asked_per_s: float
    """What the pace of the streams asks for; 0: as many as come back."""
    errors: int
    unit_us: dict[str, float]
    """CPU per request or event, by kind of process."""
    busy: dict[str, float]
    """Share of a core: of the busiest process of each kind."""
    latency_ms: tuple[float, float]
    """Median (of the loads' medians) and 99th percentile (of the worst load)."""
    ttft_ms: tuple[float, float]
    delay_ms: tuple[float, float]


def subject(workers: int, ports: Sequence[int]) -> Subject:
    """lbproxy before all servers."""
    urls = ", ".join(f'"http://127.0.0.1:{port}"' for port in ports)
    settings = LBPROXY.replace('"http://127.0.0.1:$server"', urls)
    assert settings != LBPROXY
    if workers > 1:
        settings += f"workers: {workers}\n"
    return replace(lbproxy(f"{workers}", Path()), files={"cfg.yaml": settings})


def load_of(key: str, workers: int) -> Workload:
    """What one of the loads does to so many workers."""
    load = LOADS[key]
    return replace(load, connections=STREAMS * workers // PAIRS, warm_s=3.0) if key == "sse" else load


def core(number: int) -> str:
    """The number-th from the end; again from there if there are fewer."""
    return str(CORES[-1 - number % len(CORES)])


def measure(proxy: Proxy, admin: int, key: str, workers: int, servers: Sequence[int], seconds: float) -> Window:
    """One window."""
    kinds = roles(proxy, admin)
    usage = Sampled(kinds)
    load = load_of(key, workers)
    pairs = 1 if load.kind == "ttft" else PAIRS

    def one(number: int) -> Figures:
        return run_load(
            replace(load, key=f"{key}-{number}"),
            proxy.port,
            seconds,
            server_pid=servers[number],
            proxy=usage if number == 0 else None,
            core=core(2 * number),
        )

    with ThreadPoolExecutor(pairs) as pool:
        seen = list(pool.map(one, range(pairs)))
    count = sum(one["events"] if load.unit == "event" else one["requests"] for one in seen)
    used = {pid: usage.last[pid] - usage.first[pid] for pid in kinds}
    names = sorted(set(kinds.values()))
    return Window(
        load=key,
        workers=workers,
        per_s=sum((one["events"] if load.unit == "event" else one["requests"]) / one["seconds"] for one in seen),
        asked_per_s=load.events_per_s * pairs,
        errors=sum(one["errors"] for one in seen),
        unit_us={
            name: 1e6 * sum(spent for pid, spent in used.items() if kinds[pid] == name) / max(1, count)
            for name in names
        },
        busy={name: max(spent for pid, spent in used.items() if kinds[pid] == name) / seconds for name in names},
        latency_ms=_times(seen, "latency_ms"),
        ttft_ms=_times(seen, "ttft_ms"),
        delay_ms=_times(seen, "delay_ms"),
    )


def _times(seen: Sequence[Figures], name: str) -> tuple[float, float]:
    found = [one[name] for one in seen]  # type: ignore[literal-required]
    return statistics.median(one["p50"] for one in found), max(one["p99"] for one in found)


@contextmanager
def running(workers: int, ports: Sequence[int], folder: Path) -> Iterator[tuple[Proxy, int]]:
    """lbproxy on its cores, warm and paused, with its admin port."""
    process.PROXY_CORE = ",".join(map(str, CORES[: workers + 1 if workers > 1 else 1]))
    with subject(workers, ports).start(0, folder) as proxy:
        proxy.warm_up(WARM.body())
        proxy.pause()
        yield proxy, admin_port(folder)


def run(counts: Sequence[int], loads: Sequence[str], rounds: int, seconds: float) -> list[Window]:
    """All windows; prints a line for each."""
    needed = max(counts) + 1 + 2 * PAIRS
    if len(CORES) < needed:
        print(f"{len(CORES)} cores: {max(counts)} workers and the load want {needed}", file=sys.stderr)
    folder = Path(tempfile.mkdtemp(dir=BENCH))
    windows = []
    try:
        with ExitStack() as stack:
            servers = [stack.enter_context(server(core(2 * number + 1))) for number in range(PAIRS)]
            ports, pids = [port for port, _ in servers], [pid for _, pid in servers]
            proxies = {count: stack.enter_context(running(count, ports, folder / str(count))) for count in counts}
            os.sched_setaffinity(0, {CORES[-1]})
            for key in loads:
                for index in range(rounds):
                    for count in counts if index % 2 == 0 else counts[::-1]:
                        proxy, admin = proxies[count]
                        proxy.resume()
                        windows.append(measure(proxy, admin, key, count, pids, seconds))
                        proxy.pause()
                        print(windows[-1], flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return windows


def tables(windows: Sequence[Window]) -> str:
    """Of requests, of events, and of the delay at low load. Medians of the rounds."""
    parts = []
    for key, load in LOADS.items():
        of_load = [one for one in windows if one.load == key]
        if not of_load:
            continue
        paced = load.unit == "event"
        heads = ["cores for lbproxy", f"{load.unit}s/s", "x one process"]
        heads += ["asked for"] if paced else []
        heads += [f"us of CPU for each {load.unit}", "busiest worker", "balancer process"]
        heads.append("event later by, p50 and p99" if paced else TIMES[load.kind])
        rows = []
        counts = sorted({one.workers for one in of_load})
        base = _middle([one.per_s for one in of_load if one.workers == counts[0]])
        for count in counts:
            mine = [one for one in of_load if one.workers == count]
            rate = _middle([one.per_s for one in mine])
            row = ["one process" if count == 1 else f"{count} workers", f"{rate:,.0f}", f"{rate / base:.2f}"]
            row += [f"{mine[0].asked_per_s:,.0f}"] if paced else []
            costs = {name: _middle([one.unit_us[name] for one in mine]) for name in mine[0].unit_us}
            row.append(f"{costs['process']:.1f}" if count == 1 else f"{costs['worker']:.1f} + {costs['balancer']:.1f}")
            kind = "process" if count == 1 else "worker"
            row.append(f"{_middle([one.busy[kind] for one in mine]):.0%}")
            row.append("" if count == 1 else f"{_middle([one.busy['balancer'] for one in mine]):.0%}")
            times = "delay_ms" if paced else "ttft_ms" if load.kind == "ttft" else "latency_ms"
            p50, p99 = (_middle([getattr(one, times)[place] for one in mine]) for place in (0, 1))
            row.append(f"{p50:.2f} ms, {p99:.1f} ms" if paced else f"{p50:.2f} ms")
            rows.append(row)
        title = f"{STREAMS} streams for each worker, an event every {load.beat_ms} ms" if paced else load.title
        parts.append(f"{title}:\n\n{table(heads, rows)}")
    return "\n\n".join(parts) + "\n"


def _middle(values: Sequence[float]) -> float:
    return statistics.median(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=list(COUNTS))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures here")
    parser.add_argument("--render", type=Path, metavar="FILE", help="measure nothing: the page, of these figures")
    args = parser.parse_args()
    if args.render:
        kept = json.loads(args.render.read_text())
        windows = [Window(**one) for one in kept["windows"]]
        note = f"\nMedians of {kept['rounds']} rounds, interleaved; {kept['date']}, {kept['machine']}.\n"
        text = insert(PAGE.read_text("utf-8"), tables(windows) + note, "<!-- generated: cores -->")
        PAGE.write_text(text, "utf-8")
        return
    build()
    windows = run(args.workers, args.loads, args.rounds, args.seconds)
    print(tables(windows))
    if args.json:
        kept = {"date": today(), "machine": machine(), "rounds": args.rounds, "windows": [asdict(w) for w in windows]}
        args.json.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
