"""Settings of what endpoints are told of who asks."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Literal, TypeAlias

from lbproxy.config.values import expected

ForwardedMode: TypeAlias = Literal["append", "replace", "off"]
Network: TypeAlias = IPv4Network | IPv6Network
LOOPBACK: tuple[Network, ...] = (IPv4Network("127.0.0.0/8"), IPv6Network("::1/128"))
MAX_TRUSTED = 256
_WANTED = "networks in a list, such as [10.0.0.0/8, 192.0.2.7]"


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
