# SPDX-License-Identifier: Apache-2.0
"""Requests that hide another one: every byte in every place that has fooled a gateway, and the smugglers' families.

In each the hidden request lies within the body, by the framing that the RFC gives it. Whoever frames it otherwise
takes the hidden one for a request of its own. The carrier is a request that only its own headers make suspicious.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

HIDDEN = b"POST /v1/smuggled HTTP/1.1\r\nHost: lb\r\nContent-Length: 2\r\n\r\nhi"
JSON = b'{"model":"m","prompt":"x"}'
CHUNKED = b"0\r\n\r\n" + HIDDEN


@dataclass(frozen=True)
class Gadget:
    """A request, and the only body that the endpoint may get of it."""

    family: str
    data: bytes
    body: bytes


def carrier(lines: list[bytes], *, plain: bool, first: bytes | None = None) -> bytes:
    """A head: of a plain request for a model, or of one whose body may be anything."""
    path, kind = (b"/v1/completions", b"application/json") if plain else (b"/v1/audio", b"audio/wav")
    first = first or b"POST %s HTTP/1.1" % path
    return b"\r\n".join([first, b"Host: lb", b"Content-Type: " + kind, *lines, b"", b""])


def by_length(family: str, lines: list[bytes], plain: bool) -> Gadget:
    """Its Content-Length says what its body is; `lines` try to say otherwise."""
    body = JSON if plain else CHUNKED
    return Gadget(family, carrier([b"Content-Length: %d" % len(body), *lines], plain=plain) + body, body)


def in_chunks(family: str, lines: list[bytes], body: bytes = b"", head: bytes | None = None) -> Gadget:
    """The hidden request lies within a chunk."""
    framed = body or b"%x\r\n%s\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN)
    return Gadget(family, (head or carrier(lines, plain=False)) + framed, HIDDEN)


NAME, VALUE = b"Transfer-Encoding", b"chunked"
EVERY_BYTE = [bytes([n]) for n in range(256)]
ENDS = [
    b"\n",
    b"\r",
    b"\r\r\n",
    b"\n\r",
    b"\x00\r\n",
    b"\x0b",
    b"\x0c",
    b"\x85",
    "\u2028".encode(),
    b"\r\n ",
    b"\r\n\t",
    b"\r \n",
]
ENCODINGS = [
    *(b"chunked", b"Chunked", b"chunked, identity", b"identity, chunked", b"chunked, chunked", b"gzip, chunked"),
    *(b"chunked, gzip", b"chunked;a=b", b'"chunked"', b"'chunked'", b"xchunked", b"chunked-x", b"chunk", b"cow"),
    *(
        b" chunked",
        b"\tchunked",
        b"chunked ",
        b"chunked\t",
        b",chunked",
        b"chunked,",
        b"",
        b"identity",
        b"chunked\r\n cow",
    ),
    *(b"\r\n chunked", b"cow\r\nTransfer-Encoding: chunked", b"chunked\r\nTransfer-Encoding: cow", b"c\r\n hunked"),
]
NAMES = [
    *(b"Transfer-Encoding ", b"Transfer-Encoding\t", b" Transfer-Encoding", b"Transfer Encoding", b"Transfer_Encoding"),
    *(
        b"TRANSFER-ENCODING",
        b"tRANSFER-ENCODING",
        b"Transfer-Encodin",
        b"Transfer\r\n-Encoding",
        b"X\nTransfer-Encoding",
    ),
    *(b"X\rTransfer-Encoding", b"X:\nTransfer-Encoding", b"X: y\x00\nTransfer-Encoding", b"Content-Encoding"),
]
LENGTHS = [
    *(
        b"+%d",
        b"-%d",
        b"0x%x",
        b"%d, %d",
        b"%d,0",
        b"0,%d",
        b"%d 0",
        b"%d;0",
        b"%d.0",
        b"%de0",
        b"'%d'",
        b"0%d",
    ),
    *(
        b"%d\r\nContent-Length: 0",
        b"0\r\nContent-Length: %d",
        b"%d\r\n 0",
        b"\r\n %d",
        b"%d\r\nContent-Length : 0",
        b"",
    ),
    *(b"18446744073709551616", b"18446744073709551%d", b"4294967296", b"99999999999999999999999999%d", b"-0", b"1_%d"),
]
SIZES = [
    *(
        b"%x",
        b"0%x",
        b"0x%x",
        b"+%x",
        b"-%x",
        b" %x",
        b"%x ",
        b"\t%x",
        b"%x\t",
        b"%x;",
        b"%x;a=b",
        b"%x;a\nb",
        b"%x;\n",
        b"%x\n",
    ),
    *(
        b"%x\r",
        b"%x,",
        b"%x\x00",
        b"%x\x0b",
        b"1%016x",
        b"f%016x",
        b"%x.0",
        b"%x_0",
        b"\r\n%x",
        b"\n%x",
        b'%x;a="\r\n"',
        b"%xg",
    ),
]
CHUNK_ENDS = [b"\r\n", b"\n", b"\r", b"", b"\r\n\r\n", b"\n\n", b"\r\n ", b"xx", b"\x00\n"]
LAST_CHUNKS = [
    b"0\r\n\r\n",
    b"0\n\r\n",
    b"0\r\n\n",
    b"0\n\n",
    b"0;a\n\r\n",
    b"00\r\n\r\n",
    b"0\r\nX: y\r\n\r\n",
    b"0\r\nX: y\n\r\n",
]


def filled(template: bytes, size: int) -> bytes:
    """A template with the size wherever it asks for it."""
    return template % ((size,) * template.count(b"%"))


def every_byte(plain: bool) -> Iterator[Gadget]:
    for byte in EVERY_BYTE:
        yield by_length("TE: before the name", [byte + NAME + b": " + VALUE], plain)
        yield by_length("TE: before the colon", [NAME + byte + b": " + VALUE], plain)
        yield by_length("TE: before the value", [NAME + b":" + byte + VALUE], plain)
        yield by_length("TE: behind the value", [NAME + b": " + VALUE + byte], plain)
        body = JSON if plain else HIDDEN
        for family, value in (("before", byte + b"%d"), ("behind", b"%d" + byte)):
            head = carrier([b"Content-Length: " + value.replace(b"%d", b"%d" % len(body), 1)], plain=plain)
            yield Gadget(f"CL: {family} the digits", head + body, body)


def families(plain: bool) -> Iterator[Gadget]:
    for value in ENCODINGS:
        yield by_length("TE values, with a length", [NAME + b": " + value], plain)
    for name in NAMES:
        yield by_length("TE names, with a length", [name + b": chunked"], plain)
    for end in ENDS:
        yield by_length("line ends", [b"X-A: b" + end + b"Transfer-Encoding: chunked"], plain)
        yield by_length("line ends", [b"X-A: b" + end + b"Content-Length: 0"], plain)
        yield by_length("line ends", [b"X-A: b" + end + end + HIDDEN], plain)
    body = JSON if plain else HIDDEN
    for template in LENGTHS:
        head = carrier([b"Content-Length: " + filled(template, len(body))], plain=plain)
        yield Gadget("CL values", head + body, body)
    for option in (b"content-length", b"host", b"transfer-encoding", b"close, content-length"):
        yield by_length("Connection", [b"Connection: " + option], plain)
    for first in (b"GET /v1/files HTTP/1.1", b"HEAD /v1/files HTTP/1.1", b"OPTIONS /v1/files HTTP/1.1"):
        lines = [b"Content-Length: %d" % len(HIDDEN)]
        yield Gadget("bodies of GET", carrier(lines, plain=False, first=first) + HIDDEN, HIDDEN)


def chunk_families() -> Iterator[Gadget]:
    for value in ENCODINGS:
        yield in_chunks("TE values", [NAME + b": " + value])
    for template in SIZES:
        size = filled(template, len(HIDDEN))
        yield in_chunks("chunk sizes", [NAME + b": chunked"], size + b"\r\n" + HIDDEN + b"\r\n0\r\n\r\n")
    for end in CHUNK_ENDS:
        yield in_chunks("chunk ends", [NAME + b": chunked"], b"%x\r\n%s%s0\r\n\r\n" % (len(HIDDEN), HIDDEN, end))
    for last in LAST_CHUNKS:
        yield in_chunks("last chunks", [NAME + b": chunked"], b"%x\r\n%s\r\n%s" % (len(HIDDEN), HIDDEN, last))
    for version in (b"1.0", b"0.9", b"2.0", b"1.2"):
        head = carrier([NAME + b": chunked"], plain=False, first=b"POST /v1/audio HTTP/" + version)
        yield in_chunks("versions", [], head=head)


def gadgets() -> list[Gadget]:
    """All of them, each once."""
    every = [*every_byte(False), *every_byte(True), *families(False), *families(True), *chunk_families()]
    return list({one.data: one for one in every}.values())
