"""What an endpoint is told of who asks and how the request came: X-Forwarded-For, -Proto, -Host, and Via. Pure.

Anybody can write such fields, so what a client says of itself is believed only if its address is one of
`trusted_proxies`. Everybody else's are dropped, and what we saw ourselves stands there instead.

Via also shows loops (RFC 9110, section 7.6.3): ours names this process in a comment, and a request that has it was here
before. Comments may be dropped on the way, so that one that saw too many lbproxys is a loop as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv6Address, ip_address
from typing import Final

from lbproxy.config.sections.forwarded import ForwardedMode, Network
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.proxy.request.headers import RequestFields

MAX_FORWARDS_DIGITS: Final = 9
MAX_HOPS: Final = 10
"""lbproxys that a request may have passed. A chain has two or three."""
UNIX: Final = "unix:"
"""The address of a client on a Unix socket."""
VIA_US: Final = "Via: 1.1 lbproxy\r\n"
"""For a response."""


class Forwarding:
    """By the settings."""

    def __init__(self, mode: ForwardedMode, trusted: Sequence[Network], instance: str) -> None:
        """`instance`: a word that no other process has."""
        self.mode = mode
        self.trusted = trusted
        self._mark = f"({instance})".encode("ascii")
        self.via = (f"Via: 1.1 lbproxy ({instance})\r\n".encode(), f"Via: 1.0 lbproxy ({instance})\r\n".encode())
        """The field line for requests of HTTP/1.1, and of 1.0."""

    def is_loop(self, via: bytes) -> bool:
        """Whether a request with this Via was here before."""
        return self._mark in via or via.count(b"lbproxy") > MAX_HOPS

    def peer(self, address: str, *, encrypted: bool) -> Peer:
        """Of one connection. `address`: its other end; UNIX, behind which only this machine is; empty = unknown."""
        return Peer(self, address, encrypted=encrypted)


class Peer:
    """What stands for one client's connection."""

    def __init__(self, forwarding: Forwarding, address: str, *, encrypted: bool) -> None:
        self._via = forwarding.via
        ip = None if address in {"", UNIX} else ip_address(address.partition("%")[0])
        if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:  # of a socket for both families
            ip = ip.ipv4_mapped
        self._address = b"" if ip is None else str(ip).encode("ascii")
        self._proto = b"X-Forwarded-Proto: https\r\n" if encrypted else b"X-Forwarded-Proto: http\r\n"
        self._seen = self._proto if ip is None else b"X-Forwarded-For: %b\r\n%b" % (self._address, self._proto)
        self._passes = forwarding.mode == "off"
        trusted = address == UNIX or any(ip in network for network in forwarding.trusted if ip is not None)
        self._appends = forwarding.mode == "append" and trusted

    def lines(self, fields: RequestFields, *, http10: bool = False) -> bytes:
        """The field lines of a request, each with its CRLF."""
        via = self._via[1] if http10 else self._via[0]
        if self._passes:
            return fields.forwarded + via
        if fields.forwarded and self._appends:
            return self._appended(fields) + via
        if not fields.host:  # HTTP/1.0
            return self._seen + via
        return b"%bX-Forwarded-Host: %b\r\n%b" % (self._seen, fields.host, via)

    def _appended(self, fields: RequestFields) -> bytes:
        """After what a trusted proxy says; what it does not say is what we saw."""
        chain, lines, names = [], [], set()
        for line in fields.forwarded.splitlines(keepends=True):
            name, _, value = line.partition(b":")
            names.add(name.lower())
            if name.lower() == b"x-forwarded-for":
                chain.append(value.strip())
            else:
                lines.append(line)
        if self._address:
            chain.append(self._address)
        if any(chain):
            lines.insert(0, b"X-Forwarded-For: %b\r\n" % b", ".join(filter(None, chain)))
        if b"x-forwarded-proto" not in names:
            lines.append(self._proto)
        if b"x-forwarded-host" not in names and fields.host:
            lines.append(b"X-Forwarded-Host: %b\r\n" % fields.host)
        return b"".join(lines)


def may_forward(method: str, fields: RequestFields) -> bool:
    """What Max-Forwards says of the request that has these fields (RFC 9110, section 7.6.2); one less goes on. Raises
    LbError.
    """
    value = fields.max_forwards or b""
    if method != "OPTIONS":  # or TRACE, which goes no further in any case
        fields.forward += b"Max-Forwards: %b\r\n" % value
        return True
    if not (value.isdigit() and len(value) <= MAX_FORWARDS_DIGITS):
        raise LbError(Outcome.BAD_REQUEST, "Max-Forwards is not a number.")
    fields.forward += b"Max-Forwards: %d\r\n" % (int(value) - 1)
    return int(value) > 0
