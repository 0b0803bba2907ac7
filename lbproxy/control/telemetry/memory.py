# SPDX-License-Identifier: Apache-2.0
"""What memory this process has, and what it may have: read from /proc and the cgroup's files, where there are any.

The limit is the lowest of this process's cgroup and its parents' (version 2, else 1), or what the machine has. The
file with our own size is kept open, so that it can be read when no descriptor is left. Nothing here blocks: these
files are the kernel's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator
from math import inf
from pathlib import Path

MMAP_FROM_BYTES = 256 << 10
"""Larger pieces are mapped one by one, so that they go back to the system when they are freed. By itself glibc raises
this to 32 MiB with the first large body that is freed, and from then on holes in its heap grow with every crowd:
in a cgroup of 256 MiB, 1,000 bodies of 1 MiB followed by 64 of 31 MiB ended in the kernel's killing us."""
KEPT_FREE_BYTES = 16 << 20
"""Free memory at the end of the heap that is kept, and from which larger pieces are taken first: what the copies of one
large body need, many times. By itself glibc keeps 128 KiB, which is what one prompt of 32 KB leaves: pages were mapped
and unmapped with each such request, 7 % of its CPU time, and of a prompt of 1 MB 37 %. After a crowd `relieve` gives it
back."""
_M_MMAP_THRESHOLD, _M_TOP_PAD, _M_TRIM_THRESHOLD = -3, -2, -1
CGROUPS = Path("/sys/fs/cgroup")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Memory:
    """This process's memory. `close` it last."""

    def __init__(self) -> None:
        self._statm: int | None = None
        with contextlib.suppress(OSError):  # not Linux
            self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        if self._statm is not None:
            os.close(self._statm)
            self._statm = None

    def rss_bytes(self) -> int | None:
        """What of us is in memory; None where the system does not say. About 5 µs."""
        if self._statm is None:
            return None
        return int(os.pread(self._statm, 128, 0).split()[1]) * _PAGE_BYTES

    @staticmethod
    def limit_bytes() -> int | None:
        """What we may take before the kernel ends us; None where the system does not say."""
        limits = list(cgroup_limits(_text(Path("/proc/self/cgroup")) or "", CGROUPS))
        with contextlib.suppress(ValueError, OSError):
            limits.append(os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES)
        return min(limits, default=None)

    @staticmethod
    def cpus() -> float:
        """The CPUs that this process may use at a time; infinite without a quota."""
        return cpu_quota(_text(Path("/proc/self/cgroup")) or "", CGROUPS)

    @staticmethod
    def tune() -> None:
        """Once, at the start: see `MMAP_FROM_BYTES` and `KEPT_FREE_BYTES`."""
        with contextlib.suppress(OSError, AttributeError):  # the C library is not glibc
            libc = ctypes.CDLL(None)
            libc.mallopt(_M_MMAP_THRESHOLD, MMAP_FROM_BYTES)
            libc.mallopt(_M_TRIM_THRESHOLD, KEPT_FREE_BYTES)
            libc.mallopt(_M_TOP_PAD, KEPT_FREE_BYTES)  # what is left when more than the threshold is given back

    @staticmethod
    def relieve() -> None:
        """Have the allocator give back what it keeps for later: after a crowd of large bodies that can be most of it,
        and it looks as if we still held them. Milliseconds; runs in a thread, without the interpreter's lock.
        """
        with contextlib.suppress(OSError, AttributeError):  # the C library is not glibc
            ctypes.CDLL(None).malloc_trim(0)


def cgroup_limits(membership: str, root: Path) -> Iterator[int]:
    """The memory limits of a process, its cgroup's and those of all above, as far as there are any.

    `membership`: the text of /proc/<pid>/cgroup. In a container the path in it may be the host's: then the limit
    stands at the root of what is mounted.
    """
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts, name = [root, root / "unified"], "memory.max"
        elif "memory" in controllers.split(","):
            mounts, name = [root / "memory"], "memory.limit_in_bytes"
        else:
            continue
        parts = Path(path.lstrip("/"))
        for mount in mounts:
            for folder in (parts, *parts.parents):
                text = _text(mount / folder / name)
                if text is not None and re.fullmatch(r"[0-9]+", text):  # "max": none
                    yield int(text)


def cpu_quota(membership: str, root: Path) -> float:
    """How many CPUs a process may use at a time: the lowest quota of its cgroup and those above, version 2 or 1;
    infinite without one. `membership`: see `cgroup_limits`.
    """
    quotas = [inf]
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        is_old = "cpu" in controllers.split(",")
        if controllers and not is_old:
            continue
        parts = Path(path.lstrip("/"))
        for mount in [root / "cpu", root / "cpu,cpuacct"] if is_old else [root, root / "unified"]:
            for folder in (parts, *parts.parents):
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_old else ("cpu.max",)
                said = " ".join(_text(mount / folder / name) or "" for name in names)
                if found := re.fullmatch(r"([1-9][0-9]*) ([1-9][0-9]*)", said):  # "max" or -1: none
                    quotas.append(int(found[1]) / int(found[2]))
    return min(quotas)


def _text(file: Path) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return file.read_text("ascii").strip()
    return None
