# SPDX-License-Identifier: Apache-2.0
"""What a worker reports that need not leave at once: records of requests, and progress of streams."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.observed.sink import Sink
from lbproxy.workers import messages as m
from lbproxy.workers.contents import is_plain, message_of, served
from lbproxy.workers.link import Link
from lbproxy.workers.origins import Sending

MAX_UNSENT: Final = 50_000
"""Records that wait for a balancer process: 10 s of 5,000 requests a second, in about 30 MB."""


class Reports:
    """Reports that need not leave at once: records, for the balancer process and for this process's own sinks, and
    progress; and what the balancer process was told before.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, sinks: Sequence[Sink]) -> None:
        self._loop = loop
        self._sinks = sinks
        self._unsent: deque[m.Ended] = deque(maxlen=MAX_UNSENT)
        self._ended: list[RequestRecord] = []
        self.progress: dict[int, int] = {}
        """Tokens by number, to be sent soon."""
        self.origins = Sending()
        """Origins of the link that there is now."""
        self.known_from = 0
        """Requests with this number and higher ones were submitted to the balancer process that there is now."""

    def emit(self, record: RequestRecord, link: Link[m.ToWorker] | None) -> None:
        """A request is over. Without a link its record waits for one."""
        if link is None:
            self._unsent.append(message_of(record))
        elif record.number >= self.known_from and is_plain(record):
            link.send(served(record, self._take_answered(record, link)))
        else:
            link.send(message_of(record))
        if self._sinks:
            self._ended.append(record)
            if len(self._ended) == 1:
                self._loop.call_soon(self.hand_out)

    @staticmethod
    def _take_answered(record: RequestRecord, link: Link[m.ToWorker]) -> m.Answered | None:
        """The message that its attempt ended, if that is about to be sent and says nothing else than the record."""
        last = link.last
        if not isinstance(last, m.Answered) or last.number != record.number:
            return None
        if last.outcome != m.OUTCOME_NUMBERS[record.outcome] or last.usage is not record.usage:
            return None
        link.take_back()
        return last

    def take_unsent(self) -> Iterator[m.Ended]:
        """What waits, each as it can be sent: what is not taken goes on waiting."""
        while self._unsent:
            yield self._unsent.popleft()

    def hand_out(self) -> None:
        """Tell this process's own sinks now what ended."""
        ended, self._ended = self._ended, []
        for sink in self._sinks:
            sink.ended(ended)
