# SPDX-License-Identifier: Apache-2.0
"""What clients send: request lines, fields, hosts, lengths, chunks, expectations, upgrades, several in a row."""

from __future__ import annotations

from tests.conformance.case import BODY, CHUNKED, GOOD, LENGTH, LINE, OWN_VIA, ClientCase, Must, case, chunks, http

EITHER, REFUSE, SERVE = Must.EITHER, Must.REFUSE, Must.SERVE


def line(first: str | bytes) -> bytes:
    return http(LENGTH, first=first)


REQUEST_LINES = [
    case("request line", "as usual", "9112 3", GOOD),
    case("request line", "an empty line before it", "9112 2.2", b"\r\n" + GOOD, must=SERVE),
    case("request line", "method in lower case", "9110 9.1", line("post /v1/completions HTTP/1.1"), 400, EITHER),
    case("request line", "method with a control character", "9110 9.1", line("PO\x01ST /v1/completions HTTP/1.1"), 400),
    case("request line", "no method", "9112 3", line("/v1/completions HTTP/1.1"), 400),
    case("request line", "no target", "9112 3", line("POST HTTP/1.1"), 400),
    case("request line", "no version", "9112 3", line("POST /v1/completions"), 400),
    case("request line", "two blanks", "9112 3", line("POST  /v1/completions HTTP/1.1"), must=EITHER),
    case("request line", "a tab for a blank", "9112 3", line("POST\t/v1/completions HTTP/1.1"), 400, EITHER),
    case("request line", "a blank at its end", "9112 3", line(LINE + " "), 400, EITHER),
    case("request line", "a blank before it", "9112 3", b" " + GOOD, 400, EITHER),
    case("request line", "a blank in the target", "9112 3.2", line("POST /v1/ completions HTTP/1.1"), 400),
    case("request line", "HTTP/1.2", "9110 2.5", line("POST /v1/completions HTTP/1.2"), 400, EITHER),
    case("request line", "HTTP/2.0", "9110 15.6.6", line("POST /v1/completions HTTP/2.0"), 400),
    case("request line", "HTTP/0.9", "9110 15.6.6", line("POST /v1/completions HTTP/0.9"), 400),
    case("request line", "HTTP/11", "9112 2.3", line("POST /v1/completions HTTP/11"), 400),
    case("request line", "HTTP/1", "9112 2.3", line("POST /v1/completions HTTP/1"), 400),
    case("request line", "HTTP/1.1x", "9112 2.3", line("POST /v1/completions HTTP/1.1x"), 400),
    case("request line", "HTTP/01.1", "9112 2.3", line("POST /v1/completions HTTP/01.1"), 400),
    case("request line", "http/1.1", "9112 2.3", line("POST /v1/completions http/1.1"), 400),
    case("request line", "XTTP/1.1", "9112 2.3", line("POST /v1/completions XTTP/1.1"), 400),
    case("request line", "a bare CR in it", "9112 2.2", line(b"POST /v1/compl\retions HTTP/1.1"), 400),
    case("request line", "NUL in the target", "9112 3.2", line(b"POST /v1/compl\x00etions HTTP/1.1"), 400),
    case("request line", "not ASCII in the target", "9112 3.2", line(b"POST /v1/compl\xe9tions HTTP/1.1"), 400),
    case("request line", "DEL in the target", "9112 3.2", line(b"POST /v1/compl\x7ftions HTTP/1.1"), 400),
    case(
        "request line", "a fragment in the target", "9112 3.2.1", line("POST /v1/completions#x HTTP/1.1"), 400, EITHER
    ),
    case("request line", "a target of 17 KB", "9112 3", line(f"POST /v1/{'x' * 17_000} HTTP/1.1"), 414, own=True),
    case("request line", "not HTTP", "9112 3", b"hello, is anybody there?\r\n\r\n" + b"x" * 3000, 400),
    case("request line", "a TLS handshake", "9112 3", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n" * 3, 400),
    case("request line", "the preface of HTTP/2", "9113 3.4", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00", 400),
    case("request line", "LF for each CRLF of the head", "9112 2.2", GOOD.replace(b"\r\n", b"\n"), 400, EITHER),
    case("request line", "CR for each CRLF of the head", "9112 2.2", GOOD.replace(b"\r\n", b"\r"), 400),
]

TARGETS = [
    case("target", "absolute", "9112 3.2.2", line("POST http://other.example/v1/completions HTTP/1.1")),
    case("target", "absolute, its scheme in capitals", "9110 4.2.3", line("POST HTTP://lb/v1/completions HTTP/1.1")),
    case(
        "target",
        "absolute, without Host",
        "9112 3.2",
        http(LENGTH, first="POST http://a/v1/completions HTTP/1.1", host=False),
        400,
    ),
    case("target", "absolute, with a user", "9110 4.2.4", line("POST http://u@a/v1/completions HTTP/1.1"), must=EITHER),
    case(
        "target", "absolute, without a path", "9112 3.2.2", line("POST http://a HTTP/1.1"), 404, closes=None, own=True
    ),
    case("target", "an authority", "9112 3.2.3", line("POST a.example:80 HTTP/1.1"), 400, REFUSE),
    case("target", "a relative path", "9112 3.2", line("POST v1/completions HTTP/1.1"), 400, REFUSE),
    case("target", "an asterisk, with POST", "9112 3.2.4", line("POST * HTTP/1.1"), 400, REFUSE),
    case(
        "target", "dot segments", "3986 5.2.4", line("POST /v1/../v1/completions HTTP/1.1"), 404, closes=None, own=True
    ),
    case("target", "CONNECT", "9110 9.3.6", b"CONNECT a.example:443 HTTP/1.1\r\nHost: a.example:443\r\n\r\n", 400),
    case(
        "target",
        "CONNECT, and what it would tunnel",
        "9931",
        b"CONNECT lb:80 HTTP/1.1\r\nHost: lb:80\r\n\r\n" + GOOD,
        400,
    ),
    case("target", "TRACE", "9110 9.3.8", b"TRACE /v1/completions HTTP/1.1\r\nHost: lb\r\n\r\n", 405, closes=False),
    case(
        "target",
        "an unknown method",
        "9110 9.1",
        b"BREW /v1/completions HTTP/1.1\r\nHost: lb\r\n\r\n",
        400,
        EITHER,
        body=b"",
    ),
]


TARGETS += [
    case(
        "target",
        f"{method}, Max-Forwards: {value}",
        "9110 7.6.2",
        f"{method} /v1/completions/x HTTP/1.1\r\nHost: lb\r\nMax-Forwards: {value}\r\n\r\n".encode(),
        status,
        closes=status == 400,
        seen=int(value == "3" and status == 200),
        body=b"",
        own=True,
    )
    for method, value, status in (
        ("OPTIONS", "0", 200),
        ("OPTIONS", "3", 200),
        ("OPTIONS", "x", 400),
        ("TRACE", "0", 405),
        ("TRACE", "3", 405),
    )
]


def field(value: str | bytes, *, host: bool = True) -> bytes:
    return http(value, LENGTH, host=host)


FIELDS = [
    case("field", "a name of 256 bytes", "9110 5.4", field(f"X-{'a' * 254}: 1"), own=True),
    case("field", "a name of 257 bytes", "9110 5.4", field(f"X-{'a' * 255}: 1"), 431, own=True),
    case("field", "Via of another proxy", "9110 7.6.3", field("Via: 1.1 other, 1.0 nginx (lbproxy)")),
    case("field", "Via of two lbproxys", "9110 7.6.3", field("Via: 1.1 lbproxy (a), 1.1 lbproxy (b)"), own=True),
    case(
        "field",
        "Via of too many",
        "9110 7.6.3",
        field("Via: " + ", ".join(["1.1 lbproxy"] * 11)),
        508,
        closes=False,
        own=True,
    ),
    *(
        case("field", f"Via with our own word, {where}", "9110 7.6.3", field(via), 508, closes=False, own=True)
        for where, via in {
            "alone": f"Via: {OWN_VIA}",
            "behind others": f"Via: 1.0 nginx, {OWN_VIA}",
            "before others": f"Via: {OWN_VIA}, 1.1 lbproxy (other)",
            "in the second of two lines": f"Via: 1.0 nginx\r\nVIA: {OWN_VIA}",
        }.items()
    ),
    case("field", "names in any case", "9110 5.1", http("hOsT: lb", f"CONTENT-LENGTH: {len(BODY)}", host=False)),
    case("field", "no blank behind the colon", "9112 5", field("X-A:1")),
    case("field", "blanks and tabs round a value", "9112 5.1", field("X-A: \t 1 \t ")),
    case("field", "an empty value", "9110 5.5", field("X-A:")),
    case("field", "a value that is not ASCII", "9110 5.5", field(b"X-A: caf\xe9"), must=EITHER),
    case("field", "a blank before the colon", "9112 5.1", field("X-A : 1"), 400),
    case("field", "a tab before the colon", "9112 5.1", field("X-A\t: 1"), 400),
    case("field", "no colon", "9112 5", field("X-A"), 400),
    case("field", "no name", "9112 5", field(": 1"), 400),
    case("field", "a blank in the name", "9110 5.1", field("X A: 1"), 400),
    case("field", "a control character in the name", "9110 5.1", field("X\x01A: 1"), 400),
    case("field", "NUL in the name", "9110 5.1", field("X\x00A: 1"), 400),
    case("field", "DEL in the name", "9110 5.1", field("X\x7fA: 1"), 400),
    case("field", "not ASCII in the name", "9110 5.1", field(b"X\xe9A: 1"), 400),
    case("field", "a bracket in the name", "9110 5.1", field("X(A: 1"), 400),
    case("field", "a line that is folded", "9112 5.2", field("X-A: 1\r\n 2"), 400, EITHER),
    case("field", "a line that is folded with a tab", "9112 5.2", field("X-A: 1\r\n\t2"), 400, EITHER),
    case(
        "field",
        "a fold before the first field",
        "9112 2.2",
        GOOD.replace(b"\r\nHost", b"\r\n X: 1\r\nHost"),
        400,
        EITHER,
    ),
    case("field", "NUL in a value", "9110 5.5", field("X-A: 1\x002"), 400, EITHER),
    case("field", "a bare CR in a value", "9112 2.2", field("X-A: 1\r2"), 400, EITHER),
    case("field", "a bare CR at the end of a value", "9112 2.2", field("X-A: 1\r"), 400, EITHER),
    case("field", "a bare LF in a value", "9112 2.2", field("X-A: 1\n2"), 400, EITHER),
    case("field", "a bare LF, and a field behind it", "9112 2.2", field("X-A: 1\nX-B: 2"), 400, EITHER),
    case("field", "an escape character in a value", "9110 5.5", field("X-A: \x1b[0m"), 400, EITHER),
    case("field", "DEL in a value", "9110 5.5", field("X-A: \x7f"), 400, EITHER),
    case("field", "130 of them", "9110 5.4", field("\r\n".join(["X-A: 1"] * 130)), 431, EITHER),
    case("field", "one of 17 KB", "9110 5.4", field("X-A: " + "x" * 17_000), 431, EITHER),
    case("field", "100 KB of them", "9110 5.4", field("\r\n".join([f"X-A: {'x' * 10_000}"] * 10)), 431, EITHER),
    case("field", "an encoding of the body", "9110 8.4", field("Content-Encoding: gzip"), 415, EITHER, closes=None),
]


def host(value: str | bytes) -> bytes:
    raw = value.encode("latin-1") if isinstance(value, str) else value
    return http(b"Host:" + raw, LENGTH, host=False)


HOSTS = [
    case("host", "none", "9112 3.2", http(LENGTH, host=False), 400),
    case("host", "two", "9112 3.2", field("Host: other"), 400),
    case("host", "the same twice", "9112 3.2", field("Host: lb"), 400),
    case("host", "none in HTTP/1.0", "9112 3.2", http(LENGTH, first=LINE[:-1] + "0", host=False), closes=True),
    case("host", "empty", "9112 3.2", host("")),
    case("host", "with a port", "9110 7.2", host(" lb.example:8080")),
    case("host", "an IPv6 address", "9110 7.2", host(" [::1]:80")),
    case("host", "with an escape", "3986 3.2.2", host(" a%2db")),
    *(
        case("host", f"invalid: {bad!a}", "9112 3.2", host(f" {bad}"), 400)
        for bad in (
            "a b",
            "a, b",
            "a/b",
            "a@b",
            "a#b",
            "a?b",
            "http://a",
            "[::1",
            "a:b",
            "a:1:2",
            '"a"',
            "a\\b",
            "a\tb",
        )
    ),
    case("host", "not ASCII", "9112 3.2", host(b" caf\xe9"), 400),
]


def length(value: str | bytes) -> bytes:
    raw = value.encode("latin-1") if isinstance(value, str) else value
    return http(b"Content-Length:" + raw)


N = str(len(BODY))
LENGTHS = [
    case("length", "leading zeros", "9110 8.6", length(f" 000{N}"), must=EITHER),
    case("length", "none, and a body", "9112 6.3", http(), 400, EITHER, answers=2, body=b""),
    *(
        case("length", f"invalid: {bad!a}", "9112 6.3", length(bad), 400)
        for bad in (
            *(f" +{N}", f" -{N}", " 0x1a", f" {N}.0", f" {N}x", f" x{N}", " 2 6", " 2_6", f" '{N}'", f' "{N}"', ""),
            *(f" {N},", f" ,{N}", f" {N}, 5", f" {N};", f"\x0b{N}", f" {N}\x00", f" {N}\x0c", " 99999999999999999999"),
            *(f" {N}e0", " \uff12\uff16".encode(), f" {N}\xa0", " 1e1", " -0"),
        )
    ),
    case("length", "the same twice in a line", "9112 6.3", length(f" {N}, {N}"), 400, EITHER),
    case("length", "the same twice", "9112 6.3", http(LENGTH, LENGTH), 400, EITHER),
    case("length", "two that differ", "9112 6.3", http(LENGTH, "Content-Length: 5"), 400),
    case("length", "two that differ, the other way round", "9112 6.3", http("Content-Length: 5", LENGTH), 400),
    case("length", "a blank before the colon", "9112 5.1", http(f"Content-Length : {N}"), 400),
    case("length", "another name for it", "9110 5.1", http(LENGTH, "Content_Length: 5")),
    case("length", "and chunks", "9112 6.3", http(LENGTH, CHUNKED, body=chunks()), 400, EITHER),
    case("length", "chunks, and a length", "9112 6.3", http(CHUNKED, LENGTH, body=chunks()), 400, EITHER),
    case("length", "more bytes than it says", "9112 6.3", GOOD + b"GARBAGE\r\n\r\n", 400, seen=1, answers=2),
    case("length", "fewer bytes, and the end", "9112 8", GOOD[:-3], 400, ends=True),
    case(
        "length",
        "with GET",
        "9110 9.3.1",
        http("Content-Length: 2", first="GET /v1/files HTTP/1.1", body=b"hi"),
        body=b"hi",
        own=True,
    ),
]


def encoding(value: str | bytes, *more: str) -> bytes:
    raw = value.encode("latin-1") if isinstance(value, str) else value
    return http(b"Transfer-Encoding:" + raw, *more, body=chunks())


ENCODINGS = [
    case("transfer encoding", "chunked", "9112 7.1", encoding(" chunked")),
    case("transfer encoding", "in any case", "9112 7", encoding(" ChUnKeD")),
    case("transfer encoding", "without a blank", "9112 5", encoding("chunked")),
    case("transfer encoding", "blanks round it", "9112 5.1", encoding("  chunked  ")),
    case("transfer encoding", "a tab behind it", "9110 5.6.3", encoding(" chunked\t"), 400, EITHER),
    *(
        case("transfer encoding", f"{bad!a}", "9112 6.1", encoding(bad), 400)
        for bad in (
            *(" gzip, chunked", " chunked, gzip", " gzip", " identity", " chunked, identity", " chunked, chunked"),
            *(" xchunked", " chunkedx", " chunked;q=1", ' "chunked"', " chunked x", "\x0bchunked", " chunked\x00", ""),
            *(
                " chunk",
                " c hunked",
                " chunked\x0c",
                " chunked\x7f",
                " \xa0chunked",
                " ,chunked,x",
                " identity, chunked",
            ),
        )
    ),
    case("transfer encoding", "a comma before it", "9110 5.6.1", encoding(" ,chunked"), 400, EITHER),
    case("transfer encoding", "a comma behind it", "9110 5.6.1", encoding(" chunked,"), 400, EITHER),
    case("transfer encoding", "twice", "9112 6.1", encoding(" chunked", CHUNKED), 400),
    case("transfer encoding", "and another one", "9112 6.1", encoding(" chunked", "Transfer-Encoding: x"), 400),
    case(
        "transfer encoding",
        "another one before it",
        "9112 6.1",
        http("Transfer-Encoding: x", CHUNKED, body=chunks()),
        400,
    ),
    case("transfer encoding", "in two lines of one field", "9112 5.2", encoding("\r\n chunked"), 400, EITHER),
    case(
        "transfer encoding",
        "a blank before the colon",
        "9112 5.1",
        http("Transfer-Encoding : chunked", body=chunks()),
        400,
    ),
    case("transfer encoding", "a tab in the name", "9112 5.1", http("Transfer\tEncoding: chunked", body=chunks()), 400),
    case("transfer encoding", "another name for it", "9110 5.1", http(LENGTH, "Transfer_Encoding: chunked")),
    case(
        "transfer encoding", "in HTTP/1.0", "9112 6.1", http(CHUNKED, first=LINE[:-1] + "0", body=chunks()), 400, EITHER
    ),
    case(
        "transfer encoding",
        "a bare LF before it",
        "9112 2.2",
        http("X-A: 1\nTransfer-Encoding: chunked", body=chunks()),
        400,
        EITHER,
    ),
    case("transfer encoding", "of 8 bits", "9112 6.1", encoding(" \xffchunked"), 400),
]


def chunked(body: bytes) -> bytes:
    return http(CHUNKED, body=body)


X = b"%x" % len(BODY)
ONE = X + b"\r\n" + BODY + b"\r\n"
END = b"0\r\n\r\n"


def extended(size: int) -> bytes:
    """The body in one chunk with an extension of so many bytes."""
    return ONE.replace(X, X + b";" + b"x" * (size - 1), 1)


def many_extended(each: int) -> bytes:
    """In chunks of one byte, each with an extension of so many bytes."""
    return b"".join(b"1;%s\r\n%c\r\n" % (b"x" * (each - 1), byte) for byte in BODY) + END


CHUNKS = [
    case("chunks", "one", "9112 7.1", chunked(chunks())),
    case("chunks", "several", "9112 7.1", chunked(chunks(1, 2, 3, 4))),
    case("chunks", "of one byte", "9112 7.1", chunked(chunks(*[1] * len(BODY)))),
    case("chunks", "sizes in capitals", "9112 7.1", chunked(ONE.replace(X, X.upper(), 1) + END)),
    case("chunks", "sizes with zeros", "9112 7.1", chunked(b"000" + ONE + b"0000\r\n\r\n")),
    case("chunks", "an extension", "9112 7.1.1", chunked(ONE.replace(X, X + b";a=b", 1) + b"0;c\r\n\r\n")),
    case("chunks", "an extension in quotes", "9112 7.1.1", chunked(ONE.replace(X, X + b';a="b c;d"', 1) + END)),
    case(
        "chunks", "an extension behind a blank", "9112 7.1.1", chunked(ONE.replace(X, X + b" ;a", 1) + END), 400, EITHER
    ),
    case("chunks", "trailers", "9112 7.1.2", chunked(ONE + b"0\r\nX-T: 1\r\nX-U:\r\n\r\n")),
    case(
        "chunks",
        "a trailer that would be a length",
        "9110 6.5.1",
        chunked(ONE + b"0\r\nContent-Length: 5\r\n\r\n"),
        400,
        EITHER,
    ),
    case("chunks", "another request behind it", "9112 9.3", chunked(chunks()) + GOOD, seen=2),
    *(
        case("chunks", f"{name}", "9112 7.1", chunked(bad), 400)
        for name, bad in (
            ("0x before the size", b"0x" + ONE + END),
            ("a sign before the size", b"+" + ONE + END),
            ("a minus before the size", b"-" + ONE + END),
            ("an underscore in the size", b"1_a" + ONE[2:] + END),
            ("no hex digit", b"g\r\n" + BODY + b"\r\n" + END),
            ("an empty line for a size", b"\r\n" + ONE + END),
            ("a size of 17 digits", b"1" + b"0" * 15 + X + ONE[2:] + END),
            ("a size beyond 64 bits", b"f" * 17 + b"\r\n" + BODY),
            ("a decimal point", X + b".0" + ONE[2:] + END),
            ("LF behind the size", X + b"\n" + BODY + b"\r\n" + END),
            ("CR behind the size", X + b"\r" + BODY + b"\r\n" + END),
            ("NUL behind the size", X + b"\x00\r\n" + BODY + b"\r\n" + END),
            ("LF behind the data", ONE[:-2] + b"\n" + END),
            ("nothing behind the data", ONE[:-2] + END),
            ("more data than its size", b"5\r\n" + BODY + b"\r\n" + END),
            ("less data than its size", b"ff\r\n" + BODY + b"\r\n" + END + b"x" * 300),
            ("a bare LF in an extension", X + b";a\n" + ONE[2:] + END),
            ("a bare CR in an extension", X + b";a\rb" + ONE[2:] + END),
            ("a comma behind the size", X + b"," + ONE[2:] + END),
            ("LF behind an extension", X + b";a\n" + BODY + b"\r\n" + END),
            ("LF behind a quoted extension", X + b';a="b"\n' + BODY + b"\r\n" + END),
            ("a bare LF in a quoted extension", X + b';a="b\nc"' + ONE[2:] + END),
            ("LF and CRLF behind the size", X + b"\n\r\n" + BODY + b"\r\n" + END),
            ("two CR behind the size", X + b"\r" + ONE[2:] + END),
            ("LF and CRLF behind the data", ONE[:-2] + b"\n\r\n" + END),
            ("LF behind the last size", ONE + b"0\n\r\n"),
            ("LF behind the last size's extension", ONE + b"0;a\n\r\n"),
        )
    ),
    case("chunks", "LF behind a trailer", "9112 7.1.2", chunked(ONE + b"0\r\nX-T: 1\n\r\n"), 400, EITHER),
    case("chunks", "LF in a trailer", "9112 7.1.2", chunked(ONE + b"0\r\nX-T: 1\nX-U: 2\r\n\r\n"), 400, EITHER),
    case("chunks", "LF behind the trailers", "9112 7.1.2", chunked(ONE + b"0\r\nX-T: 1\r\n\n"), 400, EITHER),
    case("chunks", "an extension of 4 KB", "9112 7.1.1", chunked(extended(4000) + END), own=True),
    case("chunks", "an extension of more", "9112 7.1.1", chunked(extended((4 << 10) + 1) + END), 400, own=True),
    case("chunks", "an extension of 1 MB", "9112 7.1.1", chunked(extended(1 << 20) + END), 400, own=True),
    case("chunks", "extensions of 4 KiB together", "9112 7.1.1", chunked(many_extended(1000)), 400, own=True),
    case("chunks", "extensions of less together", "9112 7.1.1", chunked(many_extended(100)), own=True),
    case(
        "chunks",
        "a bad one, and a request before it",
        "9112 9.3",
        GOOD + chunked(extended(5000) + END),
        400,
        seen=1,
        answers=2,
    ),
    case("chunks", "a size with 5,000 zeros", "9112 7.1", chunked(b"0" * 5000 + ONE + END), 400, EITHER),
    case("chunks", "a blank before the size", "9112 7.1", chunked(b" " + ONE + END), 400, EITHER),
    case("chunks", "a blank behind the size", "9112 7.1", chunked(ONE.replace(X, X + b" ", 1) + END), 400, EITHER),
    case("chunks", "a trailer without colon", "9112 7.1.2", chunked(ONE + b"0\r\nbad\r\n\r\n"), 400, EITHER),
    case("chunks", "a trailer that is folded", "9112 7.1.2", chunked(ONE + b"0\r\nA: b\r\n c\r\n\r\n"), 400, EITHER),
    case("chunks", "LF at the very end", "9112 7.1", chunked(ONE + b"0\r\n\n"), 400, EITHER),
    case("chunks", "cut off", "9112 8", chunked(ONE), 400, ends=True),
    case("chunks", "cut off before the last line", "9112 8", chunked(ONE + b"0\r\n"), 400, ends=True),
]

EXPECT = "Expect: 100-continue"
MANNERS = [
    case("expect", "100-continue, and the body", "9110 10.1.1", http(LENGTH, EXPECT)),
    case("expect", "in any case", "9110 10.1.1", http(LENGTH, "Expect: 100-Continue")),
    case(
        "expect",
        "in HTTP/1.0",
        "9110 10.1.1",
        http(LENGTH, EXPECT, first=LINE[:-1] + "0"),
        closes=True,
        no_continue=True,
    ),
    case("expect", "something else", "9110 10.1.1", http(LENGTH, "Expect: 200-ok"), must=EITHER),
    case(
        "expect",
        "a body that is too large",
        "9110 10.1.1",
        http("Content-Length: 999999999", EXPECT, body=b""),
        413,
        no_continue=True,
    ),
    case(
        "upgrade", "to a websocket", "9110 7.8", http(LENGTH, "Connection: Upgrade", "Upgrade: websocket"), 400, EITHER
    ),
    case(
        "upgrade",
        "to HTTP/2",
        "9110 7.8",
        http(LENGTH, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"),
        must=EITHER,
    ),
    case("upgrade", "that nobody nominates", "9110 7.8", http(LENGTH, "Upgrade: h2c"), must=EITHER),
    case("connection", "close", "9112 9.6", http(LENGTH, "Connection: close"), closes=True),
    case(
        "connection", "close among others, in capitals", "9112 9.6", http(LENGTH, "Connection: x-a, CLOSE"), closes=True
    ),
    case("connection", "close, and another request", "9112 9.6", http(LENGTH, "Connection: close") + GOOD, closes=True),
    case("connection", "HTTP/1.0", "9112 9.3", http(LENGTH, first=LINE[:-1] + "0"), closes=True),
    case(
        "connection",
        "HTTP/1.0, and another request",
        "9112 9.3",
        http(LENGTH, first=LINE[:-1] + "0") + GOOD,
        closes=True,
    ),
    case("connection", "keep-alive", "9112 9.3", http(LENGTH, "Connection: keep-alive", "Keep-Alive: timeout=5")),
    case("pipelining", "two", "9112 9.3.2", GOOD + GOOD, seen=2),
    case("pipelining", "five", "9112 9.3.2", GOOD * 5, seen=5),
    case("pipelining", "an empty line between", "9112 2.2", GOOD + b"\r\n" + GOOD, seen=2),
    case("pipelining", "chunks, length, chunks", "9112 9.3.2", chunked(chunks(3)) + GOOD + chunked(chunks()), seen=3),
    case(
        "pipelining",
        "a bad one in the middle",
        "9112 9.3.2",
        GOOD + http("Content-Length: x") + GOOD,
        400,
        seen=1,
        answers=2,
    ),
]

CASES: list[ClientCase] = [
    *(*REQUEST_LINES, *TARGETS, *FIELDS, *HOSTS, *LENGTHS, *ENCODINGS, *CHUNKS, *MANNERS),
]
