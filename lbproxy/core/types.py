"""The values and states that every layer speaks of.

This module holds plain data: what an endpoint is, what it said about its load, what a request wants, how a request
ended. It decides nothing. Invariants:

- `None` in a metric means "the engine did not say"; it is never replaced by 0.
- Everything frozen here may be shared freely; the mutable classes (`EndpointState`, `Ticket`) belong to the Balancer
  and change only in its methods.
- Times are monotonic seconds of whichever clock the driver uses; wall time appears nowhere in core.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, NewType

from lbproxy.core.prefix import BlockKey

if TYPE_CHECKING:
    from lbproxy.core.breaker import Breaker, Cause
    from lbproxy.core.credentials import ApiKey, Proxy, Tls
    from lbproxy.core.estimate import LoadModel
    from lbproxy.core.explain import Decision
    from lbproxy.core.flows import Flow, Refusal
    from lbproxy.core.line import Line
    from lbproxy.core.placement import Placement
    from lbproxy.core.progress import Progress

EndpointUid = NewType("EndpointUid", int)
"""Identifies one endpoint for the life of the process. Never reused; addresses are."""


@dataclass(frozen=True, kw_only=True)
class EndpointSpec:
    """What discovery knows of one model server. Two specs of one `base_url` in one set are a settings error."""

    name: str
    """Unique in a set; the only thing about an endpoint that clients are told."""
    base_url: str
    """`http://host:port`, `https://host:port`, both without a path, or `unix:/path/of/socket`."""
    engine: str = "auto"
    """A built-in engine or one of the settings' own, or `auto`: recognised from the first scrape."""
    metrics: str | None = "auto"
    """`auto` (the engine's usual places), a path, `:port/path`, an absolute URL, or None: not scraped."""
    health: str | None = "/health"
    """The path that the prober asks, or None: passive, counted as up until connections fail."""
    models: tuple[str, ...] | None = None
    """What it serves, all of it; None = it is asked."""
    weight: float = 1.0
    """Capacity beside the others'."""
    kv_cache_tokens: int | None = None
    """How much its KV cache holds; None = it says so itself, or it is learned."""
    api_key: ApiKey | None = None
    """Sent instead of the client's own credentials."""
    tls: Tls | None = None
    """With https always, else None."""
    proxy: Proxy | None = None
    """What every connection to it goes through; None = nothing."""


@dataclass(frozen=True, kw_only=True)
class Endpoint(EndpointSpec):
    """An `EndpointSpec` that the Balancer has given an identity."""

    uid: EndpointUid

    @property
    def authority(self) -> str:
        """`host:port` or `unix:/path`, as it stands in `x-gateway-destination-endpoint`."""
        return self.base_url if self.base_url.startswith("unix:") else self.base_url.rpartition("/")[2]


@dataclass(frozen=True)
class LoraMetrics:
    """What one scrape said of LoRA adapters.

    vLLM names adapters that have live requests only, and under both labels alike: what is resident and idle is not
    here, so an adapter that is missing from both sets may still be loaded.
    """

    running: frozenset[str] = frozenset()
    """Adapters with requests that are computed."""
    waiting: frozenset[str] = frozenset()
    """Adapters with requests that wait."""
    max_lora: int | None = None
    """Adapters that can be resident at a time."""


@dataclass(frozen=True, kw_only=True)
class LoadMetrics:
    """What one scrape said. A field is None when the page did not say it."""

    scraped_at: float
    """When the scrape was *sent*: the gauges cannot be younger than that. Or when a load report came since."""
    waiting: float | None = None
    """Requests queued in the engine, summed over its series."""
    running: float | None = None
    """Requests that the engine is computing, summed over its series."""
    kv_utilization: float | None = None
    """Share of the KV cache in use by requests, 0..1."""
    block_size_tokens: int | None = None
    kv_blocks: int | None = None
    work: float | None = None
    """Steps or tokens computed since some time: a figure that changes while requests run, compared only with itself."""
    lora: LoraMetrics | None = None
    """None also before vLLM's first request for an adapter."""
    started_at: float | None = None
    """The engine process's own word on when it started (`process_start_time_seconds`, its wall clock). Only ever
    compared with itself: another value means another process, whose caches are empty."""


@dataclass(frozen=True)
class ModelCard:
    """One entry of an endpoint's /v1/models."""

    id: str
    raw: bytes
    """The entry's JSON as the endpoint gave it, fields unknown to us included."""
    parent: str | None = None
    """The base model, if this entry is a LoRA adapter."""


class Health(Enum):
    """The standing of an endpoint: see `core.health`. `UP` endpoints get requests, the others in need only."""

    STARTING = "starting"
    """Not judged yet."""
    UP = "up"
    EJECTED = "ejected"
    """By the breaker, for a time."""
    HALF_OPEN = "half_open"
    """That time is over: one request at a time tries it."""
    DOWN = "down"
    """By probes, or because nobody can connect to it."""


class EndpointState:
    """Everything the Balancer knows of one endpoint. Owned by `core.endpoints`; everyone else reads."""

    health: Health = Health.STARTING
    draining: bool = False
    left: bool = False
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
    said_tokens: int | None = None
    """How much its KV cache holds, by its own word outside its metrics (`core.server_info`)."""
    said_at_most: bool = False  # or less
    said_slots: int | None = None  # how many requests it runs at once, by its own word
    refusals: int = 0
    """Attempts in a row that it refused or failed, without a good answer between."""
    backing_off_until: float = float("-inf")
    """Until then it gets requests only if nobody else can take them: see `core.backpressure`."""
    trial: Ticket | None = None
    """The request that tries it and has no answer yet, while it is half open or down."""
    tried_at: float = float("-inf")
    """When the last of those was placed."""
    dialled_at: float = float("-inf")
    """When a probe or a trial last went to it while it was down."""
    was_up: bool = False
    """It took requests before."""
    slow_since: float | None = None
    """When its slow start began; None: it is over. See `core.slow_start`."""
    slow_credit: float = 0.0
    """Requests that it may get meanwhile."""
    refused: bool = False
    """It refused a connection since it last was up, so that another process may listen there now."""
    progress: Progress
    """What it showed of its work. Set by the endpoint set, as is:"""
    breaker: Breaker
    """What became of its requests."""
    load: LoadModel
    """What `core.estimate` knows of its work. Set only under policies that need it (`Policy.block_bytes`)."""

    def __init__(self, endpoint: Endpoint, models: dict[str, ModelCard] | None = None) -> None:
        self.endpoint = endpoint
        self.models = models


class InferenceRequest(NamedTuple):
    """What the decision may see of a request: no headers object, no body."""

    id: str
    model: str | None
    """As the client named it; None = not named, or a route that is not placed by model."""
    stream: bool = False
    body_bytes: int = 0
    prompt_bytes: int = 0
    """Bytes of the flattened prompt; 0 = not a prompt that can be read."""
    block_keys: tuple[BlockKey, ...] = ()
    """One key for each full block of the prompt, each standing for all up to it: see `core.prefix.hash_prompt`."""
    max_tokens: int | None = None
    """The longest answer that the client takes; None = it did not say."""
    priority: int = 0
    """Higher goes first; below 0 is shed first."""
    session: str | None = None
    """What the client calls the conversation that this belongs to."""
    explain: bool = False  # the client would like to know why it went where it went
    flow: str = "anonymous"
    """Whose it is: see `core.flows`."""
    deadline: float | None = None
    """When the client must have its first token, or else wants none."""
    repeatable: bool = True  # it may be sent again although an endpoint may have begun with it
    binary: bool = False  # its body is no JSON but audio, an image or a file

    def is_text(self, tokens: int) -> bool:
        """Whether so many tokens can be the prompt's text. If not, there are images in it, or somebody is wrong."""
        return tokens > 0 and 0.5 <= self.prompt_bytes / tokens <= 16.0


class Usage(NamedTuple):
    """What the endpoint said that a request used. None = it did not say."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Those of the prompt that were in the endpoint's prefix cache."""
    completion_tokens: int | None = None


class TicketState(Enum):
    """WAITING -> PLACED -> CLOSED, or WAITING -> CLOSED."""

    WAITING = "waiting"
    PLACED = "placed"
    CLOSED = "closed"


class Wait(Enum):
    """Why a request is not placed though waiting may help."""

    HELD = "held"
    """Its cheapest endpoint has enough to do; another has not, and may be the cheapest for other requests."""
    BUSY = "busy"
    """Every endpoint has enough to do."""
    FULL = "full"
    """Every endpoint has as many requests as it may have, or there is none yet."""
    BEHIND = "behind"
    """Others wait, and the order of service says whose turn it is."""
    FLOW = "flow"
    """Its flow has as many requests as it may have."""


class Ticket:
    """A request's place in the Balancer for one attempt. Written by the Balancer only.

    What has a default lives in the class until it is set: one is made for every request.
    """

    state: TicketState = TicketState.WAITING
    placed_on: EndpointState | None = None
    """Set while PLACED and after; None if the ticket closed while waiting."""
    placed_at: float | None = None
    first_byte_at: float | None = None
    outcome: Outcome | None = None
    """Set when CLOSED."""
    placement: Placement | None = None
    """How its endpoint's `LoadModel` counts it; None under policies without such models."""
    best: EndpointState | None = None
    """While WAITING: the endpoint that it is held for; None = any that takes it."""
    best_wait_s: float = 0.0
    """How long the wait for it was predicted to be, with how much prefill work there, and when."""
    best_tokens: float = 0.0
    priced_at: float = float("-inf")
    reserved: tuple[Line, float, float] | None = None  # its place in the line of `best`: the line, work, tokens
    retry_after_s: float | None = None  # when there will be room, if it closed for want of that
    work_tokens: float = 0.0
    """While WAITING: the least prefill work that any endpoint would have with it, as of `work_at`."""
    work_at: float = float("-inf")
    flow: Flow | None = None
    """Set by the Balancer at once."""
    counted = False
    """It counts in `flow.active`."""
    charged: float = 0.0
    billed: float = 0.0
    """While PLACED: what its flow was charged, and the tokens that count for its limit."""
    answered = 0
    """Tokens of the answer so far."""
    refusal: Refusal | None = None
    """If it closed because of its flow's limit: which."""
    trial: bool = False
    """It tries an endpoint that is half open or down."""
    accused: EndpointUid | None = None
    """The endpoint that answered this request 500: it is at fault if this attempt goes well."""
    wait: Wait | None = None
    """Why it began to wait; None = it did not."""
    decision: Decision | None = None
    """Why it was placed where it is; None = nobody wants to know."""

    def __init__(
        self, request: InferenceRequest, submitted_at: float, deadline: float, avoid: frozenset[EndpointUid]
    ) -> None:
        self.request = request
        self.submitted_at = submitted_at
        self.deadline = deadline
        """When waiting ends with `Outcome.EXPIRED`."""
        self.avoid = avoid
        """Endpoints that already failed this request."""

    @property
    def where(self) -> EndpointState:
        """Of a placed ticket: its endpoint."""
        assert self.placed_on is not None
        return self.placed_on


@dataclass(frozen=True)
class OutcomeFacts:
    """What an outcome means to a client."""

    code: str
    """The `code` of the error body, the metric label and the log field."""
    status: int
    """0: the status was the endpoint's."""
    error_type: str = ""
    message: str = ""
    """What the client is told unless there is more to say."""
    retry_after: bool = False
    """Tell the client when to come back."""
    client_retry: bool = True
    """False: a retry by the client can only hurt (`x-should-retry: false`)."""
    close: bool = False
    """The client's connection cannot be used again."""


def _bad(code: str, status: int, message: str, *, close: bool = False) -> OutcomeFacts:
    """The client's mistake."""
    return OutcomeFacts(code, status, "invalid_request_error", message, close=close)


def _busy(code: str, status: int, message: str, *, close: bool = False) -> OutcomeFacts:
    """Nobody's mistake: later it may go well."""
    kind = "rate_limit_error" if status == 429 else "server_error"
    return OutcomeFacts(code, status, kind, message, retry_after=True, close=close)


def _upstream(code: str, status: int, message: str) -> OutcomeFacts:
    """The endpoint's mistake; the attempts that could help were made."""
    kind = "timeout_error" if status == 504 else "server_error"
    return OutcomeFacts(code, status, kind, message, client_retry=False)


class Outcome(Enum):
    """How a request ended. The metric label, the log field, the HTTP status and the error body all derive from it.

    Codes and types are OpenAI's where OpenAI has one, so that its SDKs raise the exception that fits.
    """

    COMPLETED = OutcomeFacts("completed", 0)
    """The endpoint's answer went out whole, whatever its status."""
    UPSTREAM_BROKE = OutcomeFacts("upstream_broke", 0)
    """The endpoint failed after its first byte went out: the client saw the break."""
    CUT = OutcomeFacts("lb_shutdown", 0, "server_error")
    """We stopped and the answer was not out when the drain's deadline came: the client saw the break."""
    CLIENT_CLOSED = _bad("client_closed_request", 499, "The client closed the request.", close=True)

    BAD_REQUEST = _bad("bad_request", 400, "The request is not valid HTTP/1.1.", close=True)
    INVALID_JSON = _bad("invalid_json", 400, "The request body is not valid JSON.")
    MISSING_MODEL = _bad("missing_model", 400, "The request names no model.")
    UNAUTHORIZED = _bad("invalid_api_key", 401, "A valid API key is required: `Authorization: Bearer KEY`.", close=True)
    FORBIDDEN = _bad("forbidden", 403, "This is not allowed through the load balancer.")
    UNKNOWN_URL = _bad("unknown_url", 404, "Unknown request URL. Paths begin with /v1; metrics are on the admin port.")
    MODEL_NOT_FOUND = _bad("model_not_found", 404, "The model does not exist.")
    METHOD_NOT_ALLOWED = _bad("method_not_allowed", 405, "The method is not allowed here.")
    BODY_TIMEOUT = _bad("request_timeout", 408, "The request body did not come in time.", close=True)
    TOO_LARGE = _bad("request_too_large", 413, "The request body is too large.", close=True)
    URI_TOO_LONG = _bad("uri_too_long", 414, "The request target is too long.", close=True)
    CONTENT_ENCODING = _bad("unsupported_content_encoding", 415, "Encoded request bodies are not supported.")
    HEAD_TOO_LARGE = _bad("head_too_large", 431, "The request head is too large.", close=True)

    LOOP = OutcomeFacts(
        "loop_detected", 508, "server_error", "The request came back to this load balancer.", client_retry=False
    )

    SATURATED = _busy("rejected_saturated", 429, "All model servers are busy and the queue is full.")
    EXPIRED = _busy("rejected_ttl_expired", 429, "No model server had room in time.")
    RATE_LIMITED = _busy("rate_limit_exceeded", 429, "The limit of requests or tokens per minute is reached.")
    TOO_LATE = _busy("rejected_slo", 429, "The first token would come later than the request wants it.")
    NO_ENDPOINTS = _busy("no_endpoints", 503, "No model server is available.")
    DRAINING = _busy("lb_draining", 503, "The load balancer is shutting down.", close=True)
    OVERLOADED = _busy("lb_overloaded", 503, "The load balancer is out of resources.", close=True)

    CONNECT_FAILED = _upstream("upstream_connect_failed", 502, "No connection to a model server could be made.")
    UPSTREAM_RESET = _upstream("upstream_reset", 502, "The model server closed the connection before it answered.")
    UPSTREAM_PROTOCOL = _upstream("upstream_protocol_error", 502, "The model server's answer was not valid HTTP.")
    UPSTREAM_TIMEOUT = _upstream("upstream_timeout", 504, "The model server did not answer in time.")

    INTERNAL_ERROR = OutcomeFacts("internal_error", 500, "server_error", "The load balancer failed.")
    """A defect of ours: logged with its traceback."""

    __hash__ = object.__hash__  # by identity: Enum's own, in Python, takes 0.2 µs, and each request looks up some

    @property
    def label(self) -> str:
        """The metric label and log field."""
        return self.value.code


class LbError(Exception):
    """A request that lbproxy itself answers. The only exception that crosses layers.

    `message` is for the client: it never holds an upstream address, a traceback or bytes of the request's body.
    `allow` is the Allow header of a 405, `retry_after_s` when it would go well, if that is known.
    """

    def __init__(
        self,
        outcome: Outcome,
        message: str | None = None,
        *,
        param: str | None = None,
        allow: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        self.outcome = outcome
        self.message = outcome.value.message if message is None else message
        self.param = param
        self.allow = allow
        self.retry_after_s = retry_after_s
        super().__init__(self.message)


@dataclass(frozen=True)
class Transition:
    """An endpoint changed its standing. One log line each."""

    endpoint: Endpoint
    before: Health
    after: Health
    reason: str
    cause: Cause | None = None
    """Why it was ejected, if it was."""
