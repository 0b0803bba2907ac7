# SPDX-License-Identifier: Apache-2.0
"""W3C Trace Context: what is read, what is sampled, and what endpoints are told."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbproxy.core.endpoints.endpoint import Endpoint, EndpointUid
from lbproxy.core.observed.trace import RANDOM, SAMPLED, Parent, Sampling, read_parent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
OURS = re.compile(rb"traceparent: 00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})\r\n(?:tracestate: ([^\r\n]+)\r\n)?")


def lines(*parents: str, state: str | None = None) -> bytes:
    fields = [f"traceparent: {parent}\r\n" for parent in parents]
    return "".join([*fields, *([] if state is None else [f"tracestate: {state}\r\n"])]).encode()


def sampling(ratio: float = 1.0, *, follow: bool = True, seed: int = 1) -> Sampling:
    return Sampling(ratio, follow_clients=follow, rng=random.Random(seed))


def told(fields: bytes) -> tuple[str, str, int, str]:
    """Trace, span, flags and state in field lines of ours."""
    match = OURS.fullmatch(fields)
    assert match is not None, fields
    return match[1].decode(), match[2].decode(), int(match[3], 16), (match[4] or b"").decode()


ENDPOINT = Endpoint(name="e1", base_url="http://10.0.0.1:8000", uid=EndpointUid(1))


# --- Reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (f"00-{TRACE}-{SPAN}-01", 1),
        (f"00-{TRACE}-{SPAN}-00", 0),
        (f"00-{TRACE}-{SPAN}-ff", 255),
        (f"  00-{TRACE}-{SPAN}-01\t", 1),
        (f"01-{TRACE}-{SPAN}-01", 1),
        (f"cc-{TRACE}-{SPAN}-01-what the future brings", 1),
        (f"fe-{TRACE}-{SPAN}-01-", 1),
    ],
)
def test_a_parent_is_read_also_one_of_a_later_version(text: str, flags: int) -> None:
    assert read_parent(lines(text)) == Parent(int(TRACE, 16), int(SPAN, 16), flags, "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01-",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01.",
        f"01-{TRACE}-{SPAN}-01.",
        f"ff-{TRACE}-{SPAN}-01",
        f"0-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN.upper()}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}0-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-0x",
        f"00_{TRACE}_{SPAN}_01",
        "00-" + "a" * 16384,
    ],
)
def test_what_is_no_parent_counts_as_not_there(text: str) -> None:
    assert read_parent(lines(text)) is None


def test_two_parents_are_none() -> None:
    one = f"00-{TRACE}-{SPAN}-01"
    assert read_parent(lines(one, one)) is None


def test_names_of_fields_are_read_in_any_case_and_states_joined() -> None:
    fields = f"TraceParent: 00-{TRACE}-{SPAN}-01\r\nTRACESTATE:a=1\r\ntracestate: b=2,c=3\r\n".encode()
    parent = read_parent(fields)
    assert parent is not None
    assert parent.state == "a=1,b=2,c=3"


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        ("rojo=00f067aa0ba902b7,congo=t61rcWkgMzE", "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"),
        (" a=1 ,\t, b=2,", "a=1,b=2"),
        ("fw529a3039@dt=FfVxM0-_*/", "fw529a3039@dt=FfVxM0-_*/"),
        ("1a=x y", "1a=x y"),
        (",".join(f"k{n}=v" for n in range(32)), ",".join(f"k{n}=v" for n in range(32))),
        (",".join(f"k{n}=v" for n in range(33)), ""),
        ("a=1,a=2", ""),
        ("A=1", ""),
        ("a", ""),
        ("a=", ""),
        ("a=b=c", ""),
        ("a=\u00e9", ""),
        ("a" * 257 + "=1", ""),
        ("a=" + "v" * 257, ""),
        ("", ""),
    ],
)
def test_a_state_goes_on_if_it_is_well_formed(state: str, kept: str) -> None:
    """Whatever it is, the parent holds."""
    parent = read_parent(lines(f"00-{TRACE}-{SPAN}-01", state=state))
    assert parent is not None
    assert parent.state == kept


@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_make_it_raise_and_endpoints_get_well_formed_ones(data: bytes, parent: bool) -> None:
    """The parsers of heads let no CR, LF or NUL through."""
    data = data.translate(None, b"\r\n\0")
    field = b"traceparent: %s\r\n" % data if parent else lines(f"00-{TRACE}-{SPAN}-01") + b"tracestate: %s\r\n" % data
    trace, fields = sampling().begin(field)
    if trace is not None:
        told(fields)
    else:
        assert fields == field


# --- Sampling ---------------------------------------------------------------------------------------------------------


def test_without_a_parent_a_trace_begins_with_a_random_id() -> None:
    decide = sampling()
    seen = set()
    for _ in range(100):
        trace, fields = decide.begin(b"")
        assert trace is not None
        trace_id, span_id, flags, state = told(fields)
        assert (trace_id, span_id, flags, state) == (f"{trace.trace_id:032x}", f"{trace.span_id:016x}", 3, "")
        seen.add((trace_id, span_id))
    assert len(seen) == 100


def test_the_ratio_is_kept_and_those_left_out_say_so_to_endpoints() -> None:
    decide = sampling(0.25)
    begun = [decide.begin(b"") for _ in range(4000)]
    assert 900 < sum(trace is not None for trace, _ in begun) < 1100
    assert {told(fields)[2] for trace, fields in begun if trace is None} == {RANDOM}


@pytest.mark.parametrize(("ratio", "sampled"), [(0.0, 0), (1.0, 200)])
def test_the_ratios_ends_are_none_and_all(ratio: float, sampled: int) -> None:
    decide = sampling(ratio)
    assert sum(decide.begin(b"")[0] is not None for _ in range(200)) == sampled


@pytest.mark.parametrize(("flags", "ours"), [("01", 1), ("03", 3), ("ff", 3), ("05", 1)])
def test_a_client_that_samples_decides_and_flags_that_nobody_knows_end_here(flags: str, ours: int) -> None:
    trace, fields = sampling(0.0).begin(lines(f"00-{TRACE}-{SPAN}-{flags}", state="a=1"))
    assert trace is not None
    assert trace.parent == Parent(int(TRACE, 16), int(SPAN, 16), int(flags, 16), "a=1")
    trace_id, span_id, said, state = told(fields)
    assert (trace_id, said, state) == (TRACE, ours, "a=1")
    assert span_id == f"{trace.span_id:016x}" != SPAN


def test_a_client_that_does_not_sample_decides_and_its_fields_go_on_as_they_came() -> None:
    came = f"Traceparent:00-{TRACE}-{SPAN}-00\r\nTracestate:A=malformed\r\n".encode()
    assert sampling(1.0).begin(came) == (None, came)


def test_clients_that_are_not_followed_keep_their_trace_but_the_ratio_decides() -> None:
    trace, _ = sampling(1.0, follow=False).begin(lines(f"00-{TRACE}-{SPAN}-00"))
    assert trace is not None
    assert (trace.trace_id, trace.flags) == (int(TRACE, 16), SAMPLED)
    trace, fields = sampling(0.0, follow=False).begin(lines(f"00-{TRACE}-{SPAN}-01", state="a=1"))
    assert trace is None
    trace_id, span_id, flags, state = told(fields)
    assert (trace_id, flags, state) == (TRACE, 0, "a=1")
    assert span_id != SPAN, "whoever changes the flag is the parent from there on"


def test_a_malformed_parent_takes_its_state_along() -> None:
    trace, fields = sampling().begin(lines(f"00-{TRACE}-{SPAN}-zz", state="a=1"))
    assert trace is not None
    assert trace.parent is None
    assert told(fields)[0] != TRACE
    assert b"tracestate" not in fields


# --- A trace ----------------------------------------------------------------------------------------------------------


def test_each_attempt_is_told_a_span_of_its_own() -> None:
    trace, fields = sampling().begin(lines(f"00-{TRACE}-{SPAN}-01", state="a=1"))
    assert trace is not None
    said = [fields]
    for at in (1.0, 3.0):
        trace.placed(ENDPOINT, at, at + 0.5)
        said.append(trace.fields)
        trace.failed("upstream_reset", at + 1.0)
    assert [told(one)[0] for one in said] == [TRACE] * 3
    assert [told(one)[3] for one in said] == ["a=1"] * 3
    assert len({told(one)[1] for one in said}) == 3
    assert [f"{one.span_id:016x}" for one in trace.attempts] == [told(one)[1] for one in said[1:]]
    times = [(one.submitted_at, one.placed_at, one.ended_at, one.failure) for one in trace.attempts]
    assert times == [(1.0, 1.5, 2.0, "upstream_reset"), (3.0, 3.5, 4.0, "upstream_reset")]
