# SPDX-License-Identifier: Apache-2.0
"""What the demo shows in a terminal of 80 columns and 24 lines, and what it prints where there is none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lbproxy.demo.load import Figures
from lbproxy.demo.traffic import Row, View

BAR = 22
"""Cells of a bar."""
FULL = 0.4
"""The share that fills it."""
EIGHTHS = " ▏▎▍▌▋▊▉█"
LINE_S = 10.0
"""How often a line is printed where nothing can be drawn."""


class Drawn:
    """A picture that is drawn over and over. A context; its last picture stays."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> Callable[[View], None]:
        self._live.start()
        return lambda view: self._live.update(picture(view), refresh=True)

    def __exit__(self, *_: object) -> None:
        self._live.stop()


class Printed:
    """Lines, for a pipe or a file. A context."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._number = -1
        self._due_s = 0.0

    def __enter__(self) -> Callable[[View], None]:
        return self.show

    def show(self, view: View) -> None:
        """A line for each step, and one every `LINE_S`."""
        if self._number < 0:
            self._say(f"lbproxy is at {view.url}; see it work in a browser: {view.dashboard}")
        if view.number > self._number:
            for step in view.timeline.steps[self._number + 1 : view.number + 1]:
                self._say(f"{clock(step.at_s)}  {step.says}")
            self._number = view.number
        elif view.elapsed_s >= self._due_s:
            found = view.phases[-1]
            servers = ", ".join(
                f"{row.name} {row.share:.0%}" + ("" if row.good else f" ({row.state})") for row in view.rows
            )
            text = f"first byte p50 {ms(found.first_p50_s)}, p99 {ms(found.first_p99_s)}"
            self._say(f"{clock(view.elapsed_s)}    {found.requests} requests, {_trouble(found)}, {text}; {servers}")
        else:
            return
        self._due_s = view.elapsed_s + LINE_S

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def __exit__(self, *_: object) -> None:
        self._out.flush()


def _trouble(found: Figures) -> str:
    return f"{found.failed} failed, {found.cut} cut"


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def ms(seconds: float | None) -> str:
    """In milliseconds; a dash if there is none."""
    return "-" if seconds is None else f"{1000.0 * seconds:,.0f} ms"


def picture(view: View) -> Group:
    """A moment."""
    return Group(*_heading(view), Text(), _servers(view), Text(), table(view), _foot(view))


def _heading(view: View) -> list[RenderableType]:
    steps, now, over = view.timeline.steps, view.number, view.elapsed_s >= view.timeline.ends_s
    head = Table.grid(expand=True)
    head.add_column()
    head.add_column(justify="right")
    dashboard = view.dashboard.partition("#")[0]  # the buttons' token does not fit here
    left = Text.assemble(("lbproxy demo --traffic", "bold"), ("   dashboard ", "dim"), (dashboard, "cyan"))
    head.add_row(left, Text(f"{clock(view.elapsed_s)} of {clock(view.timeline.ends_s)}", style="bold"))
    says = Text(f"▶ {steps[now].says}", style="bold yellow" if now else "bold green", no_wrap=True)
    if over:
        says = Text(f"▶ The demo is over. Failed requests: {view.total.failed}.", style="bold green")
    following = steps[now + 1] if now + 1 < len(steps) else None
    coming = "" if following is None else f"  at {clock(following.at_s)}: {following.phase}"
    return [head, Text(), says, Text(coming, style="dim")]


def _servers(view: View) -> Table:
    shown = Table.grid(padding=(0, 1, 0, 0))
    for justify, width in (("left", 9), ("left", 17), ("left", BAR + 5), ("right", 9), ("right", 12)):
        shown.add_column(justify=justify, min_width=width, no_wrap=True)  # type: ignore[arg-type]
    heads = ("server", "", "share of the last 10 s", "in flight", "ms per token")
    shown.add_row(*(Text(head, style="dim") for head in heads))
    for row in view.rows:
        meant = row.gap_ms is not None or row.state.startswith("drain")
        style = "green" if row.good else "yellow" if meant else "red"
        gap = Text("-" if row.gap_ms is None else f"{row.gap_ms:.0f}", style="" if row.good else style)
        shown.add_row(row.name, Text(row.state, style=style), _bar(row, style), str(row.in_flight), gap)
    return shown


def _bar(row: Row, style: str) -> Text:
    eighths = round(8 * BAR * min(1.0, row.share / FULL))
    bar = "█" * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")
    return Text.assemble((f"{bar:<{BAR}}", style), f" {row.share:>4.0%}")


def table(view: View) -> Table:
    """What clients saw, by phase; the last row of all."""
    shown = Table.grid(padding=(0, 1, 0, 0))
    widths = (("left", 20), ("right", 9), ("right", 12), ("right", 5), ("right", 7), ("right", 9), ("right", 9))
    for justify, width in widths:
        shown.add_column(justify=justify, min_width=width, no_wrap=True)  # type: ignore[arg-type]
    heads = ("what clients see", "requests", "retried", "cut", "failed", "p50", "p99")
    shown.add_row(*(Text(head, style="dim") for head in heads))
    for number, found in enumerate(view.phases):
        mark = "▶ " if number == view.number and view.elapsed_s < view.timeline.ends_s else "  "
        shown.add_row(Text(f"{mark}{view.timeline.steps[number].phase}"), *_cells(found))
    for step in view.timeline.steps[len(view.phases) :]:
        shown.add_row(Text(f"  {step.phase}", style="dim"), Text(f"at {clock(step.at_s)}", style="dim"))
    shown.add_row(Text("  total", style="bold"), *_cells(view.total))
    return shown


def _cells(found: Figures) -> list[Text]:
    counts = ((found.again, "cyan", "dim"), (found.cut, "yellow", "dim"), (found.failed, "bold red", "green"))
    return [
        Text(f"{found.requests:,}"),
        *(Text(str(count), style=style if count else none) for count, style, none in counts),
        Text(ms(found.first_p50_s)),
        Text(ms(found.first_p99_s)),
    ]


def _foot(view: View) -> Text:
    text = "p50, p99: time to a stream's first byte · cut: broke off when its server crashed"
    return Text(text, style="dim", no_wrap=True, overflow="ellipsis")


def summary(view: View, console: Console) -> None:
    """The end: what it came to."""
    total = view.total
    if not console.is_terminal:  # else it stands there already
        console.print(table(view))
    console.print()
    console.print(
        f"{total.requests:,} requests, and {view.running} more running at the end: {total.failed} failed, "
        f"{total.cut} broke off when their server crashed,\n{total.again} succeeded after a retry on another server.",
        soft_wrap=True,
    )
    console.print("With your own servers: lbproxy --config FILE", style="dim")
