# SPDX-License-Identifier: Apache-2.0
"""Every message between the processes: what is read is what was sent, of the types that handlers expect."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import inf
from typing import Any, get_args

import msgspec
import pytest

from lbproxy.core.endpoints.credentials import ApiKey, ForwardProxy, Tls
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointUid
from lbproxy.core.endpoints.health import Health
from lbproxy.core.engines.handover import Handover, Role
from lbproxy.core.engines.orca import LoadReport
from lbproxy.core.observed.record import MAX_PATH_CHARS, RequestRecord
from lbproxy.core.observed.trace import Trace
from lbproxy.core.queue.flow import Refusal
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage
from lbproxy.driver.own_load import OwnLoad
from lbproxy.workers import messages as m
from lbproxy.workers.contents import (
    fill,
    fill_plain,
    is_plain,
    member,
    message_of,
    read_endpoint,
    read_handover,
    served,
)

REQUEST = InferenceRequest(
    "id-1",
    "org/model",
    stream=True,
    body_bytes=1 << 40,
    prompt_bytes=3,
    block_keys=(0, 2**64 - 1),
    max_tokens=7,
    priority=-3,
    session="s",
    explain=True,
    flow="someone",
    deadline=12.5,
    media_tokens=9,
    response_id="resp_1",
    stores=True,
    repeatable=False,
    binary=True,
    open_ended=True,
    fallback_after_s=inf,
    fallback_from="big",
)
USAGE = Usage(100, 64, 5, None)
SUBMIT = m.Submit(1, REQUEST, 1.25, ("POST", "/v1/é", "::1", "chat", "key", -1), ((1 << 32, 5), 5, True, "http://a:1"))
PLAIN = m.Submit(1, InferenceRequest("r", None), 0.0, 3)
ENDPOINT = Endpoint(
    uid=EndpointUid((1 << 32) + 3),
    name="e1",
    base_url="https://[::1]:8000/base",
    weight=2.5,
    api_key=ApiKey("secret"),
    tls=Tls("/ca.pem", False, "name"),
    proxy=ForwardProxy("proxy", 3128, ApiKey("Basic abc")),
)


HANDOVER = Handover(Role.PREFILL, "mooncake", 8999)


def record() -> RequestRecord:
    """One in which every field that travels has another value than at its beginning."""
    it = RequestRecord("id-1", "POST", "/v1/é", "::1", 1.25)
    it.route, it.model, it.alias, it.stream, it.endpoint, it.attempts = "chat", "m", "alias", True, "e1", 2
    it.status, it.outcome, it.failed, it.error = 200, Outcome.COMPLETED, (("e2", "upstream_reset"),), "why"
    it.request_bytes, it.response_bytes, it.events, it.usage = 1, 2, 3, USAGE
    it.key, it.flow, it.queue_s, it.placed_at, it.first_byte_at, it.ended_at = "k", "f", 0.5, 1.5, 1.75, 2.0
    it.number, it.fallback_from = 77, "big"
    it.prefill, it.prefill_s, it.prefill_usage = "e3", 0.125, Usage(7, 5, None)
    return it


def plain_record() -> RequestRecord:
    """The same of one that its first attempt served."""
    it = record()
    it.attempts, it.alias, it.error, it.failed, it.fallback_from = 1, None, None, (), None
    it.prefill = it.prefill_s = it.prefill_usage = None
    return it


MESSAGES: list[m.Message] = [
    m.Hello(0, 4194304),
    SUBMIT,
    PLAIN,
    m.FirstByte(2**40),
    m.ProgressMade({1: 0, 2**40: 3}),
    m.Close(1, m.OUTCOME_NUMBERS[Outcome.CLIENT_CLOSED], USAGE, timed_out=True),
    m.Close(1, 0, None, timed_out=False),
    m.Answered(1, 0, USAGE, began=True),
    m.Failed(1, "connect", "refused: [::1]:1", True, ("reset", "connect"), False, 3, True),
    m.Stores(1, "resp_1"),
    m.LoadReported(1, LoadReport(1.0, None, 0.5)),
    m.LoadReported(1, None),
    message_of(record()),
    served(plain_record(), None),
    served(plain_record(), m.Answered(77, 0, USAGE, began=True)),
    m.StillRunning(SUBMIT, "http://a:1", True, 7),
    m.StillRunning(SUBMIT, "http://a:1", False, None),
    m.DoubtModels(1),
    m.RefreshModels(1, 2),
    m.WorkerFigures(OwnLoad("memory", {"memory": 1}, {"limit": 2}, 9, 8, 6, 7, None, {"kept": 3}, 1, 3), 2, 0.5,
                    (0.1, 0.0), 5, 10, 11, 12, ("a",)),
    m.Adopted(),
    m.Welcome(None),
    m.Welcome(256),
    m.Placed(1, (1 << 32) + 1, 1.5, 100.25, (True, True, "e1: 1 ms", 2, 7, "wait", ((60.0, -1.5, 2.0), None))),
    m.Placed(1, 1, 1.5, 0.0),
    m.Refused(1, 2, 1.5, Refusal("f", "10 requests", None)),
    m.Refused(1, 2, None, None, (None, (60.0, -1.5, 2.0))),
    m.Waits(1, ((60.0, 1.5, 2.0), None)),
    m.Stranded(1),
    m.Members([member(ENDPOINT, Health.EJECTED.value, HANDOVER, draining=True)]),
    m.Members([], [3, 1], True),
    m.Told(),
    m.Models([1, 2], [m.Card("m", b'{"id":"m"}', None), m.Card("a", b"{}", "m")]),
    m.Models([1], None, ["x"], True, True),
    m.Remember("resp_1", 1, REQUEST),
    m.Refreshed(3),
    m.Settle("listen: 1\n", 256),
    m.LogLevel("debug"),
    m.Pong(),
]  # fmt: skip


def kinds(union: Any) -> Iterator[type[m.Message]]:
    yield from get_args(union)


def through(message: m.Message) -> m.Message:
    union: Any = m.FromWorker if type(message) in kinds(m.FromWorker) else m.ToWorker
    (read,) = msgspec.msgpack.Decoder(list[union]).decode(msgspec.msgpack.Encoder().encode([message]))
    assert isinstance(read, m.Message)
    return read


def tuples(value: object) -> object:
    """Sequences of any kind as tuples: fields that may have any type are read as lists."""
    return tuple(tuples(one) for one in value) if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_a_message_is_read_as_it_was_sent(message: m.Message) -> None:
    read = through(message)
    assert type(read) is type(message)
    for field in message.__struct_fields__:
        assert tuples(getattr(read, field)) == tuples(getattr(message, field)), field


def test_every_message_is_among_these() -> None:
    """A new one is to be added above."""
    assert {type(one) for one in MESSAGES} == {*kinds(m.FromWorker), *kinds(m.ToWorker)}


def test_tags_are_distinct_in_each_direction() -> None:
    for union in (m.FromWorker, m.ToWorker):
        tags = [one.__struct_config__.tag for one in kinds(union)]
        assert len(set(tags)) == len(tags)


def test_a_request_is_the_same_object_with_the_same_types() -> None:
    """Block keys are hashed again, and compared with those of other requests: lists would not do."""
    read = through(SUBMIT)
    assert isinstance(read, m.Submit)
    assert type(read.request) is InferenceRequest
    assert read.request == REQUEST
    assert [type(one) for one in read.request] == [type(one) for one in REQUEST]


def test_usages_and_refusals_are_read_as_such() -> None:
    close, refused = (
        through(m.Close(1, 0, USAGE, timed_out=False)),
        through(m.Refused(1, 2, 1.0, Refusal("f", "l", 2.0))),
    )
    assert isinstance(close, m.Close)
    assert isinstance(refused, m.Refused)
    assert type(close.usage) is Usage
    assert close.usage == USAGE
    assert refused.refusal is not None
    assert Refusal._make(refused.refusal) == Refusal("f", "l", 2.0)


def test_an_endpoint_has_all_that_a_request_to_it_needs() -> None:
    """Its credentials too, which nothing shows by accident."""
    read = through(m.Members([member(ENDPOINT, "up", HANDOVER, draining=False)]))
    assert isinstance(read, m.Members)
    endpoint = read_endpoint(read.members[0])
    assert endpoint == ENDPOINT
    assert read_handover(read.members[0]) == HANDOVER
    assert endpoint.api_key is not None
    assert endpoint.api_key.reveal() == "secret"
    assert endpoint.proxy is not None
    assert endpoint.proxy.credentials == ApiKey("Basic abc")
    assert type(endpoint.tls) is Tls


def test_a_record_arrives_complete_except_for_what_the_balancer_process_knows() -> None:
    read = through(message_of(record()))
    assert isinstance(read, m.Ended)
    begun = RequestRecord("id-1", "POST", "/v1/é", "::1", 1.25)
    begun.predicted_cached_tokens, begun.held_for = 64.0, "e2"
    filled, sent = fill(begun, read), record()
    assert (filled.predicted_cached_tokens, filled.held_for) == (64.0, "e2")
    there = [name for name in RequestRecord.__annotations__ if name not in OF_ONE_PROCESS]
    for name in (*there, "id", "method", "path", "client", "started_at"):
        assert tuples(getattr(filled, name)) == tuples(getattr(sent, name)), name
    assert isinstance(filled.usage, Usage)


def test_a_plain_record_arrives_complete_too() -> None:
    sent = plain_record()
    assert is_plain(sent)
    read = through(served(sent, None))
    assert isinstance(read, m.ServedAtOnce)
    assert (read.number, *read.what[:2]) == (77, False, False)
    begun = RequestRecord("id-1", "POST", "/v1/é", "::1", 1.25)
    begun.route, begun.model, begun.stream, begun.key, begun.flow = "chat", "m", True, "k", "f"  # by `Submit`
    begun.endpoint, begun.placed_at, begun.predicted_cached_tokens = sent.endpoint, sent.placed_at, 64.0  # by its place
    assert fill_plain(begun, read.what) is Outcome.COMPLETED
    assert begun.predicted_cached_tokens == 64.0
    there = [name for name in RequestRecord.__annotations__ if name not in OF_ONE_PROCESS]
    for name in (*there, "id", "method", "path", "client", "started_at"):
        assert tuples(getattr(begun, name)) == tuples(getattr(sent, name)), name
    assert isinstance(begun.usage, Usage)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attempts", 0),
        ("attempts", 2),
        ("error", "why"),
        ("trace", Trace(None, random.Random(1))),
        ("alias", "a"),
        ("prefill", "e3"),
        ("first_legs", (("e3", "failed"),)),
        ("tier", 2),
        ("overflow", "full"),
        ("failed", (("e2", "reset"),)),
        ("path", "/" * MAX_PATH_CHARS),
    ],
)
def test_a_record_with_anything_else_is_not_plain(field: str, value: object) -> None:
    sent = plain_record()
    setattr(sent, field, value)
    assert not is_plain(sent)


OF_ONE_PROCESS = {
    *("predicted_cached_tokens", "decision", "wait", "held_for", "full_by"),  # of the balancer process
    *("number", "explanation", "trace"),  # of the worker
}
