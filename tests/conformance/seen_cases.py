# SPDX-License-Identifier: Apache-2.0
"""What the endpoint must see of a request: which fields end at the gateway, which pass, and how it is framed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.conformance.case import BODY, CHUNKED, LENGTH, LINE, chunks, http


@dataclass(frozen=True)
class SeenCase:
    """A request, and what of it the endpoint gets."""

    name: str
    section: str
    send: bytes
    has: Sequence[tuple[str, list[str]]] = ()
    """Fields with all their values, in order."""
    lacks: Sequence[str] = ()
    line: str = LINE
    body: bytes = BODY
    own: bool = False


def ends(name: str, value: str, section: str = "9110 7.6.1", own: bool = False) -> SeenCase:
    """A field that ends here."""
    return SeenCase(f"{name} ends here", section, http(LENGTH, f"{name}: {value}"), lacks=[name], own=own)


def nominated(by: str, field: str) -> SeenCase:
    """A field that ends here because Connection says so."""
    return SeenCase(
        f"Connection: {by}",
        "9110 7.6.1",
        http(LENGTH, by and f"Connection: {by}", field),
        lacks=["Connection", field.partition(":")[0]],
    )


CASES = [
    SeenCase(
        "as usual",
        "9112 3",
        http(LENGTH),
        [("Content-Type", ["application/json"]), ("Content-Length", [str(len(BODY))])],
    ),
    ends("Connection", "keep-alive"),
    ends("Keep-Alive", "timeout=5"),
    ends("TE", "trailers"),
    ends("Trailer", "X-T"),
    ends("Proxy-Connection", "keep-alive", "9112 C.2.2"),
    ends("Proxy-Authorization", "Basic eDp5", "9110 11.7.2", own=True),
    ends("HTTP2-Settings", "AAMAAABk", "7540 3.2.1", own=True),
    ends("Upgrade", "h2c", "9110 7.8"),
    nominated("x-a", "X-A: 1"),
    nominated("X-A, x-b", "x-B: 1"),
    nominated(" , x-a,,", "X-A: 1"),
    SeenCase(
        "two Connection fields",
        "9110 7.6.1",
        http(LENGTH, "Connection: x-a", "Connection: x-b", "X-A: 1", "X-B: 2"),
        lacks=["X-A", "X-B", "Connection"],
    ),
    SeenCase(
        "Connection: content-length",
        "9110 7.6.1",
        http(LENGTH, "Connection: content-length"),
        [("Content-Length", [str(len(BODY))])],
    ),
    SeenCase("Connection: host", "9110 7.6.1", http(LENGTH, "Connection: host"), lacks=["Connection"]),
    SeenCase(
        "Connection: close, and a field of that name",
        "9110 7.6.1",
        http(LENGTH, "Connection: close", "Close: 1"),
        lacks=["Close"],
    ),
    SeenCase(
        "what it does not know passes",
        "9110 5.1",
        http(LENGTH, 'X-Unknown: a, b;c="d"'),
        [("X-Unknown", ['a, b;c="d"'])],
    ),
    SeenCase(
        "Authorization passes",
        "9110 11.6.2",
        http(LENGTH, "Authorization: Bearer k"),
        [("Authorization", ["Bearer k"])],
        own=True,
    ),
    SeenCase("Cookie passes", "6265 5.4", http(LENGTH, "Cookie: a=b; c=d"), [("Cookie", ["a=b; c=d"])]),
    SeenCase(
        "equal fields keep their order", "9110 5.3", http(LENGTH, "X-A: 1", "X-B: 2", "X-A: 3"), [("X-A", ["1", "3"])]
    ),
    SeenCase(
        "chunks become one framing",
        "9112 6.3",
        http(CHUNKED, body=chunks(5, 6)),
        [("Content-Type", ["application/json"])],
    ),
    SeenCase(
        "trailers are no fields",
        "9110 6.5.1",
        http(CHUNKED, body=chunks()[:-2] + b"X-T: 1\r\nAuthorization: evil\r\n\r\n"),
        lacks=["X-T", "Authorization"],
    ),
    SeenCase("Expect ends here", "9110 10.1.1", http(LENGTH, "Expect: 100-continue"), lacks=["Expect"], own=True),
    SeenCase(
        "an absolute target loses its authority",
        "9112 3.2.2",
        http(LENGTH, first="POST http://evil.example/v1/completions HTTP/1.1"),
    ),
    SeenCase(
        "a query passes as it is",
        "9112 3.2.1",
        http(LENGTH, first="POST /v1/completions?a=%2Fb&c=d%20e HTTP/1.1"),
        line="POST /v1/completions?a=%2Fb&c=d%20e HTTP/1.1",
        own=True,
    ),
    SeenCase("HTTP/1.0 becomes the gateway's own version", "9112 2.3", http(LENGTH, first=LINE[:-1] + "0")),
    SeenCase(
        "a client never chooses the endpoint",
        "docs",
        http(LENGTH, "x-gateway-destination-endpoint: 10.0.0.9:80"),
        own=True,
    ),
    *(
        SeenCase(f"{name} goes no further", "docs", http(LENGTH, f"{name}: 1"), lacks=[name], own=True)
        for name in ("x-lbproxy-priority", "X-LBProxy-Flow", "x-lbproxy-anything", "x_lbproxy_priority")
    ),
    *(
        SeenCase(
            f"{name} could be read as another", "3875 4.1.18", http(LENGTH, f"{name}: {value}"), lacks=[name], own=True
        )
        for name, value in (
            ("Content_Length", "5"),
            ("transfer_encoding", "chunked"),
            ("Transfer_Encoding", "chunked"),
            ("X_Forwarded_For", "192.0.2.1"),
            ("x_forwarded-proto", "https"),
            ("X_API_Key", "k"),
            ("x_request_id", "mine"),
            ("max_forwards", "0"),
            ("x-gateway_destination-endpoint", "10.0.0.9:80"),
        )
    ),
    SeenCase("an underscore of its own passes", "9110 5.1", http(LENGTH, "X_Own: 1"), [("X_Own", ["1"])], own=True),
    SeenCase(
        "who asks, how, and of whom",
        "docs",
        http(LENGTH),
        [("X-Forwarded-For", ["127.0.0.1"]), ("X-Forwarded-Proto", ["http"]), ("X-Forwarded-Host", ["lb"])],
        own=True,
    ),
    SeenCase(
        "what a trusted proxy says of that",
        "docs",
        http(
            LENGTH,
            "X-Forwarded-For: 192.0.2.1",
            "x-forwarded-for: 192.0.2.2, 192.0.2.3",
            "X-Forwarded-Proto: https",
            "Forwarded: for=192.0.2.1",
        ),
        [
            ("X-Forwarded-For", ["192.0.2.1, 192.0.2.2, 192.0.2.3, 127.0.0.1"]),
            ("X-Forwarded-Proto", ["https"]),
            ("X-Forwarded-Host", ["lb"]),
            ("Forwarded", ["for=192.0.2.1"]),
        ],
        own=True,
    ),
    SeenCase(
        "Connection names X-Forwarded-For",
        "9110 7.6.1",
        http(LENGTH, "Connection: x-forwarded-for", "X-Forwarded-For: 192.0.2.1"),
        [("X-Forwarded-For", ["127.0.0.1"])],
        own=True,
    ),
    SeenCase(
        "Max-Forwards passes with POST",
        "9110 7.6.2",
        http(LENGTH, "Max-Forwards: 0"),
        [("Max-Forwards", ["0"])],
        own=True,
    ),
    SeenCase(
        "every byte of a body",
        "9110 6.4",
        http("Content-Length: 35", body=b' { "model" :\t"m",\r\n"x":"\\u00e9" }  '),
        body=b' { "model" :\t"m",\r\n"x":"\\u00e9" }  ',
        own=True,
    ),
]
