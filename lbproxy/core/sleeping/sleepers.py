# SPDX-License-Identifier: Apache-2.0
"""Which server is woken, which is put to sleep, and when. It decides; a driver calls the servers.

A driver reports what servers say (`reported`) and how calls ended (`ended`), calls `decide` several times a second, and
carries out each order that it returns, once. Rules, in this order:

1. A server that is to sleep gets no more requests, and is put to sleep when it has none; after `DRAIN_S` in any case,
   as the engine itself finishes what runs (decision 0045).
2. What waits longest is served first. If no server that is awake serves it, and none is on its way, one is woken that
   does: one that has a place on its host, has failed least of late, and stands first in the settings.
3. At most so many servers of a host are awake as its settings say; every phase in which a server may have the memory of
   the GPU counts. If there is no place, one of them is put to sleep: one that is idle, else one that has been awake for
   `min_awake`. So what waits gets its turn after that time, a drain, a sleep and a wake at the latest. Of models that
   are loaded on demand that one goes which is wanted least, and only if that pays (`_pays`).
4. If requests wait longer for servers that are awake than a wake takes, one more is woken, but only into a free place.
5. A server that was idle for `sleep_after` is put to sleep.

Invariants: a server has one order at a time. A request that waits for a wake is in the Balancer's queue and nowhere
else. Where no endpoint may sleep, all of this costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from itertools import chain, islice
from math import inf
from typing import Final, NamedTuple

from lbproxy.config.sleep import HostSettings
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointUid
from lbproxy.core.endpoints.endpoint_set import EndpointSet
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.queue.waiting_queue import WaitingQueue
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.core.saved.pieces import Durations
from lbproxy.core.sleeping.phase import Phase, SleepEvent, SleepTransition
from lbproxy.core.sleeping.server import DOWN_FREE_S, SleepServer, model_url
from lbproxy.core.sleeping.servers import LEAVING, RISING, Need, Servers, is_served, read_needs

DRAIN_S: Final = 120.0
"""As long as the default of `drain.deadline`."""
UNKNOWN_S: Final = 10.0
"""A server that is up and does not say within this time whether it sleeps is taken to be awake, as any other."""
LATE_S: Final = 60.0
LATE_KNOWN_S: Final = 10.0
LATE_FACTOR: Final = 3.0
"""A wake is late after a minute, or after three times its forecast, but 10 s: then another server is woken too."""
UNASKED_S: Final = 5.0
"""A model for which no request came within this time, as others took them, is not being loaded. As long is waited for
one that is to give way: then the request that needs its place waits at the engine, which finishes what runs, and not
until it is refused here.
"""
SCALE_S: Final = 2.0
"""The least wait for which one more server is woken."""
SCALE_UNKNOWN_S: Final = 10.0
"""The least wait for one more server if it is not known how long a wake takes."""
LOOKED_AT: Final = 50
"""Servers that are looked at in one decision, of those of which nothing is expected: 1,000 within two seconds."""
MAX_REFUSED: Final = 64
"""Models; those that were refused last. Where no list of models is known a client may write any name."""
REFUSED_S: Final = 30.0
"""For so long, a request that was refused because a wake takes too long, or overflowed, counts as one that waits:
clients try again, and others come."""


class Task(Enum):
    """What a driver is to do with a server. The values are those of labels."""

    WAKE = "wake"
    SLEEP = "sleep"
    START = "start"


class Order(NamedTuple):
    """One call to make."""

    task: Task
    url: str
    """The URL of the server: its endpoints may be others when the call has ended."""
    model: str | None
    """What is waited for; None: nothing, or any."""
    waiting: int
    """Requests that wait for it."""


class SleepSnapshot(NamedTuple):
    """One server's part in this, at one moment."""

    phase: Phase
    since_s: float
    """How long the phase has lasted."""
    left_s: float | None
    """The predicted rest of a wake or start; None: not known, or none is under way."""
    failures: int
    host: str | None
    model: str | None = None
    """As in SleepTransition."""


class Sleepers:
    """All servers that may sleep, and what is to be done with them. The module has the rules."""

    def __init__(
        self,
        endpoints: EndpointSet,
        queue: WaitingQueue,
        owner: Callable[[InferenceRequest, float], EndpointUid | None],
        changed: Callable[[], None],
    ) -> None:
        """`owner`: the only endpoint that can take a request, or None. `changed`: see Servers."""
        self.waited = 0
        """Requests that waited for a wake, so far."""
        self.is_closing = False
        """lbproxy stops: requests that wait are still served, but nothing is put to sleep any more."""
        self._endpoints, self._queue, self._owner = endpoints, queue, owner
        self._servers = Servers(endpoints, changed)
        self._looks = 0
        self._followed = -1
        """The version of the lists of models that was followed last."""
        self._looked: set[str] = set()
        """URLs of the servers that the last decision looked at."""
        self._memory: dict[str, int] = {}
        """In one decision, for `Servers.having_place`."""
        self._tried: dict[str, SleepServer | bool] = {}
        """Likewise: hosts on which a place was looked for, and whether one will be free, or which server could go. One
        place is made at a time, for what waits longest: what waits there too waits for it as well.
        """
        self._stranded: dict[str, SleepServer] = {}
        """Servers with requests that only a wake would end, by URL."""
        self._refused: dict[str | None, float] = {}
        """When a request for a model was last refused, or overflowed, because a wake takes too long."""

    @property
    def is_needed(self) -> bool:
        """Whether there are servers that may sleep."""
        return len(self._servers) > 0

    @property
    def transitions(self) -> list[SleepTransition]:
        """Since the driver last cleared this list, which it owns."""
        return self._servers.transitions

    def reconfigure(self, hosts: Mapping[str, HostSettings]) -> None:
        self._servers.hosts = hosts

    def _follow_lists(self, now: float) -> None:
        if self._endpoints.lists_version != self._followed:
            self.follow(now)

    def follow(self, now: float) -> None:
        """Note that the set of endpoints changed."""
        self._followed = self._endpoints.lists_version
        self._servers.follow(now)

    def durations(self) -> dict[str, Durations]:
        """How long wakes, sleeps and starts of servers took, by URL, for `remember` in another process."""
        return self._servers.durations()

    def remember(self, saved: Mapping[str, Durations]) -> None:
        """Start with what another lbproxy has seen."""
        self._servers.remember(saved)

    # Reports

    def reported(self, url: str, asleep: bool | None, *, asked_at: float, now: float) -> None:
        """A server said whether it sleeps; None: it cannot say. `asked_at`: what it says is not older."""
        server = self._servers.at(url)
        if server is None or asked_at < server.since:
            return
        if asleep is None:
            self._servers.move(server, SleepEvent.SAID_NOTHING, "it does not say whether it sleeps", now)
        elif asleep:
            if server.phase is Phase.ASLEEP:
                server.occupies = False
            self._servers.move(server, SleepEvent.SAID_ASLEEP, "it says so", now)
        else:
            self._servers.move(server, SleepEvent.SAID_AWAKE, "it says so", now)

    def loaded(self, uid: EndpointUid, models: Collection[str] | None, *, asked_at: float, now: float) -> None:
        """An endpoint that loads models on demand said which are in memory, by any of their names; None: it does not
        say.
        """
        self._follow_lists(now)
        state = self._endpoints.get(uid)
        if state is None or (on_demand := state.standing.on_demand) is None:
            return
        before, own_name, listed = on_demand.unloaded, state.endpoint.model, state.models or ()
        here = set() if models is None else {model for model in listed if (own_name or model) in models}
        for model in listed:
            asleep = None if models is None else model not in here
            self.reported(model_url(state, model), asleep, asked_at=asked_at, now=now)
        if models is None or state.endpoint.loading.most is not None:
            return
        if on_demand.unloaded - before and on_demand.loading:
            # One had to go for what is being loaded.
            on_demand.learn_room(len(here | on_demand.loading), is_all=True)
        elif len(here) > on_demand.host.awake - int(not on_demand.is_all):
            on_demand.learn_room(len(here) + 1, is_all=False)

    def ended(self, url: str, task: Task, problem: str | None, *, now: float) -> None:
        """A driver has carried out an order; `problem`: why it failed. A start ends with the webhook's response."""
        server = self._servers.at(url)
        if server is None or not server.calling:
            return
        server.calling = False
        if problem is not None:
            server.failed(now)
        if task is Task.WAKE:
            event = SleepEvent.WOKE if problem is None else SleepEvent.WAKE_FAILED
        elif task is Task.SLEEP:
            event = SleepEvent.SLEPT if problem is None else SleepEvent.SLEEP_FAILED
        elif problem is None:
            return
        else:
            event = SleepEvent.START_FAILED
        self._servers.move(server, event, problem or "done", now)

    def ask(self, uid: EndpointUid, task: Task, *, now: float) -> str | None:
        """An operator wants a server awake or asleep. Returns why that cannot be; None: it will be done."""
        server = self._servers.find(uid)
        if server is None or not server.spec.wake:
            return "its settings do not have wake: true"
        if server.phase in {Phase.UNKNOWN, Phase.OFF, Phase.STARTING}:
            return f"it is {server.phase.value}"
        wants_sleep = task is Task.SLEEP
        server.retry_at = now
        if not wants_sleep and server.phase is Phase.DRAINING:
            server.by_hand = None
            self._servers.move(server, SleepEvent.KEEP, "an operator wants it", now)
        elif server.phase is not (Phase.ASLEEP if wants_sleep else Phase.AWAKE):
            server.by_hand = task.value
        self._servers.note(server)
        return None

    # Decisions

    def decide(self, now: float) -> list[Order]:
        """What is to be done now. O(waiting requests)."""
        orders: list[Order] = []
        self._follow_lists(now)
        if not self.is_needed:
            return orders
        looked = self._look(now)
        needs = self._needs(now)
        self._keep_those_not_in_the_way(needs, now)
        for server in list(self._servers.moving.values()):
            if server.by_hand == Task.SLEEP.value and server.phase is Phase.AWAKE and not self.is_closing:
                self._servers.move(server, SleepEvent.SLEEP, "an operator wants it", now)
            self._put_to_sleep(server, orders, now)
        self._memory.clear()
        self._tried.clear()
        for need in needs:
            self._meet(need, orders, now)
        idle = [one for one in looked if one.may_fall_asleep(now)]
        if idle and not self.is_closing:
            wanted = {one.url for need in needs for one in self._servers.able(need)}
            for server in idle:
                if server.url not in wanted:
                    self._let_idle_sleep(server, orders, now)
        return orders

    def _look(self, now: float) -> list[SleepServer]:
        """Look at the servers that are on their way, and of the others at about `LOOKED_AT`, each time others. Returns
        those.
        """
        step = 1 + len(self._servers) // LOOKED_AT
        self._looks += 1
        self._looked.clear()
        others = islice(self._servers, self._looks % step, None, step)
        looked = list({one.url: one for one in chain(self._servers.moving.values(), others)}.values())
        for server in looked:
            self._follow_health(server, now)
            if server.is_silent:
                self._follow_responses(server, now)
            server.look(now)
            self._looked.add(server.url)
            is_unasked = server.phase is Phase.WAKING and not (server.is_called or server.in_flight)
            if is_unasked and now - server.since > UNASKED_S:
                self._servers.move(server, SleepEvent.WAKE_FAILED, "no request has it loaded", now)
                server.occupies = False
            if server.phase is Phase.ASLEEP and server.stranded > 0:
                self._stranded[server.url] = server
        return looked

    def _follow_health(self, server: SleepServer, now: float) -> None:
        move, phase = self._servers.move, server.phase
        if not server.is_reachable:
            server.unreachable_at = now
            if server.is_down:
                self._follow_down(server, now)
            return
        if phase is Phase.STARTING:
            server.starts.add(now - server.since)
            server.succeeded()
        if phase is Phase.OFF or phase is Phase.STARTING:
            move(server, SleepEvent.CAME_UP, "its probes pass", now)
        if server.phase is Phase.UNKNOWN:
            server.occupies = True
            if not server.spec.wake:
                move(server, SleepEvent.SAID_AWAKE, "its probes pass", now)
            elif now - max(server.since, server.unreachable_at) > UNKNOWN_S:
                move(server, SleepEvent.SAID_NOTHING, "it does not say whether it sleeps", now)

    def _follow_responses(self, server: SleepServer, now: float) -> None:
        """Of a model of which nothing says whether it is in memory: it is when it responds, whatever that took. What
        was there before and has no place beside it is not, the least recently used first: so engines choose.
        """
        if server.phase is Phase.UNKNOWN and server.is_reachable:
            self._servers.move(server, SleepEvent.SAID_ASLEEP, "nothing shows that it is loaded", now)
        if server.responded_at < server.since or server.phase not in {Phase.ASLEEP, Phase.WAKING}:
            return
        self._servers.move(server, SleepEvent.SAID_AWAKE, "it responded", now)
        beside = [one for one in self._servers.beside(server) if one.phase is Phase.AWAKE]
        beside.sort(key=lambda one: (one.in_flight > 0, one.idle_since), reverse=True)
        room = self._servers.host_of(server).awake - server.takes
        for one in beside:
            room -= one.takes
            if room < 0:
                self._servers.move(one, SleepEvent.SAID_ASLEEP, f"its place is needed for {server.model}", now)

    def _follow_down(self, server: SleepServer, now: float) -> None:
        cold_start = server.spec.cold_start
        if server.phase is Phase.STARTING:
            if cold_start is None or now - server.since > cold_start.timeout_s:
                server.failed(now)
                self._servers.move(server, SleepEvent.START_FAILED, "it did not come up in time", now)
            return
        self._servers.move(
            server, SleepEvent.GONE if cold_start is None else SleepEvent.GONE_STARTABLE, "it is down", now
        )
        if server.has_refused or now - server.since > DOWN_FREE_S:
            server.occupies = False

    def _needs(self, now: float) -> list[Need]:
        """What requests wait for, the oldest first."""
        needs = read_needs(self._queue, self._endpoints, self._owner, now) if self._queue else []
        for server in self._servers.moving.values():
            if server.by_hand == Task.WAKE.value:
                needs.append(_need_of(server, -inf))
        for url, server in list(self._stranded.items()):
            if server.phase is not Phase.ASLEEP or not server.stranded or self._servers.at(url) is not server:
                del self._stranded[url]
            elif server.is_reachable and server.by_hand != Task.WAKE.value:
                needs.append(_need_of(server, server.since))
        self._refused = {model: at for model, at in self._refused.items() if now - at < REFUSED_S}
        for model, at in self._refused.items():
            if not is_served(model, frozenset(), self._endpoints, now):
                needs.append(Need(model, None, frozenset()))
                needs[-1].add(at, now - at)
        return sorted(needs, key=lambda need: need.oldest_at)

    def _keep_those_not_in_the_way(self, needs: Iterable[Need], now: float) -> None:
        """What drains for another server of its host is kept if nothing waits for that any more."""
        moving = self._servers.moving.values()
        draining = [one for one in moving if one.phase is Phase.DRAINING and one.by_hand is None]
        if not draining:
            return
        hosts = {
            server.spec.host
            for need in needs
            if not need.is_served
            for server in self._servers.able(need)
            if server.phase in {Phase.ASLEEP, Phase.OFF}
        }
        for server in draining:
            if server.spec.host not in hosts or self.is_closing:
                self._servers.move(
                    server, SleepEvent.KEEP, "nothing waits for another server of its host any more", now
                )

    def _put_to_sleep(self, server: SleepServer, orders: list[Order], now: float) -> None:
        """Let a server that drains fall asleep, if it has drained."""
        if server.phase is Phase.DRAINING and not server.calling:
            left, drain_s = server.in_flight, DRAIN_S if server.is_called else UNASKED_S
            if not left or now - server.since > drain_s:
                reason = "it has no requests" if not left else f"it still has {left} requests after {drain_s:.0f} s"
                self._servers.move(server, SleepEvent.DRAINED, reason, now)
                if server.is_called:
                    server.calling = True
                    orders.append(Order(Task.SLEEP, server.url, None, 0))
                else:
                    self._servers.move(server, SleepEvent.SLEPT, reason, now)

    def _let_idle_sleep(self, server: SleepServer, orders: list[Order], now: float) -> None:
        self._servers.move(server, SleepEvent.SLEEP, f"it was idle for {now - server.idle_since:.0f} s", now)
        self._put_to_sleep(server, orders, now)

    def _meet(self, need: Need, orders: list[Order], now: float) -> None:
        able = self._servers.able(need)
        if any(_is_on_the_way(server, now) and server.suits(need.request) for server in able):
            return
        if need.is_served and need.wait_s <= _wake_pays_s(able):
            return
        ready = [server for server in able if _can_rise(server, now)]
        if not ready:
            return
        has_place = self._servers.having_place(ready, self._memory)
        ready.sort(key=lambda one: (one.url not in has_place, one.phase is Phase.OFF, one.failures, self._used(one)))
        if ready[0].url in has_place:
            self._raise(ready[0], need, orders, now)
        elif not (need.is_served or self.is_closing):
            self._make_place(ready, need, now)

    def _used(self, server: SleepServer) -> int:
        """How many models are in the memory that a model would be loaded into. Servers stand as in the settings."""
        return 0 if server.is_called else self._memory[server.spec.host or ""]

    def _raise(self, server: SleepServer, need: Need, orders: list[Order], now: float) -> None:
        starts = server.phase is Phase.OFF
        what = "a request waits" if need.waiting == 1 else f"{need.waiting} requests wait"
        reason = "an operator wants it" if server.by_hand is not None else f"{what} for {need.model or server.name}"
        self._servers.move(server, SleepEvent.START if starts else SleepEvent.WAKE, reason, now)
        self._memory.pop(server.spec.host or "", None)
        if server.is_called:
            server.calling = True
            orders.append(Order(Task.START if starts else Task.WAKE, server.url, need.model, need.waiting))

    def _make_place(self, ready: Sequence[SleepServer], need: Need, now: float) -> None:
        """Have a server put to sleep that shares its host with one that is ready to be woken, unless a place will be
        free.
        """
        first_of_host: dict[str, SleepServer] = {}
        for server in ready:
            first_of_host.setdefault(server.spec.host or "", server)
        found: list[tuple[float, int, SleepServer]] = []
        for host, server in first_of_host.items():
            if host not in self._tried or server.has_memory:
                self._tried[host] = self._may_go(server, now)
            one = self._tried[host]
            if one is True:
                return
            if isinstance(one, SleepServer) and self._pays(one, server, need, now):
                found.append((self._servers.wanted(one, now), len(found), one))
                if one.is_called:
                    break
        if found:
            victim = min(found)[-1]
            self._tried[victim.spec.host or ""] = True
            reason = f"requests wait for {need.model or ready[0].name} on its host"
            self._servers.move(victim, SleepEvent.SLEEP, reason, now)

    def _may_go(self, server: SleepServer, now: float) -> SleepServer | bool:
        """Which other server of its host may be put to sleep; whether a place will be free without."""
        host = self._servers.host_of(server)
        others = [one for one in self._servers.beside(server) if one.has_memory]
        for one in others:
            if one.url not in self._looked:
                self._looked.add(one.url)
                one.look(now)
        if sum(one.takes for one in others if one.phase not in LEAVING) + server.takes <= host.awake:
            return True
        ready = [
            one
            for one in others
            if one.phase is Phase.AWAKE
            and one.may_go
            and one.retry_at <= now
            and (one.is_idle(now) or now - one.since >= host.min_awake)
        ]
        if not ready:
            return False
        if server.is_silent:  # as it would choose by itself
            return min(ready, key=lambda one: (not one.is_idle(now), one.idle_since))
        wanted = self._servers.wanted
        return min(ready, key=lambda one: (wanted(one, now), not one.is_idle(now), one.idle_since, one.since))

    def _pays(self, victim: SleepServer, server: SleepServer, need: Need, now: float) -> bool:
        """Whether a model may give way to another: as many requests wait as would wait for it, or they have waited for
        as long as the load takes and that of the other (rent or buy: Karlin et al., Algorithmica 3, 1988), or could
        not wait longer.
        """
        if need.waiting >= self._servers.wanted(victim, now):
            return True
        load_s = server.wakes.seconds or 0.0
        latest = min(need.expires_at, need.deadline - load_s) - self._servers.host_of(server).min_awake - UNASKED_S
        return now >= min(latest, need.oldest_at + load_s + (victim.wakes.seconds or 0.0))

    def may_wake(self, url: str) -> bool:
        """Whether an order to wake a server still holds, now that the driver asked the others of its host again."""
        server = self._servers.at(url)
        return server is not None and server.phase is Phase.WAKING and self._servers.has_place(server)

    def phase_of(self, uid: EndpointUid) -> Phase | None:
        """The phase of an endpoint; None if it never sleeps."""
        server = self._servers.find(uid)
        return None if server is None else server.phase

    def endpoint_at(self, url: str) -> Endpoint | None:
        """The endpoint of a server, or its first rank; None: it has left."""
        server = self._servers.at(url)
        return None if server is None else server.states[0].endpoint

    def beside(self, url: str) -> list[Endpoint]:
        """Those of the other servers of its host."""
        server = self._servers.at(url)
        return [] if server is None else [one.states[0].endpoint for one in self._servers.beside(server)]

    # Waiting for a wake

    def refusal(self, ticket: Ticket, now: float) -> Outcome | None:
        """How a request ends that would wait for a wake, as that takes too long; None: it waits."""
        wait_s, held_s = self.wakes_in_s(ticket, now), self.wakes_in_s(ticket, now, in_queue=True)
        deadline = ticket.request.deadline
        ticket.wakes_in_s, ticket.best_wait_s = wait_s, wait_s or 0.0
        late = wait_s is not None and deadline is not None and now + wait_s > deadline
        if not late and (held_s is None or now + held_s <= ticket.expires_at):
            self.waited += 1
            return None
        self.passed_by(ticket, now)
        ticket.retry_after_s = wait_s
        return Outcome.TOO_LATE if late else Outcome.EXPIRED

    def passed_by(self, ticket: Ticket, now: float) -> None:
        """Note that a request for a model that sleeps did not wait: the next ones may be served there."""
        self._refused.pop(ticket.request.model, None)
        self._refused[ticket.request.model] = now
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def wakes_in_s(self, ticket: Ticket, now: float, *, in_queue: bool = False) -> float | None:
        """In how many seconds a server that takes a request is awake; None: not known. `in_queue`: see `Servers`."""
        request = ticket.request
        uid = None if request.response_id is None else self._owner(request, now)
        able = self._servers.able(Need(request.model, uid, ticket.avoid))
        waits = [self._servers.awake_in_s(server, now, in_queue=in_queue) for server in able]
        known = [wait for wait in waits if wait is not None]
        return min(known) if known and len(known) == len(waits) else None

    # Reading

    def snapshot(self, now: float) -> dict[EndpointUid, SleepSnapshot]:
        """Of each endpoint that may sleep."""
        servers = [one for one in self._servers if one.is_called]
        return {state.endpoint.uid: self._shown(one, now) for one in servers for state in one.states}

    def in_memory(self, now: float) -> dict[EndpointUid, list[SleepSnapshot]]:
        """Of each endpoint that loads models on demand: those that it has, or gets."""
        found: dict[EndpointUid, list[SleepSnapshot]] = {}
        for one in self._servers:
            if not one.is_called:
                shown = found.setdefault(one.uid, [])
                if one.phase is not Phase.ASLEEP:
                    shown.append(self._shown(one, now))
        return found

    def _shown(self, server: SleepServer, now: float) -> SleepSnapshot:
        left_s = self._servers.awake_in_s(server, now) if server.phase in RISING else None
        host = server.spec.host if server.is_called else None
        return SleepSnapshot(server.phase, now - server.since, left_s, server.failures, host, server.model)


def _need_of(server: SleepServer, at: float) -> Need:
    """What only one server can meet."""
    need = Need(None, server.uid, frozenset())
    need.add(at, 0.0)
    return need


def _can_rise(server: SleepServer, now: float) -> bool:
    """Whether a server can be woken or started now."""
    if server.retry_at > now or server.calling or not server.may_come:
        return False
    return server.phase is Phase.OFF or (server.phase is Phase.ASLEEP and server.is_reachable)


def _is_on_the_way(server: SleepServer, now: float) -> bool:
    """Whether a server will be awake soon without another order."""
    if server.phase is Phase.UNKNOWN:
        return server.is_reachable
    if server.phase is Phase.WAKING:
        forecast_s = server.wakes.seconds
        late_s = LATE_S if forecast_s is None else max(LATE_KNOWN_S, LATE_FACTOR * forecast_s)
        return server.is_reachable and now - server.since <= late_s
    return server.phase is Phase.STARTING


def _wake_pays_s(able: Sequence[SleepServer]) -> float:
    """The wait from which one more server is worth its wake."""
    known = [server.wakes.seconds for server in able if server.phase is Phase.ASLEEP]
    return max(SCALE_S, min((SCALE_UNKNOWN_S if one is None else one for one in known), default=SCALE_UNKNOWN_S))
