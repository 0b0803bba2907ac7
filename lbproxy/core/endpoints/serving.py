# SPDX-License-Identifier: Apache-2.0
"""The index of models: which endpoints serve each model, and which of those may take requests now.

A change of one endpoint updates the counts of its models and drops their lists; the next `candidates` filters one list
again. So a change costs O(models of that endpoint), however many endpoints there are, and updates may come in any
order.

It is the only owner of this state. Changes are reported by `replace_all` (the set) and `changed` (one endpoint).
Invariants:

- A group holds exactly the members that its requests may be sent to: endpoints whose probes pass, by
  `core.endpoints.health`, and that are neither draining nor dormant. Its `up` is the number of those that are `UP`.
- Whether an endpoint is readmitted is computed from the counts when it is needed, and stored nowhere.
- Each tier has groups of its own: what is used, and whether too few are up, does not depend on other tiers.
- Lists are in the order of the settings, or of the tiers if there are several. They are shared, and replaced instead of
  modified: a caller may keep one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from math import inf
from operator import attrgetter
from typing import Final

from lbproxy.core.endpoints import health
from lbproxy.core.endpoints.breaker import Cause
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.engines.handover import Role
from lbproxy.core.requests.openai import ModelCard

_POSITION: Final = attrgetter("position")
_OUTDATED: Final = 0
MAX_EVER_LISTED: Final = 10_000
"""Of a fleet with all of its adapters; a server may list others each time."""
STARTABLE: Final = frozenset({"off", "starting"})
"""What `EndpointState.dormant` says of endpoints that are down, and that a webhook can start."""
USELESS: Final = frozenset({Cause.UNREACHABLE, Cause.KEY})
"""Whatever it is asked fails there."""


_ALL_LOADED: Final[frozenset[str]] = frozenset()


class _Group:
    """Members that take the same requests: all, those that list one model, or those that never listed any."""

    def __init__(self) -> None:
        self.entries: dict[EndpointUid, _Entry] = {}
        self.up = 0
        self.adapters = 0
        """How many of them list the model as an adapter."""
        self.usable: list[EndpointState] = []
        """Members that may be asked, as of `epoch`."""
        self.panics: dict[Role, bool] = {}
        """As of `epoch`, where prefill and decode are apart: see `Serving._panics`."""
        self.epoch = _OUTDATED


class _Entry:
    """An endpoint of the set, and how it is counted."""

    def __init__(self, state: EndpointState) -> None:
        self.state = state
        self.position = 0
        """Its position in the order of the settings."""
        self.groups: list[_Group] = []
        """Empty unless it is a member of groups."""
        self.models: dict[str, ModelCard] | None = None
        """The model list by which it is in these groups."""
        self.unloaded: frozenset[str] = frozenset()
        """Models of that list of which it is in no group."""
        self.tier = state.endpoint.tier
        """The tier whose groups these are."""
        self.is_up = False
        """It is counted in their `up`."""


class _Tier:
    """The groups of one tier."""

    def __init__(self) -> None:
        self.all, self.unlisted = _Group(), _Group()
        self.by_model: dict[str, _Group] = {}
        """Without empty groups."""


class _Dormant:
    """Endpoints that would get requests if they were awake, and may be woken or started."""

    def __init__(self) -> None:
        self._names: dict[EndpointUid, list[str]] = {}
        """The models that each lists; the empty name if it lists none, and may serve all."""
        self._by_model: dict[str, dict[EndpointUid, EndpointState]] = {}

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, uid: EndpointUid) -> bool:
        return uid in self._names

    def add(self, state: EndpointState, names: Iterable[str]) -> None:
        """Add one, or note that its models changed. `names`: those that sleep; see `_names`."""
        uid = state.endpoint.uid
        self.discard(uid)
        self._names[uid] = names = list(names)
        for name in names:
            self._by_model.setdefault(name, {})[uid] = state

    def discard(self, uid: EndpointUid) -> None:
        for name in self._names.pop(uid, ()):
            listing = self._by_model[name]
            del listing[uid]
            if not listing:
                del self._by_model[name]

    def serving(self, model: str | None) -> Iterator[EndpointState]:
        """Those that serve a model; None: any, some of them more than once."""
        if model is None:
            return chain.from_iterable(one.values() for one in self._by_model.values())
        return chain(self._by_model.get(model, {}).values(), self._by_model.get("", {}).values())


class Serving:
    """Which endpoints may be asked for which model."""

    def __init__(self, *, panic: bool) -> None:
        """`panic`: use ejected endpoints too if less than half of the endpoints would be left."""
        self.version = 0
        """Changes whenever `candidates` may change."""
        self.adapters: set[str] = set()
        """The models that a member lists as an adapter. `PoolModel` refers to this same set."""
        self.shortest_context = self._longest_context = 0
        """The context lengths that any endpoint ever listed are between these; 0: none."""
        self._ever_listed: set[str] = set()
        """The models that any endpoint ever listed, the first `MAX_EVER_LISTED`."""
        self.down: set[EndpointUid] = set()
        """Endpoints that are `DOWN`, draining or not."""
        self.dormant = _Dormant()
        self.has_roles = self.has_tiers = False
        """Prefill and decode are apart; see EndpointSet. Set by the endpoint set, which then calls `outdate`."""
        self.has_contexts = False
        """A request asked for a context with which a model is to be loaded. Set where it is placed."""
        self._panic = panic
        self._epoch = _OUTDATED + 1
        """Lists of earlier epochs are outdated."""
        self._entries: dict[EndpointUid, _Entry] = {}
        self._first = _Tier()
        """The lowest tier that has a member, whatever its health."""
        self.tiers: dict[int, _Tier] = {1: self._first}
        """The tiers that have members, the lowest first."""

    # Changes

    def reconfigure(self, *, panic: bool) -> None:
        self._panic = panic
        self.outdate()

    def replace_all(self, states: Iterable[EndpointState]) -> None:
        """Set the complete set, in the order of the settings. O(endpoints + models of those that join or leave).

        Of the others only their position is updated.
        """
        before, self._entries = self._entries, {}
        joined: list[EndpointState] = []
        for position, state in enumerate(states):
            uid = state.endpoint.uid
            entry = before.pop(uid, None)
            if entry is None:
                entry = _Entry(state)
                joined.append(state)
            elif entry.tier != state.endpoint.tier:
                self._remove(uid, entry)
                entry.tier = state.endpoint.tier
                joined.append(state)
            entry.position = position
            self._entries[uid] = entry
        for uid, entry in before.items():
            self.down.discard(uid)
            self.dormant.discard(uid)
            self._remove(uid, entry)
        known = self.tiers
        self.tiers = {tier: known.get(tier) or _Tier() for tier in sorted(self._tiers_of_members())}
        self._first = next(iter(self.tiers.values()))
        for state in joined:
            self.changed(state)
        self.outdate()

    def _tiers_of_members(self) -> set[int]:
        return {entry.tier for entry in self._entries.values()} or {1}

    def changed(self, state: EndpointState) -> None:
        """Note that the health, trial, `draining`, `dormant` or models of `state` changed. No effect if it is not in
        the set. O(its models).
        """
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
        on_demand = state.standing.on_demand
        unloaded = _ALL_LOADED if on_demand is None else on_demand.unloaded
        if state.dormant or unloaded or self.dormant:
            is_member = self._note_dormant(state, is_member) and is_member
        if not is_member or state.models is not entry.models or unloaded != entry.unloaded:
            self._remove(uid, entry)
            entry.unloaded = unloaded
            if state.models and len(self._ever_listed) < MAX_EVER_LISTED:
                self._ever_listed.update(state.models)
        if not is_member:
            return
        if not entry.groups:
            self._add(uid, entry)
        is_up = state.health is Health.UP
        more = int(is_up) - int(entry.is_up)
        entry.is_up = is_up
        for group in entry.groups:
            group.up += more
            group.epoch = _OUTDATED

    def _note_dormant(self, state: EndpointState, is_member: bool) -> bool:
        """Note whether an endpoint is dormant. `is_member`: it would get requests else. Returns whether it is awake."""
        sleep = state.endpoint.sleep
        startable = state.dormant in STARTABLE or (sleep is not None and sleep.cold_start is not None)
        if state.dormant and (is_member or (startable and not state.draining)):
            self.dormant.add(state, [""] if state.models is None else state.models)
        elif is_member and (on_demand := state.standing.on_demand) is not None and on_demand.unloaded:
            self.dormant.add(state, on_demand.unloaded)
        else:
            self.dormant.discard(state.endpoint.uid)
        return not state.dormant

    def outdate(self) -> None:
        """Note a change that concerns all lists."""
        self.version += 1
        self._epoch += 1

    def _add(self, uid: EndpointUid, entry: _Entry) -> None:
        """Add an endpoint to its groups; it does not count as up yet."""
        entry.models = models = entry.state.models
        tier = self.tiers[entry.tier]
        entry.groups = groups = [tier.all]
        if models is None:
            groups.append(tier.unlisted)
        else:
            for model, card in models.items():
                if model in entry.unloaded:
                    continue
                group = tier.by_model.get(model)
                if group is None:
                    group = tier.by_model[model] = _Group()
                if card.parent is not None:
                    group.adapters += 1
                    self.adapters.add(model)
                if (length := card.context_tokens) is not None:
                    self.shortest_context = min(self.shortest_context or length, length)
                    self._longest_context = max(self._longest_context, length)
                groups.append(group)
        for group in groups:
            group.entries[uid] = entry

    def _remove(self, uid: EndpointUid, entry: _Entry) -> None:
        """The reverse of `_add`. No effect if it is in no group."""
        if not entry.groups:
            return
        for group in entry.groups:
            del group.entries[uid]
            group.up -= int(entry.is_up)
            group.epoch = _OUTDATED
        entry.is_up = False
        entry.groups = []
        by_model = self.tiers[entry.tier].by_model
        for model, card in (entry.models or {}).items():
            if model in entry.unloaded:
                continue
            group = by_model[model]
            if card.parent is not None:
                group.adapters -= 1
                if not any(model in one.by_model and one.by_model[model].adapters for one in self.tiers.values()):
                    self.adapters.discard(model)
            if not group.entries:
                del by_model[model]

    # Reading

    def candidates(self, model: str | None) -> list[EndpointState]:
        """The endpoints that may be asked for `model` (None: any model). O(1), except for the first call after a
        change.

        These are the endpoints that list it; if none of them may be asked, those that never listed any model. If there
        are several tiers, those of each.
        """
        if len(self.tiers) == 1:
            return self._usable(self._group(self._first, model))
        return [state for tier in self.tiers.values() for state in self._usable(self._group(tier, model))]

    def by_tier(self, model: str | None, max_tier: int) -> list[list[EndpointState]]:
        """The same for each tier up to `max_tier` that has any, the lowest tier first."""
        found = [self._usable(self._group(one, model)) for tier, one in self.tiers.items() if tier <= max_tier]
        return [members for members in found if members]

    def has_listed(self, model: str) -> bool:
        """Whether any endpoint lists `model`, or ever did, up or not."""
        return model in self._ever_listed or any(model in tier.by_model for tier in self.tiers.values())

    def health_below(self, model: str | None, tier: int) -> Health | None:
        """Of the endpoints of lower tiers for `model`: STARTING if that of one is not known yet, else DOWN; None if
        there are none. O(members).
        """
        found = None
        for entry in self._entries.values():
            state = entry.state
            serves = model is None or state.models is None or model in state.models
            if state.endpoint.tier < tier and serves and not state.draining:
                if state.health is Health.STARTING:
                    return Health.STARTING
                found = Health.DOWN
        return found

    def is_readmitted(self, state: EndpointState) -> bool:
        """Whether the breaker ejected `state`, and it is used all the same for at least one of its models."""
        if accepts_requests(state) or not _is_reachable(state):
            return False
        entry = self._entries.get(state.endpoint.uid)
        return entry is not None and any(self._panics(group, state) for group in entry.groups)

    def is_readmitted_for(self, state: EndpointState, model: str | None) -> bool:
        """The same for requests for `model`. O(1)."""
        if accepts_requests(state) or not _is_reachable(state):
            return False
        tier = self.tiers.get(state.endpoint.tier)
        if tier is None:
            return False
        group = self._group(tier, model)
        return state.endpoint.uid in group.entries and self._panics(group, state)

    def may_rise(self, model: str | None, avoid: Collection[EndpointUid], *, below: int) -> bool:
        """Whether an endpoint that serves `model` (None: any model) is asleep and may be woken, or may be started.
        `avoid`: endpoints that do not count. `below`: nor do those of this tier and above it.
        """
        return any(
            state.endpoint.uid not in avoid and state.endpoint.tier < below for state in self.dormant.serving(model)
        )

    def lowest_dormant(self, model: str | None) -> float:
        """The lowest tier of the endpoints that `may_rise` means; infinite if there are none."""
        return min((float(state.endpoint.tier) for state in self.dormant.serving(model)), default=inf)

    def model_cards(self) -> list[ModelCard]:
        """The models of the members and of dormant ones, one card per model: that of the first member with the longest
        context. O(models) if all serve the same, else O(members x models).
        """
        cards: dict[str, ModelCard] = {}
        dormant = self.dormant
        is_same = len(self.tiers) == 1 and not dormant and self.shortest_context == self._longest_context
        for uid, entry in self._entries.items():
            if is_same and len(cards) == len(self._first.by_model):
                break
            if entry.groups or uid in dormant:
                for card in (entry.state.models or {}).values():
                    first = cards.setdefault(card.id, card)
                    if (card.context_tokens or 0) > (first.context_tokens or 0):
                        cards[card.id] = card
        return list(cards.values())

    def base_models(self) -> list[str]:
        """The distinct base models (no adapters), in the order of members."""
        return list({card.id: None for card in self.model_cards() if card.parent is None})

    def _group(self, tier: _Tier, model: str | None) -> _Group:
        if model is None:
            return tier.all
        group = tier.by_model.get(model)
        return group if group is not None and self._usable(group) else tier.unlisted

    def _usable(self, group: _Group) -> list[EndpointState]:
        if group.epoch != self._epoch:
            group.epoch = self._epoch
            if self.has_roles:
                group.panics = self._panics_by_role(group)
            group.usable = [
                entry.state
                for entry in sorted(group.entries.values(), key=_POSITION)
                if accepts_requests(entry.state) or (self._panics(group, entry.state) and _is_reachable(entry.state))
            ]
        return group.usable

    def _panics(self, group: _Group, state: EndpointState) -> bool:
        """Whether the breaker would leave less than half of a group, or of those in it with the role of `state`. It
        is probably wrong then, or all are bad and there is nothing to lose. Endpoints that cannot be connected to stay
        ejected even then.
        """
        if not self.has_roles:
            return self._panic and 2 * group.up < len(group.entries)
        if group.epoch != self._epoch:
            self._usable(group)
        return group.panics.get(state.handover.role, False)

    def _panics_by_role(self, group: _Group) -> dict[Role, bool]:
        up: dict[Role, int] = {}
        for entry in group.entries.values():
            role = entry.state.handover.role
            up[role] = up.get(role, 0) + (1 if entry.is_up else -1)
        return {role: self._panic and more < 0 for role, more in up.items()}


def accepts_requests(state: EndpointState) -> bool:
    """Whether the breaker lets requests through: all of them, or one that tries the endpoint."""
    return state.health is Health.UP or (state.health is Health.HALF_OPEN and state.standing.trial is None)


def why_not(state: EndpointState) -> str:
    """Why a member takes no requests."""
    return "draining" if state.draining else (state.dormant or state.health.value)


def _is_reachable(state: EndpointState) -> bool:
    return state.standing.breaker.cause not in USELESS
