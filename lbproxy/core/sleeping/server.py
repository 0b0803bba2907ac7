# SPDX-License-Identifier: Apache-2.0
"""What is known of one model server that may sleep: its phase, its ranks, how long it takes to wake, its failures."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Final

from lbproxy.core.endpoints import health
from lbproxy.core.endpoints.endpoint import EndpointUid, SleepSpec
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointState, OnDemand
from lbproxy.core.requests.models import is_among
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.core.saved.pieces import Durations
from lbproxy.core.sleeping.phase import Phase

SAMPLES: Final = 5
"""The median of so many is the forecast: one wake that had to wait for a disk does not count for long."""
RETRY_FIRST_S: Final = 5.0
RETRY_MAX_S: Final = 300.0
"""Back-off after a wake, a sleep or a start that failed; it doubles with each in a row."""
IDLE_S: Final = 1.0
"""A server is idle if nothing ran there for so long: between two requests of one client it is not."""
DOWN_FREE_S: Final = 60.0
"""A server that has been down for so long is taken to have freed its GPU, though no refused connection shows it."""
HELD: Final = frozenset({Phase.AWAKE, Phase.DRAINING, Phase.FALLING_ASLEEP, Phase.WAKING, Phase.STARTING})
"""In these phases a server has, or gets, the memory of its GPU."""


class Forecast:
    """How long something takes, by the last times."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=SAMPLES)

    @property
    def times(self) -> tuple[float, ...]:
        """The last ones, the newest last."""
        return tuple(self._times)

    def restore(self, times: Sequence[float]) -> None:
        """Start with earlier ones."""
        newer, self._times = self._times, deque(times, maxlen=SAMPLES)
        self._times.extend(newer)

    def add(self, took_s: float) -> None:
        self._times.append(took_s)

    @property
    def seconds(self) -> float | None:
        """The prediction; None: it was never seen."""
        return sorted(self._times)[len(self._times) // 2] if self._times else None


class SleepServer:
    """One model server. Owned by `core.sleeping.sleepers`."""

    def __init__(self, states: Sequence[EndpointState], spec: SleepSpec, now: float) -> None:
        self.states = states
        """Its endpoint, or those of all of its ranks."""
        self.spec = spec
        self.phase = Phase.UNKNOWN
        self.since = now
        """When the phase began."""
        self.occupies = True
        """It has the memory of its GPU, as far as known."""
        self.calling = False
        """A driver carries out an order."""
        self.failures = 0
        """Wakes, sleeps or starts in a row that failed."""
        self.retry_at = now
        self.wakes = Forecast()
        self.sleeps = Forecast()
        self.starts = Forecast()
        self.idle_since = now
        self.unreachable_at = now
        """When its probes did not pass, last."""
        self.by_hand: str | None = None
        """What an operator asked for and is not done yet: `wake` or `sleep`."""
        self._seen: tuple[float, ...] = ()
        """What changed with each request, when it was last looked at."""

    @property
    def name(self) -> str:
        """The server's, without a rank."""
        return self.states[0].endpoint.server

    @property
    def url(self) -> str:
        return self.states[0].endpoint.base_url

    @property
    def model(self) -> str | None:
        """The one that it is about; None: all of the server's."""
        return None

    @property
    def is_called(self) -> bool:
        """Whether a driver wakes it and puts it to sleep."""
        return True

    @property
    def may_go(self) -> bool:
        """Whether another may take its place."""
        return self.spec.wake

    @property
    def may_come(self) -> bool:
        """Whether it may be woken."""
        return True

    @property
    def takes_requests(self) -> bool:
        """Whether requests may be sent to it."""
        return self.phase is Phase.AWAKE

    def show(self) -> bool:
        """Have its endpoints take requests, or not. Returns whether that changed."""
        word = "" if self.takes_requests else self.phase.value
        changed = [state for state in self.states if state.dormant != word]
        for state in changed:
            state.dormant = word
        return bool(changed)

    @property
    def uid(self) -> EndpointUid:
        """Of its endpoint, or of the first rank."""
        return self.states[0].endpoint.uid

    @property
    def is_reachable(self) -> bool:
        """Its probes pass."""
        return self.states[0].health in health.HEALTHY_STATES

    @property
    def is_down(self) -> bool:
        """Its probes fail."""
        return self.states[0].health is Health.DOWN

    @property
    def has_refused(self) -> bool:
        """Nothing listens at its address."""
        return self.states[0].standing.refused_connection

    @property
    def has_memory(self) -> bool:
        """Whether it may have the memory of its GPU: also if somebody has started it since the last look."""
        return self.occupies or ((self.phase is Phase.UNKNOWN or self.phase is Phase.OFF) and self.is_reachable)

    @property
    def in_flight(self) -> int:
        """Our requests there, and those of other replicas."""
        return sum(state.in_flight + state.elsewhere for state in self.states)

    def suits(self, request: InferenceRequest | None) -> bool:
        """Whether a request, if it is known, has nothing against how it is loaded."""
        return True

    @property
    def stranded(self) -> int:
        """Those of our requests that only a wake would end: not WebSockets, which may stay open."""
        return sum(state.in_flight - state.standing.progress.open_ended for state in self.states)

    @property
    def asked(self) -> Sequence[float]:
        """When the last requests for a model that is loaded on demand came."""
        return ()

    @property
    def is_silent(self) -> bool:
        """Whether nothing shows that it is awake, but that it responds."""
        return False

    @property
    def responded_at(self) -> float:
        """When it began a response last, if it is silent."""
        return -inf

    @property
    def takes(self) -> int:
        """Places of its host."""
        return 1

    @property
    def is_drained_by_operator(self) -> bool:
        """It is to get no requests anyway."""
        return all(state.draining for state in self.states)

    @property
    def durations(self) -> Durations:
        """How long its last wakes, sleeps and starts took."""
        return Durations(self.wakes.times, self.sleeps.times, self.starts.times)

    def restore(self, durations: Durations) -> None:
        """Start with what another lbproxy, or this one before the server left, has seen of it."""
        self.wakes.restore(durations.wakes)
        self.sleeps.restore(durations.sleeps)
        self.starts.restore(durations.starts)

    @property
    def models(self) -> set[str]:
        """Those that it lists; with the empty name if it, or a rank, lists none and may serve all."""
        return {name for state in self.states for name in (("",) if state.models is None else state.models)}

    def look(self, now: float) -> None:
        """See whether anything ran there since the last look, ours or others'."""
        self._note(*self._work(now), now)

    def _note(self, now_seen: tuple[float, ...], busy: bool, now: float) -> None:
        if busy or now_seen != self._seen or self.phase is not Phase.AWAKE:
            self.idle_since = now
        self._seen = now_seen

    def _work(self, now: float) -> tuple[tuple[float, ...], bool]:
        """What changes with each request, and whether any runs."""
        seen: list[float] = []
        busy = self.in_flight > 0
        for state in self.states:
            metrics = state.metrics
            if metrics is not None and now <= state.fresh_until:
                busy = busy or bool(metrics.requests)
            seen += [state.placed, -1.0 if metrics is None or metrics.work is None else metrics.work]
        return (*seen, float(busy)), busy

    def may_fall_asleep(self, now: float) -> bool:
        """Whether it is awake, and has been idle for as long as its settings say."""
        after_s = self.spec.after_s
        if after_s is None or self.phase is not Phase.AWAKE or self.retry_at > now:
            return False
        return now - self.idle_since >= after_s

    def is_idle(self, now: float) -> bool:
        """Whether nothing ran there for `IDLE_S`."""
        return now - self.idle_since >= IDLE_S

    def failed(self, now: float) -> None:
        """Back off."""
        self.failures += 1
        self.retry_at = now + min(RETRY_MAX_S, RETRY_FIRST_S * 2.0 ** (min(self.failures, 10) - 1))

    def succeeded(self) -> None:
        """The next failure is the first again."""
        self.failures = 0


class LoadableModel(SleepServer):
    """A model of an endpoint that loads models on demand: it is awake while it is in memory, and the endpoint is the
    host that it shares with the others. Nobody calls it: the first request has it loaded, and the engine unloads what
    has no requests when another needs its place.
    """

    def __init__(self, state: EndpointState, model: str, now: float) -> None:
        SleepServer.__init__(self, [state], SleepSpec(host=state.endpoint.base_url), now)
        self._name = model
        self.occupies = False

    @property
    def url(self) -> str:
        """What tells it from the endpoint's other models."""
        return model_url(self.states[0], self._name)

    @property
    def model(self) -> str | None:
        return self._name

    @property
    def is_called(self) -> bool:
        return False

    @property
    def may_go(self) -> bool:
        return not is_among(self._name, self.states[0].endpoint.loading.keep)

    @property
    def may_come(self) -> bool:
        return not is_among(self._name, self.states[0].endpoint.loading.never)

    @property
    def takes_requests(self) -> bool:
        """Also while it is being loaded, as only requests have that done."""
        return self.phase in {Phase.AWAKE, Phase.WAKING}

    @property
    def on_demand(self) -> OnDemand:
        found = self.states[0].standing.on_demand
        assert found is not None
        return found

    @property
    def in_flight(self) -> int:
        return self.on_demand.in_flight.get(self._name, 0)

    @property
    def asked(self) -> Sequence[float]:
        return self.on_demand.asked.get(self._name, ())

    @property
    def takes(self) -> int:
        most, sizes = self.on_demand.host.awake, dict(self.states[0].endpoint.loading.sizes)
        return min(most, next((sizes[name] for name in sizes if is_among(self._name, {name})), most)) if sizes else 1

    @property
    def is_silent(self) -> bool:
        return self.on_demand.is_silent

    @property
    def responded_at(self) -> float:
        return self.on_demand.responded.get(self._name, -inf)

    def suits(self, request: InferenceRequest | None) -> bool:
        context = None if request is None else request.context_tokens
        return request is None or self.on_demand.contexts.get(self._name, context) == context

    @property
    def stranded(self) -> int:
        """None: what runs there keeps it in memory."""
        return 0

    @property
    def models(self) -> set[str]:
        return {self._name}

    def show(self) -> bool:
        before = self.on_demand.unloaded, self.on_demand.loading
        one = frozenset([self._name])
        unloaded, loading = before
        self.on_demand.unloaded = unloaded - one if self.takes_requests else unloaded | one
        if not self.takes_requests:
            self.on_demand.contexts.pop(self._name, None)
        self.on_demand.loading = loading | one if self.phase is Phase.WAKING else loading - one
        return before != (self.on_demand.unloaded, self.on_demand.loading)

    def _work(self, now: float) -> tuple[tuple[float, ...], bool]:
        return tuple(self.asked), self.in_flight > 0


def model_url(state: EndpointState, model: str) -> str:
    """`LoadableModel.url`."""
    return f"{state.endpoint.key}#{model}"
