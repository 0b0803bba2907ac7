# SPDX-License-Identifier: Apache-2.0
"""What the balancer knows of one endpoint, now."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from lbproxy.config.sleep import HostSettings
from lbproxy.core.capacity.allowance import Allowance
from lbproxy.core.endpoints.breaker import Breaker, Cause
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointSpec, handover_of
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.progress import Progress
from lbproxy.core.engines.handover import Handover
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.engines.orca import LoadReport
from lbproxy.core.knowledge.load_model import LoadModel
from lbproxy.core.knowledge.pool_model import PoolModel
from lbproxy.core.requests.context_length import prompt_limit
from lbproxy.core.requests.openai import ModelCard, synthetic_card
from lbproxy.core.requests.request import InferenceRequest

WHOLE_SERVER: Final = Handover()
NO_METRICS: Final = LoadMetrics(scraped_at=-inf)
"""For an endpoint that reported nothing yet."""


class Trial:
    """One request that tries an endpoint which is half open or down."""

    def __init__(self, *, stream: bool) -> None:
        self.stream = stream
        """Its response is streamed."""
        self.ended = False
        """It has decided, and counts like any other request now."""


ASSUMED: Final = HostSettings(awake=1)
"""How many models an endpoint has in memory at a time until it shows that."""
ASKED: Final = 5
"""How often a model is asked for is told by so many requests, the last ones."""


class OnDemand:
    """The models of an endpoint that loads them on demand: which may be asked for now, and what of ours runs there.
    Owned by `core.sleeping`, but for the counts, which are of listed models alone: any name may be asked for.
    """

    def __init__(self) -> None:
        self.unloaded: frozenset[str] = frozenset()
        """Models that get no requests, as they are not loaded."""
        self.listed: frozenset[str] = frozenset()
        """All of its models."""
        self.loading: frozenset[str] = frozenset()
        """Models that the first request has loaded: those that come meanwhile wait there too."""
        self.in_flight: dict[str, int] = {}
        self.asked: dict[str, deque[float]] = {}
        """When the last `ASKED` requests for a model came that were placed there."""
        self.most: int | None = None
        """What the settings say that there is room for; see LoadSpec."""
        self.host = ASSUMED
        """How many models it has in memory at a time: as the settings say, or as was seen, and one more than that until
        one had to go."""
        self.is_all = False
        """It was seen that it has no more."""
        self.is_silent = False
        """Nothing says which are in memory, but responses."""
        self.contexts: dict[str, int | None] = {}
        """Models in memory, by the context that the last request there asked for: with that they are loaded. Of those
        that are missing it is not known."""
        self.responded: dict[str, float] = {}
        """If nothing else does: when each model began a response last."""

    def learn_room(self, models: int, *, is_all: bool) -> None:
        """Note how many models it has in memory at a time."""
        self.host, self.is_all = self.host.model_copy(update={"awake": models}), is_all

    @property
    def has_place(self) -> bool:
        """Whether one more model is loaded without another being unloaded, as far as models are counted."""
        return len(self.listed - self.unloaded) < self.host.awake

    def placed(self, model: str, at: float) -> None:
        """One request more, which came at this time."""
        if model not in self.listed:
            return
        self.in_flight[model] = self.in_flight.get(model, 0) + 1
        self.asked.setdefault(model, deque(maxlen=ASKED)).append(at)

    def closed(self, model: str) -> None:
        """One less. It may have begun before anything was counted."""
        if model in self.in_flight:
            self.in_flight[model] = max(0, self.in_flight[model] - 1)


class Standing:
    """How an endpoint stands beside its `health`: what its trials, probes and requests showed. Owned by `Judge`."""

    passes_in_row: int = 0
    """Passed probes in a row."""
    trial: Trial | None = None
    """The request that tries it and has no response yet, while it is half open or down."""
    tried_at: float = float("-inf")
    """When the last trial was placed."""
    dialled_at: float = float("-inf")
    """When a probe or a trial was last sent to it while it was down."""
    woken_at: float = float("-inf")
    """When it was awake again after it had slept or had not been there: see `core.sleeping`."""
    reason: str = ""
    """Why its health is what it is; empty: it never changed."""
    was_up: bool = False
    """It took requests before."""
    emptied_at: float = inf
    """While it drains: from then on streams that can go on elsewhere do so."""
    refused_connection: bool = False
    """It refused a connection since it was last up, so that another process may listen there now."""
    process: int = 0
    """Another number for each process at its address, as far as they are seen to be others: what is known of one is
    kept with this, or dropped with it (`EndpointSet`)."""
    breaker: Breaker
    """The results of its requests. Set by the endpoint set."""

    def __init__(self) -> None:
        self.progress = Progress()
        """What it showed of its work."""
        self.on_demand: OnDemand | None = None
        """None: it has all of its models in memory."""


class EndpointReports:
    """What an endpoint said of itself besides its `metrics`, and other replicas of it. Owned by the endpoint set."""

    elsewhere_awaiting: int = 0
    """Requests of other replicas here that have no first byte: see `EndpointState.elsewhere`."""
    others_running: float = 0.0
    """Requests of others that did not wait, by the last scrape."""
    scrape_until: float = float("-inf")
    """Until when values that only scrapes report are fresh."""
    in_flight_at_scrape: int = 0
    """Our own requests in flight when the current scrape was sent."""
    asks_load: bool = False
    """Requests to it ask for load reports."""
    load_reports: int = 0
    """Load reports that could be read."""
    malformed_reports: int = 0
    cache_tokens: int | None = None
    """The KV cache size that it reports outside its metrics (`core.engines.server_info`)."""
    cache_tokens_at_most: bool = False  # the size is an upper bound
    measured_cache_tokens: int | None = None
    """The KV cache size that its KV events show."""
    cached_tokens: int | None = None
    """Tokens in its prefix cache, counted from its KV events; None = not known."""
    slots: int | None = None  # how many requests it reports to run at once
    handover: Handover | None = None
    """What its engine says of its part where prefill and decode are apart; None: nothing."""


class HeldBack:
    """What an endpoint refused, or failed, of one model: see `core.endpoints.backpressure`."""

    def __init__(self) -> None:
        self.refusals = 0
        """In a row, without a successful response between."""
        self.until = -inf
        """Until then the endpoint gets requests for the model only if no other takes them, and above tier 1 none."""


class EndpointState:
    """Everything the Balancer knows of one endpoint. Owned by `core.endpoints.endpoint_set`; all others only
    read it.
    """

    health: Health = Health.STARTING
    draining: bool = False
    dormant: str = ""
    """It gets no requests as it is not awake: its phase in `core.sleeping`. Empty = it is, or it never sleeps."""
    removed: bool = False
    """It is not a member of the set any more."""
    failures_in_row: int = 0
    """Failed probes and connections in a row."""
    in_flight: int = 0
    """Tickets placed here and not closed: our own, exact and current."""
    elsewhere: int = 0
    """Requests of other replicas in flight here, as far as is known (`core.replicas`)."""
    awaiting_first_byte: int = 0
    """Tickets of `in_flight` without a first byte."""
    placed: int = 0
    """Tickets ever placed here."""
    placed_seq: int = 0
    """The pool-wide number of the last placement here; 0 = never."""
    metrics: LoadMetrics | None = None
    """The latest successful scrape, however old, updated by later load reports; `fresh_until` says whether it
    is fresh."""
    others: float | None = None
    """Requests in the last scrape that are not ours: max(0, waiting + running - ours at that time). A later load report
    updates those of them that wait."""
    reported_at: float = float("-inf")
    """When the last load report arrived."""
    fresh_until: float = float("-inf")
    """Until when `metrics` is fresh."""
    models: dict[str, ModelCard] | None
    """By id; None = never listed. Kept when the endpoint goes down."""
    allowance: Allowance | None = None
    """What its own limits leave of it; None = it has none."""
    slow_since: float | None = None
    """When its slow start began; None: it has none. See `core.endpoints.slow_start`."""
    slow_credit: float = 0.0
    """Requests that it may get during the slow start."""
    handover: Handover = WHOLE_SERVER
    """Its part where prefill and decode are apart."""
    siblings: Sequence[EndpointState] = ()
    """The other ranks of its address: what happens to the address happens to all of them."""
    load: LoadModel
    """Its work and speed. Set only under policies that need it (`Policy.block_bytes`)."""

    def __init__(self, endpoint: Endpoint, models: dict[str, ModelCard] | None = None) -> None:
        self.endpoint = endpoint
        self.models = models
        self.standing = Standing()
        self.reported = EndpointReports()
        self.held_back: dict[str, HeldBack] = {}
        """By `engine_model`. Written by `core.endpoints.backpressure`; cleared where what it refused counts no more."""

    def prompt_limit(self, request: InferenceRequest) -> int | None:
        """The longest prompt that it takes with the response that a request may have, in tokens; None: not known."""
        if request.context_tokens is not None:
            return request.context_tokens  # it has its model loaded with that wherever it goes
        cards, model = self.models, request.model
        if not cards or model is None or (card := cards.get(model)) is None:
            return None
        if card.context_tokens is None and card.parent is not None:
            card = cards.get(card.parent)
        return prompt_limit(card, request.max_tokens)

    def is_loaded_for(self, request: InferenceRequest) -> bool:
        """Whether its model is in memory with the context that a request asks for, or may be: with another one Ollama
        loads it anew, also with the default after another (server/sched.go, needsReload).
        """
        on_demand, model, asked = self.standing.on_demand, request.model or "", request.context_tokens
        if on_demand is None or on_demand.contexts.get(model, asked) == asked:
            card = (self.models or {}).get(model)
            known = None if on_demand is None or model in on_demand.contexts or card is None else card.context_tokens
            return asked is None or known is None or known == asked
        return False

    def has_api(self, engine: str) -> bool:
        """Whether it has the own API of an engine: as the settings say, or as it showed."""
        first = next(iter(self.models.values()), None) if self.models else None
        return self.endpoint.engine == engine or (first is not None and first.engine == engine)

    def engine_model(self, model: str | None) -> str:
        """The model that is behind a name here: of an adapter its base, which the same engine serves."""
        card = None if self.models is None or model is None else self.models.get(model)
        return (None if card is None else card.parent) or model or ""

    def held_until(self, model: str | None) -> float:
        """Until when it holds this model back; in the past: it does not."""
        one = self.held_back.get(self.engine_model(model)) if self.held_back else None
        return -inf if one is None else one.until

    @property
    def requests(self) -> int:
        """Requests in flight of all replicas."""
        return self.in_flight + self.elsewhere

    @property
    def at_address(self) -> Sequence[EndpointState]:
        """All ranks of its address, itself first."""
        return (self, *self.siblings) if self.siblings else (self,)


def allow(state: EndpointState, now: float) -> None:
    """Apply the limits in the settings."""
    bounds = state.endpoint.bounds
    if bounds is None:
        state.allowance = None
    elif state.allowance is None:
        state.allowance = Allowance(bounds, now)
    else:
        state.allowance.reconfigure(bounds, now)


def equip(state: EndpointState, pool: PoolModel | None) -> None:
    """Give it a load model that knows what the endpoint reported of itself; none without a pool."""
    if pool is None:
        return
    reported, state.load = state.reported, LoadModel(pool, state.endpoint.kv_cache_tokens)
    if reported.cache_tokens is not None:
        state.load.kv.size_reported(float(reported.cache_tokens), at_most=reported.cache_tokens_at_most)
    if reported.measured_cache_tokens is not None:
        state.load.kv.size_measured(float(reported.measured_cache_tokens))
    if reported.slots is not None:
        state.load.room.slots.limit_reported(reported.slots)


def has_more(state: EndpointState) -> bool:
    """Whether it has a tier above 1, limits of its own, or its own name of a model."""
    one = state.endpoint
    return one.tier > 1 or one.bounds is not None or one.model is not None


def rank_of(state: EndpointState) -> int:
    """Its position among the ranks of its address."""
    return state.endpoint.rank or 0


def is_unreachable(state: EndpointState) -> bool:
    """No connection could be made, or its health checks fail."""
    cause = state.standing.breaker.cause
    return state.health is Health.DOWN or (state.health is Health.EJECTED and cause is Cause.UNREACHABLE)


def relate_ranks(states: Iterable[EndpointState]) -> None:
    """Tell the ranks of each address of each other."""
    ranks: dict[str, list[EndpointState]] = {}
    for state in states:
        if state.endpoint.rank is not None:
            ranks.setdefault(state.endpoint.url_key, []).append(state)
    for together in ranks.values():
        for state in together:
            state.siblings = [one for one in together if one is not state]


def assign_role(state: EndpointState) -> None:
    """Set the part of an endpoint where prefill and decode are apart."""
    state.handover = handover_of(state.endpoint, state.reported.handover)


def served_by(models: dict[str, ModelCard] | None) -> dict[str, tuple[str | None, int | None]] | None:
    """The part of an endpoint's model list that placing depends on."""
    return None if models is None else {card.id: (card.parent, card.context_tokens) for card in models.values()}


def configured_models(spec: EndpointSpec) -> dict[str, ModelCard] | None:
    """The models that the settings configure for it; None = to be read from the endpoint."""
    return None if spec.models is None else {name: synthetic_card(name) for name in spec.models}


# What an endpoint reports of its load: for the endpoint set


def note_scrape(state: EndpointState, metrics: LoadMetrics, stale_after_s: float) -> float | None:
    """Note a successful scrape. Returns how many requests wait in the endpoint that are not ours; None: the page is an
    old one, and says nothing.
    """
    before, placed = state.metrics, state.placed
    others = (state.others or 0.0) + state.elsewhere
    state.standing.progress.scraped(metrics, before, placed=placed, in_flight=state.in_flight, others=others)
    state.metrics = metrics
    if state.standing.progress.is_old(metrics.scraped_at):
        return None
    state.fresh_until = state.reported.scrape_until = metrics.scraped_at + stale_after_s
    queued = max(0.0, (metrics.waiting or 0.0) - state.awaiting_first_byte - state.reported.elsewhere_awaiting)
    requests = metrics.requests
    state.others = None if requests is None else max(0.0, requests - state.reported.in_flight_at_scrape)
    state.reported.others_running = max(0.0, (state.others or 0.0) - queued)
    return queued


def note_load(
    state: EndpointState, report: LoadReport, stale_after_s: float, *, has_first_byte: bool, now: float
) -> float | None:
    """Note a load report that is not empty. Returns how many requests wait in the endpoint that are not ours; None if
    that is not known. `has_first_byte`: see `EndpointSet.report_load`.
    """
    state.reported_at = now
    known, fresh = state.metrics or NO_METRICS, state.metrics if now <= state.reported.scrape_until else None
    gauges = fresh or NO_METRICS
    waiting, running, kv_utilization = report
    if waiting is not None and gauges.deferred:  # it says nothing of reasons
        waiting = max(0.0, waiting - gauges.deferred)
    metrics = state.metrics = LoadMetrics(
        scraped_at=now,
        waiting=gauges.waiting if waiting is None else waiting,
        running=gauges.running if running is None else running,
        kv_utilization=gauges.kv_utilization if kv_utilization is None else kv_utilization,
        block_size_tokens=known.block_size_tokens,
        kv_blocks=known.kv_blocks,
        stated_tokens=known.stated_tokens,
        deferred=gauges.deferred,
        slots=known.slots,
        asleep=gauges.asleep,
        work=known.work,
        lora=known.lora,
        started_at=known.started_at,
    )
    state.fresh_until = now + stale_after_s
    if metrics.waiting is None and metrics.running is None:
        state.others = None
        return None
    # vLLM reports only its queue. Of our requests at most those without a first byte are in it. How many requests of
    # others run, only a scrape shows.
    known_waiting = metrics.waiting or 0.0
    awaiting = state.awaiting_first_byte + state.reported.elsewhere_awaiting
    queued = max(0.0, known_waiting - (awaiting - (not has_first_byte)))
    if running is None:
        state.others = queued + (0.0 if fresh is None else state.reported.others_running)
    else:
        state.others = max(0.0, known_waiting + running - state.requests)
    return queued


@dataclass(frozen=True)
class EndpointSnapshot:
    """One endpoint's state at one moment; it does not change."""

    endpoint: Endpoint
    health: Health
    draining: bool
    backing_off: bool
    """It holds a model back."""
    in_flight: int
    awaiting_first_byte: int
    placed: int
    tokens_streamed: int
    metrics: LoadMetrics | None
    metrics_age_s: float | None
    stale: bool
    models: tuple[str, ...] | None
    asks_load: bool = False
    load_reports: int = 0
    malformed_reports: int = 0
    readmitted: bool = False
    """Ejected, but used all the same, as too few endpoints are up."""
    share: float = 1.0
    """0.1 to 1: the share that it gets during its slow start."""
    removed: bool = False
    """It is not a member any more; its requests in flight continue."""
    elsewhere: int = 0
    """Requests of other replicas in flight there, as far as is known."""
    handover: Handover = WHOLE_SERVER
    """Its part where prefill and decode are apart."""
    kv_cached_tokens: int | None = None
    """Tokens in its prefix cache, counted from its KV events; None = not known."""
    kv_fill: float | None = None
    """The same as a share of the size of its KV cache, 0..1; None = one of them is not known."""
    reported_handover: Handover | None = None
    """The same as its engine shows it."""
    dormant: str = ""
    """See EndpointState."""
    limits_used: tuple[tuple[str, float], ...] = ()
    """The used share of each of its own limits, 0 or more, by the name of its key in the settings."""
    reason: str = ""
    """See Standing."""

    @property
    def serving(self) -> bool:
        """See `is_serving`."""
        return is_serving(self, self.readmitted)


def is_serving(one: EndpointState | EndpointSnapshot, readmitted: bool) -> bool:
    """Whether requests may be sent there now, even if only one at a time. `readmitted`: see EndpointSnapshot."""
    return not (one.draining or one.dormant) and (readmitted or one.health in {Health.UP, Health.HALF_OPEN})


def snapshot_of(state: EndpointState, share: float, readmitted: bool, now: float) -> EndpointSnapshot:
    """A snapshot. `share`: see there. `readmitted`: it is ejected, but used all the same."""
    return EndpointSnapshot(
        endpoint=state.endpoint,
        health=state.health,
        draining=state.draining,
        backing_off=any(now < one.until for one in state.held_back.values()),
        readmitted=readmitted,
        share=share,
        in_flight=state.in_flight,
        awaiting_first_byte=state.awaiting_first_byte,
        placed=state.placed,
        tokens_streamed=state.standing.progress.tokens_streamed,
        metrics=state.metrics,
        metrics_age_s=None if state.metrics is None else max(0.0, now - state.metrics.scraped_at),
        stale=now > state.fresh_until,
        models=None if state.models is None else tuple(state.models),
        asks_load=state.reported.asks_load,
        load_reports=state.reported.load_reports,
        malformed_reports=state.reported.malformed_reports,
        removed=state.removed,
        elsewhere=state.elsewhere,
        handover=state.handover,
        kv_cached_tokens=state.reported.cached_tokens,
        kv_fill=_fill(state),
        reported_handover=state.reported.handover,
        dormant=state.dormant,
        limits_used=() if state.allowance is None else state.allowance.used(state.requests, now),
        reason=state.standing.reason,
    )


def _fill(state: EndpointState) -> float | None:
    """The share of the cache that holds something, by the size that counts for placing: see `KvModel`."""
    metrics, reported, size = state.metrics, state.reported, state.endpoint.kv_cache_tokens
    if size is None and metrics is not None:
        size = metrics.kv_tokens
    if size is None and not reported.cache_tokens_at_most:
        size = reported.cache_tokens
    size, cached = size or reported.measured_cache_tokens, reported.cached_tokens
    return None if size is None or cached is None else min(1.0, cached / size)
