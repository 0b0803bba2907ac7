# SPDX-License-Identifier: Apache-2.0
"""Raw HTTP exchanges with one server, kept as they went over the wire.

Each exchange has a connection of its own (`Connection: close`) and becomes three files: NAME.request.http and
NAME.response.http with the bytes, NAME.timing.json with the seconds since the request was sent and the size of each
read, and `total_s`.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

TIMEOUT_S = 120.0
READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Exchange:
    """One request and the complete response."""

    name: str
    request: bytes
    response: bytes
    reads: list[tuple[float, int]]
    """Seconds since the request was sent, and bytes, of each read."""
    total_s: float

    @property
    def status(self) -> int:
        return int(self.response.split(b" ", 2)[1])

    @property
    def body(self) -> bytes:
        """After the head; a chunked body with its chunk lines."""
        return self.response.partition(b"\r\n\r\n")[2]

    def find(self, pattern: str) -> str:
        """The first group of the pattern's first match in the body. AssertionError if there is none."""
        match = re.search(pattern, self.body.decode())
        assert match, f"{self.name}: no {pattern} in {self.response[:2000]!r}"
        return match[1]


class Recorder:
    """Sends requests to one server and writes what went over the wire to a folder."""

    def __init__(self, url: str, folder: Path) -> None:
        address = urlsplit(url)
        self._address = (address.hostname or "", address.port or 80)
        self._folder = folder
        self.exchanges: list[Exchange] = []

    def get(self, name: str, path: str) -> Exchange:
        return self._exchange(name, self._head("GET", path))

    def post(self, name: str, path: str, body: Mapping[str, object] | None = None) -> Exchange:
        """A JSON body, or none at all."""
        if body is None:
            return self._exchange(name, self._head("POST", path, "Content-Length: 0"))
        return self.send(name, path, "application/json", json.dumps(body, separators=(",", ":")).encode())

    def send(self, name: str, path: str, content_type: str, payload: bytes) -> Exchange:
        fields = (f"Content-Type: {content_type}", f"Content-Length: {len(payload)}")
        return self._exchange(name, self._head("POST", path, *fields) + payload)

    def upgrade(self, name: str, path: str) -> Exchange:
        """A WebSocket handshake, with the key of RFC 6455, 1.2; what the server sends within a second of silence."""
        fields = ("Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
        return self._exchange(name, self._head("GET", path, *fields, connection="Upgrade"), patience_s=1.0)

    def _head(self, method: str, path: str, *fields: str, connection: str = "close") -> bytes:
        """The port is no part of what is recorded: each run has another."""
        lines = (f"{method} {path} HTTP/1.1", "Host: 127.0.0.1:8000", "Accept: */*", *fields)
        return "".join(f"{line}\r\n" for line in (*lines, f"Connection: {connection}", "")).encode()

    def _exchange(self, name: str, request: bytes, patience_s: float = TIMEOUT_S) -> Exchange:
        """Until the server closes, or is silent for `patience_s` after its first byte."""
        pieces, reads = [], []
        with socket.create_connection(self._address, timeout=TIMEOUT_S) as sock:
            sent = time.monotonic()
            sock.sendall(request)
            with suppress(TimeoutError):
                while piece := sock.recv(READ_BYTES):
                    sock.settimeout(patience_s)
                    reads.append((round(time.monotonic() - sent, 4), len(piece)))
                    pieces.append(piece)
        exchange = Exchange(name, request, b"".join(pieces), reads, round(time.monotonic() - sent, 4))
        self._write(exchange)
        self.exchanges.append(exchange)
        return exchange

    def _write(self, exchange: Exchange) -> None:
        timing = {"recv": exchange.reads, "total_s": exchange.total_s}
        (self._folder / f"{exchange.name}.request.http").write_bytes(exchange.request)
        (self._folder / f"{exchange.name}.response.http").write_bytes(exchange.response)
        (self._folder / f"{exchange.name}.timing.json").write_text(json.dumps(timing))
