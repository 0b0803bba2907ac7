# SPDX-License-Identifier: Apache-2.0
"""The balancer process's end of the links: what a worker's messages do to the balancer, and what workers are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from lbproxy.core.engines.orca import LoadReport
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage
from lbproxy.core.requests.retry import FailureKind
from lbproxy.driver.own_load import OwnLoad
from lbproxy.driver.runtime import Runtime
from lbproxy.processes.plane import WorkerTotals
from lbproxy.workers import messages as m
from lbproxy.workers.origins import NOT_KEPT
from lbproxy.workers.server import Session, WorkerServer
from tests.support.aio import run, until
from tests.support.compiled import interpreted
from tests.support.links import End, connect
from tests.support.pool import MODEL, Pool, card, make_balancer, spec

Kind = TypeVar("Kind", bound=m.Message)
COMPLETED = m.OUTCOME_NUMBERS[Outcome.COMPLETED]


class Worker:
    """A worker's end of a link, played by the test."""

    def __init__(self, server: WorkerServer, session: Session) -> None:
        self.session = session
        self.end = End(m.ToWorker)
        self._server = server

    def heard(self, kind: type[Kind]) -> list[Kind]:
        return [one for one in self.end.arrived if isinstance(one, kind)]

    async def says(self, *sent: m.Message) -> None:
        """Send, and wait until it was handled and what follows arrived."""
        for message in sent:
            self.end.link.send(message)
        await self.settled()

    async def settled(self) -> None:
        """Wait until both sides know the same."""
        here, there = self.end.link, self.session.link
        for _ in range(3):  # what is sent at the end of a turn, and what that leads to
            await asyncio.sleep(0)
        await until(lambda: here.sent == there.arrived and there.sent == here.arrived)
        await asyncio.sleep(0)


class Balancing(Pool):
    """A pool, and the server of its workers."""

    def __init__(self, count: int) -> None:
        super().__init__(make_balancer(), [spec(n + 1) for n in range(count)])
        self.bring_up()
        self.server = WorkerServer(self.runtime)
        self.sinks.append(self.server)
        self.workers: list[Worker] = []

    async def worker(self, index: int = 0, pid: int | None = None) -> Worker:
        """Another worker that is linked, and said which one it is."""
        it = Worker(self.server, Session(self.server))
        await connect(it.end.link, it.session.link)
        self.workers.append(it)
        await it.says(m.Hello(index, 1000 + index if pid is None else pid))
        return it

    def in_flight(self) -> list[int]:
        return [one.in_flight for one in self.snapshots()]


@asynccontextmanager
async def balancing(count: int = 2) -> AsyncIterator[Balancing]:
    it = Balancing(count)
    it.server.ready()
    try:
        yield it
    finally:
        it.server.close()
        for worker in it.workers:
            worker.end.link.close()
        it.connections.close()
        await asyncio.sleep(0)


def submit(number: int, model: str = MODEL, *, avoid: tuple[int, ...] = (), again: bool = False) -> m.Submit:
    attempt = (avoid, None, again, None) if avoid or again else None
    origin = "POST", "/v1/x", "127.0.0.1", "chat", "key", NOT_KEPT
    return m.Submit(number, InferenceRequest(f"r{number}", model), 0.0, origin, attempt)


def ended(number: int, outcome: Outcome = Outcome.COMPLETED) -> m.Ended:
    told: tuple[Any, ...] = (number, "POST", "127.0.0.1", 0.0, m.OUTCOME_NUMBERS[outcome], None)
    told += (f"r{number}", "/v1/x", "chat", MODEL, None, False, "e1", None, None, None, (), 1, 200, (), None)
    told += (1, 2, 3, None, "key", "f", 0.0, 1.0, 2.0, 3.0)
    return m.Ended(*told)


# --- A worker joins ---------------------------------------------------------------------------------------------------


def test_a_worker_is_told_of_everything_before_it_is_welcomed() -> None:
    async def body() -> None:
        async with balancing() as it:
            it.runtime.report_models(it.endpoints[1].uid, None)
            it.runtime.drain(it.endpoints[1].uid)
            it.server.tell()
            worker = await it.worker()
            told = worker.end.arrived
            assert [type(one) for one in told] == [m.Members, m.Models, m.Models, m.Welcome]
            (members,) = worker.heard(m.Members)
            assert [(one.name, one.health, one.draining) for one in members.members] == [
                ("e1", "up", False),
                ("e2", "up", True),
            ]
            assert [None if one.cards is None else len(one.cards) for one in worker.heard(m.Models)] == [1, None]

    run(body())


def test_nobody_is_welcomed_before_this_process_is_ready() -> None:
    """A balancer process after another first looks at the endpoints: until then workers decide."""

    async def body() -> None:
        it = Balancing(1)
        early = await it.worker()
        assert not early.end.arrived
        it.server.ready()
        late = await it.worker(1)
        await early.settled()
        assert early.heard(m.Welcome)
        assert late.heard(m.Welcome)
        it.server.close()
        await asyncio.sleep(0)
        it.connections.close()

    run(body())


def test_workers_link_over_a_unix_socket(tmp_path: Path) -> None:
    async def body() -> None:
        it = Balancing(1)
        path = str(tmp_path / "balancer.sock")
        await it.server.listen(path)
        it.server.ready()
        end = End(m.ToWorker)
        await asyncio.get_running_loop().create_unix_connection(end.link.protocol, path)
        end.link.send(m.Hello(3, 77))
        await until(lambda: it.server.sessions and end.arrived)
        assert [(one.index, one.pid) for one in it.server.sessions] == [(3, 77)]
        it.server.close()
        await until(lambda: end.lost)
        it.connections.close()

    run(body())


# --- Requests ---------------------------------------------------------------------------------------------------------


def test_a_request_from_its_place_to_its_record() -> None:
    async def body() -> None:
        async with balancing(1) as it:
            worker = await it.worker()
            await worker.says(submit(7))
            (placed,) = worker.heard(m.Placed)
            assert (placed.number, placed.uid, placed.rest) == (7, it.endpoints[0].uid, None)
            assert it.in_flight() == [1]
            (running,) = it.server.running_records()
            assert (running.id, running.endpoint, running.attempts) == ("r7", "e1", 1)
            await worker.says(
                m.FirstByte(7), m.ProgressMade({7: 3, 8: 1}), m.Close(7, COMPLETED, Usage(10, 5, 3), False)
            )
            assert it.in_flight() == [0]
            assert not it.records.requests
            await worker.says(ended(7))
            (record,) = it.records.requests
            assert record is running
            assert (record.key, record.events, record.outcome) == ("key", 3, Outcome.COMPLETED)
            assert not list(it.server.running_records())

    run(body())


def served(number: int, *, closes: bool) -> m.ServedAtOnce:
    return m.ServedAtOnce(number, (closes, False, COMPLETED, 200, 1, 2, 3, Usage(10, 4, 5), 0.0, 2.0, 3.0))


@pytest.mark.parametrize("closes", [True, False])
def test_one_message_ends_a_plain_request(closes: bool) -> None:
    """Its record has what `Submit` and the placement say, too. The attempt ended before it, or with it."""

    async def body() -> None:
        async with balancing(1) as it:
            worker = await it.worker()
            await worker.says(submit(7), m.FirstByte(7))
            assert it.in_flight() == [1]
            if not closes:
                await worker.says(m.Close(7, COMPLETED, Usage(10, 4, 5), False))
                assert it.in_flight() == [0]
            await worker.says(served(7, closes=closes))
            assert it.in_flight() == [0]
            assert not list(it.server.running_records())
            (record,) = it.records.requests
            assert (record.id, record.path, record.route, record.model, record.key) == (
                "r7",
                "/v1/x",
                "chat",
                MODEL,
                "key",
            )
            assert (record.flow, record.endpoint, record.attempts) == ("anonymous", "e1", 1)
            assert (record.outcome, record.status, record.usage) == (Outcome.COMPLETED, 200, Usage(10, 4, 5))
            assert (record.request_bytes, record.response_bytes, record.events, record.ended_at) == (1, 2, 3, 3.0)
            await worker.says(served(7, closes=closes), served(8, closes=closes))
            assert len(it.records.requests) == 1, "what arrives for a number that is not known is dropped"

    run(body())


def test_a_plain_request_that_was_never_closed_is_not_left_in_flight() -> None:
    async def body() -> None:
        async with balancing(1) as it:
            worker = await it.worker()
            await worker.says(submit(7), served(7, closes=False))
            assert it.in_flight() == [0]
            assert len(it.records.requests) == 1

    run(body())


def test_a_response_in_one_step_closes_too() -> None:
    async def body() -> None:
        async with balancing(1) as it:
            worker = await it.worker()
            await worker.says(submit(1), m.Answered(1, COMPLETED, None, True), ended(1))
            assert it.in_flight() == [0]
            assert len(it.records.requests) == 1

    run(body())


def test_a_retry_is_the_same_request_at_another_endpoint() -> None:
    async def body() -> None:
        async with balancing(2) as it:
            worker = await it.worker()
            await worker.says(submit(1))
            first = worker.heard(m.Placed)[0].uid
            failed = m.Failed(1, FailureKind.RESET.value, "why", False, (), True, 0, False)
            await worker.says(failed, m.Close(1, 0, None, False), submit(1, avoid=(first,)))
            second = worker.heard(m.Placed)[1].uid
            assert second != first
            assert sum(it.in_flight()) == 1
            await worker.says(m.Close(1, COMPLETED, None, False), ended(1))
            assert sum(it.in_flight()) == 0
            assert len(it.records.requests) == 1

    run(body())


def test_failures_that_workers_report_take_an_endpoint_out() -> None:
    """They judge the retry; whether the endpoint is well is judged here, of all workers together."""

    async def body() -> None:
        async with balancing(1) as it:
            workers = [await it.worker(n) for n in range(2)]
            for n in range(10):
                worker = workers[n % 2]
                await worker.says(submit(n))
                await worker.says(m.Failed(n, FailureKind.RESET.value, "why", False, (), False, 0, False))
                await worker.says(m.Close(n, 0, None, False), ended(n, Outcome.UPSTREAM_RESET))
            await workers[0].settled()
            assert it.seen("e1").health.value == "ejected"
            await until(lambda: all(one.heard(m.Members)[-1].members[0].health == "ejected" for one in workers))

    run(body())


def test_an_unknown_model_is_refused_after_all_were_asked_for_it() -> None:
    async def body() -> None:
        async with balancing(1) as it:
            worker = await it.worker()
            await worker.says(submit(1, "new"), submit(2, "unknown"), submit(3, "new"))
            await worker.says(m.Close(3, COMPLETED, None, False), ended(3, Outcome.CLIENT_CLOSED))
            assert not worker.heard(m.Refused)
            it.runtime.report_models(it.endpoints[0].uid, [card("new")])
            await worker.settled()
            assert [one.number for one in worker.heard(m.Placed)] == [1], "the client of 3 left meanwhile"
            (refused,) = worker.heard(m.Refused)
            assert (refused.number, m.OUTCOMES[refused.outcome]) == (2, Outcome.MODEL_NOT_FOUND)
            await worker.says(m.Close(1, COMPLETED, None, False), ended(1), ended(2), submit(4, "unknown"))
            assert worker.heard(m.Refused)[1].number == 4, "they were asked a moment ago"
            assert it.in_flight() == [0]

    run(body())


def test_what_is_not_known_is_dropped() -> None:
    """It belongs to requests that another balancer process placed, and ends with their records."""

    async def body() -> None:
        async with balancing(1) as it:
            worker = await it.worker()
            await worker.says(
                *(m.FirstByte(9), m.ProgressMade({9: 1}), m.Close(9, 0, None, False), m.Answered(9, 0, None, True)),
                *(m.Failed(9, "reset", "", False, (), False, 0, False), m.Stores(9, "resp_1"), m.LoadReported(9, None)),
            )
            assert not worker.end.lost
            await worker.says(ended(9))
            assert [record.id for record in it.records.requests] == ["r9"]
            assert it.in_flight() == [0]

    run(body())


def test_a_request_that_runs_already_is_adopted_and_ends() -> None:
    async def body() -> None:
        async with balancing(2) as it:
            worker = await it.worker()
            running = [m.StillRunning(submit(n), it.endpoints[n - 1].base_url, n == 1, None) for n in (1, 2)]
            await worker.says(*running, m.StillRunning(submit(3), "http://gone:1", True, None))
            assert it.in_flight() == [1, 1]
            assert [one.awaiting_first_byte for one in it.snapshots()] == [0, 1]
            assert len(list(it.server.running_records())) == 3
            await worker.says(*(m.Close(n, COMPLETED, None, False) for n in (1, 2, 3)), *(ended(n) for n in (1, 2, 3)))
            assert it.in_flight() == [0, 0]
            assert len(it.records.requests) == 3

    run(body())


def test_a_load_report_reaches_the_endpoint() -> None:
    async def body() -> None:
        async with balancing(1) as it:
            worker = await it.worker()
            it.runtime.balancer.endpoints.ask_load(it.endpoints[0].uid, True)
            await worker.says(submit(1))
            assert worker.heard(m.Placed)[0].rest == (False, True, None, 0, 0, None, None)
            await worker.says(m.LoadReported(1, LoadReport(3.0, 4.0, 0.5)), m.LoadReported(1, None))
            assert it.runtime.balancer.endpoints.reported_at(it.endpoints[0].uid) > 0.0
            await worker.says(m.Close(1, COMPLETED, None, False), ended(1))

    run(body())


def test_a_stored_response_is_known_to_the_other_workers() -> None:
    async def body() -> None:
        async with balancing(2) as it:
            one, two = await it.worker(0), await it.worker(1)
            await one.says(submit(1), m.Stores(1, "resp_1"))
            await two.settled()
            (remember,) = two.heard(m.Remember)
            assert (remember.response_id, remember.uid) == ("resp_1", one.heard(m.Placed)[0].uid)
            assert not one.heard(m.Remember)
            stored = it.runtime.stored("resp_1")
            assert stored is not None
            assert stored.uid == remember.uid
            await one.says(m.Close(1, COMPLETED, None, False), ended(1))

    run(body())


# --- Ends and defects -------------------------------------------------------------------------------------------------


def test_a_lost_link_closes_the_tickets_of_its_worker_alone() -> None:
    """At once, and later with a record for each: the clients' connections are broken."""

    async def body() -> None:
        async with balancing(1) as it:
            it.server.succession.lost.return_s = 0.05
            one, two = await it.worker(0), await it.worker(1)
            await one.says(submit(1), submit(2), m.FirstByte(2))
            await two.says(submit(1))
            assert it.in_flight() == [3]
            one.end.link.abort()
            await until(lambda: it.in_flight() == [1])
            assert [session.index for session in it.server.sessions] == [1]
            await until(lambda: len(it.records.requests) == 2)
            assert {(one.outcome, one.error) for one in it.records.requests} == {
                (Outcome.INTERNAL_ERROR, "its worker process ended")
            }
            assert it.seen("e1").health.value == "up", "the endpoint is not to blame"
            await two.says(m.Close(1, COMPLETED, None, False), ended(1))

    run(body())


def test_a_worker_that_ended_its_link_and_is_back_has_one_record_of_each_request() -> None:
    """It does so where the balancer process does not respond for some seconds."""

    async def body() -> None:
        async with balancing(1) as it:
            logged: list[str] = []
            it.server.succession.lost.log = lambda records: logged.extend(record.id for record in records)
            before = await it.worker(0)
            await before.says(*(submit(n) for n in (1, 2, 3, 4, 5)), m.FirstByte(2))
            begun = {record.id: record for record in it.server.running_records()}
            before.end.link.abort()
            await until(lambda: not it.server.sessions)
            assert it.in_flight() == [0]
            worker = await it.worker(0)
            url = it.endpoints[0].base_url
            # The first still runs, the second and third ended meanwhile, the fourth is forgotten, the fifth asks again.
            await worker.says(m.StillRunning(submit(1), url, False, None), ended(2), ended(3, Outcome.CLIENT_CLOSED))
            assert it.in_flight() == [1]
            assert [(one.id, one.outcome) for one in it.records.requests] == [
                ("r2", Outcome.COMPLETED),
                ("r3", Outcome.CLIENT_CLOSED),
            ]
            (running,) = it.server.running_records()
            assert running is begun["r1"], "what was noted of it is known as before"
            await worker.says(submit(5, again=True))
            assert {one.id: one for one in it.server.running_records()}["r5"] is begun["r5"]
            await worker.says(*(m.Close(n, COMPLETED, None, False) for n in (1, 5)), ended(1), ended(5))
            assert it.in_flight() == [0]
            worker.end.link.abort()
            await until(lambda: not it.server.sessions)
            assert not logged
            await it.worker(0, pid=7)
            await until(lambda: len(it.records.requests) == 5)
            assert logged == ["r4"]
            ends = {one.id: one.outcome for one in it.records.requests}
            assert ends.pop("r4") is Outcome.INTERNAL_ERROR
            assert ends.pop("r3") is Outcome.CLIENT_CLOSED
            assert ends == dict.fromkeys(("r1", "r2", "r5"), Outcome.COMPLETED)

    run(body())


def test_the_records_of_a_dead_worker_are_there_as_soon_as_its_successor_is() -> None:
    async def body() -> None:
        async with balancing(1) as it:
            worker, other = await it.worker(0), await it.worker(1)
            await worker.says(submit(1))
            await other.says(submit(2))
            worker.end.link.abort()
            other.end.link.abort()
            await until(lambda: not it.server.sessions)
            await it.worker(0, pid=7)
            await until(lambda: it.records.requests)
            assert [(one.id, one.outcome) for one in it.records.requests] == [("r1", Outcome.INTERNAL_ERROR)]
            it.server.close()
            await until(lambda: len(it.records.requests) == 2)

    run(body())


def test_the_next_link_of_a_worker_waits_until_its_earlier_one_is_read() -> None:
    """What a worker sent before it ended a link is handled before what it says over the next."""

    async def body() -> None:
        async with balancing(1) as it:
            before = await it.worker(0)
            await before.says(submit(1), submit(2))
            after, gone = await it.worker(0), await it.worker(0)
            assert it.server.sessions == [before.session]
            assert not after.heard(m.Welcome)
            gone.end.link.abort()
            before.end.link.send(ended(1))
            before.end.link.finish()
            await until(lambda: after.heard(m.Welcome))
            assert it.server.sessions == [after.session]
            await after.says(m.StillRunning(submit(2), it.endpoints[0].base_url, True, None))
            assert it.in_flight() == [1]
            await after.says(m.Close(2, COMPLETED, None, False), ended(2))
            assert [(one.id, one.outcome) for one in it.records.requests] == [
                ("r1", Outcome.COMPLETED),
                ("r2", Outcome.COMPLETED),
            ]

    run(body())


def test_requests_that_wait_leave_the_queue_with_their_worker() -> None:
    async def body() -> None:
        async with balancing(1) as it:
            one, two = await it.worker(0), await it.worker(1)
            it.runtime.drain(it.endpoints[0].uid)
            await one.says(submit(1))
            waiting = it.runtime.balancer.queue(now=it.runtime.now()).waiting
            one.end.link.abort()
            await until(lambda: len(it.server.sessions) == 1)
            assert it.runtime.balancer.queue(now=it.runtime.now()).waiting == 0
            assert waiting <= 1
            it.runtime.drain(it.endpoints[0].uid, draining=False)
            await two.says(submit(1), m.Answered(1, COMPLETED, None, True), ended(1))
            assert it.in_flight() == [0]

    run(body())


@interpreted
def test_a_submit_that_fails_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Else its client would wait for ever."""

    def raising(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    async def body() -> None:
        async with balancing(1) as it:
            worker = await it.worker()
            monkeypatch.setattr(it.runtime, "submit", raising)
            await worker.says(submit(1))
            (refused,) = worker.heard(m.Refused)
            assert m.OUTCOMES[refused.outcome] is Outcome.INTERNAL_ERROR
            await worker.says(ended(1, Outcome.INTERNAL_ERROR))

    run(body())
    assert "a message of a worker process failed: Submit" in caplog.text


@interpreted
@pytest.mark.parametrize("name", ["close", "answered"])
def test_an_end_that_fails_leaves_nothing_in_flight(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = getattr(Runtime, name)

    def once(*arguments: object, **options: object) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("a defect")
        real(*arguments, **options)

    async def body() -> None:
        async with balancing(1) as it:
            worker = await it.worker()
            monkeypatch.setattr(Runtime, name, once)
            last = m.Close(1, COMPLETED, None, False) if name == "close" else m.Answered(1, COMPLETED, None, False)
            await worker.says(submit(1), last)
            assert it.in_flight() == [1]
            await worker.says(ended(1))
            assert it.in_flight() == [0]

    run(body())


# --- What workers are told --------------------------------------------------------------------------------------------


def test_workers_are_told_what_changed_and_nothing_else() -> None:
    async def body() -> None:
        async with balancing(2) as it:
            worker = await it.worker()
            before = len(worker.end.arrived)
            it.server.tell()
            await worker.settled()
            assert len(worker.end.arrived) == before
            it.runtime.report_models(it.endpoints[1].uid, [card(MODEL), card("other")])
            it.server.tell()
            await worker.settled()
            (models,) = worker.end.arrived[before:]
            assert isinstance(models, m.Models)
            assert (models.uids, [one.id for one in models.cards or ()]) == ([it.endpoints[1].uid], ["other"])

    run(body())


def test_an_endpoint_is_told_of_before_a_request_is_placed_there() -> None:
    async def body() -> None:
        async with balancing(1) as it:
            worker = await it.worker()
            (new,) = it.runtime.set_endpoints([spec(1), spec(2)]).added
            it.runtime.report_models(new.uid, [card("other")])
            it.runtime.report_health(new.uid, True, "200")
            await worker.says(submit(1, "other"))
            assert worker.heard(m.Placed)[0].uid == new.uid
            at = worker.end.arrived.index(worker.heard(m.Placed)[0])
            told = [one for one in worker.end.arrived[:at] if isinstance(one, m.Members)]
            assert new.uid in [one.uid for one in told[-1].members]
            await worker.says(m.Close(1, COMPLETED, None, False), ended(1))

    run(body())


def test_a_refusal_comes_after_what_it_is_about() -> None:
    """The worker tells its client whether any endpoint is up."""

    async def body() -> None:
        async with balancing(1) as it:
            worker = await it.worker()
            for _ in range(5):
                it.runtime.report_health(it.endpoints[0].uid, False, "refused", refused=True)
            worker.session._received([submit(1)])  # in the same turn of the loop
            await worker.settled()
            kinds = [type(one) for one in worker.end.arrived]
            (refused,) = worker.heard(m.Refused)
            assert m.OUTCOMES[refused.outcome] is Outcome.NO_ENDPOINTS
            assert worker.heard(m.Members)[-1].members[0].health == "down"
            assert kinds.index(m.Refused) > len(kinds) - 1 - kinds[::-1].index(m.Members)

    run(body())


def test_settings_go_to_all_workers() -> None:
    async def body() -> None:
        async with balancing(1) as it:
            workers = [await it.worker(n) for n in range(2)]
            settling = asyncio.ensure_future(it.server.settle("listen: 1"))
            for worker in workers:
                await until(lambda: worker.heard(m.Settle))  # noqa: B023
                assert worker.heard(m.Settle) == [m.Settle("listen: 1", it.runtime.block_bytes)]
                assert not settling.done()
                await worker.says(m.Adopted())
            await settling

    run(body())


def test_a_reload_does_not_wait_for_a_worker_that_ends() -> None:
    async def body() -> None:
        async with balancing(1) as it:
            worker = await it.worker()
            settling = asyncio.ensure_future(it.server.settle("listen: 1"))
            await until(lambda: worker.heard(m.Settle))
            worker.end.link.abort()
            await settling

    run(body())


def test_a_worker_that_comes_after_a_reload_gets_its_settings() -> None:
    """It may have been started before it, with the old ones."""

    async def body() -> None:
        async with balancing(1) as it:
            await it.server.settle("listen: 1")
            worker = await it.worker()
            await until(lambda: worker.heard(m.Settle))

    run(body())


def test_workers_log_at_the_level_that_was_said_until_there_are_other_settings() -> None:
    async def body() -> None:
        async with balancing(1) as it:
            first = await it.worker()
            it.server.set_log_level("error")
            second = await it.worker(1)
            await second.settled()
            await first.settled()
            assert first.heard(m.LogLevel) == second.heard(m.LogLevel) == [m.LogLevel("error")]
            settling = asyncio.ensure_future(it.server.settle("listen: 1"))
            for worker in (first, second):
                await until(lambda: worker.heard(m.Settle))  # noqa: B023
                await worker.says(m.Adopted())
            await settling
            third = await it.worker(2)
            await third.settled()
            assert third.heard(m.LogLevel) == []

    run(body())


def test_a_beat_is_answered_and_its_cpu_time_becomes_a_share() -> None:
    async def body() -> None:
        async with balancing(1) as it:
            worker = await it.worker()
            beat = m.WorkerFigures(OwnLoad(connections=5), lags_s=(0.1,))
            await worker.says(beat)
            assert worker.session.cpu_share == 0.0
            await worker.says(msgspec.structs.replace(beat, cpu_s=1.0))
            assert worker.session.cpu_share > 0.0
            assert worker.session.beat.load.connections == 5
            assert len(worker.heard(m.Pong)) == 2

    run(body())


def test_the_counts_of_a_worker_that_is_back_count_once_and_never_fall() -> None:
    """They are since its start. Those of a dead one stay, and its successor counts from 0."""

    async def body() -> None:
        async with balancing(1) as it:
            totals = WorkerTotals(it.server)
            beat = m.WorkerFigures(OwnLoad(refused={"memory": 2}), internal_errors=3)
            seen = [(totals.by_label("refused").get("memory", 0), totals.number("internal"))]

            async def lives(pid: int, *refused: int) -> None:
                worker = await it.worker(0, pid)
                seen.append((totals.by_label("refused")["memory"], totals.number("internal")))
                for n in refused:
                    await worker.says(msgspec.structs.replace(beat, load=OwnLoad(refused={"memory": n})))
                    seen.append((totals.by_label("refused")["memory"], totals.number("internal")))
                worker.end.link.abort()
                await until(lambda: not it.server.sessions)
                seen.append((totals.by_label("refused")["memory"], totals.number("internal")))

            first = await it.worker(0, 7)
            await first.says(beat)
            first.end.link.abort()
            await until(lambda: not it.server.sessions)
            await lives(7, 4)
            await lives(7)
            await lives(8, 1, 2)
            await lives(9, 1)
            assert seen == [(0, 0), (2, 3), *[(4, 3)] * 5, (5, 6), *[(6, 6)] * 3, *[(7, 9)] * 2]

    run(body())


def test_models_are_read_again_for_a_worker() -> None:
    class Reader:
        def __init__(self, it: Balancing) -> None:
            self.it = it
            self.doubted = 0

        async def refresh_models(self) -> None:
            self.it.runtime.report_models(self.it.endpoints[0].uid, [card("new")])

        def doubt_models(self) -> None:
            self.doubted += 1

    async def body() -> None:
        async with balancing(1) as it:
            worker = await it.worker()
            with it.runtime.model_readers.kept(it.endpoints[0].base_url, (reader := Reader(it))):
                await worker.says(m.RefreshModels(it.endpoints[0].uid, 5), m.DoubtModels(it.endpoints[0].uid))
                await until(lambda: worker.heard(m.Refreshed))
            assert worker.heard(m.Refreshed) == [m.Refreshed(5)]
            assert [one.id for one in worker.heard(m.Models)[-1].cards or ()] == ["new"], "told before"
            assert type(worker.end.arrived[-1]) is m.Refreshed
            assert reader.doubted == 1

    run(body())
