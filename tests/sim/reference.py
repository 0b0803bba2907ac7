# SPDX-License-Identifier: Apache-2.0
"""The scheduler written down naively, as the oracle of the engine's shortcuts.

Every running request is visited in every step, as vLLM does; nothing is counted lazily. The block pool is shared with
the engine: it has its own tests. No aborts: `run` is told all arrivals beforehand.
"""

from dataclasses import dataclass, field

from lbproxy.sim.engine.engine import FirstToken, SimRequest, StepDone
from lbproxy.sim.engine.kv_cache import BlockPool
from lbproxy.sim.engine.presets import BLOCK_TOKENS, Preset


@dataclass(eq=False)
class Sequence:
    request: SimRequest
    computed: int = 0
    generated: int = 0
    blocks: list[int] = field(default_factory=list)
    registered: int = 0
    cached: int | None = None
    prefilling: bool = True
    """Until the token that its admission is for: one token is attended to as a prefill then, too."""

    @property
    def known(self) -> int:
        return self.request.prompt_tokens + self.generated


class Reference:
    def __init__(self, preset: Preset) -> None:
        self.preset = preset
        self.pool = BlockPool(preset.kv_tokens // BLOCK_TOKENS)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0

    def run(self, arrivals: list[tuple[float, SimRequest]]) -> list[StepDone]:
        """The steps that follow from (time, request), in order of time."""
        ready = [(at + self.preset.api_ms / 1000, request) for at, request in arrivals]
        steps: list[StepDone] = []
        now = 0.0
        while ready or self.running or self.waiting:
            if not (self.running or self.waiting):
                now = max(now, ready[0][0])
            while ready and ready[0][0] <= now:
                self.waiting.append(Sequence(ready.pop(0)[1]))
            scheduled = self.schedule()
            now += self.duration(scheduled)
            steps.append(self.finish(now, scheduled))
        return steps

    def schedule(self) -> list[tuple[Sequence, int]]:
        scheduled: list[tuple[Sequence, int]] = []
        budget = self.preset.token_budget
        preempted = False
        position = 0
        while position < len(self.running) and budget:
            sequence = self.running[position]
            count = min(sequence.known - sequence.computed, budget)
            while not self.allocate(sequence, count):
                self.preempt(self.running.pop())
                preempted = True
                if sequence not in self.running:
                    break
            else:
                scheduled.append((sequence, count))
                budget -= count
            position += 1
        while self.waiting and budget and not preempted and len(self.running) < self.preset.max_sequences:
            sequence = self.waiting[0]
            hits = self.pool.match(sequence.request.block_hashes, (sequence.known - 1) // BLOCK_TOKENS)
            cached = len(hits) * BLOCK_TOKENS
            count = min(sequence.known - cached, budget)
            blocks = self.pool.take(hits, -(-(cached + count) // BLOCK_TOKENS) - len(hits))
            if blocks is None:
                break
            self.waiting.pop(0)
            self.running.append(sequence)
            sequence.blocks, sequence.computed, sequence.registered = blocks, cached, len(hits)
            if sequence.cached is None:
                sequence.cached = cached
            self.register(sequence, cached + count)
            scheduled.append((sequence, count))
            budget -= count
        return scheduled

    def allocate(self, sequence: Sequence, count: int) -> bool:
        self.register(sequence, sequence.computed)
        blocks = self.pool.take((), -(-(sequence.computed + count) // BLOCK_TOKENS) - len(sequence.blocks))
        if blocks is None:
            return False
        sequence.blocks += blocks
        if sequence.prefilling:
            self.register(sequence, sequence.computed + count)
        return True

    def register(self, sequence: Sequence, tokens: int) -> None:
        start, end = sequence.registered, min(tokens // BLOCK_TOKENS, len(sequence.request.block_hashes))
        if end > start:
            self.pool.register(sequence.blocks[start:end], sequence.request.block_hashes[start:end])
            sequence.registered = end

    def preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.free(sequence)
        sequence.computed = sequence.registered = 0
        sequence.prefilling = True
        self.waiting.insert(0, sequence)

    def free(self, sequence: Sequence) -> None:
        self.register(sequence, sequence.computed)
        self.pool.release(sequence.blocks)
        sequence.blocks = []

    def duration(self, scheduled: list[tuple[Sequence, int]]) -> float:
        preset = self.preset
        tokens = sum(count for _, count in scheduled)
        context, attention = 0, 0.0
        for sequence, count in scheduled:
            if sequence.prefilling:
                attention += count * (sequence.computed + count / 2)
            else:
                context += sequence.computed
        matmul = (preset.weights_ms**1.5 + (preset.token_ms * tokens) ** 1.5) ** (2 / 3)
        step_ms = preset.host_ms + matmul + preset.sequence_ms * len(scheduled)
        return float(step_ms + preset.context_ms * context / 1e3 + preset.attention_ms * attention / 1e6) / 1000

    def finish(self, now: float, scheduled: list[tuple[Sequence, int]]) -> StepDone:
        tokens: list[str] = []
        first: list[FirstToken] = []
        done: list[Sequence] = []
        for sequence, count in scheduled:
            sequence.computed += count
            if sequence.computed < sequence.known:
                continue
            tokens.append(sequence.request.id)
            if not sequence.generated:
                assert sequence.cached is not None
                first.append(FirstToken(sequence.request.id, sequence.cached))
            sequence.generated += 1
            sequence.prefilling = False
            if sequence.generated == sequence.request.output_tokens:
                done.append(sequence)
        for sequence in done:
            self.running.remove(sequence)
            self.free(sequence)
        return StepDone(now, tuple(tokens), tuple(first), tuple(sequence.request.id for sequence in done))
