# SPDX-License-Identifier: Apache-2.0
"""`lbproxy demo --replicas N`: several lbproxies that tell each other what they placed, before simulated servers.

The lbproxies and the Redis or Valkey server between them are processes of their own, so that each can be killed; the
simulated servers are in this process. One that ends by itself is reported and not started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from lbproxy.control.admin.made_token import dashboard_link, read_token
from lbproxy.demo.fleet import POLL_S, STARTS_S, FleetError, Program
from lbproxy.extras.installing import needs
from lbproxy.sim.mock.http import MockOptions, MockServer

SERVERS = 3
MODEL = "demo"
PROGRAMS = ("redis-server", "valkey-server")
"""What can stand between them; the first that is installed is used."""
MAX_PORT = 65535
STORE_STARTS = 5
"""How often it is started, if its port is taken each time."""
STORE_OPTIONS = "--bind 127.0.0.1 --appendonly no --maxmemory 64mb --maxmemory-policy noeviction"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasOptions:
    """What can be chosen. Raises ValueError for what cannot be."""

    replicas: int
    listen: str
    """host:port of the first replica; each next one has the next port. Port 0: each has any free one."""
    admin: str

    def __post_init__(self) -> None:
        used = [*self._addresses("listen"), *self._addresses("admin")]
        fixed = [address for address in used if not address.endswith(":0")]
        if len(set(fixed)) < len(fixed):
            raise ValueError(
                f"--listen and --admin must be {self.replicas} ports apart, got {self.listen}, {self.admin}"
            )

    def addresses(self) -> list[tuple[str, str]]:
        """`listen` and `admin` of each replica."""
        return list(zip(self._addresses("listen"), self._addresses("admin"), strict=True))

    def _addresses(self, option: str) -> list[str]:
        text: str = getattr(self, option)
        host, _, digits = text.rpartition(":")
        port = int(digits)
        if port == 0:
            return [text] * self.replicas
        if port + self.replicas - 1 > MAX_PORT:
            raise ValueError(f"--{option}: {self.replicas} replicas need as many ports, from {port} on")
        return [f"{host}:{port + number}" for number in range(self.replicas)]


@dataclass(slots=True)
class Replica:
    """One lbproxy."""

    program: Program
    url: str = ""
    admin_url: str = ""
    dashboard: str = ""
    """With the token for its buttons."""


@dataclass(slots=True)
class StartedReplicas:
    """What was started."""

    store: Program
    store_port: int = 0
    replicas: list[Replica] = field(default_factory=list)

    @property
    def store_url(self) -> str:
        """As in `replicas.url`."""
        return f"redis://127.0.0.1:{self.store_port}/0"


def find_store_program() -> str:
    """The path of a Redis or Valkey server. Raises ValueError if there is none, or no client library for it."""
    if importlib.util.find_spec("redis") is None:
        raise ValueError(f"--replicas {needs('replicas')}")
    for name in PROGRAMS:
        if (path := shutil.which(name)) is not None:
            return path
    raise ValueError(
        f"--replicas needs {' or '.join(PROGRAMS)} on PATH, from a package such as redis-server, redis or valkey"
    )


async def run_replicas(options: ReplicasOptions, store: str, stop: asyncio.Event, say: Callable[[str], None]) -> None:
    """Run until `stop` is set, or until every replica has ended by itself. Raises FleetError, OSError.

    `store`: the path of the store's program; `say` gets what the user reads.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(_run(options, store, say))
            stopping = tasks.create_task(stop.wait())
            await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
            running.cancel()
            stopping.cancel()
    except* FleetError as group:
        raise FleetError("\n".join(map(str, leaves(group)))) from None


def leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """The exceptions of a group and of the groups in it."""
    found: list[BaseException] = []
    for one in group.exceptions:
        found += leaves(one) if isinstance(one, BaseExceptionGroup) else [one]
    return found


async def _run(options: ReplicasOptions, store: str, say: Callable[[str], None]) -> None:
    running = StartedReplicas(Program(Path(store).name))
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lbproxy-demo-")))
        servers = [await stack.enter_async_context(MockServer(MockOptions(model=MODEL))) for _ in range(SERVERS)]
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        stack.push_async_callback(_end, running)
        await _start_store(running, store, folder, tasks)
        for number in range(1, options.replicas + 1):
            running.replicas.append(Replica(Program(f"lb-{number}")))
        for replica, text in zip(
            running.replicas, settings(options, running, [one.url for one in servers]), strict=True
        ):
            file = folder / f"{replica.program.name}.yaml"
            file.write_text(text)
            await replica.program.start(["--config", str(file)], tasks, folder)
        await _all_ready(running.replicas)
        say(invitation(running))
        store_watch = tasks.create_task(_watch(running.store, say))
        stack.callback(store_watch.cancel)
        await asyncio.gather(*(_watch(one.program, say) for one in running.replicas))
        say("No lbproxy is left: the demo ends.")


async def _end(running: StartedReplicas) -> None:
    """The replicas first: they tell each other, over the store, that they leave."""
    await asyncio.gather(*(one.program.end(signal.SIGTERM) for one in running.replicas))
    await running.store.end()


async def _start_store(running: StartedReplicas, store: str, folder: Path, tasks: asyncio.TaskGroup) -> None:
    """Between the choice of a free port and its use another program may take it: then with another one."""
    options = ["--save", "", "--dir", str(folder), *STORE_OPTIONS.split()]
    for left in reversed(range(STORE_STARTS)):
        running.store_port = _free_port()
        await running.store.start(["--", store, "--port", str(running.store_port), *options], tasks)
        try:
            await running.store.said("Ready to accept connections")
        except FleetError as error:
            if not left or "Address already in use" not in str(error):
                raise
            await running.store.end()
        else:
            return


def settings(options: ReplicasOptions, running: StartedReplicas, servers: Sequence[str]) -> Iterator[str]:
    """Of each replica, as YAML. `servers`: the URLs of the simulated servers."""
    endpoints = "".join(f"  - {{url: '{url}', name: sim-{number}}}\n" for number, url in enumerate(servers, 1))
    for replica, (listen, admin) in zip(running.replicas, options.addresses(), strict=True):
        yield (
            f"listen: '{listen}'\nadmin: '{admin}'\nlog: {{access: false}}\ndrain: {{lame_duck: 0s}}\n"
            f"replicas: {{url: '{running.store_url}', name: {replica.program.name}}}\n"
            f"endpoints:\n{endpoints}"
        )


async def _all_ready(replicas: Sequence[Replica]) -> None:
    """Wait until each replica serves, with every server up, and knows all others."""
    for replica in replicas:
        match = await replica.program.said(r"listens on (http://[^\s,]+), admin on (http://[^\s,;]+)")
        replica.url, replica.admin_url = match[1], match[2]
    timeout = aiohttp.ClientTimeout(total=10.0)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STARTS_S), aiohttp.ClientSession(timeout=timeout) as http:
            while True:
                if all([await _is_ready(http, one, len(replicas) - 1) for one in replicas]):
                    return
                await asyncio.sleep(POLL_S)
    raise FleetError("the replicas did not find each other, or a server")


async def _is_ready(http: aiohttp.ClientSession, replica: Replica, others: int) -> bool:
    try:
        async with http.get(f"{replica.admin_url}/admin/state") as response:
            state = await response.json()
    except aiohttp.ClientError as error:
        raise FleetError(f"{replica.program.name}: {error}") from None
    replica.dashboard = dashboard_link(replica.admin_url, read_token(state["token_file"]))
    up = all(one["health"] == "up" and one["models"] for one in state["endpoints"])
    return up and len(state["replicas"]["others"]) == others


async def _watch(program: Program, say: Callable[[str], None]) -> None:
    """Report its end."""
    code = await program.wait()
    say(f"{program.name} has ended ({signal.Signals(-code).name if code < 0 else f'exit code {code}'}).")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def invitation(running: StartedReplicas) -> str:
    """What a first user reads and pastes."""
    first, last, store = running.replicas[0], running.replicas[-1], running.store
    one, two = first.program.name, last.program.name
    count = len(running.replicas)
    table = "\n".join(
        f"    {it.program.name}  {it.url}  dashboard {it.dashboard}  pid {it.program.pid}" for it in running.replicas
    )
    return f"""\
{count} lbproxies before {SERVERS} simulated vLLM servers tell each other over {store.name} what they placed:

{table}
    {store.name}  {running.store_url}  pid {store.pid}

Ctrl-C stops everything. In another shell, send a long request to {one}. The status of {two} counts it:
"0+1" in the column "flight" means 0 of its own and 1 of another replica.

    curl -sN {first.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
      "model": "{MODEL}", "stream": true, "max_tokens": 3000,
      "messages": [{{"role": "user", "content": "Hello, who are you?"}}]}}' > /dev/null &
    lbproxy status --admin {last.admin_url}

Kill {one}. {two} still responds, and forgets the requests of {one} about 2.5 s later:

    kill -9 {first.program.pid}
    curl -s {last.url}/v1/completions -H 'Content-Type: application/json' -d '{{"model": "{MODEL}", "prompt": "Hi"}}'
    lbproxy status --admin {last.admin_url}"""
