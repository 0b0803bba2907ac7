# SPDX-License-Identifier: Apache-2.0
"""Where lbproxy's time goes under a load: py-spy's samples as two tables, functions and lines.

py-spy looks at the Python stack only: what C code does (uvloop, the parsers, the kernel) is counted for the line that
called it, or for the event loop's own frame. It pauses the process for each sample, so rates meanwhile mean nothing.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from benchmarks.overhead.load import BENCH, WARM, LoadError, Workload, run_load, server
from benchmarks.overhead.process import LOAD_CORE
from benchmarks.overhead.report import table
from benchmarks.overhead.subjects import VENV, Subject

TOP = 10
SAMPLES_PER_S = 250
IDLE = ("/threading.py", "_worker (futures/thread.py")
"""Where threads wait for work, which py-spy takes for being busy."""


def profile(subject: Subject, load: Workload, *, seconds: float) -> str:
    """Load it and sample it; the tables. Raises LoadError, also if py-spy is missing or may not look."""
    spy = VENV / "bin/py-spy"
    if not spy.exists():
        raise LoadError("py-spy is not in .bench/venv: make profile installs it")
    with tempfile.TemporaryDirectory(dir=BENCH) as name, server() as (port, server_pid):
        samples = Path(name) / "samples"
        with subject.start(port, Path(name) / "proxy") as proxy:
            proxy.warm_up(WARM.body())
            pid = str(proxy.usage().pids[0])
            options = [
                "--format",
                "raw",
                "--rate",
                str(SAMPLES_PER_S),
                "--duration",
                f"{seconds:.0f}",
                "--full-filenames",
            ]
            command = ["taskset", "-c", LOAD_CORE, str(spy), "record", *options, "--pid", pid, "--output", str(samples)]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as spying:
                run_load(load, proxy.port, seconds + 1, server_pid=server_pid, proxy=proxy.usage())
                said = spying.communicate(timeout=30)[1]
        if not samples.exists():
            raise LoadError(f"py-spy: {said.strip()}")
        return render(samples.read_text())


def render(samples: str) -> str:
    """Tables of py-spy's raw format: a line is frames from the outermost to the innermost, and a count."""
    functions, lines, within = Counter[str](), Counter[str](), Counter[str]()
    for line in samples.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = [_short(frame) for frame in stack.split(";")]
        if any(waits in frames[-1] for waits in IDLE):
            continue
        names = [re.sub(r":\d+\)$", ")", frame) for frame in frames]
        lines[frames[-1]] += int(count)
        functions[names[-1]] += int(count)
        for name in set(names):
            within[name] += int(count)
    total = max(1, functions.total())
    by_function = [[name, f"{n / total:.1%}", f"{within[name] / total:.1%}"] for name, n in functions.most_common(TOP)]
    return "\n\n".join(
        [
            f"{total:,} samples.",
            table(["function", "itself", "with what it calls"], by_function),
            table(["line", "itself"], _rows(lines.most_common(TOP), total)),
        ]
    )


def _rows(counted: Iterable[tuple[str, int]], total: int) -> list[list[str]]:
    return [[name, f"{count / total:.1%}"] for name, count in counted]


def _short(frame: str) -> str:
    """`name (folder/file.py:line)`: of the path, only the last two parts."""
    return re.sub(r"\((?:[^()]*/)?([^/()]+/[^/()]+)\)$", r"(\1)", frame)
