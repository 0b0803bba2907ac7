# SPDX-License-Identifier: Apache-2.0
"""What perfect information is worth: a policy that sees into the simulated servers.

The oracle takes the endpoint from which the request's first token *would come first*: for each candidate the engine is
run ahead (`foresight.py`) from its true state, with the true prompt sizes, the blocks that are truly cached or about to
be, the true lengths of all responses, and all requests on their way. It is greedy: it looks at this request alone, not
at what the placement costs others, nor at requests that are still to come. So it is no bound; a policy that gives up
some of its own time for the caches of others can do better. Two forms:

- `oracle` places every request the moment it comes, as routers do that have no queue.
- `oracle, late` binds late like `adaptive`: a request whose best server begins it in more than `HOLD_MS` waits in
  the Balancer for that server; the line goes by the least truly uncached tokens, discounted by age.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from benchmarks.foresight import Foreseen, Outlook, PendingPrefill, foresee, outlook_of, slot_free_at
from lbproxy.commands.sim import Run, balancing_of, fleet_options
from lbproxy.config.sections.routing import RoutingSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.capacity.room import HOLD_MS
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.engines.handover import Role
from lbproxy.core.knowledge.pool_model import PoolModel
from lbproxy.core.policies.policy import Context, Policy, Prices
from lbproxy.core.queue.ticket import Answer, Ticket
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.prompt_keys import BLOCK_BYTES
from lbproxy.core.requests.request import InferenceRequest, Usage
from lbproxy.sim.engine.engine import Engine, SimRequest
from lbproxy.sim.engine.presets import BLOCK_TOKENS
from lbproxy.sim.engine.sequence import Running, SequencePhase
from lbproxy.sim.fleet.cluster import Fleet
from lbproxy.sim.fleet.fleet import FleetOptions
from lbproxy.sim.fleet.live import LiveBalancer, LiveJob, LiveServer
from lbproxy.sim.workloads.workload import Workload

ORACLES = ("oracle", "oracle, late")
KNOWN_S = 0.1
"""For so long a waiting request's cached tokens are not looked up again; they are asked for again and again."""


class Sight:
    """One server, as the oracle sees it: its engine, and what is on its way there."""

    def __init__(self, engine: Engine, network_s: float) -> None:
        self._engine = engine
        self._network_s = network_s
        self._sent: dict[str, tuple[float, SimRequest]] = {}
        """Placed and not in the engine: when they are delivered."""
        self._queued: dict[str, tuple[SimRequest, int]] = {}
        """Placed and not begun, with the tokens that will be cached when their turn comes."""
        self._coming: Counter[int] = Counter()
        """The blocks of their prompts: who comes after them hits these."""

    def placed(self, work: SimRequest, now: float) -> None:
        """A request goes there now."""
        self._sent[work.id] = (now + self._network_s, work)
        self._queued[work.id] = (work, self.cached_tokens(work))
        self._coming.update(_prompt_blocks(work))

    def cached_tokens(self, work: SimRequest) -> int:
        """Leading tokens that are there, or will be when this request's turn comes."""
        hashes = _prompt_blocks(work)
        found = len(outlook_of(self._engine).pool.match(hashes, len(hashes)))
        while found < len(hashes) and self._coming[hashes[found]] > 0:
            found += 1
        return found * BLOCK_TOKENS

    def foresee(self, work: SimRequest, cached: int, reserved: float, now: float) -> Foreseen:
        """What the request meets behind all that is there and `reserved` tokens more; as the client sees it."""
        outlook = outlook_of(self._engine)
        self._refresh(outlook, now)
        api_s = outlook.preset.api_ms * outlook.seconds_per_ms
        before = [self._waiting(one, outlook) for one in outlook.queue if _takes_part(one, outlook)]
        before += [_work(sent, self._queued[sent.id][1], at + api_s) for at, sent in self._sent.values()]
        if reserved >= 1.0:
            before.append(PendingPrefill(now, int(reserved), 0, 0, 1))
        ready_at = slot_free_at(outlook, work.adapter, now + self._network_s + api_s)
        found = foresee(outlook, before, _work(work, cached, ready_at))
        load_s = outlook.lora.load_ms(work.adapter) * outlook.seconds_per_ms
        return Foreseen(found.begins_at, found.first_at + load_s + self._network_s)

    def _refresh(self, outlook: Outlook, now: float) -> None:
        here = {one.request.id for one in outlook.queue if one.phase is not SequencePhase.GONE}
        for name in [name for name, (at, _) in self._sent.items() if at < now or name in here]:
            del self._sent[name]
        for name in [name for name in self._queued if name not in here and name not in self._sent]:
            self._coming.subtract(_prompt_blocks(self._queued.pop(name)[0]))
        if not self._queued:
            self._coming.clear()

    def _waiting(self, one: Running, outlook: Outlook) -> PendingPrefill:
        request = one.request
        if request.id in self._queued:
            return _work(request, self._queued[request.id][1], one.ready_at)
        # Preempted: it comes back with what it has said.
        cached = len(outlook.pool.match(request.block_hashes, (one.known_tokens - 1) // BLOCK_TOKENS)) * BLOCK_TOKENS
        blocks = (one.known_tokens - cached) // BLOCK_TOKENS + 1
        return PendingPrefill(
            one.ready_at, one.known_tokens - cached, cached, blocks, request.output_tokens - one.generated
        )


class Oracle(Policy):
    """Prices are the milliseconds to the first token, waits those until the prefill begins, tokens the uncached ones.

    One serves one balancer.
    """

    def __init__(self, form: str) -> None:
        """`form`: of `ORACLES`."""
        assert form in ORACLES
        self.holds = form == "oracle, late"
        self.block_bytes = BLOCK_BYTES if self.holds else None
        self._sights: Mapping[str, Sight] = {}
        self._works: dict[str, SimRequest] = {}
        self._now = 0.0
        self._known: dict[str, tuple[float, dict[str, int]]] = {}
        """Cached tokens of who waits, by server, and until when that is believed."""

    def see(self, sights: Mapping[str, Sight]) -> None:
        """The servers, by the names of their endpoints."""
        self._sights = sights

    def expect(self, work: SimRequest) -> None:
        """What a request that comes now truly is."""
        self._works[work.id] = work

    def forget(self, request_id: str) -> None:
        """It is over."""
        self._works.pop(request_id, None)

    def price(self, request: InferenceRequest, candidates: Sequence[EndpointState], context: Context) -> Prices:
        """Runs each candidate's engine ahead."""
        now = context.now
        work = self._works[request.id]
        cached = self._cached(work, now)
        costs, waits, uncached = [], [], []
        self._now = now
        least = work.prompt_tokens - max(cached.values())
        for state in candidates:
            name = state.endpoint.name
            reserved = state.load.room.reservations.ahead_of(least)[1] if self.holds else 0.0
            found = self._sights[name].foresee(work, cached[name], reserved, now)
            costs.append(1000.0 * (found.first_at - now))
            waits.append(1000.0 * max(0.0, found.begins_at - now))
            uncached.append(float(work.prompt_tokens - cached[name]))
        return Prices(costs, waits, uncached)

    def is_full(self, state: EndpointState, now: float, overloaded: bool) -> bool:
        """Whether even the smallest of requests would wait too long for its prefill to begin."""
        found = self._sights[state.endpoint.name].foresee(SimRequest("", 1, 1), 0, 0.0, now)
        return 1000.0 * (found.begins_at - now) > HOLD_MS

    def least_uncached(self, request: InferenceRequest) -> float:
        """The fewest tokens that any server would have to compute, as of the latest price."""
        work = self._works[request.id]
        return float(work.prompt_tokens - max(self._cached(work, self._now).values()))

    def placed(self, request: InferenceRequest, state: EndpointState, now: float) -> None:
        """A request goes there now."""
        self._sights[state.endpoint.name].placed(self._works[request.id], now)
        self._known.pop(request.id, None)

    def _cached(self, work: SimRequest, now: float) -> dict[str, int]:
        until, cached = self._known.get(work.id, (-1.0, {}))
        if until < now:
            cached = {name: sight.cached_tokens(work) for name, sight in self._sights.items()}
            if self.holds:
                self._known[work.id] = (now + KNOWN_S, cached)
        return cached


class _TruePool(PoolModel):
    """What late binding asks the pool's model for, from the oracle."""

    def __init__(self, oracle: Oracle) -> None:
        super().__init__(BLOCK_BYTES)
        self._oracle = oracle

    def uncached(self, request: InferenceRequest) -> float:
        return self._oracle.least_uncached(request)


class OracleBalancer(Balancer):
    """The real Balancer; its policy is an oracle, which hears of every placement at once."""

    _oracle: Oracle

    def consult(self, oracle: Oracle) -> None:
        """The policy that it was made with, now that it sees. Before the first request."""
        self._oracle = oracle
        if oracle.holds:
            self._pool = _TruePool(oracle)
            self._endpoints.adopt_pool(self._pool)

    def _place(self, ticket: Ticket, answer: Answer, state: EndpointState, now: float) -> None:
        super()._place(ticket, answer, state, now)
        self._oracle.placed(ticket.request, state, now)


class OracleFleet(Fleet):
    """A fleet whose only balancer sees into its servers."""

    def __init__(
        self,
        options: FleetOptions,
        workload: Workload,
        make_balancer: Callable[[Oracle, random.Random], OracleBalancer],
        *,
        form: str,
        seed: int,
    ) -> None:
        """`form`: of `ORACLES`. `make_balancer` makes one with that oracle as its policy."""
        assert options.balancers == 1
        assert all(server.role is Role.BOTH for server in options.servers), "it foresees whole requests only"
        self._oracle = Oracle(form)
        balancers: list[OracleBalancer] = []

        def make(rng: random.Random) -> OracleBalancer:
            balancers.append(make_balancer(self._oracle, rng))
            return balancers[-1]

        super().__init__(options, workload, make, seed=seed)
        self._oracle.see({f"s{server.number}": Sight(_engine(server), options.network_s) for server in self._servers})
        for balancer in balancers:
            balancer.consult(self._oracle)

    def _submit(self, front: LiveBalancer, flight: LiveJob, avoid: frozenset[EndpointUid]) -> None:
        self._oracle.expect(flight.work)
        super()._submit(front, flight, avoid)

    def _close(self, flight: LiveJob, outcome: Outcome, usage: Usage | None = None) -> None:
        super()._close(flight, outcome, usage)
        self._oracle.forget(flight.work.id)


def oracle_fleet(run: Run, workload: Workload, form: str) -> OracleFleet:
    """The fleet of a run, with an oracle in place of its policy."""
    settings = balancing_of(run.scenario)
    # Keys as for adaptive, for the balancer's own bookkeeping; the oracle reads none of them.
    return OracleFleet(
        fleet_options(run.scenario, RoutingSettings()),
        workload,
        lambda oracle, rng: OracleBalancer(oracle, settings, rng=rng),
        form=form,
        seed=run.seed,
    )


def _engine(server: LiveServer) -> Engine:
    """The oracle knows how an engine goes on, and nothing of other servers."""
    assert isinstance(server.engine, Engine), "the oracle foresees plain engines only"
    return server.engine


def _takes_part(one: Running, outlook: Outlook) -> bool:
    """Whether a queued request will not be passed over for want of a slot for its adapter."""
    return one.phase is not SequencePhase.GONE and outlook.lora.fits(one.request.adapter)


def _prompt_blocks(work: SimRequest) -> Sequence[int]:
    """Of those of a prompt that can be hit: at least its last token is always computed."""
    return work.block_hashes[: (work.prompt_tokens - 1) // BLOCK_TOKENS]


def _work(work: SimRequest, cached: int, ready_at: float) -> PendingPrefill:
    uncached = work.prompt_tokens - cached
    return PendingPrefill(ready_at, uncached, cached, uncached // BLOCK_TOKENS + 1, work.output_tokens)
