"""What the balancer knows of one endpoint, now."""

from __future__ import annotations

from dataclasses import dataclass

from lbproxy.core.endpoints.breaker import Breaker
from lbproxy.core.endpoints.endpoint import Endpoint
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.progress import Progress
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.knowledge.load_model import LoadModel
from lbproxy.core.requests.openai import ModelCard


class Trial:
    """One request that tries an endpoint which is half open or down."""

    __slots__ = ("ended", "stream")

    def __init__(self, *, stream: bool) -> None:
        self.stream = stream
        """Its response is streamed."""
        self.ended = False
        """What it shows counts no more than what others show."""


class EndpointState:
    """Everything the Balancer knows of one endpoint. Owned by `core.endpoints.endpoint_set`; everyone else reads."""

    health: Health = Health.STARTING
    draining: bool = False
    removed: bool = False
    """It is no member of the set any more."""
    fails: int = 0
    """Bad probes and connect failures in a row."""
    passes: int = 0
    """Good probes in a row."""
    in_flight: int = 0
    """Tickets placed here and not closed: ours, exact, now."""
    awaiting_first_byte: int = 0
    """Those of `in_flight` that have not answered yet."""
    tokens_streamed: int = 0
    """Tokens reported by `progress`, over the life of the endpoint."""
    placed: int = 0
    """Tickets ever placed here."""
    placed_seq: int = 0
    """The pool-wide number of the last placement here; 0 = never."""
    metrics: LoadMetrics | None = None
    """The newest good scrape, however old, and what a load report said since; who uses it looks at `fresh_until`."""
    others: float | None = None
    """Requests that the last scrape saw here and we did not send: max(0, waiting + running - ours at that time). A load
    report since then renews those of them that wait."""
    others_running: float = 0.0
    """Those of them that did not wait, by the last scrape."""
    scrape_until: float = float("-inf")
    """Until when what only scrapes say may be believed."""
    asks_load: bool = False
    """Requests to it ask for load reports."""
    reported_at: float = float("-inf")
    """When a load report last came."""
    load_reports: int = 0
    """That came and could be read."""
    malformed_reports: int = 0
    in_flight_at_scrape: int = 0
    """Our own in-flight count when the scrape now under way was sent."""
    fresh_until: float = float("-inf")
    """Until when `metrics` may be believed."""
    models: dict[str, ModelCard] | None
    """By id; None = it never said. Kept when the endpoint goes down."""
    reported_cache_tokens: int | None = None
    """How much its KV cache holds, by its own word outside its metrics (`core.engines.server_info`)."""
    cache_tokens_at_most: bool = False  # or less
    reported_slots: int | None = None  # how many requests it runs at once, by its own word
    refusals: int = 0
    """Attempts in a row that it refused or failed, without a good response between."""
    backing_off_until: float = float("-inf")
    """Until then it gets requests only if nobody else can take them: see `core.endpoints.backpressure`."""
    trial: Trial | None = None
    """The request that tries it and has no response yet, while it is half open or down."""
    tried_at: float = float("-inf")
    """When the last of those was placed."""
    dialled_at: float = float("-inf")
    """When a probe or a trial last went to it while it was down."""
    was_up: bool = False
    """It took requests before."""
    slow_since: float | None = None
    """When its slow start began; None: it is over. See `core.endpoints.slow_start`."""
    slow_credit: float = 0.0
    """Requests that it may get meanwhile."""
    refused_connection: bool = False
    """It refused a connection since it last was up, so that another process may listen there now."""
    progress: Progress
    """What it showed of its work. Set by the endpoint set, as is:"""
    breaker: Breaker
    """What became of its requests."""
    load: LoadModel
    """What is known of its work and speed. Set only under policies that need it (`Policy.block_bytes`)."""

    def __init__(self, endpoint: Endpoint, models: dict[str, ModelCard] | None = None) -> None:
        self.endpoint = endpoint
        self.models = models


@dataclass(frozen=True)
class EndpointSnapshot:
    """One endpoint's state at one moment, safe to keep."""

    endpoint: Endpoint
    health: Health
    draining: bool
    backing_off: bool
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
    """Ejected, and used all the same for want of others."""
    share: float = 1.0
    """0.1 to 1: of what it will get once its slow start is over."""
    removed: bool = False
    """It is no member any more: what runs there finishes."""

    @property
    def serving(self) -> bool:
        """Requests may go there now, be it one at a time."""
        return not self.draining and (self.readmitted or self.health in {Health.UP, Health.HALF_OPEN})
