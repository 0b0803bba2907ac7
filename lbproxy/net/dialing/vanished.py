"""TCP options by which the kernel finds peers that vanished without a word: their host is gone, or drops our packets.

Without them a connection to such a peer lives for a quarter of an hour when something was sent, and for ever when not.

Linux has one rule that decides how they are used: where TCP_USER_TIMEOUT is set, keep-alive waits for that instead of
for its own count of probes, and a peer that is well and takes nothing (zero window) is cut by it as well (tcp(7);
`tcp_keepalive_timer` and `tcp_probe_timer` of the kernel). An endpoint may take nothing of a large body for as long as
it is busy, so that connections to endpoints have keep-alive alone; what is sent to a host that vanished already ends by
the clocks of the attempt (`net.connections.patience`). A client may not, so that its connections have both.
"""

from __future__ import annotations

import socket

KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
"""Seconds of silence until the peer is asked whether it is there, between questions, and how many: 30 s in all."""


def find_vanished(sock: socket.socket, user_timeout_s: float | None = None) -> None:
    """Break the connection when the peer does not answer keep-alive probes for 30 s. With `user_timeout_s`: for that
    long instead, or when the peer has taken nothing that was sent for that long.

    On a listening socket it is for what that accepts from then on. A Unix socket has no peer that could vanish so.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    taken = () if user_timeout_s is None else (("TCP_USER_TIMEOUT", round(1000 * user_timeout_s)),)
    for option, value in (*KEEPALIVE, *taken):
        if hasattr(socket, option):  # Linux has all; others lack some
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
