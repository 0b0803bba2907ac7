# SPDX-License-Identifier: Apache-2.0
"""Which process is which worker: what follows when a link is lost, and when a worker is there again.

A worker has one link at a time. Its next one comes from the same process, which goes on, or from its successor, as it
is dead. A process opens another link when it has ended the one before; that is not lost here until all that came over
it was read. So the next one waits until then (`wait_for_earlier`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Generic, Protocol, Self, TypeVar

from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.requests.outcome import Outcome
from lbproxy.driver.runtime import Runtime

RETURN_S: Final = 10.0
"""How long a worker may take to be back, and to say what runs. Its successor says sooner that it is dead."""


class LinkedWorker(Protocol):
    """What is known of a worker by one link."""

    index: int
    pid: int

    def goes_on(self, before: Self) -> None:
        """It is the process whose link `before` is lost."""


AWorker = TypeVar("AWorker", bound=LinkedWorker)


class Succession(Generic[AWorker]):
    """The workers that are not linked, and links that came early."""

    def __init__(self, runtime: Runtime) -> None:
        self.lost = LostRequests(runtime)
        self.former: dict[int, AWorker] = {}
        """The last link of each worker that is not linked."""
        self.early: list[AWorker] = []
        """Links of workers whose earlier one is not lost yet."""
        self.on_dead: Callable[[AWorker], None] = lambda _: None
        """Called with the last link of each process that has a successor."""

    def wait_for_earlier(self, worker: AWorker, linked: Sequence[AWorker]) -> bool:
        """Whether a link has to wait for an earlier one of its worker, among those that are `linked`."""
        is_early = any(one.index == worker.index for one in linked)
        if is_early:
            self.early.append(worker)
        return is_early

    def joined(self, worker: AWorker) -> None:
        """A worker is linked."""
        before = self.former.pop(worker.index, None)
        if before is not None and before.pid == worker.pid:
            worker.goes_on(before)
        elif before is not None:
            self.on_dead(before)
        self.lost.joined(worker.index, worker.pid)

    def left(self, worker: AWorker) -> AWorker | None:
        """A worker is not linked any more. Returns its next link, if that is there."""
        self.former[worker.index] = worker
        found = next((one for one in self.early if one.index == worker.index), None)
        if found is not None:
            self.early.remove(found)
        return found

    def stop_waiting(self, worker: AWorker) -> None:
        """A link that may have been waiting is lost."""
        if worker in self.early:
            self.early.remove(worker)


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
    """Requests of a worker whose link is lost, until it is known what became of them.

    If the worker is dead they broke with it. But a worker also ends its link to a balancer process that does not
    respond (`processes.worker.SILENT_S`), serves its requests to their ends, and says over its next link which of them
    run and which have ended. Only what it does not say by then has no other record, and gets one here.

    Those of all workers. Each record leaves once: with `take`, or as an error.
    """

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
