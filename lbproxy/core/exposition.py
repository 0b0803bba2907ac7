"""Prometheus text (format 0.0.4) -> the samples of the wanted families, and nothing else.

A server's page has 48 to 64 KB and is read five times a second for each endpoint, while about six of its hundred
families matter. A general parser reads the whole page at about 4 MB/s; this scanner lets `bytes.find` skip what is
not wanted and parses only the lines that are left. tests/core/test_exposition.py holds it to prometheus_client's
parser, its oracle.

What a page can do to us is bounded: whatever the bytes, nothing is raised, and the work is linear in the page with
the caps below. A line that breaks a cap or the grammar is skipped alone. Beyond the format's letter:

- A family is found at the very start of a line; leading blanks, which no exporter writes, hide it.
- A last line without its line feed is skipped: a page that was cut off may have cut a number in two.
- Comments, so also types, are not read: gauges, counters and untyped families look alike.

What values mean (NaN, negative, out of range) is not judged here but in `core.engines`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

MAX_SAMPLES = 1024
"""Series of one family. A server with 64 data-parallel ranks and 8 model names has 512."""
MAX_CANDIDATES = 8 * MAX_SAMPLES
"""Line starts looked at for one family, names that only begin like it and bad lines included."""
MAX_LINE_BYTES = 16 * 1024
"""vLLM 0.32's longest line, `vllm:cache_config_info`, has 1.5 KB."""
MAX_LABELS = 128
"""Labels of one series; `vllm:cache_config_info` has 37."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One series' value on the page."""

    labels: dict[str, str]
    """In the order of the page. The caller's to keep."""
    value: float
    """Any float: NaN and the infinities too."""
    timestamp: float | None = None
    """Milliseconds since the epoch, as the page says; almost no exporter does."""


def scan(page: bytes, families: Iterable[bytes]) -> dict[bytes, list[Sample]]:
    """The samples of each wanted family, in the order of the page; a family without any is absent.

    Names match exactly: of `a`, `a_total` and `a_bucket`, `a` finds only itself. Costs one pass of `bytes.find` for
    each family and about 0.2 µs for each label found.
    """
    found = {}
    for family in families:
        samples = _scan_family(page, family)
        if samples:
            found[family] = samples
    return found


def _scan_family(page: bytes, family: bytes) -> list[Sample]:
    samples: list[Sample] = []
    for rest in islice(_ends_of_name(page, family), MAX_CANDIDATES):
        # Another family that only begins like this one is the usual miss: told by one byte, before any line is cut.
        if page[rest : rest + 1] not in _AFTER_NAME:
            continue
        end = page.find(b"\n", rest, rest + MAX_LINE_BYTES)
        sample = _read_line(page[rest:end]) if end >= 0 else None
        if sample is not None:
            samples.append(sample)
            if len(samples) == MAX_SAMPLES:
                break
    return samples


def _ends_of_name(page: bytes, family: bytes) -> Iterator[int]:
    """Where the name ends in each line that begins with it."""
    if page.startswith(family):
        yield len(family)
    needle = b"\n" + family
    start = page.find(needle)
    while start >= 0:
        rest = start + len(needle)
        yield rest
        start = page.find(needle, rest)


_AFTER_NAME = frozenset((b"{", b" ", b"\t"))
_NAME = "[a-zA-Z_][a-zA-Z0-9_]*+"
_QUOTED = r'"([^"\\]*+(?:\\.[^"\\]*+)*+)"'
# Possessive throughout: no line, however hostile, makes these look at a character twice.
_LABEL = re.compile(rf"({_NAME})[ \t]*+=[ \t]*+{_QUOTED}")
_LABELS = re.compile(rf"\{{(?:[ \t]*+{_LABEL.pattern}[ \t]*+(?:,|(?=\}})))*+[ \t]*+\}}")
# Python's float() also takes "1_000", "infinity" with blanks and other scripts' digits: this is the format's grammar.
_VALUE = re.compile(
    r"[ \t]*+([+-]?(?:(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?|(?i:inf(?:inity)?|nan)))"
    r"(?:[ \t]++(-?[0-9]{1,18}+))?[ \t]*+"
)
_ESCAPE = re.compile(r'\\([\\n"])')


def _read_line(line: bytes) -> Sample | None:
    """The sample that stands after a family's name, or None if it is malformed."""
    try:
        text = line.decode().lstrip(" \t")
    except UnicodeDecodeError:
        return None
    labels: dict[str, str] = {}
    position = 0
    if text.startswith("{"):
        braces = _LABELS.match(text)
        if braces is None:
            return None
        position = braces.end()
        pairs = _LABEL.findall(text, 0, position)
        labels = dict(pairs)
        if len(labels) != len(pairs) or len(pairs) > MAX_LABELS:  # one name twice: which value would be meant?
            return None
        if "\\" in text:
            labels = {name: _ESCAPE.sub(_unescape, value) for name, value in pairs}
    match = _VALUE.fullmatch(text, position)
    if match is None:
        return None
    return Sample(labels, float(match[1]), None if match[2] is None else float(match[2]))


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]
