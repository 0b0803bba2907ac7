"""The index of models: which endpoints serve each model, and which of those may take requests now.

A change of one endpoint adjusts the counts of its models and drops their lists; the next `candidates` filters one list
again. So a change costs O(models of that endpoint), however many endpoints there are, and needs no order of updates.

Sole owner of this state. It learns of changes by `replace_all` (the set) and `changed` (one endpoint). Invariants:

- A group holds exactly the members that a request may want: endpoints that are alive by `core.endpoints.health` and not
  draining. Its `up` is the number of those that are `UP`.
- Whether an endpoint is readmitted is worked out from the counts whenever it is asked for, and stored nowhere.
- Lists are in the order of the settings. They are shared, and replaced rather than edited: a caller may keep one.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Final

from lbproxy.core.endpoints import health
from lbproxy.core.endpoints.breaker import Cause
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.requests.openai import ModelCard

_POSITION: Final = attrgetter("position")
_DROPPED: Final = 0


class _Group:
    """Members that take the same requests: all, those that list one model, or those that never listed any."""

    def __init__(self) -> None:
        self.entries: dict[EndpointUid, _Entry] = {}
        self.up = 0
        self.adapters = 0
        """How many of them list the model as an adapter."""
        self.usable: list[EndpointState] = []
        """Those that may be asked, as of `epoch`."""
        self.epoch = _DROPPED


class _Entry:
    """An endpoint of the set, and what is counted of it."""

    def __init__(self, state: EndpointState) -> None:
        self.state = state
        self.position = 0
        """In the order of the settings."""
        self.groups: list[_Group] = []
        """Empty unless it is a member."""
        self.models: dict[str, ModelCard] | None = None
        """The list by which it is in these groups."""
        self.is_up = False
        """It counts in their `up`."""


class Serving:
    """Which endpoints may be asked for which model."""

    def __init__(self, *, panic: bool) -> None:
        """`panic`: use ejected endpoints too where less than half would be left."""
        self.version = 0
        """Changes whenever `candidates` may."""
        self.adapters: set[str] = set()
        """The models that a member lists as an adapter. `PoolModel` refers to this very set."""
        self.down: set[EndpointUid] = set()
        """Endpoints that are `DOWN`, draining or not."""
        self._panic = panic
        self._epoch = _DROPPED + 1
        """Lists of earlier epochs are out of date."""
        self._entries: dict[EndpointUid, _Entry] = {}
        self._all, self._unlisted = _Group(), _Group()
        self._by_model: dict[str, _Group] = {}
        """Without empty groups."""

    # Changes

    def reconfigure(self, *, panic: bool) -> None:
        """Another setting."""
        self._panic = panic
        self._drop_all()

    def replace_all(self, states: Iterable[EndpointState]) -> None:
        """The complete set, in the order of the settings. O(endpoints + models of those that come or leave).

        Of the others only their place in the order is read.
        """
        before, self._entries = self._entries, {}
        joined: list[EndpointState] = []
        for position, state in enumerate(states):
            uid = state.endpoint.uid
            entry = before.pop(uid, None)
            if entry is None:
                entry = _Entry(state)
                joined.append(state)
            entry.position = position
            self._entries[uid] = entry
        for uid, entry in before.items():
            self.down.discard(uid)
            self._remove(uid, entry)
        for state in joined:
            self.changed(state)
        self._drop_all()

    def changed(self, state: EndpointState) -> None:
        """The health, trial, `draining` or models of `state` changed; no-op if it is not in the set. O(its models)."""
        self.version += 1
        uid = state.endpoint.uid
        entry = self._entries.get(uid)
        if entry is None:
            return
        if state.health is Health.DOWN:
            self.down.add(uid)
        else:
            self.down.discard(uid)
        is_member = state.health in health.HEALTHY_STATES and not state.draining
        if not is_member or state.models is not entry.models:
            self._remove(uid, entry)
        if not is_member:
            return
        if not entry.groups:
            self._add(uid, entry)
        is_up = state.health is Health.UP
        more = int(is_up) - int(entry.is_up)
        entry.is_up = is_up
        for group in entry.groups:
            group.up += more
            group.epoch = _DROPPED

    def _drop_all(self) -> None:
        self.version += 1
        self._epoch += 1

    def _add(self, uid: EndpointUid, entry: _Entry) -> None:
        """A member takes its place in its groups; it does not count as up yet."""
        entry.models = models = entry.state.models
        entry.groups = groups = [self._all]
        if models is None:
            groups.append(self._unlisted)
        else:
            for model, card in models.items():
                group = self._by_model.get(model)
                if group is None:
                    group = self._by_model[model] = _Group()
                if card.parent is not None:
                    group.adapters += 1
                    self.adapters.add(model)
                groups.append(group)
        for group in groups:
            group.entries[uid] = entry

    def _remove(self, uid: EndpointUid, entry: _Entry) -> None:
        """The reverse of `_add`; no-op for one that has no place."""
        if not entry.groups:
            return
        for group in entry.groups:
            del group.entries[uid]
            group.up -= int(entry.is_up)
            group.epoch = _DROPPED
        entry.is_up = False
        entry.groups = []
        for model, card in (entry.models or {}).items():
            group = self._by_model[model]
            if card.parent is not None:
                group.adapters -= 1
                if not group.adapters:
                    self.adapters.discard(model)
            if not group.entries:
                del self._by_model[model]

    # Reading

    def candidates(self, model: str | None) -> list[EndpointState]:
        """The endpoints that may be asked for `model` (None: any model). O(1), but the first time after a change.

        Those that list it; if none of these may be asked, those that never listed any model.
        """
        return self._usable(self._group(model))

    def is_readmitted(self, state: EndpointState) -> bool:
        """Whether the breaker keeps `state` out, and it is used all the same for one of its models at least."""
        if accepts_requests(state) or not _is_reachable(state):
            return False
        entry = self._entries.get(state.endpoint.uid)
        return entry is not None and any(self._panics(group) for group in entry.groups)

    def is_readmitted_for(self, state: EndpointState, model: str | None) -> bool:
        """The same of requests for `model`. O(1)."""
        if accepts_requests(state) or not _is_reachable(state):
            return False
        group = self._group(model)
        return state.endpoint.uid in group.entries and self._panics(group)

    def model_cards(self) -> list[ModelCard]:
        """What the members serve, one card a model: that of the first endpoint counts. O(models) if all serve the same,
        else O(members x models).
        """
        cards: dict[str, ModelCard] = {}
        for entry in self._entries.values():
            if len(cards) == len(self._by_model):
                break
            if entry.groups:
                for card in (entry.state.models or {}).values():
                    cards.setdefault(card.id, card)
        return list(cards.values())

    def _group(self, model: str | None) -> _Group:
        """The group that requests for `model` go to."""
        if model is None:
            return self._all
        group = self._by_model.get(model)
        return group if group is not None and self._usable(group) else self._unlisted

    def _usable(self, group: _Group) -> list[EndpointState]:
        """Those of a group that may be asked."""
        if group.epoch != self._epoch:
            group.epoch = self._epoch
            panics = self._panics(group)
            group.usable = [
                entry.state
                for entry in sorted(group.entries.values(), key=_POSITION)
                if accepts_requests(entry.state) or (panics and _is_reachable(entry.state))
            ]
        return group.usable

    def _panics(self, group: _Group) -> bool:
        """The breaker would leave less than half of a group. Then it is more likely wrong, or all are bad, and there is
        nothing to lose. An endpoint that no connection can be made to is out even so.
        """
        return self._panic and 2 * group.up < len(group.entries)


def accepts_requests(state: EndpointState) -> bool:
    """The breaker lets requests through: all, or the one that tries it."""
    return state.health is Health.UP or (state.health is Health.HALF_OPEN and state.trial is None)


def _is_reachable(state: EndpointState) -> bool:
    return state.breaker.cause is not Cause.UNREACHABLE
