# SPDX-License-Identifier: Apache-2.0
"""The documentation as data: its files, fenced blocks, tables, and the tables in it that are generated.

Conventions, all invisible to a reader of the page:

- `<!-- test: WORD -->` right above a fence says what a test does with the block (tests/e2e/test_docs.py has the words).
- What stands between `<!-- generated: NAME -->` and `<!-- end -->` is written by a test. With LBPROXY_WRITE_DOCS=1 in
  the environment such a test writes its table instead of comparing it; a last column that only a human can write is
  kept from what stood there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from prometheus_client import Metric

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted(DOCS.glob("**/*.md"))]

WRITE = "LBPROXY_WRITE_DOCS"

_BLOCK = re.compile(
    r"^(?:<!-- test: (?P<mark>[a-z ]+) -->\n)?^```(?P<language>[a-z]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


class Block(NamedTuple):
    """A fenced block."""

    page: Path
    line: int
    """Of the fence."""
    language: str
    mark: str
    """What its comment says; empty if there is none."""
    text: str

    def __str__(self) -> str:
        """Names the block in a test's id."""
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, one.start("language")) + 1, one["language"], one["mark"] or "", one["text"])
        for one in _BLOCK.finditer(text)
    ]


def all_blocks() -> list[Block]:
    """Those of every page."""
    return [block for page in PAGES for block in blocks(page)]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; bars in cells are escaped."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def cells(text: str) -> list[list[str]]:
    """The rows of the tables in a Markdown text, without their heads."""
    rows: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("| ---"):
            rows.pop()  # the head
        elif line.startswith("|"):
            rows.append([cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows


class Family(NamedTuple):
    """Of metrics, as docs/metrics.md has it."""

    name: str
    labels: list[str]
    is_histogram: bool


FAMILY = re.compile(r"^- `(lbproxy_\w+)(?:\{([a-z,]+)\})?`( \(histogram\))?: ", re.MULTILINE)


def family_lines(families: Iterable[Metric]) -> str:
    """A line for each, as `families` reads them."""
    lines = []
    for family in families:
        assert family.samples, f"{family.name} shows nothing: let the fixture bring it to"
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert name.endswith("_total") == (family.type == "counter"), "the page says that such names are counters"
        labels = ",".join(dict.fromkeys(one for sample in family.samples for one in sample.labels if one != "le"))
        kind = " (histogram)" if family.type == "histogram" else ""
        lines.append(f"- `{name}{f'{{{labels}}}' if labels else ''}`{kind}: {family.documentation}\n")
    return "".join(lines)


def families(what: str) -> list[Family]:
    """Those of a block of docs/metrics.md."""
    found = FAMILY.findall(generated(DOCS / "metrics.md", what))
    return [Family(name, [*filter(None, labels.split(","))], bool(kind)) for name, labels, kind in found]


def generated(page: Path, name: str) -> str:
    """What stands between a page's two markers."""
    return _between(page, name)[1]


def expect_generated(page: Path, name: str, text: str) -> None:
    """Assert that the page has exactly this text between its markers, or write it there."""
    before, found, after = _between(page, name)
    if os.environ.get(WRITE):
        page.write_text(f"{before}{text}{after}", encoding="utf-8")
        return
    shown = page.relative_to(ROOT)
    assert found == text, (
        f"{shown}: `{name}` is not what the code says. Write it anew (and read it) with\n"
        f"    {WRITE}=1 .venv/bin/python -m pytest -q tests/test_docs*.py tests/e2e/test_docs.py"
    )


def _between(page: Path, name: str) -> tuple[str, str, str]:
    text = page.read_text(encoding="utf-8")
    begin, end = f"<!-- generated: {name} -->\n\n", "\n<!-- end -->\n"
    before, found, rest = text.partition(begin)
    inside, closed, after = rest.partition(end)
    assert found, f"{page.name} has no marker {begin.strip()}"
    assert "<!-- generated: " not in inside, f"{page.name}: `{name}` has no end of its own, after an empty line"
    assert closed, f"{page.name} has no {end.strip()} after {begin.strip()}"
    return before + begin, inside, end + after
