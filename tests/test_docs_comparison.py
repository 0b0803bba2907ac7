# SPDX-License-Identifier: Apache-2.0
"""docs/comparison.md: each claim about lbproxy names a test that is there, each claim about others has its source."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.support.docs import DOCS, ROOT, cells

SECTIONS = {
    part.partition("\n")[0]: part for part in (DOCS / "comparison.md").read_text(encoding="utf-8").split("\n## ")[1:]
}
OURS = SECTIONS.pop("What lbproxy does, and which test shows it")
CLAIMS = cells(OURS)
PAGE = re.compile(r"\]\(([a-z-]+\.md)")


@cache
def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim[0][:40])
def test_a_claim_about_lbproxy_names_tests_that_exist(claim: list[str]) -> None:
    named = re.findall(r"`(tests/[^`]+)`", claim[1])
    assert named, "it names no test"
    for one in named:
        path, _, name = one.partition("::")
        assert name in functions(path), one


@pytest.mark.parametrize("section", SECTIONS)
def test_a_claim_about_others_has_a_source_and_what_lbproxy_has_is_claimed_above(section: str) -> None:
    """Ours is "no", or leads to a page of something whose test the page names; or to the reference of all settings."""
    claimed = {page for what, _ in CLAIMS for page in PAGE.findall(what)}
    rows = cells(SECTIONS[section])
    assert rows
    for what, theirs, ours in rows:
        assert "](http" in theirs, f"no source: {what}"
        pages = set(PAGE.findall(ours))
        assert pages or ours.startswith(("no", "HTTP/1.1")), f"{what}: {ours}"
        assert pages <= claimed, f"{what}: {pages - claimed}"


@pytest.mark.parametrize("section", SECTIONS)
def test_each_section_says_when_to_choose_them(section: str) -> None:
    """With the row of the first table that leads there."""
    assert re.search(r"\*\*Choose (it|them)\s+instead\*\*", SECTIONS[section])
    anchor = re.sub(r"[^a-z0-9 -]", "", section.lower()).replace(" ", "-")
    assert f"](#{anchor})" in (DOCS / "comparison.md").read_text(encoding="utf-8").partition("\n## ")[0]
