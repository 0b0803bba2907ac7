# SPDX-License-Identifier: Apache-2.0
"""The wire towards endpoints: what is a response, where it ends, and what is refused. Oracles: h11 and httptools."""

from __future__ import annotations

import h11
import httptools
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lbproxy.net.connections import h1
from lbproxy.net.connections.h1 import (
    ChunkedFraming,
    CloseFraming,
    Framing,
    LengthFraming,
    LengthSplitter,
    PayloadWatcher,
    ProtocolError,
    parse_head,
    request_head,
)


class Payload(PayloadWatcher):
    """Keeps what a framing shows its watcher."""

    def __init__(self) -> None:
        self.data = b""

    def feed(self, data: bytes, start: int, end: int) -> None:
        self.data += data[start:end]


def head(*lines: str, status: str = "HTTP/1.1 200 OK") -> bytes:
    return "\r\n".join([status, *lines, "", ""]).encode("latin-1")


def test_a_usual_head() -> None:
    parsed = parse_head(
        head("date: today", "Server: uvicorn", "Content-Length: 12", "content-type: Text/Plain"), "POST"
    )
    assert parsed.status == 200
    assert parsed.end_to_end == b"date: today\r\nServer: uvicorn\r\ncontent-type: Text/Plain\r\n"
    assert parsed.content_type == b"text/plain"
    assert (parsed.length, parsed.announced, parsed.chunked, parsed.keep_alive) == (12, b"12", False, True)


@pytest.mark.parametrize(
    ("lines", "status", "method", "length", "chunked", "keep_alive"),
    [
        (["Content-Length: 0"], "HTTP/1.1 200 OK", "GET", 0, False, True),
        (["Transfer-Encoding: Chunked"], "HTTP/1.1 200 OK", "GET", None, True, True),
        ([], "HTTP/1.1 200 OK", "GET", None, False, False),
        ([], "HTTP/1.1 204 No Content", "GET", 0, False, True),
        (["Content-Length: 5"], "HTTP/1.1 304 Not Modified", "GET", 0, False, True),
        (["Content-Length: 5"], "HTTP/1.1 200 OK", "HEAD", 0, False, False),
        (["Transfer-Encoding: chunked"], "HTTP/1.1 200 OK", "HEAD", 0, False, False),
        (["Content-Length: 5"], "HTTP/1.1 204 No Content", "GET", 0, False, False),
        (["Content-Length: 5", "Connection: close"], "HTTP/1.1 200 OK", "GET", 5, False, False),
        (["Content-Length: 5"], "HTTP/1.0 200 OK", "GET", 5, False, False),
        (["Content-Length: 5", "Connection: Keep-Alive"], "HTTP/1.0 200 OK", "GET", 5, False, True),
        (["Content-Length: 5"], "HTTP/1.1 200", "GET", 5, False, True),
        (["Content-Length: 5"], "HTTP/1.1 299 Whatever it is", "GET", 5, False, True),
    ],
)
def test_framing_follows_rfc_9112(
    lines: list[str], status: str, method: str, length: int | None, chunked: bool, keep_alive: bool
) -> None:
    parsed = parse_head(head(*lines, status=status), method)
    assert (parsed.length, parsed.chunked, parsed.keep_alive) == (length, chunked, keep_alive)


@pytest.mark.parametrize(
    "bad",
    [
        head(status="HTTP/2.0 200 OK"),
        head(status="HTTP/1.1 2000 OK"),
        head(status="HTTP/1.1 99 OK"),
        head(status="HTTP/1.1 +20 OK"),
        head(status="HTTP/1.1  200 OK"),
        head(status="ICY 200 OK"),
        head(status="HTTP/1.1 200 O\x00K"),
        head(status="HTTP/1.1 200 O\x7fK"),
        head("no colon"),
        head(": no name"),
        head("na me: x"),
        head("name : x"),
        head(" folded: x"),
        head("a: b", " folded"),
        head("nul: a\x00b"),
        head("cr: a\rb"),
        head("lf: a\nb"),
        head("escape: \x1b[0m"),
        head("Content-Length: 5", "Content-Length: 5"),
        head("Content-Length: 5, 5"),
        head("Content-Length: +5"),
        head("Content-Length: -5"),
        head("Content-Length: 0x5"),
        head("Content-Length: 1_0"),
        head("Content-Length: "),
        head("Content-Length: 99999999999999999"),
        head("Content-Length: 5", "Transfer-Encoding: chunked"),
        head("Transfer-Encoding: gzip, chunked"),
        head("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
        head("Transfer-Encoding: \x0bchunked"),
        head("Transfer-Encoding: identity"),
        head("Transfer-Encoding: chunked", status="HTTP/1.0 200 OK"),
        head(*["a: b"] * 200),
        b"HTTP/1.1 200 OK\n\n",
        b"HTTP/1.1 200 OK\r\na: b\n\r\n",
        b"\r\n\r\n",
        b"",
    ],
)
def test_what_is_malformed_or_ambiguous_is_refused(bad: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_head(bad, "POST")


def test_fields_that_end_at_this_hop_are_cut() -> None:
    parsed = parse_head(
        head(
            "Keep-Alive: timeout=5",
            "A: 1",
            "Connection: close, x-private",
            "X-Private: 2",
            "Upgrade: h2c",
            "Trailer: T",
            "Proxy-Authenticate: Basic",
            "x-request-id: theirs",
            "B: 3",
            "Content-Length: 0",
        ),
        "GET",
    )
    assert parsed.end_to_end == b"A: 1\r\nB: 3\r\n"


NAMES = st.sampled_from(["A", "content-length", "Transfer-Encoding", "x-y_z", "b c", "connection", "é", ""])
VALUES = st.sampled_from(["", "5", "chunked", "close", "a b\t", "\x00", "\r", "\n x", "gzip", "ÿ", "+5", "5 "])
LINES = st.lists(
    st.builds(lambda n, c, v: n + c + v, NAMES, st.sampled_from([":", ": ", " : ", ""]), VALUES), max_size=4
)
STATUS = st.sampled_from(["HTTP/1.1 200 OK", "HTTP/1.0 200 OK", "HTTP/1.1 204 x", "HTTP/1.2 200 OK", "HTTP/1.1 2x0 OK"])


class Collect:
    """Callbacks of httptools."""

    def __init__(self) -> None:
        self.complete = False

    def on_headers_complete(self) -> None:
        self.complete = True


@given(status=STATUS, lines=LINES)
@example(status="HTTP/1.1 200 OK", lines=["Content-Length:5", "A: b"])
def test_nothing_is_accepted_that_the_oracles_refuse(status: str, lines: list[str]) -> None:
    """Stricter is allowed, laxer is not: llhttp and h11 must both read what we read, and find the same length."""
    data = head(*lines, status=status)
    try:
        parsed = parse_head(data, "POST")
    except ProtocolError:
        return
    collect = Collect()
    httptools.HttpResponseParser(collect).feed_data(data)
    assert collect.complete
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("Host", "x"), ("Content-Length", "0")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(data)
    event = connection.next_event()
    assert isinstance(event, h11.Response)
    assert event.status_code == parsed.status
    lengths = [value for name, value in event.headers if name == b"content-length"]
    assert (lengths[0] if lengths else None) == parsed.announced


SPLIT_LINES = st.sampled_from(
    ["Content-Length: 5", "content-length: 17", "Content-Length: 5x", "Content-Length: ", "A: b", "CONTENT-LENGTH: 2"]
)


@given(heads=st.lists(st.lists(SPLIT_LINES, max_size=3), min_size=2, max_size=5))
def test_a_head_is_split_alike_whatever_was_split_before(heads: list[list[str]]) -> None:
    """What is remembered of the last head saves time, and decides nothing."""
    splitter = LengthSplitter()
    for lines in heads:
        assert splitter.split(head(*lines)) == LengthSplitter().split(head(*lines))


def walk(data: bytes, cuts: list[int]) -> tuple[bool, int, bytes]:
    """Feed a chunked body in pieces; whether it ended, where, and the payload."""
    payload = Payload()
    framing = ChunkedFraming(payload)
    at = 0
    for cut in [*sorted(cuts), len(data)]:
        piece = data[at : max(at, cut)]
        used = framing.feed(piece)
        at += used
        if framing.done:
            break
        assert used == len(piece)
    return framing.done, at, payload.data


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    extension=st.sampled_from([b"", b";x=1", b" ;x", b';q="a b"']),
    trailers=st.sampled_from([b"", b"T: 1\r\n", b"T: 1\r\nU:\r\n"]),
    upper=st.booleans(),
    after=st.sampled_from([b"", b"HTTP/1.1 200 OK\r\n"]),
    data=st.data(),
)
def test_chunks_are_walked_alike_however_they_are_cut(
    chunks: list[bytes], extension: bytes, trailers: bytes, upper: bool, after: bytes, data: st.DataObject
) -> None:
    size = b"%X" if upper else b"%x"
    body = b"".join(size % len(c) + extension + b"\r\n" + c + b"\r\n" for c in chunks)
    body += b"0" + extension + b"\r\n" + trailers + b"\r\n"
    whole = body + after
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=5))
    assert walk(whole, cuts) == (True, len(body), b"".join(chunks))
    done, _, _ = walk(body[:-1], [c for c in cuts if c < len(body)])
    assert not done


@pytest.mark.parametrize(
    "bad",
    [
        b"+5\r\nhello\r\n",
        b"0x5\r\nhello\r\n",
        b"1_0\r\n" + b"x" * 16 + b"\r\n",
        b"-1\r\n",
        b" 5\r\nhello\r\n",
        b"5\nhello\r\n",
        b"5\r\nhelloworld\r\n",
        b"5\r\nhello\n\r",
        b"5\r\nhello\rx",
        b"\r\n5\r\nhello\r\n",
        b"g\r\n",
        b"5;\x00\r\nhello\r\n",
        b"1000000000000000\r\n",
        b"0\r\nbad trailer\r\n\r\n",
        b"0\r\n folded: x\r\n\r\n",
        b"5;" + b"x" * 5000 + b"\r\nhello\r\n",
        b"0\r\n" + b"T: x\r\n" * 4000 + b"\r\n",
    ],
)
@pytest.mark.parametrize("step", [1, 10_000])
def test_bad_chunks_are_refused_whole_and_byte_by_byte(bad: bytes, step: int) -> None:
    framing = ChunkedFraming()
    with pytest.raises(ProtocolError):  # noqa: PT012 - any of the pieces may show it
        for at in range(0, len(bad), step):
            framing.feed(bad[at : at + step])


@pytest.mark.parametrize("kind", ["counted", "closed", "one chunk", "two chunks"])
@pytest.mark.parametrize(
    "line",
    [b"data:\n\n", b"\n", b":\n\n", b"data: %s\n\n" % (b"x" * 130)],
)
def test_of_many_short_lines_a_watcher_sees_few_at_once(kind: str, line: bytes) -> None:
    """37,000 events of seven bytes in one read took 80 ms, and nobody else was served."""
    text = line * ((256 << 10) // len(line))
    is_dense, half, payload, data = len(line) < 100, len(text) // 2, Payload(), text
    match kind:
        case "counted":
            framing: Framing = LengthFraming(len(text), payload)
        case "closed":
            framing = CloseFraming(payload)
        case _:
            parts = [text] if kind == "one chunk" else [text[:half], text[half:]]
            data = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
            framing = ChunkedFraming(payload, is_response=True)
    at = turns = 0
    while at < len(data):
        seen, before = len(payload.data), at
        at = framing.feed(data, at)
        turns += 1
        assert at > before
        assert not is_dense or len(payload.data) - seen <= h1.AT_ONCE_BYTES
    assert payload.data == text
    assert is_dense or turns == 1


def test_an_event_of_our_own_fits_between_chunks_only() -> None:
    framing = ChunkedFraming()
    for data, fits in ((b"", True), (b"5", False), (b"\r", False), (b"\nhel", False), (b"lo\r", False), (b"\n", True)):
        framing.feed(data)
        assert framing.at_boundary is fits, data
    framing.feed(b"0\r\n")
    assert not framing.at_boundary


def test_a_counted_body_ends_where_it_must() -> None:
    payload = Payload()
    framing = LengthFraming(5, payload)
    assert framing.feed(b"hel") == 3
    assert not framing.eof()
    assert framing.feed(b"lo, and more") == 2
    assert framing.done
    assert payload.data == b"hello"
    assert LengthFraming(0).done


def test_a_body_that_closing_ends_is_whole_only_then() -> None:
    framing = CloseFraming()
    assert framing.feed(b"anything") == 8
    assert not framing.done
    assert framing.eof()


def test_requests_have_one_host_and_one_length() -> None:
    assert request_head("POST", "/v1/x?y=1", "h:1", b"A: b\r\n", 3) == (
        b"POST /v1/x?y=1 HTTP/1.1\r\nHost: h:1\r\nContent-Length: 3\r\nA: b\r\n\r\n"
    )
    assert b"Content-Length: 0\r\n" in request_head("POST", "/", "h:1", b"", 0)
    assert b"Content-Length" not in request_head("GET", "/", "h:1", b"", 0)


# --- Load reports -----------------------------------------------------------------------------------------------------

LINE = b"endpoint-load-metrics: TEXT named_metrics.num_requests_waiting=1.0\r\n"


@pytest.mark.parametrize(
    "line",
    [
        LINE,
        LINE.replace(b"endpoint", b"Endpoint"),
        LINE.replace(b": ", b":"),
        LINE.replace(b": ", b":\t"),
        LINE.replace(b"TEXT", b"TEXT \xff"),
        LINE.replace(b"1.0", b"1" * 600),
        LINE.replace(b"metrics:", b"metrics-bin:"),
    ],
    ids=["vLLM's", "case", "no blank", "tab", "not ASCII", "long", "bin"],
)
@pytest.mark.parametrize("others", [b"X-A: 1\r\n", b"Content-Length: 0\r\nX-A: 1\r\n"])
def test_a_load_report_is_told_apart_from_what_goes_on(line: bytes, others: bytes) -> None:
    """However it is written; and wherever it stands, no other line is lost with it."""
    for head in (line + others, others + line):
        parsed = parse_head(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n", "POST")
        assert (parsed.load_report, parsed.end_to_end) == (line, b"X-A: 1\r\n")


def test_of_several_load_reports_one_is_kept_and_none_goes_on() -> None:
    parsed = parse_head(b"HTTP/1.1 200 OK\r\n" + LINE + LINE.replace(b"1.0", b"2.0") + b"\r\n", "POST")
    assert (parsed.load_report, parsed.end_to_end) == (LINE, b"")


@pytest.mark.parametrize("bad", [b"\0", b"\r", b"\n", b"\x7f"])
def test_a_load_report_with_control_characters_is_no_head(bad: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_head(b"HTTP/1.1 200 OK\r\n" + LINE.replace(b"TEXT", b"TE" + bad + b"XT") + b"\r\n", "POST")


def test_heads_that_differ_by_their_load_reports_are_read_once() -> None:
    """Each answer of a server has another: parsed anew each time, a head takes five times as long."""
    before = h1._read_head_cached.cache_info().misses
    for n in range(100):
        parse_head(b"HTTP/1.1 200 OK\r\nX-Once: 1\r\n" + LINE.replace(b"1.0", b"%d.0" % n) + b"\r\n", "POST")
    assert h1._read_head_cached.cache_info().misses == before + 1
