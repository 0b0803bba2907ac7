# SPDX-License-Identifier: Apache-2.0
"""The driver of `core.sleeping`: asks each server whether it sleeps, carries out orders, logs what servers became.

Invariants: every order ends with one `ended`, also if this loop fails or is cancelled. Before a server that shares GPUs
is woken, the others of its host are asked once more, as somebody else may have woken one since. Stopping leaves
servers as they are.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from typing import Final

from lbproxy.control.families.histogram import Histogram
from lbproxy.control.sleeping import calls
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointUid
from lbproxy.core.endpoints.health import Health
from lbproxy.core.sleeping.phase import Phase, SleepTransition
from lbproxy.core.sleeping.sleepers import Order, Task
from lbproxy.driver.runtime import Runtime
from lbproxy.net.connections.pool import ConnectionPool

logger = logging.getLogger("lbproxy")

TICK_S: Final = 0.1
"""The least interval of decisions: so much longer takes a wake for the first request."""
REST_S: Final = 1.0
"""The longest one, and that where no endpoint may sleep."""
SHARE: Final = 0.002
"""Of a CPU that all decisions take. One for 1,000 servers, 100 of which are waited for, takes .7 ms if compiled."""
POLL_S: Final = 1.0
"""A server is asked so often whether it sleeps: somebody else may wake it, or put it to sleep."""
POLL_UNKNOWN_S: Final = 0.2
"""A server is asked so often while it is not known: requests wait for the first answer."""
JITTER: Final = 0.1
WAKE_BUCKETS: Final = (0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 600.0)
MAX_COUNTS: Final = 4096
"""Then those of endpoints that left are forgotten."""
_FAILED: Final = {
    (Phase.WAKING, Phase.ASLEEP): "wake",
    (Phase.FALLING_ASLEEP, Phase.UNKNOWN): "sleep",
    (Phase.STARTING, Phase.OFF): "start",
}


class SleepDriver:
    """For all servers of one Balancer."""

    def __init__(self, balancer: Balancer, runtime: Runtime, connections: ConnectionPool, rng: random.Random) -> None:
        self._balancer, self._runtime, self._connections, self._rng = balancer, runtime, connections, rng
        self._sleepers = balancer.sleepers
        self.results: Counter[tuple[str, str, str]] = Counter()
        """Orders that were carried out: the endpoint, a `Task`, and ok or failed."""
        self.wake_times = Histogram(WAKE_BUCKETS)
        """How long wakes took that succeeded, in seconds."""
        self._warned: set[EndpointUid] = set()
        """Servers of which it was logged that they cannot say whether they sleep."""

    @property
    def is_needed(self) -> bool:
        """Whether there are servers that may sleep."""
        return self._sleepers.is_needed

    @property
    def waited(self) -> int:
        """Requests that waited for a wake, so far."""
        return self._sleepers.waited

    def ask(self, uid: EndpointUid, *, awake: bool) -> str | None:
        """An operator wants a server awake, or asleep. Returns why that cannot be."""
        return self._sleepers.ask(uid, Task.WAKE if awake else Task.SLEEP, now=self._runtime.now())

    def close(self) -> None:
        """Put nothing to sleep any more: lbproxy stops, or another process has taken over."""
        self._sleepers.is_closing = True

    async def run(self) -> None:
        """Decide and carry out for ever: a loop for `supervise`."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                began = time.thread_time()
                orders = self._sleepers.decide(self._runtime.now())
                rest_s = min(max(TICK_S, (time.thread_time() - began) / SHARE), REST_S)
                self._tell()
                for order in orders:
                    tasks.create_task(self._carry_out(order))
                await asyncio.sleep(rest_s if self._sleepers.is_needed else REST_S)

    async def follow(self, endpoint: Endpoint) -> None:
        """Ask one server for ever whether it sleeps: a loop for `supervise`."""
        while True:
            health = self._runtime.health(endpoint.uid)
            if health is not None and health is not Health.DOWN:
                await self._ask(endpoint)
            known = self._sleepers.phase_of(endpoint.uid) is not Phase.UNKNOWN
            await asyncio.sleep((POLL_S if known else POLL_UNKNOWN_S) * self._rng.uniform(1 - JITTER, 1 + JITTER))

    async def _ask(self, endpoint: Endpoint) -> None:
        asked_at = self._runtime.now()
        state = await calls.ask_state(endpoint, self._connections)
        if not state.heard:
            return
        self._sleepers.reported(endpoint.base_url, state.asleep, asked_at=asked_at, now=self._runtime.now())
        self._tell()
        if state.asleep is not None:
            self._warned.discard(endpoint.uid)
        elif endpoint.uid not in self._warned:
            self._warned.add(endpoint.uid)
            text = "%s does not say whether it sleeps, and is taken to be awake: %s"
            extra = {"event": "sleep", "endpoint": endpoint.server}
            logger.warning(text, endpoint.server, state.reason, extra=extra)

    async def _carry_out(self, order: Order) -> None:
        endpoint = self._sleepers.endpoint_at(order.url)
        if endpoint is None:
            return
        done: str | None = "the call was not completed"
        try:
            done = await self._call(order, endpoint)
        finally:
            result = "ok" if done is None else "failed"
            if len(self.results) > MAX_COUNTS:
                self.results.clear()
            self.results[endpoint.server, order.task.value, result] += 1
            self._sleepers.ended(order.url, order.task, done, now=self._runtime.now())
            self._tell()

    async def _call(self, order: Order, endpoint: Endpoint) -> str | None:
        if order.task is Task.SLEEP:
            return await calls.put_to_sleep(endpoint, self._connections)
        if order.task is Task.START:
            assert endpoint.sleep is not None
            assert endpoint.sleep.cold_start is not None
            return await calls.start(endpoint, endpoint.sleep.cold_start, order.model, order.waiting, self._connections)
        beside = self._sleepers.beside(order.url)
        await asyncio.gather(*(self._ask(one) for one in beside if one.sleep is not None and one.sleep.wake))
        if not self._sleepers.may_wake(order.url):
            return "another endpoint of its host is awake"
        return await calls.wake(endpoint, self._connections)

    def _tell(self) -> None:
        """Log transitions, and have waiting requests considered."""
        transitions = self._sleepers.transitions
        if not transitions:
            return
        for one in transitions:
            _log(one)
            if one.before is Phase.WAKING and one.after is Phase.AWAKE and one.model is None:
                self.wake_times.observe(one.lasted_s)
        transitions.clear()
        self._runtime.pump_soon()


def _log(one: SleepTransition) -> None:
    failed = _FAILED.get((one.before, one.after))
    before, after = one.before.value, one.after.value
    extra: dict[str, object] = {"event": "sleep", "endpoint": one.endpoint, "from": before, "to": after}
    extra |= {"reason": one.reason, "lasted_s": round(one.lasted_s, 3)}
    if one.model is not None:
        extra |= {"model": one.model}
        level = logging.DEBUG if one.before is Phase.UNKNOWN else logging.INFO  # most of a long list are not loaded
        logger.log(level, "%s of %s: %s -> %s: %s", one.model, one.endpoint, before, after, one.reason, extra=extra)
    elif failed is not None:
        logger.warning("the %s of %s failed: %s", failed, one.endpoint, one.reason, extra=extra)
    else:
        logger.info("%s is %s: %s", one.endpoint, after.replace("_", " "), one.reason, extra=extra)
