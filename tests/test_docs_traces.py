# SPDX-License-Identifier: Apache-2.0
"""docs/traces.md describes the spans: the example and the list of attributes are made of real ones."""

from __future__ import annotations

import re

from lbproxy.core.queue.ticket import Wait
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import DECODE, Usage
from tests.extras.test_spans import ONE, OTHER, decision, place, request, spans_of, split
from tests.support.docs import DOCS, expect_generated, generated
from tests.support.otlp import SERVER, Span

PAGE = DOCS / "traces.md"
KINDS = {"queue": "queue", "POST": "attempt"}


def example() -> list[Span]:
    """The request that the page speaks of."""
    record, trace = request(
        stream=True,
        usage=Usage(1200, 1024, 180),
        events=182,
        wait=Wait.FULL,
        key="team-a",
        flow="user-7",
        alias="fast",
        failed=(("gpu-1", "upstream_503"),),
        predicted_cached_tokens=1024.0,
    )
    place(record, trace, ONE, 100.0, 100.0)
    trace.failed("upstream_503", 100.02)
    place(record, trace, OTHER, 100.02, 100.31)
    record.first_byte_at = 100.5
    record.decision = decision(100.31, cost=210.0)
    return spans_of(record)


def split_example() -> list[Span]:
    """A request whose prompt was computed at another endpoint."""
    record, trace = request()
    split(record, trace, at=100.0)
    trace.prefilled(102.0)
    trace.placed(OTHER, 102.0, 102.0, DECODE)
    return spans_of(record)


def word(span: Span) -> str:
    return KINDS.get(span.name, "request")


def test_the_example_is_what_comes_out() -> None:
    spans = example()
    start = spans[0].begin_ns
    lines = []
    for span in sorted(spans, key=lambda one: (one.begin_ns, -one.end_ns)):
        begin, end = ((at - start) / 1e9 for at in (span.begin_ns, span.end_ns))
        name = span.name if span.kind == SERVER else f"  {span.name}"
        facts = [str(span.attributes[key]) for key in ("lbproxy.endpoint", "error.type") if key in span.attributes]
        facts += [f"{event} at {(at - start) / 1e9:.2f} s" for event, at in span.events.items()]
        lines.append(f"{name:28}{begin:5.2f} - {end:5.2f} s   {', '.join(facts)}".rstrip() + "\n")
    expect_generated(PAGE, "example", f"```\n{''.join(lines)}```\n")


def test_the_page_has_every_attribute() -> None:
    """The words after the colon are a human's."""
    refused, _ = request(method="BREW", outcome=Outcome.UPSTREAM_BROKE)
    found: dict[str, dict[str, None]] = {}
    for span in [*example(), *split_example(), *spans_of(refused)]:
        for name in span.attributes:
            found.setdefault(name, {})[word(span) if span.kind != SERVER else "request"] = None
    kept = dict(re.findall(r"^- `([\w.]+)` \([a-z, ]+\): (.*)$", generated(PAGE, "attributes"), re.MULTILINE))
    lines = [f"- `{name}` ({', '.join(words)}): {kept.get(name, '')}\n" for name, words in sorted(found.items())]
    expect_generated(PAGE, "attributes", "".join(lines))
    assert all(kept.get(name) for name in found), "an attribute without a word about it"
