# SPDX-License-Identifier: Apache-2.0
"""The command line: see `python -m benchmarks.overhead --help` and docs/benchmarks.md."""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import shutil
import sys
import zlib
from dataclasses import replace
from pathlib import Path

from benchmarks import overhead
from benchmarks.overhead import results as kept
from benchmarks.overhead.hotspots import profile
from benchmarks.overhead.load import BENCH, ROOT, WORKLOADS, LoadError, build
from benchmarks.overhead.plan import Stage, measure, say
from benchmarks.overhead.plot import draw
from benchmarks.overhead.process import CORES, LOAD_CORE
from benchmarks.overhead.report import insert, render
from benchmarks.overhead.results import OTHERS, Results
from benchmarks.overhead.subjects import PEERS, Subject, lbproxy, least_request, with_workers

PAGE = ROOT / "benchmarks/RESULTS.md"
RAW = ROOT / "benchmarks/results/overhead.json"
PLOT = ROOT / "benchmarks/results/overhead.png"
OPEN_FILES = 20_000
"""What load, server and proxies may open: 8,900 streams are two sockets each for a proxy."""
FULL = {
    "1k": (5, 2.5),
    "32k": (5, 2.5),
    "sse": (3, 4.0),
    "ttft": (3, 3.0),
    "streams": (2, 5.0),
    "220k-20": (2, 2.0),
    "220k-100": (2, 2.0),
    "220k-200": (2, 2.0),
    **{one.key: (3, 2.0) for one in WORKLOADS if one.agent},
    "held": (1, 10.0),
}
QUICK = {key: (1, min(seconds, 2.0)) for key, (_, seconds) in FULL.items()}
"""Rounds, and seconds of a window."""
QUICK_PEERS = ("nginx", "sglang-router")
SECTIONS = [*FULL, *OTHERS]


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead",
        description=overhead.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one short round, nginx and sglang-router only")
    parser.add_argument("--sections", help=f"of {','.join(SECTIONS)}; default: all", metavar="A,B")
    names = ",".join(one.name for one in PEERS)
    parser.add_argument("--peers", help=f"of {names}; default: all that are installed", metavar="A,B")
    what = "measure each lbproxy also as N worker processes (all on one core: what it costs, not how it scales)"
    parser.add_argument("--workers", type=int, metavar="N", help=what)
    parser.add_argument(
        "--lbproxy",
        action="append",
        metavar="[NAME=]PATH",
        help="measure the lbproxy of this checkout, or this executable; may be said several times, for comparing",
    )
    parser.add_argument("--rounds", type=int, help="in place of each section's own")
    parser.add_argument("--seconds", type=float, help="of a window, in place of each section's own")
    parser.add_argument(
        "--resume", action="store_true", help="go on with a run that was stopped, after its last section"
    )
    text = "put these sections into RESULTS.md and overhead.json, which a run does by itself if nothing was left out"
    parser.add_argument("--write", action="store_true", help=text)
    parser.add_argument(
        "--profile", action="store_true", help="no comparison: where lbproxy's time goes under one section's load"
    )
    parser.add_argument("--render", type=Path, metavar="FILE", help="nothing but the tables of an earlier run's JSON")
    return parser


def chosen(said: str | None, there: list[str]) -> list[str]:
    """What an option with commas names; all if it was not given. Ends the program over a wrong name."""
    names = said.split(",") if said else there
    if wrong := set(names) - set(there):
        raise SystemExit(f"{', '.join(sorted(wrong))}: not one of {', '.join(there)}")
    return [name for name in there if name in names]


def stages(args: argparse.Namespace, sections: list[str]) -> list[Stage]:
    plan = QUICK if args.quick else FULL
    some = [Stage(load, *plan[load.key]) for load in WORKLOADS if load.key in sections]
    return [replace(one, rounds=args.rounds or one.rounds, seconds=args.seconds or one.seconds) for one in some]


def candidates(said: list[str] | None, workers: int | None = None) -> list[Subject]:
    """The lbproxys to measure, named lbproxy, or lbproxy (NAME) if there are several; `workers`: each as well as so
    many worker processes.
    """
    if workers is not None:
        return [one for subject in candidates(said or ["."]) for one in (subject, with_workers(subject, workers))]
    if not said:
        default = lbproxy("lbproxy", None)
        return [default, least_request(default)]
    pairs = [one.partition("=")[::2] if "=" in one else (Path(one).resolve().name, one) for one in said]
    if wrong := [where for _, where in pairs if not Path(where).exists()]:
        raise SystemExit(f"--lbproxy: no {', '.join(wrong)}")
    return [lbproxy(f"lbproxy ({name})" if len(pairs) > 1 else "lbproxy", Path(where)) for name, where in pairs]


def prepare() -> None:
    """Check what cannot be done without, and give this process and its children room. May end the program."""
    if missing := [tool for tool in ("taskset", "make", "cc") if shutil.which(tool) is None]:
        raise SystemExit(f"needs {', '.join(missing)}: apt-get install util-linux make gcc")
    if len(CORES) < 2:
        raise SystemExit("needs two cores: one for the proxy, one for the load")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, hard), hard))
    os.sched_setaffinity(0, {int(LOAD_CORE)})
    build()


def run(args: argparse.Namespace) -> None:
    there = [one.name for one in PEERS if not args.quick or one.name in QUICK_PEERS]
    peers = chosen(args.peers, [one.name for one in PEERS]) if args.peers else there
    subjects = [*(one for one in PEERS if one.name in peers), *candidates(args.lbproxy, args.workers)]
    words = [word for word in sys.argv[1:] if word != "--resume"]
    command = shlex.join(["python", "-m", "benchmarks.overhead", *words]) if words else "make bench-overhead"
    sections = chosen(args.sections, SECTIONS)
    # What this very command has done so far.
    partial = BENCH / f"overhead-{zlib.crc32(command.encode()):08x}.json"
    if not args.resume:
        partial.unlink(missing_ok=True)
    results = kept.read(partial)
    for stage in stages(args, sections):
        if stage.workload.key not in results["workloads"]:
            results["workloads"][stage.workload.key] = measure(stage, subjects, command=command)
            kept.write(partial, results)
    for name in sections:
        if name in OTHERS and name not in results["others"]:
            say(f"{name}: {OTHERS[name][0]}")
            results["others"][name] = kept.run_other(name)
            kept.write(partial, results)
    print(render(results))
    if args.write or not words:
        publish(kept.merge(kept.read(RAW), results))
    partial.unlink(missing_ok=True)


def publish(results: Results) -> None:
    """Into the page, its raw figures and its picture; the README's table is a test's (tests/test_docs_readme.py)."""
    kept.write(RAW, results)
    PAGE.write_text(insert(PAGE.read_text() if PAGE.exists() else "# Results\n", render(results)))
    say(draw(results, PLOT))


def main() -> None:
    args = options().parse_args()
    if args.render:
        print(render(kept.read(args.render)))
        if args.write:
            publish(kept.read(args.render))
        return
    try:
        prepare()
        if args.profile:
            (load,) = [one for one in WORKLOADS if one.key == (args.sections or "1k")] or [WORKLOADS[0]]
            for subject in candidates(args.lbproxy):
                print(f"{subject.name}, {load.title}: {profile(subject, load, seconds=args.seconds or 8)}\n")
        else:
            run(args)
    except LoadError as e:
        raise SystemExit(str(e)) from e


if __name__ == "__main__":
    main()
