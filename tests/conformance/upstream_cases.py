# SPDX-License-Identifier: Apache-2.0
"""What endpoints answer: heads, framings, bytes too many and too few, answers that nobody asked for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tests.conformance.wire import OK, OK_BODY


class Must(Enum):
    """What the client must get."""

    WHOLE = "whole"
    """The answer, as it was."""
    BROKEN = "broken"
    """An error of the gateway's, or an answer that is visibly not whole."""
    EITHER = "either"
    """One of them: the RFC leaves it open, or it is a matter of taste."""


@dataclass(frozen=True)
class UpstreamCase:
    """What an endpoint writes when it has a request, and what the client gets."""

    group: str
    name: str
    section: str
    answer: bytes
    must: Must
    ours: Must
    """What lbproxy makes of it: whole or broken."""
    status: int = 200
    body: bytes = OK_BODY
    end: str = "keep"
    """The endpoint then closes or resets the connection, or keeps it."""
    reused: bool | None = False
    """lbproxy sends the next request over the same connection. None: either."""
    method: str = "POST"
    unasked: bool = False
    """It is written as soon as somebody connects."""
    own: bool = False
    """About what lbproxy alone looks for."""


BROKEN, WHOLE, EITHER = Must.BROKEN, Must.WHOLE, Must.EITHER
N = len(OK_BODY)
TYPE = "Content-Type: application/json"
LENGTH = f"Content-Length: {N}"
CHUNKED = "Transfer-Encoding: chunked"


def http(*lines: str, first: str = "HTTP/1.1 200 OK", body: bytes = OK_BODY) -> bytes:
    return "\r\n".join([first, TYPE, *lines, "", ""]).encode("latin-1") + body


def bad(name: str, section: str, answer: bytes, must: Must = BROKEN, end: str = "close") -> UpstreamCase:
    """A head that lbproxy refuses."""
    return UpstreamCase("head", name, section, answer, must, BROKEN, end=end)


def good(
    name: str, section: str, answer: bytes, status: int = 200, body: bytes = OK_BODY, **more: object
) -> UpstreamCase:
    return UpstreamCase("answer", name, section, answer, WHOLE, WHOLE, status, body, **more)  # type: ignore[arg-type]


def line(first: str) -> bytes:
    return http(LENGTH, first=first)


HEADS = [
    bad("not HTTP", "9112 4", b"hello, this is no HTTP\r\n\r\n"),
    bad("nothing", "9112 8", b""),
    bad("a reset", "9112 8", b"", end="reset"),
    bad("half a status line", "9112 8", b"HTTP/1.1 20"),
    bad("half a head", "9112 8", http(LENGTH, body=b"")[:-2]),
    bad("only a line", "9112 4", b"HTTP/1.1 200 OK\r\n"),
    bad("HTTP/2.0", "9112 4", line("HTTP/2.0 200 OK")),
    bad("HTTP/1.2", "9112 4", line("HTTP/1.2 200 OK"), EITHER),
    bad("HTTP/1", "9112 4", line("HTTP/1 200 OK")),
    bad("http/1.1", "9112 4", line("http/1.1 200 OK")),
    bad("ICY", "9112 4", line("ICY 200 OK")),
    bad("no status", "9112 4", line("HTTP/1.1 OK")),
    bad("status 99", "9110 15", line("HTTP/1.1 099 OK"), EITHER),
    bad("status 600", "9110 15", line("HTTP/1.1 600 OK"), EITHER),
    bad("status 2000", "9112 4", line("HTTP/1.1 2000 OK")),
    bad("status +20", "9112 4", line("HTTP/1.1 +20 OK")),
    bad("status 2x0", "9112 4", line("HTTP/1.1 2x0 OK")),
    bad("two blanks before the status", "9112 4", line("HTTP/1.1  200 OK"), EITHER),
    bad("NUL in the reason", "9112 4", line("HTTP/1.1 200 O\x00K"), EITHER),
    bad("a bare CR in the reason", "9112 2.2", line("HTTP/1.1 200 O\rK"), EITHER),
    bad("LF for each CRLF", "9112 2.2", http(LENGTH, body=b"").replace(b"\r\n", b"\n") + OK_BODY, EITHER),
    bad("a field without colon", "9112 5", http(LENGTH, "no colon")),
    bad("a field without name", "9112 5", http(LENGTH, ": 1")),
    bad("a blank in a name", "9110 5.1", http(LENGTH, "X A: 1")),
    bad("a blank before the colon", "9112 5.1", http(LENGTH, "X-A : 1"), EITHER),
    bad("a folded line", "9112 5.2", http(LENGTH, "X-A: 1\r\n 2"), EITHER),
    bad("a folded first line", "9112 5.2", http().replace(b"OK\r\n", b"OK\r\n X: 1\r\n", 1), EITHER),
    bad("NUL in a value", "9110 5.5", http(LENGTH, "X-A: 1\x002"), EITHER),
    bad("a bare CR in a value", "9112 2.2", http(LENGTH, "X-A: 1\r2"), EITHER),
    bad("a bare LF in a value", "9112 2.2", http(LENGTH, "X-A: 1\n2"), EITHER),
    bad("an escape character in a value", "9110 5.5", http(LENGTH, "X-A: \x1b[0m"), EITHER),
    bad("130 fields", "9110 5.4", http(LENGTH, *["X-A: 1"] * 130), EITHER),
    bad("a head of 70 KB", "9110 5.4", http(LENGTH, *["X-A: " + "x" * 7000] * 10), EITHER),
    bad("101", "9110 15.2.2", b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"),
    bad("twenty 1xx", "9110 15.2", b"HTTP/1.1 103 Early Hints\r\n\r\n" * 20 + OK, EITHER),
    bad("two lengths that differ", "9112 6.3", http(LENGTH, "Content-Length: 5")),
    bad("the same length twice", "9112 6.3", http(LENGTH, LENGTH), EITHER),
    bad("the same length twice in a line", "9112 6.3", http(f"{LENGTH}, {N}"), EITHER),
    bad("a length with a sign", "9112 6.3", http(f"Content-Length: +{N}")),
    bad("a negative length", "9112 6.3", http("Content-Length: -5")),
    bad("a length in hex", "9112 6.3", http("Content-Length: 0x5f")),
    bad("a length with an underscore", "9112 6.3", http("Content-Length: 9_5")),
    bad("an empty length", "9112 6.3", http("Content-Length: ")),
    bad("a length of 20 digits", "9110 8.6", http("Content-Length: 99999999999999999999")),
    bad("a length and chunks", "9112 6.3", http(LENGTH, CHUNKED, body=b"%x\r\n%s\r\n0\r\n\r\n" % (N, OK_BODY)), EITHER),
    bad("gzip, chunked", "9112 6.1", http("Transfer-Encoding: gzip, chunked"), EITHER),
    bad("chunked twice", "9112 6.1", http(CHUNKED, CHUNKED, body=b"%x\r\n%s\r\n0\r\n\r\n" % (N, OK_BODY)), EITHER),
    bad("identity", "9112 6.1", http("Transfer-Encoding: identity"), EITHER),
    bad("chunked behind a vertical tab", "9112 6.1", http("Transfer-Encoding: \x0bchunked"), EITHER),
    bad("chunks in HTTP/1.0", "9112 6.1", http(CHUNKED, first="HTTP/1.0 200 OK", body=b"0\r\n\r\n"), EITHER),
]

FORBIDDEN = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 4\r\n\r\nevil"
ANSWERS = [
    good("as usual", "9112 6.3", OK, reused=True),
    good("no reason", "9112 4", line("HTTP/1.1 200"), reused=True),
    good("an empty reason", "9112 4", line("HTTP/1.1 200 "), reused=True),
    good("an unknown status", "9110 15", line("HTTP/1.1 299 Whatever"), 299, reused=True),
    good("an error of its own", "9110 15", line("HTTP/1.1 418 I'm a teapot"), 418, reused=True),
    good("no body", "9112 6.3", http("Content-Length: 0", body=b""), body=b"", reused=True),
    good("204", "9110 15.3.5", b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", reused=True),
    good(
        "a redirect",
        "9110 15.4",
        b"HTTP/1.1 302 Found\r\nLocation: http://a/\r\nContent-Length: 0\r\n\r\n",
        302,
        b"",
        reused=True,
    ),
    good(
        "304 with a length",
        "9110 15.4.5",
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n",
        304,
        b"",
        method="GET",
        reused=True,
    ),
    good("HEAD", "9110 9.3.2", http("Content-Length: 0", body=b""), body=b"", method="HEAD", reused=True),
    good("100 before it", "9110 15.2.1", b"HTTP/1.1 100 Continue\r\n\r\n" + OK, reused=True),
    good("103 before it", "8297", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + OK, reused=True),
    good("three of them", "9110 15.2", b"HTTP/1.1 102 Processing\r\n\r\n" * 3 + OK, reused=True),
    good("Connection: close", "9112 9.6", http(LENGTH, "Connection: close"), end="close"),
    good("Connection: close, and kept", "9112 9.6", http(LENGTH, "Connection: close")),
    good("HTTP/1.0", "9112 9.3", http(LENGTH, first="HTTP/1.0 200 OK"), end="close"),
    good("HTTP/1.0, kept", "9112 9.3", http(LENGTH, "Connection: keep-alive", first="HTTP/1.0 200 OK"), reused=None),
    good("ended by the close", "9112 6.3", http(), end="close"),
    good("a blank behind the length", "9112 5.1", http(LENGTH + " \t"), reused=True),
    good("obs-text", "9110 5.5", http(LENGTH, "X-A: caf\xe9"), reused=True),
]


def chunked(body: bytes) -> bytes:
    return http(CHUNKED, body=body)


ONE = b"%x\r\n%s\r\n" % (N, OK_BODY)
END = b"0\r\n\r\n"
SPLIT = b"".join(b"1\r\n%c\r\n" % byte for byte in OK_BODY)


def cut(
    name: str, section: str, answer: bytes, end: str = "close", must: Must = BROKEN, **more: object
) -> UpstreamCase:
    """A body that breaks."""
    return UpstreamCase("body", name, section, answer, must, BROKEN, end=end, **more)  # type: ignore[arg-type]


BODIES = [
    good("chunks", "9112 7.1", chunked(ONE + END), reused=True),
    good("chunks of one byte", "9112 7.1", chunked(SPLIT + END), reused=True),
    good(
        "chunk sizes in capitals, with zeros",
        "9112 7.1",
        chunked(b"000%X\r\n%s\r\n000\r\n\r\n" % (N, OK_BODY)),
        reused=True,
    ),
    good("extensions", "9112 7.1.1", chunked(ONE.replace(b"\r\n", b';a="b"\r\n', 1) + b"0;c\r\n\r\n"), reused=True),
    good("trailers", "9112 7.1.2", chunked(ONE + b"0\r\nX-T: 1\r\n\r\n"), reused=True),
    good("bytes behind the length", "9112 9.3", OK + b"more"),
    good("bytes behind the last chunk", "9112 9.3", chunked(ONE + END + b"more")),
    good("another answer behind the length", "9112 9.3", OK + FORBIDDEN),
    good("another answer behind the last chunk", "9112 9.3", chunked(ONE + END) + FORBIDDEN),
    good("a body with 204", "9112 6.3", b"HTTP/1.1 204 No Content\r\nContent-Length: 4\r\n\r\nevil", 204, b""),
    good(
        "a body with 304",
        "9112 6.3",
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 4\r\n\r\nevil",
        304,
        b"",
        method="GET",
    ),
    good(
        "chunks with 204",
        "9112 6.3",
        b"HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nevil\r\n0\r\n\r\n",
        204,
        b"",
    ),
    cut("fewer bytes than the length", "9112 8", OK[:-5]),
    cut("fewer bytes than the length, and a reset", "9112 8", OK[:-5], "reset"),
    cut("no byte of the body", "9112 8", http(LENGTH, body=b"")),
    cut("no last chunk", "9112 8", chunked(ONE)),
    cut("no last chunk, and a reset", "9112 8", chunked(ONE), "reset"),
    cut("half a chunk", "9112 8", chunked(ONE[:-9])),
    cut("half a chunk size", "9112 8", chunked(ONE + b"1")),
    cut("the last chunk without its last line", "9112 8", chunked(ONE + b"0\r\n")),
    cut("0x before a size", "9112 7.1", chunked(b"0x" + ONE + END)),
    cut("a sign before a size", "9112 7.1", chunked(b"+" + ONE + END)),
    cut("a blank before a size", "9112 7.1", chunked(b" " + ONE + END), must=EITHER),
    cut("a negative size", "9112 7.1", chunked(b"-5\r\nhello\r\n" + END)),
    cut("no hex digit", "9112 7.1", chunked(b"xyz\r\n" + END)),
    cut("an empty line for a size", "9112 7.1", chunked(b"\r\n" + ONE + END)),
    cut("a size beyond 64 bits", "9112 7.1", chunked(b"f" * 17 + b"\r\n" + OK_BODY)),
    cut("LF behind a size", "9112 7.1", chunked(ONE.replace(b"\r\n", b"\n", 1) + END), must=EITHER),
    cut("LF behind the data", "9112 7.1", chunked(ONE[:-2] + b"\n" + END), must=EITHER),
    cut("more data than the size", "9112 7.1", chunked(b"5\r\n" + OK_BODY + b"\r\n" + END)),
    cut("a bare LF in an extension", "9112 7.1.1", chunked(ONE.replace(b"\r\n", b";a\nb\r\n", 1) + END), must=EITHER),
    cut(
        "a chunk line of 9 KB",
        "9112 7.1.1",
        chunked(ONE.replace(b"\r\n", b";" + b"x" * 9000 + b"\r\n", 1) + END),
        must=EITHER,
    ),
    cut("a trailer without colon", "9112 7.1.2", chunked(ONE + b"0\r\nbad\r\n\r\n"), must=EITHER),
    cut("trailers of 70 KB", "9112 7.1.2", chunked(ONE + b"0\r\n" + b"X-T: 1234\r\n" * 7000 + b"\r\n"), must=EITHER),
    cut("ended by the close, half a JSON text", "9112 8", http(body=OK_BODY[:-5]), own=True),
    cut("unasked", "9112 9.3", OK, "keep", unasked=True, own=True),
    cut("unasked, and ended", "9112 9.3", OK, "close", unasked=True, own=True),
]

CASES: list[UpstreamCase] = [*HEADS, *ANSWERS, *BODIES]
