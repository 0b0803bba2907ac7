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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from benchmarks.routing_real.cells import CELLS, ON_ONE_CORE, Cell, cell_of
from benchmarks.routing_real.fleet import Facts, ServerSet, UnfitError, look
from benchmarks.routing_real.load import measured
from benchmarks.routing_real.pages import Stored, page
from benchmarks.routing_real.results import Row, read, rejected, row_of
from benchmarks.routing_real.servers import ON_CPU, ON_GPU, on_cpu, prefer, running, with_gpu
from benchmarks.routing_real.trial import ATTEMPTS, Task
from lbproxy import __version__
from tests.real.environment import Unavailable

PAGES = {
    "routing-real": ROOT / "benchmarks/ROUTING_REAL.md",
    "routing-gpu": ROOT / "benchmarks/ROUTING_GPU.md",
}
"""By the name of the results."""
RESULTS = ROOT / "benchmarks/results"
ROUNDS, ROUNDS_MEASURED = 5, 2
"""On CPU, and where loads are measured before, in as much time as there is."""
MINUTES = 10.0
CALIBRATION_S = 15.0
"""For each cell."""
BETWEEN_S = 5.0
"""From one run to the next: a router starts, and the last responses end."""
SHORTEST_S = 6.0
"""Of a run."""
CPU_VLLM = "0.32.0"
CPU_MODEL = "a random model of six layers"
GPU_MODEL = "a random model of 24 of Llama 3 8B's layers"
PRODUCTION_STACK = "production-stack's router: it has no package (`vllm-router` on PyPI is another project's)"


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.routing_real",
        description=routing_real.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cells", nargs="+", metavar="NAME", choices=CELLS, help=f"of {', '.join(CELLS)}")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--servers", nargs="+", metavar="URL", help="vLLM servers that run elsewhere, two or more")
    where.add_argument("--gpu", metavar="VLLM", type=Path, help="two servers on the GPU here, by this `vllm` command")
    parser.add_argument("--hardware", metavar="TEXT", help="what the --servers run on, for the page: '2 x H100'")
    parser.add_argument("--vllm-options", metavar="WORDS", default="", help="further options of vLLM, with --gpu")
    parser.add_argument("--routers", nargs="+", metavar="WORD", help="only those with one of these in their names")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help=f"default: {ROUNDS}, with --servers or --gpu {ROUNDS_MEASURED}"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="begin no run after so long; the page has the complete rounds. With --servers or --gpu "
        f"(default: {MINUTES:g}) runs are as long as fit",
    )
    parser.add_argument("--resume", action="store_true", help="keep what earlier runs have measured")
    parser.add_argument("--render", action="store_true", help="measure nothing: the pages, of the results' files")
    parser.add_argument("--keep", metavar="FOLDER", help="each router's settings and output; writes no page")
    return parser


@contextmanager
def servers_of(args: argparse.Namespace) -> Iterator[tuple[ServerSet, Facts]]:
    """Those that are asked for, ready. Raises Unavailable, UnfitError."""
    if args.servers:
        yield look(args.servers, args.hardware)
    elif args.gpu:
        facts = ON_GPU.facts(hardware=f"one {gpu_name()}", model=GPU_MODEL, version=version_of(args.gpu), shared=True)
        with running(with_gpu(args.gpu, args.vllm_options.split(), print), ON_GPU) as found:
            yield found, facts
    else:
        with running(on_cpu(print), ON_CPU) as found:
            yield found, ON_CPU.facts(hardware="CPU", model=CPU_MODEL, version=CPU_VLLM, shared=False)


def cells_of(args: argparse.Namespace, servers: ServerSet, runs: int, store: Path) -> dict[str, Cell]:
    """What to ask: on CPU as it is told, else measured, so that each of so many runs of each cell has its time."""
    if not (args.servers or args.gpu):
        return {name: CELLS[name] for name in args.cells or ON_ONE_CORE}
    names = args.cells or list(CELLS)
    if args.resume and store.exists():
        before = {name: cell_of(fields) for name, fields in orjson.loads(store.read_bytes()).items()}
        if set(names) <= set(before):
            return {name: before[name] for name in names}
    seconds = (60 * (args.minutes or MINUTES) - CALIBRATION_S * len(names)) / max(1, runs * len(names)) - BETWEEN_S
    cells = measured(servers, names, max(SHORTEST_S, seconds) / CELLS[names[0]].duration_s, print)
    store.write_bytes(orjson.dumps(cells))
    return cells


def measure(
    tasks: Sequence[Task],
    args: argparse.Namespace,
    store: Path,
    asked: tuple[ServerSet, Mapping[str, Cell]],
    end: float,
) -> list[str]:
    """Do the runs that are missing, until the moment `end`, and keep them; what failed."""
    servers, cells = asked
    done = {(row["cell"], row["seed"], row["router"]) for row in read(store) if rejected(row) is None}
    missing = [task for task in tasks if (task.cell, task.seed, task.router) not in done]
    failed: list[str] = []
    prefer(os.getpid())  # and the client with it
    for number, task in enumerate(missing, 1):
        print(f"{number}/{len(missing)} {task.cell}, round {task.seed}, {task.router}", flush=True)
        for attempt in range(1, ATTEMPTS + 1):
            if time.monotonic() > end:
                print("out of time; --resume goes on from here", flush=True)
                return [*failed, f"{len(missing) + 1 - number} of {len(tasks)} runs: there was no time for them"]
            folder = kept(args.keep, task, attempt) if args.keep else None
            if folder:
                folder.mkdir(parents=True)
            try:
                row = row_of(trial.run(task, cells[task.cell], servers, folder))
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
    text += f"failed {sum(row['failures'].values())}, servers {row['servers_cpu_s'] / row['seconds']:.2f} cores, "
    text += f"router {row['router_cpu_s'] / row['seconds']:.1%}, client {row['client_cpu_s'] / row['seconds']:.1%}, "
    text += f"waited {row['servers_waited_s'] / row['seconds']:.2f}, "
    text += f"others {row['others_cpu_s'] / row['seconds']:.2f} cores, lag {1000 * row['client_lag_s']:.0f} ms"
    return text + (f": rejected, {why}" if (why := rejected(row)) else "")


def prepare() -> None:
    """Check what cannot be done without. May end the program."""
    if shutil.which("taskset") is None:
        raise SystemExit("needs taskset: apt-get install util-linux")
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("needs two cores: one for the router, one for the client")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit("interrupted; --resume goes on from here"))


def main() -> None:
    args = options().parse_args()
    if args.render:
        for name, path in PAGES.items():
            path.write_text(page(orjson.loads((RESULTS / f"{name}.json").read_bytes())), "utf-8")
        return
    prepare()
    name = "routing-gpu" if args.servers or args.gpu else "routing-real"
    whole = not (args.cells or args.routers or args.keep)
    some = [one for one in trial.chosen([]) if not args.routers or any(word in one.name for word in args.routers)]
    there = [one for one in some if one.subject.missing() is None]
    outside = [f"{one.name}: {why}" for one in some if (why := one.subject.missing())]
    store = BENCH / f"{name}{'' if whole else '.part'}.jsonl"
    if not args.resume:
        store.unlink(missing_ok=True)
    BENCH.mkdir(exist_ok=True)
    minutes = args.minutes or (MINUTES if args.servers or args.gpu else None)
    end = time.monotonic() + 60 * minutes if minutes else float("inf")
    rounds = args.rounds or (ROUNDS_MEASURED if args.servers or args.gpu else ROUNDS)
    try:
        with servers_of(args) as (servers, facts):
            cells = cells_of(args, servers, rounds * len(there), store.with_suffix(".cells.json"))
            tasks = trial.order(list(cells), rounds, [one.name for one in there])
            outside += [PRODUCTION_STACK, *measure(tasks, args, store, (servers, cells), end)]
    except (Unavailable, UnfitError, TrialError) as e:
        raise SystemExit(f"these servers cannot be measured: {e}") from e
    stored = Stored(
        command=f"make bench-{'gpu' if args.servers or args.gpu else 'routing-real'}",
        servers=facts,
        cells=orjson.loads(orjson.dumps(cells)),
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        machine=machine(),
        versions=[described(one) for one in there],
        outside=outside,
        runs=read(store),
    )
    text = page(stored)
    print(text)
    if whole:
        (RESULTS / f"{name}.json").write_bytes(orjson.dumps(stored))
        PAGES[name].write_text(text, "utf-8")


def gpu_name() -> str:
    """As its driver calls it. Raises UnfitError."""
    try:
        return _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        raise UnfitError("no GPU here (nvidia-smi finds none); name servers elsewhere: --servers URL URL") from None


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
