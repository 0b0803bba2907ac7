# SPDX-License-Identifier: Apache-2.0
"""When a request would get its first token from a simulated server, if it were sent there now: the engine's own steps,
run ahead on counts instead of blocks.

`foresee` begins where the engine is and repeats its rule step by step (`engine.py`): decodes first, then the unfinished
prefill, then the queue in order while tokens and blocks last; a step takes what the preset's formula says. True are the
uncached tokens of every prompt, the lengths of all responses, what is in the batch and the space in the cache.

Not foreseen: the 3 % by which steps vary, arrivals that are still to come, preemption, and which of the shared blocks
that ending requests give back are still used by others (all of them count as free). A
request whose blocks are not all free waits for them, where the engine would begin with those of its first chunk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lbproxy.sim.engine.engine import Engine
from lbproxy.sim.engine.kv_cache import BlockPool
from lbproxy.sim.engine.lora_slots import LoraSlots
from lbproxy.sim.engine.presets import BLOCK_TOKENS, Preset
from lbproxy.sim.engine.sequence import Running

MAX_STEPS = 4000
"""Looked ahead; more than a minute. Whoever has not begun by then is taken to begin."""


class Outlook(NamedTuple):
    """The engine's own state, for who has to foresee what it will do; not to be changed."""

    preset: Preset
    seconds_per_ms: float
    pool: BlockPool
    lora: LoraSlots
    step_ends_at: float | None
    """When the step in flight ends; None = idle."""
    steps_done: int
    context: int
    """Computed tokens of all decodes together."""
    decoding: Mapping[str, Running]
    finishing: Mapping[int, Sequence[Running]]
    """By how many steps will be done then; an entry counts if the sequence's `finishes_at` says the same."""
    prefills: Sequence[Running]
    """Sequences with a chunk in the step in flight."""
    partial: Running | None
    """The one whose prefill goes on after that."""
    queue: Sequence[Running]
    """Not begun, in the order in which they will; some may be GONE."""


def outlook_of(engine: Engine) -> Outlook:
    """All that is to come, if nothing more is added. Cheap; valid until the next call that changes something."""
    return Outlook(
        engine._preset,
        engine._seconds_per_ms,
        engine._pool,
        engine._lora,
        engine._step_ends_at,
        engine._steps_done,
        engine._context,
        engine._decoding,
        engine._finishing,
        engine._prefills,
        engine._partial,
        [*engine._waiting.values(), *engine._arriving],
    )


class Foreseen(NamedTuple):
    """What a request would meet. Times are those of the engine's clock."""

    begins_at: float
    """The begin of the step in which its prefill begins."""
    first_at: float
    """When its first token leaves the server."""


@dataclass(slots=True)
class PendingPrefill:
    """A prefill that has not begun."""

    ready_at: float
    uncached: int
    """Tokens to compute; at least 1."""
    cached: int
    """Tokens before those, which attention reads."""
    blocks: int
    """Blocks that it takes from the free ones."""
    output_tokens: int


class _Ahead:
    """An engine's batch, run ahead."""

    def __init__(self, outlook: Outlook, queue: Sequence[PendingPrefill], at: float) -> None:
        self.at = at
        self._preset = outlook.preset
        self._slowdown = outlook.lora.slowdown
        self._seconds_per_ms = outlook.seconds_per_ms
        self._finishing = outlook.finishing
        self._step = self._from_step = outlook.steps_done
        self._decodes = len(outlook.decoding)
        self._context = outlook.context
        self._free = float(outlook.pool.available)
        self._later: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """Those whose decode begins in what is foreseen: by step of their end, tokens then and blocks."""
        self._queue = list(queue)
        self._next = 0
        self._partial: PendingPrefill | None = None
        if outlook.step_ends_at is not None:
            for one in outlook.prefills:
                if one.computed == one.known_tokens:
                    self._begin_decode(one.computed, one.request.output_tokens - one.generated, len(one.blocks))
            self._end_step()
            if outlook.partial is not None:
                left = outlook.partial
                fresh, blocks = left.known_tokens - left.computed, -(-left.known_tokens // BLOCK_TOKENS)
                self._partial = PendingPrefill(
                    0.0, fresh, left.computed, blocks, left.request.output_tokens - left.generated
                )
                self._free -= blocks - len(left.blocks)

    def _begin_decode(self, computed: int, left: int, blocks: int) -> None:
        """After the step in flight, which gives the first of the tokens that are `left`."""
        if left > 1:
            self._decodes += 1
            self._context += computed - 1  # the end of the step adds one
            self._later[self._step + left].append((computed + left - 1, blocks + left // BLOCK_TOKENS))
        else:
            self._free += blocks

    def _end_step(self) -> None:
        self._step += 1
        self._context += self._decodes
        self._free -= self._decodes / BLOCK_TOKENS
        for one in self._finishing.get(self._step, ()):
            if one.finishes_at == self._step:
                self._decodes -= 1
                self._context -= one.computed + self._step - one.mark
                self._free += len(one.blocks) + (self._step - self._from_step) / BLOCK_TOKENS
        for tokens, blocks in self._later.pop(self._step, ()):
            self._decodes -= 1
            self._context -= tokens
            self._free += blocks

    def run(self, wanted: PendingPrefill) -> Foreseen:
        """Until `wanted`, the last in the queue, has its first token."""
        begins_at: float | None = None
        for _ in range(MAX_STEPS):
            if not self._decodes and self._partial is None and self._queue[self._next].ready_at > self.at:
                self.at = self._queue[self._next].ready_at
            budget = self._preset.token_budget - self._decodes
            chunks: list[tuple[PendingPrefill, int]] = []
            if self._partial is not None:
                budget = self._take(self._partial, budget, chunks)
            while budget and self._next < len(self._queue):
                work = self._queue[self._next]
                stuck = work.blocks > self._free and (self._decodes or chunks)
                if work.ready_at > self.at or stuck or self._decodes + len(chunks) >= self._preset.max_sequences:
                    break
                self._next += 1
                self._free -= work.blocks
                if work is wanted:
                    begins_at = self.at
                budget = self._take(work, budget, chunks)
            if not chunks:
                self._decode_until_an_end()
                continue
            self.at += self._duration_s(chunks, budget)
            if any(work is wanted and not work.uncached for work, _ in chunks):
                assert begins_at is not None
                return Foreseen(begins_at, self.at)
            for work, _ in chunks:
                if not work.uncached:
                    self._begin_decode(work.cached, work.output_tokens, work.blocks)
            self._end_step()
        return Foreseen(self.at if begins_at is None else begins_at, self.at)

    def _decode_until_an_end(self) -> None:
        """Steps of nothing but decodes, up to the one in which the next of them ends or the next request comes."""
        ready_at = self._queue[self._next].ready_at
        step_s = self._duration_s((), self._preset.token_budget - self._decodes)
        steps = 1
        while not self._finishing.get(self._step + steps) and not self._later.get(self._step + steps):
            if steps >= MAX_STEPS or self.at < ready_at <= self.at + steps * step_s:
                break
            steps += 1
        self._context += (steps - 1) * self._decodes // 2
        self.at += steps * self._duration_s((), self._preset.token_budget - self._decodes)
        self._context += (steps - 1) * self._decodes - (steps - 1) * self._decodes // 2
        self._free -= (steps - 1) * self._decodes / BLOCK_TOKENS
        self._step += steps - 1
        self._end_step()

    def _take(self, work: PendingPrefill, budget: int, chunks: list[tuple[PendingPrefill, int]]) -> int:
        chunk = min(work.uncached, budget)
        chunks.append((work, chunk))
        work.uncached -= chunk
        work.cached += chunk
        self._partial = work if work.uncached else None
        return budget - chunk

    def _duration_s(self, chunks: Sequence[tuple[PendingPrefill, int]], budget: int) -> float:
        attention = 0.0
        for work, chunk in chunks:
            attention += chunk * (work.cached - chunk / 2)
        tokens, sequences = self._preset.token_budget - budget, self._decodes + len(chunks)
        return self._seconds_per_ms * self._slowdown * self._preset.step_ms(tokens, sequences, self._context, attention)


def foresee(outlook: Outlook, before: Sequence[PendingPrefill], wanted: PendingPrefill) -> Foreseen:
    """What a request `wanted` meets behind those `before` it in the queue. All of these are used up."""
    at = outlook.step_ends_at
    return _Ahead(outlook, [*before, wanted], wanted.ready_at if at is None else at).run(wanted)


def slot_free_at(outlook: Outlook, adapter: str | None, at: float) -> float:
    """When an adapter gets a slot, if nobody else who needs one comes: as soon as all requests of one that runs end."""
    if outlook.lora.fits(adapter):
        return at
    ends: dict[str | None, int] = defaultdict(int)
    for one in (*outlook.decoding.values(), *outlook.prefills):
        left = _left(one, outlook.steps_done)
        ends[one.request.adapter] = max(ends[one.request.adapter], left)
    ends.pop(None, None)
    steps = min(ends.values(), default=0)
    return at + steps * _decode_s(outlook.preset, outlook)


def _left(one: Running, steps_done: int) -> int:
    return one.finishes_at - steps_done if one.finishes_at >= 0 else one.request.output_tokens - one.generated


def _decode_s(preset: Preset, outlook: Outlook) -> float:
    """How long a step of the decodes alone takes."""
    many = len(outlook.decoding)
    return outlook.seconds_per_ms * outlook.lora.slowdown * preset.step_ms(many, many, outlook.context, 0.0)
