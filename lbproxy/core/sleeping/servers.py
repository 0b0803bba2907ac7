# SPDX-License-Identifier: Apache-2.0
"""The servers that may sleep and their hosts: who could meet a need, who has a place, when one will be awake.

It is the owner of every `SleepServer`, and the only one that moves it from phase to phase (`move`). It decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from math import inf
from typing import Final

from lbproxy.config.sleep import HostSettings
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.endpoints.endpoint_set import EndpointSet
from lbproxy.core.endpoints.state import ASKED, ASSUMED, EndpointState, OnDemand
from lbproxy.core.engines.loading import LOADERS, loads_always
from lbproxy.core.queue.ticket import Ticket, Wait
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.core.saved.pieces import Durations
from lbproxy.core.sleeping.phase import Phase, SleepEvent, SleepTransition, next_phase
from lbproxy.core.sleeping.server import HELD, LoadableModel, SleepServer


class Need:
    """What waiting requests that ask for the same need of servers that are not awake."""

    def __init__(
        self,
        model: str | None,
        uid: EndpointUid | None,
        avoid: frozenset[EndpointUid],
        engine: str | None = None,
        context: int | None = None,
    ) -> None:
        """`context`: with which it is to be loaded."""
        self.model = model
        self.engine = engine
        """Only endpoints with the API of this engine can take them; None = any."""
        self.uid = uid
        """The one endpoint that can take them; None = each that serves the model."""
        self.avoid = avoid
        """Endpoints that failed them."""
        self.oldest_at = inf
        """When the first of them arrived."""
        self.waiting = 0
        self.wait_s = 0.0
        """The longest wait of them, so far or as predicted."""
        self.expires_at = self.deadline = inf
        """When the first of them is to be placed, and is to be served."""
        self.is_served = False
        """An endpoint that is awake takes them: another one would only shorten their wait."""
        self.request: InferenceRequest | None = None
        """One of them; None: they do not wait any more."""

    def add(self, at: float, wait_s: float) -> None:
        """One more request, which arrived at this time."""
        self.waiting += 1
        self.oldest_at = min(self.oldest_at, at)
        self.wait_s = max(self.wait_s, wait_s)


def read_needs(
    tickets: Iterable[Ticket],
    endpoints: EndpointSet,
    owner: Callable[[InferenceRequest, float], EndpointUid | None],
    now: float,
) -> list[Need]:
    """What the waiting tickets need. O(n). Requests that wait for their own flow need nothing."""
    needs: dict[tuple[str | None, EndpointUid | None, frozenset[EndpointUid], str | None, int | None], Need] = {}
    for ticket in tickets:
        if not ticket.counts_in_flow:
            continue
        request = ticket.request
        uid = None if request.response_id is None else owner(request, now)
        key = (request.model, uid, ticket.avoid, request.engine, request.context_tokens)
        need = needs.get(key)
        if need is None:
            need = needs[key] = Need(*key)
            need.request, need.is_served = request, _is_served(need, request, endpoints, now)
        predicted_s = ticket.best_wait_s if ticket.best is not None or ticket.wait is Wait.WAKING else 0.0
        need.add(ticket.submitted_at, max(now - ticket.submitted_at, predicted_s))
        need.expires_at = min(need.expires_at, ticket.expires_at)
        need.deadline = min(need.deadline, request.deadline or inf)
    return list(needs.values())


def _is_served(need: Need, request: InferenceRequest, endpoints: EndpointSet, now: float) -> bool:
    if need.uid is not None:
        state = endpoints.get(need.uid)
        return state is not None and not state.dormant
    return is_served(need.model, need.avoid, endpoints, now, request=request)


def is_served(
    model: str | None,
    avoid: frozenset[EndpointUid],
    endpoints: EndpointSet,
    now: float,
    *,
    request: InferenceRequest | None = None,
) -> bool:
    """Whether an endpoint that is awake takes requests for `model`. Those of a higher tier than one that sleeps are no
    reason not to wake it. `avoid`: endpoints that do not count. `request`: one of them; its API and context count.
    """
    lowest = endpoints.serving.lowest_dormant(model)
    candidates = endpoints.candidates(model, now=now)
    return any(
        state.endpoint.tier <= lowest
        and state.endpoint.uid not in avoid
        and (request is None or _suits(state, request))
        for state in candidates
    )


def _suits(state: EndpointState, request: InferenceRequest) -> bool:
    return (request.engine is None or state.has_api(request.engine)) and state.is_loaded_for(request)


def loads_on_demand(state: EndpointState) -> bool:
    """Whether an endpoint loads models when somebody asks for them: as the settings say, or as it showed."""
    return shows_loads(state) or state.endpoint.loading.most is not None


def shows_loads(state: EndpointState) -> bool:
    """Whether it says which are in memory."""
    first = next(iter(state.models.values()), None) if state.models else None
    return loads_always(state.endpoint.engine) or (first is not None and first.engine in LOADERS)


LEAVING: Final = frozenset({Phase.DRAINING, Phase.FALLING_ASLEEP})
RISING: Final = frozenset({Phase.WAKING, Phase.STARTING})
STEADY: Final = frozenset({Phase.AWAKE, Phase.ASLEEP, Phase.OFF, Phase.UNKNOWN})
MAX_ABSENT: Final = 1024
"""Servers of which the durations are kept though they are not there; the ones that left first are dropped."""
_DEFAULT: Final = HostSettings()
"""What holds for a host that `hosts` does not name."""


class Servers:
    """All servers that may sleep."""

    def __init__(self, endpoints: EndpointSet, changed: Callable[[], None]) -> None:
        """`changed` is called when requests may be placed that could not be placed before."""
        self.transitions: list[SleepTransition] = []
        """Since they were last cleared."""
        self.hosts: Mapping[str, HostSettings] = {}
        self._endpoints, self._changed = endpoints, changed
        self._by_url: dict[str, SleepServer] = {}
        self._by_host: dict[str, list[SleepServer]] = {}
        self._by_model: dict[str, list[SleepServer]] = {}
        """Servers that list a model; and, under the empty name, those that list none, which may serve all."""
        self._lists_version = -1
        """For which `_by_model` is valid."""
        self.moving: dict[str, SleepServer] = {}
        """Servers on their way from one phase to another, or that an operator wants to be, by URL."""
        self._absent: dict[str, Durations] = {}
        """Servers that are not there, by URL: they may come back, or be found later."""

    def __len__(self) -> int:
        return len(self._by_url)

    def __iter__(self) -> Iterator[SleepServer]:
        """In the order of the settings."""
        return iter(self._by_url.values())

    def follow(self, now: float) -> None:
        """Note that the set of endpoints changed. What is known of servers that stay is kept."""
        by_url: dict[str, list[EndpointState]] = {}
        for state in self._endpoints.members():
            if state.endpoint.sleep is not None:
                by_url.setdefault(state.endpoint.base_url, []).append(state)
            elif state.dormant:
                state.dormant = ""
                self._shown(state)
        before, self._by_url = self._by_url, {}
        for url, states in by_url.items():
            spec = states[0].endpoint.sleep
            assert spec is not None
            server = before.get(url) or SleepServer(states, spec, now)
            server.states, server.spec = states, spec
            self._join(server, is_new=url not in before)
        self._follow_loadable(before, now)
        self._by_host, self.moving, self._lists_version = {}, {}, -1
        for server in self:
            self._by_host.setdefault(server.spec.host or "", []).append(server)
            self.note(server)
        self._keep({url: server.durations for url, server in before.items() if url not in by_url})

    def _join(self, server: SleepServer, *, is_new: bool) -> None:
        if is_new:
            server.restore(self._absent.pop(server.url, Durations()))
        self._by_url[server.url] = server
        self._show(server)

    def _follow_loadable(self, before: Mapping[str, SleepServer], now: float) -> None:
        """Find the models of endpoints that load them on demand."""
        for state in self._endpoints.members():
            standing = state.standing
            most = state.endpoint.loading.most
            if state.endpoint.sleep is not None or not loads_on_demand(state):
                if standing.on_demand is not None:
                    standing.on_demand = None
                    self._shown(state)
                continue
            standing.on_demand = on_demand = standing.on_demand or OnDemand()
            on_demand.is_silent = not shows_loads(state)
            on_demand.listed = names = frozenset(state.models or ())
            if not names >= on_demand.unloaded | on_demand.loading:
                on_demand.unloaded, on_demand.loading = on_demand.unloaded & names, on_demand.loading & names
                self._shown(state)
            if most != on_demand.most:
                on_demand.most = most
                on_demand.learn_room(most or ASSUMED.awake, is_all=False)
            for name in state.models or ():
                new = LoadableModel(state, name, now)
                known = before.get(new.url)
                self._join(known or new, is_new=known is None)

    def durations(self) -> dict[str, Durations]:
        """How long wakes, sleeps and starts took, by URL: of all servers of which that is known."""
        present = {url: server.durations for url, server in self._by_url.items()}
        return {url: found for url, found in {**self._absent, **present}.items() if any(found)}

    def remember(self, saved: Mapping[str, Durations]) -> None:
        """Start with what another lbproxy has seen."""
        for url, server in self._by_url.items():
            server.restore(saved.get(url, Durations()))
        self._keep({url: found for url, found in saved.items() if url not in self._by_url})

    def _keep(self, durations: Mapping[str, Durations]) -> None:
        self._absent.update((url, found) for url, found in durations.items() if any(found))
        for url in list(islice(self._absent, max(0, len(self._absent) - MAX_ABSENT))):
            del self._absent[url]

    def find(self, uid: EndpointUid) -> SleepServer | None:
        """The server of an endpoint; None if it left the set or does not sleep."""
        state = self._endpoints.get(uid)
        return None if state is None else self._by_url.get(state.endpoint.base_url)

    def at(self, url: str) -> SleepServer | None:
        """The server at a URL; None if it left, or does not sleep."""
        return self._by_url.get(url)

    def able(self, need: Need) -> list[SleepServer]:
        """The servers that could meet a need."""
        if need.uid is not None:
            one = self.find(need.uid)
            return [] if one is None or (one.is_drained_by_operator and one.by_hand is None) else [one]
        able: Iterable[SleepServer] = self if need.model is None else self._listing(need.model)
        return [
            one
            for one in able
            if not one.is_drained_by_operator
            and one.uid not in need.avoid
            and (need.engine is None or one.states[0].has_api(need.engine))
        ]

    def _listing(self, model: str) -> list[SleepServer]:
        """The servers that list a model, or none at all, in the order of the settings."""
        if self._lists_version != self._endpoints.lists_version:
            self._lists_version = self._endpoints.lists_version
            self._by_model = {}
            for server in self:
                for name in server.models:
                    self._by_model.setdefault(name, []).append(server)
        some, others = self._by_model.get(model, []), self._by_model.get("", [])
        if not (some and others):
            return some or others
        either = {one.url for one in (*some, *others)}
        return [one for url, one in self._by_url.items() if url in either]

    # Hosts

    def beside(self, server: SleepServer) -> list[SleepServer]:
        """The others that share its GPUs."""
        host = server.spec.host
        return [] if host is None else [one for one in self._by_host[host] if one is not server]

    def host_of(self, server: SleepServer) -> HostSettings:
        """The settings of its host."""
        if isinstance(server, LoadableModel):
            return server.on_demand.host
        return self.hosts.get(server.spec.host or "", _DEFAULT)

    def has_place(self, server: SleepServer) -> bool:
        """Whether it may be awake beside those of its host that may have the memory of a GPU."""
        return bool(self.having_place([server], {}))

    def having_place(self, servers: Iterable[SleepServer], memory: dict[str, int]) -> set[str]:
        """Of servers that are not awake, those that have a place: their URLs. `memory`: how many places of a host are
        taken, by what may have the memory of a GPU, for those that are not counted yet.
        """
        found: set[str] = set()
        for server in servers:
            host = server.spec.host
            if host is not None and host not in memory:
                memory[host] = sum(one.takes for one in self._by_host[host] if one.has_memory)
            if host is None or memory[host] + server.takes * (not server.has_memory) <= self.host_of(server).awake:
                found.add(server.url)
        return found

    def wanted(self, server: SleepServer, now: float) -> float:
        """How many requests would wait for a model at any time if it was not in memory there: how often it is asked for
        times how long its load takes. 0 if another endpoint has it too, if that is not known, and for a server that
        is called.
        """
        load_s, alike = server.wakes.seconds, [] if server.model is None else self._listing(server.model)
        if load_s is None or any(one is not server and one.takes_requests for one in alike):
            return 0.0
        asked = sorted(chain.from_iterable(one.asked for one in alike))[-ASKED:]
        return load_s * len(asked) / (now - asked[0]) if asked and asked[0] < now else 0.0

    # Predictions

    def awake_in_s(self, server: SleepServer, now: float, *, in_queue: bool = False) -> float | None:
        """In how many seconds it is awake, if it is woken as soon as possible; None: not known. `in_queue`: takes
        requests, which wait there for the rest.
        """
        starts = server.phase in {Phase.OFF, Phase.STARTING}
        takes_s = server.starts.seconds if starts else server.wakes.seconds
        if in_queue and not server.is_called:
            takes_s = 0.0
        if takes_s is None or server.phase is Phase.UNKNOWN:
            return None
        if server.phase in RISING:
            return max(0.0, server.since + takes_s - now)
        if server.phase in LEAVING:
            takes_s += server.sleeps.seconds or 0.0
        return max(0.0, server.retry_at - now) + self._place_in_s(server, now) + takes_s

    def _place_in_s(self, server: SleepServer, now: float) -> float:
        """When its host has a place, as far as known."""
        if self.has_place(server):
            return 0.0
        min_awake_s = self.host_of(server).min_awake
        waits = [
            (0.0 if one.is_idle(now) else max(0.0, one.since + min_awake_s - now)) + (one.sleeps.seconds or 0.0)
            for one in self.beside(server)
            if one.phase is Phase.AWAKE
        ]
        return min(waits, default=0.0)

    # The state machine

    def note(self, server: SleepServer) -> None:
        if server.phase in STEADY and server.by_hand is None:
            self.moving.pop(server.url, None)
        else:
            self.moving[server.url] = server

    def move(self, server: SleepServer, event: SleepEvent, reason: str, now: float) -> None:
        """Apply an event, with all consequences; nothing if it does not change the phase."""
        before = server.phase
        after = next_phase(before, event)
        if after is before:
            return
        lasted_s = now - server.since
        server.phase, server.since, server.idle_since = after, now, now
        if after in HELD:
            server.occupies = True
        elif after is Phase.ASLEEP and event is not SleepEvent.WAKE_FAILED:
            server.occupies = False
        if after is Phase.AWAKE:
            for state in server.states:
                state.standing.woken_at = now
        if after is Phase.AWAKE and before is Phase.WAKING:
            server.wakes.add(lasted_s)
            server.succeeded()
        elif event is SleepEvent.SLEPT:
            server.sleeps.add(lasted_s)
            server.succeeded()
        if after is Phase.ASLEEP and self._endpoints.has_loads and server.is_called:
            for state in server.states:  # the engine has discarded its KV cache, at both levels
                state.load.restarted()
        if server.by_hand == _DONE_BY.get(after):
            server.by_hand = None
        self.note(server)
        self._show(server)
        self.transitions.append(SleepTransition(server.name, before, after, reason, lasted_s, server.model))

    def _show(self, server: SleepServer) -> None:
        if server.show():
            for state in server.states:
                self._shown(state)

    def _shown(self, state: EndpointState) -> None:
        self._endpoints.serving.changed(state)
        self._changed()


_DONE_BY: Final = {Phase.AWAKE: "wake", Phase.FALLING_ASLEEP: "sleep"}
"""What an operator asked for is done in this phase."""
