# SPDX-License-Identifier: Apache-2.0
"""Prometheus text (format 0.0.4) -> the samples of the wanted families, and nothing else.

A server's page has 48 to 88 KB and is read five times a second for each endpoint, while only about six of its hundred
families are needed. A general parser reads about 4 MB/s. Here one pass of one regular expression finds the lines that
begin with a wanted name; their labels, which are the same on every scrape, are looked up, not parsed again.
tests/core/engines/test_exposition.py compares this with prometheus_client's parser, its oracle.

A page can do no harm: whatever the bytes, nothing is raised, and the work is linear in the page with the limits below.
A line that exceeds a limit or violates the grammar is skipped, and the others count. Differences from the format:

- A family is found only at the very start of a line. Leading blanks, which no exporter writes, hide it.
- A last line without its line feed is skipped: a truncated page may end inside a number.
- Comments, so also types, are not read: gauges, counters and untyped families are treated alike.

What values mean (NaN, negative, out of range) is decided in `core.engines.readings`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple, TypeAlias

MAX_LINES = 50_000
"""A page with more lines is ignored. vLLM with 64 data-parallel ranks has about 20,000."""
UNCOUNTED_BYTES = 256 * 1024
"""Counting lines takes as long as finding the wanted ones, so up to this size a page may have any number of them."""
MAX_LINE_BYTES = 16 * 1024
"""The longest line after the name. vLLM 0.32's longest, `vllm:cache_config_info`, has 1.5 KB."""
MAX_SAMPLES = 4096
"""Wanted lines that are read, malformed ones included. 64 ranks with 8 model names have 1,600."""
MAX_LABELS = 128
"""Labels of one series; `vllm:cache_config_info` has 37."""
MAX_PARSED_BYTES = 128 * 1024
"""All wanted lines of a page, without labels that were known. 64 ranks have 105 KB; the worst case takes 10 ms."""
MAX_KNOWN_CHARS = 64 * 1024
"""The labels that are kept between pages, for each endpoint. vLLM's have 2 KB, or 50 KB with 32 ranks."""

Labels: TypeAlias = Mapping[str, str]


class Sample(NamedTuple):
    """The value of one series on the page."""

    labels: Labels
    """In the order of the page. Shared between scrapes: must not be changed."""
    value: float
    """Any float, including NaN and the infinities."""
    timestamp: float | None = None
    """Milliseconds since the epoch, as given on the page; almost no exporter does that."""


Samples: TypeAlias = Mapping[str, list[Sample]]
"""The samples of each wanted family, in the order of the page; a family without any is absent."""


class KnownLabels:
    """The labels of an endpoint's earlier pages by their text, braces included. When it is full, nothing is added."""

    def __init__(self) -> None:
        self._by_text: dict[str, Labels] = {}
        self._room = MAX_KNOWN_CHARS

    def get(self, text: str) -> Labels | None:
        return self._by_text.get(text)

    def add(self, text: str, labels: Labels) -> None:
        """Store the labels, if there is room."""
        if len(text) <= self._room:
            self._room -= len(text)
            self._by_text[text] = labels


class Scanner:
    """Finds the samples of some families on pages."""

    def __init__(self, families: Iterable[str]) -> None:
        """Names match exactly: `a` does not match `a_total` or `a_bucket`."""
        names = _any_of(sorted(set(families)))
        # Possessive: each line is scanned once. `.` matches anything but a line feed.
        line = rf"({names})(?=[{{ \t])(.{{1,{MAX_LINE_BYTES}}}+)(?=\n)"
        self._first_line = re.compile(line.encode())
        self._later_line = re.compile(b"\n" + line.encode())

    def scan(self, page: bytes, known: KnownLabels | None = None) -> Samples:
        """Return the samples on a page. `known`: filled by earlier pages of the same endpoint, and by this one for the
        next.

        Costs about 0.5 µs for each KB of the page and 2 µs for each sample, or 0.3 µs for each label if it is new.
        """
        found: dict[str, list[Sample]] = {}
        if len(page) > UNCOUNTED_BYTES and page.count(b"\n") > MAX_LINES:
            return found
        reader = _LineReader(KnownLabels() if known is None else known)
        first = self._first_line.match(page)
        lines = [first] if first else []
        for match in (*lines, *islice(self._later_line.finditer(page), MAX_SAMPLES - len(lines))):
            name, rest = match.groups()
            sample = reader.read(rest)
            if sample is not None:
                found.setdefault(name.decode(), []).append(sample)
        return found


def _any_of(names: list[str]) -> str:
    """A pattern for any of the distinct, sorted names. Common prefixes appear once: most lines of a page begin like a
    wanted one, and a flat alternation would compare each of them with every name.
    """
    branches: dict[str, list[str]] = {}
    for name in names:
        branches.setdefault(name[:1], []).append(name[1:])
    patterns = [re.escape(first) + _any_of(rest) if first else "" for first, rest in reversed(branches.items())]
    return patterns[0] if len(patterns) == 1 else f"(?:{'|'.join(patterns)})"


class _LineReader:
    """Reads what follows the name in the wanted lines of one page."""

    def __init__(self, known: KnownLabels) -> None:
        self._known = known
        self._budget = MAX_PARSED_BYTES

    def read(self, line: bytes) -> Sample | None:
        """The sample; None if the line is malformed or the page has used up its budget."""
        try:
            text = line.decode().lstrip(" \t")
        except UnicodeDecodeError:
            return None
        labels: Labels | None = _NO_LABELS
        position = 0
        if text[:1] == "{":
            position = text.rfind(" ")  # where the labels end, if there is no timestamp
            labels = self._known.get(text[:position]) if position > 0 else None
        self._budget -= len(text) - (position if labels is not None else 0)
        if self._budget < 0:
            return None
        if labels is None:
            labels, end = _read_labels(text)
            if labels is None:
                return None
            if end == position:
                self._known.add(text[:end], labels)
            position = end
        match = _VALUE.fullmatch(text, position)
        if match is None:
            return None
        return Sample(labels, float(match[1]), None if match[2] is None else float(match[2]))


_NO_LABELS: Labels = {}
_NAME = "[a-zA-Z_][a-zA-Z0-9_]*+"
_QUOTED = r'"([^"\\]*+(?:\\.[^"\\]*+)*+)"'
# Possessive throughout: no line, however hostile, makes these read a character twice.
_LABEL = re.compile(rf"({_NAME})[ \t]*+=[ \t]*+{_QUOTED}")
_LABELS = re.compile(rf"\{{(?:[ \t]*+{_LABEL.pattern}[ \t]*+(?:,|(?=\}})))*+[ \t]*+\}}")
# Python's float() also accepts "1_000", "infinity" with blanks and digits of other scripts; this is the format's
# grammar.
_VALUE = re.compile(
    r"[ \t]*+([+-]?(?:(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?|(?i:inf(?:inity)?|nan)))"
    r"(?:[ \t]++(-?[0-9]{1,18}+))?[ \t]*+"
)


def _read_labels(text: str) -> tuple[Labels | None, int]:
    """The labels in the braces at the start of `text`, None if they are malformed; and where they end."""
    braces = _LABELS.match(text)
    if braces is None:
        return None, 0
    pairs = _LABEL.findall(text, 0, braces.end())
    labels = dict(pairs)
    if len(labels) != len(pairs) or len(pairs) > MAX_LABELS:  # a name that occurs twice is ambiguous
        return None, 0
    if "\\" in text:
        labels = {name: _unescaped(value) for name, value in pairs}
    return labels, braces.end()


def _unescaped(value: str) -> str:
    # Pieces between escaped backslashes: what follows a backslash in one of them is not itself escaped.
    return "\\".join(piece.replace("\\n", "\n").replace('\\"', '"') for piece in value.split("\\\\"))
