# SPDX-License-Identifier: Apache-2.0
"""How many workers `auto` is, and where the processes meet: on large machines, under quotas, with a read-only root."""

from __future__ import annotations

import os
import stat
import tempfile
from math import inf
from pathlib import Path

import pytest

from lbproxy.config.parse import parse
from lbproxy.control.telemetry.memory import Memory, cpu_quota
from lbproxy.processes.supervisor import make_folder, worker_count
from lbproxy.workers.shares import MAX_WORKERS

AUTO = parse("{workers: auto, endpoints: [http://a:1]}", environ={}, source="test")


@pytest.mark.parametrize(
    ("cores", "quota", "count"),
    [
        (1, inf, 1),
        (2, inf, 1),
        (8, inf, 7),
        (65, inf, 64),
        (256, inf, MAX_WORKERS),
        (96, 4.0, 3),
        (96, 2.5, 2),
        (96, 0.5, 1),
    ],
)
def test_auto_is_the_cores_that_may_be_used_less_one(
    cores: int, quota: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above 64 workers each further one failed in every turn; a container with 4 CPUs of 96 started 95."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(Memory, "cpus", staticmethod(lambda: quota))
    assert worker_count(AUTO) == count


@pytest.mark.parametrize(
    ("membership", "files", "cpus"),
    [
        ("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2.0),
        ("0::/host/path", {"cpu.max": "50000 100000"}, 0.5),
        ("4:cpu,cpuacct:/x", {"cpu/x/cpu.cfs_quota_us": "150000", "cpu/x/cpu.cfs_period_us": "100000"}, 1.5),
        ("4:cpu,cpuacct:/x", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, inf),
        ("", {}, inf),
    ],
)
def test_the_quota_of_the_cgroup_is_read(membership: str, files: dict[str, str], cpus: float, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert cpu_quota(membership, tmp_path) == cpus


def test_where_there_is_no_tmp_the_processes_meet_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped compose and Kubernetes files have a read-only root."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    monkeypatch.setenv("RUNTIME_DIRECTORY", f"{tmp_path}:/other")
    folder = make_folder()
    assert Path(folder).parent == tmp_path
    assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path / "missing"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    if os.access("/dev/shm", os.W_OK):
        folder = make_folder()
        assert folder.startswith("/dev/shm/")
        Path(folder).rmdir()
    monkeypatch.setattr(tempfile, "mkdtemp", refused)
    with pytest.raises(OSError, match="mount a tmpfs at /tmp"):
        make_folder()


def refused(prefix: str, dir: str | None) -> str:  # noqa: A002 - as it is
    raise PermissionError(prefix, dir)
