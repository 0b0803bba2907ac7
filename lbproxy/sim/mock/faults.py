# SPDX-License-Identifier: Apache-2.0
"""What a simulated server may do wrong, and whether it does so now: values and chances, no I/O.

A `Fault` is one line of text, the same on the command line and at run time: a kind, then what is not as usual.

    status code=503 share=0.2 for=10
    break how=rst at=line events=5
    freeze on=all

`FaultBook` holds those in force. What a fault does to a connection is `sabotage.py`'s.

Text comes from whoever may talk to the server, so `parse_faults` bounds and checks all of it; what it returns is valid.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAX_FAULTS = 16
"""In force at a time."""
MAX_TEXT_BYTES = 4096


class FaultError(ValueError):
    """A fault that cannot be; its text says why."""


class Parameter(NamedTuple):
    """What may follow a kind's name."""

    default: str
    what: str
    words: tuple[str, ...] = ()
    """What it takes; empty: a number."""
    at_least: float = 0.0
    at_most: float = 1e6


FOREVER = ""
EVERYWHERE = ("requests", "health", "metrics", "wake", "sleep", "state", "all")
COMMON = {
    "share": Parameter("1", "share of the matching requests, at random", at_most=1.0),
    "for": Parameter(FOREVER, "seconds; without it, until the fault is removed"),
    "on": Parameter(
        "requests",
        "which requests: POSTs under /v1/, /health, /metrics, /wake_up, /sleep, /is_sleeping, or all",
        EVERYWHERE,
    ),
    "having": Parameter("", "only requests whose body has this text, which may not contain spaces"),
}
KINDS: dict[str, tuple[str, dict[str, Parameter]]] = {
    "refuse": ("stops listening and closes all connections; `for` is required", {}),
    "freeze": ("accepts and reads, but sends nothing; with `on=all` running streams stop too", {}),
    "status": (
        "responds immediately with this status and an error body",
        {
            "code": Parameter("503", "the status", at_least=200, at_most=599),
            "retry-after": Parameter("0", "seconds, in a header; 0 = no header", at_most=3600),
        },
    ),
    "slow-head": (
        "sends the response head byte by byte",
        {"every": Parameter("1", "seconds between two bytes", at_most=600)},
    ),
    "slow-stream": (
        "sends the events of a stream slowly, one by one",
        {"every": Parameter("5", "seconds between two events", at_most=600)},
    ),
    "break": (
        "breaks off a stream after some events; a non-streaming response after half of its length",
        {
            "how": Parameter("fin", "closed or reset", ("fin", "rst")),
            "at": Parameter("event", "between two events, inside a chunk, inside a line", ("event", "chunk", "line")),
            "events": Parameter("3", "events before that", at_most=1e6),
            "framing": Parameter(
                "chunked",
                "how the body ends; except for chunked, only by closing the connection",
                ("chunked", "close", "http/1.0"),
            ),
        },
    ),
    "garbage": (
        "sends an invalid response: one of 50 kinds, in turn",
        {"number": Parameter("-1", "always this one; -1 = in turn", at_least=-1, at_most=49)},
    ),
    "slow-down": (
        "computes more slowly; `share` and `on` have no effect",
        {"factor": Parameter("10", "how many times as slowly", at_least=0.001, at_most=1000)},
    ),
}
"""Kind -> what it does, and what it takes besides the common parameters."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One of them. Values are as `KINDS` and `COMMON` have them, checked."""

    kind: str
    share: float
    for_s: float | None
    """None = until it is taken back."""
    on: str
    having: bytes
    numbers: Mapping[str, float]
    words: Mapping[str, str]
    """The kind's own parameters."""
    text: str
    """As it was written."""

    def hits(self, place: str, body: bytes) -> bool:
        """Whether it is about a request with this body to this place: one of `EVERYWHERE` but `all`, or `other`."""
        return self.on in {place, "all"} and self.having in body


def parse_faults(text: str) -> list[Fault]:
    """Those of a text with one a line. Raises FaultError."""
    if len(text.encode()) > MAX_TEXT_BYTES:
        raise FaultError(f"over {MAX_TEXT_BYTES} bytes")
    faults = [parse_fault(line) for line in text.splitlines() if line.strip()]
    if len(faults) > MAX_FAULTS:
        raise FaultError(f"over {MAX_FAULTS} faults")
    return faults


def parse_fault(line: str) -> Fault:
    """One of them. Raises FaultError, which says what would be right."""
    kind, *rest = line.split()
    if kind not in KINDS:
        raise FaultError(f"{kind!r} is not a fault; the faults are {', '.join(KINDS)}")
    takes = {**COMMON, **KINDS[kind][1]}
    if kind == "freeze":
        takes["on"] = takes["on"]._replace(default="all")
    values = {name: parameter.default for name, parameter in takes.items()}
    for one in rest:
        name, equals, value = one.partition("=")
        if name not in takes or not equals:
            raise FaultError(f"{kind} takes {', '.join(f'{name}=' for name in takes)} but not {one!r}")
        values[name] = value
    having = values.pop("having").encode()
    takes.pop("having")
    words, numbers = {}, {}
    for name, parameter in takes.items():
        if parameter.words:
            words[name] = _word(f"{kind} {name}", values[name], parameter)
        elif values[name] != FOREVER:
            numbers[name] = _number(f"{kind} {name}", values[name], parameter)
    if kind == "refuse" and "for" not in numbers:
        raise FaultError("refuse needs for=SECONDS: a server that refuses all connections cannot be told to stop")
    share, for_s = numbers.pop("share"), numbers.pop("for", None)
    return Fault(kind, share, for_s, words.pop("on"), having, numbers, words, " ".join(line.split()))


def _word(where: str, value: str, parameter: Parameter) -> str:
    if value not in parameter.words:
        raise FaultError(f"{where} must be one of {', '.join(parameter.words)}, got {value!r}")
    return value


def _number(where: str, value: str, parameter: Parameter) -> float:
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not parameter.at_least <= number <= parameter.at_most:
        raise FaultError(f"{where} must be {parameter.at_least:g} to {parameter.at_most:g}, got {value!r}")
    return number


class FaultBook:
    """Those in force, each until its time is over."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._entries: list[tuple[Fault, float | None]] = []
        self._garbage = 0

    def replace(self, faults: Sequence[Fault], *, now: float) -> None:
        """These and no others, from now on."""
        self._entries = [(fault, None if fault.for_s is None else now + fault.for_s) for fault in faults]

    def in_force(self, *, now: float) -> list[tuple[Fault, float | None]]:
        """Each with the time at which it ends."""
        self._entries = [(fault, end) for fault, end in self._entries if end is None or now < end]
        return self._entries

    def next_end(self, *, now: float) -> float | None:
        """When the next one ends by itself."""
        return min((end for _, end in self.in_force(now=now) if end is not None), default=None)

    def find(self, kind: str, *, now: float) -> Fault | None:
        """The first of a kind, whatever its share."""
        return next((fault for fault, _ in self.in_force(now=now) if fault.kind == kind), None)

    def reads_bodies(self, *, now: float) -> bool:
        """Whether a request's body decides what happens to it."""
        return any(fault.having for fault, _ in self.in_force(now=now))

    def chosen(self, place: str, body: bytes = b"", *, now: float) -> Fault | None:
        """What happens to a request to `place`: the first one that is about it and whose chance says so."""
        for fault, _ in self.in_force(now=now):
            if fault.kind in {"refuse", "slow-down"} or not fault.hits(place, body):
                continue
            if self._rng.random() < fault.share:
                return fault
        return None

    def garbage(self, fault: Fault) -> bytes:
        """The next answer of this one."""
        number = int(fault.numbers["number"])
        if number < 0:
            number = self._garbage
            self._garbage = (number + 1) % len(GARBAGE)
        return GARBAGE[number]


_OK = b"HTTP/1.1 200 OK\r\n"
_JSON = b"Content-Type: application/json\r\n"
_CHUNKED = _OK + _JSON + b"Transfer-Encoding: chunked\r\n\r\n"
_EVENTS = b"Content-Type: text/event-stream\r\n"

GARBAGE: tuple[bytes, ...] = (
    # Nothing, or nothing like HTTP.
    b"",
    b"\r\n",
    b"\x00",
    b"\x16\x03\x01\x00\x02\x02\x28",  # a TLS alert
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x00\x00\x12\x04\x00\x00\x00\x00\x00",  # an HTTP/2 SETTINGS frame
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"220 mail ESMTP\r\n",
    b"<html>Bad Gateway</html>\n",
    b'{"error":"no head"}',
    b"-ERR unknown command\r\n",
    b"\xff" * 4096,
    b"A" * 70_000,
    b"\r\n" * 5_000,
    # Status lines.
    b"HTTP/1.1\r\n\r\n",
    b"HTTP/1.1 OK\r\n\r\n",
    b"HTTP/1.1 20 OK\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 2000 OK\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 -200 OK\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 099 Low\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/3.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/0.9 200 OK\r\nContent-Length: 0\r\n\r\n",
    b"http/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    b"ICY 200 OK\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" * 1_000,
    b"HTTP/1.1 200 " + b"O" * 70_000 + b"\r\n\r\n",
    # Fields.
    _OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    _OK + b"Content-Length: -1\r\n\r\n",
    _OK + b"Content-Length: 0x5\r\n\r\nhello",
    _OK + b"Content-Length: five\r\n\r\nhello",
    _OK + b"Content-Length: 99999999999999999999999\r\n\r\nhello",
    _OK + b"Content-Length: 5, 5x\r\n\r\nhello",
    _OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    _OK + b"Transfer-Encoding: gzip\r\n\r\nhello",
    _OK + b"Transfer-Encoding: chunked, identity\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    _OK + b"Transfer-Encoding: xchunked\r\n\r\nhello",
    _OK + b"No colon here\r\n\r\n",
    _OK + b": no name\r\n\r\n",
    _OK + b"Bad Name: x\r\n\r\n",
    _OK + b"X: a\r\n folded\r\nContent-Length: 0\r\n\r\n",
    _OK + b"X: a\x00b\r\nContent-Length: 0\r\n\r\n",
    _OK + b"X: a\rb\r\nContent-Length: 0\r\n\r\n",
    _OK + b"X: " + b"y" * 70_000 + b"\r\n\r\n",
    _OK + b"".join(b"X%d: y\r\n" % n for n in range(5_000)) + b"\r\n",
    # Bodies.
    _CHUNKED + b"zz\r\nhello\r\n0\r\n\r\n",
    _CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n",
    _CHUNKED + b"5\r\nhelloXX0\r\n\r\n",
    _CHUNKED + b"FFFFFFFFFFFFFFFFF\r\nhello\r\n",
    _OK + _EVENTS + b"Transfer-Encoding: chunked\r\n\r\n6\r\ndata: \r\nnot a chunk",
)
"""Answers that are none. The connection is closed behind each."""
assert len(GARBAGE) == 50
