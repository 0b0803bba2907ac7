# SPDX-License-Identifier: Apache-2.0
"""Requests of a worker whose link is lost, until it is known what became of them.

If the worker is dead they broke with it. But a worker also ends its link to a balancer process that does not respond
(`processes.worker.SILENT_S`), serves its requests to their ends, and says over its next link which of them run and
which have ended. Only what it does not say by then has no other record, and gets one here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.requests.outcome import Outcome
from lbproxy.runtime import Runtime

RETURN_S: Final = 10.0
"""How long a worker may take to be back, and to say what runs. Its successor says sooner that it is dead."""


class _Lost:
    """The requests of one process."""

    __slots__ = ("at", "index", "records", "timer")

    def __init__(self, index: int, at: float, timer: asyncio.TimerHandle) -> None:
        self.index = index
        self.at = at
        """When the link was lost."""
        self.timer = timer
        self.records: dict[int, RequestRecord] = {}
        """By the number of the request."""


class LostRequests:
    """Those of all workers. Each record leaves once: with `take`, or as an error."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.return_s = RETURN_S
        self.log: Callable[[list[RequestRecord]], None] = lambda _: None
        """Called with the records that their worker, which is gone, could not log."""
        self._by_pid: dict[int, _Lost] = {}

    def add(self, index: int, pid: int, records: dict[int, RequestRecord]) -> None:
        """The link of the worker with this index is lost, and so many of its requests ran."""
        if not records:
            return
        before = self._by_pid.get(pid)
        if before is not None:
            before.timer.cancel()
            records = before.records | records
        timer = self._runtime.loop.call_later(self.return_s, self._give_up, pid)
        self._by_pid[pid] = lost = _Lost(index, self._runtime.now(), timer)
        lost.records = records

    def take(self, pid: int, number: int) -> RequestRecord | None:
        """The record of a request that its worker tells of over another link; None: it was not lost."""
        lost = self._by_pid.get(pid)
        return None if lost is None else lost.records.pop(number, None)

    def joined(self, index: int, pid: int) -> None:
        """A process has the place of this worker now. If it is another one than before, that is dead."""
        for other in [one for one, lost in self._by_pid.items() if lost.index == index and one != pid]:
            self._give_up(other)

    def close(self) -> None:
        """No worker comes back."""
        for pid in list(self._by_pid):
            self._give_up(pid)

    def _give_up(self, pid: int) -> None:
        lost = self._by_pid.pop(pid)
        lost.timer.cancel()
        records = list(lost.records.values())
        for record in records:
            record.outcome = Outcome.INTERNAL_ERROR
            record.error = "its worker process ended"
            record.ended_at = lost.at
            self._runtime.emit(record)
        self.log(records)
