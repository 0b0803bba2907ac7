# SPDX-License-Identifier: Apache-2.0
"""A relay of TCP before a real server that ends a stream in the middle, at a place that is told exactly.

It knows one thing of HTTP: an event ends with an empty line. So each place in the bytes of a stream can be named: after
so many whole events, or so many bytes later.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

READ_BYTES = 1 << 16
TIMEOUT_S = 120.0
END = b"\n\n"
LONG_CHARACTER = re.compile(rb"[\xc2-\xf4][\x80-\xbf]")
AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER, with which closing a connection resets it."""


@dataclass(frozen=True)
class Cut:
    """Where and how a stream ends."""

    events: int
    """So many pass whole."""
    more: int = 0
    """Bytes of what follows that pass, too. With vLLM the first two end the chunk of the last event."""
    in_character: bool = False
    """It ends inside the next character that has several bytes, and not so many bytes later."""
    reset: bool = True
    """With RST; else with FIN."""

    def place(self, data: bytes) -> int | None:
        """How many of these bytes pass; None: the place is not reached."""
        at = 0
        for _ in range(self.events):
            at = data.find(END, at) + len(END)
            if at < len(END):
                return None
        if self.in_character:
            found = LONG_CHARACTER.search(data, at)
            return found.start() + 1 if found else None
        return at + self.more if len(data) >= at + self.more else None


class Scissors:
    """What the relays are to cut: each cut ends the next stream that reaches its place, wherever that is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cuts: deque[Cut] = deque()
        self.done: list[bytes] = []
        """What passed of each stream that was ended."""

    def arm(self, *cuts: Cut) -> None:
        with self._lock:
            self._cuts, self.done = deque(cuts), []

    def passes(self, seen: bytes) -> tuple[int, Cut] | None:
        """How many of these bytes of a stream pass, and how it ends; None: it goes on."""
        with self._lock:
            place = self._cuts[0].place(seen) if self._cuts else None
            if place is None:
                return None
            self.done.append(seen[:place])
            return place, self._cuts.popleft()


class CuttingRelay:
    """One server's relay. `url` is where lbproxy finds it. It ends with the process: its threads are daemons."""

    def __init__(self, server: str, scissors: Scissors) -> None:
        address = urlsplit(server)
        self._server = (address.hostname or "", address.port or 80)
        self._scissors = scissors
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no further connection."""
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._server, timeout=TIMEOUT_S)
        except OSError:  # it was killed: its relay refuses, as it would itself
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
            client.close()
            return
        for one in (client, server):
            one.settimeout(None)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._upstream, args=(client, server), daemon=True).start()
        self._downstream(client, server)

    def _upstream(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(READ_BYTES):
                server.sendall(data)
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)

    def _downstream(self, client: socket.socket, server: socket.socket) -> None:
        stream = b""
        cut: Cut | None = None
        try:
            while data := server.recv(READ_BYTES):
                if data.startswith(b"HTTP/1.1 "):
                    stream = b""
                passed = len(stream)
                stream += data
                found = self._scissors.passes(stream) if b"text/event-stream" in stream else None
                if found is not None:
                    client.sendall(stream[passed : found[0]])
                    cut = found[1]
                    break
                client.sendall(data)
        except OSError:
            cut = Cut(0)  # a server that was killed resets: so does its relay
        if cut is not None and cut.reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        server.close()
        with suppress(OSError):
            client.shutdown(socket.SHUT_RD)  # wakes the other thread
        client.close()
