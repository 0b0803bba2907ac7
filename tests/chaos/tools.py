# SPDX-License-Identifier: Apache-2.0
"""Faults that need this machine's permission: packets dropped or refused, limits, memory groups.

Each says whether it can be had; a test that needs one which cannot skips, and says so: it does not pass. Rules are made
for one port of 127.0.0.1 and taken away with the `with` block.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MEMORY = Path("/sys/fs/cgroup/memory")


def skip(what: str) -> None:
    """Say loudly that this test did not run."""
    pytest.skip(f"NOT TESTED here: {what}")


def _run(*words: str) -> bool:
    done = subprocess.run(words, capture_output=True, check=False)
    return done.returncode == 0


def need_program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        skip(f"no {name} on this machine")
    assert path is not None
    return path


@contextmanager
def packets(port: int, *, to: str, how: tuple[str, ...] = (), replies: bool = False) -> Iterator[None]:
    """Let the kernel do `to` (DROP, REJECT) to packets for a port of this machine. `replies`: and to those from it."""
    need_program("iptables")
    directions = ["--dport", *(["--sport"] if replies else [])]
    rules = [("-i", "lo", "-p", "tcp", side, str(port), *how, "-j", *to.split()) for side in directions]
    made = []
    try:
        for rule in rules:
            if not _run("iptables", "-w", "-I", "INPUT", *rule):
                skip(f"iptables refuses: {' '.join(rule)}")
            made.append(rule)
        yield
    finally:
        for rule in made:
            _run("iptables", "-w", "-D", "INPUT", *rule)


@contextmanager
def memory_group(size_bytes: int) -> Iterator[Path]:
    """A memory cgroup (version 1) of this size; processes join it by writing to its cgroup.procs."""
    group = MEMORY / f"lbproxy-chaos-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(size_bytes))
    except OSError as error:
        skip(f"no memory cgroup: {error}")
    try:
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (MEMORY / "cgroup.procs").write_text(pid)
        for _ in range(100):  # a process that was killed leaves a moment later
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)
