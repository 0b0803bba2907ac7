# SPDX-License-Identifier: Apache-2.0
"""What endpoints are told of the client and of the way of its request: X-Forwarded-For, -Proto, -Host, and Via. Pure.

Any client can send such fields, so they are trusted only if its address is one of `trusted_proxies`. Otherwise they are
dropped, and replaced by what lbproxy saw itself.

Via also detects loops (RFC 9110, section 7.6.3): ours names this process in a comment, and a request with that comment
was here before. Proxies may drop comments, so a request that passed too many lbproxys is a loop as well.

An endpoint above tier 1 is somebody else's. It gets no field of the client but those that its API needs, by a list of
what passes: names of what must not are invented every day.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import Final
from urllib.parse import unquote_plus

from lbproxy.config.sections.proxies import ForwardedMode, Network
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.proxy.request.headers import RequestFields

MAX_FORWARDS_DIGITS: Final = 9
MAX_HOPS: Final = 10
"""lbproxys that a request may have passed. A chain has two or three."""
_ELSEWHERE: Final = frozenset(
    {
        *(b"accept", b"user-agent", b"anthropic-version", b"anthropic-beta", b"openai-beta", b"idempotency-key"),
        *(b"connection", b"upgrade", b"sec-websocket-version", b"sec-websocket-key", b"sec-websocket-protocol"),
    }
)
"""What of a client passes above tier 1, with all about the content; the second line is lbproxy's own, of a handshake.
Credentials, traces and ids of requests are not among these fields."""
_CONTENT: Final = b"content-"
_OUR_VIA: Final = re.compile(rb"1\.[01] lbproxy(?: \([0-9a-f]{12}\))?")
"""What lbproxys added: without it two that overflow to each other would not notice."""
_CACHED_BYTES: Final = 4 << 10
_WORDS: Final = re.compile(r"[a-z0-9]+")
_CREDENTIALS: Final = frozenset(
    {
        *("key", "apikey", "token", "accesstoken", "secret", "password", "passwd", "pwd", "sig", "signature", "auth"),
        *("authorization", "credential", "credentials", "jwt", "session", "sessionid", "sid", "code", "cookie"),
    }
)
"""Words in names of query parameters by which keys are sent: ?api-key=, ?access_token=, ?X-Amz-Signature=."""
UNIX: Final = "unix:"
"""The address of a client on a Unix socket."""


class Forwarding:
    """The forwarding rules of the settings."""

    def __init__(self, mode: ForwardedMode, trusted: Sequence[Network], instance: str) -> None:
        """`instance`: a word that is unique to this process."""
        self.mode = mode
        self.trusted = trusted
        self._mark = f"({instance})".encode("ascii")
        self.via = (f"Via: 1.1 lbproxy ({instance})\r\n".encode(), f"Via: 1.0 lbproxy ({instance})\r\n".encode())
        """The field line for requests of HTTP/1.1, and of 1.0."""

    def is_loop(self, via: bytes) -> bool:
        """Whether a request with this Via was here before."""
        return self._mark in via or via.count(b"lbproxy") > MAX_HOPS

    def peer(self, address: str, *, encrypted: bool) -> Peer:
        """The peer of one connection. `address`: its other end; UNIX: a process of this machine; empty = unknown."""
        return Peer(self, address, encrypted=encrypted)


class Peer:
    """The forwarding fields of one client's connection."""

    def __init__(self, forwarding: Forwarding, address: str, *, encrypted: bool) -> None:
        self._via = forwarding.via
        ip = None if address in {"", UNIX} else ip_address(address.partition("%")[0])
        if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:  # from a socket for both families
            ip = ip.ipv4_mapped
        self._address = b"" if ip is None else str(ip).encode("ascii")
        self._proto = b"X-Forwarded-Proto: https\r\n" if encrypted else b"X-Forwarded-Proto: http\r\n"
        self._seen = self._proto if ip is None else b"X-Forwarded-For: %b\r\n%b" % (self._address, self._proto)
        self._passes = forwarding.mode == "off"
        trusted = address == UNIX or any(ip in network for network in forwarding.trusted if ip is not None)
        self._appends = forwarding.mode == "append" and trusted

    def lines(self, fields: RequestFields, *, http10: bool = False) -> bytes:
        """The field lines for a request, each with its CRLF."""
        via = self._via[1] if http10 else self._via[0]
        if self._passes:
            return fields.forwarded + via
        if fields.forwarded and self._appends:
            return self._appended(fields) + via
        if not fields.host:  # HTTP/1.0
            return self._seen + via
        return b"%bX-Forwarded-Host: %b\r\n%b" % (self._seen, fields.host, via)

    def _appended(self, fields: RequestFields) -> bytes:
        """The fields of a trusted proxy, completed by what lbproxy saw."""
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
    """Whether Max-Forwards allows to forward the request with these fields (RFC 9110, section 7.6.2); it is decreased
    by one. Raises LbError.
    """
    value = fields.max_forwards or b""
    if method != "OPTIONS":  # or TRACE, which is not forwarded in any case
        fields.forward += b"Max-Forwards: %b\r\n" % value
        return True
    if not (value.isdigit() and len(value) <= MAX_FORWARDS_DIGITS):
        raise LbError(Outcome.BAD_REQUEST, "Max-Forwards is not a number.")
    fields.forward += b"Max-Forwards: %d\r\n" % (int(value) - 1)
    return int(value) > 0


def let_out(lines: bytes, more: tuple[str, ...]) -> bytes:
    """Those of a request's field lines that go to an endpoint above tier 1. `more`: further names, in lower case."""
    return _let_out_cached(lines, more) if len(lines) <= _CACHED_BYTES else _let_out(lines, more)


def _let_out(lines: bytes, more: tuple[str, ...]) -> bytes:
    passing = _ELSEWHERE.union(one.encode() for one in more)
    kept = []
    for line in lines.splitlines(keepends=True):
        name, _, value = line.partition(b":")
        name = name.strip().lower()
        if name in passing or name.startswith(_CONTENT):
            kept.append(line)
        elif name == b"via" and (ours := _OUR_VIA.findall(value)):
            kept.append(b"Via: %b\r\n" % b", ".join(ours))
    return b"".join(kept)


_let_out_cached: Final = lru_cache(maxsize=1024)(_let_out)
"""Most clients send the same fields with each request."""


def without_credentials(target: str) -> str:
    """A request target without what looks like a key in its query."""
    path, found, query = target.partition("?")
    if not found:
        return target
    kept = [part for part in query.split("&") if not _is_credential(part)]
    return f"{path}?{'&'.join(kept)}" if kept else path


def _is_credential(part: str) -> bool:
    name = unquote_plus(part.partition("=")[0]).lower()
    return any(word in _CREDENTIALS or word.endswith(("key", "token")) for word in _WORDS.findall(name))
