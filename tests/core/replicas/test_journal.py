# SPDX-License-Identifier: Apache-2.0
"""What a replica tells: every event once and in order, in batches of a bounded size; everything again if it must."""

from __future__ import annotations

import pytest

from lbproxy.config.sections.flows import FlowsSettings
from lbproxy.config.sections.routing import AdmissionSettings
from lbproxy.core.queue.stored_responses import StoredResponse
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.replicas import journal as module
from lbproxy.core.replicas.batches import (
    MAX_BATCH_BYTES,
    MAX_NAME_CHARS,
    MAX_SIZE,
    Batch,
    RequestBegan,
    RequestEnded,
    RequestPlaced,
    ResponseStored,
    Used,
    decode,
    encode,
    unpack_keys,
)
from lbproxy.core.replicas.journal import EVENTS_IN_BATCH, KEYS_IN_BATCH, MAX_NOTES
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import Usage
from tests.support.compiled import interpreted
from tests.support.prompts import chained
from tests.support.sharing import Replica, ask, taken


def started(**options: object) -> Replica:
    """One whose first batch was taken, and that places everything at once."""
    replica = Replica("me", 1, **{"admission": AdmissionSettings(hold=False), **options})
    assert [batch.is_reset for batch in replica.tells(0.0)] == [True]
    return replica


def place(replica: Replica, count: int, now: float = 1.0, **request: object) -> list[Ticket]:
    return [replica.balancer.submit(ask(f"q{n}", **request), now=now) for n in range(count)]  # type: ignore[arg-type]


def events(batches: list[Batch]) -> list[str]:
    """Kinds and numbers."""
    return [
        f"{type(one).__name__} {one.response_id if isinstance(one, ResponseStored) else one.number}"
        for batch in batches
        for one in batch.events
        if not isinstance(one, Used)
    ]


# --- Events -----------------------------------------------------------------------------------------------------------


def test_the_life_of_a_request_is_told_with_ages() -> None:
    replica = started()
    (ticket,) = place(replica, 1, now=1.0, max_tokens=7, session="s", flow="f", media_tokens=2)
    replica.balancer.first_byte(ticket, now=1.5)
    replica.balancer.progress(ticket, 5, now=1.75)
    replica.balancer.close(ticket, Outcome.COMPLETED, now=2.0, usage=Usage(700, 256, 9))
    (batch,) = replica.tells(3.0)
    url = replica.endpoints[0].base_url
    assert (batch.replica, batch.number, batch.block_bytes, batch.urls) == ("me", 2, 1024, [url])
    placed, began, ended = batch.events
    assert isinstance(placed, RequestPlaced)
    assert unpack_keys(placed.keys) == chained((1, 2, 3))
    told = (placed.age_ms, placed.prompt_bytes, placed.model, placed.session, placed.flow, placed.max_tokens)
    assert told == (2000.0, 3072, "m", "s", "f", 7)
    assert (placed.stream, placed.media_tokens, placed.binary, placed.open_ended) == (True, 2, False, False)
    assert began == RequestBegan(1, 1500.0)
    assert ended == RequestEnded(1, 1000.0, True, 5, (700, 256, 9), 709.0)
    assert decode(encode(batch)) == batch
    assert not replica.journal.has_news
    assert replica.tells(4.0) == []


def test_an_empty_batch_is_made_if_it_is_wanted() -> None:
    journal = started().journal
    assert journal.take(1.0) is None
    batch = journal.take(2.0, even_empty=True)
    assert batch is not None
    assert (batch.number, batch.events, batch.is_reset) == (2, [], False)


def test_a_request_that_fails_is_told_as_not_completed_and_without_usage() -> None:
    replica = started()
    (ticket,) = place(replica, 1)
    replica.balancer.close(ticket, Outcome.UPSTREAM_BROKE, now=1.0)
    (batch,) = replica.tells(1.0)
    assert batch.events[-1] == RequestEnded(1, 0.0, False, 0, None)


def test_a_request_that_is_refused_or_waits_is_not_told() -> None:
    replica = started(flows=FlowsSettings.model_validate({"default": {"in_flight": 1}}))
    _, parked = place(replica, 2)
    replica.balancer.close(parked, Outcome.CLIENT_CLOSED, now=1.0)
    assert events(replica.tells(1.0)) == ["RequestPlaced 1"]


def test_news_are_signalled_once_until_they_are_taken() -> None:
    replica = started()
    calls: list[int] = []
    replica.journal.on_news = lambda: calls.append(1)
    tickets = place(replica, 3)
    assert len(calls) == 1
    replica.tells(1.0)
    replica.balancer.first_byte(tickets[0], now=1.0)
    replica.balancer.first_byte(tickets[1], now=1.0)
    assert len(calls) == 2
    replica.tells(1.0)
    for ticket in tickets:
        replica.balancer.close(ticket, Outcome.COMPLETED, now=1.0)
    assert len(calls) == 3


def test_names_and_counts_are_cut_to_what_others_accept() -> None:
    replica = started()
    huge = ask(session="s" * 5000, max_tokens=MAX_SIZE + 9, media_tokens=-3, prompt_bytes=MAX_SIZE + 5)
    ticket = replica.balancer.submit(huge, now=1.0)
    replica.balancer.close(ticket, Outcome.COMPLETED, now=1.0, usage=Usage(-5, None, MAX_SIZE + 1))
    (batch,) = replica.tells(1.0)
    placed, ended = decode(encode(batch)).events
    assert isinstance(placed, RequestPlaced)
    assert isinstance(ended, RequestEnded)
    assert (len(placed.session or ""), placed.max_tokens, placed.media_tokens) == (MAX_NAME_CHARS, MAX_SIZE, 0)
    assert ended.usage == (0, None, MAX_SIZE)


def test_clocks_that_went_back_make_no_negative_age() -> None:
    replica = started()
    place(replica, 1, now=5.0)
    (batch,) = replica.tells(4.0)
    assert decode(encode(batch)).events[0].age_ms == 0.0  # type: ignore[union-attr]


# --- Batches ----------------------------------------------------------------------------------------------------------


def test_many_events_are_split_into_batches_in_order() -> None:
    replica = started()
    place(replica, EVENTS_IN_BATCH + 10, blocks=(), now=1.0)
    batches = replica.tells(1.0)
    assert [len(batch.events) for batch in batches] == [EVENTS_IN_BATCH, 10]
    assert [batch.number for batch in batches] == [2, 3]
    assert events(batches) == [f"RequestPlaced {n}" for n in range(1, EVENTS_IN_BATCH + 11)]


def test_many_keys_are_split_into_batches() -> None:
    replica = started()
    keys = tuple(range(5000))
    for n in range(8):
        replica.balancer.submit(ask(f"q{n}")._replace(block_keys=keys, prompt_bytes=1024 * 5000), now=1.0)
    batches = replica.tells(1.0)
    assert [len(batch.events) for batch in batches] == [4, 4], f"{KEYS_IN_BATCH} keys, and one prompt more at most"


def test_the_longest_names_make_no_batch_that_is_too_long() -> None:
    replica = started()
    place(replica, EVENTS_IN_BATCH, session="\U0001f600" * 2000, flow="\U0001f600" * 2000)
    batches = replica.tells(1.0)
    assert sum(len(batch.events) for batch in batches) == EVENTS_IN_BATCH
    assert max(len(encode(batch)) for batch in batches) < MAX_BATCH_BYTES / 10


@interpreted  # it patches a constant
def test_events_that_nobody_takes_are_replaced_by_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NOTES", 100)
    replica = started()
    for n in range(1000):
        ticket = replica.balancer.submit(ask(f"q{n}", (n % 5,)), now=1.0)
        replica.balancer.first_byte(ticket, now=1.0)
        if n % 100:
            replica.balancer.close(ticket, Outcome.COMPLETED, now=1.0)
        assert len(replica.journal._notes) <= 102
    first, *others = replica.tells(2.0)
    assert first.is_reset
    assert not others
    running = [number for number in range(1, 1001) if (number - 1) % 100 == 0]
    assert events([first]) == [f"{kind} {number}" for number in running for kind in ("RequestPlaced", "RequestBegan")]
    assert MAX_NOTES > 100, "the limit is read at each placement"


# --- Resets -----------------------------------------------------------------------------------------------------------


def test_a_reset_tells_what_is_in_flight_and_nothing_else() -> None:
    replica = started()
    tickets = place(replica, 3)
    replica.balancer.first_byte(tickets[1], now=1.25)
    replica.balancer.close(tickets[0], Outcome.COMPLETED, now=1.5)
    replica.journal.reset_due = True
    (batch,) = replica.tells(2.0)
    assert batch.is_reset
    assert batch.untold == 0
    assert events([batch]) == ["RequestPlaced 2", "RequestBegan 2", "RequestPlaced 3"]
    assert [one.age_ms for one in batch.events if isinstance(one, RequestPlaced | RequestBegan)] == [
        1000.0,
        750.0,
        1000.0,
    ]


def test_a_reset_over_several_batches_says_how_much_is_missing() -> None:
    replica = started()
    place(replica, 2 * EVENTS_IN_BATCH + 1, blocks=())
    replica.tells(1.0)
    replica.journal.reset_due = True
    batches = replica.tells(2.0)
    assert [batch.is_reset for batch in batches] == [True, False, False]
    assert [batch.untold for batch in batches] == [EVENTS_IN_BATCH + 1, 1, 0]


def test_a_ticket_that_ends_before_it_is_told_again_is_not_told_again() -> None:
    replica = started()
    tickets = place(replica, EVENTS_IN_BATCH + 2, blocks=())
    replica.tells(1.0)
    replica.journal.reset_due = True
    first = replica.journal.take(2.0)
    assert first is not None
    assert first.untold == 2
    replica.balancer.close(tickets[-1], Outcome.COMPLETED, now=2.0)
    replica.balancer.first_byte(tickets[-2], now=2.0)
    (late,) = place(replica, 1, now=2.0)
    last, again, one, beyond = EVENTS_IN_BATCH + 2, EVENTS_IN_BATCH + 1, tickets[0].shared_number, late.shared_number
    assert events(replica.tells(2.0)) == [
        *(f"RequestPlaced {again}", f"RequestBegan {again}"),
        *(f"RequestEnded {last}", f"RequestBegan {again}", f"RequestPlaced {beyond}"),
    ]
    assert one == 1


def test_all_tickets_that_were_untold_may_end() -> None:
    replica = started()
    tickets = place(replica, EVENTS_IN_BATCH + 1, blocks=())
    replica.tells(1.0)
    replica.journal.reset_due = True
    assert replica.journal.take(2.0) is not None
    replica.balancer.close(tickets[-1], Outcome.COMPLETED, now=2.0)
    (batch,) = replica.tells(2.0)
    assert (batch.untold, events([batch])) == (0, [f"RequestEnded {EVENTS_IN_BATCH + 1}"])


def test_who_is_asked_for_a_reset_is_told_once() -> None:
    replica = started()
    replica.journal.ask("b")
    replica.journal.ask("a")
    replica.journal.ask("b")
    (batch,) = replica.tells(1.0)
    assert batch.asks == ["a", "b"]
    assert replica.tells(1.0) == []


# --- Flows and stored responses ---------------------------------------------------------------------------------------


def limited(**flows: object) -> FlowsSettings:
    return FlowsSettings.model_validate(flows)


def test_use_of_flows_with_limits_is_told_when_it_changes() -> None:
    replica = started(flows=limited(named={"f": {"requests_per_minute": 60, "tokens_per_minute": 6000}}))
    (ticket,) = place(replica, 1, now=1.0, flow="f")
    place(replica, 1, now=1.0, flow="without")
    (batch,) = replica.tells(1.0)
    assert set(batch.flows) == {"f"}
    use = batch.flows["f"]
    assert (use.active, use.admitted, use.used_requests, use.used_tokens) == (1, 1, 1.0, 3072 / 4)
    replica.balancer.first_byte(ticket, now=1.5)
    (batch,) = replica.tells(1.5)
    assert batch.flows == {}
    replica.balancer.close(ticket, Outcome.COMPLETED, now=2.0)
    (batch,) = replica.tells(2.0)
    assert (batch.flows["f"].active, batch.flows["f"].admitted) == (0, 1)
    assert batch.flows["f"].used_requests == pytest.approx(0.0)


def test_use_is_told_if_requests_were_admitted_and_have_ended() -> None:
    replica = started(flows=limited(default={"requests_per_minute": 60}))
    replica.balancer._flows.of("anonymous", 1.0)
    replica.tells(1.0)
    for ticket in place(replica, 2):
        replica.balancer.close(ticket, Outcome.COMPLETED, now=1.0)
    (batch,) = replica.tells(1.0)
    assert (batch.flows["anonymous"].active, batch.flows["anonymous"].admitted) == (0, 2)


def test_use_is_told_although_no_event_is() -> None:
    replica = started(flows=limited(default={"in_flight": 2}))
    place(replica, 2)
    replica.tells(1.0)
    replica.journal._told.clear()
    (batch,) = replica.tells(1.0)
    assert batch.flows["anonymous"].active == 2


def test_a_reset_tells_the_use_of_all_flows() -> None:
    replica = started(flows=limited(default={"in_flight": 20}))
    place(replica, 1, flow="a")
    place(replica, 2, flow="b")
    replica.tells(1.0)
    replica.journal.reset_due = True
    (batch,) = replica.tells(2.0)
    assert {name: use.active for name, use in batch.flows.items()} == {"a": 1, "b": 2}


@interpreted  # it patches a constant
def test_flows_that_were_forgotten_are_not_remembered_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lbproxy.core.queue.flows.MAX_FLOWS", 4)
    replica = started(flows=limited(default={"in_flight": 20}))
    for n in range(50):
        now = 1.0 + 100.0 * n
        for ticket in place(replica, 1, now=now, flow=f"flow-{n}"):
            replica.balancer.close(ticket, Outcome.COMPLETED, now=now)
        replica.tells(now)
    assert len(replica.journal._told) <= 5


def test_stored_responses_are_told_with_their_endpoint() -> None:
    replica = started()
    uid = replica.endpoints[0].uid
    replica.balancer.stored_responses.remember("resp-1", uid, ask(), now=1.0)
    (batch,) = replica.tells(1.0)
    (stored,) = batch.events
    assert isinstance(stored, ResponseStored)
    assert (stored.response_id, batch.urls[stored.endpoint], stored.prompt_bytes) == (
        "resp-1",
        replica.endpoints[0].base_url,
        3072,
    )
    assert unpack_keys(stored.keys) == chained((1, 2, 3))


def test_stored_responses_of_an_endpoint_that_left_are_not_told() -> None:
    replica = started()
    replica.balancer.stored_responses.remember("resp-1", replica.endpoints[0].uid, ask(), now=1.0)
    replica.balancer.set_endpoints([], now=1.0)
    assert events(replica.tells(1.0)) == []


@interpreted  # it patches a constant
def test_stored_responses_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NOTES", 10)
    replica = started()
    stored = StoredResponse(replica.endpoints[0].uid, 9.0, 0, ())
    for n in range(30):
        replica.journal.stored(f"resp-{n}", stored)
    replica.journal.stored("x" * (MAX_NAME_CHARS + 1), stored)
    assert events(replica.tells(1.0)) == [f"ResponseStored resp-{n}" for n in range(10)]


def test_an_id_that_others_would_refuse_is_not_told() -> None:
    replica = started()
    replica.journal.stored("x" * (MAX_NAME_CHARS + 1), StoredResponse(replica.endpoints[0].uid, 9.0, 0, ()))
    assert events(replica.tells(1.0)) == []


def test_what_was_taken_is_let_go() -> None:
    """Memory is that of the requests in flight, whatever was told before."""
    replica = started()
    for n in range(300):
        (ticket,) = place(replica, 1, now=float(n))
        replica.balancer.close(ticket, Outcome.COMPLETED, now=float(n))
        taken(replica.journal, float(n))
    journal = replica.journal
    assert not (journal._running)
    assert not (journal._notes)
    assert not (journal._again)
    assert not (journal._stored)
