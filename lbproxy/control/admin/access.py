# SPDX-License-Identifier: Apache-2.0
"""Who may use the admin listener: everybody its health and metrics, everything else only who may.

With a token set, that is who sends it, wherever from. Without one:

- Changing, by any method but GET and HEAD, is for who sends the token that lbproxy made (control/admin/made_token.py),
  or can connect to the listener's Unix socket: a file says who may.
- Reading is also for who calls from this machine: a program of the operator's, and neither a proxy that passes on what
  others ask (if it says so in a header) nor a web page that the operator's browser runs (the browser says where it is
  from, and which name it took us for). A guess: good enough for what is read, and never for more.

Invariant: a path is closed unless it is one of `OPEN` or, where there is a token to ask for, of `PAGE`; so is one that
does not exist, and one that is added later.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable

from aiohttp import web

from lbproxy.config.sections.access import Secret
from lbproxy.control.admin.made_token import MadeToken
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.net.listening.sites import is_address, is_cross_origin, is_loopback_name, name_of

OPEN = frozenset({"/healthz", "/readyz", "/metrics"})
PAGE = frozenset({"/", "/dashboard"})
"""The dashboard before it has asked for anything: open once there is a token, which a browser can send only from it."""
READING = frozenset({"GET", "HEAD"})
"""Methods that change nothing, on any path."""
_PASSED_ON = ("Forwarded", "X-Forwarded-For", "X-Real-IP")
_NOT_FROM_HERE = "Without admin.token in the settings, this is only open to programs on lbproxy's own machine."
_WITH_THE_MADE = "Changes need the admin token: `lbproxy admin-token` prints it, `lbproxy dashboard` a link with it."
_WITH_NOTHING = (
    "Changes need a token, and there was no folder to write one to: set $XDG_RUNTIME_DIR or $RUNTIME_DIRECTORY to one, "
    "or state.file (its folder is used), or admin.token, or make admin a Unix socket, and start lbproxy again. "
    "`kill -HUP` reloads the settings without a token."
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AdminAccess:
    """The rule, under one token."""

    def __init__(self, token: Secret | None, made: MadeToken | None = None) -> None:
        self.token = token
        """The settings'. A reload may set another; it holds for the next request."""
        self.made = made or MadeToken()
        """What counts without one."""

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Lets through who may. Raises LbError UNAUTHORIZED or FORBIDDEN, before anything of a body was read."""
        is_page = self.token is not None and request.path in PAGE and request.method in READING
        if request.path not in OPEN and not is_page:
            require(request, self.token, None if self.made.text is None else Secret.read(self.made.text))
        return await handler(request)


def require(request: web.BaseRequest, token: Secret | None, made: Secret | None = None) -> None:
    """Raises LbError unless the request's sender may have it. `made`: the token that counts without `token`.

    UNAUTHORIZED: the token is not there, or is not right. FORBIDDEN: no token would help.
    """
    origin = request.headers.get("Origin")
    if origin is not None and is_cross_origin(origin, request.headers.get("Host", "")):
        raise LbError(Outcome.FORBIDDEN, "Requests from web pages of another origin are refused.")
    wanted = token or made
    given = request.headers.getall("Authorization", [])
    if wanted is not None and len(given) == 1 and _is_bearer(given[0], wanted):
        return
    if token is not None:
        raise LbError(Outcome.UNAUTHORIZED, "This needs the admin token: `Authorization: Bearer TOKEN`.")
    _require_from_here(request)
    if request.method not in READING and not _is_unix(request):
        raise LbError(Outcome.UNAUTHORIZED, _WITH_THE_MADE) if made else LbError(Outcome.FORBIDDEN, _WITH_NOTHING)


def _require_from_here(request: web.BaseRequest) -> None:
    """Raises LbError FORBIDDEN unless a program of this machine sent it, as far as one can see."""
    if not (_is_unix(request) or _is_loopback(request)) or any(name in request.headers for name in _PASSED_ON):
        raise LbError(Outcome.FORBIDDEN, _NOT_FROM_HERE)
    if not _is_own_name(request.headers.get("Host", "")):
        # A page on evil.example, whose name now leads to this machine: DNS rebinding.
        raise LbError(
            Outcome.FORBIDDEN, "Without admin.token, use the admin listener's IP address or localhost in the URL."
        )


def _is_bearer(value: str, token: Secret) -> bool:
    scheme, _, text = value.partition(" ")
    return scheme.lower() == "bearer" and token.is_in(text.strip(" ").encode("utf-8", "surrogateescape"))


def _is_unix(request: web.BaseRequest) -> bool:
    sock = None if request.transport is None else request.transport.get_extra_info("socket")
    return sock is not None and sock.family == socket.AF_UNIX


def _is_loopback(request: web.BaseRequest) -> bool:
    return is_address(request.remote or "") and is_loopback_name(request.remote or "")


def _is_own_name(host: str) -> bool:
    """An address, or localhost: what no other machine's owner can have somebody call us."""
    name = name_of(host)
    return is_loopback_name(name) or is_address(name)
