# SPDX-License-Identifier: Apache-2.0
"""What a run brings together: one record for each section, kept as soon as the section is done.

Sections are the workloads, each with all proxies in one interleaved run, and three other benchmarks of lbproxy alone
that give one or two figures each. A section's record says all that is needed to judge it (when, on what, who), so that
one can be measured again without the others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TypedDict, cast

from benchmarks.overhead.load import ROOT, LoadError
from benchmarks.overhead.plan import Section, today
from benchmarks.overhead.process import LOAD_CORE, PROXY_CORE


class Other(TypedDict):
    """What another benchmark says of lbproxy alone."""

    date: str
    command: str
    load_average: list[float]
    figures: dict[str, float]


class Results(TypedDict):
    """What benchmarks/results/overhead.json holds, by section."""

    workloads: dict[str, Section]
    others: dict[str, Other]


OTHERS = {
    "decision": ("benchmarks.decision", "--json"),
    "scrape": ("benchmarks.scrape", "--json"),
    "start": ("benchmarks.startup", "--json"),
}
"""Module and options. It prints a JSON object of numbers."""


def run_other(name: str) -> Other:
    """Measure. Raises LoadError."""
    command = [sys.executable, "-m", *OTHERS[name]]
    about: Other = {
        "date": today(),
        "command": f"python -m {OTHERS[name][0]}",
        "load_average": list(os.getloadavg()),
        "figures": {},
    }
    cores = f"{PROXY_CORE},{LOAD_CORE}"
    ran = subprocess.run(
        ["taskset", "-c", cores, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False, timeout=600
    )
    if ran.returncode:
        raise LoadError(f"{name}: it ended with {ran.returncode}")
    about["figures"] = json.loads(ran.stdout)
    return about


def read(path: Path) -> Results:
    """Of an earlier run; nothing if there was none."""
    if not path.exists():
        return {"workloads": {}, "others": {}}
    return cast(Results, json.loads(path.read_text()))


def write(path: Path, results: Results) -> None:
    """Whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(results, separators=(",", ":")) + "\n")
    new.replace(path)


def merge(old: Results, new: Results) -> Results:
    """The old sections but for those that the new run has."""
    return {"workloads": {**old["workloads"], **new["workloads"]}, "others": {**old["others"], **new["others"]}}
