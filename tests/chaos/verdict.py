# SPDX-License-Identifier: Apache-2.0
"""One test's figures and what they must be; its JSON line.

A figure that misses its bound fails the test at its end, all of them at once, so that the line always says everything.
Of peers nothing is demanded: their line says what they missed.

Bounds on time are the specification's, as an undisturbed process saw this machine meanwhile (`control.py`). In the
short form, beside other tests, they are three times that and half a second: enough to see a deadline that does not
work.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.control import Control, Seen

FORM = os.environ.get("LBPROXY_CHAOS_FORM", "short")
"""short: with all tests. fast: `make chaos`. full: the specification's counts, by hand."""
PROXY = os.environ.get("LBPROXY_CHAOS_PROXY", "lbproxy")
"""Who is tested: lbproxy, or a name of `peers.py`."""
RESULTS = os.environ.get("LBPROXY_CHAOS_RESULTS")
"""The file that gets the lines; None: they are only printed."""
assert FORM in {"short", "fast", "full"}, FORM


def pick(short: int, fast: int, full: int) -> int:
    """A count for each form."""
    return {"short": short, "fast": fast, "full": full}[FORM]


@dataclass
class Case:
    """One test while it runs."""

    id: str
    what: str
    control: Control
    figures: dict[str, float | int | str] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    waited_s: Callable[[], float] = lambda: 0.0
    """The longest time in which lbproxy merely waited for a CPU: one that works gets less of a busy machine than one
    that sleeps, as the control does."""
    began: float = field(default_factory=time.monotonic)

    def figure(self, name: str, value: float | str) -> None:
        """A figure of which nothing is demanded."""
        self.figures[name] = round(value, 3) if isinstance(value, float) else value

    def expect(
        self, name: str, value: float, *, at_most: float = float("inf"), at_least: float = -float("inf")
    ) -> None:
        """A figure with bounds."""
        self.figure(name, value)
        if not at_least <= value <= at_most:
            bounds = [f"at least {at_least:g}"] * (at_least > -float("inf")) + [f"at most {at_most:g}"] * (
                at_most < float("inf")
            )
            self.missed.append(f"{name} is {value:g}, must be {' and '.join(bounds)}")

    def time(self, name: str, seconds: float, *, at_most: float) -> None:
        """A duration, shown in ms; infinite: it never happened. The short form allows three times as much and 0.5 s."""
        shown = round(1000 * seconds, 1) if seconds < float("inf") else 1e9
        self.expect(f"{name}, ms", shown, at_most=1000 * (self.seen.bound(lenient(at_most)) + self.waited_s()))

    @property
    def seen(self) -> Seen:
        """What the control saw so far."""
        return self.control.seen(self.began)

    def line(self) -> str:
        """The JSON line."""
        return json.dumps(
            {
                "test": self.id,
                "proxy": PROXY,
                "form": FORM,
                "what": self.what,
                "figures": self.figures,
                "missed": self.missed,
                "seconds": round(time.monotonic() - self.began, 1),
            }
        )

    def publish(self) -> None:
        """Print the line, and add it to the results."""
        print(self.line())
        if RESULTS:
            with Path(RESULTS).open("a") as file:
                file.write(self.line() + "\n")


def lenient(seconds: float) -> float:
    """A bound on a duration, as this form has it."""
    return 3 * seconds + 0.5 if FORM == "short" else seconds
