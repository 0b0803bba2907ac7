# SPDX-License-Identifier: Apache-2.0
"""How many endpoints each model should have, kept steady; and how long its requests wait, and how much room is left.

`Advice.look` is called once a second, and looks at all groups of models, or if there are many at some. A higher number
counts at once, a lower one when it has been enough for the whole `window`, with a tenth more load than there is.
Unknown is what there is now, and where no request came for the whole window, 0. Endpoints that are down, ejected,
draining or asleep do nothing, so they do not count; nor do those above tier 1, as what overflows to them is what more
endpoints are for.

It owns the demand and what is read of it. A model is forgotten `FORGET_S` after the last endpoint that listed it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from math import inf
from typing import Final, NamedTuple

from lbproxy.core.capacity.room import HOLD_MS
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.endpoints.endpoint_set import EndpointSet
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.scaling.capacity import Load, endpoints_for
from lbproxy.core.scaling.demand import Demand
from lbproxy.core.scaling.readings import Readings, gauges_of, total, used_tokens

TARGET_SHARE: Final = 0.25
"""Of the target, at least, is for waiting: prompts whose prefill takes longer than the target are late on any number
of endpoints."""
DOWN_MARGIN: Final = 1.1
"""Fewer endpoints must be enough for this many times the load."""
MAX_GROWTH: Final = 4
"""Times as many endpoints as there are, at most."""
FORGET_S: Final = 3600.0
SAMPLE: Final = 100
"""Endpoints of a group whose gauges are read in one look, about: of more each time others."""
GROUPS: Final = 40
"""Groups that are looked at, likewise, of at most twice as many endpoints; and as many groups for which requests wait.
So a look takes 2 ms."""
_SERVING: Final = frozenset({Health.UP, Health.HALF_OPEN})


class ModelScaling(NamedTuple):
    """What an autoscaler may want to know of one model."""

    model: str
    endpoints: int
    """Endpoints that take requests now."""
    recommended: int | None
    """None: prefill and decode are apart, or nothing is learned under this policy."""
    recommended_known: bool
    """`recommended` follows from the load, or there was no request for a whole window. Not: nothing is known yet of
    what the load needs, so that it is as many as there are, or were of late."""
    waiting: int
    """Requests in the queue of lbproxy."""
    predicted_wait_s: float | None
    """The wait of a request that arrives now; None: no endpoint takes it, or nothing is learned under this policy."""
    room: float | None
    """Share of the endpoints' capacity that is left, 0..1; None: as above."""


class _ModelGroup:
    """Models on the same endpoints."""

    def __init__(self) -> None:
        self.models: frozenset[str] = frozenset()
        self.base: frozenset[str] = frozenset()
        """Models that are no adapters."""
        self.states: Sequence[EndpointState] = ()
        self.streamed: dict[EndpointUid, int] = {}
        """Tokens that each had streamed at the last look."""
        self.looked_at: float | None = None
        self.listed_at = 0.0
        """When an endpoint listed them, last."""
        self.readings = Readings()
        self.enough: deque[tuple[float, int, bool]] = deque()
        """When how many endpoints were enough, and whether that was computed: falling numbers."""
        self.busy_at = 0.0
        """When there was demand for the last time, or the first look."""
        self.last = 1
        """What was recommended last."""

    def look(self, now: float) -> tuple[float, int]:
        """How long ago the last look was, 0 = never, and the tokens that were streamed since."""
        for_s = 0.0 if self.looked_at is None else now - self.looked_at
        if self.looked_at is None:
            self.busy_at = now
        before, self.looked_at = self.streamed, now
        if self.states:
            self.listed_at = now
        self.streamed = {one.endpoint.uid: one.standing.progress.tokens_streamed for one in self.states}
        return for_s, sum(tokens - before.get(uid, tokens) for uid, tokens in self.streamed.items())


class Advice:
    """Of all models."""

    def __init__(self, target_s: float, window_s: float) -> None:
        self.demand = Demand()
        self._target_s, self._window_s = target_s, window_s
        self._looks = 0
        self._version = -1
        """The version of the model lists by which groups were made."""
        self._groups: dict[str, _ModelGroup] = {}
        """The group of each model: the models of a group have the same."""
        self._order: list[_ModelGroup] = []
        """Each group once."""
        self._step = 1
        """In so many looks each is looked at."""
        self._found: dict[str, ModelScaling] = {}
        self._queued: set[str] = set()
        """Models of requests that waited at the last look."""
        self._overloaded = False
        """See `LoadModel.full_by`, as of the latest look."""

    @property
    def models(self) -> list[ModelScaling]:
        """What was found of each model last, in the order of their names."""
        return sorted(self._found.values())

    def reconfigure(self, target_s: float, window_s: float) -> None:
        self._target_s, self._window_s = target_s, window_s

    def look(
        self, endpoints: EndpointSet, waiting: Iterable[str | None], now: float, *, learns: bool, overloaded: bool
    ) -> None:
        """Look at all endpoints and at the models of the requests that wait. `learns`: the policy does. `overloaded`:
        see `LoadModel.full_by`.
        """
        self._overloaded = overloaded
        if endpoints.lists_version != self._version:
            self._version = endpoints.lists_version
            self._group_anew(endpoints.members(), now)
        queued = Counter(model for model in waiting if model is not None)
        due = dict.fromkeys(self._order[self._looks % self._step :: self._step])
        self._looks += 1
        for model in islice(chain(queued, self._queued), GROUPS):
            if model in self._groups:
                due[self._groups[model]] = None
        self._queued = set(islice(queued, GROUPS))
        for group in due:
            for one in self._look_at(group, queued, now, learns=learns):
                self._found[one.model] = one
            if not group.states and now - group.listed_at > FORGET_S:
                self._version = -1  # it is forgotten with the next look

    def _group_anew(self, members: Iterable[EndpointState], now: float) -> None:
        """Make the groups of models that stand on the same endpoints now. One that has changed goes on with what is
        known of one of its models.
        """
        before = self._order
        for group in before:
            group.states = ()
        order: dict[_ModelGroup, None] = {}
        for names, base, states in _sets([one for one in members if one.models and one.endpoint.tier == 1]):
            self.demand.know(sorted(names))
            group = next((self._groups[name] for name in sorted(names) if name in self._groups), None) or _ModelGroup()
            group.models, group.base, group.states, group.listed_at = names, base, states, now
            counted = {name: group for name in names if name in self.demand.models}
            self._groups |= counted
            if counted:
                order[group] = None
        gone = [one for one in before if one not in order and now - one.listed_at <= FORGET_S]
        self._order = [*order, *gone]
        sampled = sum(min(SAMPLE, len(one.states)) for one in order)
        self._step = 1 + max(len(self._order) // GROUPS, sampled // (2 * SAMPLE))
        kept = set(self._order)
        for name, group in list(self._groups.items()):
            if group not in kept or name not in group.models:
                del self._groups[name], self.demand.models[name]
        self._found = {name: one for name, one in self._found.items() if name in self._groups}

    def _look_at(
        self, group: _ModelGroup, queued: Mapping[str, int], now: float, *, learns: bool
    ) -> list[ModelScaling]:
        """One group; its models that are no adapters."""
        for_s, streamed = group.look(now)
        usable = [state for state in group.states if _takes_requests(state)]
        step = 1 + len(usable) // SAMPLE
        sample = usable[self._looks % step :: step]
        waiting = sum(queued.get(model, 0) for model in group.models) if queued else 0
        recommended, known = None, False
        if learns:
            gauges = gauges_of(sample, len(usable), now)
            counts = total(self.demand.models[model] for model in group.models if model in self.demand.models)
            group.readings.look(counts, streamed, gauges, for_s)
            if gauges is not None or not usable:
                recommended, known = self._recommend(group, len(usable), waiting, now)
        wait_s = room = None
        if learns and sample:
            wait_s, room = (
                _wait_s(sample, waiting * len(sample) / len(usable), now),
                _room(sample, now, self._overloaded),
            )
        return [
            ModelScaling(model, len(usable), recommended, known, queued.get(model, 0), wait_s, room)
            for model in group.base
            if model in self.demand.models
        ]

    def _recommend(self, group: _ModelGroup, count: int, waiting: int, now: float) -> tuple[int, bool]:
        """How many, and whether that is computed."""
        readings, window_s = group.readings, self._window_s
        load = readings.load(waiting)
        if readings.is_busy or waiting:
            group.busy_at = now
        if now - group.busy_at > window_s:
            group.enough.clear()
            return 0, True
        computed = _enough(readings, load, count, self._target_s)
        enough = computed
        if enough is None:
            enough = max(count, 1 if count or not load.rate else group.last)
        while group.enough and group.enough[-1][1] <= enough:
            group.enough.pop()
        group.enough.append((now, enough, computed is not None))
        while group.enough[0][0] < now - window_s:
            group.enough.popleft()
        _, group.last, known = group.enough[0]
        return group.last, known


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


def _sets(
    listed: Iterable[EndpointState],
) -> list[tuple[frozenset[str], frozenset[str], list[EndpointState]]]:
    """Endpoints by the models that they list, all and those that are no adapters: those with one in common belong
    together.
    """
    alike: dict[frozenset[str], list[EndpointState]] = {}
    for state in listed:
        alike.setdefault(frozenset(state.models or ()), []).append(state)
    sets: dict[int, list[frozenset[str]]] = {}
    of_model: dict[str, int] = {}
    for number, names in enumerate(alike):
        sets[number] = [names]
        for other in {of_model[name] for name in names if name in of_model}:
            sets[number] += sets.pop(other)
        of_model |= {name: number for one in sets[number] for name in one}
    found = []
    for parts in sets.values():
        states = [state for names in parts for state in alike[names]]
        cards = {id(state.models): state.models for state in states if state.models is not None}.values()
        base = frozenset(name for one in cards for name, card in one.items() if card.parent is None)
        found.append((frozenset[str]().union(*parts), base, states))
    return found


def _takes_requests(state: EndpointState) -> bool:
    return not (state.draining or state.dormant or state.removed) and state.health in _SERVING


def _wait_s(usable: Sequence[EndpointState], waiting: float, now: float) -> float:
    """How long a request waits that arrives now: behind those that wait here, then at the best endpoint."""
    least_ms = min(state.load.wait_ms(now) for state in usable)
    starts = sum(state.load.room.slots.rate(now) for state in usable) if waiting else 1.0
    return least_ms / 1000.0 + waiting / starts


def _room(usable: Sequence[EndpointState], now: float, overloaded: bool) -> float:
    """The mean share that is left, of the scarcest of what each endpoint has."""
    return sum(_room_of(state, now, overloaded) for state in usable) / len(usable)


def _room_of(state: EndpointState, now: float, overloaded: bool) -> float:
    load = state.load
    if load.full_by(now, overloaded) is not None:
        return 0.0
    requests = state.in_flight + load.room.others.requests(now)
    slots = requests / load.room.slots.limit if load.room.slots.limit < inf else 0.0
    space = used_tokens(state, now) / load.kv.known_tokens if load.kv.known_tokens else 0.0
    return max(0.0, 1.0 - max(slots, space, load.prefill_ms(now) / HOLD_MS))
