# SPDX-License-Identifier: Apache-2.0
"""TCP options by which the kernel detects vanished peers: their host is gone, or drops our packets.

Without them a connection to such a peer lives for a quarter of an hour if something was sent, and for ever if not.

Linux has a rule that determines their use: where TCP_USER_TIMEOUT is set, keep-alive uses it instead of its own count
of probes, and a live peer that does not read (zero window) is cut by it as well (tcp(7); `tcp_keepalive_timer` and
`tcp_probe_timer` of the kernel). An endpoint may read nothing of a large body for as long as it is busy, so connections
to endpoints have keep-alive alone; data sent to a vanished host ends by the clocks of the attempt
(`net.connections.patience`). A client must read, so its connections have both.
"""

from __future__ import annotations

import socket

KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
"""Seconds of silence before the first probe, between probes, and their number: 30 s in all."""


def find_vanished(sock: socket.socket, user_timeout_s: float | None = None) -> None:
    """Close the connection when the peer does not respond to keep-alive probes for 30 s. With `user_timeout_s`: for
    that time instead, or when the peer has not read what was sent for that time.

    On a listening socket it applies to connections accepted from then on. A Unix socket has no peer that could vanish.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    taken = () if user_timeout_s is None else (("TCP_USER_TIMEOUT", round(1000 * user_timeout_s)),)
    for option, value in (*KEEPALIVE, *taken):
        if hasattr(socket, option):  # Linux has all; others lack some
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
