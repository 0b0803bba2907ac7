# SPDX-License-Identifier: Apache-2.0
"""What a worker is told of endpoints: what changed, and however much there is, nobody stands still and no link ends."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from lbproxy.config.parse import parse
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.openai import MAX_CARD_BYTES, ModelCard, read_model_list
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.workers import link as links
from lbproxy.workers import messages as m
from lbproxy.workers.link import Link
from lbproxy.workers.remote import RemoteRuntime
from lbproxy.workers.server import UNHEARD_S, Session, WorkerServer
from tests.support.aio import run, until
from tests.support.links import connect
from tests.support.pool import MODEL, Pool, card, make_balancer, spec

SETTINGS = parse("endpoints: [http://e1:8000]", environ={}, source="test")


class Told(Pool):
    """A pool, the server of workers, and one worker, all in one loop."""

    def __init__(self, specs: list[EndpointSpec]) -> None:
        super().__init__(make_balancer(), specs)
        self.bring_up()
        self.server = WorkerServer(self.runtime)
        self.sinks.append(self.server)
        self.worker = RemoteRuntime(SETTINGS, random.Random(1))
        self.arrived: list[m.ToWorker] = []
        self.bursts: list[int] = []
        """Messages that were read in one step."""
        self.here: Link[m.ToWorker] = Link(m.ToWorker, self._received, self.worker.detach)
        self.session = Session(self.server)

    def _received(self, arrived: list[m.ToWorker]) -> None:
        self.arrived += arrived
        self.bursts.append(sum(len(one.raw) for part in arrived for one in getattr(part, "cards", None) or ()))
        self.worker.received(arrived)

    async def link(self) -> None:
        await connect(self.here, self.session.link)
        self.worker.attach(self.here)
        self.here.send(m.Hello(0, 1000))
        await until(lambda: not self.worker.alone and self.session.has_told, "it is welcomed", within_s=100.0)

    async def settle(self) -> None:
        self.server.tell()
        there = self.session.link
        for _ in range(3):
            await asyncio.sleep(0)
        await until(lambda: there.sent == self.here.arrived and not there._fed)
        await asyncio.sleep(0)

    def models(self) -> dict[str, list[str] | None]:
        """As the worker knows them."""
        return {
            one.endpoint.name: None if one.models is None else sorted(one.models) for one in self.worker.known.members()
        }

    def true_models(self) -> dict[str, list[str] | None]:
        members = self.runtime.members()
        return {one.endpoint.name: None if one.models is None else sorted(one.models) for one in members}


@asynccontextmanager
async def told(specs: list[EndpointSpec]) -> AsyncIterator[Told]:
    it = Told(specs)
    it.server.ready()
    try:
        yield it
    finally:
        it.server.close()
        it.here.close()
        it.connections.close()
        await asyncio.sleep(0)


def cards(count: int, size: int = 10) -> list[ModelCard]:
    raw = b"x" * size
    return [ModelCard(f"a{n}", raw, MODEL) for n in range(count)]


def ranks(count: int) -> list[EndpointSpec]:
    """One server."""
    return [replace(spec(1), name=f"e1/{n}", rank=n) for n in range(count)]


def test_more_cards_than_a_frame_may_have_reach_a_worker() -> None:
    """80 MB of them ended the link of each worker for good, at its first message."""

    async def body() -> None:
        async with told([spec(n + 1) for n in range(40)]) as it:
            for endpoint in it.endpoints:
                it.runtime.report_models(endpoint.uid, cards(2000, 1000))
            await it.link()
            assert it.models() == it.true_models()
            assert isinstance(it.arrived[-1], m.Welcome)
            assert max(it.bursts) <= 2 * links.FRAME_BYTES, "no loop stands still"

    run(body())


def test_the_cards_of_a_server_are_sent_once_not_for_each_rank() -> None:
    """A server that claims 64 ranks with a list of 4 MB made messages of 250 MB."""

    async def body() -> None:
        async with told(ranks(64)) as it:
            it.runtime.report_models(it.endpoints[0].uid, cards(1000))
            await it.link()
            lists = [one for one in it.arrived if isinstance(one, m.Models)]
            assert sum(len(one.cards or ()) for one in lists) == 1000
            assert it.models() == it.true_models()
            assert len(it.models()) == 64
            known = [one.models for one in it.worker.known.members()]
            assert all(one is known[0] for one in known), "nor kept for each"
            del it.arrived[:]
            it.runtime.report_models(it.endpoints[3].uid, [*cards(1000), card("new")])
            await it.settle()
            (change,) = it.arrived
            assert isinstance(change, m.Models)
            assert (len(change.uids), len(change.cards or ())) == (64, 1)
            assert it.models() == it.true_models()

    run(body())


def test_a_change_is_told_and_not_all_endpoints() -> None:
    """All of 1,000 were told of for each change of one, which took each process 24 ms."""

    async def body() -> None:
        async with told([spec(n + 1) for n in range(300)]) as it:
            await it.link()
            del it.arrived[:]
            it.runtime.drain(it.endpoints[7].uid)
            await it.settle()
            (members,) = it.arrived
            assert isinstance(members, m.Members)
            assert [(one.uid, one.draining) for one in members.members] == [(it.endpoints[7].uid, True)]
            assert members.order is None
            states = [*it.worker.known.members()]
            assert [one.endpoint.uid for one in states if one.draining] == [it.endpoints[7].uid]
            assert len(states) == 300

    run(body())


def test_an_answer_that_says_the_same_is_no_change() -> None:
    """vLLM writes the time of the question, and new ids of permissions, into each card."""

    def asked(at: int) -> list[ModelCard]:
        permission = {"id": f"modelperm-{at:032x}", "created": at}
        entries = [{"id": f"m{n}", "created": at, "max_model_len": 10, "permission": [permission]} for n in range(5)]
        found = read_model_list(json.dumps({"data": entries}).encode())
        assert found is not None
        return found

    async def body() -> None:
        async with told([spec(1)]) as it:
            uid = it.endpoints[0].uid
            it.runtime.report_models(uid, asked(1_700_000_000))
            await it.link()
            del it.arrived[:]
            it.runtime.report_models(uid, asked(1_700_000_030))
            it.runtime.drain(uid)
            await it.settle()
            assert [type(one) for one in it.arrived] == [m.Members]
            it.runtime.report_models(uid, [*asked(1_700_000_060), card("new")])
            await it.settle()
            assert [one.id for one in getattr(it.arrived[-1], "cards", [])] == ["new"]
            longer = [ModelCard(one.id, one.raw.replace(b":10,", b":20,"), one.parent) for one in asked(1_700_000_090)]
            it.runtime.report_models(uid, longer)
            await it.settle()
            assert len(getattr(it.arrived[-1], "cards", [])) == 5

    run(body())


@pytest.mark.parametrize("seed", range(6))
def test_after_any_changes_a_worker_knows_what_the_balancer_process_does(seed: int) -> None:
    """Lists that grow, shrink, vanish and change while they are told; ranks that come and go."""
    rng = random.Random(seed)

    def change(it: Told) -> None:
        uid = rng.choice([one.endpoint.uid for one in it.runtime.members()])
        match rng.randrange(6):
            case 0:
                it.runtime.report_models(uid, None)
            case 1 | 2:
                names = rng.sample(range(30), rng.randrange(30))
                size = rng.choice([10, 20_000])
                it.runtime.report_models(
                    uid, [ModelCard(f"m{n}", b"%d" % rng.randrange(3) * size, None) for n in names]
                )
            case 3:
                some = [spec(n) for n in range(2, rng.randrange(3, 6))]
                rng.shuffle(some)
                it.runtime.set_endpoints([*ranks(rng.randrange(1, 4)), *some])
            case 4:
                it.runtime.drain(uid)
            case _:
                it.runtime.report_health(uid, rng.random() < 0.5, "test")

    async def body() -> None:
        async with told([*ranks(2), spec(2), spec(3)]) as it:
            await it.link()
            for _ in range(150):
                change(it)
                if rng.random() < 0.5:
                    it.server.tell()
                if rng.random() < 0.3:
                    await asyncio.sleep(0)
                if rng.random() < 0.2:
                    await it.settle()
                    same(it)
            await it.settle()
            same(it)

    def same(it: Told) -> None:
        mine, true = [*it.worker.known.members()], [*it.runtime.members()]
        assert [one.endpoint.uid for one in mine] == [one.endpoint.uid for one in true]
        assert [(one.health, one.draining) for one in mine] == [(one.health, one.draining) for one in true]
        for one, other in zip(mine, true, strict=True):
            assert one.models == other.models, one.endpoint.name
        served = {one.id for one in it.worker.serving.model_cards()}
        assert served == {one.id for one in it.runtime.serving.model_cards()}

    run(body())


def test_requests_of_a_worker_are_known_once_it_has_said_them() -> None:
    """Before that, and while it may place some by itself, nothing is drained."""

    async def body() -> None:
        async with told([spec(1)]) as it:
            assert it.server.heard() == 0
            await it.link()
            assert it.server.heard() == 0, "it has not beaten yet"
            it.session._beat_at = it.runtime.now()
            assert it.server.heard() == 1
            it.session._beat_at -= 1.1 * UNHEARD_S
            assert it.server.heard() == 0, "it may have given us up"
            it.session._beat_at = it.runtime.now()
            it.here.abort()
            await until(lambda: not it.server.sessions)
            assert it.server.heard() == 0

    run(body())


def test_a_request_whose_message_is_lost_gets_an_error() -> None:
    """Its client would wait for ever."""

    async def body() -> None:
        async with told([spec(1)]) as it:
            await it.link()
            settled: list[Ticket] = []
            odd = InferenceRequest("r", MODEL, session="x" * links.MAX_FRAME_BYTES)
            for request in (odd, InferenceRequest("r", MODEL)):
                record = RequestRecord("r", "POST", "/v1/x", "127.0.0.1", 0.0)
                it.worker.submit(request, record, frozenset(), settled.append)
                before = len(settled)
                await until(lambda: len(settled) > before)  # noqa: B023 - in this turn
            assert [one.outcome for one in settled if one.placed_on is None] == [Outcome.INTERNAL_ERROR]
            assert [one.request.session for one in settled if one.placed_on is not None] == [None]

    run(body())


@pytest.mark.parametrize("parent", [None, "base", 5, "x" * 300])
def test_a_card_that_is_too_large_keeps_its_names(parent: object) -> None:
    """The model is served; GET /v1/models says less of it."""
    entry = {"id": "m", "parent": parent, "note": "x" * MAX_CARD_BYTES}
    (found,) = read_model_list(json.dumps({"data": [entry]}).encode()) or []
    assert (found.id, found.parent) == ("m", "base" if parent == "base" else None)
    assert len(found.raw) < 200
    assert json.loads(found.raw)["id"] == "m"
