# SPDX-License-Identifier: Apache-2.0
"""SECURITY.md: each threat names tests, and they are there; what it says of bounds is what the code says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from lbproxy.config.sections.access import MIN_SECRET_CHARS
from lbproxy.config.tree import MAX_ENDPOINTS
from lbproxy.control.admin import connections as admin
from lbproxy.control.admin.api import MAX_VIEWERS, STALLED_S
from lbproxy.control.families.requests import MAX_LABEL_CHARS, MAX_MODEL_LABELS
from lbproxy.net.listening.deadlines import LEAST_READ_RATE
from lbproxy.net.listening.listener import HANDSHAKE_S
from lbproxy.proxy.front.arrivals import GRACE_S, STOCK_S
from lbproxy.proxy.front.connection import MAX_BUFFERED_BYTES
from lbproxy.proxy.front.linger import LINGER_S, TLS_LINGER_S
from lbproxy.proxy.request.walk import MAX_EMPTY_BYTES, MAX_EXTENSION_BYTES
from lbproxy.proxy.sockets.socket_relay import FRAME_BYTES, PORTION_BYTES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()
DOES = PAGE.partition("\n## What lbproxy does\n")[2].partition("\n## ")[0]
BOUNDS = PAGE.partition("\n## Bounds of a connection, state by state\n")[2].partition("\n## ")[0]
THREATS = {part.partition("\n")[0]: part for part in DOES.split("\n### ")[1:]}


def named_by(threat: str) -> list[str]:
    return re.findall(r"^- `(tests/\S+)`$", THREATS[threat].partition("<!-- tests -->\n")[2], re.MULTILINE)


def exists(test: str) -> bool:
    path, _, name = test.partition("::")
    functions = {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}
    return name in functions


def test_each_state_of_a_connection_has_its_bounds_and_a_test_that_exists() -> None:
    """On both listeners and both sides: what may be sent, what is held, for how long."""
    lines = [line for line in BOUNDS.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rows = [row for row in rows if row[0] not in {"state", "---"}]
    assert len(rows) >= 27
    for row in rows:
        assert len(row) == 5, row
        test = re.fullmatch(r"`(\S+::\w+)`", row[-1])
        assert test is not None, row
        assert exists(f"tests/{test[1]}"), row


@pytest.mark.parametrize("threat", THREATS)
def test_each_threat_is_tried_by_tests_that_exist(threat: str) -> None:
    named = named_by(threat)
    assert named, "it names no test"
    assert [one for one in named if not exists(one)] == []


def test_the_page_names_every_threat_and_test_once() -> None:
    assert len(THREATS) == 11
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
        f"{MAX_BUFFERED_BYTES >> 10} KiB and one read, then it is not read",
        f"{MAX_EMPTY_BYTES} bytes of empty lines",
        f"{GRACE_S:g} s for the first byte, then at `body_rate`; {STOCK_S:g} s without a byte",
        f"{MAX_EXTENSION_BYTES >> 10} KiB of extensions",
        f"`client_stall` and {LEAST_READ_RATE >> 10} KiB a second; {LINGER_S:g} s when",
        f"its host has everything (TLS: {TLS_LINGER_S:g} s)",
        f"{admin.MAX_HEAD_BYTES >> 10} KiB, 128 fields, 8 KiB a line",
        f"{admin.HEAD_S:g} s from the head's first byte",
        f"{admin.MAX_UNSENT_BYTES >> 20} MiB of all connections",
        f"| {admin.STALL_S:g} s, and {LEAST_READ_RATE >> 10} KiB a second",
        f"{MAX_VIEWERS} streams; a frame each | {STALLED_S:g} s a frame",
        f"of `json_body`; {PORTION_BYTES >> 10} KiB or {PORTION_BYTES // FRAME_BYTES} frames at once",
    ):
        assert text in " ".join(PAGE.split()), text
