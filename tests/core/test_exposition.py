"""The scanner reads wanted families as prometheus_client's parser does, skips the rest, and survives any bytes."""

from __future__ import annotations

import statistics
import timeit
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from lbproxy.core.exposition import MAX_CANDIDATES, MAX_LABELS, MAX_LINE_BYTES, MAX_SAMPLES, Sample, scan

PAGES = sorted((Path(__file__).parents[1] / "fixtures" / "metrics").glob("*.prom"))
VLLM = frozenset(
    {
        b"vllm:num_requests_waiting",
        b"vllm:num_requests_running",
        b"vllm:kv_cache_usage_perc",
        b"vllm:gpu_cache_usage_perc",
        b"vllm:cache_config_info",
        b"vllm:lora_requests_info",
    }
)


def comparable(samples: list[Sample]) -> list[tuple[dict[str, str], str, float | None]]:
    """Values by repr, since NaN equals nothing."""
    return [(s.labels, repr(s.value), s.timestamp) for s in samples]


def oracle(page: bytes, families: frozenset[bytes]) -> dict[bytes, list[Sample]]:
    found: dict[bytes, list[Sample]] = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            if sample.name.encode() in families:
                # The parser turns milliseconds into seconds.
                stamp = None if sample.timestamp is None else float(round(float(sample.timestamp) * 1000))
                found.setdefault(sample.name.encode(), []).append(Sample(sample.labels, float(sample.value), stamp))
    return found


def assert_as_oracle(page: bytes, families: frozenset[bytes]) -> None:
    ours, theirs = scan(page, families), oracle(page, families)
    assert {name: comparable(s) for name, s in ours.items()} == {name: comparable(s) for name, s in theirs.items()}


# --- Recorded pages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_recorded_page_reads_as_the_oracle_does(path: Path) -> None:
    page = path.read_bytes()
    assert_as_oracle(page, VLLM)
    assert b"vllm:cache_config_info" in scan(page, VLLM), "an empty comparison would prove nothing"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_family_of_a_recorded_page_reads_as_the_oracle_does(path: Path) -> None:
    """Histograms and counters too: not wanted today, but the same grammar."""
    page = path.read_bytes()
    names = {line.split(b"{")[0].split(b" ")[0] for line in page.splitlines() if not line.startswith(b"#")}
    # The oracle renames counters that do not end in _total.
    assert_as_oracle(page, frozenset(name for name in names if not name.endswith(b"_created")))


def test_cost_of_a_recorded_page_is_printed() -> None:
    """Figures for `pytest -s`; only the equality is asserted, a busy machine may take any time."""
    page = max((path.read_bytes() for path in PAGES), key=len)
    ours = statistics.median(timeit.repeat(lambda: scan(page, VLLM), number=1, repeat=50))
    theirs = statistics.median(timeit.repeat(lambda: oracle(page, VLLM), number=1, repeat=3))
    print(f"\nscan of {len(page)} bytes: {ours * 1e6:.0f} µs; prometheus_client: {theirs * 1e6:.0f} µs")
    assert_as_oracle(page, VLLM)


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


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(sample_lines() | COMMENTS, max_size=12), st.sets(st.sampled_from(NAMES), min_size=1))
def test_generated_page_reads_as_the_oracle_does(lines: list[str], wanted: set[str]) -> None:
    page = "".join(line + "\n" for line in lines).encode()
    assert_as_oracle(page, frozenset(name.encode() for name in wanted))


# --- What the format says ---------------------------------------------------------------------------------------------


def one(line: bytes) -> Sample | None:
    samples = scan(line + b"\n", {b"m"}).get(b"m", [])
    assert len(samples) < 2
    return samples[0] if samples else None


def test_first_line_of_the_page_counts() -> None:
    assert scan(b"m 1\nm 2\n", {b"m"}) == {b"m": [Sample({}, 1.0), Sample({}, 2.0)]}


def test_family_of_which_another_is_a_prefix_is_not_mixed_up() -> None:
    """`num_requests_waiting_by_reason` would double the queue."""
    page = b'm_by{a="1"} 7\nm{a="2"} 8\nmm 9\nm5 6\n# m 10\n'
    assert scan(page, {b"m"}) == {b"m": [Sample({"a": "2"}, 8.0)]}


def test_last_line_without_line_feed_is_skipped() -> None:
    """A page cut off within `1234` must not read as 12."""
    assert scan(b"m 1\nm 12", {b"m"}) == {b"m": [Sample({}, 1.0)]}


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
    assert scan(good + line + b"\n" + good, {b"m"}) == {b"m": [Sample({"ok": "1"}, 5.0)] * 2}


# --- Hostile pages ----------------------------------------------------------------------------------------------------


def test_endless_samples_are_capped() -> None:
    page = b'm{a="1"} 1\n' * 1_000_000  # 11 MB
    assert len(scan(page, {b"m"})[b"m"]) == MAX_SAMPLES


def test_endless_names_that_only_begin_like_the_family_are_capped() -> None:
    assert scan(b"m_x 1\n" * (MAX_CANDIDATES - 1) + b"m 1\n", {b"m"}) == {b"m": [Sample({}, 1.0)]}
    assert scan(b"m_x 1\n" * 2_000_000 + b"m 1\n", {b"m"}) == {}


def test_long_line_is_skipped_alone() -> None:
    room = MAX_LINE_BYTES - len(b'{a=""} 1') - 1
    fits, long = (b'm{a="' + b"x" * size + b'"} 1\n' for size in (room, room + 1))
    assert len(scan(fits + long + b"m 2\n" + long, {b"m"})[b"m"]) == 2


def test_single_line_of_two_megabytes_is_skipped() -> None:
    assert scan(b"m{" + b'a="1",' * 350_000 + b"} 1\nm 2\n", {b"m"}) == {b"m": [Sample({}, 2.0)]}
    assert scan(b"m " * 1_000_000, {b"m"}) == {}


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
    assert scan((line + b"\n") * 500, {b"m"}) == {}


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(
        st.binary(max_size=20) | st.sampled_from([b"\nm", b"{", b'a="', b'"', b"}", b" 1", b"\n", b"\0", b"\\", b","])
    )
)
def test_garbage_never_raises(parts: list[bytes]) -> None:
    for sample in scan(b"".join(parts), {b"m", b"m_x", b"\n"}).get(b"m", []):
        assert isinstance(sample.value, float)
