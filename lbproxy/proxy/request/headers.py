# SPDX-License-Identifier: Apache-2.0
"""Header fields across the proxy: which are forwarded, which are hop-by-hop, which are lbproxy's own. Pure.

Field values are relayed as bytes, as they came; the parsers on both sides accept no CR, LF or NUL.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from lbproxy.core.observed.trace import TRACE_FIELDS
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.net.connections.h1 import ResponseHead

_HOP_BY_HOP: Final = frozenset(
    {
        b"close",  # a field that the usual `Connection: close` would nominate
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
NOT_FORWARDED: Final = _HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"x-request-id",
    b"x-gateway-destination-endpoint",  # a header never chooses an address
}
CREDENTIALS: Final = frozenset({b"authorization", b"x-api-key"})
"""A client's credentials: OpenAI's way, and that of Anthropic's SDK."""
REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
SESSIONS: Final = frozenset({b"x-claude-code-session-id", b"session-id", b"thread-id", b"x-session-affinity"})
"""By which coding agents name the conversation, Claude Code and Codex, and gateways. `x-session-id` overrules them."""
FLOWS: Final = {
    b"x-gateway-inference-objective": 1,
    b"x-llm-d-inference-objective": 2,
    b"x-gateway-inference-fairness-id": 3,
    b"x-llm-d-inference-fairness-id": 4,
    b"x-lbproxy-flow": 5,
}
"""By which clients name their flow: llm-d's and older gateways' names, and our own. The greatest number counts."""
SLOS: Final = frozenset({b"x-llm-d-slo-ttft-ms", b"x-gateway-slo-ttft-ms", b"x-slo-ttft-ms"})
"""Other names of `x-lbproxy-slo-ttft-ms`, which overrules them."""
SWITCHES: Final = frozenset({"websocket", "tcp"})
"""Values of Upgrade, in lower case, after which aiohttp reads no more HTTP."""
CONTINUE: Final = b"x-lbproxy-continue"
"""Whether its stream goes on at another endpoint if its own dies; else as the settings say."""
FALLBACK: Final = b"x-lbproxy-fallback"
"""Whether another model may serve the request; else as the settings say."""
CHECKED: Final = {
    b"x-lbproxy-tier": (re.compile(rb"[1-9]"), "a number from 1 to 9"),
    CONTINUE: (re.compile(rb"[01]"), "0 or 1"),
    FALLBACK: (re.compile(rb"[01]"), "0 or 1"),
    b"x-lbproxy-model": (re.compile(rb"[!-~](?:[ -~]{0,254}[!-~])?"), "a name of 1 to 256 printable ASCII characters"),
    b"x-lbproxy-keepalive": (
        re.compile(rb"0|[1-9][0-9]?|[1-5][0-9]{2}|600"),
        "0, or a number of seconds from 1 to 600",
    ),
}
"""Hints that are refused if they cannot be meant: a prompt that is to stay does not go elsewhere because of a typing
error."""
HINTS: Final = frozenset(
    {
        b"x-lbproxy-priority",
        b"x-lbproxy-slo-ttft-ms",
        *FLOWS,
        *SLOS,
        *CHECKED,
        b"x-session-id",
        *SESSIONS,
        b"x-lbproxy-explain",
        b"origin",
        b"endpoint-load-metrics-format",
    }
)
"""Hints of a client about its request, in addition to the body."""
OURS: Final = b"x-lbproxy-"
"""The prefix of fields that are lbproxy's own: no endpoint gets one from a client."""
FORWARDED: Final = frozenset({b"forwarded", b"x-real-ip"})
"""With all that begin with `X_FORWARDED`: what proxies say of the client. See `proxy.request.forwarding`."""
X_FORWARDED: Final = b"x-forwarded-"
MAX_NAME_BYTES: Final = 256
MAX_SESSION_BYTES: Final = 128
MAX_HEAD_BYTES: Final = 64 << 10
"""All lines of a head together; each has its own limit in addition."""
HOST: Final = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|(?:[A-Za-z0-9\-._~!$&'()*+;=]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?")
"""RFC 3986, section 3.2.2, and a port. Without the comma, which would make a list of it."""
_MEANINGFUL: Final = (
    NOT_FORWARDED
    | (CREDENTIALS | HINTS | FORWARDED | TRACE_FIELDS)
    | {b"accept-encoding", b"content-type", b"content-encoding", b"via", b"max-forwards"}
)
_PRIORITY: Final = re.compile(rb"-?[0-9]{1,3}")
_MILLISECONDS: Final = re.compile(rb"[0-9]{1,9}")
_FLOW: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_TARGET: Final = re.compile(r"/[!\"$-~]*")  # ASCII without white space and fragments

REPLACES_CORS: Final = "Vary: Origin\r\n"
"""The first of lbproxy's own field lines where they replace an endpoint's about origins (proxy/request/cors.py): a
browser refuses two of them."""
AS_IT_IS: Final = b": identity"
_ACCEPT_ENCODING: Final = re.compile(rb"^(accept-encoding):[^\n]*(?=\r\n)", re.IGNORECASE | re.MULTILINE)
_CORS_LINES: Final = re.compile(rb"^access-control-[^\n]*\n", re.IGNORECASE | re.MULTILINE)

_PHRASES: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


def status_line(status: int) -> bytes:
    """The status line, with CRLF. A status without a standard phrase gets none: clients must not read it."""
    return _PHRASES.get(status) or b"HTTP/1.1 %d \r\n" % status


@dataclass
class RequestFields:
    """A client's header fields."""

    forward: bytes = b""
    """The field lines for the endpoint, in order, each with its CRLF, without the next three kinds."""
    forwarded: bytes = b""
    """The field lines about the client and the way of its request, likewise."""
    credentials: bytes = b""
    """The field lines of `CREDENTIALS`, in order, each with its CRLF."""
    trace: bytes = b""
    """The field lines of `TRACE_FIELDS`, likewise."""
    request_id: str | None = None
    """The client's own x-request-id, if it is valid."""
    host: bytes = b""
    """As it came; empty if there is none, which only HTTP/1.0 allows."""
    via: bytes = b""
    """The values of Via, one after the other."""
    max_forwards: bytes | None = None
    """Max-Forwards, as it came, which `forward` does not contain."""
    content_type: bytes = b""
    content_length: int | None = None
    chunked: bool = False
    expects_continue: bool = False
    priority: int | None = None
    """x-lbproxy-priority, -999 to 999; None: missing or invalid."""
    flow: str | None = None
    """x-lbproxy-flow, or another of `FLOWS`; None: missing, or not a valid name of a flow."""
    flow_rank: int = 0
    """Which of them."""
    slo_ttft_s: float | None = None
    """x-lbproxy-slo-ttft-ms, or one of `SLOS`, in seconds; None: missing or invalid."""
    max_tier: int | None = None
    """x-lbproxy-tier: the highest tier of endpoints that the client allows; None: any."""
    session: str | None = None
    """x-session-id, or one of `SESSIONS`: the client's name of the conversation."""
    wants_load_report: bool = False
    """endpoint-load-metrics-format is there: the client itself requests a load report."""
    origin: str | None = None
    """The origin of the web page that sends it; None: not from a page."""
    upgrade: bytes = b""
    """The requested protocol, if it is one of `SWITCHES`."""
    accept: bytes = b""
    """For a request to switch to WebSocket: the Sec-WebSocket-Accept that its key requires."""
    keepalive_s: float | None = None
    """x-lbproxy-keepalive: the client asks for a comment after each so many seconds of silence; 0 = for none."""
    explain: bool = False
    """x-lbproxy-explain: the client asks for an explanation of the routing decision."""
    switches: tuple[tuple[bytes, bool], ...] = ()
    """Hints that are on or off, as far as they are there: see `switch`."""
    model: str | None = None
    """x-lbproxy-model: the model, on a path of `inference_paths` where the server reads none."""

    def switch(self, key: bytes) -> bool | None:
        """Whether a hint is on, by its last field; None: it is not there."""
        return dict(self.switches).get(key)

    def read_hint(self, key: bytes, value: bytes) -> None:
        """Read a field of `HINTS`; `key` in lower case. Raises LbError for one of `CHECKED` that cannot be meant."""
        if key == b"x-session-id" or (key in SESSIONS and self.session is None):
            self.session = value[:MAX_SESSION_BYTES].decode("latin-1") or None
        elif key in SESSIONS:
            pass
        elif key == b"endpoint-load-metrics-format":
            self.wants_load_report = True
        elif key == b"origin":
            self.origin = value.decode("latin-1")
        elif key == b"x-lbproxy-explain":
            self.explain = value == b"1"
        elif key in FLOWS:
            if FLOWS[key] >= self.flow_rank:
                self.flow, self.flow_rank = value.decode("ascii") if _FLOW.fullmatch(value) else None, FLOWS[key]
        elif key in CHECKED:
            self._read_checked(key, value)
        elif key == b"x-lbproxy-slo-ttft-ms" or (key in SLOS and self.slo_ttft_s is None):
            self.slo_ttft_s = int(value) / 1000.0 if _MILLISECONDS.fullmatch(value) else None
        elif key in SLOS:
            pass
        else:
            self.priority = int(value) if _PRIORITY.fullmatch(value) else None

    def _read_checked(self, key: bytes, value: bytes) -> None:
        pattern, what = CHECKED[key]
        if pattern.fullmatch(value) is None:
            raise LbError(Outcome.BAD_REQUEST, f"{key.decode()} is {what}.")
        if key == b"x-lbproxy-tier":
            self.max_tier = min(int(value), self.max_tier or int(value))
        elif key in {CONTINUE, FALLBACK}:
            self.switches += ((key, value == b"1"),)
        elif key == b"x-lbproxy-model":
            self.model = value.decode("ascii")
        else:
            self.keepalive_s = float(value)


def read_request_fields(raw: Iterable[tuple[bytes, bytes]], *, http10: bool = False) -> RequestFields:
    """Sort a request's fields. Raises LbError if one of them is not allowed."""
    fields = RequestFields()
    piles: tuple[list[bytes], ...] = ([], [], [], [], [])
    nominated: set[bytes] = set()
    hosts = size = 0
    for name, value in raw:
        key = name.lower()
        size += len(name) + len(value) + 4
        if len(name) > MAX_NAME_BYTES:
            raise LbError(Outcome.HEAD_TOO_LARGE, "The name of a header field is too long.")
        hosts += key == b"host"
        if key in NOT_FORWARDED:
            _read_hop_by_hop(fields, nominated, key, value)
        elif not (b"_" in key and _has_meaning(key.replace(b"_", b"-"))):
            piles[_pile(key)].extend((name, b": ", value, b"\r\n"))
            _read_forwarded(fields, key, value)
    if size > MAX_HEAD_BYTES:
        raise LbError(Outcome.HEAD_TOO_LARGE)
    if http10:
        fields.expects_continue = False  # RFC 9110, section 10.1.1
        if fields.chunked:
            raise LbError(Outcome.BAD_REQUEST, "HTTP/1.0 has no Transfer-Encoding.")
        if fields.upgrade:  # RFC 9110, section 7.8
            raise LbError(Outcome.BAD_REQUEST, "HTTP/1.0 has no Upgrade.")
    elif hosts != 1:
        raise LbError(Outcome.BAD_REQUEST, "There must be exactly one Host header.")
    if fields.upgrade and b"upgrade" not in nominated:
        raise LbError(Outcome.BAD_REQUEST, "The Connection header does not name Upgrade.")
    if nominated - {b"close", b"keep-alive", b""}:
        piles = tuple(_without(nominated, parts) for parts in piles)
    fields.forward, fields.credentials, fields.trace, fields.forwarded, _ = map(b"".join, piles)
    return fields


def asking_as_it_is(forward: bytes) -> bytes:
    """The field lines, with `identity` in place of the encodings that a client accepts (RFC 9110, section 12.5.3): what
    cannot be read cannot be counted. See docs/decisions/0055.
    """
    return _ACCEPT_ENCODING.sub(rb"\1" + AS_IT_IS, forward)


def _pile(key: bytes) -> int:
    """The kind of a field in `RequestFields`: forward, credentials, trace, forwarded, or none."""
    if key in CREDENTIALS:
        return 1
    if key in TRACE_FIELDS:
        return 2
    if key in FORWARDED or key.startswith(X_FORWARDED):
        return 3
    return 4 if key == b"max-forwards" or key.startswith(OURS) else 0


def _read_forwarded(fields: RequestFields, key: bytes, value: bytes) -> None:
    """Read a field that is meant for lbproxy and, in most cases, the endpoint."""
    if key == b"content-type":
        fields.content_type = value.lower()
    elif key in HINTS:
        fields.read_hint(key, value)
    elif key == b"via":
        fields.via += value + b","
    elif key == b"max-forwards":
        fields.max_forwards = value
    elif key == b"content-encoding" and value.strip().lower() not in {b"", b"identity"}:
        raise LbError(Outcome.CONTENT_ENCODING)


def _has_meaning(key: bytes) -> bool:
    """Whether a field of this name has a meaning for lbproxy, or a server behind it. Servers that follow CGI's rules
    read `_` as `-`, so that a client could send forbidden fields as `content_length`.
    """
    return key in _MEANINGFUL or key.startswith((OURS, X_FORWARDED))


def _without(nominated: set[bytes], parts: list[bytes]) -> list[bytes]:
    """The field lines without those that the client nominated; each has four parts."""
    lines = zip(*[iter(parts)] * 4, strict=True)
    return [part for line in lines if line[0].lower() not in nominated for part in line]


def _read_hop_by_hop(fields: RequestFields, nominated: set[bytes], key: bytes, value: bytes) -> None:
    """Read a field that is not forwarded."""
    match key:
        case b"connection":
            nominated.update(token.strip().lower() for token in value.split(b","))
        case b"content-length":
            fields.content_length = int(value)  # the parser accepts only digits
        case b"host":
            fields.host = value.strip(b" \t")
            if HOST.fullmatch(fields.host) is None:
                raise LbError(Outcome.BAD_REQUEST, "Host is not a name or address with an optional port.")
        case b"transfer-encoding":
            if value.strip().lower() != b"chunked":
                raise LbError(Outcome.BAD_REQUEST, "Transfer-Encoding must be `chunked`.")
            fields.chunked = True
        case b"expect":
            fields.expects_continue = value.strip().lower() == b"100-continue"
        case b"upgrade" if value.strip().lower().decode("latin-1") in SWITCHES:
            fields.upgrade = value.strip().lower()
        case b"x-request-id" if REQUEST_ID.fullmatch(value):
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
        raise LbError(Outcome.BAD_REQUEST, "The request target has characters that are not allowed in a URL.")
    return target


_RATE_LINES: Final = {
    "-requests": re.compile(rb"(?im)^(?:x-ratelimit-[a-z]+-requests|anthropic-ratelimit-requests-[a-z]+):.*\r\n"),
    "-tokens": re.compile(
        rb"(?im)^(?:x-ratelimit-[a-z]+-tokens|anthropic-ratelimit-(?:input-|output-)?tokens-[a-z]+):.*\r\n"
    ),
}
"""What a provider says of its own limits, where ours say the same: by what is in our lines."""
_VIA: Final = b"Via: 1.1 lbproxy\r\n"
"""In a response: the version that its endpoint speaks (RFC 9110, section 7.6.3). It names no single process."""
_VIA_HTTP10: Final = b"Via: 1.0 lbproxy\r\n"


def client_head(head: ResponseHead, own: str, *, chunked: bool, keep_alive: bool) -> bytes:
    """The head of an endpoint's response for the client: end-to-end fields, Via, `own` field lines, and framing.

    `own`: field lines of ours, which may begin with `REPLACES_CORS`.
    `chunked`: the client gets the body chunked. A body that the endpoint ends by closing ends in the same way for the
    client.
    """
    status, announced = head.status, head.announced
    if chunked:
        framing = b"Transfer-Encoding: chunked\r\n"
    elif announced is not None and status != 204:
        framing = b"Content-Length: %b\r\n" % announced
    else:
        framing = b""
    fields = _CORS_LINES.sub(b"", head.end_to_end) if own.startswith(REPLACES_CORS) else head.end_to_end
    if "-ratelimit-" in own:
        for mark, lines in _RATE_LINES.items():
            fields = lines.sub(b"", fields) if mark in own else fields
    fields += _VIA_HTTP10 if head.http10 else _VIA
    start = (_PHRASES.get(status) or status_line(status)) + fields + own.encode("ascii") + framing
    return start + (b"\r\n" if keep_alive else b"Connection: close\r\n\r\n")
