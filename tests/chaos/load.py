# SPDX-License-Identifier: Apache-2.0
"""Load on a proxy while a test does something to it: starts the client's process, reads what became of each request."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO

from tests.chaos.client import Plan, Result
from tests.support.docs import ROOT


class Load:
    """Requests by a plan, from a process of its own. Its `with` block ends when what runs is finished."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        number = len(list(folder.glob("load-*")))
        self._path = folder / f"load-{number}.jsonl"
        self._output: IO[bytes] = self._path.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.client", json.dumps(asdict(plan))],
            stdin=subprocess.PIPE,
            stdout=self._output,
            cwd=ROOT,
        )

    def __enter__(self) -> Load:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._process.kill()
        self.finish()

    def finish(self) -> list[Result]:
        """Begin nothing more, wait for what runs; how all of them ended."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._process.stdin.close()
        return self.wait()

    def wait(self, within_s: float = 100.0) -> list[Result]:
        """Until the plan's count is done."""
        self._process.wait(within_s)
        self._output.close()
        return self.results()

    def results(self) -> list[Result]:
        """Those that ended so far."""
        lines = self._path.read_bytes().split(b"\n")[:-1]
        return [Result(**json.loads(line)) for line in lines]

    def until(self, good: int, within_s: float = 30.0) -> None:
        """Wait for so many good answers: the load runs."""
        end = time.monotonic() + within_s
        while sum(one.how == "ok" for one in self.results()) < good:
            assert time.monotonic() < end, f"the load does not run: {told(self.results())}"
            assert self._process.poll() is None, told(self.results())
            time.sleep(0.02)


def told(results: Sequence[Result]) -> str:
    """For people: how many ended how."""
    return ", ".join(f"{n} {how}" for how, n in Counter(f"{r.how} {r.code}".strip() for r in results).most_common())


def how_many(results: Sequence[Result], *hows: str) -> int:
    return sum(one.how in hows for one in results)


def needless(results: Sequence[Result]) -> int:
    """UF: requests of which the client had no byte, and got none. Only where a healthy endpoint existed throughout."""
    return sum(one.failed for one in results)


def silent(results: Sequence[Result]) -> int:
    """SF: a normal end of an answer that is not whole."""
    return how_many(results, "silent")


def quantile(values: Sequence[float], share: float) -> float:
    """Of no values: 0."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
