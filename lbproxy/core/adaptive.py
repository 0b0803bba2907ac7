"""The adaptive policy: what a request costs on each endpoint, in milliseconds, its own and everybody else's.

The price of an endpoint is the sum of six terms, each explained where it is added up below: the request's own time to
its first token; the stall that its prefill imposes on the streams there; its decode, and the slow-down of theirs; the
cache space that it takes from prefixes that may be needed again; the wait for cache space; and the loading of its
adapter. There is no threshold, filter or gate: who is cheapest, is.

It reads `EndpointState.load` (see `core.estimate`) and remembers nothing. The constants were found by some 5,000 runs
of a step-level simulation of vLLM; docs/routing.md says what each is worth.
"""

from __future__ import annotations

from collections.abc import Sequence

from lbproxy.core.estimate import LoadModel, PoolModel
from lbproxy.core.placement import freed_per_ms
from lbproxy.core.prefix import BLOCK_BYTES
from lbproxy.core.pricing import Plan, Policy, Prices
from lbproxy.core.types import EndpointState, InferenceRequest

STALL = 0.3
"""Share of a prefill's time by which each stream on the endpoint is held up (chunked prefill shares the step)."""
DECODE = 0.15
"""What a millisecond of decode is worth beside one of waiting for the first token."""
SPACE = 20.0
"""What a full cache is worth, in prefills of the same prompt."""
MAX_SPACE_WAIT_MS = 60_000.0
MIN_FREED_PER_MS = 0.05


class _Seen:
    """What the price of one candidate was added up from. An object of its own, as compiled it holds bare numbers."""

    __slots__ = (
        *("base", "context", "depth", "gap", "live", "room", "size"),
        *("slope", "space_wait", "speed", "streams", "wait"),
    )

    def __init__(  # noqa: PLR0913, PLR0917 - as many as there are
        self,
        speed: float,
        context: float,
        depth: int,
        size: int,
        base: float,
        wait: float,
        streams: float,
        gap: float,
        slope: float,
        live: float,
        room: float,
        space_wait: float,
    ) -> None:
        self.speed = speed
        self.context = context
        self.depth = depth
        self.size = size
        self.base = base
        self.wait = wait
        self.streams = streams
        self.gap = gap
        self.slope = slope
        self.live = live
        self.room = room
        self.space_wait = space_wait


class _Notes:
    """What prices were added up from, made for each request."""

    __slots__ = ("adapters", "block", "output", "prompt", "seen", "space", "token_ms")

    def __init__(  # noqa: PLR0913, PLR0917 - as many as there are
        self,
        seen: list[_Seen],
        token_ms: float,
        output: float,
        prompt: float,
        block: float,
        space: float,
        adapters: list[float] | None,
    ) -> None:
        self.seen = seen
        """For each candidate."""
        self.token_ms = token_ms
        self.output = output
        self.prompt = prompt
        self.block = block
        self.space = space
        self.adapters = adapters
        """What the request waits for its adapter, if it is one."""


class Adaptive(Policy):
    """The default policy; see the module."""

    block_bytes: int | None = BLOCK_BYTES
    holds = True
    tolerance = 1.0
    unit: str | None = "ms"
    first_byte_parts = frozenset({"base", "wait", "prefill", "space_wait", "adapter"})

    def price(  # noqa: PLR0915 - a call costs more than a statement
        self, request: InferenceRequest, candidates: Sequence[EndpointState], *, plan: Plan | None, now: float
    ) -> Prices:
        """Milliseconds; the waits are the prefill work ahead, the uncached tokens those of the request there."""
        loads = [state.load for state in candidates]
        pool = loads[0].pool
        token_ms, output, base = pool.token_ms, pool.output_tokens, pool.base_ms
        prompt = max(1.0, request.prompt_bytes / pool.bytes_per_token)
        pool_gap = pool.gap_ms, pool.gap_per_token_ms
        block = pool.index.block_bytes / pool.bytes_per_token
        blocks = len(request.block_keys) * block
        depths = pool.index.match(request.block_keys)
        mean_load = sum([load.in_flight for load in loads]) / len(loads)
        space = SPACE * token_ms * pool.hit_ratio * (1.0 + STALL * mean_load)
        space_tokens, decode = pool.size.space_tokens, DECODE * output
        costs, waits, uncached_tokens = [], [], []
        seen: list[_Seen] | None = [] if self.explains else None
        for load in loads:
            if load.due_at <= now:
                load.expire(now)
            rate = token_ms * load.speed
            # Prefill: of what is not cached here, after what is queued here, less what is done of the first of that.
            cached = depths[load.slot] * block
            uncached = prompt - cached
            if uncached < 1.0:  # noqa: PLR1730 - max() takes four times as long
                uncached = 1.0
            prefill = uncached * rate
            backlog = 0.0
            if load.pending:
                done = 1000.0 * (now - load.since_at) / rate
                backlog = load.pending_tokens - (done if done < load.head_tokens else load.head_tokens)
            in_flight = load.in_flight
            streams = float(in_flight)
            if load.others and now <= load.others_until:
                streams += load.others
                backlog += load.others_tokens
            if backlog < 0.0:  # noqa: PLR1730
                backlog = 0.0
            if plan is not None:
                backlog += plan[load.slot]
            wait = backlog * rate
            # Decode: a gap grows with the context that the batch reads in each step.
            own_gap, slope = (load.gap_ms, load.gap_per_token_ms) if load.gap_until > now else pool_gap
            gap = own_gap + slope * (load.context_tokens + prompt)
            # Cache space: more is taken where more is full, and it matters more where more is reused. What is evicted
            # may be computed anew on any endpoint, so this is at the pool's speed: at its own, slow ones looked far too
            # dear (half the servers at half speed: goodput .46 instead of .75).
            cache, live, capacity = load.cache, load.live_tokens, load.capacity_tokens
            room = load.told_tokens or space_tokens
            first = load.base_ms if load.base_until > now else base
            cost = first + wait + prefill * (1.0 + STALL * streams) + decode * (gap + streams * slope * prompt)
            cost += space * ((cache.size * block + live) / room) * uncached
            # Space for this request and for what those in flight will still say, as far as it is not there.
            growth = in_flight * output - live
            over = cache.pinned * block + (growth if growth > live else live) + blocks - cached + output - capacity
            late = space_wait_ms(load, over, now) if over > 0.0 else 0.0
            cost += late
            if seen is not None:
                context, depth, size = load.context_tokens, depths[load.slot], cache.size
                one = _Seen(load.speed, context, depth, size, first, wait, streams, own_gap, slope, live, room, late)
                seen.append(one)
            costs.append(cost)
            waits.append(wait)
            uncached_tokens.append(uncached)
        adapters = _adapter_ms(loads, request.model, pool, now)
        if adapters is not None:
            costs = [cost + adapter for cost, adapter in zip(costs, adapters, strict=True)]
        notes = None if seen is None else _Notes(seen, token_ms, output, prompt, block, space, adapters)
        return Prices(costs, waits, uncached_tokens, notes)

    def explain(self, notes: object, *, shown: Sequence[int]) -> list[dict[str, float]]:
        """The terms of the module's docstring, in milliseconds, if `price` was to note them."""
        if notes is None:
            return []
        assert isinstance(notes, _Notes)
        parts = [_parts(notes, notes.seen[n]) for n in shown]
        if notes.adapters is not None:
            for one, n in zip(parts, shown, strict=True):
                one["adapter"] = notes.adapters[n]
        return parts


def _parts(notes: _Notes, seen: _Seen) -> dict[str, float]:
    """The terms that `Adaptive.price` adds up for one candidate."""
    uncached = max(1.0, notes.prompt - seen.depth * notes.block)
    prefill = uncached * notes.token_ms * seen.speed
    return {
        "base": seen.base,
        "wait": seen.wait,
        "prefill": prefill,
        "stall": prefill * STALL * seen.streams,
        "decode": DECODE * notes.output * (seen.gap + seen.slope * (seen.context + notes.prompt)),
        "slow_down": DECODE * notes.output * seen.streams * seen.slope * notes.prompt,
        "cache_space": notes.space * (seen.size * notes.block + seen.live) / seen.room * uncached,
        "space_wait": seen.space_wait,
    }


def space_wait_ms(load: LoadModel, over_tokens: float, now: float) -> float:
    """How long until `over_tokens` of cache space become free: at the rate of late, or a fifth of what decode makes."""
    rate = max(freed_per_ms(load.freed, now), 0.2 * load.in_flight / max(5.0, load.mean_gap_ms), MIN_FREED_PER_MS)
    return min(MAX_SPACE_WAIT_MS, over_tokens / rate)


def _adapter_ms(loads: Sequence[LoadModel], adapter: str | None, pool: PoolModel, now: float) -> list[float] | None:
    """What a request waits for its adapter on each endpoint. None: its model is none."""
    if adapter is None or adapter not in pool.adapters:
        return None
    return [
        load.adapters.price_ms(
            adapter,
            times=pool.load_times,
            in_flight=load.in_flight,
            answer_ms=pool.output_tokens * (load.gap_ms + load.gap_per_token_ms * load.context_tokens),
            now=now,
        )
        for load in loads
    ]
