# SPDX-License-Identifier: Apache-2.0
"""A client's complete request, and what of it goes to an endpoint. Pure."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

import orjson

from lbproxy.core.endpoints.credentials import ApiKey, Tls
from lbproxy.core.endpoints.endpoint import Endpoint
from lbproxy.core.engines.orca import REQUEST_HEADER
from lbproxy.core.observed.trace import Trace
from lbproxy.core.requests.openai import Naming, Pieces
from lbproxy.core.requests.request import MAX_TIER
from lbproxy.core.responses.unasked import UsageForm
from lbproxy.net.connections.fetch import bearer
from lbproxy.net.connections.h1 import request_head
from lbproxy.net.dialing.above import below
from lbproxy.net.dialing.origin import Origin
from lbproxy.proxy.request.forwarding import let_out, without_credentials
from lbproxy.proxy.request.headers import RequestFields
from lbproxy.proxy.request.routes import Route

_ASK_LOAD: Final = f"{REQUEST_HEADER}: TEXT\r\n"
"""TEXT keeps metrics that occur twice; in JSON vLLM's last one replaces the others."""
_RANK_LINES: Final = re.compile(rb"(?im)^x-data-parallel-rank:[^\r\n]*\r\n")
_RANK_GONE: Final = re.compile(r"(?:routed_)?(?:dp_rank|data_parallel_rank)[ =]\d+ (?:is )?out of range")
_MAX_ERROR_BYTES: Final = 4096


def rank_is_gone(endpoint: Endpoint, body: bytes) -> bool:
    """Whether a 400 with this body refuses the rank that `endpoint` is: vLLM 0.32 and SGLang 0.5.23 name it at the
    beginning of the message. What follows may repeat what the client sent.
    """
    if endpoint.rank is None or len(body) > _MAX_ERROR_BYTES:
        return False
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    error = said.get("error", said) if isinstance(said, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return isinstance(message, str) and _RANK_GONE.match(message) is not None


class ClientRequest(NamedTuple):
    """A request, from aiohttp or the fast lane. Every endpoint gets the same bytes, except for its own name and key."""

    method: str
    target: str
    """`/path?query`."""
    route: Route
    fields: RequestFields
    body: bytes
    credentials: bytes = b""
    """Field lines, each with its CRLF: the client's own for the endpoint. Empty where lbproxy itself requires a key."""
    http10: bool = False
    """The client accepts no chunks, and its connection ends with the response."""
    trace: bytes = b""
    """Field lines, each with its CRLF: the trace that it belongs to. The client's own while lbproxy makes no traces."""
    model: str | None = None
    """The model that endpoints are asked for; None: the one that the body names."""
    naming: Naming | None = None
    """Where the body names its model, if that is known."""
    pieces: Pieces = ()
    """The body, if it is large and was given another model: it is sent piece by piece. `body` is empty then."""
    keepalive_s: float = 0.0
    """Seconds of silence after which its client is told that the stream lives; 0 = never."""
    fallbacks: tuple[str, ...] = ()
    """Models that may serve it in place of its own, in order."""
    continues: bool = False
    """Its stream goes on at another endpoint if its own dies."""
    usage: UsageForm | None = None
    """How the stream of this attempt says what it used, which the client does not want to know; None: it does, or that
    is not asked for."""

    def in_one_piece(self) -> ClientRequest:
        """The same, with its pieces joined."""
        return self._replace(body=b"".join(self.pieces), pieces=()) if self.pieces else self

    def head_for(
        self,
        endpoint: Endpoint,
        request_id: str,
        forwarded: bytes = b"",
        *,
        ask_load: bool = False,
        trace: Trace | None = None,
        max_tier: int = MAX_TIER,
    ) -> bytes:
        """The head for `endpoint`, with lbproxy's own fields. `forwarded`: field lines about the client. `ask_load`:
        request a load report with the response, in a format that clients cannot choose. `trace`: if the request is
        traced. An endpoint above tier 1 is elsewhere: it gets what `let_out` lets out. `max_tier`: the highest
        tier that the request may go to, which an endpoint that is an lbproxy must know.
        """
        method, target, _, fields, body, credentials, _, traced, _, _, pieces, *_ = self
        length = len(body)
        if pieces:
            length = sum(map(len, pieces))
        host, named, key = _addressed(endpoint.base_url, endpoint.rank, endpoint.api_key, endpoint.tls)
        forward = fields.forward
        if endpoint.tier > 1:
            target, forward = without_credentials(target), let_out(forward + forwarded, endpoint.forward_headers)
            forwarded = b""
            named = "" if endpoint.rank is None else f"X-data-parallel-rank: {endpoint.rank}\r\n"
        target = below(endpoint.base_url, target)
        if endpoint.rank is not None:
            forward = _RANK_LINES.sub(b"", forward)  # only one rank can be meant
        if key is not None:
            credentials = key
        if ask_load and not fields.wants_load_report:
            named = _ASK_LOAD + named
        if max_tier < MAX_TIER:
            named += f"x-lbproxy-tier: {max_tier}\r\n"
        if trace is not None:
            traced = trace.fields
        own = f"{named}x-request-id: {request_id}\r\n".encode("ascii")
        return request_head(method, target, host, forward + forwarded + credentials + traced + own, length)


@lru_cache(maxsize=4096)  # once per request; URLs come from settings and discovery only
def _addressed(
    base_url: str, rank: int | None, api_key: ApiKey | None, tls: Tls | None
) -> tuple[str, str, bytes | None]:
    """The value of Host, the field lines that name the endpoint, and the one with its own key."""
    origin = Origin.parse(base_url, tls)
    named = f"x-gateway-destination-endpoint: {origin}\r\n"
    if rank is not None:
        named += f"X-data-parallel-rank: {rank}\r\n"
    return origin.host_field, named, None if api_key is None else bearer(api_key)
