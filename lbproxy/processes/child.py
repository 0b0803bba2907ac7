# SPDX-License-Identifier: Apache-2.0
"""`python -m lbproxy.processes.child`: a child process of the supervisor, which says on standard input what it is."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Coroutine

from lbproxy import process
from lbproxy.config.text import ConfigError
from lbproxy.processes.control import BALANCER, Start, Unfit
from lbproxy.processes.supervised import Supervisor

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


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
    process.run(run())


if __name__ == "__main__":
    main()
