"""How many endpoints each model should have, kept steady; and how long its requests wait, and how much room is left.

`Advice.look` is called once a second. A higher number counts at once, a lower one when it has been enough for the whole
`window`, with a tenth more load than there is. Unknown is what there is now, and where no request came for the
whole window, 0. Endpoints that are down, ejected or draining do nothing, so they do not count.

It owns the demand and what is read of it. A model is forgotten `FORGET_S` after the last endpoint that listed it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Final, NamedTuple

from lbproxy.core.capacity.room import HOLD_MS
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.scaling.capacity import Load, endpoints_for
from lbproxy.core.scaling.demand import Demand
from lbproxy.core.scaling.gauges import gauges_of, used_tokens
from lbproxy.core.scaling.offered import total
from lbproxy.core.scaling.readings import Readings

TARGET_SHARE: Final = 0.25
"""Of the target, at least, is for waiting: prompts whose prefill takes longer than the target are late on any number
of endpoints."""
DOWN_MARGIN: Final = 1.1
"""Fewer endpoints must be enough for this many times the load."""
MAX_GROWTH: Final = 4
"""Times as many endpoints as there are, at most."""
FORGET_S: Final = 3600.0
_SERVING: Final = frozenset({Health.UP, Health.HALF_OPEN})


class ModelScaling(NamedTuple):
    """What an autoscaler may want to know of one model."""

    model: str
    endpoints: int
    """That take requests now."""
    recommended: int | None
    """None: prefill and decode are apart, or nothing is learned under this policy."""
    waiting: int
    """Requests in the queue of lbproxy."""
    predicted_wait_s: float | None
    """Of a request that arrives now; None: no endpoint takes it, or nothing is learned under this policy."""
    room: float | None
    """Share of the endpoints' capacity that is left, 0..1; None: as above."""


class _Group:
    """Models on the same endpoints."""

    def __init__(self, now: float) -> None:
        self.readings = Readings()
        self.enough: deque[tuple[float, int]] = deque()
        """When how many endpoints were enough: falling numbers."""
        self.since = self.busy_at = now
        """The first look, and the last at which there was demand."""
        self.last = 1
        """The last that was known."""


class Advice:
    """Of all models."""

    def __init__(self, target_s: float, window_s: float) -> None:
        self.demand = Demand()
        self.models: list[ModelScaling] = []
        """In the order of their names."""
        self._target_s, self._window_s = target_s, window_s
        self._looked_at: float | None = None
        self._groups: dict[str, _Group] = {}
        """By model: the models of a group have the same."""
        self._listed_at: dict[str, float] = {}
        """When an endpoint last listed a model that is no adapter."""
        self._streamed: dict[EndpointUid, int] = {}

    def reconfigure(self, target_s: float, window_s: float) -> None:
        """Apply other settings."""
        self._target_s, self._window_s = target_s, window_s

    def look(
        self, members: Iterable[EndpointState], waiting: Iterable[str | None], now: float, *, learns: bool
    ) -> None:
        """Look at all endpoints and at the models of the requests that wait. `learns`: the policy does."""
        for_s = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        queued = Counter(model for model in waiting if model is not None)
        found = list[ModelScaling]()
        sets = _groups([(state, frozenset(state.models)) for state in members if state.models])
        for models, states in sets:
            self.demand.know(sorted(models))
            self._note(states, now)
            found += self._look_at(models, states, queued, for_s, now, learns=learns)
        self._streamed = {uid: self._streamed[uid] for _, states in sets for uid in (s.endpoint.uid for s in states)}
        gone = [model for model, at in self._listed_at.items() if at < now]
        for model in gone:
            if now - self._listed_at[model] > FORGET_S:
                self._forget(model)
            else:
                found += self._look_at(frozenset({model}), (), queued, for_s, now, learns=learns)
        self.models = sorted(found)

    def _note(self, states: Sequence[EndpointState], now: float) -> None:
        for state in states:
            for card in (state.models or {}).values():
                if card.parent is None and (card.id in self.demand.models):
                    self._listed_at[card.id] = now

    def _forget(self, model: str) -> None:
        del self._listed_at[model]
        self.demand.models.pop(model, None)
        self._groups.pop(model, None)

    def _look_at(
        self,
        models: frozenset[str],
        states: Sequence[EndpointState],
        queued: Mapping[str, int],
        for_s: float,
        now: float,
        *,
        learns: bool,
    ) -> list[ModelScaling]:
        """One group; its models that are no adapters."""
        usable = [state for state in states if _takes_requests(state)]
        waiting = sum(queued.get(model, 0) for model in models)
        recommended: int | None = None
        streamed = self._streamed_by(states)
        if learns:
            group = self._group(models, now)
            gauges = gauges_of(usable, now)
            counts = total(self.demand.models[model] for model in models if model in self.demand.models)
            group.readings.look(counts, streamed, gauges, for_s)
            if gauges is not None or not usable:
                recommended = self._recommend(group, len(usable), waiting, now)
        wait_s, room = (_wait_s(usable, waiting, now), _room(usable, now)) if learns and usable else (None, None)
        base = sorted(model for model in models if model in self._listed_at)
        return [ModelScaling(model, len(usable), recommended, queued.get(model, 0), wait_s, room) for model in base]

    def _group(self, models: frozenset[str], now: float) -> _Group:
        """What is known of them; a group that has changed goes on with what is known of one of its models."""
        group = next((self._groups[model] for model in sorted(models) if model in self._groups), None) or _Group(now)
        for model in models:
            if model in self.demand.models:
                self._groups[model] = group
        return group

    def _streamed_by(self, states: Sequence[EndpointState]) -> int:
        """Tokens that these endpoints have streamed since the last look."""
        more = 0
        for state in states:
            uid, tokens = state.endpoint.uid, state.tokens_streamed
            more += tokens - self._streamed.get(uid, tokens)
            self._streamed[uid] = tokens
        return more

    def _recommend(self, group: _Group, count: int, waiting: int, now: float) -> int:
        readings, window_s = group.readings, self._window_s
        load = readings.load(waiting)
        if readings.is_busy or waiting:
            group.busy_at = now
        if now - group.busy_at > window_s:
            group.enough.clear()
            return 0
        enough = _enough(readings, load, count, self._target_s)
        if enough is None:
            enough = max(count, 1 if count or not load.rate else group.last)
        while group.enough and group.enough[-1][1] <= enough:
            group.enough.pop()
        group.enough.append((now, enough))
        while group.enough[0][0] < now - window_s:
            group.enough.popleft()
        group.last = group.enough[0][1]
        return group.last


def _enough(readings: Readings, load: Load, count: int, target_s: float) -> int | None:
    """How many endpoints are enough where there are `count`; None: not known."""
    if not readings.is_known or not load.rate:
        return None
    capacity = readings.capacity()
    wait_s = max(target_s - load.work * capacity.prefill_s, TARGET_SHARE * target_s)
    enough = endpoints_for(load, capacity, wait_s)
    if enough < count:
        enough = min(count, endpoints_for(load._replace(rate=DOWN_MARGIN * load.rate), capacity, wait_s))
    return max(1, min(enough, MAX_GROWTH * max(count, 1)))


def _groups(
    states: Sequence[tuple[EndpointState, frozenset[str]]],
) -> list[tuple[frozenset[str], list[EndpointState]]]:
    """Endpoints by the models that they serve, in the order of the endpoints: those that have one in common belong
    together.
    """
    alike: dict[frozenset[str], list[EndpointState]] = {}
    for state, models in states:
        alike.setdefault(models, []).append(state)
    groups: list[tuple[frozenset[str], list[EndpointState]]] = []
    for models, members in alike.items():
        joined = [group for group in groups if group[0] & models]
        groups = [group for group in groups if not group[0] & models]
        every = [state for _, others in joined for state in others]
        groups.append((models.union(*(others for others, _ in joined)), every + members))
    return groups


def _takes_requests(state: EndpointState) -> bool:
    return not state.draining and not state.removed and state.health in _SERVING


def _wait_s(usable: Sequence[EndpointState], waiting: int, now: float) -> float:
    """How long a request waits that arrives now: behind those that wait here, then at the best endpoint."""
    least_ms = min(state.load.wait_ms(now) for state in usable)
    starts = sum(state.load.room.slots.rate(now) for state in usable) if waiting else 1.0
    return least_ms / 1000.0 + waiting / starts


def _room(usable: Sequence[EndpointState], now: float) -> float:
    """The mean share that is left, of the scarcest of what each endpoint has."""
    return sum(_room_of(state, now) for state in usable) / len(usable)


def _room_of(state: EndpointState, now: float) -> float:
    load = state.load
    if load.full_by(now) is not None:
        return 0.0
    requests = state.in_flight + load.room.others.requests(now)
    slots = requests / load.room.slots.limit if load.room.slots.limit < inf else 0.0
    space = used_tokens(state, now) / load.kv.known_tokens if load.kv.known_tokens else 0.0
    return max(0.0, 1.0 - max(slots, space, load.prefill_ms(now) / HOLD_MS))
