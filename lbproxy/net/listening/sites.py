# SPDX-License-Identifier: Apache-2.0
"""Which site a request is for, by what browsers say of it: who listens on this machine only is still reached from every
web page that its user opens.

A page of another site sends its `Origin` with each request that can change something or be read. A page whose own name
was made to lead here (DNS rebinding) is of one site with us, as far as its browser knows: it shows that name as `Host`.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence


def is_cross_origin(origin: str, host: str) -> bool:
    """Whether a page of this `Origin` is of another site than the request's `Host`."""
    _, scheme, site = origin.partition("://")
    return not scheme or site.lower() != host.lower()


def name_of(host: str) -> str:
    """The name or address in a `Host`, in lower case, without port, brackets and the root's dot."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")


def is_loopback_name(name: str) -> bool:
    """Whether it is this machine to every resolver that follows RFC 6761, or a loopback address."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _address(name)
    return address is not None and address.is_loopback


def is_address(name: str) -> bool:
    """Whether it is an IP address: nobody can make one lead elsewhere."""
    return _address(name) is not None


def is_loopback(sockets: Sequence[socket.socket]) -> bool:
    """Whether these listen on loopback addresses, all of them."""
    return bool(sockets) and all(
        sock.family != socket.AF_UNIX and is_loopback_name(sock.getsockname()[0].partition("%")[0]) for sock in sockets
    )


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
