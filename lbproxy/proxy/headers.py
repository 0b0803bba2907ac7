"""Header fields across the proxy: what goes on, what ends here, what is ours. Pure.

Field values are relayed as bytes, as they came; the parsers on both sides let no CR, LF or NUL through.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from http import HTTPStatus

from lbproxy.core.types import LbError, Outcome
from lbproxy.net.h1 import ResponseHead

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    }
)  # RFC 9110, section 7.6.1, and what older clients send
_NOT_FORWARDED = _HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"x-request-id",
    b"x-gateway-destination-endpoint",  # a header never chooses an address
}
_NOT_RETURNED = _HOP_BY_HOP | {b"content-length", b"x-request-id", b"x-lbproxy-endpoint", b"x-lbproxy-attempts"}

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_TARGET = re.compile(r"/[!-~]*")

_PHRASES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


def status_line(status: int) -> bytes:
    """With CRLF. A status that has no standard phrase gets none: clients must not read it."""
    return _PHRASES.get(status) or b"HTTP/1.1 %d \r\n" % status


@dataclass(slots=True)
class RequestFields:
    """A client's header fields, read once."""

    forward: list[tuple[bytes, bytes]] = field(default_factory=list)
    """What the endpoint gets, in order."""
    request_id: str | None = None
    """The client's own x-request-id, if it is harmless."""
    content_type: bytes = b""
    content_length: int | None = None
    expects_continue: bool = False


def read_request_fields(raw: Iterable[tuple[bytes, bytes]]) -> RequestFields:
    """Sort a request's fields. Raises LbError where one asks for what we must not do."""
    fields = RequestFields()
    nominated: set[bytes] = set()
    for name, value in raw:
        key = name.lower()
        if key not in _NOT_FORWARDED:
            fields.forward.append((name, value))
            if key == b"content-type":
                fields.content_type = value.lower()
            elif key == b"content-encoding" and value.strip().lower() not in {b"", b"identity"}:
                raise LbError(Outcome.CONTENT_ENCODING)
        else:
            _read_our_own(fields, nominated, key, value)
    if nominated:
        fields.forward = [(name, value) for name, value in fields.forward if name.lower() not in nominated]
    return fields


def _read_our_own(fields: RequestFields, nominated: set[bytes], key: bytes, value: bytes) -> None:
    """The fields that end here."""
    match key:
        case b"connection":
            nominated.update(token.strip().lower() for token in value.split(b","))
        case b"content-length":
            fields.content_length = int(value)  # the parser let only digits through
        case b"transfer-encoding" if value.strip().lower() != b"chunked":
            raise LbError(Outcome.BAD_REQUEST, "Transfer-Encoding must be `chunked`.")
        case b"expect":
            fields.expects_continue = value.strip().lower() == b"100-continue"
        case b"upgrade" if b"websocket" in value.lower():
            raise LbError(Outcome.BAD_REQUEST, "WebSockets are not supported.")
        case b"x-request-id" if _REQUEST_ID.fullmatch(value):
            fields.request_id = value.decode("ascii")
        case _:
            pass


def origin_form(target: str) -> str:
    """A request target as `/path?query`; the authority of an absolute-form target is dropped. Raises LbError."""
    if not target.startswith("/"):
        _, found, rest = target.partition("://")
        slash = rest.find("/")
        target = rest[slash:] if found and slash >= 0 else "/"
    if _TARGET.fullmatch(target) is None:
        raise LbError(Outcome.BAD_REQUEST, "The request target has characters that a URL cannot have.")
    return target


def client_head(head: ResponseHead, own: Iterable[tuple[str, str]], *, chunked: bool, keep_alive: bool) -> bytes:
    """The head of an endpoint's answer as the client gets it: end-to-end fields, then framing and our own.

    `chunked`: the client gets the body chunked. A body that the endpoint ends by closing is ended so for the client.
    """
    parts = [status_line(head.status)]
    ended_here = _NOT_RETURNED | head.options if head.options else _NOT_RETURNED
    for name, line in head.fields:
        if name not in ended_here:
            parts += (line, b"\r\n")
        elif name == b"content-length" and not head.chunked and head.status >= 200 and head.status != 204:
            parts += (line, b"\r\n")  # with HEAD and 304 it tells of a body that does not follow
    if chunked:
        parts.append(b"Transfer-Encoding: chunked\r\n")
    if not keep_alive:
        parts.append(b"Connection: close\r\n")
    parts += [f"{name}: {value}\r\n".encode("ascii") for name, value in own]
    parts.append(b"\r\n")
    return b"".join(parts)
