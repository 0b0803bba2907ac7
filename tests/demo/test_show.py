# SPDX-License-Identifier: Apache-2.0
"""The demo's picture fits a small terminal, and tells failures from answers that broke off."""

from __future__ import annotations

import io

from rich.console import Console

from lbproxy.demo.load import Seen, of_all, of_phase, shares
from lbproxy.demo.show import Printed, picture, summary
from lbproxy.demo.timeline import bad_night, names
from lbproxy.demo.traffic import Row, View

NAMES = names(6)
NIGHT = bad_night(NAMES)


def seen(at_s: float, **differs: object) -> Seen:
    one = Seen("x", at_s, "chat", stream=True, endpoint="server-1", attempts=1, first_s=0.1, ended_s=at_s + 2.0)
    for name, value in differs.items():
        setattr(one, name, value)
    return one


REQUESTS = [
    seen(1.0),
    seen(49.0, wrong="cut", ended_s=50.5),
    seen(51.0, attempts=2, first_s=0.3),
    seen(52.0, wrong="status 502", first_s=None),
    seen(149.0, stream=False, first_s=None, ended_s=151.0),
]


def view(elapsed_s: float, state: str = "up") -> View:
    number = NIGHT.at(elapsed_s)
    rows = tuple(Row(name, state, state == "up", 1 / 6, 12, 17.0) for name in NAMES)
    phases = tuple(of_phase(REQUESTS, NIGHT, one) for one in range(number + 1))
    url = "http://127.0.0.1:9901/dashboard"
    return View(elapsed_s, NIGHT, number, rows, phases, of_all(REQUESTS), 3, url, "http://127.0.0.1:8080")


def drawn(moment: View) -> list[str]:
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(picture(moment))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_failure_counts_in_the_phase_in_which_it_happened() -> None:
    dead = of_phase(REQUESTS, NIGHT, 2)
    assert (dead.requests, dead.failed, dead.cut, dead.again) == (2, 1, 1, 1)
    assert dead.first_p50_s == 0.3
    assert of_phase(REQUESTS, NIGHT, 1).cut == 0
    assert of_phase(REQUESTS, NIGHT, 3).first_p50_s is None
    total = of_all(REQUESTS)
    assert (total.requests, total.failed, total.cut, total.again) == (5, 1, 1, 1)
    assert sum(of_phase(REQUESTS, NIGHT, number).requests for number in range(5)) == 5


def test_shares_are_of_what_began_of_late() -> None:
    heads = [(1.0, "b"), (6.0, "a"), (7.0, "a"), (8.0, "b"), (9.0, "a")]
    assert shares(heads, ["a", "b", "c"], 5.0) == {"a": 0.75, "b": 0.25, "c": 0.0}
    assert shares([], ["a"], 5.0) == {"a": 0.0}


def test_every_moment_fits_a_small_terminal() -> None:
    for elapsed_s in (0.0, 25.0, 79.9, 100.0, 140.0, 150.0):
        for state in ("up", "slow start 100%", "killed: half open", "draining: 124 left"):
            lines = drawn(view(elapsed_s, state))
            assert len(lines) <= 23, "one line is left for the cursor"
            assert max(map(len, lines)) <= 80
            assert not any("…" in line for line in lines)
            assert sum(line.startswith("server-") for line in lines) == 6
            assert all(step.phase in "\n".join(lines) for step in NIGHT.steps)


def test_the_picture_says_what_happens_and_what_comes() -> None:
    text = "\n".join(drawn(view(55.0)))
    assert "▶ kill -9 server-5" in text
    assert "at 1:20: both come back" in text
    assert "0:55 of 2:30" in text
    assert "▶ The demo is over. Failed requests: 1." in "\n".join(drawn(view(150.0)))


def test_a_pipe_gets_each_step_once_and_the_table_at_the_end() -> None:
    out = io.StringIO()
    with Printed(out) as show:
        for elapsed_s in (0.0, 1.0, 12.0, 21.0, 30.0, 32.0, 140.0, 150.0):
            show(view(elapsed_s))
    lines = out.getvalue().splitlines()
    assert "http://127.0.0.1:9901/dashboard" in lines[0]
    assert [line for line in lines[1:] if not line[6:].startswith(" ")] == [
        f"{at}  {step.says}" for at, step in zip(("0:00", "0:20", "0:50", "1:20", "1:50"), NIGHT.steps, strict=True)
    ]
    assert sum("requests, " in line for line in lines) == 3
    console = Console(width=120, file=io.StringIO())
    summary(view(150.0), console)
    assert isinstance(console.file, io.StringIO)
    assert "what clients see" in console.file.getvalue()
    assert "1 failed, 1 broke off" in console.file.getvalue()


def test_a_timeline_scales() -> None:
    short = NIGHT.scaled(30.0)
    assert [step.at_s for step in short.steps] == [0.0, 4.0, 10.0, 16.0, 22.0]
    assert [short.at(at_s) for at_s in (-1.0, 3.9, 4.0, 29.0, 99.0)] == [0, 0, 1, 4, 4]
    assert short.phase(1) == (4.0, 10.0)
    assert short.phase(4) == (22.0, 30.0)
