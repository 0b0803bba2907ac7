# SPDX-License-Identifier: Apache-2.0
"""An exchange's step, what is in progress in it, and its end, whatever it was doing.

`proxy.exchange.exchange` has the attempts between; `proxy.exchange.steps` the table of steps. Invariants:

- It ends exactly once, in `finish`, whatever happens; every ticket is closed by then.
- What is in progress in a step (`_work`: a dial, a connection, a relay, a timer) is released when the step ends; the
  first leg of a split request (`_split`) when the exchange ends, or another attempt begins.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import TypeAlias

from lbproxy.config.tree import Settings
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage
from lbproxy.net.connections.pool import Connection
from lbproxy.proxy.exchange.exchanger import Exchanger
from lbproxy.proxy.exchange.relay import Client, Relay, end_after_head
from lbproxy.proxy.exchange.split import SplitRequest, decode_endpoint
from lbproxy.proxy.exchange.steps import FINISHED, READING, RELAYING, Step
from lbproxy.proxy.request.client_request import ClientRequest

logger = logging.getLogger("lbproxy")
Work: TypeAlias = asyncio.Task[None] | Connection | Relay | asyncio.TimerHandle | None


class Lifetime(ABC):
    """What an exchange is doing, and how it ends. Subclasses refuse and end it.

    Defaults live in the class until they are overwritten: one object is made for every request.
    """

    request: ClientRequest
    """The client's request. Set by `start`."""
    placed: InferenceRequest
    """The request as the balancer sees it. Set by `start`."""
    step = READING
    _work: Work
    """What is in progress in this step: a dial, the connection that carries the request, a relay, a timer."""
    _ticket: Ticket | None = None
    """The current attempt."""
    _head_sent_by: Relay | None = None
    """The relay, of any attempt, that sent the head of a stream to the client, without any of a body."""
    _split: SplitRequest | None = None
    """The first leg of a request that is split, and what the second one is sent."""

    def __init__(self, shared: Exchanger, client: Client, record: RequestRecord, *, keep_alive: bool) -> None:
        self._shared = shared
        self._work = None  # not in the class: mypyc ignores a default of None for a union of other types
        self.client = client
        self.record = record
        self.keep_alive = keep_alive
        """The client's connection may serve another request."""

    @property
    def settings(self) -> Settings:
        """The settings under which the request is served."""
        return self._shared.settings

    @abstractmethod
    def _body_released(self) -> None:
        """The request's body is not held any more."""

    @abstractmethod
    def _refuse(self, error: LbError) -> bool:
        """Send an error; nothing went to the client yet. Returns whether its connection can be used again."""

    @abstractmethod
    def _used_so_far(self, outcome: Outcome) -> Usage | None:
        """What the response has used that ends now with this outcome, before its end; None: nothing that counts."""

    @abstractmethod
    def _ended(self, reusable: bool) -> None:
        """The exchange is finished and its record complete. `reusable`: the client's connection can be used again."""

    # The end

    def refuse(self, error: LbError) -> None:
        """End with an error; nothing went to the client yet, or the head of a stream alone."""
        if self._head_sent_by:
            end_after_head(self.client, self.record, error)
            self.finish(False)
        else:
            self.finish(self._refuse(error))

    def finish(self, reusable: bool) -> None:
        """End the exchange. Only the first call counts."""
        if self.step is not FINISHED:
            self._enter(FINISHED)
            self._head_sent_by = None  # a reference back to this exchange
            if self._split is not None:  # another
                self._split.abandon(decode_endpoint(self._ticket))
                self._split = None
            self._ended(reusable)

    def defect(self) -> None:
        """End because of a defect of lbproxy; call it while the exception is handled."""
        logger.exception("request %s failed", self.record.id)
        if self.step is FINISHED:
            return
        self._abandon(Outcome.INTERNAL_ERROR)
        self.keep_alive = False
        if self.record.response_bytes and not self._head_sent_by:
            self.record.outcome = Outcome.INTERNAL_ERROR
            self.finish(False)
        else:
            self.refuse(LbError(Outcome.INTERNAL_ERROR))

    def client_disconnected(self) -> None:
        """The client's connection is lost: release everything at once."""
        if self.step is not FINISHED:
            self.record.outcome = Outcome.CLIENT_CLOSED
            self._abandon(Outcome.CLIENT_CLOSED)
            self.finish(False)

    def cut(self, why: Outcome) -> None:
        """End early: lbproxy stops (DRAINING) or has no memory (OVERLOADED). The client is told, as far as possible."""
        if self.step is RELAYING:
            self._relaying.cut(why)
        elif self.step is not FINISHED:
            self.give_up(LbError(why))

    def give_up(self, error: LbError) -> None:
        """End with an error, whatever is in progress; nothing but the head of a stream went to the client yet."""
        self._abandon(error.outcome)
        self.refuse(error)

    # Steps

    def _enter(self, step: Step, work: Work = None) -> None:
        """The only place where the step changes. What was in progress has ended, or was released."""
        self.step = step
        self._work = work

    def _release_work(self) -> None:
        """Release what is in progress in this step, which is about to change."""
        work, self._work = self._work, None
        if isinstance(work, Connection):
            work.abort()
        elif isinstance(work, Relay):
            work.release()
        elif work is not None:
            work.cancel()

    @property
    def _relaying(self) -> Relay:
        """The relay, while RELAYING."""
        work = self._work
        assert isinstance(work, Relay)
        return work

    def _abandon(self, outcome: Outcome) -> None:
        usage = self._used_so_far(outcome)
        self._release_work()
        if self._ticket is not None:
            self._shared.runtime.close(self._ticket, outcome, usage)
