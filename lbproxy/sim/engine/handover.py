# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode on different engines: what one engine holds for others, and what it gets from others.

A request with a `hold` (`sequence.py`) is prefilled like any other, and its blocks stay in use afterwards, until they
are released, or until the lease ends. A request with a `source` waits in the queue for blocks for all of its prompt and
for a slot; then those blocks which the engine does not have in its prefix cache are transferred, in `transfer_ms` and
`transfer_token_ms` for each token (`presets.py`); then it is *received*: it computes its last prompt token before all
that waits, and decodes. As in vLLM, it takes part in no step while it is transferred, and has no slot then.

The engine (`engine.py`) decides when any of this happens; this module owns what is held and what is under way.
`due` is the time of the next thing that happens by itself.

Not modelled: that blocks with wrong data are found by later requests as well.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from lbproxy.sim.engine.kv_cache import BlockPool
from lbproxy.sim.engine.presets import BLOCK_TOKENS
from lbproxy.sim.engine.sequence import Hold, KvSource, KvState, Running, SequencePhase

NEVER = float("inf")


@dataclass(slots=True, eq=False)
class _Transfer:
    """The KV of one request on its way here."""

    sequence: Running
    source: KvSource
    seconds: float
    """How long it takes."""
    ends_at: float = NEVER
    """NEVER: it has not begun."""


class EngineHandover:
    """One engine's."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.due = NEVER
        self.received: OrderedDict[str, Running] = OrderedDict()
        """Sequences whose KV is here, and that have not begun to compute."""
        self._order = count()
        self._leases: list[tuple[float, int, Hold]] = []
        """Leases by their end. An entry counts if its hold says the same."""
        self._ends: list[tuple[float, int, _Transfer]] = []
        """Transfers by their end, stale entries included."""
        self._transfers: dict[str, _Transfer] = {}
        self._holds: dict[Hold, None] = {}
        self.held_blocks = 0
        self.received_tokens = 0
        self.transfers = 0
        """Transfers that ended well, or with wrong data."""
        self.failed = 0
        self.expired = 0
        """Holds whose lease ended."""
        self.garbage = 0
        """Requests that read KV which was not held any more."""

    def use(self, pool: BlockPool) -> None:
        """Another pool, while nothing is in use in either."""
        assert not self.is_busy
        self._pool = pool

    @property
    def deferred(self) -> int:
        """Requests that wait for their KV, or for a step after it."""
        return len(self._transfers) + len(self.received)

    @property
    def is_busy(self) -> bool:
        """Whether blocks are in use by what is in no step."""
        return bool(self._transfers or self.received or self._holds)

    # What others are to read.

    def hold(self, sequence: Running, hold: Hold, at: float) -> None:
        """Keep the blocks of a request that is prefilled."""
        hold.blocks, sequence.blocks = sequence.blocks, []
        hold.expires_at = max(hold.expires_at, at + hold.lease_s)
        self._holds[hold] = None
        self.held_blocks += len(hold.blocks)
        self._expect(hold)
        hold.become(KvState.HELD)

    def renew(self, hold: Hold, expires_at: float) -> None:
        """The lease of what is held, or will be, ends then."""
        hold.expires_at = expires_at
        if hold in self._holds:
            self._expect(hold)

    def release(self, hold: Hold, state: KvState = KvState.FREED) -> bool:
        """Free what is held; False if it is not any more, or not yet: then it will not be."""
        if hold not in self._holds:
            hold.wanted = False
            return False
        del self._holds[hold]
        self.held_blocks -= len(hold.blocks)
        self._pool.release(hold.blocks)
        hold.become(state)
        return True

    def _expect(self, hold: Hold) -> None:
        if hold.expires_at < NEVER:
            heapq.heappush(self._leases, (hold.expires_at, next(self._order), hold))
        self._plan()

    # What is read from others.

    def receive(self, sequence: Running, source: KvSource, tokens: int, seconds: float, at: float) -> None:
        """Begin the transfer of `tokens`, or wait until they can be read. The blocks for all of them are there."""
        sequence.phase = SequencePhase.RECEIVING
        sequence.received_tokens = tokens
        transfer = _Transfer(sequence, source, seconds)
        self._transfers[sequence.request.id] = transfer
        source.begin(now=at)
        self._begin(transfer, at)

    def poke(self, request_id: str, at: float) -> None:
        """The state of a request's source has changed."""
        transfer = self._transfers.get(request_id)
        if transfer is not None:
            self._begin(transfer, at)

    def _begin(self, transfer: _Transfer, at: float) -> None:
        state = transfer.source.state
        if state is KvState.LOST:
            transfer.ends_at = at
        elif state is not KvState.PENDING and transfer.ends_at == NEVER:
            transfer.ends_at = at + transfer.seconds
        else:
            return
        heapq.heappush(self._ends, (transfer.ends_at, next(self._order), transfer))
        self._plan()

    def drop(self, sequence: Running) -> None:
        """Forget a request that is transferred or received. Its blocks are released; its source is the caller's."""
        self._transfers.pop(sequence.request.id, None)
        self.received.pop(sequence.request.id, None)
        self._free(sequence)

    def _free(self, sequence: Running) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = sequence.registered = sequence.received_tokens = 0

    # Time.

    def advance(self) -> list[Running]:
        """Do what is `due`. Returns the requests whose KV is lost: they have no blocks any more."""
        at = self.due
        while self._leases and self._leases[0][0] <= at:
            ended, _, hold = heapq.heappop(self._leases)
            if hold.expires_at == ended and self.release(hold, KvState.EXPIRED):
                self.expired += 1
        lost: list[Running] = []
        while self._ends and self._ends[0][0] <= at:
            ended, _, transfer = heapq.heappop(self._ends)
            sequence = transfer.sequence
            if transfer.ends_at == ended and self._transfers.get(sequence.request.id) is transfer:
                del self._transfers[sequence.request.id]
                self._end(transfer, at, lost)
        self._plan()
        return lost

    def _end(self, transfer: _Transfer, at: float, lost: list[Running]) -> None:
        sequence, state = transfer.sequence, transfer.source.state
        sequence.source = None
        if state is KvState.LOST:
            self.failed += 1
            self._free(sequence)
            lost.append(sequence)
        else:
            self.transfers += 1
            self.received_tokens += sequence.received_tokens
            if state is not KvState.HELD:
                self.garbage += 1
                sequence.garbage = True
            # The last token is computed, for its logits.
            sequence.computed = sequence.request.prompt_tokens - 1
            self.received[sequence.request.id] = sequence
            self._register(sequence)
        transfer.source.finish(now=at, was_read=state is not KvState.LOST)

    def _register(self, sequence: Running) -> None:
        hashes = sequence.request.block_hashes
        start, end = sequence.registered, min(sequence.computed // BLOCK_TOKENS, len(hashes))
        if start < end:
            self._pool.register(sequence.blocks[start:end], hashes[start:end])
            sequence.registered = end

    def _plan(self) -> None:
        while self._leases and self._leases[0][2].expires_at != self._leases[0][0]:
            heapq.heappop(self._leases)
        lease = self._leases[0][0] if self._leases else NEVER
        self.due = min(lease, self._ends[0][0]) if self._ends else lease

    def fail(self, live: Iterable[Running], now: float) -> None:
        """The engine fails with all that it has: nothing that it held can be read, and it reads nothing more."""
        for sequence in live:
            if sequence.source is not None:
                sequence.source.abandon(now=now)
            if sequence.request.hold is not None:
                sequence.request.hold.become(KvState.LOST)
        for hold in list(self._holds):
            hold.become(KvState.LOST)
