"""What memory we may have, from the kernel's files as they stand in containers and outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from lbproxy.control.memory import Memory, cgroup_limits


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
    """Also after the descriptors ran out: the file is open."""
    memory = Memory()
    before = memory.rss_bytes()
    assert before is not None
    held = bytearray(b"x") * (64 << 20)
    during = memory.rss_bytes()
    assert during is not None
    assert during - before > 48 << 20
    del held
    memory.relieve()
    after = memory.rss_bytes()
    assert after is not None
    assert after < during - (32 << 20)
    limit = memory.limit_bytes()
    assert limit is not None
    assert limit > before
    memory.close()
    assert memory.rss_bytes() is None
