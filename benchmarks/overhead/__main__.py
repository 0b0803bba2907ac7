"""The command line: see `python -m benchmarks.overhead --help` and docs/benchmarks.md."""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

from benchmarks import overhead
from benchmarks.overhead.hotspots import profile
from benchmarks.overhead.load import ROOT, WORKLOADS, LoadError, build
from benchmarks.overhead.plan import Results, Stage, run
from benchmarks.overhead.process import LOAD_CORE
from benchmarks.overhead.report import insert, render
from benchmarks.overhead.subjects import PEERS, Subject, lbproxy

PAGE = ROOT / "benchmarks/RESULTS.md"
RAW = ROOT / "benchmarks/results/overhead.json"
OPEN_FILES = 20_000
"""What load, server and proxies may open: 2,000 streams are two sockets each for a proxy."""
FULL = {"1k": (5, 2.5), "32k": (5, 2.5), "sse": (3, 4.0), "streams": (1, 5.0)}
QUICK = {"1k": (2, 2.0), "32k": (2, 2.0), "sse": (1, 3.0), "streams": (1, 4.0)}
"""Rounds, and seconds of a window."""
QUICK_PEERS = ("nginx", "sglang-router")


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead",
        description=overhead.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="under 2 minutes: fewer rounds, nginx and sglang-router only"
    )
    parser.add_argument("--workloads", help=f"of {','.join(FULL)}; default: all", metavar="A,B")
    names = ",".join(one.name for one in PEERS)
    parser.add_argument("--peers", help=f"of {names}; default: all that are installed", metavar="A,B")
    parser.add_argument(
        "--lbproxy",
        action="append",
        metavar="[NAME=]PATH",
        help="measure the lbproxy of this checkout, or this executable; may be said several times, for comparing",
    )
    parser.add_argument("--rounds", type=int, help="in place of each workload's own")
    parser.add_argument("--seconds", type=float, help="of a window, in place of each workload's own")
    parser.add_argument("--write", action="store_true", help="write RESULTS.md and overhead.json even if not in full")
    parser.add_argument("--profile", action="store_true", help="no comparison: where lbproxy's time goes, by py-spy")
    parser.add_argument("--render", type=Path, metavar="FILE", help="nothing but the tables of an earlier run's JSON")
    return parser


def chosen(said: str | None, there: list[str]) -> list[str]:
    """What an option with commas names; all if it was not given. Ends the program over a wrong name."""
    names = said.split(",") if said else there
    if wrong := set(names) - set(there):
        raise SystemExit(f"{', '.join(sorted(wrong))}: not one of {', '.join(there)}")
    return [name for name in there if name in names]


def stages(args: argparse.Namespace) -> list[Stage]:
    plan = QUICK if args.quick else FULL
    keys = chosen(args.workloads, list(plan))
    some = [Stage(load, *plan[load.key]) for load in WORKLOADS if load.key in keys]
    return [replace(one, rounds=args.rounds or one.rounds, seconds=args.seconds or one.seconds) for one in some]


def candidates(said: list[str] | None) -> list[Subject]:
    """The lbproxys to measure, named lbproxy, or lbproxy (NAME) if there are several."""
    if not said:
        return [lbproxy("lbproxy", None)]
    pairs = [one.partition("=")[::2] if "=" in one else (Path(one).resolve().name, one) for one in said]
    if wrong := [where for _, where in pairs if not Path(where).exists()]:
        raise SystemExit(f"--lbproxy: no {', '.join(wrong)}")
    return [lbproxy(f"lbproxy ({name})" if len(pairs) > 1 else "lbproxy", Path(where)) for name, where in pairs]


def prepare() -> None:
    """Check what cannot be done without, and give this process and its children room. May end the program."""
    if missing := [tool for tool in ("taskset", "make", "cc") if shutil.which(tool) is None]:
        raise SystemExit(f"needs {', '.join(missing)}: apt-get install util-linux make gcc")
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("needs two cores: one for the proxy, one for the load")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, hard), hard))
    os.sched_setaffinity(0, {int(LOAD_CORE)})
    build()


def measure(args: argparse.Namespace) -> None:
    there = [one.name for one in PEERS if not args.quick or one.name in QUICK_PEERS]
    peers = chosen(args.peers, [one.name for one in PEERS]) if args.peers else there
    subjects = [*(one for one in PEERS if one.name in peers), *candidates(args.lbproxy)]
    command = shlex.join(["python", "-m", "benchmarks.overhead", *sys.argv[1:]])
    results = run(stages(args), subjects, command="make bench-overhead" if len(sys.argv) == 1 else command)
    section = render(results)
    print(section)
    if args.write or len(sys.argv) == 1:
        RAW.parent.mkdir(exist_ok=True)
        RAW.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(insert(PAGE.read_text() if PAGE.exists() else "# Results\n", section))


def main() -> None:
    args = options().parse_args()
    if args.render:
        print(render(cast(Results, json.loads(args.render.read_text()))))
        return
    try:
        prepare()
        if args.profile:
            for subject in candidates(args.lbproxy):
                print(f"{subject.name}: {profile(subject, seconds=args.seconds or 8)}\n")
        else:
            measure(args)
    except LoadError as e:
        raise SystemExit(str(e)) from e


if __name__ == "__main__":
    main()
