"""The adaptive policy: what a request costs on each endpoint, in milliseconds, its own and everybody else's.

The price of an endpoint is the sum of six terms, each explained where it is added up below: the request's own time to
its first token; the stall that its prefill imposes on the streams there; its decode, and the slow-down of theirs; the
cache space that it takes from prefixes that may be needed again; the wait for cache space; and the loading of its
adapter. There is no threshold, filter or gate: who is cheapest, is.

It reads `EndpointState.load` (see `core.estimate`) and remembers nothing. The constants were found by some 5,000 runs
of a step-level simulation of vLLM; docs/routing.md says what each is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from lbproxy.core.estimate import LoadModel, PoolModel, freed_per_ms
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


class Adaptive(Policy):
    """The default policy; see the module."""

    block_bytes = BLOCK_BYTES
    holds = True
    tolerance = 1.0
    first_byte_parts = frozenset({"base", "wait", "prefill", "space_wait", "adapter"})

    def price(
        self, request: InferenceRequest, candidates: Sequence[EndpointState], *, plan: Plan | None, now: float
    ) -> Prices:
        """Milliseconds; the waits are the prefill work ahead, the uncached tokens those of the request there.

        One loop with nothing but local floats: about 0.6 µs a candidate.
        """
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
        decode = DECODE * output
        costs, waits, uncached_tokens = [], [], []
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
            done = 1000.0 * (now - load.since_at) / rate
            head = load.head_tokens
            backlog = load.pending_tokens - (done if done < head else head)
            in_flight = load.in_flight
            streams: float = in_flight
            if load.others and now <= load.others_until:
                streams += load.others
                backlog += load.others_tokens
            if backlog < 0.0:  # noqa: PLR1730
                backlog = 0.0
            if plan is not None:
                backlog += plan[load.slot]
            wait = backlog * rate
            # Decode: a gap grows with the context that the batch reads in each step.
            gap, slope = (load.gap_ms, load.gap_per_token_ms) if load.gap_until > now else pool_gap
            gap += slope * (load.context_tokens + prompt)
            # Cache space: more is taken where more is full, and it matters more where more is reused. What is evicted
            # may be computed anew on any endpoint, so this is at the pool's speed: at its own, slow ones looked far too
            # dear (half the servers at half speed: goodput .46 instead of .75).
            cache, live, capacity = load.cache, load.live_tokens, load.capacity_tokens
            fill = (cache.size * block + live) / capacity
            cost = (
                (load.base_ms if load.base_until > now else base)
                + wait
                + prefill * (1.0 + STALL * streams)
                + decode * (gap + streams * slope * prompt)
                + space * fill * uncached
            )
            # Space for this request and for what those in flight will still say, as far as it is not there.
            growth = in_flight * output - live
            over = cache.pinned * block + (growth if growth > live else live) + blocks - cached + output - capacity
            if over > 0.0:
                cost += space_wait_ms(load, over, now)
            costs.append(cost)
            waits.append(wait)
            uncached_tokens.append(uncached)
        if pool.adapters and request.model in pool.adapters:
            _add_adapter(costs, loads, request.model, pool, now)
        return Prices(costs, waits, uncached_tokens, (space, depths))

    def explain(
        self,
        request: InferenceRequest,
        candidates: Sequence[EndpointState],
        prices: Prices,
        *,
        shown: Sequence[int],
        now: float,
    ) -> Callable[[], list[dict[str, float]]]:
        """The terms of the module's docstring, in milliseconds. 0.5 µs a candidate, until somebody asks."""
        loads = [candidates[index].load for index in shown]
        pool = loads[0].pool
        assert isinstance(prices.notes, tuple)
        space, depths = prices.notes
        # Written out, since an attribute by its name takes 3 ns here and 25 ns by `attrgetter`.
        seen = [
            (
                load.slot,
                load.speed,
                load.in_flight,
                load.others if now <= load.others_until else 0.0,
                load.base_ms if load.base_until > now else pool.base_ms,
                load.gap_ms if load.gap_until > now else pool.gap_ms,
                load.gap_per_token_ms if load.gap_until > now else pool.gap_per_token_ms,
                load.mean_gap_ms,
                load.context_tokens,
                load.live_tokens,
                load.capacity_tokens,
                load.cache.size,
                load.cache.pinned,
                load.freed,
            )
            for load in loads
        ]
        adapters = None
        if pool.adapters and request.model in pool.adapters:
            _add_adapter(adapters := [0.0] * len(loads), loads, request.model, pool, now)
        taken_down = (
            now,
            pool.token_ms,
            pool.output_tokens,
            max(1.0, request.prompt_bytes / pool.bytes_per_token),
            pool.index.block_bytes / pool.bytes_per_token,
            len(request.block_keys),
            space,
        )
        if len(shown) < len(candidates):
            depths = {load.slot: depths[load.slot] for load in loads}
            prices = prices.only(shown)
        return lambda: _parts(_Priced(*taken_down), map(_View._make, seen), depths, prices, adapters)


class _View(NamedTuple):
    """What a price reads of a `LoadModel`, as it was."""

    slot: int
    speed: float
    in_flight: int
    others: float
    base_ms: float
    gap_ms: float
    gap_per_token_ms: float
    mean_gap_ms: float
    context_tokens: float
    live_tokens: float
    capacity_tokens: float
    cached_blocks: int
    pinned_blocks: int
    freed: tuple[float, float]


class _Priced(NamedTuple):
    """What a price reads of the pool and of the request, as it was."""

    now: float
    token_ms: float
    output: float
    prompt: float
    block: float
    keys: int
    space: float

    def parts(self, view: _View, depth: int, wait: float, uncached: float) -> dict[str, float]:
        """The terms that `Adaptive.price` adds up for one candidate. `depth`: of its match, in blocks."""
        block, streams = self.block, view.in_flight + view.others
        prefill = uncached * self.token_ms * view.speed
        gap = view.gap_ms + view.gap_per_token_ms * (view.context_tokens + self.prompt)
        fill = (view.cached_blocks * block + view.live_tokens) / view.capacity_tokens
        growth = max(view.in_flight * self.output - view.live_tokens, view.live_tokens)
        new = (view.pinned_blocks + self.keys - depth) * block + self.output
        over = new + growth - view.capacity_tokens
        return {
            "base": view.base_ms,
            "wait": wait,
            "prefill": prefill,
            "stall": prefill * STALL * streams,
            "decode": DECODE * self.output * gap,
            "slow_down": DECODE * self.output * streams * view.gap_per_token_ms * self.prompt,
            "cache_space": self.space * fill * uncached,
            "space_wait": space_wait_ms(view, over, self.now) if over > 0.0 else 0.0,
        }


def _parts(
    priced: _Priced,
    views: Iterable[_View],
    depths: Mapping[int, int] | Sequence[int],
    prices: Prices,
    adapters: list[float] | None,
) -> list[dict[str, float]]:
    """For each view its parts, in order."""
    waits, uncached = prices.waits_ms, prices.uncached_tokens
    assert waits is not None
    assert uncached is not None
    parts = [
        priced.parts(view, depths[view.slot], wait, tokens)
        for view, wait, tokens in zip(views, waits, uncached, strict=True)
    ]
    for one, adapter in zip(parts, adapters or (), strict=False):
        one["adapter"] = adapter
    return parts


def space_wait_ms(load: LoadModel | _View, over_tokens: float, now: float) -> float:
    """How long until `over_tokens` of cache space become free: at the rate of late, or a fifth of what decode makes."""
    rate = max(freed_per_ms(load.freed, now), 0.2 * load.in_flight / max(5.0, load.mean_gap_ms), MIN_FREED_PER_MS)
    return min(MAX_SPACE_WAIT_MS, over_tokens / rate)


def _add_adapter(costs: list[float], loads: Sequence[LoadModel], adapter: str, pool: PoolModel, now: float) -> None:
    """Add what the request waits for its adapter on each endpoint."""
    for index, load in enumerate(loads):
        costs[index] += load.adapters.price_ms(
            adapter,
            times=pool.load_times,
            in_flight=load.in_flight,
            answer_ms=pool.output_tokens * (load.gap_ms + load.gap_per_token_ms * load.context_tokens),
            now=now,
        )
