"""TCP options by which the kernel finds peers that vanished without a word: their host is gone, or drops our packets.

Without them a connection to such a peer lives for a quarter of an hour when something was sent, and for ever when not.
"""

from __future__ import annotations

import socket

KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
"""Seconds of silence until the peer is asked whether it is there, between questions, and how many: 30 s in all."""


def find_vanished(sock: socket.socket, user_timeout_s: float) -> None:
    """Break the connection when the peer does not answer for 30 s, or has taken nothing that was sent for so long.

    On a listening socket it is for what that accepts from then on. A Unix socket has no peer that could vanish so.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (*KEEPALIVE, ("TCP_USER_TIMEOUT", round(1000 * user_timeout_s))):
        if hasattr(socket, option):  # Linux has all; others lack some
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
