# SPDX-License-Identifier: Apache-2.0
"""Hostile clients and servers by hand. One JSON line for each measurement, and a table of them.

    python -m tests.security.hostile [KIND ...] [--form default|kubernetes] [--no-key] [--seconds 60]
    python -m tests.security.hostile --table            every kind, both forms, with and without a key: a night
    python -m tests.security.hostile --minutes 60       everything mixed, in cycles with a rest behind each

A KIND is one of clients, one of servers, or `mix`. The same `--seed` draws the same lives.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TypedDict

import uvloop

from tests.security.hostile.kinds import ALL, MIX, setup_of
from tests.security.hostile.measure import measured
from tests.security.hostile.soak import soak
from tests.security.hostile.target import FORMS

HEADER = ("kind", "form", "key", "p99 ms", "friendly", "ratio", "failed", "+MiB", "kept", "fds", "faults")


class Common(TypedDict):
    """What all setups of a run have in common."""

    connections: int
    seed: int
    pin: bool


def common(args: argparse.Namespace) -> Common:
    return Common(connections=args.connections, seed=args.seed, pin=args.pin)


def keep(output: str | None, line: dict[str, object]) -> None:
    """Add it to a file, if there is one."""
    if output:
        with Path(output).open("a") as file:
            file.write(json.dumps(line) + "\n")


def row(line: dict[str, object]) -> str:
    names = ("name", "form", "key", "p99_ms", "friendly_p99_ms", "ratio", "failures", "growth_mib", "kept_mib")
    cells = [str(line[one]) for one in (*names, "descriptors_left", "faults")]
    return "| " + " | ".join(cells) + " |"


async def table(names: list[str], args: argparse.Namespace, forms: list[str], keys: list[bool]) -> int:
    """A measurement of each; how many had a fault."""
    print("| " + " | ".join(HEADER) + " |", flush=True)
    faulty = 0
    for name in names:
        for form in forms:
            for key in keys:
                with tempfile.TemporaryDirectory() as folder:
                    setup = setup_of(name, form=form, key=key, **common(args))
                    it = await measured(
                        setup, Path(folder), seconds=args.seconds, rounds=args.rounds, compare=args.compare
                    )
                line = it.figures()
                faulty += bool(it.faults())
                keep(args.output, line)
                print(row(line), flush=True)
    return faulty


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.security.hostile")
    parser.add_argument("kinds", nargs="*", help=", ".join(ALL))
    parser.add_argument("--table", action="store_true", help="every kind in every form")
    parser.add_argument("--minutes", type=float, help="a soak of so long")
    parser.add_argument("--cycle", type=float, default=120.0, help="seconds of a soak's cycle")
    parser.add_argument("--form", choices=FORMS, default="default")
    parser.add_argument("--no-key", dest="key", action="store_false", help="the hostile ones have none")
    parser.add_argument("--seconds", type=float, default=60.0, help="of hostility, in `--rounds`")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--alone", dest="compare", action="store_false", help="without the friendly ones in turn")
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-pin", dest="pin", action="store_false", help="all cores for everybody")
    parser.add_argument("--output", help="a file that gets the JSON lines")
    parser.add_argument("--first", action="store_true", help="before other programs of this machine: needs root")
    args = parser.parse_args(arguments)
    if args.first:
        os.nice(-10)
    if unknown := set(args.kinds) - set(ALL):
        parser.error(f"no such kind: {', '.join(sorted(unknown))}")
    print(f"seed {args.seed}", flush=True)
    if args.minutes:
        setup = setup_of(MIX, form=args.form, key=args.key, **common(args))
        return uvloop.run(soak(setup, minutes=args.minutes, cycle_s=args.cycle, output=args.output))
    names = list(args.kinds or (ALL if args.table else [MIX]))
    forms = list(FORMS) if args.table else [args.form]
    keys = [True, False] if args.table else [args.key]
    return uvloop.run(table(names, args, forms, keys))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
