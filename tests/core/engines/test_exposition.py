# SPDX-License-Identifier: Apache-2.0
"""The scanner reads wanted families as prometheus_client's parser does, skips the rest, and survives any bytes."""

from __future__ import annotations

import re
import statistics
import timeit
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from lbproxy.core.engines.dialects import ENGINES
from lbproxy.core.engines.exposition import (
    MAX_KNOWN_CHARS,
    MAX_LABELS,
    MAX_LINE_BYTES,
    MAX_LINES,
    MAX_PARSED_BYTES,
    MAX_SAMPLES,
    KnownLabels,
    Sample,
    Samples,
    Scanner,
)
from lbproxy.core.engines.readings import PageReader

PAGES = sorted((Path(__file__).parents[2] / "fixtures" / "metrics").rglob("*.prom"))
WANTED = frozenset(family for table in ENGINES.values() for family in table.families())


def scan(page: bytes, families: Iterable[str], known: KnownLabels | None = None) -> Samples:
    return Scanner(families).scan(page, known)


def comparable(samples: list[Sample]) -> list[tuple[dict[str, str], str, float | None]]:
    """Values by repr, since NaN equals nothing."""
    return [(dict(s.labels), repr(s.value), s.timestamp) for s in samples]


def oracle(page: bytes, families: frozenset[str]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            if sample.name in families:
                # The parser turns milliseconds into seconds.
                stamp = None if sample.timestamp is None else float(round(float(sample.timestamp) * 1000))
                found.setdefault(sample.name, []).append(Sample(sample.labels, float(sample.value), stamp))
    return found


def assert_as_oracle(page: bytes, families: frozenset[str]) -> None:
    """Twice with the same memory: what is known of labels must not change what is read."""
    theirs = {name: comparable(s) for name, s in oracle(page, families).items()}
    known = KnownLabels()
    for _ in range(2):
        ours = scan(page, families, known)
        assert {name: comparable(s) for name, s in ours.items()} == theirs


# --- Recorded pages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_recorded_page_reads_as_the_oracle_does(path: Path) -> None:
    page = path.read_bytes()
    assert_as_oracle(page, WANTED)
    if "without-gauges" not in path.stem:
        assert scan(page, WANTED), "an empty comparison would prove nothing"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_family_of_a_recorded_page_reads_as_the_oracle_does(path: Path) -> None:
    """Histograms and counters too: not wanted today, but the same grammar."""
    page = path.read_text()
    names = {re.split("[{ ]", line)[0] for line in page.splitlines() if line and not line.startswith("#")}
    # The oracle renames counters that do not end in _total.
    renamed = {
        name for name in re.findall("^# TYPE (\\S+) counter$", page, re.MULTILINE) if not name.endswith("_total")
    }
    assert_as_oracle(page.encode(), frozenset(names - renamed - {name for name in names if name.endswith("_created")}))


def test_cost_of_a_recorded_page_is_printed() -> None:
    """Figures for `pytest -s`; only the equality is asserted, a busy machine may take any time."""
    page = max((path.read_bytes() for path in PAGES if path.stem.startswith("vllm")), key=len)
    reader = PageReader(ENGINES["vllm"], keep_s=0.0)
    ours = statistics.median(
        timeit.repeat(lambda: reader.read(page, scraped_at=0.0, wall_time=0.0), number=1, repeat=50)
    )
    theirs = statistics.median(timeit.repeat(lambda: oracle(page, WANTED), number=1, repeat=3))
    print(f"\nreading {len(page)} bytes: {ours * 1e6:.0f} µs; prometheus_client: {theirs * 1e6:.0f} µs")
    assert_as_oracle(page, WANTED)


# --- Generated pages --------------------------------------------------------------------------------------------------

NAMES = ["q", "q_total", "q_by_reason", "qq", "vllm:q", "vllm:q_by_reason", "a:q"]
LABEL_NAMES = ["a", "b", "engine", "_x", "le", "A9"]
VALUES = st.one_of(
    st.floats().map(repr),
    st.integers(-(10**20), 10**20).map(str),
    st.sampled_from(["+Inf", "-Inf", "Inf", "NaN", "nan", "1e5", "1E-7", "1.5e+300", "1.", ".5", "+3", "1e999"]),
)


@st.composite
def sample_lines(draw: st.DrawFn) -> str:
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
        ['"', "\\", "\n", "}", ",", "\\n"]
    )
    labels = draw(st.dictionaries(st.sampled_from(LABEL_NAMES), text))
    quoted = {k: v.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for k, v in labels.items()}
    blank = draw(st.sampled_from(["", " ", "  "]))
    inside = f"{blank},{blank}".join(f'{k}{blank}={blank}"{v}"' for k, v in quoted.items())
    comma = draw(st.sampled_from(["", ","])) if labels else ""
    empty = draw(st.sampled_from(["", "{}"]))
    braces = f"{{{blank}{inside}{comma}{blank}}}" if labels else empty
    stamp = draw(st.none() | st.integers(-(10**12), 10**13))
    end = "" if stamp is None else f" {stamp}"
    between = draw(st.sampled_from([" ", "  "]))
    return f"{draw(st.sampled_from(NAMES))}{blank}{braces}{between}{draw(VALUES)}{end}{blank}"


COMMENTS = st.sampled_from(
    [
        "",
        "# HELP q Help with q 1 in it",
        "# TYPE q gauge",
        "# q 5",
        "#q 5",
        "# HELP q_by_reason x",
        "# TYPE vllm:q untyped",
        "# EOF",
    ]
)


@settings(max_examples=400, derandomize=True)
@given(st.lists(sample_lines() | COMMENTS, max_size=12), st.sets(st.sampled_from(NAMES), min_size=1))
def test_generated_page_reads_as_the_oracle_does(lines: list[str], wanted: set[str]) -> None:
    page = "".join(line + "\n" for line in lines).encode()
    assert_as_oracle(page, frozenset(wanted))


@settings(max_examples=200, derandomize=True)
@given(st.lists(st.lists(sample_lines(), max_size=6), max_size=4))
def test_what_is_known_of_earlier_pages_changes_nothing(pages: list[list[str]]) -> None:
    known = KnownLabels()
    for lines in pages:
        page = "".join(line + "\n" for line in lines).encode()
        ours = {name: comparable(s) for name, s in scan(page, NAMES, known).items()}
        assert ours == {name: comparable(s) for name, s in oracle(page, frozenset(NAMES)).items()}


# --- What the format says ---------------------------------------------------------------------------------------------


def one(line: bytes) -> Sample | None:
    samples = scan(line + b"\n", {"m"}).get("m", [])
    assert len(samples) < 2
    return samples[0] if samples else None


def test_first_line_of_the_page_counts() -> None:
    assert scan(b"m 1\nm 2\n", {"m"}) == {"m": [Sample({}, 1.0), Sample({}, 2.0)]}


def test_family_of_which_another_is_a_prefix_is_not_mixed_up() -> None:
    """`num_requests_waiting_by_reason` would double the queue."""
    page = b'm_by{a="1"} 7\nm{a="2"} 8\nmm 9\nm5 6\n# m 10\n'
    assert scan(page, {"m"}) == {"m": [Sample({"a": "2"}, 8.0)]}


def test_last_line_without_line_feed_is_skipped() -> None:
    """A page cut off within `1234` must not read as 12."""
    assert scan(b"m 1\nm 12", {"m"}) == {"m": [Sample({}, 1.0)]}


def test_escapes_in_label_values() -> None:
    assert one(rb'm{a="q\"b\\n\n}, x=\"y",b="\t"} 1') == Sample({"a": 'q"b\\n\n}, x="y', "b": r"\t"}, 1.0)


def test_timestamp_is_kept() -> None:
    assert one(b'm{a="b"} 1 1700000000123') == Sample({"a": "b"}, 1.0, 1700000000123.0)


@pytest.mark.parametrize(
    "line",
    [
        b"m",
        b"m ",
        b"m{",
        b"m{}",
        b"m} 1",
        b'm{a="1" 1',
        b"m{a=1} 1",
        b'm{a="1} 1',
        b'm{a="1\\"} 1',
        b'm{="1"} 1',
        b'm{9a="1"} 1',
        b'm{a="1" b="2"} 1',
        b'm{a="1",,b="2"} 1',
        b'm{a="1",a="2"} 1',
        b'm{a="\xff"} 1',
        b"m one",
        b"m 1_000",
        b"m 0x10",
        b"m 1 2 3",
        b"m 1 2.5",
        b"m 1 # {} 1",
        b"m 1\r",
        b"m\x001",
        "m \u0661".encode(),
    ],
)
def test_bad_line_is_skipped_alone(line: bytes) -> None:
    good = b'm{ok="1"} 5\n'
    assert scan(good + line + b"\n" + good, {"m"}) == {"m": [Sample({"ok": "1"}, 5.0)] * 2}


# --- Hostile pages ----------------------------------------------------------------------------------------------------


def test_endless_samples_are_capped() -> None:
    page = b'm{a="1"} 1\n' * (MAX_SAMPLES + 10)
    assert len(scan(page, {"m"})["m"]) == MAX_SAMPLES
    assert len(scan(b"m 1\nn 1\n" * MAX_SAMPLES, {"m", "n"})["n"]) == MAX_SAMPLES // 2, "of all families together"


def test_names_that_only_begin_like_the_family_do_not_count() -> None:
    assert scan(b"m_x 1\n" * 40_000 + b"m 1\n", {"m"}) == {"m": [Sample({}, 1.0)]}


def test_page_of_too_many_lines_is_not_looked_at() -> None:
    """Each line costs, however empty: two megabytes of line feeds would stop the loop for 20 ms."""
    fill = b"x" * 10 + b"\n"
    assert scan(fill * (MAX_LINES - 1) + b"m 1\n", {"m"}) == {"m": [Sample({}, 1.0)]}
    assert scan(fill * MAX_LINES + b"m 1\n", {"m"}) == {}
    assert scan(b"m 1\n" + b"\n" * 2_000_000, {"m"}) == {}


def test_parsing_is_capped_but_what_is_known_is_free() -> None:
    """New labels cost most. A page of different ones is cut short; one as large with the same again is read whole."""
    size = len(b'm{a="",b="0000"} 1')
    count = MAX_PARSED_BYTES // size + 100
    assert count < MAX_SAMPLES * 2
    pad = b"p" * 80
    lines = [b'm{a="%s",b="%04d"} 1\n' % (pad, n) for n in range(MAX_PARSED_BYTES // 80)]
    assert 0 < len(scan(b"".join(lines), {"m"})["m"]) < len(lines)
    assert len(scan(lines[0] * len(lines), {"m"})["m"]) == len(lines)


def test_memory_of_labels_is_capped() -> None:
    known = KnownLabels()
    for n in range(10_000):
        known.add(f'{{a="{n:010}"}}', {"a": f"{n:010}"})
    kept = sum(len(text) for text in (f'{{a="{n:010}"}}' for n in range(10_000)) if known.get(text) is not None)
    assert 0 < kept <= MAX_KNOWN_CHARS
    assert known.get('{a="0000000000"}') is not None, "what came first stays"


def test_long_line_is_skipped_alone() -> None:
    room = MAX_LINE_BYTES - len(b'{a=""} 1')
    fits, long = (b'm{a="' + b"x" * size + b'"} 1\n' for size in (room, room + 1))
    assert len(scan(fits + long + b"m 2\n" + long, {"m"})["m"]) == 2


def test_single_line_of_two_megabytes_is_skipped() -> None:
    assert scan(b"m{" + b'a="1",' * 350_000 + b"} 1\nm 2\n", {"m"}) == {"m": [Sample({}, 2.0)]}
    assert scan(b"m " * 1_000_000, {"m"}) == {}


def test_too_many_labels_are_skipped() -> None:
    def line(labels: int) -> bytes:
        return b"m{" + b",".join(b'l%d="x"' % i for i in range(labels)) + b"} 1"

    kept = one(line(MAX_LABELS))
    assert kept is not None
    assert len(kept.labels) == MAX_LABELS
    assert one(line(MAX_LABELS + 1)) is None
    assert one(line(100_000)) is None


@pytest.mark.parametrize(
    "line",
    [
        b"m " + b"1" * 16_000 + b"x",
        b"m " + b" " * 16_000 + b"x",
        b"m 1" + b" " * 16_000 + b"x",
        b"m{" + b" " * 16_000,
        b'm{a="' + b"\\" * 16_000,
        b'm{a="' + b'\\"' * 8_000,
        b"m{" + b"a" * 16_000,
        b"m{" + b'a="",' * 3_000 + b"x",
        b"m 1e" + b"9" * 16_000 + b"e",
    ],
)
def test_line_made_for_backtracking_is_refused(line: bytes) -> None:
    """Repeated 500 times: a pattern that looks at characters twice would run into the test's time limit."""
    assert scan((line + b"\n") * 500, {"m"}) == {}


@settings(max_examples=300, derandomize=True)
@given(
    st.lists(
        st.binary(max_size=20) | st.sampled_from([b"\nm", b"{", b'a="', b'"', b"}", b" 1", b"\n", b"\0", b"\\", b","])
    )
)
def test_garbage_never_raises(parts: list[bytes]) -> None:
    for sample in scan(b"".join(parts), {"m", "m_x", "m:"}).get("m", []):
        assert isinstance(sample.value, float)
