# SPDX-License-Identifier: Apache-2.0
"""Dials an endpoint once and says everything that was found: for `lbproxy check`. Changes and reports nothing."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lbproxy.config.sections.endpoints import ScrapeSettings
from lbproxy.config.sections.engines import MetricSpec
from lbproxy.config.sections.health import HealthSettings
from lbproxy.config.shown import without_values
from lbproxy.control.probing.prober import ModelsAnswer, ask_description, ask_health, ask_models, self_describing
from lbproxy.control.probing.scraper import FoundPage, ScrapeError, Target, fetch_page, find_page
from lbproxy.core.endpoints.endpoint import EndpointSpec, handover_of
from lbproxy.core.engines.dialects import Engines, EngineTable
from lbproxy.core.engines.handover import Handover, Role
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.engines.pairing import Part, states_role
from lbproxy.core.engines.readings import PageReader
from lbproxy.core.engines.server_info import SERVER_INFO, Description, connector_of, engine_of
from lbproxy.core.requests.openai import ModelCard, synthetic_card, with_longest_prompt
from lbproxy.net.connections.pool import ConnectionPool

FIRST_SCRAPE_TIMEOUT_S = 3.0
"""The scraper tries again at once; here one response decides, and the first page of a cold server may be slow."""


@dataclass(frozen=True, slots=True)
class ShownLoad:
    """What the question for metrics brought. A field is None or empty when it showed nothing."""

    answered: bool
    engine: str | None = None
    present: tuple[str, ...] = ()
    """Signals of load that its metrics show."""
    missing: tuple[str, ...] = ()
    """Signals that its engine should show and it does not."""
    lacking: tuple[str, ...] = ()
    """Signals that its engine never shows."""
    asks_load: bool | None = None
    """Whether its responses would be asked for load reports; None = its engine has none, or it is not known."""
    metrics: LoadMetrics | None = None
    ranks: int = 1
    """Data-parallel ranks that they show; 1 = none."""
    reported: Handover | None = None
    """The connector that vLLM shows."""
    page: str | None = None
    """Where its metrics stand; None = they were not found, or are not to be asked for."""
    why: Mapping[str, str] = field(default_factory=dict)
    """Of signals for which its metrics show different values: which counts, and what another one says."""
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What one endpoint showed. A field is None or empty when it showed nothing."""

    endpoint: EndpointSpec
    reachable: bool
    """It answered something, to whichever question."""
    healthy: bool | None
    """Whether it would be called up; None = it is not to be asked."""
    health: str
    """What the question for health brought, in short."""
    owner: str | None
    """The engine by its models, if it is one of `core.engines.server_info`."""
    api: str | None
    """The engine, if it was recognised by its own API."""
    cards: list[ModelCard] | None
    """Of its models; None = it does not say."""
    shown: ShownLoad
    said: Description | None
    """What it says of itself outside its metrics."""
    problems: tuple[str, ...]
    """Short texts, the worst first. Problems with metrics or models alone do not make an endpoint unusable."""

    @property
    def models(self) -> tuple[str, ...] | None:
        """Base models; None = it does not say."""
        return None if self.cards is None else tuple(card.id for card in self.cards if card.parent is None)

    @property
    def adapters(self) -> dict[str, tuple[str, ...]]:
        """Adapters by the base model that they say they belong to."""
        adapters: dict[str, tuple[str, ...]] = {}
        for card in self.cards or ():
            if card.parent is not None:
                adapters[card.parent] = (*adapters.get(card.parent, ()), card.id)
        return adapters

    @property
    def part(self) -> Part:
        """Its part where prefill and decode are apart: as configured, as it shows, and as lbproxy would use it."""
        spec, said, ranks = self.endpoint, self.said, self.shown.ranks
        reported = said.handover if said is not None and said.handover is not None else self.shown.reported
        is_used = states_role(reported) or spec.connector is None  # as the scraper and the prober report it
        models = None if self.models is None else frozenset(self.models)
        hidden = ranks if (spec.ranks or ranks) == 1 else 1
        handover = handover_of(spec, reported if is_used else None)
        return Part(spec.name, models, spec.role, spec.connector, reported, handover, hidden)

    @property
    def usable(self) -> bool:
        """lbproxy could send it requests now."""
        return self.reachable and self.healthy is not False


async def inspect(
    endpoint: EndpointSpec,
    connections: ConnectionPool,
    health: HealthSettings,
    scrape: ScrapeSettings,
    engines: Engines,
) -> Inspection:
    """Ask `endpoint` everything once, all at the same time but for the size of its cache, whose page depends on what it
    is. Takes as long as the longest time-out at most, and two `SIZE_TIMEOUT_S`.
    """
    async with asyncio.TaskGroup() as questions:
        load_task = questions.create_task(_ask_load(endpoint, connections, scrape, engines))
        models_task = questions.create_task(_ask_models(endpoint, connections, health.timeout))
        answer = None
        if endpoint.health is not None:
            answer = await ask_health(endpoint, endpoint.health, connections, health.timeout)
    load, listed = load_task.result(), models_task.result()
    owned_by = None if listed.cards is None else engine_of(listed.cards)
    describing = self_describing(endpoint, owned_by)
    said = None
    if describing is not None:
        said = await ask_description(endpoint, describing, connections, health.timeout)
    problems = []
    if answer is not None and not answer.ok:
        problems.append(answer.reason)
    if listed.cards is None:
        problems.append(f"models unknown: {listed.reason}")
    if load.problem is not None:
        problems.append(f"load unknown: {load.problem}")
    cards = listed.cards
    if cards is not None and said is not None and said.prompt_tokens is not None:
        cards = [with_longest_prompt(one, said.prompt_tokens) for one in cards]
    answered = [load.answered, listed.answered, answer is not None and answer.answered]
    return Inspection(
        endpoint=endpoint,
        reachable=any(answered),
        healthy=None if answer is None else answer.ok is True,
        health="not asked" if answer is None else answer.reason,
        owner=owned_by if owned_by in SERVER_INFO else None,
        api=listed.cards[0].engine if listed.cards else None,
        cards=cards,
        shown=load,
        said=said,
        problems=tuple(problems),
    )


async def _ask_models(endpoint: EndpointSpec, connections: ConnectionPool, timeout_s: float) -> ModelsAnswer:
    if endpoint.models is None:
        return await ask_models(endpoint, connections, timeout_s)
    return ModelsAnswer(True, [synthetic_card(name) for name in endpoint.models], False, "from the settings")


async def _ask_load(
    endpoint: EndpointSpec, connections: ConnectionPool, settings: ScrapeSettings, engines: Engines
) -> ShownLoad:
    engine = None if endpoint.engine == "auto" else endpoint.engine
    if endpoint.metrics is None:
        return ShownLoad(False, engine)
    timeout_s = max(settings.timeout, FIRST_SCRAPE_TIMEOUT_S)

    async def ask(target: Target) -> bytes:
        return await fetch_page(target, connections, timeout_s=timeout_s, max_bytes=settings.page)

    try:
        found = await find_page(endpoint, engines, ask)
    except ScrapeError as error:
        return ShownLoad(error.answered, engine, problem=error.detail)
    table = engines.tables[found.engine]
    reader = PageReader(table, keep_s=0.0)
    reading = reader.read(found.page, scraped_at=0.0, wall_time=time.time())
    signals = table.signals()
    present = tuple(name for name, signal in signals.items() if signal and name not in reading.missing)
    return ShownLoad(
        True,
        found.engine,
        present,
        reading.missing,
        tuple(name for name, signal in signals.items() if not signal),
        table.wants_load_reports(is_single=reader.is_single) if table.load_reports else None,
        reading.metrics,
        len(reading.ranks) or 1,
        _reported(found),
        without_values(str(found.target)),
        {name: why for name in present if (why := _why(table, name, found.page)) is not None},
        None if present else f"none of {found.engine}'s metrics is on the page",
    )


def _why(table: EngineTable, name: str, page: bytes) -> str | None:
    """By which of the metrics for a signal its value is read, if another one on the page has a different value."""
    found: list[tuple[str, float]] = []
    for spec in table.signals()[name]:
        only: dict[str, Any] = {name: (spec,)}
        alone = PageReader(replace(table, **only), keep_s=0.0)
        load = alone.read(page, scraped_at=0.0, wall_time=0.0).metrics
        if load is not None and (value := getattr(load, name)) is not None:
            text = str(spec) if isinstance(spec, MetricSpec) else f"{spec.used} / {spec.capacity}"
            found.append((text, value))
    other = next((one for one in found if not math.isclose(one[1], found[0][1], rel_tol=0.01)), None)
    return None if other is None else f"{found[0][0]}, and not by {other[0]}, which is {other[1]:,.6g}"


def _reported(found: FoundPage) -> Handover | None:
    connector = connector_of(found.page) if found.engine == "vllm" else None
    return None if connector is None else Handover(Role.BOTH, connector)
