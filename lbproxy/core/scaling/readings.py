# SPDX-License-Identifier: Apache-2.0
"""The load and the capacity of one group of models, for the formula in `capacity`: what clients ask of it (`Offered`),
and how long a step of its engines takes (`Steps`).

Models that stand on the same endpoints are one group: their demand is met by the same machines. Of the time to prefill
a token the least is remembered: whatever else goes on makes it seem longer, and nothing makes it seem shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, inf, sqrt
from typing import Final, NamedTuple

from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.engines.handover import Role
from lbproxy.core.knowledge.speed import MANY_TOKENS
from lbproxy.core.scaling.capacity import Capacity, Load
from lbproxy.core.scaling.demand import ModelDemand

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
"""Share of the KV cache for requests that run; beyond, engines preempt (see `FULL_CACHE` in `core.capacity.slots`)."""
MAX_OTHERS: Final = 10.0
"""Times our own requests: as many of other clients count at most."""
LEAST_FORGETS_S: Final = 3600.0
"""Within this time a least value may double, if the hardware is another."""
MIN_RUNNING: Final = 1.0
"""Requests that generate at each endpoint: fewer show little of how long a step takes, and use little."""
MIN_STARTS: Final = 60.0
"""Requests before a load counts as the lowest."""
LOW: Final = 1.0 / 1.5
"""The lowest load must be that much lower to show anything."""
LOW_FORGETS_S: Final = 86_400.0
MIN_GROWS: Final = 0.1
GROWS: Final = 0.3
"""The share of a step that is assumed to grow with the requests in it until two loads have shown it."""
MAX_PREFILL: Final = 0.8
SURE_PREFILL: Final = 0.5
"""With a larger share of prefill the rest shows nothing of decoding; with more than the second, little."""
QUICK_S: Final = 20.0
SLOW_S: Final = 120.0
"""Time constants."""
CERTAIN: Final = 2.0
"""Standard errors by which the quick rate must be higher."""
MIN_PREFILLS: Final = 20
"""Samples of the time to prefill a token, for each endpoint, before it counts."""


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


class Mean:
    """An exponential mean that is right from its first value on."""

    def __init__(self, tau_s: float) -> None:
        self._tau_s = tau_s
        self._sum = self._seen = 0.0

    def add(self, value: float, for_s: float) -> None:
        """What it was for so long."""
        weight = 1.0 - exp(-for_s / self._tau_s)
        self._sum += weight * (value - self._sum)
        self._seen += weight * (1.0 - self._seen)

    @property
    def value(self) -> float:
        """0 before the first."""
        return self._sum / self._seen if self._seen else 0.0

    @property
    def over_s(self) -> float:
        """About how long it is a mean of."""
        return 2.0 * self._tau_s * self._seen


class Least:
    """The least of what was seen; it rises slowly."""

    def __init__(self) -> None:
        self.value = inf

    def add(self, value: float, for_s: float) -> None:
        self.value = min(value, self.value * (1.0 + for_s / LEAST_FORGETS_S))


class Steps:
    """How long a step of an engine takes, by how many requests run: learned from how many run and how many tokens come.

    It is a line through two points: the present load, for which it is exact, and the lowest load of the last day. Until
    there are two, a share of the step is assumed to grow with the requests in it.

    Of the endpoints of one group, on average. Without the time that prefills take.
    """

    def __init__(self) -> None:
        self._now, self._low = (0.0, 0.0), (inf, 0.0)
        """Requests that run, and how long a step takes then, in seconds."""
        self._low_age_s = 0.0

    def learn(self, running: float, prefill: float, tokens: float, starts: float, for_s: float) -> None:
        """Note that `running` requests got so many `tokens` a second of one endpoint while prefills took a share of its
        time. `starts`: requests of which that is the mean.
        """
        self._low_age_s += for_s
        if running < MIN_RUNNING or tokens < 1.0 or prefill > MAX_PREFILL:
            return
        self._now = (running, (1.0 - prefill) * running / tokens)
        is_sure = prefill < SURE_PREFILL and starts >= MIN_STARTS
        if is_sure and (running < self._low[0] or self._low_age_s > LOW_FORGETS_S):
            self._low, self._low_age_s = self._now, 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything showed it."""
        return self._now[0] > 0.0

    def line(self) -> tuple[float, float]:
        """Seconds that a step takes with no request in it, and what each adds."""
        (running, step_s), (low, low_s) = self._now, self._low
        if not running:
            return 0.0, 0.0
        share = GROWS
        if low < LOW * running:
            share = (step_s - low_s) / (running - low) * running / step_s
        more_s = min(1.0, max(MIN_GROWS, share)) * step_s / running
        return step_s - more_s * running, more_s


class Counts(NamedTuple):
    """What a group's counts are at a moment: see `demand.ModelDemand`."""

    arrived: int
    arrived_bytes: int
    placed: int
    placed_bytes: int
    placed_work: float
    completed: int
    output_tokens: int
    streamless_tokens: int


def total(models: Iterable[ModelDemand]) -> Counts:
    """The counts of a group."""
    found = list(models)
    return Counts(
        sum(one.arrived for one in found),
        sum(one.arrived_bytes for one in found),
        sum(one.placed for one in found),
        sum(one.placed_bytes for one in found),
        sum(one.placed_work for one in found),
        sum(one.completed for one in found),
        sum(one.output_tokens for one in found),
        sum(one.streamless_tokens for one in found),
    )


def growth(counts: Counts, before: Counts) -> Counts | None:
    """By how much they have grown; None: a model has left the group."""
    change = Counts(
        counts.arrived - before.arrived,
        counts.arrived_bytes - before.arrived_bytes,
        counts.placed - before.placed,
        counts.placed_bytes - before.placed_bytes,
        counts.placed_work - before.placed_work,
        counts.completed - before.completed,
        counts.output_tokens - before.output_tokens,
        counts.streamless_tokens - before.streamless_tokens,
    )
    return change if min(change) >= 0 else None


class Offered:
    """What clients ask of one group of models: how many requests come, and how large they are.

    Rates are exponential means. Two of them tell how many requests come: a slow one, and a quick one less what chance
    explains of it, so that a rise counts as soon as it is certain. Sizes are means of the same time: those of prompts
    as they arrive, what of them is not cached, and the length of responses, as far as requests were served.

    Of one group.
    """

    def __init__(self) -> None:
        self._quick, self._slow = Mean(QUICK_S), Mean(SLOW_S)
        """Requests a second."""
        self._bytes, self._placed, self._placed_bytes, self._work = (Mean(SLOW_S) for _ in range(4))
        self._completed, self._output = Mean(SLOW_S), Mean(SLOW_S)

    def add(self, change: Counts, for_s: float) -> None:
        """Note by how much the counts have grown in this time."""
        for mean, value in (
            (self._quick, change.arrived),
            (self._slow, change.arrived),
            (self._bytes, change.arrived_bytes),
            (self._placed, change.placed),
            (self._placed_bytes, change.placed_bytes),
            (self._work, change.placed_work),
            (self._completed, change.completed),
            (self._output, change.output_tokens),
        ):
            mean.add(value / for_s, for_s)

    @property
    def rate(self) -> float:
        """Requests a second."""
        quick = self._quick.value
        certain = quick - CERTAIN * sqrt(quick / self._quick.over_s) if quick else 0.0
        return max(self._slow.value, certain)

    @property
    def work(self) -> float:
        """Tokens to prefill of each request that arrives."""
        arrived, sent = self._slow.value, self._placed_bytes.value
        return self._bytes.value / arrived * self._work.value / sent if arrived and sent else self.placed_work

    @property
    def placed_work(self) -> float:
        """The same of each request that was placed: under overload the short ones are."""
        placed = self._placed.value
        return self._work.value / placed if placed else 0.0

    @property
    def output(self) -> float:
        """Tokens of each response."""
        completed = self._completed.value
        return self._output.value / completed if completed else 0.0


class MeanGauges(NamedTuple):
    """What a group's endpoints that take requests have, each on average; `endpoints` of them. The engine's own word
    counts before ours.
    """

    endpoints: int
    running: float
    """Requests of all clients."""
    own: float
    """Requests of this lbproxy, waiting in the engine or not."""
    most_running: float
    limit: float
    """Requests that one runs at once; infinite: not known."""
    cache_tokens: float
    """Size of the KV cache; infinite: not known."""
    used_tokens: float
    """Tokens of the KV cache in use."""
    prefill_s: float | None
    """For a token; None: not known."""


def gauges_of(usable: Sequence[EndpointState], endpoints: int, now: float) -> MeanGauges | None:
    """Of a sample of `endpoints` that take requests; None if there are none, or if they share the work of one
    request.
    """
    if not usable or any(state.handover.role is not Role.BOTH for state in usable):
        return None
    count = len(usable)
    running = [_running(state, now) for state in usable]
    slots = [state.load.room.slots for state in usable]
    caches = [state.load.kv.known_tokens for state in usable if state.load.kv.known_tokens]
    limits = [one.limit for one in slots if one.limit < inf and not (caches and one.limited_by_space)]
    speeds = [state.load.speed.token_ms / 1000.0 for state in usable]
    pool = usable[0].load.pool
    is_learned = pool.samples.prefill_ms_per_token >= MIN_PREFILLS * pool.index.members
    return MeanGauges(
        endpoints,
        sum(running) / count,
        sum(state.in_flight for state in usable) / count,
        max(running),
        sum(limits) / len(limits) if limits else inf,
        sum(caches) / len(caches) if caches else inf,
        sum(used_tokens(state, now) for state in usable) / count,
        sum(speeds) / count if is_learned else None,
    )


def _running(state: EndpointState, now: float) -> float:
    """Requests of all clients in the engine's batch: its own word, or ours up to what it runs at once."""
    if state.metrics is not None and state.metrics.running is not None and now <= state.fresh_until:
        return state.metrics.running
    present = state.in_flight + max(float(state.elsewhere), state.load.room.others.requests(now))
    return min(present, state.load.room.slots.limit)


def used_tokens(state: EndpointState, now: float) -> float:
    """Of the KV cache, by requests that run: the engine's own word, or ours."""
    load = state.load
    metrics = state.metrics
    if metrics is not None and metrics.kv_utilization is not None and now <= state.fresh_until:
        return metrics.kv_utilization * load.kv.capacity_tokens
    own = load.kv.cache.pinned * load.pool.index.block_bytes / load.pool.bytes_per_token + load.work.live_tokens
    return own + load.room.others.space(now)
