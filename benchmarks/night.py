# SPDX-License-Identifier: Apache-2.0
"""One night played through, for docs/operations.md: a server slows down, another dies, a deploy drains a third.

    make night        or .venv/bin/python -m benchmarks.night

Six simulated servers as processes of their own, lbproxy before them at its defaults, everyday traffic on it, and a
Prometheus with the rules of deploy/prometheus/, all in real time: eight minutes. At each step it asks what
an operator would ask, with the commands that one would use, and writes what they print, what Prometheus fires and what
clients saw to results/night.json; `page` makes the text of it, and tests/test_docs_night.py holds the page to it.

Needs `prometheus`, and Chromium for the pictures (`make test-tools`).
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict

import aiohttp
import orjson
import uvloop

from lbproxy.demo.fleet import DemoFleet, Fields
from lbproxy.demo.load import DemoLoad, of_phase
from lbproxy.demo.show import clock
from lbproxy.demo.timeline import SLOWNESS, Act, Timeline, TimelineStep, Verb
from lbproxy.demo.traffic import MODEL, SERVERS, mock_arguments
from lbproxy.sim.workloads.mix import everyday
from tests.support.browser import BROWSER
from tests.support.browser import page as browser_page
from tests.support.pictures import save

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "night.json"
PICTURE = ROOT / "docs" / "images" / "night.png"
RULES = ROOT / "deploy" / "prometheus" / "lbproxy.rules.yml"
RATE, SEED = 12.0, 1
INTERVAL_S = 5
"""Of Prometheus: scrapes and rules."""
LOOK_S = 1.0
"""How often Prometheus is asked what it fires."""
PATIENCE_S = 20.0
"""How long a request worth explaining is waited for."""
WIDTH, HEIGHT = 1440, 680


class Shown(TypedDict):
    """What a command printed."""

    at_s: float
    command: str
    """As an operator types it; `--admin` is left out."""
    output: str


class Change(TypedDict):
    """An alert became pending, firing, or was over."""

    at_s: float
    alert: str
    endpoint: str
    state: str


class Phase(TypedDict):
    """One step of the night."""

    at_s: float
    says: str
    clients: dict[str, Any]
    """`Figures` of the phase."""
    shown: list[Shown]


class Wrong(TypedDict):
    """A request that did not go well."""

    id: str
    ended_s: float
    endpoint: str | None
    text: str


class Result(TypedDict):
    """A night."""

    phases: list[Phase]
    alerts: list[Change]
    wrong: list[Wrong]


def night(names: tuple[str, ...]) -> Timeline:
    """When what happens. Long enough for alerts that wait two minutes."""
    slow, dead, third = names[2], names[4], names[:2]
    return Timeline(
        (
            TimelineStep(0.0, "all is well", "All is well."),
            TimelineStep(
                30.0,
                "slow",
                f"`{slow}` becomes {SLOWNESS} times as slow. Its `/health` returns 200 all the time.",
                (Act(Verb.SLOW, (slow,)),),
            ),
            TimelineStep(
                240.0,
                "dead",
                f"`{dead}` is killed (`kill -9`), while `{slow}` is still slow.",
                (Act(Verb.KILL, (dead,)),),
            ),
            TimelineStep(
                380.0,
                "back",
                f"`{dead}` is started again, with an empty cache. `{slow}` is as fast as it was.",
                (Act(Verb.WELL, (slow,)), Act(Verb.START, (dead,))),
            ),
            TimelineStep(
                420.0, "deploy", f"A deploy: `{third[0]}` and `{third[1]}`, a third of the fleet, get a new version."
            ),
        ),
        480.0,
    )


# --- Asking -----------------------------------------------------------------------------------------------------------


class Night:
    """One run."""

    def __init__(self, fleet: DemoFleet, load: DemoLoad, prometheus: str, http: aiohttp.ClientSession) -> None:
        self.timeline = night(fleet.names)
        self.alerts: list[Change] = []
        self.shown: list[list[Shown]] = [[] for _ in self.timeline.steps]
        self._fleet = fleet
        self._load = load
        self._prometheus = prometheus
        self._http = http
        self._states: dict[tuple[str, str], str] = {}

    async def run(self) -> Result:
        """All of it."""
        slow, dead, third = self._fleet.names[2], self._fleet.names[4], self._fleet.names[:2]
        async with asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(self._load.run()), tasks.create_task(self._watch())]
            await self._until(25.0)
            await self._ask(0, "status")
            await self._step(1)
            await self._until(50.0)
            await self._explain(1, lambda one: one["stream"] and _cached_at(one, slow) and one["endpoint"] != slow)
            await self._until(235.0)
            await self._ask(1, "status")
            await self._step(2)
            await self._until(255.0)
            await self._explain(2, lambda one: any(failed["endpoint"] == dead for failed in one["failed"]))
            await self._explain(2, lambda one: one["endpoint"] == dead and one["outcome"] == "upstream_broke")
            await self._until(375.0)
            await self._ask(2, "status")
            await picture(f"{self._fleet.admin_url}/dashboard")
            await self._step(3)
            await self._until(390.0)
            await self._ask(3, "status")
            await self._explain(3, lambda one: _left_out(one, dead) == "slow start")
            await self._step(4)
            await self._deploy(third)
            await self._until(self.timeline.ends_s)
            for task in others:
                task.cancel()
        phases = [
            Phase(
                at_s=step.at_s,
                says=step.says,
                clients=asdict(of_phase(self._load.seen, self.timeline, number)),
                shown=self.shown[number],
            )
            for number, step in enumerate(self.timeline.steps)
        ]
        wrong = [
            Wrong(id=one.id, ended_s=round(one.ended_s, 1), endpoint=one.endpoint, text=one.wrong[:200])
            for one in self._load.seen
            if one.wrong is not None
        ]
        return Result(phases=phases, alerts=self.alerts, wrong=wrong)

    async def _deploy(self, third: tuple[str, ...]) -> None:
        """As a script would do it: drain, wait, restart, undrain. Both at the same time."""
        draining = asyncio.gather(*(self._ask(4, "drain", name, "--wait", "--timeout", "120") for name in third))
        await asyncio.sleep(1.5)
        await self._ask(4, "status")
        await self._explain(4, lambda one: _left_out(one, third[0]) == "draining")
        await draining
        await self._fleet.carry_out([Act(Verb.RESTART, third)])
        for name in third:
            await self._ask(4, "undrain", name)

    async def _until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self._load.elapsed_s))

    async def _step(self, number: int) -> None:
        step = self.timeline.steps[number]
        await self._until(step.at_s)
        print(f"{clock(self._load.elapsed_s)}  {step.says}", flush=True)
        await self._fleet.carry_out(step.acts)

    async def _ask(self, number: int, *words: str) -> None:
        """Run a command as an operator would."""
        at_s = self._load.elapsed_s
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lbproxy", *words, "--admin", self._fleet.admin_url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output = (await process.communicate())[0].decode()
        assert process.returncode == 0, output
        text = "".join(f"{line.rstrip()}\n" for line in output.splitlines())
        self.shown[number].append(Shown(at_s=round(at_s, 1), command=" ".join(words), output=text))

    async def _explain(self, number: int, wanted: Callable[[Fields], bool]) -> None:
        """Of the newest request of this phase that ended and is wanted; one is waited for."""
        begin_s, _ = self.timeline.phase(number)
        patience_s = self._load.elapsed_s + PATIENCE_S
        while self._load.elapsed_s < patience_s:
            async with self._http.get(f"{self._fleet.admin_url}/admin/decisions?limit=1000") as answer:
                recent = [one["id"] for one in (await answer.json())["decisions"]]
            ended = [one for one in self._load.seen if one.ended_s >= begin_s]
            ours = {one.id for one in ended if one.at_s >= begin_s or one.attempts > 1 or one.wrong is not None}
            for request in recent:
                if request in ours and wanted(await self._decision(request)):
                    await self._ask(number, "explain", request)
                    return
            await asyncio.sleep(LOOK_S)
        print(f"{clock(self._load.elapsed_s)}    nobody to explain", flush=True)

    async def _decision(self, request: str) -> Fields:
        async with self._http.get(f"{self._fleet.admin_url}/admin/decisions/{request}") as answer:
            return dict(await answer.json())

    async def _watch(self) -> None:
        """Note each change of an alert."""
        while True:
            async with self._http.get(f"{self._prometheus}/api/v1/alerts") as answer:
                found = (await answer.json())["data"]["alerts"]
            now = {(one["labels"]["alertname"], one["labels"].get("endpoint", "")): one["state"] for one in found}
            for key in self._states | now:
                state = now.get(key, "over")
                if state != self._states.get(key, "over"):
                    self.alerts.append(
                        Change(at_s=round(self._load.elapsed_s, 1), alert=key[0], endpoint=key[1], state=state)
                    )
                    print(f"{clock(self._load.elapsed_s)}    {key[0]} {key[1]}: {state}", flush=True)
            self._states = now
            await asyncio.sleep(LOOK_S)


def _cached_at(one: Fields, name: str) -> bool:
    """An endpoint had far more of the prompt in its cache than any other."""
    shown = one["decisions"][-1]["shown"] if one["decisions"] else []
    prefill = {other["endpoint"]: other["parts"]["prefill"] or 0.0 for other in shown}
    return name in prefill and all(2.0 * prefill[name] < ms for other, ms in prefill.items() if other != name)


def _left_out(one: Fields, name: str) -> str | None:
    """Why an endpoint was not asked."""
    decisions = one["decisions"]
    left_out = decisions[-1]["left_out"] if decisions else []
    return next((str(other["why"]).replace("_", " ") for other in left_out if other["endpoint"] == name), None)


async def picture(url: str) -> None:
    """The top of the dashboard."""
    if BROWSER is None:
        print("no Chromium: no picture", flush=True)
        return
    async with browser_page() as tab:
        await tab.look(WIDTH, HEIGHT)
        await tab.visit(url)
        await tab.until("document.getElementById('connection-text').textContent === 'Live'")
        await asyncio.sleep(2.0)
        taken = await tab.picture()
    save(taken, PICTURE)


# --- Prometheus -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def prometheus(admin_url: str) -> AsyncIterator[str]:
    """A Prometheus with our rules that scrapes lbproxy; its URL."""
    program = shutil.which("prometheus")
    assert program is not None, "no Prometheus: `make test-tools`"
    with tempfile.TemporaryDirectory(prefix="lbproxy-night-") as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        target = admin_url.removeprefix("http://")
        (Path(folder) / "prometheus.yml").write_text(
            f"global: {{scrape_interval: {INTERVAL_S}s, evaluation_interval: {INTERVAL_S}s}}\n"
            f"rule_files: ['{RULES}']\n"
            f"scrape_configs: [{{job_name: lbproxy, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        process = await asyncio.create_subprocess_exec(
            program,
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            await _ready(f"http://{address}")
            yield f"http://{address}"
        finally:
            process.kill()
            await process.wait()


async def _ready(url: str) -> None:
    async with aiohttp.ClientSession() as http, asyncio.timeout(30):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(f"{url}/-/ready") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.2)


# --- The page ---------------------------------------------------------------------------------------------------------


def page(result: Result) -> str:
    """The section, as Markdown."""
    return "\n".join(_lines(result))


SHORT_LINES = 8
"""Longer outputs are in results/night.json only; docs/admin.md explains such pages."""


def _lines(result: Result) -> Iterator[str]:
    phases = result["phases"]
    ends = [phase["at_s"] for phase in phases[1:]] + [float("inf")]
    for phase, end_s in zip(phases, ends, strict=True):
        yield f"**{clock(phase['at_s'])}** {phase['says']}\n"
        changes = [one for one in result["alerts"] if phase["at_s"] <= one["at_s"] < end_s]
        yield f"{_clients(phase['clients'])} {_alerts(changes)}\n"
        shown = [one for one in phase["shown"] if one["output"].count("\n") <= SHORT_LINES]
        if shown:
            said = (
                f"{clock(one['at_s'])} $ lbproxy {one['command']}\n{one['output']}"
                for one in sorted(shown, key=lambda one: one["at_s"])
            )
            yield f"```\n{''.join(said)}```\n"


def _clients(found: dict[str, Any]) -> str:
    first = f"{1000 * found['first_p50_s']:,.0f} ms (99 %: {1000 * found['first_p99_s']:,.0f} ms)"
    broke = f", {found['cut']} responses broke off" if found["cut"] else ""
    again = f", {found['again']} were retried on another server" if found["again"] else ""
    return (
        f"{found['requests']} requests, {found['failed']} failed{broke}{again}; first byte of a stream after {first}."
    )


def _alerts(changes: list[Change]) -> str:
    if not changes:
        return "No alert changes."
    told = [
        f"{clock(one['at_s'])} `{one['alert']}` {_of(one['endpoint'])}is {_STATES.get(one['state'], one['state'])}"
        for one in changes
    ]
    return "; ".join(told) + "."


_STATES = {"over": "resolved"}
"""What the page calls them."""


def _of(endpoint: str) -> str:
    return f"of {endpoint} " if endpoint else ""


async def main() -> None:
    """See the module."""
    mock = mock_arguments(SERVERS)
    settings = "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\n"
    async with DemoFleet(tuple(mock), mock=mock, settings=settings) as fleet, prometheus(fleet.admin_url) as server:
        length_s = night(fleet.names).ends_s
        load = DemoLoad(fleet.url, MODEL, everyday(SEED, rate=RATE, duration_s=length_s))
        async with aiohttp.ClientSession() as http:
            # Only what goes wrong; it is printed at the end.
            token = {"Authorization": f"Bearer {fleet.token}"}
            await http.put(f"{fleet.admin_url}/admin/log-level", json={"level": "warning"}, headers=token)
            result = await Night(fleet, load, server, http).run()
        print(*fleet.lbproxy.lines, sep="\n")
    RESULT.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2) + b"\n")
    print(page(result))


if __name__ == "__main__":
    uvloop.run(main())
