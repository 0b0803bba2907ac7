# SPDX-License-Identifier: Apache-2.0
"""The load and the capacity of one group of models, for the formula in `capacity`.

Models that stand on the same endpoints are one group: their demand is met by the same machines. Of the time to prefill
a token the least is remembered: whatever else goes on makes it seem longer, and nothing makes it seem shorter.
"""

from __future__ import annotations

from math import inf
from typing import Final

from lbproxy.core.knowledge.speed import MANY_TOKENS
from lbproxy.core.scaling.capacity import Capacity, Load
from lbproxy.core.scaling.gauges import MeanGauges
from lbproxy.core.scaling.offered import QUICK_S, Counts, Offered, growth
from lbproxy.core.scaling.steps import Steps
from lbproxy.core.scaling.trends import Least, Mean

BACKLOG_S: Final = 300.0
"""Within this time requests that wait are to be served as well; shorter, and a queue that one endpoint more would have
prevented asks for several."""
MIN_COMPLETED: Final = 10
"""Responses before anything is recommended."""
SHOWN: Final = 1.5
"""While no endpoint has shown how many requests it runs at most: this many times what one has run. So a fleet that is
much too large shrinks in steps, and finds the limit before it is far beyond."""
MIN_SHOWN: Final = 16.0
MIN_BLIND: Final = 4.0
"""The least that counts as shown: with the size of the KV cache known, and without."""
USABLE_CACHE: Final = 0.93
"""Of the KV cache, for requests that run; beyond, engines preempt (see `FULL_CACHE` in `core.capacity.slots`)."""
MAX_OTHERS: Final = 10.0
"""Times our own requests: as many of other clients count at most."""


class Readings:
    """Of one group."""

    def __init__(self) -> None:
        self._before: Counts | None = None
        self._offered = Offered()
        self._steps = Steps()
        self._prefill_s = Least()
        self._starts, self._tokens = Mean(QUICK_S), Mean(QUICK_S)
        """At each endpoint, a second."""
        self._running, self._own, self._used = Mean(QUICK_S), Mean(QUICK_S), Mean(QUICK_S)
        """Requests of all clients and ours, and tokens of the KV cache, at each endpoint."""
        self.is_busy = False
        """Whether requests arrived since the look before, or run, of any client."""
        self._most_running = 0.0
        self._limits = (inf, inf)
        """The last known: requests, tokens."""

    def look(self, counts: Counts, streamed: int, gauges: MeanGauges | None, for_s: float) -> None:
        """Note the counts, how many tokens streamed since the last time, and how the endpoints are; None: none takes
        requests.
        """
        before, self._before = self._before, counts
        if before is None or for_s <= 0.0:
            return
        change = growth(counts, before)
        if change is None:
            return
        self._offered.add(change, for_s)
        self.is_busy = change.arrived > 0 or (gauges is not None and gauges.running + gauges.own > 0.0)
        if gauges is None:
            return
        for mean, value in (
            (self._starts, change.placed / for_s / gauges.endpoints),
            (self._tokens, (streamed + change.streamless_tokens) / for_s / gauges.endpoints),
            (self._running, gauges.running),
            (self._own, gauges.own),
            (self._used, gauges.used_tokens),
        ):
            mean.add(value, for_s)
        self._most_running = max(self._most_running, gauges.most_running)
        requests, tokens = self._limits
        self._limits = (
            gauges.limit if gauges.limit < inf else requests,
            gauges.cache_tokens if gauges.cache_tokens < inf else tokens,
        )
        if gauges.prefill_s is not None:
            self._prefill_s.add(gauges.prefill_s, for_s)
        work = self._offered.placed_work
        if self._prefill_s.value < inf or work < MANY_TOKENS:  # shorter prompts never show it, and matter little
            prefill = self._starts.value * work * self._prefill
            starts = self._starts.value * self._starts.over_s * gauges.endpoints
            self._steps.learn(self._running.value - prefill, prefill, self._tokens.value * self._others, starts, for_s)

    # Reading

    @property
    def is_known(self) -> bool:
        """Whether there was enough to go by."""
        before = self._before
        return before is not None and before.completed >= MIN_COMPLETED and self._running.over_s > QUICK_S

    def load(self, waiting: int) -> Load:
        """What clients ask for, those of others and `waiting` requests included."""
        offered = self._offered
        return Load(offered.rate * self._others + waiting / BACKLOG_S, offered.work, offered.output)

    def capacity(self) -> Capacity:
        """What one endpoint does."""
        starts = self._starts.value * self._others
        if self._steps.is_known or not starts:
            other_s = self._offered.placed_work * self._prefill
        else:  # nothing is generated, or nothing shows it
            other_s = self._running.value / starts
        return Capacity(self._prefill, *self._steps.line(), other_s, self._max_running())

    def _max_running(self) -> float:
        """Requests that one endpoint runs at once."""
        requests, tokens = self._limits
        running, used = self._running.value, self._used.value
        by_space = USABLE_CACHE * tokens * running / used if running >= 1.0 and used > 0.0 else inf
        shown = SHOWN * max(self._most_running, MIN_SHOWN if tokens < inf else MIN_BLIND)
        return min(requests if requests < inf else shown, max(1.0, by_space))

    @property
    def _prefill(self) -> float:
        """Seconds for each token."""
        return self._prefill_s.value if self._prefill_s.value < inf else 0.0

    @property
    def _others(self) -> float:
        """Requests of all clients for each of ours."""
        own = self._own.value
        return min(MAX_OTHERS, max(1.0, self._running.value / own)) if own else 1.0
