# SPDX-License-Identifier: Apache-2.0
"""A client's request to switch to WebSocket: the requirements of RFC 6455, section 4, and what of it is forwarded.
Pure.

The handshake is end to end: the endpoint gets the client's key, version and subprotocols, and its Sec-WebSocket-Accept
is returned. Extensions are not: they would change the meaning of frames, which are read here. A client's offers are
dropped, so that none is agreed on.

Browsers cannot set Authorization; OpenAI's way for them is an API key among the subprotocols. Here it becomes one of
the client's credentials, so that an endpoint's own key replaces it, and a key for lbproxy is not forwarded.
"""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha1
from typing import Final
from urllib.parse import quote, unquote_plus

from lbproxy.core.requests.openai import MAX_MODEL_CHARS
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.net.connections.h1 import ResponseHead, split_field
from lbproxy.proxy.request.headers import RequestFields

VERSION: Final = b"13"
KEY_IN_PROTOCOL: Final = b"Sec-WebSocket-Protocol: openai-insecure-api-key."
"""How the field line begins for an API key that was sent among the subprotocols."""
SWITCH: Final = "Connection: Upgrade\r\nUpgrade: websocket\r\n"
MAX_PROTOCOLS: Final = 16
_KEY: Final = re.compile(rb"[A-Za-z0-9+/]{22}==")
"""16 bytes in base64."""
_TOKEN: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,600}")
_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""RFC 6455, section 1.3."""


def read_handshake(method: str, fields: RequestFields, *, is_switching: bool) -> None:
    """Check the fields of a request with Upgrade, and convert them for an endpoint: `forward` as it is to be sent, and
    an API key among the subprotocols moved to `credentials`. Raises LbError.

    `is_switching`: its first Upgrade, which aiohttp uses, is one of `SWITCHES`.
    """
    if not (is_switching and fields.upgrade == b"websocket"):
        raise LbError(Outcome.BAD_REQUEST, "The only upgrade here is to WebSocket.")
    if method != "GET":
        raise LbError(Outcome.BAD_REQUEST, "A WebSocket begins with GET.")
    if fields.content_length or fields.chunked:
        raise LbError(Outcome.BAD_REQUEST, "A request for a WebSocket has no body.")
    rest, keys, versions, offers = _sorted(fields.forward)
    if versions != [VERSION]:
        raise LbError(Outcome.WEBSOCKET_VERSION)
    if len(keys) != 1 or _KEY.fullmatch(keys[0]) is None:
        raise LbError(Outcome.BAD_REQUEST, "There must be one Sec-WebSocket-Key, of 16 bytes in base64.")
    protocols = [token.strip(b" \t") for offer in offers for token in offer.split(b",")]
    if len(protocols) > MAX_PROTOCOLS or any(_TOKEN.fullmatch(one) is None for one in protocols):
        raise LbError(Outcome.BAD_REQUEST, "Sec-WebSocket-Protocol is no list of names.")
    prefix = KEY_IN_PROTOCOL.partition(b" ")[2]
    passed = b", ".join(one for one in protocols if not one.startswith(prefix))
    fields.forward = b"%b%bSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %b\r\n" % (rest, SWITCH.encode(), keys[0])
    if passed:
        fields.forward += b"Sec-WebSocket-Protocol: %b\r\n" % passed
    for one in protocols:
        if one.startswith(prefix):
            fields.credentials += b"Sec-WebSocket-Protocol: %b\r\n" % one
    fields.accept = b64encode(sha1(keys[0] + _GUID, usedforsecurity=False).digest())


def _sorted(forward: bytes) -> tuple[bytes, list[bytes], list[bytes], list[bytes]]:
    """The field lines that are not about WebSocket; and the values of Sec-WebSocket-Key, -Version and -Protocol."""
    rest: list[bytes] = []
    found: dict[bytes, list[bytes]] = {b"key": [], b"version": [], b"protocol": []}
    for line in forward.splitlines(keepends=True):
        name, _, value = line.partition(b":")
        prefix, about = name[:14].lower(), name[14:].lower()
        if prefix != b"sec-websocket-":
            rest.append(line)
        elif about in found:
            found[about].append(value.strip())
    return b"".join(rest), found[b"key"], found[b"version"], found[b"protocol"]


def switch_problem(head: ResponseHead, fields: RequestFields) -> str | None:
    """What is wrong with a 101 (RFC 6455, section 4.1); None = nothing."""
    accepts = []
    for line in head.end_to_end.split(b"\r\n")[:-1]:
        name, value = split_field(line) or (b"", b"")
        if name == b"sec-websocket-accept":
            accepts.append(value)
        elif name == b"sec-websocket-extensions" and value:
            return "it chose an extension that was not offered"
    return None if accepts == [fields.accept] else "its Sec-WebSocket-Accept is not that of the key"


def query_model(target: str) -> str | None:
    """The `model` in the query of a request target; None: none. Raises LbError if it occurs twice, or is not a name."""
    named = [one for one in map(_model_in, target.partition("?")[2].split("&")) if one is not None]
    if len(named) > 1:
        raise LbError(Outcome.MISSING_MODEL, "The query names more than one `model`.", param="model")
    if named and not (0 < len(named[0]) <= MAX_MODEL_CHARS and named[0].isprintable()):
        raise LbError(Outcome.MISSING_MODEL, "`model` must be a name.", param="model")
    return named[0] if named else None


def query_models(target: str) -> list[str]:
    """Every model that some server may read in the query of a request target: in any case, and behind `;` too."""
    parts = re.split("[&;]", target.partition("?")[2])
    named = [part.partition("=") for part in parts]
    return [unquote_plus(value) for name, _, value in named if unquote_plus(name).lower() == "model"]


def with_query_model(target: str, model: str) -> str:
    """The target with this `model` in its query, in place of the one there or at the end; unchanged otherwise."""
    path, _, query = target.partition("?")
    named = f"model={quote(model, safe='/:@')}"
    parts = query.split("&") if query else []
    if query_model(target) is None:
        parts.append(named)
    else:
        parts = [part if _model_in(part) is None else named for part in parts]
    return f"{path}?{'&'.join(parts)}"


def _model_in(part: str) -> str | None:
    name, _, value = part.partition("=")
    return unquote_plus(value) if unquote_plus(name) == "model" else None
