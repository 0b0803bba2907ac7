"""How many requests one engine runs at once, learned from what shows it, and how fast it starts those that wait.

SGLang and llama.cpp say the number (`told`, `core.engines.server_info`); it is a bound then, as memory may let them run
less. Otherwise it shows in three ways, and each sets the limit to what was running at that moment:

- The engine itself reports requests that wait, more than the prefills before them explain (`reported`). While fresh
  reports come, they alone count, whatever the first bytes look like.
- Without reports: first bytes that come much later than the prefills before them explain (`late`, twice in a row).
- Without reports and streams: responses that take longer than their length explains (`core.capacity.response_times`).

The limit is infinite before the first of these. It grows while it is used and nothing waits: by one for each first byte
in time, by steps that double for each report in a row. This is the additive increase of a congestion window (Jacobson,
1988), but the decrease needs no factor, as what shows that the engine is full also shows how much it runs.

Invariant: `limit` is at least 1. A few requests more than it may go there (`allowance`), so that the engine always has
one to go on with.
"""

from __future__ import annotations

from math import exp, inf
from typing import Final

QUEUE_S: Final = 0.25
"""An engine may have as many requests waiting as it starts in this time,"""
QUEUE_LEAST: Final = 2.0
"""or so many, whatever is more: it must not run dry."""
RATE_S: Final = 5.0
"""Over which time the rate of starts is averaged."""
LATE_IN_ROW: Final = 2
"""One late first byte is chance."""
BLIND: Final = 64.0
"""Requests that an engine may have which never showed anything: no report, no first byte. Each response that is
complete allows one more, so that this doubles while one takes."""
FULL_CACHE: Final = 0.93
"""With requests waiting and more than this of its KV cache in use, space is what an engine lacks. It takes requests as
long as their prompts fit, and sends running ones back to its queue as the responses grow; so then it gets no more
than will fit once half of what is expected has grown,"""
FEWEST: Final = 0.75
"""but as many as this share of what it ran when it was full: an engine may count what is merely cached as in use."""
SPACE_S: Final = 30.0
"""How long it counts that an engine lacked space, without overload."""
MAX_STEP: Final = 64.0
NO_RESPONSE_S: Final = 1.0
"""A response is assumed to take so long before one was seen."""


class Slots:
    """One engine's."""

    __slots__ = (
        "_blind",
        "_cache",
        "_late",
        "_on_time_at",
        "_space_until",
        "_starts",
        "_starts_at",
        "_step",
        "_told",
        "_waiting",
        "by_space",
        "limit",
        "reported_until",
        "response_s",
    )

    def __init__(self) -> None:
        self.limit = inf
        """Requests that run at once; infinite: nothing showed it yet."""
        self.by_space = False
        """It was the KV cache that was full when the limit was seen."""
        self._told = inf
        """What the engine says it runs at most."""
        self.reported_until = -inf
        """Until when the engine's own report of its queue counts."""
        self.response_s = 0.0
        """How long a response takes of late, in the engine and in its queue."""
        self._blind = BLIND
        self._cache = 0.0
        """Share of the KV cache in use, by the latest report."""
        self._waiting = 0.0
        self._space_until = -inf
        """Until when it counts that it lacked space."""
        self._late = 0
        self._on_time_at = -inf
        self._step = 1.0
        self._starts = 0.0
        self._starts_at = 0.0

    # Reading

    def rate(self, now: float) -> float:
        """Requests that it starts in a second. Above 0."""
        counted = self._starts * exp((self._starts_at - now) / RATE_S) / RATE_S
        steady = 0.0 if self.limit == inf else self.limit / (self.response_s or NO_RESPONSE_S)
        return max(counted, steady, 0.01)

    def allowance(self, now: float) -> float:
        """Requests that may wait in the engine."""
        return max(QUEUE_LEAST, QUEUE_S * self.rate(now))

    def is_full(self, in_flight: float, now: float) -> bool:
        """Whether no more should go there than the `in_flight` requests, ours and others'."""
        if in_flight < self.limit:
            return in_flight >= self._blind and now > self.reported_until
        return in_flight - self.limit >= self.allowance(now)

    def is_idle(self, now: float) -> bool:
        """Whether the engine says that no request waits."""
        return now <= self.reported_until and self._waiting < 1.0

    def lacks_space(self, in_flight: float, growth: float, now: float, *, overloaded: bool) -> bool:
        """Whether those that are there will need all of the cache. `growth`: the share of it by which they are expected
        to grow. A burst that an engine takes at once is given to it, whatever comes of it later, unless requests keep
        coming faster than they are served or it lacked space just now: their first tokens would all come later.
        """
        if not self.by_space or now > self.reported_until or in_flight < FEWEST * self.limit:
            return False
        if not overloaded and now > self._space_until:
            return False
        return self._cache + 0.5 * growth > 1.0

    def wait_ms(self, in_flight: float, now: float) -> float:
        """How long a request waits there behind `in_flight` others until it is started. 0 below the limit."""
        waiting = in_flight + 1.0 - self.limit
        return 1000.0 * waiting / self.rate(now) if waiting > 0.0 else 0.0

    # What shows it

    def told(self, limit: int) -> None:
        """The engine says how many it runs at most. Memory may let it run less, and that still shows."""
        if limit != self._told:
            self.limit = self._told = float(limit)
            self._blind = inf
            self.by_space = False

    def started(self, now: float) -> None:
        """The engine started a request: its first byte came, or all of it."""
        self._starts = 1.0 + self._starts * exp((self._starts_at - now) / RATE_S)
        self._starts_at = now

    def finished(self, took_s: float) -> None:
        """A response is complete, after so long."""
        self._blind += 1.0
        self.response_s += (took_s - self.response_s) / 16.0 if self.response_s else took_s

    def on_time(self, before: float, now: float) -> None:
        """A first byte came in time, though so many requests were there before it."""
        self._blind = inf
        if now <= self.reported_until:
            return
        self._late = 0
        self._on_time_at = now
        if before >= self.limit + self.allowance(now) - 1.0:
            self.limit = min(self._told, self.limit + 1.0)

    def late(self, running: float, before: float, waited_s: float, now: float) -> None:
        """A first byte came late: with it so many run, or ran and were sent back to the engine's queue; so many were
        there before it, and it waited so long for some of them to end.
        """
        self._blind = inf
        if now <= self.reported_until:
            return
        self._late += 1
        if self._late >= LATE_IN_ROW:
            seen = before + 1.0 - waited_s * self.rate(now)
            self.limit = max(1.0, min(running, 0.5 * (min(self.limit, running) + seen)))
            self.by_space = False

    def overdue(self, since: float, running: float, now: float) -> None:
        """A first byte should have come at `since` and has not."""
        if now > self.reported_until and self._on_time_at < since:
            self.limit = min(self.limit, max(1.0, running))

    def reported(self, waiting: float, running: float | None, explained: float, *, cache: float, until: float) -> None:
        """The engine says how many wait and run, and which share of its KV cache is in use; of those that wait,
        prefills and adapters explain so many.
        """
        self._blind = inf
        self.reported_until = until
        self._cache = cache
        self._waiting = waiting
        if waiting - explained >= 1.0:
            if running is not None:
                self.limit = max(1.0, running)
                self.by_space = cache > FULL_CACHE
                if self.by_space:
                    self._space_until = until + SPACE_S
            self._step = 1.0
        elif waiting < 1.0 and running is not None and running >= self.limit - 1.0:
            self.limit = max(self.limit, running) + self._step
            self._step = min(MAX_STEP, 2.0 * self._step)
        else:
            self._step = 1.0

    def estimated(self, limit: float) -> None:
        """From the times of whole responses."""
        self._blind = inf
        self.limit = min(self._told, max(1.0, limit))
        self.by_space = False
