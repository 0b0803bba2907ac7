# SPDX-License-Identifier: Apache-2.0
"""Where an engine publishes its KV events: the addresses in `kv_events` and `kv_events_replay` of an endpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lbproxy.config.values import read_host

FORMS = "tcp://host:port, :port (on the endpoint's host), or `bind tcp://*:port` for engines that connect"
FORMS_OF_MANY = ":port (on the host of each endpoint)"
REPLAY_FORMS = "tcp://host:port, or :port (on the endpoint's host)"
_ADDRESS = re.compile(r"(?P<bind>bind +)?(?:tcp://(?P<host>\*|[^*/\s]+))?:(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Publisher:
    """One address. Rank n of an endpoint has the port above it by n, with vLLM and SGLang alike."""

    host: str
    """A name or an address, IPv6 in brackets; `*` = every interface of this machine; empty = the endpoint's host."""
    port: int
    bind: bool = False
    """lbproxy listens there, and the engine connects."""

    def url(self, own_host: str, rank: int) -> str:
        """For ZMQ. `own_host`: the endpoint's, IPv6 in brackets."""
        return f"tcp://{self.host or own_host}:{self.port + rank}"

    def __str__(self) -> str:
        return f"{'bind ' if self.bind else ''}{f'tcp://{self.host}' if self.host else ''}:{self.port}"


def read_publisher(text: str) -> Publisher | None:
    """An address in one of the `FORMS`; None if it is none."""
    match = _ADDRESS.fullmatch(text.strip())
    if match is None or not 1 <= int(match["port"]) <= 65535:
        return None
    bind, host = match["bind"] is not None, match["host"] or ""
    if host not in ("", "*"):
        host = read_host(host) or "?"
    if host == "?" or (bind and not host) or (not bind and host == "*"):
        return None
    return Publisher(host, int(match["port"]), bind)


def overlap(one: Publisher, ranks: int, other: Publisher, other_ranks: int) -> bool:
    """Whether two addresses are the same for some of their ranks. What is on the endpoint's host overlaps only with
    another that is: of different endpoints the caller knows better.
    """
    same_host = one.host == other.host or (one.bind and other.bind and "*" in (one.host, other.host))
    apart = one.port - other.port
    return one.bind == other.bind and same_host and -ranks < apart < other_ranks
