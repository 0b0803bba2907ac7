# SPDX-License-Identifier: Apache-2.0
"""The adaptive policy: what a request costs on each endpoint, in milliseconds, for itself and for all others.

The price of an endpoint is the sum of six terms, each explained below where it is added: the request's own time to its
first token; the stall that its prefill causes for the streams there; its decode, and the slow-down of theirs; the cache
space that it takes from prefixes that may be needed again; the wait for cache space; and the loading of its adapter.
There is no threshold or filter: the endpoint with the lowest price is chosen.

Each leg of a split request is priced by the same terms. The first ends with its prompt: it stalls no stream where it
goes, and its space in the cache is priced only as far as it differs between candidates, as what it displaces is worth
no more than the prompt itself. The second waits for no prefill and stalls no stream, but what is not cached there is
transferred, and the prefills that are queued there stall it.

It reads `EndpointState.load` (see `core.knowledge.load_model`) and keeps no state. The constants were found by some
5,000 runs of a step-level simulation of vLLM: docs/decisions/0031 has the measurements of `STALL`, `STEPS` and
`DECODE`. docs/routing.md says which function learns each of the other values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

from lbproxy.core.caches.adapters import prices_ms
from lbproxy.core.caches.sessions import KNOWN_SHARE, Home
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.knowledge.load_model import LoadModel
from lbproxy.core.knowledge.placement import freed_per_ms
from lbproxy.core.knowledge.pool_model import BASE_MS, PoolModel
from lbproxy.core.knowledge.prefill_work import PER_CONTEXT, SHORT, work_tokens
from lbproxy.core.policies.policy import Context, Policy, Prices
from lbproxy.core.requests.prompt_keys import BLOCK_BYTES
from lbproxy.core.requests.request import DECODE as SECOND_LEG
from lbproxy.core.requests.request import PREFILL as FIRST_LEG
from lbproxy.core.requests.request import WHOLE, InferenceRequest

STALL: Final = 0.17
"""The share of a prefill's time by which each stream on the endpoint is delayed (chunked prefill shares the step)."""
APART_STALL_MS: Final = 850.0
"""Where prefill and decode are apart, a prefill of this length delays each stream there by all of its time, others in
proportion to their length, `STALL` at least (docs/decisions/0042). While a prompt is computed, a stream gets a token a
step of 8,192 tokens instead of one every 15 ms: tokens of a response hide a short delay, and a long one shows in its
time per token. Servers are kept for decode alone for the sake of the streams."""
STEPS: Final = 2.0
"""The inter-token gaps after which the first prefill shows progress: the running step ends, and its own ends."""
DECODE: Final = 0.07
"""What a millisecond of decode is worth, relative to one of waiting for the first token."""
SPACE: Final = 20.0
"""What the space in a full cache costs, in prefills of the same prompt."""
COPY: Final = 4.0
"""How many times as much the space of another copy costs, of what a candidate has in its cache: the rest of a prompt
takes space wherever it goes."""
DEMAND: Final = 0.5
"""A prefix that so many requests in flight use for each copy of it, as a share of the mean requests in flight at an
endpoint, takes no space that is worth more: its homes alone cannot be as loaded as the others."""
OVERDUE: Final = 1.5
"""A prefill that has taken this many times as long as predicted, and the fixed time, is expected to take as much longer
as it is late by then: whatever holds its engine up, the model does not know it."""
MAX_SPACE_WAIT_MS: Final = 60_000.0
MIN_FREED_PER_MS: Final = 0.05


class _Parts:
    """The terms of one candidate's price, in milliseconds, with a reference to the candidate before it. It is kept as
    long as the decision is. It is an object of its own because compiled it holds unboxed numbers: keeping values costs
    by the number of objects, which are no longer in the processor's caches when they are freed.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - one for each term
        self,
        before: _Parts | None,
        cost: float,
        base: float,
        wait: float,
        prefill: float,
        stall: float,
        decode: float,
        slow_down: float,
        cache_space: float,
        space_wait: float,
    ) -> None:
        self.before = before
        self.cost = cost
        self.base = base
        self.wait = wait
        self.prefill = prefill
        self.stall = stall
        self.decode = decode
        self.slow_down = slow_down
        self.cache_space = cache_space
        self.space_wait = space_wait
        self.cached = -1.0
        """Tokens of the prompt that are expected in its cache; below 0: unknown."""
        self.adapter = -1.0
        """Below 0: the request needs no adapter."""

    def add_adapter(self, ms: float) -> None:
        self.adapter = ms
        self.cost += ms


class Adaptive(Policy):
    """The default policy; see the module."""

    block_bytes: int | None = BLOCK_BYTES
    holds = True
    reads_weights = True  # as speeds, until they are measured: see `core.knowledge.prior`
    tolerance = 1.0
    notes_costs = True
    unit: str | None = "ms"
    assumed: tuple[tuple[str, float], ...] = (("base", BASE_MS),)
    first_byte_parts = frozenset({"base", "wait", "prefill", "space_wait", "adapter"})

    def price(self, request: InferenceRequest, candidates: Sequence[EndpointState], context: Context) -> Prices:  # noqa: PLR0915 - a call costs more than a statement
        """Milliseconds. The waits are for the prefill work ahead; the work is the request's own there."""
        loads, now, leg, costs = [state.load for state in candidates], context.now, request.leg, [0.0] * len(candidates)
        if leg == WHOLE and not request.prompt_bytes:
            return self._price_opaque(request, loads, context)
        pool, keys, is_first, is_second = loads[0].pool, request.block_keys, leg == FIRST_LEG, leg == SECOND_LEG
        prompt, depths, token_ms = pool.prompt_tokens(request), pool.index.match(keys), pool.token_ms
        output, pool_base, block = pool.output_tokens, pool.base_ms, pool.block_tokens(request) * pool.savings.share
        home = None if request.session is None or is_second else _home(pool, request.session, prompt, block, depths)
        demanded, deepest = _copied(request, loads, depths, block)
        space, anywhere = SPACE * token_ms * pool.hit_ratio, max(0.0, prompt - max(demanded, deepest))
        answer, stall_share, steps = (0.0, 0.0, 0.0) if is_first else (_length(request, output), STALL, STEPS)
        per_gap, fewest, pool_gap = DECODE * answer, 0.0 if is_second else 1.0, (pool.gap_ms, pool.gap_per_token_ms)
        waits, works, spaces = costs.copy(), costs.copy(), costs.copy() if is_first else costs  # not kept, else
        any_held, reports = context.any_held or is_first, pool.others.until >= now
        least = work_tokens(max(1.0, prompt - deepest), deepest) if any_held else 0.0
        notes: _Parts | None = None
        for n, load in enumerate(loads):
            there, speed, kv, room = load.work, load.speed, load.kv, load.room
            if there.due_at <= now:
                there.expire(now, speed)
            rate = token_ms * speed.factor
            # Prefill: what is not cached here, after what is queued, less what is done of its first; more if late.
            cached = depths[kv.member_id] * block
            if home is not None and home.cache is kv.cache:
                cached += pool.sessions.trust * home.unmatched_tokens(prompt, cached)
            uncached = prompt - cached if prompt - cached > fewest else fewest  # max() takes four times as long
            beyond = cached + 0.5 * uncached - SHORT
            own = uncached if beyond <= 0.0 else uncached * (1.0 + PER_CONTEXT * beyond)  # `work_tokens`, inlined
            prefill, backlog = own * rate, 0.0
            base = speed.base_ms if speed.base_until > now else pool_base
            if there.pending:
                backlog, head = there.pending_tokens, there.head_tokens
                done = (1000.0 * (now - there.prefill_since) - steps * speed.mean_gap_ms) / rate
                if done > 0.0:
                    late = done - OVERDUE * head - (base + 1000.0 * room.lanes.delay_s) / rate
                    backlog += (late if late > 0.0 else 0.0) - (done if done < head else head)  # below 0: by rounding
            in_flight, streams, others = there.in_flight, float(there.in_flight), room.others
            if others.count or (reports and others.until < now):
                streams += others.requests(now)
                backlog += others.queued(now) * pool.work_tokens
            wait, computed = backlog * rate if backlog > 0.0 else 0.0, prefill * (1.0 + stall_share * streams)
            if is_second:
                base, own, prefill, computed = pool.transfer.ms(uncached, token_ms), uncached, 0.0, load.prefill_ms(now)
                wait = room.slots.wait_ms(streams + room.reservations.count, now)
            elif streams >= room.slots.limit or (any_held and room.reservations.count) or room.lanes.lanes > 1.0:
                wait = _wait_ms(load, backlog, streams, least, context)
            # Decode: a gap grows with the context that the batch reads in each step.
            own_gap, slope = (speed.gap_ms, speed.gap_per_token_ms) if speed.gap_until > now else pool_gap
            gap = own_gap + slope * (there.context_tokens + prompt)
            # Cache space: more is taken where more is full, and matters more where more is reused. At the pool's speed:
            # any endpoint may compute it again, and at their own, slow ones were avoided (goodput .46 instead of .75).
            spaced = uncached if demanded <= cached else max(0.0, uncached + cached - demanded)
            cache, live, foreign = kv.cache, there.live_tokens, others.space(now) if others.cache_tokens else 0.0
            full = (cache.size * block + live + foreign) / (kv.known_tokens or pool.size.space_tokens)
            cache_space = space * full * (spaced if spaced < anywhere else COPY * spaced - (COPY - 1.0) * anywhere)
            # Space for all prompts and responses: what these have or may add, whichever is more (docs/decisions/0031).
            growth = in_flight * output - live
            over = uncached + answer + foreign - kv.capacity_tokens
            over += cache.pinned * block + (growth if growth > live else live)
            space_wait = space_wait_ms(load, over, now) if over > 0.0 else 0.0
            cost = base + wait + computed + per_gap * (gap + streams * slope * prompt) + (cache_space + space_wait)
            if context.explains:
                stall, decode, slow_down = computed - prefill, per_gap * gap, per_gap * streams * slope * prompt
                notes = _Parts(notes, cost, base, wait, prefill, stall, decode, slow_down, cache_space, space_wait)
                notes.cached = prompt - uncached
            spaces[n], costs[n], waits[n], works[n] = cache_space, cost, wait, own  # in this order: see `spaces`
        if is_first:
            _compare_space(costs, notes, spaces)
        return Prices(_with_adapters(costs, notes, loads, request.model, now), waits, works, notes)

    def stalls_ms(self, candidates: Sequence[EndpointState], works: Sequence[float], *, now: float) -> list[float]:
        """See Policy: what `APART_STALL_MS` adds to `STALL`."""
        found = []
        for state, work in zip(candidates, works, strict=True):
            load = state.load
            streams = load.work.in_flight + load.room.others.requests(now)
            own = load.speed.prefill_ms(work)
            found.append(max(own / APART_STALL_MS - STALL, 0.0) * streams * own)
        return found

    def _price_opaque(self, request: InferenceRequest, loads: list[LoadModel], context: Context) -> Prices:
        """The price of an opaque request: what such requests took there, for each one in flight there now."""
        pool, model, now = loads[0].pool, request.model, context.now
        elsewhere = pool.opaque.mean_ms(model)
        size = pool.body_sizes.factor(model, request.body_bytes)
        home = None if request.session is None else pool.sessions.home(request.session)
        costs, waits = [], []
        notes: _Parts | None = None
        for load in loads:
            each = load.room.opaque.ms(model, elsewhere)
            in_flight = load.work.in_flight + load.room.others.requests(now)
            wait = load.room.slots.wait_ms(in_flight + load.room.reservations.count, now)
            own = each * size
            if home is not None and home.cache is load.kv.cache:
                own *= 1.0 - pool.sessions.trust
            ahead = in_flight + load.room.opaque.extra_weight
            cost = max(ahead * each, wait) + own
            if context.explains:
                notes = _Parts(notes, cost, 0.0, cost - own, own, 0.0, 0.0, 0.0, 0.0, 0.0)
            costs.append(cost)
            waits.append(wait)
        return Prices(_with_adapters(costs, notes, loads, model, now), waits, [1.0] * len(loads), notes)

    def is_full(self, state: EndpointState, now: float, overloaded: bool) -> bool:
        """See Policy. Decided by the endpoint's room."""
        return state.load.is_full(now, overloaded)

    def is_full_for_decode(self, state: EndpointState, now: float, overloaded: bool) -> bool:
        """See Policy. Prefills that are queued there do not matter: by the time of the second leg they are done."""
        return state.load.lacks_room(now, overloaded)

    def explain(self, notes: object, *, shown: Sequence[int]) -> list[dict[str, float]]:
        """The terms of the module's docstring, in milliseconds, if `price` was to note them."""
        parts = _listed(cast("_Parts | None", notes))
        return [_named(parts[n]) for n in shown] if parts else []

    def cached_tokens(self, notes: object, *, shown: Sequence[int]) -> list[float | None]:
        parts = _listed(cast("_Parts | None", notes))
        return [None if parts[n].cached < 0.0 else parts[n].cached for n in shown] if parts else []

    def noted_costs(self, notes: object) -> list[float]:
        return [parts.cost for parts in _listed(cast("_Parts | None", notes))]


def _length(request: InferenceRequest, mean: float) -> float:
    """How many tokens its response is expected to have, where responses have `mean`: never more than it may have."""
    limit = request.max_tokens
    return mean if limit is None or limit > mean else float(limit)


def _listed(last: _Parts | None) -> list[_Parts]:
    found = []
    while last is not None:
        found.append(last)
        last = last.before
    return found[::-1]


def _named(parts: _Parts) -> dict[str, float]:
    named = {
        "base": parts.base,
        "wait": parts.wait,
        "prefill": parts.prefill,
        "stall": parts.stall,
        "decode": parts.decode,
        "slow_down": parts.slow_down,
        "cache_space": parts.cache_space,
        "space_wait": parts.space_wait,
    }
    if parts.adapter >= 0.0:
        named["adapter"] = parts.adapter
    return named


def _home(pool: PoolModel, session: str, prompt: float, block: float, depths: Sequence[int]) -> Home | None:
    """Where its session was last placed, unless much of the prompt is known to be cached anyway."""
    return None if block * max(depths, default=0) >= KNOWN_SHARE * prompt else pool.sessions.home(session)


def _wait_ms(load: LoadModel, backlog: float, ahead: float, work: float, context: Context) -> float:
    """The wait, in milliseconds, for what precedes a request with `work`: for prefills or, if no more requests run at
    once, for the end of others. `backlog` is in tokens, `ahead` in requests, both without held requests.
    """
    pool, room = load.pool, load.room
    if room.reservations.count:
        held, tokens = room.reservations.ahead_of(work, context.share_ahead, newest_first=context.newest_first)
        ahead += held
        backlog += tokens
    lanes = room.lanes.lanes
    free = lanes > 1.0 and len(load.work.pending) < lanes
    prefills = 0.0 if free else backlog * pool.token_ms * load.speed.factor / lanes
    return max(prefills, room.slots.wait_ms(ahead, context.now))


def _copied(
    request: InferenceRequest, loads: list[LoadModel], depths: Sequence[int], block: float
) -> tuple[float, float]:
    """How many of the prompt's first tokens are in demand (`DEMAND`), and how many a candidate has in its cache."""
    in_flight = deepest = 0
    for load in loads:
        in_flight += load.work.in_flight
        depth = depths[load.kv.member_id]
        if depth > deepest:  # noqa: PLR1730 - max() takes four times as long
            deepest = depth
    of_mean = DEMAND * in_flight / len(loads)
    demanded = 0 if request.leg == FIRST_LEG else loads[0].pool.index.demanded(request.block_keys, of_mean)
    return demanded * block, deepest * block


def _compare_space(costs: list[float], notes: _Parts | None, spaces: list[float]) -> None:
    """Price the cache space of a first leg only as far as it differs between candidates: what it displaces is worth no
    more than the prompt itself.
    """
    least = min(spaces)
    for n in range(len(costs)):
        costs[n] -= least
    while notes is not None:
        notes.cost -= least
        notes.cache_space -= least
        notes = notes.before


def space_wait_ms(load: LoadModel, over_tokens: float, now: float) -> float:
    """Milliseconds until `over_tokens` of cache space are free, at the recent rate or a fifth of the rate of decode."""
    rate = max(
        freed_per_ms(load.work.freed, now),
        0.2 * load.work.streams / max(5.0, load.speed.mean_gap_ms),
        MIN_FREED_PER_MS,
    )
    return min(MAX_SPACE_WAIT_MS, over_tokens / rate)


def _with_adapters(
    costs: list[float], notes: _Parts | None, loads: Sequence[LoadModel], adapter: str | None, now: float
) -> list[float]:
    pool = loads[0].pool
    if adapter is None or adapter not in pool.adapters:
        return costs
    waits = prices_ms(
        adapter,
        [load.adapters for load in loads],
        times=pool.load_times,
        in_flight=[float(load.work.in_flight) for load in loads],
        response_ms=[
            pool.output_tokens * (load.speed.gap_ms + load.speed.gap_per_token_ms * load.work.context_tokens)
            for load in loads
        ],
        now=now,
    )
    for parts, wait in zip(_listed(notes), waits, strict=False):
        parts.add_adapter(wait)
    return [cost + wait for cost, wait in zip(costs, waits, strict=True)]
