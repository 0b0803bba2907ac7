# SPDX-License-Identifier: Apache-2.0
"""Who may use the admin listener: everybody its health and metrics, everything else only who may.

With a token set, that is who sends it, wherever from. Without one it is who calls from this machine: a program of the
operator's, and neither a proxy that passes on what others ask (it says so in a header) nor a web page that the
operator's browser runs (the browser says where it is from, and which name it took us for). Invariant: a path is closed
unless it is one of `OPEN` or, where there is a token to ask for, of `PAGE`; so is one that does not exist, and one that
is added later.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable

from aiohttp import web

from lbproxy.config.sections.access import Secret
from lbproxy.core.requests.outcome import LbError, Outcome

OPEN = frozenset({"/healthz", "/readyz", "/metrics"})
PAGE = frozenset({"/", "/dashboard"})
"""The dashboard before it has asked for anything: open once there is a token, which a browser can send only from it."""
_PASSED_ON = ("Forwarded", "X-Forwarded-For", "X-Real-IP")
_NOT_FROM_HERE = "Without admin.token in the settings, this is only open to programs on lbproxy's own machine."

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AdminAccess:
    """The rule, under one token."""

    def __init__(self, token: Secret | None) -> None:
        self.token = token
        """A reload may set another; it holds for the next request."""

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Lets through who may. Raises LbError UNAUTHORIZED or FORBIDDEN, before anything of a body was read."""
        is_page = self.token is not None and request.path in PAGE and request.method in {"GET", "HEAD"}
        if request.path not in OPEN and not is_page:
            require(request, self.token)
        return await handler(request)


def require(request: web.BaseRequest, token: Secret | None) -> None:
    """Raises LbError unless the request's sender may use all of the admin listener.

    UNAUTHORIZED: the token is not there, or is not right. FORBIDDEN: no token would help.
    """
    headers = request.headers
    origin = headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != headers.get("Host"):
        raise LbError(Outcome.FORBIDDEN, "Requests from web pages of another origin are refused.")
    if token is not None:
        given = headers.getall("Authorization", [])
        if len(given) != 1 or not _is_bearer(given[0], token):
            raise LbError(Outcome.UNAUTHORIZED, "This needs the admin token: `Authorization: Bearer TOKEN`.")
    elif not _is_local(request) or any(name in headers for name in _PASSED_ON):
        raise LbError(Outcome.FORBIDDEN, _NOT_FROM_HERE)
    elif not _is_own_name(headers.get("Host", "")):
        # A page on evil.example, whose name now leads to this machine: DNS rebinding.
        raise LbError(
            Outcome.FORBIDDEN, "Without admin.token, use the admin listener's IP address or localhost in the URL."
        )


def _is_bearer(value: str, token: Secret) -> bool:
    scheme, _, text = value.partition(" ")
    return scheme.lower() == "bearer" and token.is_in(text.strip(" ").encode("utf-8", "surrogateescape"))


def _is_local(request: web.BaseRequest) -> bool:
    sock = None if request.transport is None else request.transport.get_extra_info("socket")
    if sock is not None and sock.family == socket.AF_UNIX:
        return True
    try:
        address = ipaddress.ip_address(request.remote or "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _is_own_name(host: str) -> bool:
    """An address, or localhost: what no other machine's owner can have somebody call us."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
