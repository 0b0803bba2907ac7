# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that have to listen where they were told to, such as those that are killed and started again.

The kernel gives port 0 and outgoing connections ports of one range. A port from there that was looked up and closed
again may be another's a moment later, as several test workers run at a time. So these are below that range, and each
worker has its own.
"""

from __future__ import annotations

import os
import socket
from itertools import count
from typing import Final

FIRST: Final = 12_000
EACH: Final = 1_500
"""For each worker."""
WORKERS: Final = 13
"""Up to 31,499; Linux's range for everything else begins at 32,768."""
_next: Final = count(os.getpid())


def free_port() -> int:
    """One at which nothing listens on 127.0.0.1. A worker gets it again after `EACH` others."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
    for _ in range(EACH):
        port = FIRST + EACH * worker + next(_next) % EACH
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise AssertionError("no free port")
