# SPDX-License-Identifier: Apache-2.0
"""Listening sockets, and the loop that accepts from them under a limit on descriptors.

Why it replaces asyncio's server: that cannot refuse before it has built a connection, closes connections for which it
has no descriptor without an error or a count, and cannot stop accepting while the socket lives on in a successor.
Theory of operation: a reader on each socket accepts up to `BATCH` connections per turn of the loop. A connection for
which there is no room gets a refusal and is closed, without a transport. When descriptors run out, accepting pauses for
`PAUSE_S`, so that an exhausted process does not spin. Invariants:

- A spare descriptor is held from the start, so that there is always one to refuse with; or, for a listener without a
  refusal (the admin's), some to serve with.
- With TLS, a connection costs a descriptor and a timer until its first byte shows that it speaks TLS; then it has the
  rest of `HANDSHAKE_S` for the handshake. All of these count as open (`handshaking`).
- Every connection is either passed to a protocol of the factory, or closed here and counted in `refused`.
- `close` only closes this process's descriptors: connections in their queues belong to other processes that hold them.
  Those that were accepted before are still passed to a protocol: who stops waits for them (`passed`, `end_silent`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Sequence

from lbproxy.net.listening.bind import BACKLOG

logger = logging.getLogger("lbproxy")

BATCH = 64
"""Connections accepted in one turn: a burst must not delay running streams for more than some milliseconds."""
DESCRIPTOR_SHARE = 0.45
PAUSE_S = 0.1
GIVE_WAY_S = 0.002
"""How long a connection is left to other processes. The delay that it gets if they are all busy."""
LOG_EVERY_S = 10.0
HANDSHAKE_S = 10.0
"""For a TLS handshake, from the connection on: as long as a request's head may take (timeouts.client_head)."""
SHUTDOWN_S = 3600.0
"""For the end of a TLS connection. A large limit, as data that is not sent by then is dropped. The closing code itself
checks whether the peer reads, and whether it closes, too (proxy/front/linger.py)."""
_TLS_HANDSHAKE = b"\x16"
"""The first byte of a TLS client (RFC 8446, section 5.1); no HTTP method begins with it."""
ADMIN_SHARE = 0.05
"""Share of the descriptors for connections of administrators: half of what `DESCRIPTOR_SHARE`, twice, leaves."""
CONNECTIONS, DESCRIPTORS = "connections", "descriptors"
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_ABORTED = {
    errno.ECONNABORTED,
    errno.EPERM,
    errno.EPROTO,
    errno.ENETDOWN,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EOPNOTSUPP,
    errno.ENOPROTOOPT,
}
"""Errors of accept(2) about a connection that died in the queue: the next one may be usable."""


def connections_within(limit: int) -> int:
    """How many connections may be open: `limit`, but with regard to descriptors only so many that each can have another
    one, to an endpoint, and some are left. Computed each time: the system's limit can be changed from outside.
    """
    return min(limit, int(DESCRIPTOR_SHARE * resource.getrlimit(resource.RLIMIT_NOFILE)[0]))


def admin_connections() -> int:
    """How many connections administrators may have open: few, and none of the descriptors that clients may use."""
    return min(128, max(8, int(ADMIN_SHARE * resource.getrlimit(resource.RLIMIT_NOFILE)[0])))


class Listener:
    """Accepts from sockets, which it owns. `start`, then `close`."""

    def __init__(
        self,
        factory: Callable[[], asyncio.BaseProtocol],
        *,
        room: Callable[[], bool] = lambda: True,
        refusal: Callable[[], bytes] | None = None,
        spares: int = 1,
        not_tls: Callable[[], bytes] = bytes,
    ) -> None:
        """`room`: whether one more connection may be served. Without a refusal it is asked for room where not even a
        spare descriptor is left: it frees one, if it can, and calls `refill`.

        `refusal`: what is sent to a connection for which there is no room or no descriptor, before it is closed; None =
        the spare descriptors are used to serve it instead. `not_tls`: what is sent to one that does not speak TLS where
        it should.
        """
        self._loop = asyncio.get_running_loop()
        self._factory = factory
        self._room = room
        self._refusal = refusal
        self._not_tls = not_tls
        self._wanted_spares = spares
        self._spares: list[socket.socket] = []
        self._resume: asyncio.TimerHandle | None = None
        self._log_at = float("-inf")
        self._accepting: dict[asyncio.Task[None], float | None] = {}
        """Connections without a protocol, and since when the first byte of each is awaited, if it is."""
        self._tls: ssl.SSLContext | None = None
        self.batch: Callable[[bool], int] | None = None
        """How many to accept in this turn, if other processes accept from the same sockets, as the process that wakes
        up first would take them all; 0: others first. True: they have had `GIVE_WAY_S` for that."""
        self.sockets: Sequence[socket.socket] = ()
        self.refused = {CONNECTIONS: 0, DESCRIPTORS: 0}
        """Connections closed here, by what was lacking."""
        self.failed_handshakes = 0
        """Connections closed because the TLS handshake failed."""

    def use_tls(self, context: ssl.SSLContext | None) -> None:
        """Speak TLS on connections accepted from now on; None = do not."""
        self._tls = context

    @property
    def handshaking(self) -> int:
        """Connections without a protocol yet: their TLS handshake is in progress, or has not begun."""
        return 0 if self._tls is None else len(self._accepting)

    @property
    def passing(self) -> int:
        """Accepted connections without a protocol yet, with TLS or without."""
        return len(self._accepting)

    async def passed(self) -> None:
        """Wait until none is left of the connections that were accepted and have no protocol yet."""
        while self._accepting:
            await asyncio.wait(self._accepting)

    def end_silent(self, for_s: float) -> None:
        """Close the connections that have not sent the first byte of a TLS handshake for `for_s` seconds."""
        now = self._loop.time()
        for task, since in self._accepting.items():
            if since is not None and now - since >= for_s:
                task.cancel()

    def start(self, sockets: Sequence[socket.socket]) -> None:
        """Accept from now on."""
        self.sockets = sockets
        self.refill()
        for sock in sockets:
            sock.setblocking(False)
            self._loop.add_reader(sock, self._accept, sock)

    def accept_rest(self) -> None:
        """Accept what waits in the queues, for whoever closes the last descriptors: that would reset it."""
        for sock in self.sockets:
            self._accept_some(sock, BACKLOG)

    def close(self) -> None:
        """Stop accepting. Allowed at any time."""
        if self._resume is None:
            self._stop_accepting()
        else:
            self._resume.cancel()
        for sock in self.sockets:
            sock.close()
        for spare in self._spares:
            spare.close()
        self.sockets, self._spares, self._resume = (), [], None

    def _accept(self, sock: socket.socket) -> None:
        batch = BATCH if self.batch is None else self.batch(False)
        if batch:
            self._accept_some(sock, min(batch, BATCH))
        else:
            self._stop_accepting()
            self._resume = self._loop.call_later(GIVE_WAY_S, self._accept_after_others)

    def _accept_after_others(self) -> None:
        """They had the time to. What is left is ours."""
        self._resume = None
        assert self.batch is not None
        for sock in self.sockets:
            self._loop.add_reader(sock, self._accept, sock)
            self._accept_some(sock, min(self.batch(True), BATCH))

    def _accept_some(self, sock: socket.socket, batch: int) -> None:
        for _ in range(batch):
            try:
                client, _ = sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _ABORTED:
                    continue
                if error.errno not in _EXHAUSTED:
                    raise
                self._exhausted(sock, error)
                return
            if self._refusal is None or self._room():
                self._serve(client)
            else:
                self._refuse(client, CONNECTIONS)

    def _serve(self, client: socket.socket) -> None:
        task = self._loop.create_task(self._hand_over(client))
        self._accepting[task] = None
        task.add_done_callback(self._accepting.pop)

    async def _hand_over(self, client: socket.socket) -> None:
        try:
            if self._tls is None:
                await self._loop.connect_accepted_socket(self._factory, client)
            else:
                await self._hand_over_tls(client, self._tls)
        except OSError:  # closed by now, or no descriptor for its transport, or no TLS
            self.failed_handshakes += self._tls is not None
            client.close()

    async def _hand_over_tls(self, client: socket.socket, context: ssl.SSLContext) -> None:
        due = self._loop.time() + HANDSHAKE_S
        async with asyncio.timeout_at(due):
            first = await self._peek(client)
        if first != _TLS_HANDSHAKE:
            self.failed_handshakes += len(first)  # a client that left without a byte asked for nothing
            _send_and_close(client, self._not_tls() if first else b"")
            return
        left_s = max(0.1, due - self._loop.time())
        await self._loop.connect_accepted_socket(
            self._factory, client, ssl=context, ssl_handshake_timeout=left_s, ssl_shutdown_timeout=SHUTDOWN_S
        )

    async def _peek(self, client: socket.socket) -> bytes:
        """The first byte that arrives, which remains to be read; empty if the peer is gone."""
        client.setblocking(False)
        readable, task = asyncio.Event(), asyncio.current_task()
        assert task is not None
        self._loop.add_reader(client, readable.set)
        self._accepting[task] = self._loop.time()
        try:
            await readable.wait()
        except asyncio.CancelledError:
            self._loop.remove_reader(client)
            client.close()
            raise
        finally:
            self._accepting[task] = None
        self._loop.remove_reader(client)
        return client.recv(1, socket.MSG_PEEK)

    def _refuse(self, client: socket.socket, why: str) -> None:
        self.refused[why] += 1
        assert self._refusal is not None
        _send_and_close(client, self._refusal() if self._tls is None else b"")
        if why == CONNECTIONS:
            self._log("connections are refused: as many are open as limits.connections and the descriptors allow")

    # No descriptors

    def _exhausted(self, sock: socket.socket, error: OSError) -> None:
        """Nothing can be accepted. Refuse with the spare descriptors, or serve with them, then pause."""
        self._log("no connection can be accepted: %s", error.strerror)
        if not self._spares and self._refusal is None:
            self._room()
        for _ in range(BATCH):
            if not self._spares:
                break
            self._spares.pop().close()
            try:
                client, _ = sock.accept()
            except OSError:
                self.refill()
                break
            if self._refusal is None:
                self._serve(client)
            else:
                self._refuse(client, DESCRIPTORS)
                self.refill()
        self._stop_accepting()
        self._resume = self._loop.call_later(PAUSE_S, self._accept_again)

    def _stop_accepting(self) -> None:
        for sock in self.sockets:
            self._loop.remove_reader(sock)

    def _accept_again(self) -> None:
        self._resume = None
        self.refill()
        for sock in self.sockets:
            self._loop.add_reader(sock, self._accept, sock)

    def refill(self) -> None:
        """Hold as many spare descriptors again as there should be, if there are as many."""
        with contextlib.suppress(OSError):
            while self.sockets and len(self._spares) < self._wanted_spares:
                self._spares.append(socket.socket())  # not connected: only a descriptor

    def _log(self, text: str, *arguments: object) -> None:
        """Log a warning, but not for every connection."""
        now = self._loop.time()
        if now - self._log_at >= LOG_EVERY_S:
            self._log_at = now
            logger.warning(text, *arguments, extra={"event": "overload"})


def _send_and_close(client: socket.socket, response: bytes) -> None:
    with contextlib.suppress(OSError):
        client.send(response, socket.MSG_DONTWAIT)
        client.recv(1 << 16, socket.MSG_DONTWAIT)  # unread data would turn the close into a reset
    client.close()
