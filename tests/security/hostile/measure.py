# SPDX-License-Identifier: Apache-2.0
"""One measurement: friends, hostile ones beside them, and in turn as many friendly ones with as many bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from tests.chaos.load import quantile
from tests.security.hostile import honest
from tests.security.hostile.clients.crowd import Plan
from tests.security.hostile.clients.wire import Counts, Prey
from tests.security.hostile.friends import Friends, Seen
from tests.security.hostile.servers import OPEN
from tests.security.hostile.target import HOSTILE_KEY, KEY, MIB, Target, buffered_bodies, on_core, running
from tests.support.aio import until
from tests.support.docs import ROOT

ADAPTERS = 1000
"""What the honest servers list besides their model: lbproxy's own list is 100 KB."""
SLACK = 64 * MIB
"""What memory may grow by beyond the bodies."""
PROBES = 3
"""Descriptors by which two looks may differ, as probes come and go: what hundreds of connections leave is more."""
WARM_S = 3.0
SETTLE_S = 30.0
RACES = 0.02
"""Of guests: how many may get an answer that their server sent while their request was under way (`servers.late`)."""
GUESTS = "late"
"""The hostile server that has clients of its own whose answers are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is measured."""

    name: str
    kinds: Sequence[str]
    """Of clients."""
    servers: Sequence[str] = ()
    """Of hostile servers that lbproxy has besides two honest ones."""
    form: str = "default"
    key: bool = True
    """Whether the hostile clients have one; friends always do."""
    connections: int = 200
    friends: int = 20
    rate: float = 10.0
    """Requests a second of each friend."""
    seed: int = 1
    cores: tuple[int, int] | None = None
    """lbproxy's, and everybody else's."""


@dataclass(slots=True)
class Outcome:
    """What was seen."""

    setup: Setup
    hostile: Seen = field(default_factory=Seen)
    friendly: Seen = field(default_factory=Seen)
    """While the others were friendly."""
    guests: Seen = field(default_factory=Seen)
    crowd: Counts = field(default_factory=Counts)
    ballast: Counts = field(default_factory=Counts)
    growth: int = 0
    """Bytes of the highest RSS beyond that before."""
    kept: int = 0
    """Bytes of RSS beyond that before, once all of them had left."""
    descriptors_left: int = 0
    settled: bool = False
    """Whether lbproxy counted no connection of clients any more, within `SETTLE_S`."""
    signs: int = 0
    errors: list[str] = field(default_factory=list)
    warnings: Counter[str] = field(default_factory=Counter)
    cpu_s: float = 0.0
    alive: bool = True

    @property
    def ratio(self) -> float:
        """p99 of friends, beside hostile ones and beside friendly ones."""
        base = quantile(self.friendly.waits_ms, 0.99)
        return quantile(self.hostile.waits_ms, 0.99) / base if base else 0.0

    def faults(self) -> list[str]:
        """What must not be, and a busy machine is no excuse for."""
        bound = buffered_bodies(self.setup.form) + SLACK
        guests = len(self.guests.waits_ms) + len(self.guests.mixed)
        checks = {
            f"lbproxy ended: {self.errors}": not self.alive,
            f"{self.signs} tracebacks: {self.errors}": self.signs > 0,
            f"answers of others: {self.hostile.mixed} {self.friendly.mixed}": bool(
                self.hostile.mixed or self.friendly.mixed
            ),
            f"answers of others: {self.guests.mixed}": len(self.guests.mixed) > guests * RACES,
            f"friends were not served: {dict(self.hostile.failures)}": bool(self.hostile.failures),
            f"not beside friendly ones either: {dict(self.friendly.failures)}": bool(self.friendly.failures),
            f"memory grew by {self.growth / MIB:.0f} MiB, allowed {bound / MIB:.0f}": self.growth > bound,
            f"{self.descriptors_left} descriptors left": self.descriptors_left > PROBES,
            "connections left": not self.settled,
            f"the generator's own: {dict(self.crowd.faults)}": bool(self.crowd.faults),
        }
        return [what for what, wrong in checks.items() if wrong]

    def figures(self) -> dict[str, object]:
        """A JSON line."""
        return {
            **asdict(self.setup),
            "p50_ms": round(quantile(self.hostile.waits_ms, 0.5), 2),
            "p99_ms": round(quantile(self.hostile.waits_ms, 0.99), 2),
            "max_ms": round(max(self.hostile.waits_ms, default=0), 1),
            "friendly_p50_ms": round(quantile(self.friendly.waits_ms, 0.5), 2),
            "friendly_p99_ms": round(quantile(self.friendly.waits_ms, 0.99), 2),
            "ratio": round(self.ratio, 2),
            "answers": len(self.hostile.waits_ms),
            "failures": dict(self.hostile.failures),
            "friendly_failures": dict(self.friendly.failures),
            "mixed": len(self.hostile.mixed) + len(self.friendly.mixed),
            "guests": [len(self.guests.waits_ms), len(self.guests.mixed)],
            "growth_mib": round(self.growth / MIB, 1),
            "kept_mib": round(self.kept / MIB, 1),
            "descriptors_left": self.descriptors_left,
            "settled": self.settled,
            "signs": self.signs,
            "errors": self.errors[:3],
            "warnings": dict(self.warnings.most_common(5)),
            "cpu_s": round(self.cpu_s, 1),
            "own_lag_p99_ms": [round(quantile(one.lags_ms, 0.99), 2) for one in (self.hostile, self.friendly)],
            "crowd": self.crowd.plain(),
            "ballast": self.ballast.plain(),
            "faults": self.faults(),
        }


class Stand:
    """lbproxy between honest servers, friends and whatever comes."""

    def __init__(
        self,
        setup: Setup,
        target: Target,
        friends: Friends,
        guests: Friends | None,
        folder: Path,
        calm: Callable[[], object],
    ) -> None:
        self.setup = setup
        self.calm = calm
        """Has hostile servers stand still, or no more: see there."""
        self.target = target
        self.friends = friends
        self.guests = guests
        self._folder = folder

    @property
    def prey(self) -> Prey:
        return Prey(
            port=self.target.port, admin_port=self.target.admin_port, key=HOSTILE_KEY if self.setup.key else None
        )

    @asynccontextmanager
    async def befriended(self) -> AsyncIterator[None]:
        """Friends ask for as long as the block lasts."""
        tasks = [asyncio.create_task(one.run()) for one in (self.friends, self.guests) if one is not None]
        try:
            yield
        finally:
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def crowd(self, plan: Plan, seconds: float) -> Counts:
        """That crowd, for so long; it is gone when this returns."""
        path = self._folder / "crowd.jsonl"
        process = _started(plan, path)
        try:
            await until(lambda: b"\n" in path.read_bytes(), "it begins", within_s=60)
            await asyncio.sleep(seconds)
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, 20)
        finally:
            process.kill()
            process.wait()
        lines = [line for line in path.read_text().split("\n")[:-1] if line.startswith("{")]
        known = json.loads(lines[-1]) if lines else {}
        return Counts(**{**known, **{name: Counter(known.get(name, {})) for name in ("statuses", "faults")}})

    async def attack(self, seconds: float, seed: int) -> Counts:
        setup = self.setup
        models = ("sim", OPEN, *setup.servers) if setup.name == "mix" else (setup.servers or (OPEN,))
        plan = Plan(
            prey=self.prey,
            kinds=setup.kinds,
            models=models,
            connections=setup.connections,
            seed=seed,
            core=setup.cores[1] if setup.cores else None,
        )
        return await self.crowd(plan, seconds)

    async def befriend(self, like: Counts, seconds: float) -> Counts:
        """As many friendly connections, with as many bytes a second as those had."""
        setup = self.setup
        each = seconds * setup.connections
        prey = Prey(
            port=self.target.port,
            admin_port=self.target.admin_port,
            key=KEY,
            send_rate=like.sent / each,
            receive_rate=like.received / each,
        )
        plan = Plan(
            prey=prey,
            kinds=["ballast"],
            models=["sim"],
            connections=setup.connections,
            seed=setup.seed,
            core=setup.cores[1] if setup.cores else None,
        )
        return await self.crowd(plan, seconds)

    async def rest(self, seconds: float = 5.0) -> tuple[bool, int, int]:
        """Everybody has left: whether lbproxy knows that, its descriptors, and the least RSS of so long after that."""
        settled = await asyncio.to_thread(self.target.settled, SETTLE_S)
        descriptors = await asyncio.to_thread(self.target.descriptors)
        return settled, descriptors, await asyncio.to_thread(self.target.rss_at_rest, seconds)


@asynccontextmanager
async def stand(setup: Setup, folder: Path) -> AsyncIterator[Stand]:
    """Everything that a measurement needs, on the cores of the setup."""
    async with AsyncExitStack() as stack:
        if setup.cores:
            stack.enter_context(on_core(setup.cores[1]))
        stack.push_async_callback(asyncio.sleep, 0.2)  # connections that are closed last end a little later
        endpoints: list[dict[str, object]] = []
        for _ in range(2):
            server, url = await honest.listen("sim", adapters=ADAPTERS)
            stack.callback(server.close)
            endpoints.append({"url": url})
        hostile, calm = await asyncio.to_thread(stack.enter_context, _servers(setup))
        endpoints += [{"url": url, "name": name} for name, url in hostile.items()]
        core = setup.cores[0] if setup.cores else None
        target = await asyncio.to_thread(stack.enter_context, running(setup.form, folder, endpoints, core))
        prey = Prey(port=target.port, admin_port=target.admin_port, key=KEY)
        friends = Friends(prey, count=setup.friends, rate=setup.rate, seed=setup.seed)
        guests = None
        if GUESTS in setup.servers:
            invited = Prey(port=target.port, admin_port=target.admin_port, key=KEY, model=GUESTS)
            guests = Friends(invited, count=10, rate=10.0, seed=setup.seed, strict=False)
        await _up(target, [str(one["url"]).partition("//")[2] for one in endpoints[:2]])
        yield Stand(setup, target, friends, guests, folder, calm)


async def _up(target: Target, names: Sequence[str]) -> None:
    for _ in range(300):
        page = await asyncio.to_thread(target.metrics)
        if all(f'lbproxy_endpoint_up{{endpoint="{name}"}} 1' in page for name in names):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(target.log.read_text())


@contextmanager
def _servers(setup: Setup) -> Iterator[tuple[dict[str, str], Callable[[], object]]]:
    """Those that the hostile ones ask, their URLs by name, and what has them stand still, or no more."""
    plan = json.dumps({"kinds": [OPEN, *setup.servers], "core": setup.cores[1] if setup.cores else None})
    command = [sys.executable, "-m", "tests.security.hostile.servers", plan]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            assert process.stdin is not None
            yield json.loads(process.stdout.readline()), partial(os.write, process.stdin.fileno(), b"\n")
        finally:
            process.kill()


async def measured(setup: Setup, folder: Path, *, seconds: float, rounds: int = 2, compare: bool = True) -> Outcome:
    """`seconds` of hostility in `rounds`, each before as long among friends if `compare`."""
    it = Outcome(setup)
    async with stand(setup, folder) as at:
        async with at.befriended():
            await asyncio.sleep(WARM_S)
        _, descriptors, rss = await at.rest()
        cpu_s, peak = at.target.cpu_s(), 0
        if at.guests is not None:
            at.guests.seen = it.guests
        for turn in range(rounds):
            at.target.forget_peak()
            at.friends.seen = it.hostile
            async with at.befriended():
                done = await at.attack(seconds / rounds, setup.seed + turn)
            it.crowd.add(done)
            peak = max(peak, at.target.peak())
            if compare and at.target.alive():
                at.friends.seen = it.friendly
                async with at.befriended():
                    it.ballast.add(await at.befriend(done, seconds / rounds))
        it.growth, it.cpu_s, it.alive = peak - rss, at.target.cpu_s() - cpu_s, at.target.alive()
        if it.alive:
            it.settled, after, left = await at.rest()
            it.descriptors_left, it.kept = after - descriptors, left - rss
        at.target.read_log()
        it.signs, it.errors, it.warnings = at.target.signs, at.target.errors, at.target.warnings
    return it


def _started(plan: Plan, output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.security.hostile.clients.crowd", json.dumps(asdict(plan))]
    with output.open("wb") as file:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, cwd=ROOT)
