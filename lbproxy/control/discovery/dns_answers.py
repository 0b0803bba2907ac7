# SPDX-License-Identifier: Apache-2.0
"""What nameservers say of a name: addresses, services, or why none. Values, and what is usable of them. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import NamedTuple

OK, EMPTY, NXDOMAIN, TIMEOUT, FAILED = "ok", "empty", "nxdomain", "timeout", "failed"
"""What a question can bring: addresses; the name exists without any; it does not exist; silence; anything else."""
MAX_DETAIL_CHARS = 300
MAX_SERVERS = 1024
"""SRV records of a name that are read: those that come first by priority."""


class IPAddress(NamedTuple):
    """An address. Ascending order is IPv4 first. Unlike those of `ipaddress` these are compared and written in C."""

    version: int
    number: int
    text: str


class DnsAnswer(NamedTuple):
    """What the question for a name's IPv4, or IPv6, addresses brought. Made by `answer`, or without addresses."""

    result: str
    addresses: tuple[str, ...] = ()
    """With `ok`: at least one, as the server gave them."""
    detail: str = ""
    """Without: why, for a human."""
    usable: tuple[IPAddress, ...] = ()
    """Those of `addresses` where an endpoint can be. To read them is the dear part, so it is done in the thread."""


class SrvRecord(NamedTuple):
    """One SRV record (RFC 2782)."""

    priority: int
    weight: int
    port: int
    target: str
    """In lower case, without the last dot."""


class Services(NamedTuple):
    """What the question for a name's SRV records brought."""

    result: str
    servers: tuple[SrvRecord, ...] = ()
    """With `ok`: at least one, ascending, at most MAX_SERVERS."""
    detail: str = ""
    """Without: why, for a human."""


class NoRecordsError(Exception):
    """A question that brought no records, and why."""

    def __init__(self, result: str, error: Exception) -> None:
        super().__init__(result)
        self.result = result
        self.detail = (str(error) or type(error).__name__)[:MAX_DETAIL_CHARS]


def answer(addresses: Iterable[str]) -> DnsAnswer:
    """A good answer with these addresses; EMPTY if there are none."""
    found = tuple(addresses)
    if not found:
        return DnsAnswer(EMPTY, detail="the name has no addresses")
    return DnsAnswer(OK, found, usable=tuple(one for one in map(usable_address, found) if one is not None))


def usable_address(text: str) -> IPAddress | None:
    """The address, IPv4 written as IPv6 made plain; None if no endpoint can be reached there.

    Left out are 0.0.0.0 and :: (what a filtering nameserver says instead of "no"), multicast, broadcast and link-local:
    fe80:: needs a zone, which DNS cannot say, and clouds have their machines' credentials at 169.254.169.254.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    plain = str(address)
    wrong = address.is_unspecified or address.is_multicast or address.is_link_local or plain == "255.255.255.255"
    return None if wrong else IPAddress(address.version, int(address), plain)


class Lookup(NamedTuple):
    """Both answers about a name."""

    v4: DnsAnswer
    v6: DnsAnswer
