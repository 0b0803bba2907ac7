# SPDX-License-Identifier: Apache-2.0
"""A server that loads models on demand: Ollama, llama.cpp's router, llama-swap. Sans-io.

As Ollama's scheduler (server/sched.go, v0.14): requests are taken one after the other. One for a model that is loaded,
or being loaded, goes there; another starts a load, if fewer than `most` are in memory. If not, the model that has been
idle for longest gives way; where none is idle the request waits until one is, *and so do all behind it*, whatever their
model. A model that nobody used for `keep_s` is unloaded. llama.cpp's router (tools/server/server-models.cpp)
differs in that those behind go on if their model is in memory: not `holds_up`. LM Studio is taken to do so, too. Each
model that is loaded has an engine of its own; what models cost one another is not simulated.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lbproxy.sim.engine.engine import Engine
from lbproxy.sim.engine.fixed import FixedEngine
from lbproxy.sim.engine.sequence import EngineGauges, PlainServer, SimRequest, StepDone, check_length

NEVER = float("inf")
OLLAMA_KEEP_S = 300.0
LM_STUDIO_KEEP_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """What models need to be loaded."""

    load_s: Mapping[str, float]
    """How long each model takes. Others are not served."""
    most: int = 1
    """Models in memory at a time."""
    keep_s: float = OLLAMA_KEEP_S
    """An idle model is unloaded after so long."""
    holds_up: bool = True
    """A request that waits for a place holds up those behind it whose models are in memory."""


class _Model:
    """One that is in memory, or on its way there."""

    def __init__(self, engine: Engine | FixedEngine, ready_at: float, keep_s: float) -> None:
        self.engine = engine
        self.keep_s = keep_s
        self.ready_at = ready_at
        self.waiting: list[SimRequest] = []
        """For the load."""
        self.idle_since = NEVER
        """Above every time: it has requests."""

    @property
    def due(self) -> float:
        """When something happens next."""
        if self.waiting:
            return self.ready_at
        event = self.engine.next_event()
        return self.idle_since + self.keep_s if event is None else event


class OnDemandEngine(PlainServer):
    """One server. Not to be shared by drivers."""

    def __init__(
        self, make: Callable[[], Engine | FixedEngine], loading: Loading, *, rng: random.Random | None = None
    ) -> None:
        """`make`: the engine of a model that was loaded. Without `rng` loads take as long as they are said to."""
        self._make = make
        self._loading = loading
        self._keep_s = dict.fromkeys(loading.load_s, loading.keep_s)
        self._rng = rng
        self._pending: OrderedDict[str, SimRequest] = OrderedDict()
        self._models: dict[str, _Model] = {}
        self._at: dict[str, str] = {}
        """The models of requests that are no longer pending."""
        self._loaders: set[str] = set()
        """Requests that had their model loaded."""
        self._results: list[StepDone] = []
        self._gauges = EngineGauges()
        self.loads = 0
        """So far."""
        self._base = next(iter(loading.load_s))
        self.max_model_len, self.kv_blocks = make().max_model_len, make().kv_blocks

    def look(self, *, now: float) -> None:
        """Have `resident` be what is at this time."""
        self._run(now)

    def resident(self) -> tuple[str, ...]:
        """The models that are loaded, as Ollama's /api/ps and llama.cpp's /models show them."""
        return tuple(name for name, model in self._models.items() if not model.waiting)

    def loading(self) -> tuple[str, ...]:
        """The models that are being loaded for requests."""
        return tuple(name for name, model in self._models.items() if model.waiting)

    def add(self, request: SimRequest, *, now: float) -> None:
        """Take a request in: for the model in the place of an adapter, or for the first. Raises `RequestTooLong`."""
        assert (request.adapter or self._base) in self._loading.load_s
        check_length(request, self.max_model_len)
        self._run(now)
        self._pending[request.id] = request
        self._schedule(now)

    def abort(self, request_id: str, *, now: float) -> bool:
        """Forget a request; False if it has ended. Its load goes on."""
        self._run(now)
        if self._pending.pop(request_id, None) is None:
            name = self._at.pop(request_id, None)
            if name is None:
                return False
            model = self._models[name]
            if not model.engine.abort(request_id, now=now):
                model.waiting = [one for one in model.waiting if one.id != request_id]
            self._left(model, now)
        self._schedule(now)
        return True

    def keep(self, model: str, keep_s: float) -> None:
        """Unload a model after so long without a request."""
        self._keep_s[model] = keep_s
        if model in self._models:
            self._models[model].keep_s = keep_s

    def set_speed(self, speed: float, *, now: float) -> None:
        """Loads and models are as fast as they are."""

    def restart(self, *, now: float) -> list[str]:
        """Fail, and be there again, empty. Returns the ids of all requests that were lost."""
        self._run(now)
        lost = [*self._at, *self._pending]
        self._at.clear()
        self._pending.clear()
        self._models.clear()
        return lost

    def generated(self, request_id: str) -> int:
        name = self._at.get(request_id)
        return 0 if name is None else self._models[name].engine.generated(request_id)

    def next_event(self) -> float | None:
        if self._results:
            return self._results[0].at
        due = self._next()
        return None if due == NEVER else due

    def advance(self, *, now: float) -> list[StepDone]:
        """What was sent up to `now` and not returned before, oldest first."""
        self._run(now)
        results, self._results = self._results, []
        return results

    def gauges(self) -> EngineGauges:
        """As of the latest call that was told the time."""
        each = [model.engine.gauges() for model in self._models.values()]
        queued = len(self._pending) + sum(len(model.waiting) for model in self._models.values())
        return EngineGauges(waiting=queued + sum(one.waiting for one in each), running=sum(one.running for one in each))

    # Time

    def _next(self) -> float:
        return min((model.due for model in self._models.values()), default=NEVER)

    def _run(self, now: float) -> None:
        while (at := self._next()) <= now:
            for name, model in list(self._models.items()):
                if model.due <= at:
                    self._step(name, model, at)
            self._schedule(at)

    def _step(self, name: str, model: _Model, at: float) -> None:
        if model.waiting:
            waiting, model.waiting = model.waiting, []
            for request in waiting:
                model.engine.add(request, now=at)
            return
        if model.engine.next_event() is None:
            del self._models[name]  # nobody used it for long
            return
        for step in model.engine.advance(now=at):
            first = tuple(one._replace(loaded_adapter=one.id in self._loaders) for one in step.first)
            self._results.append(step._replace(first=first))
            self._loaders.difference_update(one.id for one in first)
            for done in step.finished:
                del self._at[done]
        self._left(model, at)

    def _left(self, model: _Model, at: float) -> None:
        """A request left a model."""
        gauges = model.engine.gauges()
        if not (model.waiting or gauges.waiting or gauges.running):
            model.idle_since = at

    # Requests

    def _schedule(self, now: float) -> None:
        """Take the requests that are pending, up to the first that waits for a place, or all that need none."""
        is_full = False
        for request in list(self._pending.values()):
            name = request.adapter or self._base
            if name not in self._models:
                is_full = is_full or not self._make_place()
                if is_full and self._loading.holds_up:
                    return
                if is_full:
                    continue
                factor = 1.0 if self._rng is None else self._rng.uniform(0.9, 1.1)
                self._models[name] = _Model(self._make(), now + factor * self._loading.load_s[name], self._keep_s[name])
                self._loaders.add(request.id)
                self.loads += 1
            del self._pending[request.id]
            self._at[request.id] = name
            model, own = self._models[name], replace(request, adapter=None)
            model.idle_since = NEVER
            if now < model.ready_at:
                model.waiting.append(own)
            else:
                model.engine.add(own, now=now)

    def _make_place(self) -> bool:
        """Unload the model that was idle for longest, if there is no place. Returns whether there is one."""
        if len(self._models) < self._loading.most:
            return True
        idle = [(model.idle_since, name) for name, model in self._models.items() if model.idle_since < NEVER]
        if not idle:
            return False
        del self._models[min(idle)[1]]
        return True
