# SPDX-License-Identifier: Apache-2.0
"""SECURITY.md: each threat names tests, and they are there; what it says of bounds is what the code says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from lbproxy.config.sections.access import MIN_SECRET_CHARS
from lbproxy.config.tree import MAX_ENDPOINTS
from lbproxy.control.families.requests import MAX_LABEL_CHARS, MAX_MODEL_LABELS
from lbproxy.net.listening.listener import HANDSHAKE_S

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()
DOES = PAGE.partition("\n## What lbproxy does\n")[2].partition("\n## ")[0]
THREATS = {part.partition("\n")[0]: part for part in DOES.split("\n### ")[1:]}


def named_by(threat: str) -> list[str]:
    return re.findall(r"^- `(tests/\S+)`$", THREATS[threat].partition("<!-- tests -->\n")[2], re.MULTILINE)


@pytest.mark.parametrize("threat", THREATS)
def test_each_threat_is_tried_by_tests_that_exist(threat: str) -> None:
    named = named_by(threat)
    assert named, "it names no test"
    for one in named:
        path, _, name = one.partition("::")
        functions = {
            node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, one


def test_the_page_names_every_threat_and_test_once() -> None:
    assert len(THREATS) == 9
    named = [one for threat in THREATS for one in named_by(threat)]
    assert len(named) == len(set(named)) == len(re.findall(r"`tests/", PAGE))


def test_every_test_of_this_folder_is_named() -> None:
    """So that a new threat gets its paragraph."""
    for path in sorted((ROOT / "tests" / "security").glob("test_*.py")):
        if path.name != "test_threats.py":
            assert any(f"{path.name}::" in one for threat in THREATS for one in named_by(threat)), path.name


def test_the_bounds_on_the_page_are_those_of_the_code() -> None:
    for text in (
        f"at least {MIN_SECRET_CHARS} characters",
        f"after {HANDSHAKE_S:g} s",
        f"at most {MAX_MODEL_LABELS} models, {MAX_LABEL_CHARS} characters each",
        f"more of them than {MAX_ENDPOINTS:,}",
    ):
        assert text in " ".join(PAGE.split()), text
