# SPDX-License-Identifier: Apache-2.0
"""What is open in this process, and what is refused because it is the bottleneck itself. Workers tell it as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class OwnLoad(NamedTuple):
    """How near lbproxy is to its own limits."""

    refuses: str | None = None
    """Why new requests are refused now."""
    refused: Mapping[str, int] = {}
    """Requests, by reason."""
    refused_connections: Mapping[str, int] = {}
    failed_handshakes: int = 0
    """Connections that no TLS came of."""
    ended: int = 0
    """Requests that were ended for their memory."""
    held_bytes: int = 0
    """Bytes of bodies in memory."""
    max_held_bytes: int = 0
    limit_bytes: int | None = None
    """Memory that may be used."""
    traces: Mapping[str, int] | None = None
    """How many requests' traces became what; None while none are traced."""
    connections: int = 0
    """Open connections of clients."""
    upstream_connections: int = 0
    """Open connections to endpoints, including idle ones."""
