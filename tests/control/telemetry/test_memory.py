# SPDX-License-Identifier: Apache-2.0
"""What memory we may have, from the kernel's files as they stand in containers and outside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lbproxy.control.telemetry.memory import Memory, cgroup_limits


@pytest.mark.parametrize(
    ("membership", "files", "limits"),
    [
        pytest.param("0::/", {"memory.max": "268435456"}, [268435456], id="v2, in a container"),
        pytest.param("0::/", {"memory.max": "max"}, [], id="v2, unlimited"),
        pytest.param(
            "0::/system.slice/lbproxy.service",
            {"system.slice/lbproxy.service/memory.max": "1000000", "system.slice/memory.max": "500000"},
            [1000000, 500000],
            id="v2, a parent counts too",
        ),
        pytest.param(
            "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/x",
            {"memory/memory.limit_in_bytes": "536870912"},
            [536870912],
            id="v1, in a container that sees the host's path",
        ),
        pytest.param("0::/x", {"memory.max": "garbage"}, [], id="garbage"),
        pytest.param("", {}, [], id="no cgroups"),
    ],
)
def test_the_limits_of_a_cgroup(tmp_path: Path, membership: str, files: dict[str, str], limits: list[int]) -> None:
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert list(cgroup_limits(membership, tmp_path)) == limits


def test_our_own_size_grows_with_what_we_hold_and_shrinks_again() -> None:
    """In a process of its own: in this one, other tests may have left room that is taken first."""
    code = """
from lbproxy.control.telemetry.memory import Memory
memory = Memory()
before = memory.rss_bytes()
held = bytearray(b"x") * (64 << 20)
during = memory.rss_bytes()
del held
memory.relieve()
print(before, during, memory.rss_bytes())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    before, during, after = map(int, done.stdout.split())
    assert during - before > 48 << 20
    assert after < during - (32 << 20)


def test_what_one_large_body_needs_is_kept_for_the_next_one_until_there_is_relief() -> None:
    """Each copy of a body of 1 MB was mapped, cleared by the kernel and unmapped: a third of the request's CPU."""
    code = """
from resource import RUSAGE_SELF, getrusage
from lbproxy.control.telemetry.memory import Memory
memory = Memory()
memory.tune()
def copies():
    pieces = [b"x" * (64 << 10) for _ in range(64)]
    b"".join(pieces), b"".join(pieces)
for _ in range(3):
    copies()
before = getrusage(RUSAGE_SELF).ru_minflt
for _ in range(10):
    copies()
faults = getrusage(RUSAGE_SELF).ru_minflt - before
kept = memory.rss_bytes()
memory.relieve()
print(faults, kept - memory.rss_bytes())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    faults, given_back = map(int, done.stdout.split())
    assert faults < 1000, "4 MB in pieces and 4 MB in one are 2,048 pages"
    assert given_back > 6 << 20


def test_our_own_size_is_below_what_we_may_have_until_it_is_closed() -> None:
    memory = Memory()
    size = memory.rss_bytes()
    assert size is not None
    limit = memory.limit_bytes()
    assert limit is not None
    assert limit > size
    memory.close()
    assert memory.rss_bytes() is None
