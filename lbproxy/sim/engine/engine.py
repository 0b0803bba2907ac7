# SPDX-License-Identifier: Apache-2.0
"""A sans-io model of one continuous-batching model server, behaving like vLLM V1 where routing can tell.

How to drive it, whether the clock is virtual or real:

1. `add(request, now=...)` and `abort(id, now=...)` as they happen; time never goes back. Of KV that goes from engine to
   engine also `release`, `renew` and `poke`.
2. `next_event()` says when something happens by itself; it may change with every call above.
3. `advance(now=...)` at that time *or later* returns the steps that ended since. Being late changes nothing: step
   times follow from earlier step times, never from when the driver came round to asking.

What a step computes, and how long it takes: `scheduler.py`. Prefill and decode on different engines, as seen from
outside: `link.py`.

Left to the callers: text, tokens and hashes of blocks; this module sees counts and hashes only.
"""

from __future__ import annotations

import random
from dataclasses import replace

from lbproxy.sim.engine.handover import NEVER
from lbproxy.sim.engine.kv_cache import BlockReport, ReportingPool
from lbproxy.sim.engine.presets import BLOCK_TOKENS, Preset
from lbproxy.sim.engine.scheduler import JITTER_SIGMA, Scheduler
from lbproxy.sim.engine.sequence import (
    EngineGauges,
    FirstToken,
    Hold,
    KvState,
    Outlook,
    RequestTooLong,
    Running,
    SequencePhase,
    SimRequest,
    StepDone,
)

__all__ = ["Engine", "SimRequest", "RequestTooLong", "StepDone", "FirstToken", "EngineGauges", "JITTER_SIGMA"]


class Engine(Scheduler):
    """One server. Not to be shared by drivers."""

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
        super().__init__(preset, speed, rng, jitter, name_tokens)
        # One request must always fit alone, or it would preempt itself for ever. vLLM refuses to start instead.
        self.max_model_len = min(max_model_len or preset.max_model_len, self._pool.total * BLOCK_TOKENS)

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
        if request.prompt_tokens + request.output_tokens > self.max_model_len:
            raise RequestTooLong(
                f"{request.prompt_tokens} prompt and {request.output_tokens} output tokens exceed "
                f"the {self.max_model_len} of the model"
            )
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

    def outlook(self) -> Outlook:
        """All that is to come, if nothing more is added. Cheap; valid until the next call that changes something."""
        return Outlook(
            self._preset,
            self._seconds_per_ms,
            self._pool,
            self._lora,
            self._step_ends_at,
            self._steps_done,
            self._context,
            self._decoding,
            self._finishing,
            self._prefills,
            self._partial,
            [*self._waiting.values(), *self._arriving],
        )
