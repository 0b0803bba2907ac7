# SPDX-License-Identifier: Apache-2.0
"""A worker's runtime: what it reports, what it does alone, and what a new balancer process is told."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from lbproxy.config.parse import parse
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointUid
from lbproxy.core.endpoints.state import WHOLE_SERVER
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage
from lbproxy.core.requests.retry import FailureKind, UpstreamError
from lbproxy.workers import messages as m
from lbproxy.workers.contents import member
from lbproxy.workers.remote import RemoteRuntime
from tests.support.aio import run, until
from tests.support.links import End, pair
from tests.support.pool import card

SETTINGS = parse("endpoints: [{url: 'http://a:1'}]", environ={})
URLS = ("http://a:1", "http://b:1")
NOBODY = frozenset[EndpointUid]()


def members(*health: str, first_uid: int = 1, draining: tuple[int, ...] = ()) -> m.Members:
    """The endpoints of URLS, with these healths."""
    return m.Members(
        [
            member(
                Endpoint(uid=EndpointUid(first_uid + n), name=f"e{n + 1}", base_url=URLS[n]),
                one,
                WHOLE_SERVER,
                draining=n in draining,
            )
            for n, one in enumerate(health)
        ],
        [first_uid + n for n in range(len(health))],
    )


def models(*names: str | None, first_uid: int = 1) -> list[m.Message]:
    """Each endpoint lists one model; None: it has no list."""
    return [
        m.Models([first_uid + n], None if name is None else [m.Card(name, b"{}", None)]) for n, name in enumerate(names)
    ]


def placed(number: int, uid: int) -> m.Placed:
    return m.Placed(number, uid, 0.0, 0.0)


class Worker:
    """A runtime and the balancer process's end of its link, played by the test."""

    def __init__(self) -> None:
        self.runtime = RemoteRuntime(SETTINGS, random.Random(1))
        self.settled: list[Ticket] = []
        self.there: End | None = None

    @asynccontextmanager
    async def linked(self) -> AsyncIterator[End]:
        """A link; nothing was said yet. At the end it is lost."""
        async with pair(End(m.ToWorker, self.runtime.received, self.runtime.detach)) as (here, there):
            self.runtime.attach(here.link)
            self.there = there
            yield there
            there.link.abort()
            await until(lambda: self.runtime.alone and self.runtime.link is None)

    @asynccontextmanager
    async def welcomed(self, *, first_uid: int = 1) -> AsyncIterator[End]:
        """A balancer process that decides, with both endpoints up and serving `m`."""
        async with self.linked() as there:
            await self.told(members("up", "up", first_uid=first_uid), *models("m", "m", first_uid=first_uid))
            await self.told(m.Welcome(256))
            yield there

    async def told(self, *sent: m.Message) -> None:
        """The balancer process says this."""
        assert self.there is not None
        link, here = self.there.link, self.runtime.link
        assert here is not None
        arrived = here.arrived
        for message in sent:
            link.send(message)
        await until(lambda: here.arrived == arrived + len(sent))

    async def heard(self, kind: type[m.Message]) -> list[m.Message]:
        """What the balancer process heard so far, of one kind."""
        assert self.there is not None
        here, there = self.runtime.link, self.there
        assert here is not None
        await asyncio.sleep(0)
        await until(lambda: there.link.arrived == here.sent)
        return [one for one in there.arrived if type(one) is kind]

    def submit(
        self, model: str = "m", avoid: frozenset[EndpointUid] = NOBODY, record: RequestRecord | None = None
    ) -> Ticket:
        record = record or a_record()
        return self.runtime.submit(InferenceRequest("r", model), record, avoid, self.settled.append)


def a_record() -> RequestRecord:
    return RequestRecord("r", "POST", "/v1/chat/completions", "127.0.0.1", 0.0)


def endpoint_of(ticket: Ticket) -> str:
    return ticket.placed_state.endpoint.name


# --- With a balancer process ------------------------------------------------------------------------------------------


def test_a_request_waits_for_the_balancer_process_and_is_placed_where_it_says() -> None:
    async def body() -> None:
        worker = Worker()
        async with worker.welcomed() as there:
            ticket = worker.submit()
            assert ticket.state is TicketState.WAITING
            (submitted,) = await worker.heard(m.Submit)
            assert isinstance(submitted, m.Submit)
            assert not worker.settled, "never in the call itself"
            await worker.told(m.Placed(submitted.number, 2, 1.5, 7.0, (False, True, None, 0, 0, None, None)))
            assert worker.settled == [ticket]
            assert (endpoint_of(ticket), ticket.placed_at, ticket.predicted_prompt_tokens) == ("e2", 1.5, 7.0)
            assert ticket.placed_state.reported.asks_load
            assert ticket.submitted_at == ticket.placed_at, "it did not wait"
            worker.runtime.first_byte(ticket)
            worker.runtime.first_byte(ticket)
            worker.runtime.progress(ticket, 3)
            worker.runtime.close(ticket, Outcome.COMPLETED, Usage(1, 2, 3))
            worker.runtime.close(ticket, Outcome.CLIENT_CLOSED)
            number = submitted.number
            closed = m.Close(number, m.OUTCOME_NUMBERS[Outcome.COMPLETED], Usage(1, 2, 3), False)
            await worker.heard(m.Close)
            assert there.arrived[2:] == [m.FirstByte(number), m.ProgressMade({number: 3}), closed]
            assert worker.runtime.placed_alone == 0

    run(body())


def test_a_refusal_settles_and_what_arrives_later_is_dropped() -> None:
    async def body() -> None:
        worker = Worker()
        async with worker.welcomed():
            ticket = worker.submit()
            outcome = m.OUTCOME_NUMBERS[Outcome.SATURATED]
            await worker.told(m.Refused(ticket.number, outcome, 2.5, None), placed(ticket.number, 1))
            assert worker.settled == [ticket]
            assert (ticket.state, ticket.outcome) == (TicketState.CLOSED, Outcome.SATURATED)
            assert ticket.retry_after_s == 2.5
            assert ticket.placed_on is None

    run(body())


def test_a_request_that_was_closed_while_it_waited_is_not_placed() -> None:
    """Its client left; the messages cross."""

    async def body() -> None:
        worker = Worker()
        async with worker.welcomed():
            ticket = worker.submit()
            worker.runtime.close(ticket, Outcome.CLIENT_CLOSED)
            await worker.told(placed(ticket.number, 1))
            assert not worker.settled
            assert len(await worker.heard(m.Close)) == 1
            assert sum(one.in_flight for one in worker.runtime.known.members()) == 0

    run(body())


def test_an_unknown_endpoint_costs_no_other_message(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        worker = Worker()
        async with worker.welcomed():
            one, two = worker.submit(), worker.submit()
            await worker.told(placed(one.number, 99), placed(two.number, 1))
            assert worker.settled == [two]
            worker.runtime.close(one, Outcome.CLIENT_CLOSED)

    run(body())
    assert "endpoint 99" in caplog.text


def test_stranded_requests_are_moved_until_their_first_byte() -> None:
    async def body() -> None:
        worker = Worker()
        moved: list[bool] = []
        async with worker.welcomed():
            ticket, begun = worker.submit(), worker.submit()
            worker.runtime.move_stranded = lambda: moved.append(worker.runtime.is_stranded(ticket))
            for one in (ticket, begun):
                await worker.told(placed(one.number, 1))
            worker.runtime.first_byte(begun)
            await worker.told(m.Stranded(ticket.number), m.Stranded(begun.number), m.Stranded(999))
            await until(lambda: moved)
            assert moved == [True], "all at once"
            assert not worker.runtime.is_stranded(begun)
            worker.runtime.first_byte(ticket)
            assert not worker.runtime.is_stranded(ticket)

    run(body())


def test_a_failure_is_judged_here_and_reported() -> None:
    """By what is known of the other endpoints, with the budget of this worker."""

    async def body() -> None:
        worker = Worker()
        async with worker.welcomed():
            ticket = worker.submit()
            await worker.told(placed(ticket.number, 1))
            verdict = worker.runtime.after_failure(ticket, UpstreamError(FailureKind.CONNECT, "no", refused=True), [])
            assert verdict.retry
            (failed,) = await worker.heard(m.Failed)
            assert isinstance(failed, m.Failed)
            assert (failed.kind, failed.refused, failed.retry) == (FailureKind.CONNECT.value, True, True)
            await worker.told(members("up", "down"))
            verdict = worker.runtime.after_failure(ticket, UpstreamError(FailureKind.RESET, "no"), [])
            assert not verdict.retry, "no other endpoint is up"

    run(body())


def test_an_endpoint_is_asked_for_its_models_by_the_balancer_process() -> None:
    async def body() -> None:
        worker = Worker()
        async with worker.welcomed():
            asked = asyncio.ensure_future(worker.runtime.refresh_models(EndpointUid(2)))
            await asyncio.sleep(0)
            (call,) = await worker.heard(m.RefreshModels)
            assert isinstance(call, m.RefreshModels)
            assert (call.uid, asked.done()) == (2, False)
            await worker.told(m.Refreshed(call.call))
            await asked
            lost = asyncio.ensure_future(worker.runtime.refresh_models(EndpointUid(2)))
            await asyncio.sleep(0)
        await lost  # the link's end ends it

    run(body())


# --- Alone ------------------------------------------------------------------------------------------------------------


def test_before_the_first_welcome_nothing_is_known() -> None:
    async def body() -> None:
        worker = Worker()
        assert worker.runtime.alone
        assert not worker.runtime.any_up()
        ticket = worker.submit()
        assert (ticket.state, ticket.outcome) == (TicketState.CLOSED, Outcome.NO_ENDPOINTS)

    run(body())


def test_without_a_balancer_process_the_fewest_in_flight_decide() -> None:
    async def body() -> None:
        worker = Worker()
        async with worker.welcomed():
            pass
        tickets = [worker.submit() for _ in range(4)]
        assert sorted(endpoint_of(one) for one in tickets) == ["e1", "e1", "e2", "e2"]
        assert not worker.settled, "placed in the call: there is no callback"
        assert worker.runtime.placed_alone == 4
        unknown = worker.submit(model="unknown")
        assert unknown.outcome is Outcome.MODEL_NOT_FOUND
        avoiding = worker.submit(avoid=frozenset({EndpointUid(1)}))
        assert endpoint_of(avoiding) == "e2"

    run(body())


def test_a_prompt_that_was_too_long_goes_to_no_other_short_server_while_alone() -> None:
    async def body() -> None:
        worker = Worker()
        async with worker.welcomed():
            pass
        short, long = EndpointUid(1), EndpointUid(2)
        for uid, length in ((short, 8192), (long, 32_768)):
            worker.runtime.known.list_models([uid], [replace(card("m"), context_tokens=length)])
        (at,) = [one for one in (worker.submit(), worker.submit()) if endpoint_of(one) == "e1"]
        assert worker.runtime.takes_longer(at)
        assert worker.runtime.as_short(at) == {short}
        for _ in range(4):
            ticket = worker.submit(avoid=worker.runtime.as_short(at))
            assert endpoint_of(ticket) == "e2"
        assert worker.runtime.as_short(ticket) == {short, long}
        assert not worker.runtime.takes_longer(ticket)

    run(body())


def test_an_endpoint_that_failed_is_avoided_while_alone() -> None:
    async def body() -> None:
        worker = Worker()
        async with worker.welcomed():
            pass
        ticket = worker.submit()
        failed = endpoint_of(ticket)
        verdict = worker.runtime.after_failure(ticket, UpstreamError(FailureKind.CONNECT, "no"), [])
        worker.runtime.close(ticket, Outcome.CONNECT_FAILED)
        assert verdict.retry
        assert {endpoint_of(worker.submit()) for _ in range(4)} == {"e1", "e2"} - {failed}

    run(body())


def test_endpoints_that_are_down_or_draining_get_nothing_while_alone() -> None:
    async def body() -> None:
        worker = Worker()
        async with worker.welcomed():
            await worker.told(members("up", "up", draining=(0,)))
        assert {endpoint_of(worker.submit()) for _ in range(3)} == {"e2"}

    run(body())


def test_requests_that_wait_are_placed_when_the_balancer_process_is_lost() -> None:
    """No request fails because it died."""

    async def body() -> None:
        worker = Worker()
        async with worker.welcomed():
            ticket, left = worker.submit(), worker.submit()
            worker.runtime.close(left, Outcome.CLIENT_CLOSED)
        await until(lambda: worker.settled)
        assert worker.settled == [ticket]
        assert ticket.state is TicketState.PLACED
        assert worker.runtime.placed_alone == 1

    run(body())


# --- A new balancer process -------------------------------------------------------------------------------------------


def test_a_new_balancer_process_is_told_what_runs_and_what_ended() -> None:
    """Its endpoints have other uids."""

    async def body() -> None:
        worker = Worker()
        async with worker.welcomed():
            begun, quiet = worker.submit(), worker.submit()
            for ticket, uid in ((begun, 1), (quiet, 2)):
                await worker.told(placed(ticket.number, uid))
            worker.runtime.first_byte(begun)
        alone = worker.submit()
        worker.runtime.close(alone, Outcome.COMPLETED)
        ended = a_record()
        worker.runtime.emit(ended)
        async with worker.linked() as there:
            waiting = worker.submit()
            assert waiting.state is TicketState.PLACED, "it did not say yet that it decides"
            await worker.told(members("up", "up", first_uid=101), *models("m", "m", first_uid=101))
            assert not there.arrived, "it is told nothing before that"
            await worker.told(m.Welcome(None))
            running = {
                one.submit.number: one for one in await worker.heard(m.StillRunning) if isinstance(one, m.StillRunning)
            }
            assert set(running) == {begun.number, quiet.number, waiting.number}
            assert (running[begun.number].url, running[begun.number].began) == (URLS[0], True)
            assert (running[quiet.number].url, running[quiet.number].began) == (URLS[1], False)
            assert [one.id for one in await worker.heard(m.Ended) if isinstance(one, m.Ended)] == ["r"]
            assert worker.runtime.block_bytes is None
            assert begun.placed_state.endpoint.uid == 101, "the same endpoint, under its new uid"
            assert worker.submit().state is TicketState.WAITING

    run(body())


def test_a_plain_request_ends_with_one_message_if_it_ends_in_one_turn() -> None:
    """Else with two, and so does one whose record says something else than its attempt."""

    async def body() -> None:
        worker = Worker()
        async with worker.welcomed() as there:
            records = [plain_record_of(worker) for _ in range(4)]
            for ticket, _ in records:
                await worker.told(placed(ticket.number, 1))
            (at_once, one), (later, two), (other, three), (traced, four) = records
            worker.runtime.answered(at_once, Outcome.COMPLETED, one.usage, began=True, now=1.0)
            worker.runtime.emit(one)
            worker.runtime.answered(later, Outcome.COMPLETED, two.usage, began=False, now=1.0)
            await worker.heard(m.ServedAtOnce)
            worker.runtime.emit(two)
            worker.runtime.answered(other, Outcome.COMPLETED, three.usage, began=False, now=1.0)
            three.outcome = Outcome.CLIENT_CLOSED
            worker.runtime.emit(three)
            worker.runtime.answered(traced, Outcome.COMPLETED, four.usage, began=False, now=1.0)
            four.error = "why"
            worker.runtime.emit(four)
            await worker.heard(m.Ended)
            ends = [one for one in there.arrived if not isinstance(one, (m.Submit, m.Told))]
            kinds = [type(one) for one in ends]
            assert kinds == [
                m.ServedAtOnce,
                m.Answered,
                m.ServedAtOnce,
                m.Answered,
                m.ServedAtOnce,
                m.Answered,
                m.Ended,
            ]
            first = ends[0]
            assert isinstance(first, m.ServedAtOnce)
            assert (first.number, *first.what[:2]) == (at_once.number, True, True)

    run(body())


def plain_record_of(worker: Worker) -> tuple[Ticket, RequestRecord]:
    """A request that is submitted, and what its record will be."""
    record = a_record()
    ticket = worker.submit(record=record)
    record.attempts, record.endpoint, record.status = 1, "e1", 200
    record.outcome, record.usage = Outcome.COMPLETED, Usage(10, None, 5)
    return ticket, record


def test_a_balancer_process_that_placed_a_request_not_itself_gets_its_whole_record() -> None:
    """It may not know the request: it had no open ticket when the process began, but no record yet either."""

    async def body() -> None:
        worker = Worker()
        async with worker.welcomed():
            ticket, record = plain_record_of(worker)
            await worker.told(placed(ticket.number, 1))
        worker.runtime.close(ticket, Outcome.COMPLETED, record.usage)
        async with worker.welcomed(first_uid=101) as there:
            worker.runtime.emit(record)
            await worker.heard(m.Ended)
            assert [type(one) for one in there.arrived if not isinstance(one, (m.StillRunning, m.Told))] == [m.Ended]
            again, record = plain_record_of(worker)
            await worker.told(placed(again.number, 101))
            worker.runtime.close(again, Outcome.COMPLETED, record.usage)
            worker.runtime.emit(record)
            assert len(await worker.heard(m.ServedAtOnce)) == 1

    run(body())


def test_a_request_that_waits_when_another_decides_is_submitted_there() -> None:
    """A link that is lost and there again within one turn of the loop."""

    async def body() -> None:
        worker = Worker()
        async with worker.welcomed(), pair() as (here, there):
            ticket = worker.submit()
            worker.runtime.detach()
            worker.runtime.attach(here.link)
            worker.runtime.received([m.Welcome(None)])
            await until(lambda: there.arrived)
            submitted, told = there.arrived
            assert isinstance(told, m.Told)
            assert isinstance(submitted, m.Submit)
            assert submitted.number == ticket.number
            assert ticket.state is TicketState.WAITING
            worker.runtime.detach()

    run(body())


def test_a_stored_response_keeps_its_owner_over_a_new_balancer_process() -> None:
    async def body() -> None:
        worker = Worker()
        request = InferenceRequest("r", "m", stores=True)
        async with worker.welcomed():
            ticket = worker.runtime.submit(request, a_record(), NOBODY, worker.settled.append)
            await worker.told(placed(ticket.number, 2))
            worker.runtime.stores(ticket, "resp_1")
            assert await worker.heard(m.Stores) == [m.Stores(ticket.number, "resp_1")]
            await worker.told(m.Remember("resp_2", 1, request))
        following = InferenceRequest("r", "m", response_id="resp_1")
        ticket = worker.runtime.submit(following, a_record(), NOBODY, worker.settled.append)
        assert endpoint_of(ticket) == "e2"
        async with worker.welcomed(first_uid=101):
            stored = [worker.runtime.stored(one) for one in ("resp_1", "resp_2")]
            assert [one.uid for one in stored if one is not None] == [102, 101]
            worker.runtime.submit(following, a_record(), NOBODY, worker.settled.append)
            submitted = (await worker.heard(m.Submit))[-1]
            assert isinstance(submitted, m.Submit)
            assert submitted.attempt is not None
            assert submitted.attempt[-1] == URLS[1], "the new one does not know"

    run(body())
