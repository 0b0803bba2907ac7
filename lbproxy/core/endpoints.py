"""The set of endpoints: who is in it, who is up, who serves which model, whose gauges may be believed.

Sole owner of every `EndpointState`. It judges health from what probes and connections report; it asks nobody itself.
Invariants:

- An endpoint gets requests only while it is in the set, `UP` and not draining.
- An endpoint that leaves the set keeps its state object until its last ticket closes, so that counts never go astray.
- Uids are never reused, so a report that arrives late about an endpoint that left is recognised and dropped.
- The lists that `candidates` hands out are shared and rebuilt, never edited: the caller may keep one, and must not
  change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lbproxy.config import HealthSettings, ScrapeSettings
from lbproxy.core.estimate import PoolModel
from lbproxy.core.types import (
    Endpoint,
    EndpointSnapshot,
    EndpointSpec,
    EndpointState,
    EndpointUid,
    Health,
    LoadMetrics,
    ModelCard,
    Transition,
)


@dataclass(frozen=True, slots=True)
class EndpointChanges:
    """What `EndpointSet.replace` did."""

    added: list[Endpoint]
    removed: list[Endpoint]
    changed: list[Endpoint] = field(default_factory=list)
    """Those that stayed at their address, with their state and uid, but are called, probed or scraped otherwise now."""


class EndpointSet:
    """All endpoints and their states."""

    def __init__(self, health: HealthSettings, scrape: ScrapeSettings, pool: PoolModel | None = None) -> None:
        self._pool = pool
        self.version = 0
        """Changes whenever `candidates` may."""
        self.reconfigure(health, scrape)
        self._states: dict[EndpointUid, EndpointState] = {}
        self._leaving: list[EndpointState] = []
        self._last_uid = 0
        self._serving: list[EndpointState] = []
        self._silent: list[EndpointState] = []
        self._by_model: dict[str, list[EndpointState]] = {}

    def reconfigure(self, health: HealthSettings, scrape: ScrapeSettings) -> None:
        """Judge by other settings what is reported from now on."""
        self._fall = health.fall
        self._rise = health.rise
        self._stale_after_s = scrape.stale_after

    def use(self, pool: PoolModel | None) -> None:
        """Another policy's models, or none. What is placed still ends against the model that it began with."""
        self._pool = pool
        for state in self._states.values():
            if pool is not None:
                state.load = pool.join()
        self._reindex()

    # Membership

    def replace(self, specs: Sequence[EndpointSpec]) -> EndpointChanges:
        """Make the set equal to `specs`, in that order. An endpoint whose address stays keeps its state.

        One that is missing takes no more requests and is forgotten when its last ticket closes.
        """
        kept = {state.endpoint.base_url: state for state in self._states.values()}
        states: dict[EndpointUid, EndpointState] = {}
        added, changed = [], []
        for spec in specs:
            state = kept.pop(spec.base_url, None)
            if state is None:
                self._last_uid += 1
                state = EndpointState(_identified(spec, EndpointUid(self._last_uid)))
                if self._pool is not None:
                    state.load = self._pool.join()
                if spec.health is None:
                    state.health = Health.UP
                added.append(state.endpoint)
            elif _spec_of(state.endpoint) != spec:
                state.endpoint = _identified(spec, state.endpoint.uid)
                if spec.health is None:  # nobody would ever say so
                    state.health = Health.UP
                changed.append(state.endpoint)
            states[state.endpoint.uid] = state
        removed = list(kept.values())
        for state in removed:
            state.draining = True
            if self._pool is not None:
                self._pool.leave(state.load)
        self._leaving = [state for state in [*self._leaving, *removed] if state.in_flight]
        self._states = states
        self._reindex()
        return EndpointChanges(added, [state.endpoint for state in removed], changed)

    def get(self, uid: EndpointUid) -> EndpointState | None:
        """The state of a member; None if it left."""
        return self._states.get(uid)

    def released(self, state: EndpointState) -> None:
        """Told when a ticket closed on `state`: a leaving endpoint is forgotten with its last one."""
        if self._leaving and not state.in_flight and state in self._leaving:
            self._leaving.remove(state)

    # Who may serve

    def candidates(self, model: str | None) -> Sequence[EndpointState]:
        """The endpoints that may be asked for `model` (None: any model). Usually O(1).

        Endpoints that say they serve it; if none does, those that are up but never said what they serve.
        """
        if model is None:
            return self._serving
        return self._by_model.get(model) or self._silent

    def is_known(self, model: str | None) -> bool:
        """Whether a member, whatever its health, says that it serves `model`."""
        return model is None or any(state.models and model in state.models for state in self._states.values())

    def any_starting(self) -> bool:
        """Whether a member has not been judged yet."""
        return any(state.health is Health.STARTING for state in self._states.values())

    def any_up(self) -> bool:
        """Whether a member takes requests."""
        return bool(self._serving)

    def base_models(self) -> list[str]:
        """The distinct base models (no adapters) of all members that say what they serve, in the members' order."""
        return list({card.id: None for card in self.model_cards() if card.parent is None})

    def model_cards(self) -> list[ModelCard]:
        """What the members that are up serve, one card a model: the first endpoint's word counts."""
        cards: dict[str, ModelCard] = {}
        for state in self._serving:
            for card in (state.models or {}).values():
                cards.setdefault(card.id, card)
        return list(cards.values())

    def _reindex(self) -> None:
        self.version += 1
        self._serving = [s for s in self._states.values() if s.health is Health.UP and not s.draining]
        self._silent = [state for state in self._serving if state.models is None]
        by_model: dict[str, list[EndpointState]] = {}
        for state in self._serving:
            for model in state.models or ():
                by_model.setdefault(model, []).append(state)
        self._by_model = by_model
        if self._pool is not None:
            self._pool.adapters = frozenset(
                card.id for state in self._serving for card in (state.models or {}).values() if card.parent is not None
            )

    # Reports

    def report_health(self, uid: EndpointUid, ok: bool, reason: str) -> Transition | None:
        """A probe's answer, or a connection that failed. `fall` bad ones in a row take an endpoint down, `rise` good
        ones bring it back; the first report of all decides at once, so that neither start waits for the counts.
        """
        state = self._states.get(uid)
        if state is None or (ok and state.endpoint.health is None):
            return None
        state.fails = 0 if ok else state.fails + 1
        state.passes = state.passes + 1 if ok else 0
        before = state.health
        if before is Health.STARTING:
            state.health = Health.UP if ok else Health.DOWN
        elif before is Health.UP and state.fails >= self._fall and state.endpoint.health is not None:
            state.health = Health.DOWN
        elif before is Health.DOWN and state.passes >= self._rise:
            state.health = Health.UP
        if state.health is before:
            return None
        self._reindex()
        return Transition(state.endpoint, before, state.health, reason)

    def report_models(self, uid: EndpointUid, cards: Iterable[ModelCard] | None) -> None:
        """What /v1/models said. None: the endpoint has no such list; what it said before is forgotten."""
        state = self._states.get(uid)
        if state is None:
            return
        models = None if cards is None else {card.id: card for card in cards}
        before, state.models = state.models, models
        if _served(before) != _served(models):
            self._reindex()

    def scrape_sent(self, uid: EndpointUid) -> None:
        """A scrape leaves now: remember what of the load that it will show is ours."""
        state = self._states.get(uid)
        if state is not None:
            state.in_flight_at_scrape = state.in_flight

    def report_scrape(self, uid: EndpointUid, metrics: LoadMetrics) -> None:
        """A scrape's good answer. A failed scrape is not reported: the old values age."""
        state = self._states.get(uid)
        if state is None:
            return
        state.metrics = metrics
        state.fresh_until = metrics.scraped_at + self._stale_after_s
        if metrics.waiting is None and metrics.running is None:
            state.others = None
        else:
            seen = (metrics.waiting or 0.0) + (metrics.running or 0.0)
            state.others = max(0.0, seen - state.in_flight_at_scrape)
        if self._pool is not None:
            state.load.scraped(
                metrics, others=state.others, awaiting=state.awaiting_first_byte, fresh_until=state.fresh_until
            )

    def drain(self, uid: EndpointUid, draining: bool) -> None:
        """Stop (or resume) giving requests to a member; what runs there finishes."""
        state = self._states.get(uid)
        if state is not None:
            state.draining = draining
            self._reindex()

    def snapshot(self, *, now: float) -> list[EndpointSnapshot]:
        """Members in the order of the settings, then those that are leaving."""
        return [_snapshot(state, now) for state in [*self._states.values(), *self._leaving]]


def _served(models: dict[str, ModelCard] | None) -> dict[str, str | None] | None:
    """Of what an endpoint lists, that which placing goes by."""
    return None if models is None else {card.id: card.parent for card in models.values()}


def _identified(spec: EndpointSpec, uid: EndpointUid) -> Endpoint:
    return Endpoint(
        uid=uid,
        name=spec.name,
        base_url=spec.base_url,
        engine=spec.engine,
        metrics=spec.metrics,
        health=spec.health,
    )


def _spec_of(endpoint: Endpoint) -> EndpointSpec:
    return EndpointSpec(
        name=endpoint.name,
        base_url=endpoint.base_url,
        engine=endpoint.engine,
        metrics=endpoint.metrics,
        health=endpoint.health,
    )


def _snapshot(state: EndpointState, now: float) -> EndpointSnapshot:
    return EndpointSnapshot(
        endpoint=state.endpoint,
        health=state.health,
        draining=state.draining,
        backing_off=now < state.backing_off_until,
        in_flight=state.in_flight,
        awaiting_first_byte=state.awaiting_first_byte,
        placed=state.placed,
        tokens_streamed=state.tokens_streamed,
        metrics=state.metrics,
        metrics_age_s=None if state.metrics is None else max(0.0, now - state.metrics.scraped_at),
        stale=now > state.fresh_until,
        models=None if state.models is None else tuple(state.models),
    )
