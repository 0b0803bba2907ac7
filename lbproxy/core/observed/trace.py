"""Which requests are traced, and under which ids: W3C Trace Context as it comes and as it goes on. Pure.

A `Trace` belongs to a `RequestRecord`, and is filled in with it: what the record alone does not say, the ids and the
times of each attempt. Spans are made of the two after the end, by whoever listens. The header is that of
https://www.w3.org/TR/trace-context-2/. Invariants:

- What a client writes can neither fail a request nor cost more than its length: what is not well formed counts as not
  there, and begins a trace of our own.
- Endpoints are told the same whether a request is sampled or not: who asks them, and whether to trace it.
- No ids are made, and nothing is read, where nobody wants traces: then what the client sent goes on as it came.
"""

from __future__ import annotations

import random
import re
from typing import NamedTuple

from lbproxy.core.endpoints.endpoint import Endpoint

TRACE_FIELDS = frozenset({b"traceparent", b"tracestate"})
"""In lower case."""
SAMPLED = 0x01
RANDOM = 0x02
"""The flag of a trace id that is random, as ours are."""
MAX_STATES = 32
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_STATE = re.compile(rb"([a-z0-9][a-z0-9_*/@-]{0,255})=[ -+\--<>-~]{0,255}[!-+\--<>-~]")
"""A member of the list: its key, and a value without commas, equals signs and spaces at the end."""


class Parent(NamedTuple):
    """The span that a request says it belongs to."""

    trace_id: int
    span_id: int
    flags: int
    state: str
    """`tracestate`, what other tracing systems want to be passed on; empty if there is none that is well formed."""


class Attempt:
    """One endpoint that had the request."""

    ended_at: float | None = None
    """When it failed; None = it did not: it had the request to the end."""
    failure: str | None = None
    """The label under which that is counted, such as `upstream_reset`."""

    def __init__(self, span_id: int, endpoint: Endpoint, submitted_at: float, placed_at: float) -> None:
        self.span_id = span_id
        self.endpoint = endpoint
        self.submitted_at = submitted_at
        """Since when it waited for a place there."""
        self.placed_at = placed_at


class Trace:
    """A request that is sampled. Times are monotonic seconds."""

    waiting_since: float | None = None
    """It waits for a place; or it ended without one."""

    def __init__(self, parent: Parent | None, rng: random.Random) -> None:
        self.parent = parent
        self.trace_id = _id(rng, 128) if parent is None else parent.trace_id
        self.flags = SAMPLED | (RANDOM if parent is None else parent.flags & RANDOM)
        self.state = "" if parent is None else parent.state
        self.span_id = _id(rng, 64)
        """Of the span that is the whole request."""
        self.attempts: list[Attempt] = []
        self._rng = rng

    def placed(self, endpoint: Endpoint, submitted_at: float, placed_at: float) -> None:
        """An attempt begins."""
        self.waiting_since = None
        self.attempts.append(Attempt(_id(self._rng, 64), endpoint, submitted_at, placed_at))

    def failed(self, failure: str, at: float) -> None:
        """The attempt that runs failed. `failure`: as it is counted."""
        attempt = self.attempts[-1]
        attempt.failure, attempt.ended_at = failure, at

    @property
    def fields(self) -> bytes:
        """The field lines that an endpoint gets, each with its CRLF: its parent is the attempt, or before any the
        request.
        """
        span_id = self.attempts[-1].span_id if self.attempts else self.span_id
        return _lines(self.trace_id, span_id, self.flags, self.state)


class Sampling:
    """Decides which requests are traced."""

    def __init__(self, ratio: float, *, follow_clients: bool, rng: random.Random) -> None:
        """`ratio`: of the requests that nobody has decided about, 0 to 1. `follow_clients`: a client's `traceparent`
        decides about its request.
        """
        self._ratio = ratio
        self._follows = follow_clients
        self._rng = rng

    def begin(self, lines: bytes) -> tuple[Trace | None, bytes]:
        """The trace of a request, or None if it is not sampled, and the field lines for endpoints until a `Trace` has
        better ones. `lines`: those of `TRACE_FIELDS` that came, each with its CRLF.
        """
        parent = read_parent(lines) if lines else None
        if parent is not None and self._follows:
            sampled = bool(parent.flags & SAMPLED)
        else:
            sampled = self._rng.random() < self._ratio
        if sampled:
            trace = Trace(parent, self._rng)
            return trace, trace.fields
        if parent is None:
            return None, _lines(_id(self._rng, 128), _id(self._rng, 64), RANDOM, "")
        if parent.flags & SAMPLED:
            return None, _lines(parent.trace_id, _id(self._rng, 64), parent.flags & RANDOM, parent.state)
        return None, lines


def read_parent(lines: bytes) -> Parent | None:
    """What field lines say, each with its CRLF; None if there is no one `traceparent` that is well formed."""
    parents: list[bytes] = []
    states: list[bytes] = []
    for line in lines.split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        (parents if name.lower() == b"traceparent" else states).append(value.strip(b" \t"))
    match = _PARENT.fullmatch(parents[0]) if len(parents) == 1 else None
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == b"ff" or (version == b"00" and more is not None):  # a later version may say more, after a dash
        return None
    parent = Parent(int(trace_id, 16), int(span_id, 16), int(flags, 16), _read_state(b",".join(states)))
    return parent if parent.trace_id and parent.span_id else None


def _read_state(text: bytes) -> str:
    """`text` with empty members left out; empty if any other is malformed, stands twice or is one too many."""
    members = [member for member in (part.strip(b" \t") for part in text.split(b",")) if member]
    keys = {match[1] for match in map(_STATE.fullmatch, members) if match is not None}
    if len(keys) < len(members) or len(members) > MAX_STATES:
        return ""
    return b",".join(members).decode("ascii")


def _lines(trace_id: int, span_id: int, flags: int, state: str) -> bytes:
    parent = f"traceparent: 00-{trace_id:032x}-{span_id:016x}-{flags:02x}\r\n"
    return (f"{parent}tracestate: {state}\r\n" if state else parent).encode("ascii")


def _id(rng: random.Random, bits: int) -> int:
    """Zero would say that there is none."""
    return rng.getrandbits(bits) or 1
