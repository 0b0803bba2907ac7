# SPDX-License-Identifier: Apache-2.0
"""What the balancer has learned of speeds, caches and the queue, as plain numbers for displays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from math import inf
from typing import NamedTuple

from lbproxy.core.knowledge.learning import Samples
from lbproxy.core.knowledge.load_model import LoadModel
from lbproxy.core.knowledge.pool_model import PoolModel
from lbproxy.core.queue.ticket import Ticket

FULL_BY = ("requests", "space", "prefill")
"""Why an endpoint is full: it runs as many requests as it can, its KV cache has no space for more, or enough prefill is
queued there."""
MAX_GROUPS = 20
"""The number of models, priorities and flows by which the queue is counted."""


@dataclass(frozen=True, slots=True)
class EndpointLearned:
    """What was learned of one endpoint."""

    prefill_ms_per_token: float
    base_ms: float
    """Time to the first token that does not depend on the prompt."""
    gap_ms: float
    """Between two tokens, with what it has in flight now."""
    prefill_queue_ms: float
    """How long the prefill work takes that is queued there."""
    cached_tokens: float
    """Prompt tokens that are predicted to be in its prefix cache."""
    capacity_tokens: float
    context_tokens: float
    """Prompts and responses of all requests in flight."""
    wait_ms: float
    """How long a request that is placed there now waits before its prefill begins: for prefills or for the end of
    others."""
    limit: float | None
    """Requests that it runs at once, as far as known; None = not known."""
    full_by: str | None
    """Why it is full now, one of `FULL_BY`; None = it is not full."""
    held: int
    """Requests that wait in lbproxy for room there."""
    samples: dict[str, int]
    """How many samples of its own each speed has, by its name here. 0: it is the pool's, or assumed."""


class LearnedTransfer(NamedTuple):
    """The time from the placement of a second leg to its first byte: see `core.knowledge.transfer`."""

    fixed_ms: float
    ms_per_token: float
    """Milliseconds for each token of the prompt that is transferred."""


@dataclass(frozen=True, slots=True)
class PoolLearned:
    """What was learned of all endpoints together."""

    prefill_ms_per_token: float
    base_ms: float
    bytes_per_token: float
    media_scale: float
    """What engines count for images and other media, relative to the estimate."""
    answer_tokens: float
    """Mean length of a response."""
    hit_ratio: float
    """The share of prompt tokens that was predicted to be cached."""
    adapter_load_ms: float
    """If it was loaded on the same endpoint before; the first load takes longer."""
    transfer_fixed_ms: float
    """Of a second leg, from its placement to its first byte: the part that does not depend on the prompt."""
    transfer_ms_per_token: float
    """The part for each token of the prompt that is transferred."""
    samples: dict[str, int]
    """How many samples each of these has, by its name. 0: it is assumed."""


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """The waiting requests."""

    waiting: int
    bytes: int
    oldest_s: float | None
    by_priority: dict[int, int] = field(default_factory=dict)
    by_model: dict[str | None, int] = field(default_factory=dict)
    """Each with the `MAX_GROUPS` most frequent values."""
    by_flow: dict[str, int] = field(default_factory=dict)
    by_reason: dict[str, int] = field(default_factory=dict)


def of_endpoint(load: LoadModel, now: float, overloaded: bool) -> EndpointLearned:
    """What was learned of one endpoint. `overloaded`: see `LoadModel.full_by`."""
    pool = load.pool
    own_gap = load.speed.gap_until > now
    gap_ms, slope = (
        (load.speed.gap_ms, load.speed.gap_per_token_ms) if own_gap else (pool.gap_ms, pool.gap_per_token_ms)
    )
    return EndpointLearned(
        prefill_ms_per_token=pool.token_ms * load.speed.factor,
        base_ms=load.speed.base_ms if load.speed.base_until > now else pool.base_ms,
        gap_ms=gap_ms + slope * load.work.context_tokens,
        prefill_queue_ms=load.prefill_ms(now),
        cached_tokens=load.kv.cache.size * pool.index.block_bytes / pool.bytes_per_token,
        capacity_tokens=load.kv.capacity_tokens,
        context_tokens=load.work.context_tokens,
        wait_ms=load.wait_ms(now),
        limit=None if load.room.slots.limit == inf else load.room.slots.limit,
        full_by=load.full_by(now, overloaded),
        held=load.room.reservations.count,
        samples=_counts(load.speed.samples, EndpointLearned),
    )


def of_pool(pool: PoolModel) -> PoolLearned:
    """What was learned of all endpoints together."""
    transfer = pool.transfer
    return PoolLearned(
        prefill_ms_per_token=pool.token_ms,
        base_ms=pool.base_ms,
        bytes_per_token=pool.bytes_per_token,
        media_scale=pool.media.scale,
        answer_tokens=pool.output_tokens,
        hit_ratio=pool.hit_ratio,
        adapter_load_ms=pool.load_times.again,
        transfer_fixed_ms=transfer.fixed_ms,
        transfer_ms_per_token=transfer.token_ms,
        samples=_counts(pool.samples, PoolLearned)
        | {
            "media_scale": pool.media.samples,
            "transfer_fixed_ms": transfer.seen,
            "transfer_ms_per_token": transfer.seen,
        },
    )


def of_transfer(pool: PoolModel) -> LearnedTransfer | None:
    """What was learned of transfers; None: nothing yet."""
    transfer = pool.transfer
    return LearnedTransfer(transfer.fixed_ms, transfer.token_ms) if transfer.seen else None


def _counts(samples: Samples, shown: type[EndpointLearned | PoolLearned]) -> dict[str, int]:
    """The sample counts of the values that are shown."""
    return {name: getattr(samples, name) for name in _COUNTED[shown]}


_COUNTED = {
    shown: [one.name for one in fields(Samples) if one.name in {value.name for value in fields(shown)}]
    for shown in (EndpointLearned, PoolLearned)
}


def of_queue(tickets: Iterable[Ticket], size: int, *, now: float) -> QueueSnapshot:
    """A summary of waiting tickets, the oldest first. O(n)."""
    waiting = list(tickets)
    return QueueSnapshot(
        len(waiting),
        size,
        now - waiting[0].submitted_at if waiting else None,
        dict(Counter(one.request.priority for one in waiting).most_common(MAX_GROUPS)),
        dict(Counter(one.request.model for one in waiting).most_common(MAX_GROUPS)),
        dict(Counter(one.request.flow for one in waiting).most_common(MAX_GROUPS)),
        dict(Counter("unknown" if one.wait is None else one.wait.value for one in waiting)),
    )
