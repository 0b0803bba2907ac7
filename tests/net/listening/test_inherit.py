# SPDX-License-Identifier: Apache-2.0
"""What a process hands over to its successor: all of it, to that alone."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from lbproxy.net.listening.inherit import HandedOver, start_successor
from tests.support.aio import run

SUCCESSOR = """
import json, os, sys
from lbproxy.net.listening.inherit import Inherited
inherited = Inherited.from_environment(os.environ)
inherited.ready()
inherited.close()
links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd") if int(fd) > 2]
left = [os.readlink(link) for link in links if os.path.lexists(link) and "(deleted)" in os.readlink(link)]
seen = open("/proc/self/environ").read()
json.dump([inherited.drained, inherited.leased, left, seen], open(sys.argv[1], "w"))
"""


def handed_over(folder: Path, handed: HandedOver) -> list[list[str]]:
    """What a process reads that is started as a successor: the two kinds of lines; files without a name that are left
    open; and its environment, as other processes see it.
    """
    file = folder / "read"

    pid = run(start_successor([sys.executable, "-c", SUCCESSOR, str(file)], handed))
    assert pid is not None
    os.waitpid(pid, 0)
    read: list[list[str]] = json.loads(file.read_text())
    return read


@pytest.mark.parametrize("line", ["x" * 100, "\u00fc\u2028\U0001f600" * 12, "{" * 4096])
@pytest.mark.parametrize("memory", [True, False])
def test_as_many_endpoints_as_there_may_be_are_handed_over_and_shown_to_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, memory: bool
) -> None:
    """They may have keys, and a process's environment is shown by tools, to those who may not read its memory."""
    monkeypatch.setattr("lbproxy.net.listening.inherit.MEMORY", memory)
    lines = [f"{n} sk-{line}" for n in range(1024)]
    *handed, environ = handed_over(tmp_path, HandedOver({}, lines, lines[::-1]))
    assert handed == [lines, lines[::-1], []]
    assert "LBPROXY_PREDECESSOR" in environ
    assert "sk-" not in environ
