# SPDX-License-Identifier: Apache-2.0
"""Asks one endpoint whether it lives, which models it serves and how much its cache holds, for ever.

It reports; the Balancer judges. One prober per endpoint, so an endpoint that hangs, lies or is gone slows no other.
Invariants:

- An endpoint that was not up is asked for its models before the response that may bring it up is reported: no request
  ever sees an endpoint that is up with unknown or old models, unless it cannot or will not say.
- A failed question about models changes nothing: what an endpoint said last holds until it says something else.
- An endpoint whose models the settings say is never asked for them, unless they also say an engine that loads models
  on demand: its list shows whether it does. The models are those of the settings all the same.
- What it says of itself is asked at the same moments, of engines of `core.engines.server_info` alone. Whatever goes
  wrong with that, the endpoint comes up all the same: a probe takes two `DESCRIPTION_TIMEOUT_S` longer.
- Nothing is logged but a change of models; whoever wants to know about health listens to transitions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from lbproxy.config.sections.engines import BUILT_IN_ENGINES, OLLAMA
from lbproxy.config.sections.health import HealthSettings
from lbproxy.config.shown import without_values
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointSpec
from lbproxy.core.endpoints.health import Health
from lbproxy.core.engines.loading import LOADERS, InMemory, LoadedPage, loader_named, loads_always, read_loaded
from lbproxy.core.engines.server_info import SERVER_INFO, Description, engine_of, read_description
from lbproxy.core.requests.openai import ModelCard, read_model_list, synthetic_card, with_longest_prompt
from lbproxy.core.requests.retry import FailureKind, UpstreamError
from lbproxy.driver.runtime import Runtime
from lbproxy.net.connections.fetch import Response, fetch
from lbproxy.net.connections.pool import ConnectionPool
from lbproxy.net.dialing.above import below
from lbproxy.net.dialing.origin import Origin

logger = logging.getLogger("lbproxy")

MODELS_PATH = "/v1/models"
MAX_HEALTH_BYTES = 64 << 10
MAX_MODELS_BYTES = 4 << 20
MAX_INFO_BYTES = 2 << 20
LOADED_S = 1.0
"""How often it is asked which models are in memory: other clients have others loaded, and idle ones are unloaded."""
"""SGLang's page: 17 KB, and 20 KB for each data-parallel rank."""
DESCRIPTION_TIMEOUT_S = 1.0
"""For what it says of itself, which an endpoint that comes up waits for; SGLang takes 0.02 s when idle."""
JITTER = 0.1
"""Intervals vary by this share both ways, so that many probers do not come to act in step."""
MAX_MODELS_LOGGED = 20
_VERSION = re.compile(rb'\s*\{\s*"version"\s*:\s*"')
DOUBT_S = 0.5
"""The least time between two questions for models that somebody doubts."""


class HealthAnswer(NamedTuple):
    """What became of one question for health."""

    ok: bool | None
    """None: our own fault (no descriptors left), so it says nothing about the endpoint."""
    answered: bool
    """Something that speaks HTTP is there."""
    reason: str
    refused: bool = False
    """Nothing listens there."""


class ModelsAnswer(NamedTuple):
    """What became of one question for models."""

    valid: bool
    """False: the endpoint failed to answer; what it said before still counts."""
    cards: list[ModelCard] | None
    """If valid: what it serves, or None if it has no such list."""
    answered: bool
    """Something that speaks HTTP is there."""
    reason: str
    refused: bool = False
    """It wants other credentials."""


async def ask_health(endpoint: EndpointSpec, path: str, connections: ConnectionPool, timeout_s: float) -> HealthAnswer:
    """One GET of `path`. Any valid answer but a 5xx means alive: a server that refuses us (401, 404) still works."""
    try:
        answer = await _get(endpoint, path, connections, timeout_s, MAX_HEALTH_BYTES)
    except UpstreamError as error:
        ok = None if error.kind is FailureKind.EXHAUSTED else False
        return HealthAnswer(ok, False, error.detail, error.refused)
    return HealthAnswer(answer.status < 500, True, f"GET {without_values(path)} returned {answer.status}")


async def ask_models(endpoint: EndpointSpec, connections: ConnectionPool, timeout_s: float) -> ModelsAnswer:
    """One GET of /v1/models."""
    try:
        answer = await _get(endpoint, MODELS_PATH, connections, timeout_s, MAX_MODELS_BYTES)
    except UpstreamError as error:
        return ModelsAnswer(False, None, False, error.detail)
    reason = f"GET {MODELS_PATH} returned {answer.status}"
    if answer.status == 200:
        cards = read_model_list(answer.body)
        if cards is None:
            return ModelsAnswer(False, None, True, f"{reason} with something that is no model list")
        engine = await _find_engine(endpoint, engine_of(cards), answer.body, connections, timeout_s)
        return ModelsAnswer(True, [replace(one, engine=engine) for one in cards] if engine else cards, True, reason)
    # 408 and 429 are for now only; the other refusals (401, 404, a redirect) will be the same next time.
    refused = answer.status in {401, 402, 403}
    return ModelsAnswer(answer.status < 500 and answer.status not in {408, 429}, None, True, reason, refused)


async def _find_engine(
    endpoint: EndpointSpec, owner: str | None, listing: bytes, connections: ConnectionPool, timeout_s: float
) -> str | None:
    """The engine, if its own API shows it: one that loads models on demand. `owner` of its models, and their list."""
    timeout_s = min(DESCRIPTION_TIMEOUT_S, timeout_s)
    named = loader_named(owner)
    if named is not None and endpoint.engine in {"auto", named}:
        pages = LOADERS[named].pages
        if pages[0].path == MODELS_PATH:
            return named if read_loaded(pages[0], listing) is not None else None
        return named if await ask_loaded(endpoint, pages, connections, timeout_s) is not None else None
    if endpoint.engine == "auto" and owner not in {None, *BUILT_IN_ENGINES}:  # Ollama's models do not name it
        try:
            answer = await _get(endpoint, "/api/version", connections, timeout_s, MAX_INFO_BYTES)
        except UpstreamError:
            return None
        return OLLAMA if answer.status == 200 and _VERSION.match(answer.body) is not None else None
    return None


async def ask_loaded(
    endpoint: EndpointSpec, pages: Sequence[LoadedPage], connections: ConnectionPool, timeout_s: float
) -> tuple[LoadedPage, InMemory] | None:
    """What the first of `pages` that says it says of the models in memory, and which it was."""
    for page in pages:
        try:
            answer = await _get(endpoint, page.path, connections, timeout_s, MAX_MODELS_BYTES)
        except UpstreamError:
            return None
        said = read_loaded(page, answer.body) if answer.status == 200 else None
        if said is not None:
            return page, said
    return None


def self_describing(endpoint: EndpointSpec, owner: str | None) -> str | None:
    """The engine, if it is one that describes itself. `owner`: by its models."""
    engine = owner if endpoint.engine == "auto" else endpoint.engine
    return engine if engine in SERVER_INFO else None


async def ask_description(
    endpoint: EndpointSpec, engine: str, connections: ConnectionPool, timeout_s: float
) -> Description | None:
    """What an endpoint says of itself; None if nothing. `engine`: what it runs, of `SERVER_INFO`. Each of its paths may
    take as long as the timeout, and `DESCRIPTION_TIMEOUT_S`.
    """
    timeout_s = min(DESCRIPTION_TIMEOUT_S, timeout_s)
    for path in SERVER_INFO[engine].paths:
        try:
            answer = await _get(endpoint, path, connections, timeout_s, MAX_INFO_BYTES)
        except UpstreamError:
            return None
        if answer.status != 404:
            return read_description(engine, answer.body) if answer.status == 200 else None
    return None


async def _get(
    endpoint: EndpointSpec, path: str, connections: ConnectionPool, timeout_s: float, max_bytes: int
) -> Response:
    origin, key = Origin.parse(endpoint.base_url, endpoint.tls, endpoint.proxy), endpoint.api_key
    return await fetch(
        connections, origin, below(endpoint.base_url, path), timeout_s=timeout_s, max_bytes=max_bytes, key=key
    )


class Prober:
    """Looks after one endpoint. `run` is a loop for `control.loops.supervise`."""

    def __init__(
        self,
        endpoint: Endpoint,
        runtime: Runtime,
        connections: ConnectionPool,
        settings: HealthSettings,
        rng: random.Random,
    ) -> None:
        self._endpoint = endpoint
        self._runtime = runtime
        self._connections = connections
        self._settings = settings
        self._rng = rng
        self._doubted = asyncio.Event()
        self._models_due_at = self._description_due_at = float("-inf")
        self._listed: list[ModelCard] | None = None
        """What it listed last; None: it has no list."""
        self._prompt_tokens: int | None = None
        """The longest prompt that it takes, of whatever model, as it describes itself."""
        self._owner: str | None = None
        """The engine, by the models that it listed last."""
        self._loaded: InMemory = {}
        self._loads = asyncio.Event()
        """It loads models on demand, and says which are in memory."""
        self._pages: tuple[LoadedPage, ...] = ()
        """Where it says it: the one that said it last before others."""
        self._logged: frozenset[str] | None = None
        """The models named in the last log line; None: none yet, or it cannot say."""

    async def run(self) -> None:
        with self._runtime.model_readers.kept(self._endpoint.url_key, self):
            await self._keep_asking()

    async def _keep_asking(self) -> None:
        # Two loops, so that a slow list does not delay the verdict on an endpoint that is up.
        try:
            async with asyncio.TaskGroup() as loops:
                if self._lists or self._engine() is not None:
                    loops.create_task(self._keep_models())
                if self._endpoint.engine in {"auto", *LOADERS}:
                    loops.create_task(self._keep_loaded())
                    self._follow_loads(None)
                if self._endpoint.health is not None:
                    loops.create_task(self._keep_health(self._endpoint.health))
        except asyncio.CancelledError as error:
            # Python 3.11's task group keeps the exception in the frame that the traceback refers to: without this only
            # the garbage collector frees a prober and its tasks, and a thousand may end together.
            error.__traceback__ = None
            raise

    async def _keep_health(self, path: str) -> None:
        while True:
            wait_s = self._runtime.balancer.endpoints.may_probe_in(self._endpoint.uid, now=self._runtime.now())
            if wait_s > 0.0:
                await asyncio.sleep(wait_s)
                continue
            await self._probe(path)
            down = self._health() is Health.DOWN
            await self._pause(self._settings.down_interval if down else self._settings.interval)

    async def _keep_models(self) -> None:
        while True:
            if self._doubted.is_set():
                self._doubted.clear()
                await self.refresh_models()
                await self._refresh_description()
                await self._pause(DOUBT_S)
            elif self._health() is Health.UP:
                if self._runtime.now() >= self._models_due_at:
                    await self.refresh_models()
                if self._runtime.now() >= self._description_due_at:
                    await self._refresh_description()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._jittered(self._settings.interval)):
                    await self._doubted.wait()

    async def _keep_loaded(self) -> None:
        while True:
            await self._loads.wait()
            if self._health() is not Health.DOWN:
                asked_at, timeout_s = self._runtime.now(), self._settings.timeout
                said = await ask_loaded(self._endpoint, self._pages, self._connections, timeout_s)
                models = None if said is None else said[1]
                self._runtime.report_loaded(self._endpoint.uid, models, asked_at=asked_at)
                if said is not None:
                    self._pages = (said[0], *(one for one in self._pages if one is not said[0]))
                if models is not None and models != self._loaded:
                    self._loaded = models
                    self._report_models()
            await self._pause(LOADED_S)

    def _follow_loads(self, shown: str | None) -> None:
        """Ask for the models in memory, or do not. `shown`: the engine, by its own API."""
        said = self._endpoint.engine  # its models may stand in the settings
        engine = said if loads_always(said) else shown
        pages = () if engine is None else LOADERS[engine].pages
        if {*pages} == {*self._pages}:
            return
        self._pages, self._loaded = pages, {}
        if pages:
            self._loads.set()
        else:
            self._loads.clear()

    async def _pause(self, interval_s: float) -> None:
        await asyncio.sleep(self._jittered(interval_s))

    @property
    def _lists(self) -> bool:
        """Whether it is asked for its models."""
        return self._endpoint.models is None or self._endpoint.engine in LOADERS

    def _jittered(self, interval_s: float) -> float:
        return interval_s * self._rng.uniform(1 - JITTER, 1 + JITTER)

    def _health(self) -> Health | None:
        return self._runtime.health(self._endpoint.uid)

    async def _probe(self, path: str) -> None:
        answer = await ask_health(self._endpoint, path, self._connections, self._settings.timeout)
        if answer.ok is None:
            return
        returns = answer.ok and self._health() in {Health.STARTING, Health.DOWN}
        if returns:
            await self.refresh_models()
            await self._refresh_description()
        self._runtime.report_health(self._endpoint.uid, answer.ok, answer.reason, refused=answer.refused)
        if returns:
            self._doubted.clear()  # that it is up now is no news

    def doubt_models(self) -> None:
        self._models_due_at = self._description_due_at = float("-inf")  # until it says it
        self._doubted.set()

    async def refresh_models(self) -> None:
        if not self._lists:
            return
        answer = await ask_models(self._endpoint, self._connections, self._settings.timeout)
        if not answer.valid:
            return
        self._models_due_at = self._runtime.now() + self._jittered(self._settings.models_interval)
        if answer.refused and self._logged:
            return  # of a key that was valid: it does not say that it has no list
        self._owner = None if answer.cards is None else engine_of(answer.cards)
        engine, said = answer.cards[0].engine if answer.cards else None, self._endpoint.models
        self._listed = answer.cards if said is None else [replace(synthetic_card(one), engine=engine) for one in said]
        self._follow_loads(engine)
        self._report_models()
        if said is None:
            self._log_change(answer)

    def _report_models(self) -> None:
        cards, most = self._listed, self._prompt_tokens
        if cards is not None and most is not None:
            cards = [with_longest_prompt(one, most) for one in cards]
        if cards is not None and self._loaded:  # a longer prompt is cut there without a word
            lengths, name = self._loaded, self._endpoint.model
            cards = [
                replace(one, context_tokens=lengths.get(name or one.id), context_is_of_prompt=True) for one in cards
            ]
        self._runtime.report_models(self._endpoint.uid, cards)

    def _engine(self) -> str | None:
        return self_describing(self._endpoint, self._owner)

    async def _refresh_description(self) -> None:
        # As often as for the models, though it said it before: nobody tells of a restart that no probe saw.
        engine = self._engine()
        if engine is None:
            return
        said = await ask_description(self._endpoint, engine, self._connections, self._settings.timeout)
        self._description_due_at = self._runtime.now() + self._jittered(self._settings.models_interval)
        if said is not None:
            self._runtime.report_description(self._endpoint.uid, said)
            if said.prompt_tokens != self._prompt_tokens:
                self._prompt_tokens = said.prompt_tokens
                self._report_models()

    def _log_change(self, answer: ModelsAnswer) -> None:
        models = None if answer.cards is None else frozenset(card.id for card in answer.cards)
        if models == self._logged:
            return
        self._logged = models
        name = self._endpoint.server
        if answer.cards is None:
            extra: dict[str, object] = {"event": "models", "endpoint": name, "models": None}
            logger.info("the models of %s cannot be read any more: %s", name, answer.reason, extra=extra)
            return
        shown = [card.id for card in answer.cards[:MAX_MODELS_LOGGED]]
        more = "" if len(answer.cards) == len(shown) else f" and {len(answer.cards) - len(shown)} more"
        extra = {"event": "models", "endpoint": name, "models": shown}
        logger.info("%s serves %s%s", name, ", ".join(shown) or "no models", more, extra=extra)
