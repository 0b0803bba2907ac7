# SPDX-License-Identifier: Apache-2.0
"""`lbproxy demo --traffic`: everyday traffic on a fleet to which a bad night happens, and what to show of it.

Servers and lbproxy are processes of their own; this one is the clients and the story-teller, so that what it does for
the eye costs lbproxy nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp

from lbproxy.demo.fleet import DemoFleet, Fields, FleetError
from lbproxy.demo.load import DemoLoad, Figures, of_all, of_phase, shares
from lbproxy.demo.timeline import SLOWNESS, Timeline, Verb, bad_night, names
from lbproxy.sim.workloads.mix import ADAPTERS, everyday

SERVERS = 6
MODEL = "demo"
PRESET = "qwen-32b-2xh100"
RATE = 12.0
"""Requests a second: under a third of what these six can do, so that the fleet can lose two."""
MAX_RATE = 40.0
REFRESH_S = 0.5
SHARE_S = 10.0
"""Over which time the shares are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficOptions:
    """What can be chosen. Raises ValueError for what cannot be."""

    listen: str = "127.0.0.1:8080"
    admin: str = "127.0.0.1:9901"
    duration_s: float = 150.0
    seed: int = 1
    rate: float = RATE

    def __post_init__(self) -> None:
        if not 30.0 <= self.duration_s <= 3600.0:
            raise ValueError(f"--duration must be within 30 and 3600 seconds, got {self.duration_s:g}")
        if not 1.0 <= self.rate <= MAX_RATE:
            raise ValueError(f"--rate must be within 1 and {MAX_RATE:g} requests a second, got {self.rate:g}")


@dataclass(frozen=True, slots=True)
class Row:
    """One server, at a moment."""

    name: str
    state: str
    good: bool
    """Nothing is the matter with it."""
    share: float
    in_flight: int
    gap_ms: float | None
    """Time between two tokens there, as lbproxy has learned; None = it has not yet, or it takes no requests."""


@dataclass(frozen=True, slots=True)
class View:
    """A moment."""

    elapsed_s: float
    timeline: Timeline
    number: int
    """The number of the step whose phase it is."""
    rows: tuple[Row, ...]
    phases: tuple[Figures, ...]
    """Phases that have begun."""
    total: Figures
    running: int
    dashboard: str
    url: str


def mock_arguments(servers: int) -> dict[str, list[str]]:
    """What each simulated server is told, by its name."""
    adapters = [word for adapter in ADAPTERS for word in ("--adapter", adapter)]
    common = ["--model", MODEL, "--preset", PRESET, "--max-loras", "4", *adapters]
    return {name: [*common, "--seed", str(number)] for number, name in enumerate(names(servers))}


async def run_traffic(options: TrafficOptions, stop: asyncio.Event, show: Callable[[View], None]) -> View | None:
    """Until the end of the night, or until `stop` is set; the last moment, None if nothing had begun.

    `show` is called `1 / REFRESH_S` times a second. Raises FleetError.
    """
    mock = mock_arguments(SERVERS)
    settings = f"listen: '{options.listen}'\nadmin: '{options.admin}'\nlog: {{access: false}}\n"
    try:
        async with asyncio.TaskGroup() as tasks:
            night = tasks.create_task(_night(options, DemoFleet(tuple(mock), mock=mock, settings=settings), show))
            stopping = tasks.create_task(stop.wait())
            await asyncio.wait((night, stopping), return_when=asyncio.FIRST_COMPLETED)
            night.cancel()
            stopping.cancel()
    except* FleetError as group:
        raise FleetError(str(_first(group))) from None
    return None if night.cancelled() else night.result()


def _first(group: BaseExceptionGroup[FleetError]) -> FleetError:
    """Of those that came together."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, FleetError)
    return error


async def _night(options: TrafficOptions, fleet: DemoFleet, show: Callable[[View], None]) -> View | None:
    async with fleet:
        timeline = bad_night(fleet.names).scaled(options.duration_s)
        asks = everyday(options.seed, rate=options.rate, duration_s=options.duration_s)
        load = DemoLoad(fleet.url, MODEL, asks)
        last: View | None = None

        async def look() -> None:
            nonlocal last
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                last = view(await fleet.state(), fleet, load, timeline)
                show(last)

        # Ctrl-C ends it here, and then comes the summary of what was.
        with contextlib.suppress(asyncio.CancelledError):
            async with asyncio.TaskGroup() as tasks:
                others = [tasks.create_task(load.run()), tasks.create_task(tell(timeline, fleet, load))]
                while load.elapsed_s < timeline.ends_s:
                    await look()
                    await asyncio.sleep(REFRESH_S)
                await look()
                for task in others:
                    task.cancel()
        return last


async def tell(timeline: Timeline, fleet: DemoFleet, load: DemoLoad) -> None:
    """Let each step happen when it is due. A step that takes its time holds up no other."""
    async with asyncio.TaskGroup() as tasks:
        for step in timeline.steps:
            await asyncio.sleep(max(0.0, step.at_s - load.elapsed_s))
            if step.acts:
                tasks.create_task(fleet.carry_out(step.acts))


def view(state: Fields, fleet: DemoFleet, load: DemoLoad, timeline: Timeline) -> View:
    """What there is to see now."""
    elapsed_s = min(load.elapsed_s, timeline.ends_s)
    number = timeline.at(elapsed_s)
    share = shares(load.heads, fleet.names, elapsed_s - SHARE_S)
    phases = [of_phase(load.seen, timeline, one) for one in range(number + 1)]
    return View(
        elapsed_s,
        timeline,
        number,
        tuple(_row(one, share, fleet.doing) for one in state["endpoints"]),
        tuple(phases),
        of_all(load.seen),
        load.running,
        fleet.dashboard,
        fleet.url,
    )


def _row(one: Fields, share: Mapping[str, float], doing: Mapping[str, Verb]) -> Row:
    name = one["name"]
    words, good = _state(one, doing.get(name))
    takes = one["health"] == "up" and not one["draining"]
    gap_ms = one["learned"]["gap_ms"] if takes and one["learned"] and one["learned"]["samples"]["gap_ms"] else None
    return Row(name, words, good, share[name], one["in_flight"], gap_ms)


def _state(one: Fields, doing: Verb | None) -> tuple[str, bool]:
    """In few words, and whether it is as it should be."""
    match doing:
        case Verb.SLOW:
            return f"{SLOWNESS}x slower", False
        case Verb.KILL:
            return f"killed: {one['health']}", False
        case Verb.START | Verb.RESTART:
            return "starting", False
    if one["draining"]:
        left = one["in_flight"]
        return (f"draining: {left} left" if left else "drained"), False
    if one["health"] != "up":
        return str(one["health"]).replace("_", " "), False
    if one["share"] < 1.0:
        return f"slow start {one['share']:.0%}", True
    return "up", True
