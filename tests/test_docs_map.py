# SPDX-License-Identifier: Apache-2.0
"""Every page is found: by its job in docs/README.md, each decision by its subject; and the pages stay short."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.docs import DOCS

DECISIONS = DOCS / "decisions"
MOST_WORDS = 46_150
"""Of docs/*.md, as `wc -w` counts them. This number only shrinks: a fact stands on one page, the others link."""


def listed(page: Path) -> list[str]:
    """The pages beside it to which it links, each as often as it does."""
    return sorted(re.findall(r"\]\(([\w-]+\.md)\)", page.read_text(encoding="utf-8")))


def test_the_map_has_each_page_once() -> None:
    assert listed(DOCS / "README.md") == sorted(one.name for one in DOCS.glob("*.md") if one.name != "README.md")


def test_each_decision_stands_once_under_a_subject_with_its_title() -> None:
    index = DECISIONS / "README.md"
    pages = sorted(DECISIONS.glob("0*.md"))
    assert listed(index) == [one.name for one in pages]
    for page in pages:
        number, _, title = page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ").partition(". ")
        assert f"- [{number}]({page.name}) {title}\n" in index.read_text(encoding="utf-8")


def test_the_pages_stay_short() -> None:
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in DOCS.glob("*.md")}
    assert sum(words.values()) <= MOST_WORDS, f"shorten one of the longest: {sorted(words, key=words.__getitem__)[-5:]}"
