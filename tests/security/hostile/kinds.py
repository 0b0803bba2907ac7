# SPDX-License-Identifier: Apache-2.0
"""Which kinds there are, and what is set up for each."""

from __future__ import annotations

import os
from typing import Final

from tests.security.hostile.clients import asking
from tests.security.hostile.clients.crowd import KINDS
from tests.security.hostile.measure import Setup
from tests.security.hostile.servers import SERVERS

MIX: Final = "mix"
CLIENTS: Final = tuple(name for name, kind in KINDS.items() if kind not in asking.KINDS)
ALL: Final = (*CLIENTS, *SERVERS, MIX)


def setup_of(
    name: str, *, form: str = "default", key: bool = True, connections: int = 200, seed: int = 1, pin: bool = True
) -> Setup:
    """What is measured for a kind of clients or of servers, or for all of them at once."""
    kinds: tuple[str, ...] = (name,)
    servers: tuple[str, ...] = ()
    if name in SERVERS:
        kinds, servers = ("asking", "asking_sockets") if name == "socketflood" else ("asking",), (name,)
    elif name == MIX:
        kinds, servers = (*CLIENTS, *("drawn",) * len(CLIENTS), *("asking",) * 10), tuple(SERVERS)
    return Setup(
        name=name,
        kinds=kinds,
        servers=servers,
        form=form,
        key=key,
        connections=connections,
        seed=seed,
        cores=_cores() if pin else None,
    )


def _cores() -> tuple[int, int] | None:
    """lbproxy's and everybody else's, if there are two."""
    own = sorted(os.sched_getaffinity(0))
    return (own[0], own[1]) if len(own) > 1 else None
