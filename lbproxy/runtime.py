"""The asyncio driver of the Balancer: it holds the clock, the futures of waiting requests and the one timer.

It does the four steps of the driver's contract (see core/balancer.py) and nothing else: every event is passed on with
the time, then `_pump` hands out what changed. It also passes finished records and endpoint transitions to their sinks.
All of it runs on one event loop; no method but `placed` awaits.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints import EndpointChanges
from lbproxy.core.types import (
    EndpointSpec,
    EndpointUid,
    Health,
    InferenceRequest,
    LbError,
    LoadMetrics,
    ModelCard,
    Outcome,
    PoolSnapshot,
    RequestRecord,
    Ticket,
    TicketState,
    Transition,
)

logger = logging.getLogger("lbproxy")


class Sink(Protocol):
    """Gets what is observed. Must be quick and must not raise."""

    def request(self, record: RequestRecord) -> None:
        """A request ended. The record does not change any more."""
        ...

    def transition(self, transition: Transition) -> None:
        """An endpoint changed its standing."""
        ...


class Runtime:
    """One pool of endpoints on the running loop."""

    def __init__(self, balancer: Balancer, sinks: Sequence[Sink] = ()) -> None:
        self._balancer = balancer
        self._sinks = sinks
        self.loop = asyncio.get_running_loop()
        # Not loop.time: uvloop's has a resolution of 1 ms, and stands still while the loop is busy.
        self.now: Callable[[], float] = time.monotonic
        self._waiters: dict[int, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for = 0.0

    # Requests

    def submit(self, request: InferenceRequest, avoid: frozenset[EndpointUid]) -> Ticket:
        """A ticket: placed at once, as nearly always, or to be awaited with `placed`. The caller must `close` it."""
        return self._balancer.submit(request, now=self.now(), avoid=avoid)

    async def placed(self, ticket: Ticket) -> Ticket:
        """Wait until the ticket has a place, if it does not have one yet.

        Raises LbError with the reason when there is no place. Cancelling gives up the place in the queue.
        """
        request = ticket.request
        if ticket.state is TicketState.WAITING:
            await self._placed_or_closed(ticket)
        if ticket.outcome is Outcome.MODEL_NOT_FOUND:
            raise LbError(
                ticket.outcome,
                f"The model `{request.model}` does not exist; GET /v1/models lists those that do.",
                param="model",
            )
        if ticket.outcome is not None:
            raise LbError(ticket.outcome)
        return ticket

    async def _placed_or_closed(self, ticket: Ticket) -> None:
        waiter = self.loop.create_future()
        self._waiters[id(ticket)] = waiter
        self._arm()
        try:
            await waiter
        except asyncio.CancelledError:
            self.close(ticket, Outcome.CLIENT_CLOSED)  # also if it was placed in this very turn
            raise
        finally:
            self._waiters.pop(id(ticket), None)

    def first_byte(self, ticket: Ticket) -> None:
        """The first byte of the answer's body came."""
        self._balancer.first_byte(ticket, now=self.now())
        if self._waiters:
            self._pump()

    def progress(self, ticket: Ticket, tokens: int) -> None:
        """`tokens` more came; at most every 250 ms per stream."""
        self._balancer.progress(ticket, tokens, now=self.now())

    def close(self, ticket: Ticket, outcome: Outcome) -> None:
        """The attempt is over. The first call counts."""
        self._balancer.close(ticket, outcome, now=self.now())
        if self._waiters:
            self._pump()

    def emit(self, record: RequestRecord) -> None:
        """A request is over: once per request."""
        for sink in self._sinks:
            sink.request(record)

    # Endpoints

    def set_endpoints(self, specs: Sequence[EndpointSpec]) -> EndpointChanges:
        """The complete set, from discovery."""
        changes = self._balancer.set_endpoints(specs)
        self._pump()
        return changes

    def report_health(self, uid: EndpointUid, ok: bool, reason: str) -> None:
        """A probe's answer, or a connection that failed."""
        transition = self._balancer.report_health(uid, ok, reason)
        if transition is not None:
            for sink in self._sinks:
                sink.transition(transition)
        self._pump()

    def report_models(self, uid: EndpointUid, cards: Iterable[ModelCard] | None) -> None:
        """What an endpoint says it serves; None if it cannot say."""
        self._balancer.report_models(uid, cards)
        self._pump()

    def scrape_sent(self, uid: EndpointUid) -> None:
        """A scrape leaves now."""
        self._balancer.scrape_sent(uid)

    def report_scrape(self, uid: EndpointUid, metrics: LoadMetrics) -> None:
        """What that scrape said."""
        self._balancer.report_scrape(uid, metrics)
        self._pump()

    # Reading

    def health(self, uid: EndpointUid) -> Health | None:
        """The verdict on an endpoint; None if it left the set."""
        return self._balancer.health(uid)

    def any_up(self) -> bool:
        """Whether an endpoint takes requests."""
        return self._balancer.any_up()

    def base_models(self) -> list[str]:
        """The distinct base models that the endpoints serve."""
        return self._balancer.base_models()

    def model_cards(self) -> list[ModelCard]:
        """One card for each model that is served."""
        return self._balancer.model_cards()

    def snapshot(self) -> PoolSnapshot:
        """Everything, now."""
        return self._balancer.snapshot(now=self.now())

    # The contract's steps 2 and 3

    def _pump(self) -> None:
        changed = self._balancer.poll(now=self.now())
        for ticket in changed:
            waiter = self._waiters.get(id(ticket))
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        if changed:
            self._arm()

    def _arm(self) -> None:
        deadline = self._balancer.next_deadline()
        if self._timer is not None:
            if deadline is not None and self._armed_for <= deadline:
                return  # it fires early enough, and arms again
            self._timer.cancel()
        self._timer = None
        if deadline is not None:
            self._armed_for = deadline
            self._timer = self.loop.call_later(max(0.0, deadline - self.now()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._pump()
        self._arm()


RESTART_FIRST_S = 0.1
RESTART_MAX_S = 10.0


async def supervise(name: str, run: Callable[[], Awaitable[None]], rng: random.Random) -> None:
    """Run a long-lived loop; when it raises, log that and start it again after a back-off that grows up to 10 s."""
    delay_s = RESTART_FIRST_S
    while True:
        try:
            await run()
        except Exception:
            logger.exception("%s failed; it starts again in about %.1f s", name, delay_s)
        else:
            return
        await asyncio.sleep(delay_s * rng.uniform(0.5, 1.5))
        delay_s = min(RESTART_MAX_S, 2 * delay_s)
