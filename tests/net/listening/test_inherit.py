# SPDX-License-Identifier: Apache-2.0
"""What a process hands over to its successor in variables: all of it, within the system's limits."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from lbproxy.net.listening.inherit import MAX_LINES_BYTES, HandedOver, start_successor
from tests.support.aio import run

SUCCESSOR = """
import json, os, sys
from lbproxy.net.listening.inherit import Inherited
inherited = Inherited.from_environment(os.environ)
left = [name for name in os.environ if name.startswith(("LBPROXY_DRAINED", "LBPROXY_LEASES"))]
json.dump([inherited.drained, inherited.leased, left], open(sys.argv[1], "w"))
inherited.ready()
"""


def handed_over(folder: Path, handed: HandedOver) -> list[list[str]]:
    """What a process reads that is started as a successor: the two kinds of lines; and variables that are left."""
    file = folder / "read"

    pid = run(start_successor([sys.executable, "-c", SUCCESSOR, str(file)], handed))
    assert pid is not None
    os.waitpid(pid, 0)
    read: list[list[str]] = json.loads(file.read_text())
    return read


@pytest.mark.parametrize("line", ["x" * 100, "\u00fc\u2028\U0001f600" * 12])
def test_as_many_endpoints_as_there_may_be_are_handed_over(tmp_path: Path, line: str) -> None:
    lines = [f"{n} {line}" for n in range(1024)]
    assert handed_over(tmp_path, HandedOver({}, lines, lines[::-1])) == [lines, lines[::-1], []]


def test_what_the_system_would_not_take_is_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = ["x" * (MAX_LINES_BYTES // 2 - 10)] * 3
    assert handed_over(tmp_path, HandedOver({}, [], lines)) == [[], lines[:2], []]
    assert "too many endpoints are registered: the new process is not told of the last 1" in caplog.text
