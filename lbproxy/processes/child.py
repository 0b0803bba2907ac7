# SPDX-License-Identifier: Apache-2.0
"""`python -m lbproxy.processes.child ROLE`: a child process of the supervisor.

What the role needs is imported before the supervisor says on standard input that the work begins: so a standby
(processes.standby), which may have to be either, begins at once.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

from lbproxy.config.text import ConfigError
from lbproxy.processes import process
from lbproxy.processes.control import BALANCER, WORKER, Start, Unfit
from lbproxy.processes.supervised import SupervisorLink

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

Work: TypeAlias = Callable[[SupervisorLink, Start], Awaitable[None]]


def works_of(role: str) -> dict[str, Work]:
    """What a child of this role may have to do, imported; each needs other modules."""
    works: dict[str, Work] = {}
    if role != WORKER:
        from lbproxy.processes.balancing import run_balancer  # noqa: PLC0415

        works[BALANCER] = run_balancer
    if role != BALANCER:
        from lbproxy.processes.worker import run_worker  # noqa: PLC0415

        works[WORKER] = run_worker
    return works


async def run(works: Mapping[str, Work]) -> None:
    """Begin when the supervisor says so, and work until it says otherwise."""
    supervisor = SupervisorLink()
    start = await supervisor.started()
    if start is None:
        return
    for descriptor in start.unused_descriptors:
        os.close(descriptor)
    try:
        await works[start.role](supervisor, start)
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
    process.run(run(works_of(sys.argv[1])))


if __name__ == "__main__":
    main()
