# SPDX-License-Identifier: Apache-2.0
"""Which process is which worker: what follows when a link is lost, and when a worker is there again.

A worker has one link at a time. Its next one comes from the same process, which goes on, or from its successor, as it
is dead. A process opens another link when it has ended the one before; that is not lost here until all that came over
it was read. So the next one waits until then (`wait_for_earlier`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, Self, TypeVar

from lbproxy.driver.runtime import Runtime
from lbproxy.workers.lost import LostRequests


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
