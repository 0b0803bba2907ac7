# SPDX-License-Identifier: Apache-2.0
"""How fast one endpoint is, relative to all: the time to prefill a token, the fixed time to a first one, inter-token
gaps.

The time between two first bytes is the time of one prefill. Every step of learning is clipped: one unusual sample
changes little, and no value diverges. What is learned of one endpoint is also learned for the pool, whose values are
assumed for endpoints without samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Final

from lbproxy.core.caches.adapters import Arrival
from lbproxy.core.knowledge.gaps import Gaps
from lbproxy.core.knowledge.learning import Samples, clip, saved_samples, step
from lbproxy.core.knowledge.placement import NEVER, Placement
from lbproxy.core.knowledge.pool_model import PoolModel
from lbproxy.core.knowledge.prefill_work import work_tokens

GROUP_S: Final = 0.001
"""First bytes of one endpoint within this time are from the same prefill step."""
OWN_BASE_LN: Final = 0.5
"""An endpoint's fixed time counts as its own, and not as noise, if it deviates from the pool's by more than this, in
ln."""
OWN_S: Final = 30.0
"""What was learned of an endpoint is valid for this long after its last sample; then the pool's values apply. One that
looks slow gets few requests to show that it is not, and a new one has no samples."""
FEW_TOKENS: Final = 256
MANY_TOKENS: Final = 1024
"""A prefill of fewer than `FEW_TOKENS` shows the fixed time, one of more than this the time per token."""


class Speed:
    """The speed of one endpoint. Durations are milliseconds."""

    def __init__(self, pool: PoolModel) -> None:
        self._pool = pool
        self.factor = 1.0
        """Prefill time relative to the pool's; 1 unless it clearly differs."""
        self.ln_factor = 0.0
        self.base_ms = pool.base_ms
        """The endpoint's own time to the first token that does not depend on the prompt. The pool's applies after
        `base_until`, and until it clearly differs."""
        self.base_until = -NEVER
        self._group: list[Placement] = []
        self._group_at, self._group_since = -NEVER, 0.0
        # Inter-token gap = gap_ms + gap_per_token_ms * context tokens
        self.gap_ms, self.gap_per_token_ms = pool.gap_ms, pool.gap_per_token_ms
        self.mean_gap_ms = pool.gap_ms
        self.gap_until = -NEVER
        """Until when these are the endpoint's own; then the pool's apply."""
        self._gaps = Gaps(pool.gaps)
        self.samples, self._reports = Samples(), 0

    def renew(self) -> None:
        """Another engine process serves there now: its fixed time and gaps are the pool's until they are measured.

        Else an endpoint that was slow before it died gets no short prompts for `OWN_S`, although it is idle. The
        prefill speed stays, as it is the hardware's.
        """
        pool = self._pool
        self.base_ms, self.base_until = pool.base_ms, -NEVER
        self._group = []
        self.gap_ms, self.gap_per_token_ms, self.gap_until = pool.gap_ms, pool.gap_per_token_ms, -NEVER
        self.mean_gap_ms = pool.gap_ms
        self._gaps = Gaps(pool.gaps)

    def save(self, now: float) -> dict[str, dict[str, float]]:
        """What was learned, for `restore`."""
        own = {"ln_factor": self.ln_factor, "base_ms": self.base_ms, "base_for_s": max(0.0, self.base_until - now)}
        return {
            "speed": {**own, "gap_for_s": max(0.0, self.gap_until - now)},
            "gaps": self._gaps.save(),
            "samples": asdict(self.samples),
        }

    def restore(self, saved: Mapping[str, Mapping[str, float]], age_s: float, share: float, now: float) -> None:
        """Start with what `save` returned `age_s` ago, after the pool has. `share`: of the deviation from the pool."""
        speed = saved["speed"]
        self.samples = saved_samples(saved["samples"])
        self._set_factor(speed["ln_factor"] * share)
        self.base_ms, self.base_until = speed["base_ms"], now + min(OWN_S, speed["base_for_s"]) - age_s
        self._gaps.restore(saved["gaps"], share)
        slowness = self._gaps.slowness()
        self.gap_ms, self.gap_per_token_ms = slowness * self._pool.gap_ms, slowness * self._pool.gap_per_token_ms
        self.gap_until = now + min(OWN_S, speed["gap_for_s"]) - age_s
        self.mean_gap_ms = self._gaps.mean_ms

    @property
    def token_ms(self) -> float:
        """Milliseconds to prefill a token."""
        return self._pool.token_ms * self.factor

    def prefill_ms(self, work: float) -> float:
        """Milliseconds for this much prefill work."""
        return work * self._pool.token_ms * self.factor

    def first_byte_ms(self, wait_ms: float, work: float, now: float) -> float:
        """Milliseconds until the first token of a request with `work`, after a queue that takes `wait_ms`."""
        base = self.base_ms if self.base_until > now else self._pool.base_ms
        return base + wait_ms + self.prefill_ms(work)

    def first_bytes_arrived(self, placements: list[Placement], since_at: float, now: float) -> None:
        """Note first bytes, of prefills that began at `since_at` at the earliest."""
        if now - self._group_at > GROUP_S:
            self.learn_group()
            self._group_at = now
            self._group_since = since_at
        self._group += placements

    def close_group(self, now: float) -> None:
        """Learn from the last group of first bytes, if it is complete."""
        if self._group and now - self._group_at > GROUP_S:
            self.learn_group()

    def learn_group(self) -> None:
        """Learn from the time of one group of first bytes: the fixed time if it was little work, the speed if it was
        much.
        """
        group = self._group
        if not group:
            return
        self._group = []
        pool = self._pool
        tokens = sum(one.work for one in group)
        since_at = max(self._group_since, min(one.placed_at for one in group))
        took_ms = 1000.0 * (self._group_at - since_at)
        if any(not one.request.prompt_bytes for one in group):
            return  # its work is unknown
        arrivals = {one.arrival for one in group}
        if Arrival.NO_SLOT in arrivals:
            return  # it waited for a slot
        if arrivals != {Arrival.LOADED}:
            arrival = Arrival.FIRST_LOAD if Arrival.FIRST_LOAD in arrivals else Arrival.RELOAD
            sample = took_ms - self.base_ms - self.prefill_ms(tokens)
            pool.load_times = pool.load_times.learned(arrival, sample)
            pool.samples.adapter_load_ms += arrival is Arrival.RELOAD
            return
        left = sum([work_tokens(one.uncached_tokens, one.cached_tokens) for one in group])
        saved = sum([work_tokens(one.prompt_tokens, 0.0) for one in group]) - left
        pool.savings.learn(left, saved, took_ms - self.base_ms)
        if tokens < FEW_TOKENS:
            self.base_ms = step(self.base_ms, took_ms)
            pool.base_ms = step(pool.base_ms, took_ms)
            self.samples.base_ms += 1
            pool.samples.base_ms += 1
            is_own = abs(math.log(self.base_ms / pool.base_ms)) > OWN_BASE_LN
            self.base_until = self._group_at + OWN_S if is_own else -NEVER
        elif tokens >= MANY_TOKENS:
            expected_ms = pool.token_ms * math.exp(self.ln_factor) * tokens
            self._learn_rate(math.log(max(1.0, took_ms - self.base_ms / 2.0) / expected_ms))

    def learn_early_response(self, placement: Placement, now: float) -> None:
        """Learn from a non-streaming response that was complete before its prefill was due: prefill is faster than
        assumed. Without streams nothing else shows that, and requests were held for idle servers.
        """
        if placement.request.prompt_bytes and placement.due_at < NEVER:
            took_ms = 1000.0 * (now - placement.placed_at)
            expected_ms = 1000.0 * (placement.due_at - placement.placed_at) - self.base_ms  # with the work before it
            if took_ms < expected_ms and expected_ms >= self.prefill_ms(MANY_TOKENS):
                self._learn_rate(math.log(max(1.0, took_ms - self.base_ms / 2.0) / expected_ms))

    def _learn_rate(self, off: float) -> None:
        """Learn from a prefill that took e^`off` times as long as expected."""
        pool, off = self._pool, clip(off, -0.7, 0.7)
        pool.token_ms = clip(pool.token_ms * math.exp(0.2 * off / max(1, pool.index.members)), 1e-5, 100.0)
        self.samples.prefill_ms_per_token += 1
        pool.samples.prefill_ms_per_token += 1
        self._set_factor((self.ln_factor + 0.05 * off) * (1.0 - 0.005))

    def _set_factor(self, ln_factor: float) -> None:
        self.ln_factor = ln_factor
        self.factor = math.exp(ln_factor) if abs(ln_factor) > 0.25 else 1.0

    def assume(self, ln_factor: float) -> None:
        """Assume a speed until one was measured."""
        if not self.samples.prefill_ms_per_token:
            self.ln_factor = ln_factor
            self.factor = math.exp(ln_factor)

    def learn_gap(self, context_tokens: float, gap_ms: float, prefill_ms: float, now: float) -> None:
        """Learn from a report of progress: the mean gap since the last one, and how much of it prefills took. Every
        fifth counts.
        """
        self._reports += 1
        if self._reports % 5 != 1:
            return
        self.samples.gap_ms += 1
        pool, gaps = self._pool, self._gaps
        gaps.learn(context_tokens, gap_ms, prefill_ms, pool.index.members)
        pool.gap_ms, pool.gap_per_token_ms = pool.gaps.gap_ms, pool.gaps.gap_per_token_ms
        slowness = gaps.slowness()
        self.gap_ms, self.gap_per_token_ms = slowness * pool.gap_ms, slowness * pool.gap_per_token_ms
        self.gap_until = now + OWN_S if slowness != 1.0 else -NEVER  # the pool's gap goes on changing
        self.mean_gap_ms = gaps.mean_ms
