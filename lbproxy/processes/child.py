# SPDX-License-Identifier: Apache-2.0
"""`python -m lbproxy.processes.child ROLE`: a child process of the supervisor.

What the role needs is imported before the supervisor says on standard input that the work begins: so a standby
(processes.standby) begins at once.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from lbproxy import process
from lbproxy.config.text import ConfigError
from lbproxy.processes.control import BALANCER, Start, Unfit
from lbproxy.processes.supervised import Supervisor

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

Work: TypeAlias = Callable[[Supervisor, Start], Awaitable[None]]


def work_of(role: str) -> Work:
    """What a child of this role does, imported."""
    if role == BALANCER:
        from lbproxy.processes.balancing import run_balancer  # noqa: PLC0415 - each needs other modules

        return run_balancer
    from lbproxy.processes.worker import run_worker  # noqa: PLC0415

    return run_worker


async def run(work: Work) -> None:
    """Begin when the supervisor says so, and work until it says otherwise."""
    supervisor = Supervisor()
    start = await supervisor.started()
    if start is None:
        return
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
    process.run(run(work_of(sys.argv[1])))


if __name__ == "__main__":
    main()
