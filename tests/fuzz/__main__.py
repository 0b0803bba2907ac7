# SPDX-License-Identifier: Apache-2.0
"""Runs a fuzzer by hand.

    python -m tests.fuzz NAME|all [--runs N] [--seed S] [--first N] [--keep]

Input number n of a seed is always the same. A JSON line says what became of the inputs; what differs or crashes is
printed with its number, and the exit code is 1. `--keep` writes the line where README.md gets it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import TypedDict

from tests.fuzz import agents, bodies, chunks, events, forms, heads, metrics, segments, settings
from tests.fuzz.mutate import mutate
from tests.fuzz.oracle import DifferenceError

FUZZERS: dict[str, ModuleType] = {
    one.NAME: one for one in (heads, chunks, metrics, bodies, agents, segments, forms, events, settings)
}
RESULTS = Path(__file__).parent / "results"
SHOWN = 20


class Report(TypedDict):
    """What a run found."""

    fuzzer: str
    runs: int
    seed: int
    seconds: float
    crashes: int
    differ: int
    labels: dict[str, int]
    """What became of the inputs: how many were read alike, refused, or explained by a rule."""
    shown: list[str]
    """Some of what differs or crashes."""


def run(name: str, runs: int, seed: int, first: int = 0) -> Report:
    """Inputs `first` to `first + runs` of a seed."""
    fuzzer = FUZZERS[name]
    labels: Counter[str] = Counter()
    shown: list[str] = []
    crashes = differ = 0
    began = time.monotonic()
    for number in range(first, first + runs):
        rng = random.Random(f"{seed}:{number}")
        data = mutate(rng, fuzzer.SEEDS, fuzzer.TOKENS)
        try:
            labels[fuzzer.check(data, rng)] += 1
        except DifferenceError as difference:
            differ += 1
            shown.append(f"{number}: {str(difference)[:600]}: {data[:300]!r}")
        except Exception as error:  # noqa: BLE001 - any exception is what is looked for
            crashes += 1
            shown.append(f"{number}: {error!r:.600}: {data[:300]!r}")
    seconds = round(time.monotonic() - began, 1)
    counted = dict(labels.most_common())
    return Report(
        fuzzer=name,
        runs=runs,
        seed=seed,
        seconds=seconds,
        crashes=crashes,
        differ=differ,
        labels=counted,
        shown=shown[:SHOWN],
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("name", choices=[*FUZZERS, "all"])
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args(arguments)
    failed = False
    for name in FUZZERS if args.name == "all" else [args.name]:
        report = run(name, args.runs, args.seed, args.first)
        print(json.dumps(report, indent=None if not report["shown"] else 1), flush=True)
        failed |= bool(report["crashes"] or report["differ"])
        if args.keep:
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"{name}.json").write_text(json.dumps(report) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
