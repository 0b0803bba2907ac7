# SPDX-License-Identifier: Apache-2.0
"""The state file: read whole or not at all, replaced atomically, written by one process at a time.

A new version is written beside it (`.tmp`), flushed to the disk and renamed, so that a crash leaves the old version.
The lock is `flock` on a file of its own (`.lock`), because a rename replaces what a lock on the file itself would hold.
The kernel releases it when its process ends, however that happens. Reading needs no lock.

Everything here blocks, and is called in threads, one call at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from lbproxy.core.saved.reading import MAX_LINE_BYTES, Saved, SavedError, read_lines

MAX_FILE_BYTES = 256 << 20
"""Four times what can be written (`core.saved.pieces`)."""
_OPEN = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def read(path: str) -> Saved:
    """Read and validate the file. Raises SavedError, OSError."""
    with open(path, "rb", opener=_open_to_read) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise SavedError(f"it has {size:,} bytes, and at most {MAX_FILE_BYTES:,} are allowed")
        return read_lines(_lines(file))


def _open_to_read(path: str, flags: int) -> int:
    if not stat.S_ISREG(os.stat(path).st_mode):  # reading a pipe could wait for ever
        raise SavedError("it is no file")
    return os.open(path, flags | os.O_NONBLOCK)


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line


def problem(path: str) -> str | None:
    """Why the file cannot be written, as far as can be told without writing; None = nothing is in the way."""
    file = Path(path).absolute()  # a name alone does not say where that is
    if file.is_dir():
        return "it is a folder"
    if not file.parent.is_dir():
        return f"there is no folder {file.parent}"
    if not os.access(file.parent, os.W_OK | os.X_OK):
        return f"the folder {file.parent} is not writable"
    return None


class LockedError(Exception):
    """Another process writes the file. The text says which."""


class StateFile:
    """The file as it is written. `begin`, `append`, then `commit` or `abort`; `release` at the end."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock: int | None = None
        self._new: IO[bytes] | None = None

    def begin(self) -> None:
        """Start a new version, in place of one that nobody ended. Raises LockedError, OSError."""
        self._acquire()
        self.abort()
        self._new = open(f"{self.path}.tmp", "wb", opener=open_to_write)  # noqa: SIM115 - open until it is complete

    def append(self, data: bytes) -> None:
        """Raises OSError."""
        assert self._new is not None
        self._new.write(data)

    def commit(self) -> int:
        """Make the new version the file. Returns its size. Raises OSError."""
        assert self._new is not None
        self._new.flush()
        os.fsync(self._new.fileno())
        size = self._new.tell()
        self._new.close()
        self._new = None
        os.replace(f"{self.path}.tmp", self.path)
        folder = os.open(Path(self.path).parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return size

    def abort(self) -> None:
        """Remove the new version, if there is one."""
        new, self._new = self._new, None
        if new is not None:
            with contextlib.suppress(OSError):
                new.close()
            with contextlib.suppress(OSError):
                os.unlink(f"{self.path}.tmp")

    def release(self) -> None:
        """Let another process write the file."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _acquire(self) -> None:
        if self._lock is not None:
            return
        lock = os.open(f"{self.path}.lock", _OPEN | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.write(lock, b"%d\n" % os.getpid())
        except BlockingIOError:
            owner = os.read(lock, 20).decode("ascii", "replace").strip()
            os.close(lock)
            raise LockedError(f"process {owner}" if owner.isdecimal() else "another process") from None
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock


def open_to_write(path: str, flags: int) -> int:
    """Readable by the owner only: whoever has hashes of prompts can test whether a prompt was sent."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
