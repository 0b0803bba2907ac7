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
from lbproxy.driver.runtime import Runtime

RETURN_S: Final = 10.0
"""How long a worker may take to be back, and to say what runs. Its successor says sooner that it is dead."""


class _Loss:
    """What ran when one link was lost."""

    __slots__ = ("at", "index", "pid", "records", "timer")

    def __init__(self, index: int, pid: int, records: dict[int, RequestRecord], at: float) -> None:
        self.index = index
        self.pid = pid
        self.records = records
        """Records by the number of the request."""
        self.at = at
        self.timer: asyncio.TimerHandle | None = None


class LostRequests:
    """Those of all workers. Each record leaves once: with `take`, or as an error."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.return_s = RETURN_S
        self.log: Callable[[list[RequestRecord]], None] = lambda _: None
        """Called with the records that their worker, which is gone, could not log."""
        self._losses: list[_Loss] = []

    def add(self, index: int, pid: int, records: dict[int, RequestRecord]) -> None:
        """The link of the worker with this index is lost, while these ran."""
        if records:
            loss = _Loss(index, pid, records, self._runtime.now())
            loss.timer = self._runtime.loop.call_later(self.return_s, self._give_up, loss)
            self._losses.append(loss)

    def take(self, pid: int, number: int) -> RequestRecord | None:
        """The record of a request that its worker tells of over another link; None: it was not lost."""
        for loss in self._losses:
            if loss.pid == pid and number in loss.records:
                return loss.records.pop(number)
        return None

    def joined(self, index: int, pid: int) -> None:
        """A process has the place of this worker now. If it is another one than before, that is dead."""
        for loss in [one for one in self._losses if one.index == index and one.pid != pid]:
            self._give_up(loss)

    def close(self) -> None:
        for loss in list(self._losses):
            self._give_up(loss)

    def _give_up(self, loss: _Loss) -> None:
        if loss.timer is not None:
            loss.timer.cancel()
        self._losses.remove(loss)
        records = list(loss.records.values())
        for record in records:
            record.outcome = Outcome.INTERNAL_ERROR
            record.error = "its worker process ended"
            record.ended_at = loss.at
            self._runtime.emit(record)
        self.log(records)
