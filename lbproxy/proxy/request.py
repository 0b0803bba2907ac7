"""A client's request, read whole, and what of it goes out to an endpoint. Pure."""

from __future__ import annotations

from typing import NamedTuple

from lbproxy.core.orca import REQUEST_HEADER
from lbproxy.core.trace import Trace
from lbproxy.core.types import Endpoint
from lbproxy.net.fetch import bearer
from lbproxy.net.h1 import request_head
from lbproxy.proxy.headers import RequestFields
from lbproxy.proxy.routes import Route

_ASK_LOAD = f"{REQUEST_HEADER}: TEXT\r\n"
"""TEXT shows when a metric stands twice; in JSON vLLM's last one hides the others."""


class ClientRequest(NamedTuple):
    """A request, whichever way it was read. Every endpoint gets the same bytes, but for its own name and key."""

    method: str
    target: str
    """`/path?query`."""
    route: Route
    fields: RequestFields
    body: bytes
    credentials: bytes = b""
    """Field lines, each with its CRLF: the client's own for the endpoint. None where lbproxy itself asks for a key."""
    http10: bool = False
    """The client takes no chunks, and its connection ends with the answer."""
    trace: bytes = b""
    """Field lines, each with its CRLF: which trace it belongs to. The client's own while lbproxy makes no traces."""

    def head_for(
        self, endpoint: Endpoint, request_id: str, *, ask_load: bool = False, trace: Trace | None = None
    ) -> bytes:
        """The head that `endpoint` gets, with the fields of ours. `ask_load`: it shall say its load with the answer,
        and how is not the client's choice. `trace`: if the request is traced.
        """
        authority = endpoint.authority
        asked = _ASK_LOAD if ask_load and not self.fields.wants_load_report else ""
        own = f"x-request-id: {request_id}\r\nx-gateway-destination-endpoint: {authority}\r\n{asked}"
        key, tls = endpoint.api_key, endpoint.tls
        credentials = self.credentials if key is None else bearer(key)
        if tls is not None and tls.server_name is not None:  # where the name and Host differ, servers answer 421
            authority = f"{tls.server_name}:{authority.rpartition(':')[2]}"
        traced = self.trace if trace is None else trace.fields
        fields = self.fields.forward + credentials + traced + own.encode("ascii")
        return request_head(self.method, self.target, authority, fields, len(self.body))
