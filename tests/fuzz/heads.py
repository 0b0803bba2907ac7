# SPDX-License-Identifier: Apache-2.0
"""Response heads: `net.connections.h1.parse_head` against h11 and llhttp (httptools).

What we take both must take, with the same status, framing and fields, and a connection that we keep llhttp would keep.
What we refuse both refuse, or a rule says why.
"""

from __future__ import annotations

import random

import h11
import httptools
from h11._connection import _body_framing

from lbproxy.net.connections.h1 import ProtocolError, ResponseHead, parse_head
from tests.fuzz.oracle import DifferenceError
from tests.fuzz.strictness import explain

NAME = "heads"


def _head(*lines: str) -> bytes:
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


SEEDS = [
    _head("HTTP/1.1 200 OK", "date: today", "server: uvicorn", "content-length: 12", "content-type: application/json"),
    _head("HTTP/1.1 200 OK", "Content-Type: text/event-stream; charset=utf-8", "Transfer-Encoding: chunked"),
    _head("HTTP/1.0 200 OK", "Content-Length: 5", "Connection: keep-alive"),
    _head("HTTP/1.1 204 No Content", "A: b"),
    _head("HTTP/1.1 304 Not Modified", "ETag: x", "Content-Length: 7"),
    _head("HTTP/1.1 503 Service Unavailable", "Retry-After: 1", "Connection: close, x-a", "X-A: 1"),
    _head("HTTP/1.1 100 Continue"),
    _head("HTTP/1.1 200 OK", "Keep-Alive: timeout=5", "Trailer: T", "Upgrade: h2c", "Proxy-Connection: x", "B: \xe9"),
]
TOKENS = [
    *(b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"\r\n", b"\r\n\r\n"),
    *(b"Content-Length", b"Transfer-Encoding", b"Connection", b"chunked", b"gzip, chunked", b"identity", b"close"),
    *(b"keep-alive", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2", b"200", b"204", b"304", b"101", b"1xx", b" ", b"\t", b":"),
    *(b",", b", 5", b"+5", b"0x5", b"5", b"\x0bchunked", b"\r\n folded", b"a: b\r\n" * 130, b"\xff", b"\x00", b"OK"),
]
ENDS_HERE = {
    *(b"close", b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-connection", b"te", b"trailer"),
    *(b"transfer-encoding", b"upgrade", b"content-length"),
    *(b"x-request-id", b"x-lbproxy-endpoint", b"x-lbproxy-attempts"),
}
METHODS = ("POST", "POST", "GET", "HEAD")


class Llhttp:
    """llhttp's verdict."""

    def __init__(self, head: bytes) -> None:
        self.complete = self.keeps = False
        self._parser = parser = httptools.HttpResponseParser(self)
        try:
            parser.feed_data(head)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError:
            self.complete = False
        self.status = parser.get_status_code()

    def on_headers_complete(self) -> None:
        self.complete, self.keeps = True, self._parser.should_keep_alive()


def as_h11(head: bytes, method: str) -> h11.Response | h11.InformationalResponse | None:
    """The head as h11 reads it; None: it refuses."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    connection.send(h11.Request(method=method, target="/", headers=[("Host", "x")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(head)
    try:
        event = connection.next_event()
    except h11.RemoteProtocolError:
        return None
    return event if isinstance(event, h11.Response | h11.InformationalResponse) else None


def check(data: bytes, rng: random.Random) -> str:
    """See the module."""
    method = rng.choice(METHODS)
    end = data.find(b"\r\n\r\n")
    head = data[: end + 4] if end >= 0 else data
    theirs, llhttp = as_h11(head, method), Llhttp(head)
    try:
        ours = parse_head(head, method)
    except ProtocolError as error:
        if theirs is None and not llhttp.complete:
            return "refused by all"
        if theirs is None or not llhttp.complete:
            return "refused by us and one of them"
        rule = explain(NAME, head)
        if rule is None:
            raise DifferenceError(f"refused: {error}; h11: {theirs}") from None
        return rule
    if ours.status == 101:
        return "101, which the pool refuses"
    if theirs is None or not llhttp.complete:
        rule = explain(NAME, head, laxer=True)
        if rule is None:
            raise DifferenceError(f"taken: {ours}; h11: {theirs}, llhttp: {llhttp.complete}")
        return rule
    _compare(ours, theirs, method)
    if llhttp.status != ours.status:
        raise DifferenceError(f"status {ours.status}, llhttp {llhttp.status}")
    if ours.keep_alive and not llhttp.keeps and ours.status >= 200 and method != "HEAD":
        rule = explain(NAME, head, laxer=True)
        if rule is None:
            raise DifferenceError("we would keep the connection, llhttp not")
        return rule
    return "read alike"


def _compare(ours: ResponseHead, theirs: h11.Response | h11.InformationalResponse, method: str) -> None:
    if ours.status != theirs.status_code:
        raise DifferenceError(f"status {ours.status}, h11 {theirs.status_code}")
    if isinstance(theirs, h11.Response):
        framing = _body_framing(method.encode(), theirs)
        own = ("chunked", ()) if ours.chunked else ("http/1.0", ()) if ours.length is None else ("", (ours.length,))
        if own != framing and own != ("", framing[1]):
            raise DifferenceError(f"framing {own}, h11 {framing}")
    fields = [(bytes(name), bytes(value)) for name, value in theirs.headers]
    nominated = {
        token.strip().lower() for name, value in fields if name == b"connection" for token in value.split(b",")
    }
    expected = [(name, value) for name, value in fields if name not in ENDS_HERE | nominated]
    lines = ours.end_to_end.split(b"\r\n")
    if lines.pop() != b"":
        raise DifferenceError("what goes on does not end with CRLF")
    kept = [(line.partition(b":")[0].lower(), line.partition(b":")[2].strip(b" \t")) for line in lines]
    if kept != expected:
        raise DifferenceError(f"goes on: {kept}, by h11 {expected}")
