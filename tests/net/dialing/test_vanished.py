# SPDX-License-Identifier: Apache-2.0
"""Peers that do not read, with the real kernel: the window is zero, and the peer responds to every probe of it."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing

import pytest

from lbproxy.net.dialing import vanished
from lbproxy.net.dialing.vanished import find_vanished
from tests.support.aio import run, until

BACKOFF = 4
"""Where it is in `struct tcp_info` of linux/tcp.h, in bytes."""
UPLOAD_BYTES = 16 << 20
VANISHED_AFTER_S = 2.0


def probes_of_window(sock: socket.socket) -> int:
    """How often the kernel has doubled the time between two probes of a zero window: 0.2 s at first."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 16)[BACKOFF]


def connected() -> tuple[socket.socket, socket.socket]:
    """The ends of one connection: what the first sends, the second can hold 4 KiB of."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="probes are counted by Linux")
@pytest.mark.parametrize("user_timeout_s", [None, VANISHED_AFTER_S])
def test_a_peer_that_reads_nothing_is_cut_only_where_it_must_read(
    user_timeout_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endpoint that is busy reads a large upload later, and gets every byte. A client has a time to read."""
    monkeypatch.setattr(vanished, "KEEPALIVE", (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 1)))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = connected()
        with closing(ours), closing(theirs):
            find_vanished(ours, user_timeout_s)
            sending = asyncio.ensure_future(loop.sock_sendall(ours, bytes(UPLOAD_BYTES)))
            if user_timeout_s is not None:
                with pytest.raises(TimeoutError, match="timed out"):
                    await asyncio.wait_for(sending, 60.0)
                return
            await until(lambda: probes_of_window(ours) >= 4, "three seconds without a window", within_s=60.0)
            assert not sending.done()
            got = 0
            while got < UPLOAD_BYTES:
                got += len(await loop.sock_recv(theirs, 1 << 20))
            await sending

    run(main(), timeout_s=120.0)
