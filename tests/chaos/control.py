# SPDX-License-Identifier: Apache-2.0
"""An undisturbed process beside a test: how late this machine was for it, and how slow.

    python -m tests.chaos.control FILE

It sleeps for 5 ms and does a little work, again and again. What others take of the machine makes it late, as it makes
lbproxy, its servers and its clients late: bounds on time are the specification's as the control saw them.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.chaos.ticker import Waited
from tests.support.docs import ROOT

SLEEP_S = 0.005
LOOK_S = 0.1
CALIBRATIONS = 50


class Seen(NamedTuple):
    """What it saw since a test began."""

    late_s: float
    """The longest time by which it was late."""
    blocked_s: float
    """Of that, the longest in which it did not merely wait for a CPU: `Sight.own_lag_s`."""
    slower: float
    """How many times longer its sleeps took, on average."""
    dearer: float
    """How many times more CPU time its work took than it did at best, on average."""

    def bound(self, seconds: float) -> float:
        """What takes so long on a quiet machine takes at most so long on this one."""
        return seconds * self.slower + self.late_s


class Control:
    """The running process. `close` it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()
        self._process = subprocess.Popen([sys.executable, "-m", "tests.chaos.control", str(path)], cwd=ROOT)

    def seen(self, since: float) -> Seen:
        """Since this time; of a test that is shorter than a look, the last look."""
        lines = [[float(one) for one in line.split()] for line in self._path.read_text().split("\n")[:-1]]
        if not lines:
            return Seen(0.0, 0.0, 1.0, 1.0)
        looks = [one for one in lines if one[0] >= since] or lines[-1:]
        at, late, blocked, mean, cpu = zip(*looks, strict=True)
        return Seen(max(late), max(blocked), 1.0 + sum(mean) / len(at) / SLEEP_S, sum(cpu) / len(at))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def cpu_of_work() -> float:
    began = time.thread_time()
    sum(range(5_000))
    return time.thread_time() - began


def main(path: str) -> None:
    waited, least = Waited(), min(cpu_of_work() for _ in range(CALIBRATIONS))
    with Path(path).open("ab", buffering=0) as file:
        while True:
            late, blocked, cpu, began = [], [], [], time.monotonic()
            while time.monotonic() < began + LOOK_S:
                asleep_at, before = time.monotonic(), waited.seconds()
                time.sleep(SLEEP_S)
                late.append(time.monotonic() - asleep_at - SLEEP_S)
                blocked.append(late[-1] - (waited.seconds() - before))
                cpu.append(cpu_of_work())
            least = min(least, *cpu)
            mean, dearer = sum(late) / len(late), sum(cpu) / len(cpu) / least
            file.write(b"%.3f %.5f %.5f %.5f %.3f\n" % (time.monotonic(), max(late), max(blocked), mean, dearer))


if __name__ == "__main__":
    main(sys.argv[1])
