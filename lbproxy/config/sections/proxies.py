# SPDX-License-Identifier: Apache-2.0
"""Settings of other proxies: those in front of lbproxy, which say who asks, and those on the way to endpoints."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Literal, TypeAlias
from urllib.parse import unquote_to_bytes

from lbproxy.config.values import ReadFromText, expected, read_host

ForwardedMode: TypeAlias = Literal["append", "replace", "off"]
Network: TypeAlias = IPv4Network | IPv6Network
LOOPBACK: tuple[Network, ...] = (IPv4Network("127.0.0.0/8"), IPv6Network("::1/128"))
MAX_TRUSTED = 256
_WANTED = "networks in a list, such as [10.0.0.0/8, 192.0.2.7]"


MAX_USERINFO_CHARS = 1024
_URL = re.compile(
    rf"(?i:http)://(?:(?P<userinfo>[!$&-.0-;=A-Z_a-z~%]{{1,{MAX_USERINFO_CHARS}}})@)?"
    r"(?P<host>\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,254}):(?P<port>[0-9]{1,5})/?"
)
"""The characters of a user and password are those of RFC 3986, section 3.2.1; all others are written as %XX."""
_ENCODED = re.compile("(?:[^%]|%[0-9A-Fa-f]{2})*")


@dataclass(frozen=True, slots=True)
class ProxyUrl(ReadFromText):
    """Where a forward proxy is, and what it is shown."""

    host: str
    """Without brackets."""
    port: int
    userinfo: str | None = field(default=None, repr=False)
    """`user:password`, decoded; None = it is shown nothing."""

    @classmethod
    def read(cls, value: object) -> ProxyUrl:
        """From its URL. Raises PydanticCustomError, which does not repeat it."""
        if isinstance(value, ProxyUrl):
            return value
        match = _URL.fullmatch(value) if isinstance(value, str) else None
        host = None if match is None else read_host(match["host"])
        if match is None or host is None or not 1 <= int(match["port"]) <= 65535:
            raise expected("http://[user:password@]host:port")
        return cls(host.strip("[]"), int(match["port"]), _userinfo(match["userinfo"]))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{'' if self.userinfo is None else '***@'}{host}:{self.port}"


def _userinfo(written: str | None) -> str | None:
    """`user:password` as it is sent; a colon would end the user's name (RFC 7617, section 2)."""
    if written is None:
        return None
    user, _, password = written.partition(":")
    try:
        name, secret = (unquote_to_bytes(one).decode("utf-8") for one in (user, password))
    except UnicodeDecodeError:
        name = ""
    if not name or ":" in name or not (name + secret).isprintable() or _ENCODED.fullmatch(written) is None:
        raise expected("http://[user:password@]host:port")
    return f"{name}:{secret}"


def read_networks(value: object) -> tuple[Network, ...]:
    """What a list of networks, or addresses, means. Raises PydanticCustomError."""
    if not isinstance(value, list | tuple) or len(value) > MAX_TRUSTED:
        raise expected(f"at most {MAX_TRUSTED} {_WANTED}")
    return tuple(map(_network, value))


def _network(value: object) -> Network:
    if isinstance(value, IPv4Network | IPv6Network):
        return value
    if isinstance(value, str):  # ip_network would take a number for an address
        try:
            return ip_network(value, strict=False)
        except ValueError:
            pass
    raise expected(_WANTED)
