"""What goes out to an endpoint. Pure."""

from __future__ import annotations

from typing import NamedTuple

from lbproxy.core.types import Endpoint
from lbproxy.net.h1 import request_head


class Outgoing(NamedTuple):
    """A request as every endpoint gets it; the same bytes each time, but for the endpoint's own name."""

    method: str
    target: str
    fields: bytes
    """Field lines, each with its CRLF."""
    body: bytes
    request_id: str

    def head_for(self, endpoint: Endpoint) -> bytes:
        """The request's head, with the fields of ours."""
        authority = endpoint.authority
        own = f"x-request-id: {self.request_id}\r\nx-gateway-destination-endpoint: {authority}\r\n"
        return request_head(self.method, self.target, authority, self.fields + own.encode("ascii"), len(self.body))
