# SPDX-License-Identifier: Apache-2.0
"""The command line: see `python -m benchmarks.routing_real --help` and docs/benchmarks.md."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import orjson

from benchmarks import routing_real
from benchmarks.http_routing.results import keep
from benchmarks.http_routing.routers import OURS, Router
from benchmarks.http_routing.trial import TrialError
from benchmarks.overhead.load import BENCH, ROOT
from benchmarks.overhead.plan import machine
from benchmarks.overhead.process import StartError
from benchmarks.routing_real import trial
from benchmarks.routing_real.cells import CELLS
from benchmarks.routing_real.pages import Stored, page
from benchmarks.routing_real.results import Row, read, rejected, row_of
from benchmarks.routing_real.servers import SERVERS, fleet, on_cpu, prefer, with_gpu
from benchmarks.routing_real.trial import ATTEMPTS, Task
from lbproxy import __version__
from tests.real.environment import Unavailable

PAGES = {False: ROOT / "benchmarks/ROUTING_REAL.md", True: ROOT / "benchmarks/ROUTING_GPU.md"}
"""By whether they are of a GPU."""
NAMES = {False: "routing-real", True: "routing-gpu"}
RESULTS = ROOT / "benchmarks/results"
ROUNDS = 5
CPU_VLLM = "0.32.0"
PRODUCTION_STACK = "production-stack's router: it has no package (`vllm-router` on PyPI is another project's)"


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.routing_real",
        description=routing_real.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cells", nargs="+", metavar="NAME", choices=CELLS, help=f"of {', '.join(CELLS)}")
    parser.add_argument("--gpu", metavar="VLLM", type=Path, help="on the GPU here, by this `vllm` command; other cells")
    parser.add_argument("--vllm-options", metavar="WORDS", default="", help="further options of vLLM, with --gpu")
    parser.add_argument("--routers", nargs="+", metavar="WORD", help="only those with one of these in their names")
    parser.add_argument("--rounds", type=int, metavar="N", default=ROUNDS)
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="begin no run after so long; the page has the complete rounds"
    )
    parser.add_argument("--resume", action="store_true", help="keep what earlier runs have measured")
    parser.add_argument("--render", action="store_true", help="measure nothing: the page, of the results' file")
    parser.add_argument("--keep", metavar="FOLDER", help="each router's settings and output; writes no page")
    return parser


def measure(tasks: Sequence[Task], args: argparse.Namespace, store: Path) -> list[str]:
    """Do the runs that are missing, and keep them; what failed."""
    done = {(row["cell"], row["seed"], row["router"]) for row in read(store) if rejected(row) is None}
    missing = [task for task in tasks if (task.cell, task.seed, task.router) not in done]
    if not missing:
        return []
    end = time.monotonic() + 60 * args.minutes if args.minutes else float("inf")
    failed: list[str] = []
    prefer(os.getpid())  # and the client with it
    with fleet(with_gpu(args.gpu, args.vllm_options.split(), print) if args.gpu else on_cpu(print)) as servers:
        for number, task in enumerate(missing, 1):
            print(f"{number}/{len(missing)} {task.cell}, round {task.seed}, {task.router}", flush=True)
            for attempt in range(1, ATTEMPTS + 1):
                if time.monotonic() > end:
                    print("out of time; --resume goes on from here", flush=True)
                    return failed
                folder = kept(args.keep, task, attempt) if args.keep else None
                if folder:
                    folder.mkdir(parents=True)
                try:
                    row = row_of(trial.run(task, servers, folder))
                except (TrialError, StartError) as error:
                    failed.append(f"{task.router}, {task.cell}, round {task.seed}: {error}")
                    print(f"  {failed[-1]}", flush=True)
                    break
                keep(store, row)  # type: ignore[arg-type]
                print(f"  {_line(row)}", flush=True)
                if rejected(row) is None:
                    break
                if attempt == ATTEMPTS:
                    failed.append(f"{task.router}, {task.cell}, round {task.seed}: rejected, {rejected(row)}")
    return failed


def kept(place: str, task: Task, attempt: int) -> Path:
    """A folder of a run; nginx takes no spaces in paths."""
    return Path(place, f"{task.cell}-{task.seed}-{task.router}-{attempt}".replace(" ", "-")).absolute()


def _line(row: Row) -> str:
    figures = row["summary"]
    text = f"TTFT {figures['ttft_mean']:.3f} s, p90 {figures['ttft_p90']:.2f}, E2E {figures['e2e_mean']:.2f}, "
    text += f"hits {figures['hit_ratio']:.3f} {row['finished']}, {figures['requests']:.0f} requests, "
    text += f"failed {sum(row['failures'].values())}, servers {row['servers_cpu_s'] / SERVERS / row['seconds']:.0%}, "
    text += f"router {row['router_cpu_s'] / row['seconds']:.1%}, client {row['client_cpu_s'] / row['seconds']:.1%}, "
    text += f"waited {row['servers_waited_s'] / row['seconds']:.2f}, "
    text += f"others {row['others_cpu_s'] / row['seconds']:.2f} cores, lag {1000 * row['client_lag_s']:.0f} ms"
    return text + (f": rejected, {why}" if (why := rejected(row)) else "")


def prepare() -> None:
    """Check what cannot be done without. May end the program."""
    if shutil.which("taskset") is None:
        raise SystemExit("needs taskset: apt-get install util-linux")
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("needs two cores: one for each server")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit("interrupted; --resume goes on from here"))


def main() -> None:
    args = options().parse_args()
    gpu = args.gpu is not None
    results = RESULTS / f"{NAMES[gpu]}.json"
    whole = not (args.cells or args.routers or args.keep)
    some = [one for one in trial.chosen([]) if not args.routers or any(word in one.name for word in args.routers)]
    outside = [f"{one.name}: {why}" for one in some if (why := one.subject.missing())]
    there = [one for one in some if one.subject.missing() is None]
    if args.render:
        stored: Stored = orjson.loads(results.read_bytes())
    else:
        prepare()
        store = BENCH / f"{NAMES[gpu]}.jsonl"
        store = store if whole else store.with_suffix(".part.jsonl")
        if not args.resume:
            store.unlink(missing_ok=True)
        try:
            cells = args.cells or [name for name, cell in CELLS.items() if cell.gpu == gpu]
            tasks = trial.order(cells, args.rounds, [one.name for one in there])
            outside = [*outside, PRODUCTION_STACK, *measure(tasks, args, store)]
        except Unavailable as e:
            raise SystemExit(f"the real servers cannot be had here: {e}") from e
        stored = Stored(
            gpu=gpu_name() if gpu else None,
            vllm=version_of(args.gpu) if gpu else CPU_VLLM,
            date=f"{datetime.now(UTC):%Y-%m-%d}",
            machine=machine(),
            versions=[described(one) for one in there],
            outside=outside,
            runs=read(store),
        )
    text = page(stored)
    print(text)
    if whole and not args.render:
        results.write_bytes(orjson.dumps(stored))
    if whole:
        PAGES[gpu].write_text(text, "utf-8")


def gpu_name() -> str:
    """As its driver calls it."""
    return _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()[0]


def version_of(vllm: Path) -> str:
    """Of an installed vLLM."""
    code = "from importlib.metadata import version; print(version('vllm'))"
    return _said(str(vllm.parent / "python"), "-c", code)


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def described(router: Router) -> str:
    """Version and settings."""
    version = router.subject.version() if router.name != OURS else __version__
    return f"{router.name} {version}: {router.subject.note}"


if __name__ == "__main__":
    main()
