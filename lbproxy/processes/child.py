"""`python -m lbproxy.processes.child`: a child process of the supervisor, which says on standard input what it is."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from collections.abc import Callable, Coroutine

from lbproxy.config.text import ConfigError
from lbproxy.config.tree import Settings
from lbproxy.processes.control import BALANCER, Beat, Start, Text, ToChild, Unfit
from lbproxy.settings_file import parse_text
from lbproxy.workers.link import Link
from lbproxy.workers.messages import Message

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Supervisor:
    """The supervisor, as a child sees it."""

    def __init__(self) -> None:
        self.link: Link[ToChild] = Link(ToChild, self._received, self._lost)
        self.gone = asyncio.Event()
        """Its process ended."""
        self.on_message: Callable[[ToChild], None] = lambda _: None
        """What follows `Start`."""
        self._start: asyncio.Future[Start] = asyncio.get_running_loop().create_future()

    async def started(self) -> Start:
        """Connect; returns what this process is to be."""
        sock = socket.socket(fileno=os.dup(0))
        await asyncio.get_running_loop().connect_accepted_socket(self.link.protocol, sock)
        with open(os.devnull, "rb") as nothing:  # noqa: ASYNC230 - no child of ours may have the link
            os.dup2(nothing.fileno(), 0)
        return await self._start

    def send(self, message: Message) -> None:
        """Tell it something."""
        self.link.send(message)

    def beat(self, _: float = 0.0) -> None:
        """Tell it that the event loop runs: for `Pulse.listen`, about once in 50 ms."""
        self.link.send(Beat())

    def _received(self, arrived: list[ToChild]) -> None:
        for message in arrived:
            if isinstance(message, Start) and not self._start.done():
                self._start.set_result(message)
            else:
                self.on_message(message)

    def _lost(self) -> None:
        self.gone.set()
        if not self._start.done():
            self._start.cancel()


def read(settings: Text) -> Settings:
    """The settings of a text. Raises ConfigError."""
    return parse_text(settings.text, settings.source)


async def run() -> None:
    """Be what the supervisor says, until it says otherwise."""
    supervisor = Supervisor()
    start = await supervisor.started()
    work: Callable[[Supervisor, Start], Coroutine[object, object, None]]
    if start.role == BALANCER:
        from lbproxy.processes.balancing import run_balancer as work  # noqa: PLC0415 - each needs other modules
    else:
        from lbproxy.processes.worker import run_worker as work  # noqa: PLC0415
    try:
        await work(supervisor, start)
    except ConfigError as error:
        supervisor.send(Unfit(list(error.problems)))
    except OSError as error:
        supervisor.send(Unfit([str(error)]))
    supervisor.link.close()
    await asyncio.sleep(0)


def main() -> None:
    """Run the event loop."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    gc.disable()  # until `process.settle`: what a start makes stays
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        asyncio.run(run())
    else:
        uvloop.run(run())


if __name__ == "__main__":
    main()
