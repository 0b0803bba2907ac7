"""Watchers over the payload of an answer that is relayed verbatim. They see every byte and alter none.

They answer what must be known when an answer breaks or ends: how many events went out, whether the last byte ended an
event (only there may an error event follow), and, for a body that no framing ends, whether it claims to be whole.
"""

from __future__ import annotations

import json
import re

_ENDS = (b"\n\n", b"\r\n\r\n")
_SEAM_BYTES = 32
"""What is kept of the last piece: longer than every mark that a cut may go through."""
_FINISH = re.compile(
    rb'\[DONE\]|"finish_reason"[ \t]*:[ \t]*"|"message_stop"|"response\.(?:completed|failed|incomplete)"'
)


class EventScanner:
    """Fed with the payload of one response, in order, in pieces of any size."""

    __slots__ = ("_seam", "_watch_finish", "at_boundary", "events", "finished")

    def __init__(self, *, watch_finish: bool = False) -> None:
        self.events = 0
        """Complete events so far; comments count, they end like events."""
        self.at_boundary = True
        """The last byte so far ended an event, or nothing came yet."""
        self.finished = False
        """A finish reason or [DONE] was seen. Only with `watch_finish`: framed bodies need no such guess."""
        self._watch_finish = watch_finish
        self._seam = b""

    def feed(self, data: bytes, start: int, end: int) -> None:
        """The next piece is `data[start:end]`."""
        if start == end:
            return
        self.events += data.count(b"\n\n", start, end) + data.count(b"\r\n\r\n", start, end)
        if not self.at_boundary:
            self._look_across(data[start : min(end, start + _SEAM_BYTES)])
        if self._watch_finish and not self.finished:
            self.finished = _FINISH.search(data, start, end) is not None
        if end - start >= _SEAM_BYTES:
            self._seam = data[end - _SEAM_BYTES : end]
        else:
            self._seam = (self._seam + data[start:end])[-_SEAM_BYTES:]
        self.at_boundary = self._seam.endswith(_ENDS)

    def _look_across(self, first: bytes) -> None:
        """Find the marks that the cut between the last piece and this one went through."""
        seam, cut = self._seam + first, len(self._seam)
        for mark in _ENDS:
            at = seam.find(mark, max(0, cut - len(mark) + 1))
            if 0 <= at < cut < at + len(mark):
                self.events += 1
                break
        if self._watch_finish and not self.finished:
            self.finished = _FINISH.search(seam) is not None

    @property
    def whole(self) -> bool:
        """The stream may have ended here. Meaningful only with `watch_finish`."""
        return self.at_boundary and self.finished


class JsonWatcher:
    """Keeps the payload, up to a bound, to tell whether it is a whole JSON text."""

    MAX_BYTES = 1 << 20

    __slots__ = ("_pieces", "_size")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes, start: int, end: int) -> None:
        """The next piece is `data[start:end]`."""
        self._size += end - start
        if self._size <= self.MAX_BYTES:
            self._pieces.append(data[start:end])
        else:
            self._pieces.clear()

    @property
    def whole(self) -> bool:
        """It parses, or it is too large to tell."""
        if self._size > self.MAX_BYTES:
            return True
        try:
            json.loads(b"".join(self._pieces))  # takes NaN and a byte order mark, as those who wrote it may
        except (ValueError, RecursionError):
            return False
        return True
