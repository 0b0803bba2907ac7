"""A client's request, read whole, and what of it goes out to an endpoint. Pure."""

from __future__ import annotations

from typing import NamedTuple

from lbproxy.core.types import Endpoint
from lbproxy.net.h1 import request_head
from lbproxy.proxy.headers import RequestFields
from lbproxy.proxy.routes import Route


class ClientRequest(NamedTuple):
    """A request, whichever way it was read. Every endpoint gets the same bytes, but for its own name."""

    method: str
    target: str
    """`/path?query`."""
    route: Route
    fields: RequestFields
    body: bytes
    http10: bool = False
    """The client takes no chunks, and its connection ends with the answer."""

    def head_for(self, endpoint: Endpoint, request_id: str) -> bytes:
        """The head that `endpoint` gets, with the fields of ours."""
        authority = endpoint.authority
        own = f"x-request-id: {request_id}\r\nx-gateway-destination-endpoint: {authority}\r\n"
        fields = self.fields.forward + own.encode("ascii")
        return request_head(self.method, self.target, authority, fields, len(self.body))
