# SPDX-License-Identifier: Apache-2.0
"""The set of endpoints: the members, their states, and whether their gauges are fresh.

It is the only owner of every `EndpointState`. The results of probes, connections and requests are reported to it, and
it moves each endpoint through the states of `core.endpoints.health`; it does no I/O. `core.endpoints.serving` keeps the
index of models. Invariants:

- Requests go to members that are `UP` and not draining, and to a half-open one, one at a time. Ejected or unreachable
  members get requests only if there are no others (see `Serving` and `trials`).
- An endpoint that leaves the set keeps its state object until its last ticket closes, so that counts stay right.
- Uids are never reused, so a late report about an endpoint that left is recognised and dropped.
- The lists that `candidates` returns are shared, and replaced instead of modified: the caller may keep one, and must
  not change it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from math import inf
from typing import Final

from lbproxy.config.balancing import BalancingSettings
from lbproxy.core.caches.cache_report import CacheReport
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointSpec, EndpointUid, facts_of, with_uid
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.judge import Judge
from lbproxy.core.endpoints.serving import Serving, accepts_requests, why_not
from lbproxy.core.endpoints.state import (
    NO_METRICS,
    EndpointSnapshot,
    EndpointState,
    allow,
    assign_role,
    configured_models,
    equip,
    has_more,
    is_unreachable,
    note_load,
    note_scrape,
    rank_of,
    relate_ranks,
    served_by,
    snapshot_of,
)
from lbproxy.core.engines.handover import Handover, Role
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.engines.orca import LoadReport
from lbproxy.core.knowledge.pool_model import PoolModel
from lbproxy.core.knowledge.pools import Pools
from lbproxy.core.requests.openai import ModelCard, kept_cards
from lbproxy.core.requests.request import BYTES_PER_TOKEN, InferenceRequest
from lbproxy.core.saved.pieces import Learned
from lbproxy.core.saved.reading import Saved
from lbproxy.core.saved.restoring import Restoring

TRIAL_S: Final = 0.5
"""Between two requests that try an endpoint that is down, when no endpoint is up."""
DIAL_S: Final = 0.35
"""Between any two connections to an endpoint that is down, probes included: less than three per second."""
DIAL_ANY_S: Final = 0.005
"""Between any two connections to any endpoints that are down, on average: dialling costs up to 1 ms, and many may be
down."""

_NO_REPORT: Final = LoadReport()
MAX_UNAVAILABLE: Final = 16
"""How many endpoints that take no requests are named in the explanation of a decision."""


@dataclass(frozen=True)
class EndpointChanges:
    """What `EndpointSet.replace` changed."""

    added: list[Endpoint]
    removed: list[Endpoint]
    changed: list[Endpoint] = field(default_factory=list)
    """Endpoints that kept their address, state and uid, and changed otherwise."""


class EndpointSet:
    """All endpoints and their states."""

    def __init__(
        self, settings: BalancingSettings, pool: PoolModel | None, rng: random.Random, first_uid: int = 0
    ) -> None:
        """Uids are larger than `first_uid`."""
        breaker = settings.breaker
        self._pools = Pools(pool)
        self.serving = Serving(panic=breaker.panic)
        """The index of models."""
        self.judge = Judge(
            settings.health,
            breaker,
            self.serving,
            has_loads=pool is not None,
            rng=rng,
            process_ended=self._process_ended,
        )
        """Moves endpoints from state to state."""
        self._stale_after_s = settings.scrape.stale_after
        self._trial_at = -inf
        """Before this time no endpoint can be tried, unless something changes."""
        self._trials_version = self._unavailable_version = -1
        """The versions of `serving` for which `_trial_at` and `_unavailable` are valid."""
        self._states: dict[EndpointUid, EndpointState] = {}
        self.by_key: dict[str, EndpointState] = {}
        """The members by `Endpoint.key`."""
        self._specs: dict[str, EndpointSpec] = {}
        """What they were made from, likewise."""
        self.lists_version = 0
        """Changes whenever members do, or the models that one lists."""
        self._leaving: list[EndpointState] = []
        self._last_uid = first_uid
        self._unavailable: tuple[tuple[Endpoint, str], ...] = ()
        self._restoring: Restoring | None = None
        """What was saved before a restart, for endpoints that join later too."""
        if pool is not None:
            pool.adapters = self.serving.adapters

    @property
    def _pool(self) -> PoolModel | None:
        """Of tier 1."""
        return self._pools.first

    @property
    def has_loads(self) -> bool:
        return self._pool is not None

    @property
    def has_roles(self) -> bool:
        return self.serving.has_roles

    @property
    def has_tiers(self) -> bool:
        """Whether a member has a tier above 1, limits of its own, or its own name of a model."""
        return self.serving.has_tiers

    @property
    def lowest_tier(self) -> int:
        """That any member has."""
        return next(iter(self.serving.tiers))

    @property
    def version(self) -> int:
        """Changes whenever `candidates` may change."""
        return self.serving.version

    def reconfigure(self, settings: BalancingSettings) -> None:
        """Apply other settings to what is reported from now on."""
        self.judge.reconfigure(settings.health, settings.breaker, self._states.values())
        self.serving.reconfigure(panic=settings.breaker.panic)
        for state in self._states.values():
            if state.endpoint.tier > 1:
                state.held_back.clear()
        self._stale_after_s = settings.scrape.stale_after

    def adopt_pool(self, pool: PoolModel | None) -> None:
        """Use another policy's models, or none. What is placed still ends against the model that it began with."""
        self._pools, self._restoring = Pools(pool), None
        self.judge.progress.has_loads = pool is not None
        for state in self._states.values():
            equip(state, self._pools.of(state.endpoint.tier))
        if pool is not None:
            pool.adapters = self.serving.adapters
            self._assume_speeds()

    def limit_index(self, blocks: int) -> None:
        if self._pool is not None:
            self._pools.limit_index(blocks, (state.load for state in self._states.values()))

    # Over a restart

    def learned(self) -> Learned | None:
        """What was learned of tier 1, for `core.saved.pieces`; None under policies that learn nothing."""
        if self._pool is None:
            return None
        loads = [(one.endpoint.key, one.load) for one in self._states.values() if one.endpoint.tier == 1]
        return Learned(self._pool, loads)

    def restore(self, saved: Saved, *, age_s: float, now: float) -> Restoring | None:
        """Start with what was learned and saved `age_s` ago: see `core.restarts`."""
        if self._pool is not None:
            self._restoring = Restoring(self._pool, saved, age_s, now)
            for state in self._states.values():
                if state.endpoint.tier == 1:
                    self._restoring.joined(state.endpoint.key, state.load, now)
        return self._restoring

    # Membership

    def replace(self, specs: Sequence[EndpointSpec], *, now: float) -> EndpointChanges:
        """Make the set equal to `specs`, in that order. An endpoint whose address is in both keeps its state.

        A removed one gets no more requests, and is forgotten when its last ticket closes.
        """
        before, self.by_key = self.by_key, {}
        known, self._specs = self._specs, {}
        kept = before.copy()
        states: dict[EndpointUid, EndpointState] = {}
        added, changed = [], []
        for spec in specs:
            key = spec.key
            state = kept.pop(key, None)
            if state is None:
                state = self._join(spec, before.get(spec.url_key) or before.get(f"{spec.url_key}#0"), now)
                added.append(state.endpoint)
            elif spec is not known[key] and facts_of(state.endpoint) != facts_of(spec):
                old, state.endpoint = state.endpoint, with_uid(spec, state.endpoint.uid)
                allow(state, now)
                if self._pool is not None and spec.tier != old.tier:
                    state.load.pool.index.leave(state.load.kv.cache)
                    equip(state, self._pools.of(state.endpoint.tier))
                if spec.models != old.models:
                    state.models = configured_models(spec)
                    self.serving.changed(state)
                if self._pool is not None and spec.kv_cache_tokens != old.kv_cache_tokens:
                    state.load.kv.configure(spec.kv_cache_tokens)
                if spec.api_key != old.api_key:
                    self.judge.key_changed(state, now=now)
                if spec.health is None:
                    self.judge.probing_stopped(state, now=now)
                changed.append(state.endpoint)
                assign_role(state)
            states[state.endpoint.uid] = self.by_key[key] = state
            self._specs[key] = spec
        removed = list(kept.values())
        for state in removed:
            state.draining = True
            self.judge.removed(state)
            if self._pool is not None:
                state.load.pool.index.leave(state.load.kv.cache)
        self._leaving = [state for state in [*self._leaving, *removed] if state.in_flight]
        self._states = states
        self.lists_version += 1
        relate_ranks(states.values())
        self._note_roles()
        self.serving.has_tiers = any(map(has_more, states.values()))
        self._assume_speeds()
        self.serving.replace_all(states.values())
        return EndpointChanges(added, [state.endpoint for state in removed], changed)

    def _join(self, spec: EndpointSpec, like: EndpointState | None, now: float) -> EndpointState:
        """`like`: what there was at its address, if that is divided into ranks now, or has other ranks."""
        self._last_uid += 1
        state = EndpointState(with_uid(spec, EndpointUid(self._last_uid)), models=configured_models(spec))
        if like is not None:
            state.models = like.models
            mine, theirs = state.reported, like.reported
            mine.cache_tokens, mine.cache_tokens_at_most = theirs.cache_tokens, theirs.cache_tokens_at_most
            mine.slots = theirs.slots
        allow(state, now)
        assign_role(state)
        equip(state, self._pools.of(state.endpoint.tier))
        if self._restoring is not None and spec.tier == 1:
            self._restoring.joined(spec.key, state.load, now)
        self.judge.joined(state, like, now=now)
        return state

    def _assume_speeds(self) -> None:
        if self._pool is not None:
            self._pools.assume_speeds((state.endpoint.weight, state.load) for state in self._states.values())

    def at_address(self, uid: EndpointUid) -> Sequence[EndpointState]:
        """All ranks at the address of a member, in their order: usually itself alone. Empty if it left."""
        state = self._states.get(uid)
        if state is None:
            return ()
        return sorted(state.at_address, key=rank_of) if state.siblings else (state,)

    def members(self) -> Iterable[EndpointState]:
        """All members, in the order of the settings."""
        return self._states.values()

    def every(self) -> Iterable[EndpointState]:
        """The members, then endpoints that are leaving."""
        return chain(self._states.values(), self._leaving)

    def get(self, uid: EndpointUid) -> EndpointState | None:
        """The state of a member; None if it left."""
        return self._states.get(uid)

    def released(self, state: EndpointState) -> None:
        """Note that a ticket closed on `state`: a removed endpoint is forgotten with its last one."""
        if self._leaving and not state.in_flight and state in self._leaving:
            self._leaving.remove(state)

    # Candidates

    def prompt_tokens(self, request: InferenceRequest) -> float:
        """The tokens of a request's prompt, by what was learned of texts, if anything is."""
        return request.prompt_bytes / BYTES_PER_TOKEN if self._pool is None else self._pool.prompt_tokens(request)

    def candidates(self, model: str | None, *, now: float) -> Sequence[EndpointState]:
        """The endpoints that may be asked for `model` (None: any model). Usually O(1).

        These are the endpoints that list it; if there are none, those that are up and never listed any models.
        """
        if now >= self.judge.due_at:
            self.judge.end_ejections(self._states.values(), now=now)
        return self.serving.candidates(model)

    def by_tier(self, model: str | None, max_tier: int, *, now: float) -> list[list[EndpointState]]:
        """The same for each tier up to `max_tier` that has any, the lowest tier first."""
        if now >= self.judge.due_at:
            self.judge.end_ejections(self._states.values(), now=now)
        return self.serving.by_tier(model, max_tier)

    def trials(self, model: str | None, *, now: float) -> Sequence[EndpointState]:
        """Unreachable endpoints that may be tried when there are no candidates: each by one request at a time, and
        rarely. O(members), but not for each request without candidates.
        """
        version = self.serving.version
        if now < self._trial_at and version == self._trials_version:
            return []
        self._trials_version = version
        members = self._states.values()
        down = [one for one in members if not (one.draining or one.dormant) and is_unreachable(one)]
        free = [(state, _trial_at(state)) for state in down if state.standing.trial is None]
        self._trial_at = min((at for _, at in free), default=inf)
        ready = [state for state, at in free if at <= now]
        named = [state for state in ready if model is None or (state.models is not None and model in state.models)]
        return named or [state for state in ready if state.models is None and not self.any_up()]

    def is_known(self, model: str | None, engine: str | None = None) -> bool:
        """Whether a member, whatever its health, lists `model`; one that has the own API of `engine`, if not None."""
        members = (state for state in self._states.values() if engine is None or state.has_api(engine))
        return model is None or any(state.models and model in state.models for state in members)

    def any_starting(self) -> bool:
        """Whether the health of a member is not known yet."""
        return any(state.health is Health.STARTING for state in self._states.values())

    def any_up(self) -> bool:
        """Whether any member takes requests, or may be woken for them."""
        return bool(self.serving.candidates(None) or self.serving.dormant)

    def unavailable(self) -> tuple[tuple[Endpoint, str], ...]:
        """Members that take no requests, with the reasons: the first `MAX_UNAVAILABLE`. Computed once per change of the
        set.
        """
        if self._unavailable_version != self.serving.version:
            self._unavailable_version = self.serving.version
            is_readmitted = self.serving.is_readmitted
            out = (
                state
                for state in self._states.values()
                if state.draining or state.dormant or not (accepts_requests(state) or is_readmitted(state))
            )
            self._unavailable = tuple((one.endpoint, why_not(one)) for one in islice(out, MAX_UNAVAILABLE))
        return self._unavailable

    # Reports

    def report_health(self, uid: EndpointUid, ok: bool, reason: str, *, now: float, refused: bool) -> None:
        """Note the result of a probe, or a failed connection. Ignored if the endpoint left."""
        for state in self.at_address(uid):
            asleep = ok and state.endpoint.sleep is None and _sleeps(state, now)
            said = "its engine sleeps, as its metrics show" if asleep else reason
            self.judge.probed(state, ok and not asleep, said, now=now, refused=refused)

    def may_probe_in(self, uid: EndpointUid, *, now: float) -> float:
        """In how many seconds a probe may be sent; 0 = now, and it is counted as sent. An endpoint that is down is
        dialled at most three times a second, trials included, and less often if more than 70 are down.
        """
        state = self._states.get(uid)
        if state is None or state.health is not Health.DOWN:
            return 0.0
        between_s = max(DIAL_S, DIAL_ANY_S * len(self.serving.down))
        wait_s = state.standing.dialled_at + between_s - now
        if wait_s > 0.0:
            return wait_s
        state.standing.dialled_at = now
        return 0.0

    def check(self, *, now: float) -> list[EndpointUid]:
        """Apply what time alone changes, once a second. Returns the endpoints where streams are stranded."""
        states = list(self._states.values())
        self.judge.check(states, now=now)
        watch = self.judge.progress
        return [
            state.endpoint.uid
            for state in states
            if (state.awaiting_first_byte and watch.is_dead(state, now, stream=True))
            or (state.requests and is_emptied(state, now))
        ]

    def report_models(self, uid: EndpointUid, cards: Iterable[ModelCard] | None) -> None:
        """Note the models that an endpoint lists. None: it has no such list, and an earlier one is forgotten. Others
        than its settings say are ignored.
        """
        ranks = self.at_address(uid)
        models = None if cards is None or not ranks else kept_cards(ranks[0].models, cards)
        for state in ranks:
            if (said := state.endpoint.models) is not None and {*said} != {*(models or ())}:
                return
            before, state.models = state.models, models
            self.lists_version += before is not models
            if self._pool is not None and models is not None:
                state.load.adapters.retain(models)
            if served_by(before) != served_by(models):
                self.serving.changed(state)

    def scrape_sent(self, uid: EndpointUid) -> None:
        """Note that a scrape is sent: from the load that it will report, our own requests are subtracted."""
        for state in self.at_address(uid):
            state.reported.in_flight_at_scrape = state.requests

    def report_scrape(self, uid: EndpointUid, metrics: LoadMetrics) -> None:
        """Note a successful scrape. A failed scrape is not reported: the old values age."""
        state = self._states.get(uid)
        if state is None:
            return
        began_at = None if state.metrics is None else state.metrics.started_at
        if began_at is not None and metrics.started_at not in {None, began_at}:
            self._renewed(state)
        queued = note_scrape(state, metrics, self._stale_after_s)
        if metrics.slots is not None and metrics.slots != state.reported.slots:
            self.report_slots(uid, metrics.slots)
        if self._pool is not None and queued is not None:
            state.load.scraped(metrics, others=state.others, queued=queued, fresh_until=state.fresh_until)

    def reported_at(self, uid: EndpointUid) -> float:
        """The time of an endpoint's last load report; -inf if it left the set."""
        state = self._states.get(uid)
        return -inf if state is None else state.reported_at

    def report_cache_size(self, uid: EndpointUid, tokens: int, at_most: bool) -> EndpointState | None:
        """Note the KV cache size that an endpoint reports; returns its state, if it is in the set. The size is kept for
        later policies.
        """
        state = self._states.get(uid)
        if state is not None:
            state.reported.cache_tokens, state.reported.cache_tokens_at_most = tokens, at_most
            if self._pool is not None:
                state.load.kv.size_reported(float(tokens), at_most=at_most)
        return state

    def report_slots(self, uid: EndpointUid, slots: int) -> EndpointState | None:
        """Note how many requests an endpoint reports to run at once; returns its state, if it is in the set. Kept like
        the size of its cache.
        """
        state = self._states.get(uid)
        if state is not None:
            state.reported.slots = slots
            if self._pool is not None:
                state.load.room.slots.limit_reported(slots)
        return state

    def report_role(self, uid: EndpointUid, handover: Handover) -> None:
        """Note what an engine says of its role. It knows better than the settings: a server with a role may refuse what
        is not its part.
        """
        for state in self.at_address(uid):
            if state.reported.handover != handover:
                state.reported.handover = handover
                assign_role(state)
                self._note_roles()

    def _note_roles(self) -> None:
        self.serving.has_roles = any(state.handover.role is not Role.BOTH for state in self._states.values())
        self.serving.outdate()

    def report_cache(self, uid: EndpointUid, report: CacheReport) -> EndpointState | None:
        """Note what the KV events of an endpoint show; returns its state if another request may be placed there now."""
        state = self._states.get(uid)
        if state is None:
            return None
        if report.restarted:
            self._renewed(state)
        before, state.reported.cached_tokens = state.reported.measured_cache_tokens, report.tokens
        state.reported.measured_cache_tokens = report.size_tokens or before
        if self._pool is not None:
            state.load.cache_reported(report)
        return state if report.restarted or report.cleared or state.reported.measured_cache_tokens != before else None

    def _renewed(self, state: EndpointState) -> None:
        """The process that an endpoint was is gone, and with it all that it said of itself; what it refused does not
        count any more. Its models are kept until they are read again, as no request could be placed without.
        """
        state.standing.process += 1
        state.reported.cache_tokens, state.reported.cache_tokens_at_most = None, False
        state.reported.cached_tokens = state.reported.measured_cache_tokens = state.reported.slots = None
        if state.reported.handover is not None:
            state.reported.handover = None
            assign_role(state)
            self._note_roles()
        if state.endpoint.tier == 1:
            state.held_back.clear()
        if self._pool is not None:
            state.load.forget_reports()
        self.serving.changed(state)
        self.judge.renewed.append(state.endpoint.uid)

    def _process_ended(self, state: EndpointState, is_back: bool) -> None:
        """An endpoint refuses connections; or accepts them again: a new process, whose caches are empty. If it reports
        its start time, its next page will show whether it is one.
        """
        if not is_back:
            self._renewed(state)
        elif self._pool is not None and state.load.kv.started_at is None:
            state.load.restarted()

    def ask_load(self, uid: EndpointUid, ask: bool) -> None:
        """Set whether requests to an endpoint ask for load reports."""
        state = self._states.get(uid)
        if state is not None:
            state.reported.asks_load = ask

    def report_load(self, state: EndpointState, report: LoadReport | None, *, has_first_byte: bool, now: float) -> None:
        """Note the load report that came with a response; None = it was malformed. What it contains is current.

        `has_first_byte`: the request that brought it is not among those that await their first byte.
        """
        if report is None:
            state.reported.malformed_reports += 1
            return
        state.reported.load_reports += 1
        if report == _NO_REPORT:
            return
        queued = note_load(state, report, self._stale_after_s, has_first_byte=has_first_byte, now=now)
        if self._pool is not None and queued is not None and state.metrics is not None:
            until = state.fresh_until
            state.load.scraped(NO_METRICS, others=state.others, queued=queued, fresh_until=until, reported=True)
            state.load.queue_reported(state.metrics, until)

    def drain(self, uid: EndpointUid, draining: bool, emptied_at: float) -> None:
        """Stop (or resume) giving requests to a member; requests in flight continue, there until `emptied_at`."""
        state = self._states.get(uid)
        if state is not None:
            state.draining, state.standing.emptied_at = draining, emptied_at
            self.serving.changed(state)

    def snapshot(self, *, now: float, of: Iterable[EndpointState] | None = None) -> list[EndpointSnapshot]:
        """Of these endpoints. None: of `every`. 10 µs each."""
        share, is_readmitted = self.judge.slow_start.share, self.serving.is_readmitted
        states = self.every() if of is None else of
        return [snapshot_of(state, share(state, now), is_readmitted(state), now) for state in states]


def is_emptied(state: EndpointState, now: float) -> bool:
    """Whether what runs there is to go on elsewhere."""
    return state.draining and now >= state.standing.emptied_at


def _trial_at(state: EndpointState) -> float:
    """When the next request may try it."""
    return max(state.standing.tried_at + TRIAL_S, state.standing.dialled_at + DIAL_S)


def _sleeps(state: EndpointState, now: float) -> bool:
    """Whether an engine that lbproxy does not wake sleeps: it would answer nothing until somebody else wakes it."""
    return state.metrics is not None and state.metrics.asleep and now <= state.reported.scrape_until
