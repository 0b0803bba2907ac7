# SPDX-License-Identifier: Apache-2.0
"""The engine's driver: one model server and one timer.

The timer fires when the engine's step ends, and hands the step's tokens to the flights they belong to; a handler wakes
up once for what has come since, and writes it.

The clock is the event loop's. If the loop is busy, tokens come out late, but the simulated times stay right; how late
they came out (`LagMeter`) stands on /metrics, for whoever wants to reject a measurement.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from lbproxy.sim.engine.model_server import ModelServer
from lbproxy.sim.engine.sequence import FirstToken, Hold, SimRequest
from lbproxy.sim.mock.apis.call import PlannedChoice, garbled
from lbproxy.sim.mock.apis.fields import EngineError
from lbproxy.sim.mock.connectors.legs import Leg

LOAD_FAILED = "Internal server error"
"""vLLM's words when the KV of a prompt could not be loaded."""
ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
WINDOW_S = 60
_BUCKETS_PER_DOUBLING = 4


class Flight:
    """A call whose sequences are in the engine. The timer feeds it, one handler empties it."""

    def __init__(
        self,
        choices: Sequence[PlannedChoice],
        *,
        per_call: int,
        every_token: bool,
        rank: int | None = None,
        leg: Leg | None = None,
    ) -> None:
        self.choices = list(choices)
        self.leg = leg
        """What a connector adds."""
        self.rank = rank
        """The data-parallel rank that the client names."""
        self.every_token = every_token
        self.failure: str | None = None
        """Why it has ended without its tokens."""
        self.begun = False
        """The first choice is prefilled."""
        self.left = len(choices)
        """Choices that have not finished."""
        self.tokens: deque[int] = deque()
        """The choice of each token that nobody has taken yet. Bounded by what the call may generate."""
        self._per_prompt = per_call
        self._cached = self._received = 0
        self._wake: asyncio.Future[None] | None = None

    @property
    def cached_tokens(self) -> int:
        """What the usage says, as far as prompts are prefilled."""
        if self.leg is None:
            return self._cached
        return self.leg.cached_tokens(self._cached, self._received)

    def first(self, index: int, first: FirstToken) -> None:
        """A choice is prefilled. Of the choices that share a prompt only one counts in the usage."""
        self.begun = True
        if index % self._per_prompt == 0:
            self._cached += first.cached_tokens
            self._received += first.received_tokens
        if first.garbage:
            self.choices[index] = garbled(self.choices[index])
        if self.leg is not None:
            self.leg.first(index, self.choices[index], first.cached_tokens)

    def fail(self, why: str) -> None:
        """It ends without its tokens."""
        self.failure = self.failure or why
        self.left = 0
        self.tokens.clear()
        self.wake()

    def check(self) -> None:
        """Raises ApiError if it has failed."""
        if self.failure is not None:
            raise EngineError(500, self.failure, "InternalServerError")

    def wake(self) -> None:
        """Let the handler look again."""
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def news(self) -> None:
        """Wait for tokens, or for the end; returns at once if there is something."""
        if not self.tokens and self.left:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake


class Driver:
    """`submit`, then `Flight.news` until nothing is left; `withdraw` in any case."""

    def __init__(self, engine: ModelServer, speed: float, stepped: Callable[[Sequence[str]], None]) -> None:
        """`speed`: the engine's, when nothing slows it down. `stepped` is called with the adapters that run."""
        self.engine = engine
        self.lag = LagMeter()
        self.finished: Counter[str] = Counter()
        """Sequences by the reason of their end."""
        self._speed = speed
        self._stepped = stepped
        self._calls = 0
        self._flights: dict[str, tuple[Flight, int]] = {}
        """Calls by the engine's request id, and which of a call's choices it is."""
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        """When the timer is to fire."""
        self._is_running = False
        self._frozen = False
        self.is_dead = False
        """The engine has failed, and is not started again."""
        self.paused = False
        """What is submitted is kept, and computed later."""
        self._kept: dict[str, SimRequest] = {}
        self._idle: asyncio.Future[None] | None = None

    def run(self, running: bool) -> None:
        """Compute, or stop at once."""
        self._is_running = running
        self._arm()

    def pace(self, slowness: float | None) -> None:
        """Compute so many times as slowly; None: not at all."""
        self._frozen = slowness is None
        if slowness is not None:
            self.engine.set_speed(self._speed / slowness, now=asyncio.get_running_loop().time())
        self._arm()

    def submit(self, flight: Flight) -> list[str]:
        """Give a call's work to the engine; returns the ids under which it knows it. Raises ApiError if it is dead."""
        if self.is_dead:
            raise EngineError(500, ENGINE_DEAD, "InternalServerError")
        now = asyncio.get_running_loop().time()
        self._calls += 1
        ids = [f"{self._calls}-{index}" for index in range(len(flight.choices))]
        for index, (request_id, choice) in enumerate(zip(ids, flight.choices, strict=True)):
            work = choice.request(request_id, flight.rank)
            if flight.leg is not None:
                hold, source = flight.leg.hold(index, choice), flight.leg.source(index)
                work = replace(work, hold=hold, source=source)
                if source is not None:
                    flight.leg.watch(index, source, partial(self._poke, request_id))
            if self.paused:
                self._kept[request_id] = work
            else:
                self.engine.add(work, now=now)
            self._flights[request_id] = (flight, index)
        self._arm()
        return ids

    def withdraw(self, ids: Sequence[str]) -> None:
        """Take back what has not finished: nobody waits for it any more."""
        left = [request_id for request_id in ids if self._flights.pop(request_id, None)]
        if left:
            now = asyncio.get_running_loop().time()
            for request_id in left:
                if self._kept.pop(request_id, None) is None:
                    self.engine.abort(request_id, now=now)
            self._arm()
            self._note_idle()

    def pause(self) -> None:
        """Keep what is submitted from now on; what runs goes on."""
        self.paused = True

    def resume(self) -> None:
        """Compute what was kept."""
        self.paused = False
        kept, self._kept = self._kept, {}
        now = asyncio.get_running_loop().time()
        for work in kept.values():
            self.engine.add(work, now=now)
        self._arm()

    def abort_all(self, why: str) -> None:
        """End what runs; what is kept stays."""
        running = [request_id for request_id in self._flights if request_id not in self._kept]
        for request_id in running:
            self._flights[request_id][0].fail(why)
        self.withdraw(running)

    async def idle(self) -> None:
        """Wait until nothing runs any more. Does not count what is kept."""
        while len(self._flights) > len(self._kept):
            if self._idle is None or self._idle.done():
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

    def _note_idle(self) -> None:
        if self._idle is not None and not self._idle.done() and len(self._flights) <= len(self._kept):
            self._idle.set_result(None)

    def release(self, hold: Hold) -> None:
        """Free what is held."""
        self.engine.release(hold, now=asyncio.get_running_loop().time())
        self._arm()

    def renew(self, hold: Hold, expires_at: float) -> None:
        """The lease ends then, on the event loop's clock."""
        self.engine.renew(hold, expires_at, now=asyncio.get_running_loop().time())
        self._arm()

    def _poke(self, request_id: str) -> None:
        self.engine.poke(request_id, now=asyncio.get_running_loop().time())
        self._arm()

    def die(self) -> None:
        """The engine fails, with all that it has, and stays so."""
        self.is_dead = True
        self.engine.restart(now=asyncio.get_running_loop().time())
        flights, self._flights = self._flights, {}
        for flight, _ in flights.values():
            flight.fail(ENGINE_DEAD)
        self._arm()

    def _arm(self) -> None:
        """Set the timer for what the engine does next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self.engine.next_event()
        if due is not None and self._is_running and not self._frozen:
            self._due = due
            self._timer = asyncio.get_running_loop().call_at(due, self._deliver)

    def _deliver(self) -> None:
        """Hand out the tokens of the steps that have ended."""
        # uvloop counts whole milliseconds and fires timers up to one early; waiting for the rest would be a busy loop.
        loop = asyncio.get_running_loop()
        now = max(loop.time(), self._due)
        woken: dict[Flight, None] = {}
        for step in self.engine.advance(now=now):
            # The handlers write in the loop's next turn, and uvloop sends at its end: what is late is late by then.
            loop.call_soon(loop.call_soon, self._left, step.at)
            for first in step.first:
                if first.id in self._flights:
                    flight, index = self._flights[first.id]
                    flight.first(index, first)
            for request_id in step.tokens:
                # Absent: aborted after the step had ended, before its tokens could be handed out.
                if request_id in self._flights:
                    flight, index = self._flights[request_id]
                    if flight.every_token:
                        flight.tokens.append(index)
                        woken[flight] = None
            for request_id in step.failed:
                if request_id in self._flights:
                    self._flights.pop(request_id)[0].fail(LOAD_FAILED)
            for request_id in step.finished:
                if request_id in self._flights:
                    flight, index = self._flights.pop(request_id)
                    flight.left -= 1
                    self.finished[flight.choices[index].answer.finish_reason] += 1
                    if not flight.left:
                        woken[flight] = None
        self._note_idle()
        self._stepped(self.engine.gauges().running_adapters)
        for flight in woken:
            flight.wake()
        self._arm()

    def _left(self, due: float) -> None:
        """A step's tokens have gone out."""
        # Not the loop's clock, which with uvloop stands still within a turn.
        now = time.monotonic()
        self.lag.record(max(0.0, now - due), now=now)


@dataclass(slots=True)
class _Second:
    number: int = -1
    """Which second of the clock this slot holds."""
    largest_s: float = 0.0
    counts: Counter[int] = field(default_factory=Counter)


class LagMeter:
    """How late things came out, over the last minute: the largest and the 99th percentile, in constant memory.

    A minute is kept as one histogram a second, with four buckets to each doubling of a microsecond, so recording costs
    the same however many steps there are, and a percentile is at most 19 % too high. `now` must not go back.
    """

    def __init__(self) -> None:
        self._seconds = [_Second() for _ in range(WINDOW_S)]

    def record(self, lag_s: float, *, now: float) -> None:
        """Note that something was `lag_s` late, at `now`."""
        number = int(now)
        second = self._seconds[number % WINDOW_S]
        if second.number != number:
            second.number = number
            second.largest_s = 0.0
            second.counts.clear()
        second.largest_s = max(second.largest_s, lag_s)
        second.counts[math.ceil(math.log2(max(1.0, lag_s * 1e6)) * _BUCKETS_PER_DOUBLING)] += 1

    def figures(self, *, now: float) -> tuple[float, float]:
        """(largest, 99th percentile) in seconds; zeros if nothing was recorded in the last minute."""
        counts: Counter[int] = Counter()
        largest_s = 0.0
        for second in self._seconds:
            if second.number > int(now) - WINDOW_S:
                counts.update(second.counts)
                largest_s = max(largest_s, second.largest_s)
        above = counts.total() // 100
        for bucket in sorted(counts, reverse=True):
            above -= counts[bucket]
            if above < 0:
                return largest_s, min(largest_s, 2 ** (bucket / _BUCKETS_PER_DOUBLING) / 1e6)
        return 0.0, 0.0
