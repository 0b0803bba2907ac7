# SPDX-License-Identifier: Apache-2.0
"""What is known of one endpoint, learned from our own requests there: its work, speed, cache, adapters and room.

It is `EndpointState.load`, so that a policy reads it without a look-up. The Balancer reports placements, first bytes,
progress, ends and scrapes; policies only read. Each part owns its state (`work`, `speed`, `kv`, `adapters`, `room`);
this module decides which of them learns what from which event. The `PoolModel` has what all endpoints share.

Invariants: the pins in the cache are those of the placements that have not ended. A placement ends once, against the
objects that it began with, even if the endpoint left or restarted meanwhile. Names with `_at` are seconds of the
driver's clock, durations are milliseconds, work is in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Final

from lbproxy.core.caches.adapters import AdapterTable
from lbproxy.core.caches.cache_report import CacheReport
from lbproxy.core.capacity.room import HOLD_MS, Room
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.knowledge.kv_model import KvModel
from lbproxy.core.knowledge.placement import NEVER, Placement
from lbproxy.core.knowledge.pool_model import PoolModel
from lbproxy.core.knowledge.prefill_work import work_tokens
from lbproxy.core.knowledge.speed import Speed
from lbproxy.core.knowledge.work import Work
from lbproxy.core.requests.request import DECODE, InferenceRequest, Usage

FREE_SHARE: Final = 0.75
"""An engine that uses at most this share of its limit of requests starts another one at once."""


STEP_S: Final = 1.0
"""An engine's step takes no longer."""


class LoadModel:
    """The load model of one endpoint."""

    def __init__(self, pool: PoolModel, kv_cache_tokens: int | None = None) -> None:
        self.pool = pool
        self.work = Work()
        self.speed = Speed(pool)
        self.kv = KvModel(pool, kv_cache_tokens)
        self.adapters = AdapterTable()
        self.room = Room(pool.others)

    # Reading

    def backlog_tokens(self, now: float) -> float:
        """Prefill work before a request that is placed now: all pending work, less what is done of the first
        request.
        """
        work = self.work
        self._expire(now)
        backlog = 0.0
        if work.pending:
            done = 1000.0 * (now - work.prefill_since) / self.speed.token_ms
            backlog = work.pending_tokens - min(done, work.head_tokens)
        backlog += self.room.others.queued(now) * self.pool.work_tokens
        return backlog if backlog > 0.0 else 0.0

    def prefill_ms(self, now: float) -> float:
        """How long a request waits for that work, in milliseconds, with the parallel prefills of the endpoint."""
        if 1 <= len(self.work.pending) < self.room.lanes.lanes:
            return 0.0
        return self.speed.prefill_ms(self.backlog_tokens(now)) / self.room.lanes.lanes

    def growth_tokens(self) -> float:
        """The tokens by which responses in flight are expected to grow. Non-streaming responses are assumed to be half
        done.
        """
        expected = self.work.in_flight * self.pool.output_tokens
        return max(0.0, expected - (self.work.live_tokens or 0.5 * expected))

    def next_first_byte_s(self, now: float) -> float:
        """Seconds that the first pending request, after the queue of others, should take in all to its first byte."""
        tokens = self.work.head_tokens + self.room.others.queued(now) * self.pool.work_tokens
        return (self.speed.base_ms + self.speed.prefill_ms(tokens)) / 1000.0

    # Its room

    def wait_ms(self, now: float, held: float = 0.0, tokens: float = 0.0) -> float:
        """How long a request that is placed here now, or after `held` more with `tokens` of prefill work, waits before
        its own prefill begins, in milliseconds.
        """
        room = self.room
        prefill_ms = self.prefill_ms(now) + self.speed.prefill_ms(tokens) / room.lanes.lanes
        return max(prefill_ms, room.slots.wait_ms(self.work.in_flight + held + room.others.requests(now), now))

    def longest_wait_s(self, now: float) -> float:
        """How long a request that is placed here now may have to wait for a slot; 0 if there is certainly one."""
        return self.room.longest_wait_s(self.work.in_flight, now)

    def lacks_slots(self, now: float) -> bool:
        """Whether requests wait here for others to end, and not for their prefills."""
        return self.room.is_last_slot(self.work.in_flight, now)

    def is_full(self, now: float, overloaded: bool) -> bool:
        """Whether no request should be placed here now. `overloaded`: see `Room.shortage`."""
        room, pending = self.room, self.work.pending
        non_streaming = bool(pending) and not next(iter(pending)).request.stream
        if self._competes(now):
            return False
        if self._shortage(now, overloaded) is not None:
            return True
        if self.prefill_ms(now) <= HOLD_MS:
            return False
        return not room.may_start(len(pending), now, non_streaming=non_streaming)

    def lacks_room(self, now: float, overloaded: bool) -> bool:
        """Whether it lacks slots or space for another request. Changes nothing."""
        return self._shortage(now, overloaded) is not None

    def full_by(self, now: float, overloaded: bool) -> str | None:
        """Why no request should be placed here now; None: one may be placed. Changes nothing."""
        if self._competes(now):
            return None
        return self._shortage(now, overloaded) or ("prefill" if self.prefill_ms(now) > HOLD_MS else None)

    def has_room_in_s(self, now: float, overloaded: bool) -> float:
        """In how many seconds there is room if no event comes; infinite: never."""
        if self._shortage(now, overloaded) is not None:
            return inf
        return max(0.0, self.prefill_ms(now) - HOLD_MS) / 1000.0

    def _expire(self, now: float) -> None:
        """Count the whole responses as prefilled whose time has come. Before anything is learned: else that would
        depend on when somebody asked last.
        """
        if self.work.due_at <= now:
            self.work.expire(now, self.speed)

    def _competes(self, now: float) -> bool:
        work = self.work
        self._expire(now)
        return self.room.competes(work.in_flight, len(work.pending), work.silent(), now)

    def _shortage(self, now: float, overloaded: bool) -> str | None:
        work = self.work
        return self.room.shortage(
            work.in_flight,
            now,
            context_tokens=work.context_tokens,
            growth_tokens=self.growth_tokens(),
            cache_tokens=self.kv.capacity_tokens,
            overloaded=overloaded,
        )

    # Bookkeeping

    def place(self, request: InferenceRequest, now: float) -> Placement:
        """Place a request here."""
        if request.leg == DECODE:
            return self._receive(request, now)
        pool, kv, work = self.pool, self.kv, self.work
        placement = Placement(request, kv.cache, pool.index.root, now)
        prompt, block_tokens = pool.prompt_tokens(request), pool.block_tokens(request)
        matched = 0
        if request.block_keys:
            kv.look_up(placement, work.in_flight, work.live_tokens)
            matched = kv.pin(placement, block_tokens, work.live_tokens)
        cached = min(prompt, matched * block_tokens) if matched else 0.0
        placement.prompt_tokens, placement.uncached_tokens = prompt, max(1.0, prompt - cached)
        cached *= pool.savings.share  # from here on, as far as that is believed
        placement.work = new_work = work_tokens(max(1.0, prompt - cached), cached)
        if request.session is not None:
            pool.sessions.placed(request.session, request.id, kv.cache, prompt, cached)
        if request.prompt_bytes:
            pool.hit_ratio += 0.01 * (cached / prompt - pool.hit_ratio)
            pool.work_tokens += 0.01 * (new_work - pool.work_tokens)
            pool.samples.hit_ratio += 1
        else:
            placement.work = pool.body_sizes.factor(request.model, request.body_bytes)
            self.room.opaque.extra_weight += placement.work - 1.0
        lanes = self.room.lanes
        if not work.pending:
            lanes.begins(now)
        placement.in_flight = work.in_flight
        placement.serial_wait_s = self.speed.prefill_ms(self.backlog_tokens(now)) / 1000.0
        placement.prefill_wait_s = self.prefill_ms(now) / 1000.0
        placement.predicted_s = self.speed.first_byte_ms(1000.0 * placement.prefill_wait_s, new_work, now) / 1000.0
        if not request.stream:
            placement.due_at = now + placement.predicted_s
        elif lanes.delay_known:
            reported = now <= self.room.slots.reported_until
            placement.late_at = now + lanes.late_after_s(placement.predicted_s, reported=reported)
        work.place(placement, now)
        if pool.adapters and request.model is not None and request.model in pool.adapters:
            placement.adapter = request.model
            placement.arrival = self.adapters.placed(request.model, now)
        return placement

    def _receive(self, request: InferenceRequest, now: float) -> Placement:
        """Place the second leg of a request: its prompt is not computed here, but comes from another endpoint."""
        pool, kv = self.pool, self.kv
        placement = Placement(request, kv.cache, pool.index.root, now)
        prompt, block_tokens = pool.prompt_tokens(request), pool.block_tokens(request)
        matched = kv.pin(placement, block_tokens, self.work.live_tokens) if request.block_keys else 0
        placement.idle_blocks = 0  # what the engine reports as cached was cached at the other
        placement.prompt_tokens = prompt
        placement.work = missing = max(0.0, prompt - matched * block_tokens)
        placement.in_flight = self.work.in_flight
        placement.predicted_s = pool.transfer.ms(missing, pool.token_ms) / 1000.0
        self.work.receive(placement)
        return placement

    def first_byte(self, placement: Placement, now: float) -> None:
        """Note the first byte of a placed request's response. A non-streaming response is complete then."""
        work, speed = self.work, self.speed
        self._expire(now)
        if placement not in work.pending:
            if placement.request.leg == DECODE and placement.request.stream:
                self.pool.transfer.learn(placement.work, 1000.0 * (now - placement.placed_at))
            return
        if placement.waits_for_model or not placement.request.stream:
            speed.learn_early_response(placement, now)
            work.prefilled((placement,), now, speed)
            return
        # Earlier non-streaming requests were prefilled before it: their work is part of its time.
        before = work.non_streaming_before(placement) if work.due_at < NEVER else []
        done = [*before, placement]
        self._learn_lanes(placement, now - placement.placed_at, now)
        speed.first_bytes_arrived(
            done, work.prefill_since if self.room.lanes.lanes == 1.0 else placement.placed_at, now
        )
        work.prefilled(done, now, speed)
        self._learn_room(placement, now)

    def progress(self, placement: Placement, tokens: int, now: float) -> None:
        """Note `tokens` more streamed tokens since the last report."""
        if tokens <= 0 or placement.ended:
            return
        work, speed = self.work, self.speed
        self._expire(now)
        work.streamed(placement, tokens, now)
        since, placement.reported_at = placement.reported_at, now
        prefilled_ms, placement.prefilled_ms = work.prefilled_ms - placement.prefilled_ms, work.prefilled_ms
        speed.close_group(now)
        # With a prefill queued a gap mainly shows that prefill. A finished prefill may still be part of the gap: it
        # counts as decode under load. Without such gaps too few were left (simulated goodput of long prompts .73
        # instead of .84).
        if not work.pending and since < now:
            speed.learn_gap(work.context_tokens, 1000.0 * (now - since) / tokens, prefilled_ms / tokens, now)

    def end(self, placement: Placement, usage: Usage | None, now: float, *, completed: bool = True) -> None:
        """Note the end of the request, for any reason. Only the first call counts. One that was not `completed` says
        nothing of how long responses are.
        """
        if placement.ended:
            return
        placement.ended = True
        pool, work, speed = self.pool, self.work, self.speed
        self._expire(now)
        prefilled = usage is not None or (placement.request.stream and placement not in work.pending)
        if placement in work.pending:  # it failed, was abandoned, or did not stream
            if usage is not None:
                speed.learn_early_response(placement, now)
            is_head = placement is next(iter(work.pending))
            work.prefilled((placement,), now if is_head else work.prefill_since, speed)
        speed.close_group(now)
        work.end(placement)
        if not placement.request.prompt_bytes:
            self.room.opaque.extra_weight += 1.0 - placement.work
        output = placement.streamed_tokens
        if usage is not None:
            output = max(output, usage.completion_tokens or 0)
            pool.learn_usage(placement.request, usage)
            session = placement.request.session
            if session is not None and pool.savings.is_reported:
                found = (usage.cached_tokens or 0) - placement.cached_tokens * pool.savings.share
                pool.sessions.learn(session, placement.request.id, found)
            if self.kv.is_lost(placement, usage):
                self.restarted(inferred=True)
        if prefilled:
            self._finished(placement, output, now)
        if output and completed:
            pool.output_tokens += 0.02 * (output - pool.output_tokens)
            pool.samples.answer_tokens += 1
        freed = placement.cache.unpin(placement.pinned_end)
        if prefilled:
            self.kv.ended(placement, usage, output)
        work.free(freed * pool.index.block_bytes / pool.bytes_per_token + output, now)
        if placement.adapter is not None:
            self.adapters.closed(placement.adapter, now)

    # Learning

    def look(self, now: float, overloaded: bool) -> None:
        """Learn what no event shows, but that there was none: a first byte is overdue, the space is used up. To be
        called before it is asked whether the endpoint is full.
        """
        slots, work = self.room.slots, self.work
        self._expire(now)
        if work.pending:
            late_at = next(iter(work.pending)).late_at
            if late_at <= now:
                slots.first_byte_overdue(late_at, work.in_flight - len(work.pending), now)
                self._learn_space(now)
        may_lack = slots.limited_by_space or self.room.space.limit_tokens < inf
        if may_lack and not self._competes(now) and self._shortage(now, overloaded) == "space":
            slots.space_used_up(work.in_flight, now)

    def _learn_room(self, placement: Placement, now: float) -> None:
        """Learn from one first byte how many requests and how many prefills run here at a time."""
        room, took_s = self.room, now - placement.placed_at
        beyond_s = took_s - placement.predicted_s
        room.slots.started(now)
        room.waited(beyond_s, placement.in_flight, now)
        if not placement.serial_wait_s and placement.in_flight < FREE_SHARE * room.slots.limit:
            room.lanes.learn_delay(beyond_s)
        if placement.late_at <= now:
            running = self.work.in_flight - len(self.work.pending)
            before = placement.in_flight + room.others.requests(now)
            room.slots.first_byte_late(running, before, beyond_s - room.lanes.delay_s, now)
            self._learn_space(now)
        else:
            room.space.sufficed(self.work.context_tokens)
            room.slots.first_byte_in_time(placement.in_flight + room.others.requests(now), now)

    def _learn_lanes(self, placement: Placement, took_s: float, now: float) -> None:
        """Learn from the end of one prefill how many there are at a time. `took_s`: its wait included."""
        if not placement.request.prompt_bytes:
            return
        own_s = self.speed.prefill_ms(placement.work) / 1000.0
        alone_s = self.speed.first_byte_ms(0.0, placement.work, now) / 1000.0
        lanes = self.room.lanes
        waited_s, pending = took_s - alone_s - lanes.delay_s, max(1, len(self.work.pending))
        lanes.prefilled(own_s, pending, now)
        if placement.request.stream:
            slots_free = placement.in_flight < FREE_SHARE * self.room.slots.limit
            lanes.waited(placement.serial_wait_s, waited_s, now, slots_free=slots_free)

    def _learn_space(self, now: float) -> None:
        """Learn from a first byte that is late, if streams stall meanwhile."""
        work = self.work
        self.room.space.lacked(work.context_tokens, work.in_flight, work.stalled(), now)

    def _finished(self, placement: Placement, output: float, now: float) -> None:
        """Learn from a complete response."""
        took_s, request = now - placement.placed_at, placement.request
        if placement.waits_for_model:
            return
        if not request.prompt_bytes:
            units = placement.in_flight + placement.work
            self.room.opaque.learn(request.model, 1000.0 * took_s, units)
            self.pool.opaque.learn(request.model, 1000.0 * took_s, units)
            self.pool.body_sizes.learn(request.model, request.body_bytes, 1000.0 * took_s / (placement.in_flight + 1))
        if request.stream:
            self.room.slots.finished(took_s)
        else:
            base_s = placement.predicted_s - placement.prefill_wait_s
            beyond_s = self.room.completed(took_s, base_s, int(output), placement.in_flight, now)
            if beyond_s is not None:
                self._learn_lanes(placement, beyond_s + base_s, now)

    # Reports of the endpoint

    def scraped(
        self, metrics: LoadMetrics, *, others: float | None, queued: float, fresh_until: float, reported: bool = False
    ) -> None:
        """Note a scrape. `others`: requests in it that are not ours; `queued`: those of them that wait.

        Gauges lag behind our own counts, and the lag looks like load of others. A small difference is ignored, and a
        larger one counts only if two scrapes in a row show it; but a queue that was `reported` with a response is
        current.
        """
        kv = self.kv
        if metrics.kv_tokens:
            kv.size_reported(float(metrics.kv_tokens))
        if metrics.started_at is not None:
            if metrics.started_at != kv.started_at and (kv.started_at is not None or kv.is_restored):
                self.restarted()
            kv.started_at = metrics.started_at
            kv.is_restored = False
        if metrics.lora is not None:
            used, slots = metrics.lora.running | metrics.lora.waiting, metrics.lora.max_lora
            self.adapters.report(used, slots, now=metrics.scraped_at, until=fresh_until)
        room, pool, work = self.room, self.pool, self.work
        if others is not None:  # unknown load is not idle: it stays what the others have on average
            room.others.learn(others, queued, work.in_flight, until=fresh_until, reported=reported)
            pool.others.learn(room.others.count, fresh_until, pool.index.members)
        if metrics.kv_utilization is not None:
            own = kv.cache.pinned * pool.index.block_bytes / pool.bytes_per_token + work.live_tokens
            in_use = metrics.kv_utilization * kv.capacity_tokens
            room.others.learn_space(in_use, own, kv.capacity_tokens)
        self.queue_reported(metrics, fresh_until)

    def queue_reported(self, metrics: LoadMetrics, fresh_until: float) -> None:
        """Note what the engine reports of its own queue, in a scrape or with a response."""
        if metrics.waiting is None:
            return
        at, pending = metrics.scraped_at, self.work.pending
        self._expire(at)
        waiting, running = metrics.waiting, metrics.running
        if running is not None:  # what streams runs: only the rest can wait, whatever the gauges call it
            all_there = waiting + running
            waiting = min(waiting, max(0.0, all_there - self.work.streaming(at)))
            running = all_there - waiting
        self.room.lanes.queue_reported(waiting, len(pending), at)
        explained = sum(one.late_at > at for one in pending) + self.adapters.waiting_requests()
        cache, slots = metrics.kv_utilization or 0.0, self.room.slots
        slots.learn_limit(waiting, running, explained, cache=cache, until=fresh_until)

    def cache_reported(self, report: CacheReport) -> None:
        """Note what KV events show. With a cleared cache speed, adapters and limits are what they were."""
        if report.restarted:
            self.restarted()
        elif report.cleared:
            self.kv.renew(inferred=False)
        if report.size_tokens is not None:
            self.kv.size_measured(float(report.size_tokens))

    def forget_reports(self) -> None:
        """The engine is another process: what it said of its size and its limit may not be true any more."""
        self.kv.forget_report()
        self.room.slots.forget_report()

    def restarted(self, *, inferred: bool = False) -> None:
        """The endpoint lost what it had cached and loaded. `inferred`: only missing cached tokens showed it."""
        self.kv.renew(inferred=inferred)
        self.adapters.forget()
        if not inferred:
            self.speed.renew()
        if self.kv.is_restored:
            self._discard_restored()

    # Over a restart of lbproxy

    def save(self, now: float) -> dict[str, dict[str, float]]:
        """What was learned of the endpoint, for `restore`; without what is in its cache."""
        return {**self.speed.save(now), **self.room.save(), "size": self.kv.save()}

    def restore(
        self, saved: Mapping[str, Mapping[str, float]], started_at: float | None, age_s: float, share: float, now: float
    ) -> None:
        """Start with what `save` returned `age_s` ago, of the engine process that started at `started_at`. To be called
        before anything was learned, after the pool. `share`: of the deviation from the pool that is left.

        As soon as the endpoint proves to be another process, all of it is discarded.
        """
        self.speed.restore(saved, age_s, share, now)
        self.room.restore(saved)
        self.kv.restore(saved["size"], started_at)

    def _discard_restored(self) -> None:
        """The engine is not the one of which things were saved, and nothing is known of its speed and limits."""
        self.speed = Speed(self.pool)
        self.room.forget()
        self.kv.forget_size()
