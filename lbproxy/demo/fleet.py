# SPDX-License-Identifier: Apache-2.0
"""Servers and lbproxy as processes of their own: `lbproxy mock` and `lbproxy --config`, with what can be done to them.

Each is started as a user would start it, so that a kill is a kill. All of them end with the `async with` block, at
once, or with this process, however that ends. They are in sessions of their own, so that Ctrl-C reaches only us.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from lbproxy.control.admin.made_token import FOLDER, dashboard_link, read_token
from lbproxy.demo.timeline import SLOWNESS, Act, Verb

STARTS_S = 60.0
ENDS_S = 5.0
POLL_S = 0.2
KEPT_LINES = 50

Fields = dict[str, Any]
"""A JSON object."""


class FleetError(Exception):
    """It did not start, or ended by itself; the text says what it printed."""


class Program:
    """One process of this Python. Its output is read as it comes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process: asyncio.subprocess.Process | None = None
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        """What it printed last."""
        self._news = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        """Done when its output has ended."""

    async def start(self, arguments: Sequence[str], tasks: asyncio.TaskGroup, folder: Path | None = None) -> None:
        """`lbproxy` with these arguments; its output is read in `tasks`. `folder`: for its admin token."""
        self.lines.clear()
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lbproxy.demo.leash", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            limit=1 << 20,
            env=None if folder is None else {**os.environ, FOLDER: str(folder)},
        )
        self._reading = tasks.create_task(self._read(self.process))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            self.lines.append(line.decode("utf-8", "replace").rstrip())
            self._news.set()
        self._news.set()

    async def said(self, pattern: str) -> re.Match[str]:
        """Wait until a line matches. Raises FleetError."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STARTS_S):
                while True:
                    ended = self._reading is None or self._reading.done()
                    for line in self.lines:
                        if match := re.search(pattern, line):
                            return match
                    if ended:
                        break
                    self._news.clear()
                    await self._news.wait()
        raise FleetError(f"{self.name} did not start:\n" + "\n".join(self.lines))

    def send(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    @property
    def pid(self) -> int:
        """Once it was started."""
        assert self.process is not None
        return self.process.pid

    async def wait(self) -> int:
        """Its exit code, once it has ended; negative: the signal that ended it."""
        assert self.process is not None
        return await self.process.wait()

    async def end(self, number: int = signal.SIGKILL) -> None:
        """Signal it and wait for its end; after `ENDS_S` it is killed."""
        self.send(number)
        if self.process is None:
            return
        try:
            async with asyncio.timeout(ENDS_S):
                await self.process.wait()
        except TimeoutError:
            self.send(signal.SIGKILL)
            await self.process.wait()


class DemoFleet:
    """Simulated servers of these names with one lbproxy before them. `async with`; raises FleetError, OSError."""

    def __init__(self, names: Sequence[str], *, mock: Mapping[str, Sequence[str]], settings: str) -> None:
        """`mock`: what each server is told on its command line; `settings`: lbproxy's, without the endpoints."""
        self.names = tuple(names)
        self.doing: dict[str, Verb] = {}
        """What is being done to a server, and what it is then left like, if that is not as usual."""
        self.url = self.admin_url = self.dashboard = ""
        self.token = ""
        """For changes by the admin API."""
        self.lbproxy = Program("lbproxy")
        self.servers = {name: Program(name) for name in names}
        self._mock = mock
        self._settings = settings
        self._ports: dict[str, int] = {}
        self._stack = contextlib.AsyncExitStack()
        self._http: aiohttp.ClientSession
        self._tasks: asyncio.TaskGroup

    async def __aenter__(self) -> Self:
        try:
            self._http = await self._stack.enter_async_context(
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10.0))
            )
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="lbproxy-demo-")))
            self._tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
            self._stack.push_async_callback(self._end)
            for name in self.names:
                await self._start(name)
            listing = "".join(
                f"  - {{url: 'http://127.0.0.1:{self._ports[name]}', name: {name}}}\n" for name in self.names
            )
            settings = folder / "cfg.yaml"
            settings.write_text(f"{self._settings}\nendpoints:\n{listing}")
            await self.lbproxy.start(["--config", str(settings)], self._tasks, folder)
            match = await self.lbproxy.said(r"listens on (http://[^\s,]+), admin on (http://[^\s,;]+)")
            self.url, self.admin_url = match[1], match[2]
            self.token = read_token((await self.state())["token_file"])
            self.dashboard = dashboard_link(self.admin_url, self.token)
            await self._all_up()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _end(self) -> None:
        """All at once."""
        await asyncio.gather(*(program.end() for program in (self.lbproxy, *self.servers.values())))

    async def _all_up(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STARTS_S):
                while True:
                    if all(one["health"] == "up" and one["models"] for one in (await self.state())["endpoints"]):
                        return
                    await asyncio.sleep(POLL_S)
        raise FleetError("not every server came up")

    async def state(self) -> Fields:
        """GET /admin/state."""
        async with self._http.get(f"{self.admin_url}/admin/state") as answer:
            return dict(await answer.json())

    def pid(self, name: str) -> int:
        """Of a server's process."""
        return self.servers[name].pid

    # What can be done

    async def carry_out(self, acts: Sequence[Act], told: Callable[[str, Verb], None] = lambda *_: None) -> None:
        """Do a step's acts: servers side by side, each server's one after the other. `told` of each that is done.

        Raises FleetError if a server does not come back.
        """
        by_server: dict[str, list[Verb]] = {}
        for act in acts:
            for name in act.servers:
                by_server.setdefault(name, []).append(act.verb)

        async def all_of(name: str, verbs: Sequence[Verb]) -> None:
            for verb in verbs:
                self.doing[name] = verb
                await self._do(name, verb)
                told(name, verb)
            if verbs[-1] in {Verb.WELL, Verb.START, Verb.UNDRAIN}:
                self.doing.pop(name, None)

        await asyncio.gather(*(all_of(name, verbs) for name, verbs in by_server.items()))

    async def _do(self, name: str, verb: Verb) -> None:
        match verb:
            case Verb.SLOW:
                await self._faults(name, f"slow-down factor={SLOWNESS}")
            case Verb.WELL:
                await self._faults(name, None)
            case Verb.KILL:
                await self.servers[name].end(signal.SIGKILL)
            case Verb.START:
                await self._start(name)
            case Verb.DRAIN:
                while True:
                    if not (await self._steer(name, "drain"))["in_flight"]:
                        break
                    await asyncio.sleep(POLL_S)
            case Verb.RESTART:
                await self.servers[name].end(signal.SIGTERM)
                await self._start(name)
            case Verb.UNDRAIN:
                await self._steer(name, "undrain")

    async def _start(self, name: str) -> None:
        """On the port that it had."""
        program = self.servers[name]
        await program.start(["mock", "--port", str(self._ports.get(name, 0)), *self._mock[name]], self._tasks)
        self._ports[name] = int((await program.said(r"at http://\S+:(\d+)"))[1])

    async def _faults(self, name: str, text: str | None) -> None:
        url = f"http://127.0.0.1:{self._ports[name]}/faults"
        async with self._http.request("DELETE" if text is None else "POST", url, data=text) as answer:
            answer.raise_for_status()

    async def _steer(self, name: str, what: str) -> Fields:
        url = f"{self.admin_url}/admin/endpoints/{name}/{what}"
        async with self._http.post(url, headers={"Authorization": f"Bearer {self.token}"}) as answer:
            answer.raise_for_status()
            return dict(await answer.json())
