# SPDX-License-Identifier: Apache-2.0
"""What worker processes and the balancer process tell each other, and its form as bytes.

Each message is a msgspec Struct that is encoded as a msgpack array: its tag, then its fields in order. Both ends are
the same version of lbproxy on one machine, started by one supervisor, so a message has no version and is not validated
beyond its types. Requests, usages and load reports travel as the tuples that they are. `number` is the number of a
request in its worker: the same for all of its attempts and its record.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias, get_args

import msgspec

from lbproxy.core.engines.orca import LoadReport
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import WHOLE, InferenceRequest, Usage
from lbproxy.driver.own_load import OwnLoad

Fields: TypeAlias = tuple[Any, ...]
"""The fields of a NamedTuple."""
RequestFields: TypeAlias = tuple[
    str, str | None, bool, int, int, tuple[int, ...], int | None, int, str | None, bool, str, float | None, int,
    str | None, bool, bool, bool, bool, bool, int, int, int, int, float | None, str | None, str | None, int | None,
]  # fmt: skip
"""The fields of an InferenceRequest that a worker sends."""
# By these the decoders that are made later read requests and usages. Compiled, a NamedTuple does not know the types of
# its fields; LoadReport does, as core.engines.orca is not compiled.
InferenceRequest.__annotations__.update(zip(InferenceRequest._fields, get_args(RequestFields), strict=True))
Usage.__annotations__.update(dict.fromkeys(Usage._fields, int | None) | {"is_estimate": bool})
Origin: TypeAlias = tuple[str, str, str, str, str | None, int]
"""What many requests have in common. Of a RequestRecord: method, path, client, route, key; and the number by which
later requests on this link refer to it: see `workers.origins`."""
AttemptFields: TypeAlias = tuple[tuple[int, ...], int | None, bool, str | None]
"""See RequestRuntime.submit: `avoid`, `suspect`, `again`; and the base URL of the endpoint that has the request's
stored response, None = not known."""
RateFields: TypeAlias = tuple[tuple[float, float, float] | None, tuple[float, float, float] | None]
"""See core.capacity.allowance.Rates."""
PlacedRest: TypeAlias = tuple[bool, bool, str | None, int, int, str | None, RateFields | None]
"""Of a placement: whether the request waited, or was placed as soon as it arrived; `asks_load` of the endpoint; an
explanation, if the client asked for one (`core.policies.explain.compact`); the leg (see InferenceRequest); of a second
leg, if both were placed, the endpoint of the first, else 0; `overflow` of the Ticket; `rates` of its flow."""
USUAL_PLACEMENT: Final[PlacedRest] = (False, False, None, WHOLE, 0, None, None)
ServedFields: TypeAlias = tuple[
    bool, bool, int, int, int, int, int, Usage | None, float, float | None, float,
]  # fmt: skip
"""Whether it stands for `Answered`, too, which was to leave at the same time, with `began` of that. Of a RequestRecord:
outcome (by its number), status, request_bytes, response_bytes, events, usage, queue_s, first_byte_at, ended_at."""
OUTCOMES: Final = tuple(Outcome)
OUTCOME_NUMBERS: Final = {outcome: number for number, outcome in enumerate(OUTCOMES)}


class Message(msgspec.Struct, array_like=True, gc=False):
    """What all messages are."""


# --- From a worker ----------------------------------------------------------------------------------------------------


class Hello(Message, tag=1):
    """The first message on a link."""

    index: int
    """0 to the number of workers less 1; a worker that is started again has the same."""
    pid: int


class Submit(Message, tag=2):
    """An attempt begins: see RequestRuntime.submit. What is as by default is not sent (`origins.Sending`)."""

    number: int
    request: InferenceRequest
    started_at: float
    origin: Origin | int
    """The number: of one that was sent on this link."""
    attempt: AttemptFields | None = None
    """None: the first one."""


class FirstByte(Message, tag=3):
    """See RequestRuntime.first_byte."""

    number: int


class ProgressMade(Message, tag=4):
    """See RequestRuntime.progress: of several requests, gathered for some milliseconds."""

    tokens: dict[int, int]
    """Tokens by the number of the request."""


class Close(Message, tag=5):
    """The attempt ended: see RequestRuntime.close."""

    number: int
    outcome: int
    usage: Usage | None
    timed_out: bool


class Answered(Message, tag=6):
    """See RequestRuntime.answered."""

    number: int
    outcome: int
    usage: Usage | None
    began: bool


class Failed(Message, tag=7):
    """An attempt failed, and the worker decided what follows: see RequestRuntime.after_failure."""

    number: int
    kind: str
    detail: str
    refused: bool
    earlier: tuple[str, ...]
    retry: bool
    outcome: int
    first_leg: bool
    """At the endpoint of the first leg, while both run."""
    retry_after_s: float | None = None
    """As the endpoint said."""


class Stores(Message, tag=8):
    """See RequestRuntime.stores."""

    number: int
    response_id: str


class LoadReported(Message, tag=9):
    """See RequestRuntime.report_load."""

    number: int
    report: LoadReport | None


class Ended(Message, tag=10):
    """A request is over, with its record. `number` is 0 if it was never submitted."""

    number: int
    method: str
    client: str
    started_at: float
    outcome: int
    trace_id: str | None
    """32 hexadecimal digits, if it is traced."""
    # From here on as in the record.
    id: str
    path: str
    route: str
    model: str | None
    alias: str | None
    stream: bool
    endpoint: str | None
    prefill: str | None
    prefill_s: float | None
    prefill_usage: Usage | None
    first_legs: tuple[tuple[str, str], ...]
    attempts: int
    status: int
    failed: tuple[tuple[str, str], ...]
    error: str | None
    request_bytes: int
    response_bytes: int
    events: int
    usage: Usage | None
    key: str | None
    flow: str | None
    queue_s: float
    placed_at: float | None
    first_byte_at: float | None
    ended_at: float
    tier: int = 1
    overflow: str | None = None
    fallback_from: str | None = None


class StillRunning(Message, tag=11):
    """A request that runs already, for a balancer process that is new: where, and whether its response has begun."""

    submit: Submit
    url: str
    began: bool
    told_tokens: int | None
    """Tokens of its response that a balancer process was told; None: none knew of the request."""


class DoubtModels(Message, tag=12):
    """See RequestRuntime.doubt_models."""

    uid: int


class RefreshModels(Message, tag=13):
    """See RequestRuntime.refresh_models; `Refreshed` is the reply."""

    uid: int
    call: int


class WorkerFigures(Message, tag=14):
    """A worker's figures, twice a second; `Pong` is the reply. Counts are since its start."""

    load: OwnLoad
    running: int = 0
    """Requests."""
    cpu_s: float = 0.0
    lags_s: tuple[float, ...] = ()
    """Delays of its event loop: each tick since the last figures."""
    rss_bytes: int | None = None
    internal_errors: int = 0
    dropped_lines: int = 0
    placed_alone: int = 0
    """Requests that it placed while there was no balancer process."""
    stale: tuple[str, ...] = ()
    """Files that it cannot read again: see control.admin.key_files."""


class Adopted(Message, tag=15):
    """The reply to `Settle`: its settings are in force in this worker, or it keeps its old ones and has logged why."""


class Told(Message, tag=17):
    """All requests that run were said."""


class ServedAtOnce(Message, tag=16):
    """A request is over that its first attempt served. It stands for `Ended`, and has only what the balancer process
    does not know from `Submit` and its own placement. Nearly all requests end so.
    """

    number: int
    what: ServedFields


# --- To a worker ------------------------------------------------------------------------------------------------------


class Welcome(Message, tag=32):
    """The balancer process is ready: from now on it decides. `Members` and `Models` precede it."""

    block_bytes: int | None


class Placed(Message, tag=33):
    """A request has its place."""

    number: int
    uid: int
    placed_at: float
    prompt_tokens: float
    """Tokens of the prompt, as predicted; 0 = not predicted."""
    rest: PlacedRest | None = None
    """None: as in most requests, and not sent then (see `contents.placed`)."""


class Refused(Message, tag=34):
    """A request gets no place."""

    number: int
    outcome: int
    retry_after_s: float | None
    refusal: Fields | None
    """See core.queue.flow.Refusal."""
    rates: RateFields | None = None
    """Of its flow."""


class Waits(Message, tag=43):
    """A request waits, of a flow that has limits per minute."""

    number: int
    rates: RateFields


class Stranded(Message, tag=35):
    """See RequestRuntime.is_stranded."""

    number: int
    leaves: bool = False
    """Its response has begun, and its endpoint drains."""


class Member(Message):
    """One endpoint of the set: what a worker needs of it."""

    uid: int
    name: str
    base_url: str
    rank: int | None
    weight: float
    api_key: str | None
    tls: Fields | None
    proxy: Fields | None
    health: str
    draining: bool
    handover: Fields
    """See core.engines.handover; the role by its name."""
    dormant: str = ""
    """See EndpointState."""
    tier: int = 1
    model: str | None = None
    """Its own name of the model."""
    forward_headers: tuple[str, ...] = ()
    """See EndpointSpec."""
    process: int = 0
    """See EndpointState."""
    engine: str = "auto"
    client_keep_alive: bool = False
    bounds: Fields | None = None
    """Of these see EndpointSpec."""


class Members(Message, tag=36):
    """What is new of members."""

    members: list[Member]
    """Members that changed, or are new."""
    order: list[int] | None = None
    """The uids of the complete set, in the order of the settings; None = the same as before."""
    more: bool = False
    """It is to be taken together with the next one: there are too many for one message."""


class Card(Message):
    """See core.requests.openai.ModelCard."""

    id: str
    raw: bytes
    parent: str | None = None
    context_tokens: int | None = None
    context_is_of_prompt: bool = False
    engine: str | None = None


class Models(Message, tag=37):
    """What endpoints list, all of them the same: ranks of one server."""

    uids: list[int]
    cards: list[Card] | None
    """None = they have no such list."""
    gone: list[str] = []
    """Models that are not in the list any more, by their ids."""
    adds: bool = False
    """The cards are added to those that were told before; False = they begin a list."""
    more: bool = False
    """The list goes on in the next message."""


class Remember(Message, tag=38):
    """Another worker's request made an endpoint store a response: see core.queue.stored_responses."""

    response_id: str
    uid: int
    request: InferenceRequest


class Refreshed(Message, tag=39):
    """An endpoint was asked for its models."""

    call: int


class Settle(Message, tag=40):
    """Other settings, as the text of a settings file, from now on; and the block size of their policy. `Adopted` is the
    reply.
    """

    text: str
    block_bytes: int | None


class LogLevel(Message, tag=42):
    """Log from this level on, until the next `Settle`."""

    level: str


class Pong(Message, tag=41):
    """The balancer process lives."""


FromWorker: TypeAlias = (
    Hello
    | Submit
    | FirstByte
    | ProgressMade
    | Close
    | Answered
    | Failed
    | Stores
    | LoadReported
    | Ended
    | StillRunning
    | DoubtModels
    | RefreshModels
    | WorkerFigures
    | Adopted
    | ServedAtOnce
    | Told
)
ToWorker: TypeAlias = (
    Welcome | Placed | Refused | Waits | Stranded | Members | Models | Remember | Refreshed | Settle | LogLevel | Pong
)
