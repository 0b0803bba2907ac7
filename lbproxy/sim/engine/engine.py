# SPDX-License-Identifier: Apache-2.0
"""A sans-io model of one continuous-batching model server, behaving like vLLM V1 where routing can tell.

How to drive it, whether the clock is virtual or real:

1. `add(request, now=...)` and `abort(id, now=...)` as they happen; time never goes back. Of KV that goes from engine to
   engine also `release`, `renew` and `poke`.
2. `next_event()` says when something happens by itself; it may change with every call above.
3. `advance(now=...)` at that time *or later* returns the steps that ended since. Being late changes nothing: step
   times follow from earlier step times, never from when the driver came round to asking.

One step computes a batch: `step_ms = host + (weights^1.5 + (token·T)^1.5)^(2/3) + sequence·B + context·Σctx/1000
+ attention·Σ c·(s + c/2)/1e6`, with T tokens and B sequences in the step, ctx the computed tokens of each decode, and
c tokens of a prefill after s computed ones (coefficients: `presets.py`). Scheduling, once per step:

- Running requests first: every decode gets one token, then the unfinished prefill what is left of the token budget.
  Whoever needs a KV block when there is none preempts the *last* running request, which loses its computed tokens and
  goes to the front of the waiting queue (the tokens that the client has seen stay part of its text).
- Then, if nobody was preempted, waiting requests in order of arrival, as long as tokens, sequences and blocks last.
  Each starts behind its longest cached prefix, and always computes at least its last token.

- A request whose LoRA adapter has no slot is passed over, not waited for: those behind it may start (`lora_slots.py`).
- A request whose KV comes from another engine gets its blocks in its turn, and computes once they are filled; one that
  is prefilled for another engine keeps its blocks (`handover.py`). So there may be requests, and no step: until a
  transfer ends, or blocks are free.

Two consequences make a step cheap. An admission that does not finish its prefill has used up the budget, so at most
one running request is unfinished and it is the last one. All others decode, and every decode gets a token in every
step: their progress is one counter, and a step touches only the sequences that need a block or finish.

Prefill and decode on different engines, as seen from outside: `link.py`. Left to the callers: text, tokens and hashes
of blocks; this module sees counts and hashes only. Whoever calls `_run` gives the time.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import replace

from lbproxy.sim.engine.handover import NEVER, EngineHandover
from lbproxy.sim.engine.kv_cache import BlockPool, BlockReport, ReportingPool
from lbproxy.sim.engine.lora_slots import LoraSlots
from lbproxy.sim.engine.presets import BLOCK_TOKENS, Preset
from lbproxy.sim.engine.sequence import (
    EngineCounts,
    EngineGauges,
    FirstToken,
    Hold,
    KvSource,
    KvState,
    RequestTooLong,
    Running,
    SequencePhase,
    SimRequest,
    StepDone,
    check_length,
)

JITTER_SIGMA = 0.03
"""Spread of a step's time, lognormal, when an rng is given and nothing else is said."""

__all__ = ["Engine", "SimRequest", "RequestTooLong", "StepDone", "FirstToken", "EngineGauges", "JITTER_SIGMA"]


class Engine:
    """One server. Not to be shared by drivers. `_live` has every request that has not ended."""

    def __init__(
        self,
        preset: Preset,
        *,
        max_model_len: int | None = None,
        speed: float = 1.0,
        rng: random.Random | None = None,
        jitter: float = JITTER_SIGMA,
        name_tokens: bool = True,
    ) -> None:
        """`speed` divides every duration; `rng` turns jitter on, of that sigma. `max_model_len` only lowers what the
        preset gives.

        `name_tokens` False leaves `StepDone.tokens` empty, which makes a step cheaper; ask `generated` instead.
        """
        assert speed > 0
        self._preset = preset
        self._seconds_per_ms = 0.001 / speed
        self._rng = rng
        self._jitter = jitter
        self._name_tokens = name_tokens
        self._results: list[StepDone] = []
        self._pool = BlockPool(preset.kv_tokens // BLOCK_TOKENS)
        self._reset()
        # One request must always fit alone, or it would preempt itself for ever. vLLM refuses to start instead.
        self.max_model_len = min(max_model_len or preset.max_model_len, self._pool.total * BLOCK_TOKENS)

    def _reset(self) -> None:
        """As freshly started: nothing cached, nothing to do, counters at zero."""
        self._pool = self._pool.emptied()
        self._lora = LoraSlots(self._preset.max_loras, self._rng)
        self._handover = EngineHandover(self._pool)
        self._live: dict[str, Running] = {}
        self._arriving: deque[Running] = deque()
        self._waiting: OrderedDict[str, Running] = OrderedDict()
        self._decoding: dict[str, Running] = {}
        self._partial: Running | None = None
        """The running request whose prefill is unfinished: the last of the running."""

        self._step_ends_at: float | None = None
        self._prefills: list[Running] = []
        """Sequences with a chunk in the step in flight."""
        self._loading_ms = 0.0
        """What loading adapters adds to the step in flight."""
        self._steps_done = 0
        self._context = 0
        """Computed tokens of all decodes together."""
        self._crossing: dict[int, list[Running]] = {}
        self._finishing: dict[int, list[Running]] = {}
        # Entries of both may be stale (aborted, preempted); the sequence's own field says whether one counts.

        self._gauges = EngineGauges()
        self._counts = EngineCounts()

    @property
    def kv_blocks(self) -> int:
        """Size of the KV cache in blocks of `BLOCK_TOKENS`."""
        return self._pool.total

    def add(self, request: SimRequest, *, now: float) -> None:
        """Take a request in. Raises `RequestTooLong`; an id may be used again once its request has ended."""
        assert request.id not in self._live
        assert request.prompt_tokens >= 1
        assert request.output_tokens >= 1
        assert request.adapter is None or self._lora.slots, "an engine without adapters was asked for one"
        check_length(request, self.max_model_len)
        self._run(now)
        if not self._preset.prefix_caching:
            request = replace(request, block_hashes=())
        ready_at = now + self._preset.api_ms * self._seconds_per_ms
        if self._arriving:
            # Whoever came before a change of speed is not overtaken.
            ready_at = max(ready_at, self._arriving[-1].ready_at)
        sequence = Running(request, ready_at, source=request.source)
        self._live[request.id] = sequence
        self._arriving.append(sequence)

    def abort(self, request_id: str, *, now: float) -> bool:
        """Forget a request and free its blocks; False if it has ended. It gets no token of the step in flight.

        It ends at `now`: what `advance` has not returned yet may still hold earlier tokens of it, and even its end.
        """
        self._run(now)
        sequence = self._live.pop(request_id, None)
        if sequence is None:
            return False
        if sequence.phase is SequencePhase.WAITING:
            self._unqueue(sequence)
        elif sequence.phase is SequencePhase.RECEIVING:
            self._handover.drop(sequence)
        elif sequence.phase is SequencePhase.PREFILLING:
            if sequence is self._partial:
                self._partial = None
            self._release(sequence)
        elif sequence.phase is SequencePhase.DECODING:
            del self._decoding[request_id]
            self._leave_decoding(sequence)
        sequence.phase = SequencePhase.GONE
        while self._arriving and self._arriving[0].phase is SequencePhase.GONE:
            self._arriving.popleft()
        if sequence.source is not None:
            sequence.source.finish(now=now, was_read=False)
        if sequence.request.hold is not None:
            sequence.request.hold.become(KvState.LOST)
        self._resume(now)
        return True

    def release(self, hold: Hold, *, now: float) -> bool:
        """Free what is held; False if it is not any more, or not yet: then its blocks are not kept."""
        self._run(now)
        released = self._handover.release(hold)
        self._resume(now)
        return released

    def renew(self, hold: Hold, expires_at: float, *, now: float) -> None:
        """The lease ends then. Of no effect on KV that is not held any more."""
        self._run(now)
        self._handover.renew(hold, expires_at)

    def poke(self, request_id: str, *, now: float) -> None:
        """The state of a request's source has changed; of no effect if the request is not waiting for that."""
        self._run(now)
        self._handover.poke(request_id, now)
        self._run(now)

    def set_speed(self, speed: float, *, now: float) -> None:
        """Be so many times as fast as the preset, from the next step on."""
        assert speed > 0
        self._run(now)
        self._seconds_per_ms = 0.001 / speed

    def unload_adapter(self, adapter: str, *, now: float) -> None:
        """Serve an adapter no more: it loses its slot unless it runs. Requests for it that were taken in end well."""
        self._run(now)
        self._lora.forget(adapter)

    def report_blocks(self, report: BlockReport) -> None:
        """Report from now on which blocks can be hit. Before the first request."""
        self._pool = ReportingPool(self._pool.total, report)
        self._handover.use(self._pool)

    def clear_cache(self, *, now: float) -> None:
        """Forget what is cached, unless a block is in use: as vLLM's /reset_prefix_cache."""
        self._run(now)
        if not self._pool.used:
            self._pool = self._pool.emptied()
            self._handover.use(self._pool)

    def forget(self, *, now: float) -> None:
        """Forget what is cached; what runs goes on."""
        self._run(now)
        self._pool.forget()

    def restart(self, *, now: float) -> list[str]:
        """Fail, and be there again, empty. Returns the ids of all requests that were lost, oldest first.

        Steps that had ended before are still returned by `advance`: their tokens had left the server.
        """
        self._run(now)
        lost = list(self._live)
        self._handover.fail(self._live.values(), now)
        self._reset()
        return lost

    def generated(self, request_id: str) -> int:
        """Tokens that a request has got so far; 0 if it has ended. O(1)."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return 0
        decoded = self._steps_done - sequence.mark if sequence.phase is SequencePhase.DECODING else 0
        return sequence.generated + decoded

    def next_event(self) -> float | None:
        """When `advance` is due; None = not before the next `add`. A time that has passed: there are results."""
        if self._results:
            return self._results[0].at
        due = min(self._step_due(), self._handover.due)
        return None if due == NEVER else due

    def advance(self, *, now: float) -> list[StepDone]:
        """The steps that ended up to `now` and were not returned before, oldest first."""
        self._run(now)
        results, self._results = self._results, []
        return results

    def requests(self, *, now: float) -> int:
        """How many it has taken in that have not ended."""
        self._run(now)
        return len(self._live)

    def gauges(self) -> EngineGauges:
        """As of the latest step that `advance`, `add` or `abort` came past."""
        return self._gauges

    # What it does by itself

    def _run(self, now: float) -> None:
        while True:
            # Not `_step_due`: every call of every driver comes by here.
            ends_at = self._step_ends_at
            due = ends_at if ends_at is not None else self._arriving[0].ready_at if self._arriving else NEVER
            if self._handover.due <= due and self._handover.due <= now:
                self._hand_over(self._handover.due)
            elif due > now:
                return
            elif ends_at is not None:
                self._end_step(due)
            else:
                self._begin_step(due)

    def _step_due(self) -> float:
        """When the step in flight ends, or if there is none, when the next request arrives; may be NEVER."""
        if self._step_ends_at is not None:
            return self._step_ends_at
        return self._arriving[0].ready_at if self._arriving else NEVER

    def _hand_over(self, at: float) -> None:
        """Leases and transfers that end."""
        failed: list[str] = []
        for sequence in self._handover.advance():
            assert sequence.request.source is not None
            if sequence.request.source.recompute:
                self._queue(sequence)
                self._waiting.move_to_end(sequence.request.id, last=False)
            else:
                self._finish(sequence, failed)
        if failed:
            self._results.append(StepDone(at, (), (), (), tuple(failed)))
        self._resume(at)

    def _resume(self, at: float) -> None:
        """Something was freed or has come: begin a step, if there is none."""
        if self._step_ends_at is None:
            self._begin_step(at)
            self._gauges = self._measure()

    # One step: schedule, take the time it takes, hand out the tokens.

    def _begin_step(self, at: float) -> None:
        while self._arriving and self._arriving[0].ready_at <= at:
            sequence = self._arriving.popleft()
            if sequence.phase is SequencePhase.ARRIVING:
                self._queue(sequence)
        self._prefills = []
        self._loading_ms = 0.0
        self._step_ends_at = None
        if not (self._decoding or self._partial or self._waiting or self._handover.received):
            return
        preemptions = self._counts.preemptions
        self._grow_decodes()
        budget = self._preset.token_budget - len(self._decoding)
        attention = 0.0
        if self._partial is not None:
            budget, attention = self._continue_partial(budget)
        if self._counts.preemptions == preemptions or not (self._decoding or self._prefills):
            budget, admitted_attention = self._admit(budget, at)
            attention += admitted_attention
        if not (self._decoding or self._prefills):
            assert self._handover.is_busy, "an engine with work and space always makes progress"
            self._gauges = self._measure()
            return
        tokens = self._preset.token_budget - budget
        seconds = self._duration_ms(tokens, attention) * self._seconds_per_ms
        self._step_ends_at = self._preset.ends_at(at, seconds)

    def _duration_ms(self, tokens: int, attention: float) -> float:
        sequences = len(self._decoding) + len(self._prefills)
        step_ms = self._preset.step_ms(tokens, sequences, self._context, attention)
        duration = self._loading_ms + self._lora.slowdown * step_ms
        return duration if self._rng is None else duration * self._rng.lognormvariate(0.0, self._jitter)

    def _grow_decodes(self) -> None:
        """Give a block to each decode whose last one is full, oldest admission first.

        They are listed in that order: those that crossed 16 steps ago, then those that began to decode since.
        """
        for sequence in self._crossing.pop(self._steps_done, ()):
            if sequence.crosses_at != self._steps_done:
                continue
            self._register(sequence, len(sequence.blocks))
            while (block := self._pool.take((), 1)) is None:
                if self._preempt_last() is sequence:
                    break
            else:
                sequence.blocks += block
                self._plan_crossing(sequence, self._steps_done + BLOCK_TOKENS)

    def _continue_partial(self, budget: int) -> tuple[int, float]:
        """The unfinished prefill's next chunk: what is left of the budget, and the chunk's attention."""
        sequence = self._partial
        assert sequence is not None
        chunk = min(sequence.known_tokens - sequence.computed, budget)
        fresh = _blocks_for(sequence.computed + chunk) - len(sequence.blocks)
        blocks = self._pool.take((), fresh)
        if blocks is None:
            # The last of the running is this one itself.
            self._preempt_last()
            return budget, 0.0
        sequence.blocks += blocks
        return budget - chunk, self._schedule_chunk(sequence, chunk)

    def _admit(self, budget: int, at: float) -> tuple[int, float]:
        """Start those whose KV was received, and waiting requests: what is left of the budget, and the chunks'
        attention.
        """
        attention = 0.0
        for sequence in list(self._handover.received.values()):
            if budget and self._has_slot() and self._lora.fits(sequence.request.adapter):
                del self._handover.received[sequence.request.id]
                self._begin(sequence)
                attention += self._schedule_chunk(sequence, 1)
                budget -= 1
        for sequence in self._in_line() if budget and self._pool.available else ():
            if not budget or not self._has_slot():
                break
            if not self._lora.fits(sequence.request.adapter):
                continue
            if sequence.source is not None:
                if not self._receive(sequence, sequence.source, at):
                    break
                continue
            hits = self._pool.match(sequence.request.block_hashes, (sequence.known_tokens - 1) // BLOCK_TOKENS)
            cached = len(hits) * BLOCK_TOKENS
            chunk = min(sequence.known_tokens - cached, budget)
            blocks = self._pool.take(hits, _blocks_for(cached + chunk) - len(hits))
            if blocks is None:
                break
            self._unqueue(sequence)
            self._place(sequence, blocks, cached)
            self._begin(sequence)
            attention += self._schedule_chunk(sequence, chunk)
            budget -= chunk
        return budget, attention

    def _has_slot(self) -> bool:
        return len(self._decoding) + len(self._prefills) < self._preset.max_sequences

    def _receive(self, sequence: Running, source: KvSource, at: float) -> bool:
        """Give a waiting request blocks for its prompt and have them filled; False if there are not enough."""
        tokens = sequence.request.prompt_tokens
        hits = self._pool.match(sequence.request.block_hashes, (tokens - 1) // BLOCK_TOKENS)
        blocks = self._pool.take(hits, _blocks_for(tokens) - len(hits))
        if blocks is None:
            return False
        self._unqueue(sequence)
        self._place(sequence, blocks, len(hits) * BLOCK_TOKENS)
        missing = tokens - sequence.computed
        preset = self._preset
        seconds = (preset.transfer_ms + preset.transfer_token_ms * missing) * self._seconds_per_ms
        self._handover.receive(sequence, source, missing, seconds, at)
        return True

    def _in_line(self) -> Iterator[Running]:
        """The waiting requests, while those that were seen leave the queue."""
        if self._lora.slots:
            # Over a copy: it shrinks, and not only at its front.
            yield from list(self._waiting.values())
        while self._waiting and not self._lora.slots:
            # No copy: under overload the queue is long, and this is done in each step. Who is not admitted ends it.
            yield next(iter(self._waiting.values()))

    def _place(self, sequence: Running, blocks: list[int], cached: int) -> None:
        """Give a sequence its blocks, the leading ones of which were cached."""
        sequence.blocks = blocks
        sequence.computed = cached
        sequence.registered = cached // BLOCK_TOKENS
        if sequence.cached_tokens is None:
            # vLLM, too, keeps the lookups of preempted requests out of these two counters.
            sequence.cached_tokens = cached
            self._counts.prefix_queries += sequence.request.prompt_tokens if self._preset.prefix_caching else 0
            self._counts.prefix_hits += cached

    def _begin(self, sequence: Running) -> None:
        """It runs from now on."""
        loading_ms = self._lora.started(sequence.request.adapter)
        if loading_ms:
            self._loading_ms += loading_ms
            sequence.loaded_adapter = True
        if self._preset.is_cold(sequence.request.id):
            self._loading_ms += self._preset.cold_ms
        sequence.phase = SequencePhase.PREFILLING

    def _schedule_chunk(self, sequence: Running, chunk: int) -> float:
        """Put a prefill chunk, whose blocks are there, into the step; returns its attention in tokens²."""
        attention = chunk * (sequence.computed + chunk / 2)
        sequence.computed += chunk
        # As in vLLM, full blocks can be hit as soon as they are scheduled: twins in one step share them.
        self._register(sequence, sequence.computed // BLOCK_TOKENS)
        self._partial = sequence if sequence.computed < sequence.known_tokens else None
        self._prefills.append(sequence)
        return attention

    def _end_step(self, at: float) -> None:
        tokens = len(self._decoding)
        names = list(self._decoding) if self._name_tokens else []
        first: list[FirstToken] = []
        finished: list[str] = []
        self._steps_done += 1
        self._context += tokens
        for sequence in self._finishing.pop(self._steps_done, ()):
            if sequence.finishes_at == self._steps_done:
                del self._decoding[sequence.request.id]
                self._stop_decoding(sequence)
                self._hold_or_release(sequence, at)
                self._finish(sequence, finished)
        for sequence in self._prefills:
            if sequence.phase is SequencePhase.PREFILLING and sequence.computed == sequence.known_tokens:
                tokens += 1
                if self._name_tokens:
                    names.append(sequence.request.id)
                self._end_prefill(sequence, at, first, finished)
        self._counts.generation_tokens += tokens
        self._results.append(StepDone(at, tuple(names), tuple(first), tuple(finished)))
        self._gauges = self._measure()
        self._begin_step(at)

    def _end_prefill(self, sequence: Running, at: float, first: list[FirstToken], finished: list[str]) -> None:
        request = sequence.request
        if not sequence.generated:
            assert sequence.cached_tokens is not None
            received = sequence.received_tokens, sequence.garbage
            first.append(FirstToken(request.id, sequence.cached_tokens, sequence.loaded_adapter, *received))
            self._counts.prompt_tokens += request.prompt_tokens
        sequence.generated += 1
        left = request.output_tokens - sequence.generated
        if not left:
            self._hold_or_release(sequence, at)
            self._finish(sequence, finished)
            return
        sequence.phase = SequencePhase.DECODING
        sequence.mark = self._steps_done
        sequence.finishes_at = self._steps_done + left
        self._finishing.setdefault(sequence.finishes_at, []).append(sequence)
        self._plan_crossing(sequence, self._steps_done + len(sequence.blocks) * BLOCK_TOKENS - sequence.computed)
        self._decoding[request.id] = sequence
        self._context += sequence.computed

    def _measure(self) -> EngineGauges:
        handover, counts = self._handover, self._counts
        return EngineGauges(
            len(self._waiting) + handover.deferred,
            len(self._decoding) + (self._partial is not None),
            self._pool.used / self._pool.total,
            counts.prefix_queries,
            counts.prefix_hits,
            counts.preemptions,
            counts.prompt_tokens,
            counts.generation_tokens,
            self._lora.running,
            self._lora.waiting,
            handover.deferred,
            handover.held_blocks,
            handover.received_tokens,
            handover.transfers,
            handover.failed,
            handover.expired,
            handover.garbage,
        )

    # What happens to one sequence.

    def _queue(self, sequence: Running) -> None:
        sequence.phase = SequencePhase.WAITING
        self._waiting[sequence.request.id] = sequence
        self._lora.queued(sequence.request.adapter)

    def _unqueue(self, sequence: Running) -> None:
        del self._waiting[sequence.request.id]
        self._lora.unqueued(sequence.request.adapter)

    def _plan_crossing(self, sequence: Running, step: int) -> None:
        """Note the step in which the sequence fills its last block, unless it finishes before."""
        if step < sequence.finishes_at:
            sequence.crosses_at = step
            self._crossing.setdefault(step, []).append(sequence)
        else:
            sequence.crosses_at = -1

    def _register(self, sequence: Running, full: int) -> None:
        """Make the leading `full` blocks hittable."""
        start, end = sequence.registered, min(full, len(sequence.request.block_hashes))
        if start < end:
            self._pool.register(sequence.blocks[start:end], sequence.request.block_hashes[start:end])
            sequence.registered = end

    def _leave_decoding(self, sequence: Running) -> None:
        """As `_stop_decoding`, and release its blocks."""
        self._stop_decoding(sequence)
        self._release(sequence)

    def _stop_decoding(self, sequence: Running) -> None:
        """Settle what a decode, already out of `_decoding`, has done."""
        steps = self._steps_done - sequence.mark
        sequence.computed += steps
        sequence.generated += steps
        sequence.crosses_at = sequence.finishes_at = -1
        self._context -= sequence.computed

    def _hold_or_release(self, sequence: Running, at: float) -> None:
        """What becomes of the blocks of a request that is complete."""
        hold = sequence.request.hold
        if hold is None or not hold.wanted:
            self._release(sequence)
            if hold is not None:
                hold.become(KvState.FREED)
            return
        self._register(sequence, sequence.computed // BLOCK_TOKENS)
        self._lora.stopped(sequence.request.adapter)
        self._handover.hold(sequence, hold, at)

    def _release(self, sequence: Running) -> None:
        self._register(sequence, sequence.computed // BLOCK_TOKENS)
        self._pool.release(sequence.blocks)
        self._lora.stopped(sequence.request.adapter)
        sequence.blocks = []

    def _finish(self, sequence: Running, finished: list[str]) -> None:
        sequence.phase = SequencePhase.GONE
        del self._live[sequence.request.id]
        finished.append(sequence.request.id)

    def _preempt_last(self) -> Running:
        """Send the last running request back to the front of the queue, and return it."""
        if self._partial is not None:
            sequence, self._partial = self._partial, None
            self._release(sequence)
        else:
            _, sequence = self._decoding.popitem()
            self._leave_decoding(sequence)
        self._counts.preemptions += 1
        sequence.computed = sequence.registered = 0
        if not sequence.generated:
            # It computes its prompt itself, and rightly.
            sequence.received_tokens, sequence.garbage = 0, False
        self._queue(sequence)
        self._waiting.move_to_end(sequence.request.id, last=False)
        return sequence


def _blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
