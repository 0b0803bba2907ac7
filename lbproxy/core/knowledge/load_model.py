"""What is known of each endpoint's speed and of the work that waits there, learned from our own requests alone.

`PoolModel` holds what all endpoints share: rates, the prefix index, which models are adapters. `LoadModel` is one
endpoint's; it hangs off `EndpointState.load`, so that a policy reads it without a look-up. The Balancer tells them
placed, first byte, progress, end and scrape; policies only read.

The picture behind it: an engine prefills in the order of arrival, so that the requests without a first byte (`pending`)
are its queue, measured in uncached tokens, and the time between two first bytes is the time of one prefill. A request
that does not stream shows no first byte; it is taken for prefilled at the time predicted for it, or when a stream
placed after it begins. Every step of learning is clipped: one odd sample moves nothing by much, and nothing runs away.

Invariants: `pending_tokens` is the sum over `pending`; `in_flight`, `context_tokens`, `live_tokens` and the pins in the
cache are those of the placements not ended; a placement ends once, against the object that it began with, also when the
endpoint left or restarted meanwhile. Times are seconds of the driver's clock where they are called `_at`, durations
milliseconds, work tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from lbproxy.core.caches.adapters import AdapterTable, Arrival
from lbproxy.core.caches.cache_loss import Recall, surely_cached
from lbproxy.core.caches.cache_size import GUESSED_TOKENS, CapacityLearner
from lbproxy.core.capacity.room import HOLD_MS, Room
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.knowledge.gaps import Gaps
from lbproxy.core.knowledge.learning import Samples, clip, step
from lbproxy.core.knowledge.placement import FREED_S, NEVER, Placement
from lbproxy.core.knowledge.pool_model import PoolModel
from lbproxy.core.knowledge.prefill_work import work_tokens
from lbproxy.core.requests.request import InferenceRequest, Usage

GROUP_S: Final = 0.001
"""First bytes of one endpoint that are no further apart left the same prefill step."""
RECENT_S: Final = 180.0
"""The time constant of `LoadModel.recent_tokens`."""
OWN_BASE: Final = 0.5
"""An endpoint's fixed time is taken for its own, not for noise, if it is off the pool's by more than this, in ln."""
OWN_S: Final = 30.0
"""And what was learned of an endpoint counts for so long after its last sample, then the pool's does: one that looks
slow gets few requests to show that it is not, and one that is new has none to show."""
FREE: Final = 0.75
"""An engine with no more of its limit of requests in use starts another at once."""
FEW_TOKENS: Final = 256
MANY_TOKENS: Final = 1024
"""A prefill of fewer than `FEW_TOKENS` shows the fixed time, one of more than this the time per token."""


class LoadModel:
    """One endpoint's work and speed."""

    __slots__ = (
        "_gaps",
        "_group",
        "_group_at",
        "_group_since",
        "_prefilled_ms",
        "_recent",
        "_recent_at",
        "_reports",
        "adapters",
        "base_ms",
        "base_until",
        "cache",
        "capacity_tokens",
        "context_tokens",
        "declared",
        "due_at",
        "freed",
        "gap_ms",
        "gap_per_token_ms",
        "gap_until",
        "head_tokens",
        "in_flight",
        "learner",
        "live_tokens",
        "ln_speed",
        "mean_gap_ms",
        "pending",
        "pending_tokens",
        "pool",
        "recall",
        "room",
        "samples",
        "since_at",
        "slot",
        "speed",
        "started_at",
        "told_tokens",
    )

    def __init__(self, pool: PoolModel, kv_cache_tokens: int | None = None) -> None:
        self.pool = pool
        self.cache = pool.index.join()
        self.slot = self.cache.slot
        self.adapters = AdapterTable()
        self.learner: CapacityLearner | None = None
        """Of the KV cache's size, unless that is told exactly."""
        self.capacity_tokens, self.told_tokens, self.declared = 0.0, 0.0, False
        """That size, told, learned or a guess; what space is priced by if it is told, else 0; the settings told it."""
        self.started_at: float | None = None
        self.recall = Recall()
        # Work
        self.pending: dict[Placement, None] = {}
        """Placed and not prefilled, in order."""
        self.pending_tokens = 0.0
        """Their prefill work (Upend)."""
        self.head_tokens = 0.0
        """That of the first of them."""
        self.since_at = 0.0
        """Since when that one is being prefilled (tref)."""
        self.due_at = NEVER
        """The earliest `due_at` in `pending`."""
        self.in_flight = 0
        self.context_tokens = 0.0
        """Prompts and streamed tokens of all in flight (C)."""
        self.live_tokens = 0.0
        """Streamed tokens of all in flight."""
        self.freed = (0.0, 0.0)
        """Cache space that became free of late, in tokens, and as of when."""
        self._recent = self._recent_at = 0.0
        self.room = Room(pool.others)
        # Speed
        self.speed = 1.0
        """Prefill time relative to the pool's; 1 unless it is clearly another (phi)."""
        self.base_ms = pool.base_ms
        """The endpoint's own T0; the pool's counts after `base_until`, and until it is clearly another."""
        self.base_until = -NEVER
        self._group: list[Placement] = []
        self._group_at, self._group_since = -NEVER, 0.0
        # Inter-token gap = gap_ms + gap_per_token_ms * context tokens
        self.gap_ms, self.gap_per_token_ms = pool.gap_ms, pool.gap_per_token_ms
        self.mean_gap_ms = pool.gap_ms
        self.gap_until = -NEVER
        """Until when these are the endpoint's own; then the pool's count."""
        self._gaps = Gaps(pool.gaps)
        self.samples, self._reports = Samples(), 0
        self._prefilled_ms = self.ln_speed = 0.0
        self.declare(kv_cache_tokens)

    # Reading

    def first_byte_ms(self, wait_ms: float, work: float, now: float) -> float:
        """Until the first token of a request with so much prefill work, after a queue that takes `wait_ms`."""
        base = self.base_ms if self.base_until > now else self.pool.base_ms
        return base + wait_ms + work * self.pool.token_ms * self.speed

    def backlog_tokens(self, now: float) -> float:
        """Prefill work before a request that is placed now: all pending, less what is done of the first of them."""
        if self.due_at <= now:
            self.expire(now)
        backlog = 0.0
        if self.pending:
            done = 1000.0 * (now - self.since_at) / (self.pool.token_ms * self.speed)
            backlog = self.pending_tokens - min(done, self.head_tokens)
        backlog += self.room.others.queued(now) * self.pool.work_tokens
        return backlog if backlog > 0.0 else 0.0

    def prefill_ms(self, now: float) -> float:
        """How long a request waits for that work, with as many lanes as there are."""
        if 1 <= len(self.pending) < self.room.lanes.lanes:
            return 0.0
        return self.backlog_tokens(now) * self.pool.token_ms * self.speed / self.room.lanes.lanes

    def growth(self) -> float:
        """The share of the cache by which responses in flight are expected to grow. Those that are not streamed show
        nothing of that, and are taken to be half done.
        """
        expected = self.in_flight * self.pool.output_tokens
        return max(0.0, expected - (self.live_tokens or 0.5 * expected)) / self.capacity_tokens

    def next_first_byte_s(self, now: float) -> float:
        """Seconds that the first in line, after what others queued, should take to its first byte in all."""
        tokens = self.head_tokens + self.room.others.queued(now) * self.pool.work_tokens
        return (self.base_ms + tokens * self.pool.token_ms * self.speed) / 1000.0

    def pending_uncached(self) -> float:
        """Uncached tokens of what is pending, as the rules of other routers count them. O(pending)."""
        return sum(one.uncached for one in self.pending)

    def recent_tokens(self, now: float) -> float:
        """Prefill work placed here, with a memory of three minutes."""
        return self._recent * math.exp((self._recent_at - now) / RECENT_S)

    # Bookkeeping

    def place(self, request: InferenceRequest, now: float) -> Placement:
        """A request is placed here."""
        pool, cache = self.pool, self.cache
        placement = Placement(self, request, now)
        keys = request.block_keys
        prompt = max(1.0, request.prompt_bytes / pool.bytes_per_token)
        matched = 0
        block_tokens = pool.index.block_bytes / pool.bytes_per_token
        if keys:
            if self.learner is not None:
                self.learner.placed(placement)
            in_use = cache.pinned_depth(keys) if self.started_at is None else 0
            matched, placement.end = cache.pin(keys)
            placement.left_blocks = matched - in_use
            room = (self.capacity_tokens - self.live_tokens) / block_tokens
            if cache.size > room or cache.size > pool.index.fair_share:
                cache.trim(min(room, pool.index.fair_share))
        cached = min(prompt, matched * block_tokens) if matched else 0.0
        uncached = max(1.0, prompt - cached)
        placement.prompt_tokens = prompt
        placement.uncached = uncached
        placement.work = new_work = work_tokens(uncached, cached)
        if request.prompt_bytes:
            pool.hit_ratio += 0.01 * (cached / prompt - pool.hit_ratio)
            pool.work_tokens += 0.01 * (new_work - pool.work_tokens)
            pool.samples.hit_ratio += 1
        lanes = self.room.lanes
        placement.before = len(self.pending)
        placement.in_flight = self.in_flight
        placement.waits_s = self.prefill_ms(now) / 1000.0
        placement.predicted_s = self.first_byte_ms(1000.0 * placement.waits_s, new_work, now) / 1000.0
        if request.stream:
            if lanes.seen:
                placement.late_at = now + lanes.patience_s(placement.predicted_s)
        else:
            placement.due_at = now + placement.predicted_s
            self.due_at = min(self.due_at, placement.due_at)
        if not self.pending:
            self.since_at = now
            self.head_tokens = new_work
        self.pending[placement] = None
        self.pending_tokens += new_work
        self._recent = self.recent_tokens(now) + uncached
        self._recent_at = now
        self.in_flight += 1
        self.context_tokens += prompt
        if pool.adapters and request.model is not None and request.model in pool.adapters:
            placement.adapter = request.model
            placement.arrival = self.adapters.placed(request.model, now)
        return placement

    def first_byte(self, placement: Placement, now: float) -> None:
        """The answer to a placed request begins. Of one that does not stream this is the end."""
        if placement not in self.pending:
            return
        if not placement.request.stream:
            self._learn_sooner(placement, now)
            self._prefilled((placement,), now)
            return
        if now - self._group_at > GROUP_S:
            self._learn_group()
            self._group_at = now
            self._group_since = self.since_at if self.room.lanes.lanes == 1.0 else placement.placed_at
        # Those before it that show no first byte were prefilled before it: their work is in its time.
        before = self._silent_before(placement) if self.due_at < NEVER else []
        self._group += [*before, placement]
        self._prefilled((*before, placement), now)
        self._learn_room(placement, now)

    def progress(self, placement: Placement, tokens: int, now: float) -> None:
        """`tokens` more were streamed since the last report."""
        if tokens <= 0 or placement.ended:
            return
        self.context_tokens += tokens
        self.live_tokens += tokens
        placement.streamed += tokens
        since, placement.reported_at = placement.reported_at, now
        prefilled_ms, placement.prefilled_ms = self._prefilled_ms - placement.prefilled_ms, self._prefilled_ms
        if self._group and now - self._group_at > GROUP_S:
            self._learn_group()
        # With a prefill queued a gap says more of that. One that is over may still be in it: that is part of decode
        # under load, and leaving such gaps out left too few (simulated goodput of long prompts .73 instead of .84).
        if not self.pending and since < now:
            self._reports += 1
            if self._reports % 5 == 1:
                self._learn_gap(1000.0 * (now - since) / tokens, prefilled_ms / tokens, now)

    def end(self, placement: Placement, usage: Usage | None, now: float) -> None:
        """The request is over, however. Only the first call counts."""
        if placement.ended:
            return
        placement.ended = True
        pool = self.pool
        prefilled = usage is not None or (placement.request.stream and placement not in self.pending)
        if placement in self.pending:  # it failed, was given up, or did not stream
            if usage is not None:
                self._learn_sooner(placement, now)
            is_head = placement is next(iter(self.pending))
            self._prefilled((placement,), now if is_head else self.since_at)
        if self._group and now - self._group_at > GROUP_S:
            self._learn_group()
        self.in_flight -= 1
        self.context_tokens -= placement.prompt_tokens + placement.streamed
        self.live_tokens -= placement.streamed
        if not self.in_flight:  # rounding ends here
            self.context_tokens = self.live_tokens = 0.0
        output = placement.streamed
        if usage is not None:
            output = max(output, usage.completion_tokens or 0)
            pool.learn_usage(placement.request, usage)
            if self.recall.learn(surely_cached(placement), usage):
                self.restarted(unseen=True)
        if prefilled:
            self._finished(placement, output, now)
        if output:
            pool.output_tokens += 0.02 * (output - pool.output_tokens)
            pool.samples.answer_tokens += 1
        freed = placement.cache.unpin(placement.end)
        if self.learner is not None and prefilled:
            self.learner.ended(placement, usage, output)
            self.capacity_tokens = self.learner.size.tokens
        before, at = self.freed
        freed_tokens = freed * pool.index.block_bytes / pool.bytes_per_token + output
        self.freed = before * math.exp((at - now) / FREED_S) + freed_tokens, now
        if placement.adapter is not None:
            self.adapters.closed(placement.adapter, now)

    def expire(self, now: float) -> None:
        """Requests that do not stream and should be prefilled by now are taken to be."""
        due = [one for one in self.pending if one.due_at <= now]
        self._prefilled(due, max([self.since_at, *(one.due_at for one in due)]))

    def _first_due(self) -> float:
        """The earliest `due_at`, or that of the first in line: those behind it are hardly ever due before it."""
        first = next(iter(self.pending)).due_at
        return first if first < NEVER else min(one.due_at for one in self.pending)

    def _silent_before(self, placement: Placement) -> list[Placement]:
        before = takewhile(lambda one: one is not placement, self.pending)
        return [one for one in before if one.due_at < NEVER]

    def _prefilled(self, placements: Sequence[Placement], now: float) -> None:
        """They leave `pending`; the first of those that remain is being prefilled from now."""
        for placement in placements:
            del self.pending[placement]
            self.pending_tokens -= placement.work
            self._prefilled_ms += placement.work * self.pool.token_ms * self.speed
        self.since_at = now
        if self.pending:
            self.head_tokens = next(iter(self.pending)).work
            if self.due_at < NEVER:
                self.due_at = self._first_due()
        else:
            self.pending_tokens = self.head_tokens = 0.0
            self.due_at = NEVER

    # Learning

    def _learn_room(self, placement: Placement, now: float) -> None:
        """How many requests run here and how many prefills at a time, from one first byte."""
        room, took_s = self.room, now - placement.placed_at
        beyond_s = took_s - placement.predicted_s
        room.slots.started(now)
        if not placement.before:
            if placement.in_flight < FREE * room.slots.limit:
                room.lanes.alone(beyond_s)
        elif room.lanes.seen:
            room.lanes.behind(placement.waits_s, placement.waits_s + beyond_s - room.lanes.delay_s, placement.before)
        if placement.late_at <= now:
            running, before = self.in_flight - len(self.pending), placement.in_flight + room.others.requests(now)
            room.slots.late(running, before, beyond_s - room.lanes.delay_s, now)
        else:
            room.slots.on_time(placement.in_flight + room.others.requests(now), now)

    def _finished(self, placement: Placement, output: float, now: float) -> None:
        """A response is complete."""
        took_s, request = now - placement.placed_at, placement.request
        if not request.prompt_bytes:
            self.room.unread.learn(request.model, 1000.0 * took_s, placement.in_flight)
            self.pool.unread.learn(request.model, 1000.0 * took_s, placement.in_flight)
        if request.stream:
            self.room.slots.finished(took_s)
        else:
            base_s = placement.predicted_s - placement.waits_s
            self.room.completed(took_s, base_s, int(output), placement.in_flight, now)

    def _learn_group(self) -> None:
        """From the time of one group of first bytes: the fixed time if it was little work, the speed if it was much."""
        group = self._group
        if not group:
            return
        self._group = []
        pool = self.pool
        tokens = sum(one.work for one in group)
        since_at = max(self._group_since, min(one.placed_at for one in group))
        took_ms = 1000.0 * (self._group_at - since_at)
        if any(not one.request.prompt_bytes for one in group):
            return  # nobody knows how much work that was
        arrivals = {one.arrival for one in group}
        if Arrival.WAITS in arrivals:
            return  # for a slot, not for this work
        if arrivals != {Arrival.LOADED}:
            arrival = Arrival.FIRST if Arrival.FIRST in arrivals else Arrival.LOADS
            sample = took_ms - self.base_ms - tokens * pool.token_ms * self.speed
            pool.load_times = pool.load_times.learned(arrival, sample)
            pool.samples.adapter_load_ms += arrival is Arrival.LOADS
        elif tokens < FEW_TOKENS:
            self.base_ms = step(self.base_ms, took_ms)
            pool.base_ms = step(pool.base_ms, took_ms)
            self.samples.base_ms += 1
            pool.samples.base_ms += 1
            is_own = abs(math.log(self.base_ms / pool.base_ms)) > OWN_BASE
            self.base_until = self._group_at + OWN_S if is_own else -NEVER
        elif tokens >= MANY_TOKENS:
            expected_ms = pool.token_ms * math.exp(self.ln_speed) * tokens
            self._learn_rate(math.log(max(1.0, took_ms - self.base_ms / 2.0) / expected_ms))

    def _learn_sooner(self, placement: Placement, now: float) -> None:
        """A whole answer came before its prefill was due: prefill is faster than believed. Where nobody streams,
        nothing else says so, and requests were held before servers that had nothing to do.
        """
        if placement.request.prompt_bytes and placement.due_at < NEVER:
            took_ms = 1000.0 * (now - placement.placed_at)
            expected_ms = 1000.0 * (placement.due_at - placement.placed_at) - self.base_ms  # with what was before it
            if took_ms < expected_ms and expected_ms >= MANY_TOKENS * self.pool.token_ms * self.speed:
                self._learn_rate(math.log(max(1.0, took_ms - self.base_ms / 2.0) / expected_ms))

    def _learn_rate(self, off: float) -> None:
        """A prefill took e^`off` times what was expected."""
        pool, off = self.pool, clip(off, -0.7, 0.7)
        pool.token_ms = clip(pool.token_ms * math.exp(0.2 * off / max(1, pool.index.members)), 1e-5, 100.0)
        self.samples.prefill_ms_per_token += 1
        pool.samples.prefill_ms_per_token += 1
        self.ln_speed = (self.ln_speed + 0.05 * off) * (1.0 - 0.005)
        self.speed = math.exp(self.ln_speed) if abs(self.ln_speed) > 0.25 else 1.0

    def _learn_gap(self, gap_ms: float, prefill_ms: float, now: float) -> None:
        """A gap, and how much of it prefills took."""
        self.samples.gap_ms += 1
        pool, gaps = self.pool, self._gaps
        gaps.learn(self.context_tokens, gap_ms, prefill_ms, pool.index.members)
        pool.gap_ms, pool.gap_per_token_ms = pool.gaps.gap_ms, pool.gaps.gap_per_token_ms
        slowness = gaps.slowness()
        self.gap_ms, self.gap_per_token_ms = slowness * pool.gap_ms, slowness * pool.gap_per_token_ms
        self.gap_until = now + OWN_S if slowness != 1.0 else -NEVER  # what all have goes on to be learned
        self.mean_gap_ms = gaps.mean_ms

    # What the endpoint says, or the settings

    def declare(self, kv_cache_tokens: int | None) -> None:
        """What the settings say of the cache's size counts more than what the engine says. None: they do not say it."""
        self.declared = kv_cache_tokens is not None
        self.learner = None if self.declared else CapacityLearner(self.pool.size)
        self.told_tokens = float(kv_cache_tokens or 0)
        self.capacity_tokens = self.told_tokens or float(GUESSED_TOKENS)

    def told(self, tokens: float, *, at_most: bool = False) -> None:
        """What the engine says of the cache's size: its last word counts. `at_most`: or less, and that is learned."""
        if not at_most and not self.declared:
            self.capacity_tokens = self.told_tokens = tokens
            self.learner = None
        elif self.learner is not None:
            self.learner.size.limit(tokens)
            self.capacity_tokens = self.learner.size.tokens
            # Its space is not cheaper for that than where nothing is said.
            self.told_tokens = min(tokens, self.pool.size.space_tokens)

    def scraped(
        self, metrics: LoadMetrics, *, others: float | None, queued: float, fresh_until: float, reported: bool = False
    ) -> None:
        """A scrape. `others`: requests that it saw and that are not ours; `queued`: those of them that wait.

        Gauges lag behind our own counts, and what lags looks like others' load: a little of it is not believed, and
        the rest when two scrapes in a row say so; but a queue that was `reported` with an answer is of this moment.
        """
        if metrics.kv_blocks and metrics.block_size_tokens:
            self.told(float(metrics.kv_blocks * metrics.block_size_tokens))
        if metrics.started_at is not None:
            if self.started_at is not None and metrics.started_at != self.started_at:
                self.restarted()
            self.started_at = metrics.started_at
        if metrics.lora is not None:
            used, slots = metrics.lora.running | metrics.lora.waiting, metrics.lora.max_lora
            self.adapters.report(used, slots, now=metrics.scraped_at, until=fresh_until)
        room, pool = self.room, self.pool
        room.others.learn(others or 0.0, queued, self.in_flight, until=fresh_until, reported=reported)
        pool.others.learn(room.others.count, fresh_until, pool.index.members)
        if metrics.kv_utilization is not None:
            own = self.cache.pinned * pool.index.block_bytes / pool.bytes_per_token + self.live_tokens
            in_use = metrics.kv_utilization * self.capacity_tokens
            room.others.learn_space(in_use, own, self.capacity_tokens)
        self.queue_reported(metrics, fresh_until)

    def queue_reported(self, metrics: LoadMetrics, fresh_until: float) -> None:
        """What the engine says of its own queue, in a scrape or with a response."""
        if metrics.waiting is None:
            return
        at = metrics.scraped_at
        self.room.lanes.reported(metrics.waiting, len(self.pending), full=self.prefill_ms(at) > HOLD_MS, at=at)
        explained = sum(one.late_at > at for one in self.pending) + self.adapters.waiting_requests()
        cache, slots = metrics.kv_utilization or 0.0, self.room.slots
        slots.reported(metrics.waiting, metrics.running, explained, cache=cache, until=fresh_until)

    def restarted(self, *, unseen: bool = False) -> None:
        """The endpoint lost what it had cached and loaded. `unseen`: only what was not cached any more showed it."""
        self.cache = self.pool.index.renew(self.cache)
        self.adapters.forget()
        if self.learner is not None:
            self.learner.forget(undo_misses=unseen)
