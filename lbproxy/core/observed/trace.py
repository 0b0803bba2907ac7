# SPDX-License-Identifier: Apache-2.0
"""Which requests are traced, and under which ids: W3C Trace Context, received and sent. Pure.

A `Trace` belongs to a `RequestRecord` and is filled in together with it: it has what the record does not have, the ids
and the times of each attempt. After the end, spans are made of both. The header is that of
https://www.w3.org/TR/trace-context-2/. Invariants:

- Whatever a client sends, it cannot fail a request, nor cost more than its length: malformed fields count as missing,
  and a new trace begins.
- Endpoints get the same fields whether a request is sampled or not: the parent, and the sampled flag.
- No ids are made, and nothing is read, where traces are not configured: then the client's fields are passed on.
"""

from __future__ import annotations

import random
import re
from typing import NamedTuple

from lbproxy.core.endpoints.endpoint import Endpoint
from lbproxy.core.requests.request import PREFILL, WHOLE

TRACE_FIELDS = frozenset({b"traceparent", b"tracestate"})
"""In lower case."""
SAMPLED = 0x01
RANDOM = 0x02
"""The flag of a random trace id, as ours are."""
MAX_STATES = 32
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_STATE = re.compile(rb"([a-z0-9][a-z0-9_*/@-]{0,255})=[ -+\--<>-~]{0,255}[!-+\--<>-~]")
"""A list member: its key, and a value without commas, equal signs and trailing spaces."""


class Parent(NamedTuple):
    """The parent span that a request names."""

    trace_id: int
    span_id: int
    flags: int
    state: str
    """`tracestate`, for other tracing systems; empty if there is none that is well formed."""


class Attempt:
    """One attempt at an endpoint, or one of the two legs of an attempt that is split."""

    ended_at: float | None = None
    """When it failed, or its first leg was complete; None: with the request."""
    failure: str | None = None
    """The label under which the failure is counted, such as `upstream_reset`."""

    def __init__(
        self, span_id: int, endpoint: Endpoint, submitted_at: float, placed_at: float, leg: int = WHOLE
    ) -> None:
        self.span_id = span_id
        self.endpoint = endpoint
        self.leg = leg
        self.submitted_at = submitted_at
        """Since when it waited for a place there."""
        self.placed_at = placed_at


class Trace:
    """The trace of a sampled request. Times are monotonic seconds."""

    waiting_since: float | None = None
    """Since when it waits for a place, or waited until it ended without one."""

    def __init__(self, parent: Parent | None, rng: random.Random) -> None:
        self.parent = parent
        self.trace_id = _id(rng, 128) if parent is None else parent.trace_id
        self.flags = SAMPLED | (RANDOM if parent is None else parent.flags & RANDOM)
        self.state = "" if parent is None else parent.state
        self.span_id = _id(rng, 64)
        """The id of the span of the complete request."""
        self.attempts: list[Attempt] = []
        self._rng = rng

    def placed(self, endpoint: Endpoint, submitted_at: float, placed_at: float, leg: int = WHOLE) -> None:
        """Note the start of an attempt, or of one of its legs: the first one first."""
        self.waiting_since = None
        self.attempts.append(Attempt(_id(self._rng, 64), endpoint, submitted_at, placed_at, leg))

    def withdraw(self) -> None:
        """Forget the last placement: nothing was sent."""
        self.attempts.pop()

    def prefilled(self, at: float) -> None:
        """Note that the first leg of the current attempt is complete."""
        self._first_leg().ended_at = at

    def failed(self, failure: str, at: float, leg: int = WHOLE) -> None:
        """Note that the current attempt failed, at that leg. `failure`: the label under which it is counted."""
        attempt = self._first_leg() if leg == PREFILL else self.attempts[-1]
        self.attempts[-1].ended_at = at
        attempt.failure, attempt.ended_at = failure, at

    def _first_leg(self) -> Attempt:
        return next(one for one in reversed(self.attempts) if one.leg == PREFILL)

    @property
    def fields(self) -> bytes:
        """The field lines for the endpoint, each with its CRLF. The parent is the attempt, or before any attempt the
        request.
        """
        span_id = self.attempts[-1].span_id if self.attempts else self.span_id
        return _lines(self.trace_id, span_id, self.flags, self.state)


class Sampling:
    """Decides which requests are traced."""

    def __init__(self, ratio: float, *, follow_clients: bool, rng: random.Random) -> None:
        """`ratio`: the share of undecided requests that is sampled, 0 to 1. `follow_clients`: the `traceparent` of a
        client decides about its request.
        """
        self._ratio = ratio
        self._follows = follow_clients
        self._rng = rng

    def begin(self, lines: bytes) -> tuple[Trace | None, bytes]:
        """The trace of a request, or None if it is not sampled, and the field lines for endpoints until a `Trace` has
        better ones.

        `lines`: the received lines of `TRACE_FIELDS`, each with its CRLF.
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
    """Read the parent from field lines, each with its CRLF; None if there is not exactly one well-formed
    `traceparent`.
    """
    parents: list[bytes] = []
    states: list[bytes] = []
    for line in lines.split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        (parents if name.lower() == b"traceparent" else states).append(value.strip(b" \t"))
    match = _PARENT.fullmatch(parents[0]) if len(parents) == 1 else None
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == b"ff" or (
        version == b"00" and more is not None
    ):  # a later version may have more fields, after a dash
        return None
    parent = Parent(int(trace_id, 16), int(span_id, 16), int(flags, 16), _read_state(b",".join(states)))
    return parent if parent.trace_id and parent.span_id else None


def _read_state(text: bytes) -> str:
    """`text` without empty members; empty if any other is malformed, repeated or one too many."""
    members = [member for member in (part.strip(b" \t") for part in text.split(b",")) if member]
    keys = {match[1] for match in map(_STATE.fullmatch, members) if match is not None}
    if len(keys) < len(members) or len(members) > MAX_STATES:
        return ""
    return b",".join(members).decode("ascii")


def _lines(trace_id: int, span_id: int, flags: int, state: str) -> bytes:
    parent = f"traceparent: 00-{trace_id:032x}-{span_id:016x}-{flags:02x}\r\n"
    return (f"{parent}tracestate: {state}\r\n" if state else parent).encode("ascii")


def _id(rng: random.Random, bits: int) -> int:
    """A random id, never 0, which would mean none."""
    return rng.getrandbits(bits) or 1
