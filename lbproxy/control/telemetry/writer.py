# SPDX-License-Identifier: Apache-2.0
"""Lines that a thread writes, so that the event loop never waits for whoever reads them.

Not in log.py, as each request has a line and this is compiled: a compiled class cannot inherit from one of the standard
library's, as logging handlers do.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections import deque
from typing import Final

MAX_LINES: Final = 16_384
"""Lines that may wait for the thread: 1.6 s of 10,000 requests a second, in about 8 MB."""
BATCH_S: Final = 0.05
BATCH_LINES: Final = 256
"""So many are written without waiting for more: what is written soon is still in the processor's caches."""
RETRY_S: Final = 0.01
LOCKED_S: Final = 10.0
"""The longest wait for another process that writes: it may be stopped."""


class LineWriter:
    """Writes lines to a file descriptor (1 = standard output) from a thread of its own."""

    def __init__(self, fd: int = 1, *, shared: bool = False) -> None:
        """`shared`: other processes write there, too, each with the descriptor locked. A pipe takes no more of a batch
        than it has room for, and what another process writes may follow.
        """
        self._fd = fd
        self._shared = shared
        self._pieces: deque[tuple[bytes, int]] = deque()
        """Some lines, and how many they are."""
        self._wake = threading.Event()
        self._full = threading.Event()
        """There are enough for a batch, or it ends."""
        self._closed = False
        # Counts in pairs, since += is not atomic: the first is written by the loop, the second by the thread.
        self._queued = 0
        self._taken = 0
        self._refused = 0
        self._failed = 0
        self._writing = threading.Thread(target=self._run, name="lbproxy-log", daemon=True)
        self._writing.start()

    @property
    def dropped(self) -> int:
        """Lines that were not written: the queue was full, or writing failed."""
        return self._refused + self._failed

    def write(self, lines: list[bytes]) -> None:
        """Queue lines that end with a line feed. Never blocks; drops what the queue has no room for."""
        room = 0 if self._closed else MAX_LINES - (self._queued - self._taken)
        if len(lines) > room:
            self._refused += len(lines) - room
            lines = lines[:room]
        if not lines:
            return
        self._queued += len(lines)
        self._pieces.append((b"".join(lines), len(lines)))
        before = self._queued - self._taken - len(lines)
        if before <= 0:  # else the thread, which looks again after each batch, has not come to those before them
            self._wake.set()
        if before < BATCH_LINES <= before + len(lines):
            self._full.set()

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is queued, but wait no longer than this for a reader that takes nothing. The descriptor stays."""
        self._closed = True
        self._full.set()
        self._wake.set()
        self._writing.join(timeout_s)

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait()
            self._full.wait(BATCH_S)
            self._wake.clear()  # before the queue is emptied: a line that comes now sets it again
            if not self._closed:
                self._full.clear()
            while self._pieces:
                batch: list[bytes] = []
                count = 0
                while self._pieces and count < BATCH_LINES:
                    piece, lines = self._pieces.popleft()
                    batch.append(piece)
                    count += lines
                self._taken += count
                locked = self._shared and self._lock()
                self._write_all(batch, count)
                if locked:
                    fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _lock(self) -> bool:
        """Whether it could be had in `LOCKED_S`; without it lines may be mixed, which is better than none. A lock of
        POSIX: it belongs to the process, ends with it, and works on files, pipes and sockets.
        """
        ends_at = time.monotonic() + LOCKED_S
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # another process has it
                if time.monotonic() >= ends_at:
                    return False
                time.sleep(RETRY_S)
            except OSError:  # a place that has no locks
                return False
            else:
                return True

    def _write_all(self, batch: list[bytes], count: int) -> None:
        left = memoryview(b"".join(batch))
        while left:
            try:
                written = os.write(self._fd, left)
                left = left[written:]
            except BlockingIOError:  # somebody made it non-blocking, and the reader is slow
                time.sleep(RETRY_S)
            except OSError:  # the reader is gone, the disk is full: the next batch may go better
                self._failed += count
                return
