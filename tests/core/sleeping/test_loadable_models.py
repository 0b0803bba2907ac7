# SPDX-License-Identifier: Apache-2.0
"""Endpoints that load models on demand: where a model is loaded, what gives way, and what a warm one is worth."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.sections.routing import AdmissionSettings, RoutingSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import NOTHING_SAID, LoadSpec
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.queue.ticket import Ticket, TicketState, Wait
from lbproxy.core.requests.openai import ModelCard
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest
from tests.support.pool import spec

MODELS = ("a", "b", "c")


class Boxes:
    """A balancer over endpoints with the API of Ollama, or with none that says what is in memory (`engine`)."""

    def __init__(
        self,
        *loadings: LoadSpec,
        loaded: Sequence[str] | None = (),
        policy: str = "least-request",
        timeout: float = 1000.0,
        engine: str | None = "ollama",
    ) -> None:
        settings = BalancingSettings(admission=AdmissionSettings(queue_timeout=timeout))
        routing = RoutingSettings.model_validate({"policy": policy})
        self.balancer = Balancer(make_policy(routing), settings, rng=random.Random(1))
        self.sleepers = self.balancer.sleepers
        specs = [replace(spec(n), loading=loading) for n, loading in enumerate(loadings)]
        self.uids = [one.uid for one in self.balancer.set_endpoints(specs, now=0.0).added]
        for n, uid in enumerate(self.uids):
            cards = [ModelCard(name, b"{}", engine=engine) for name in MODELS]
            self.balancer.report_models(uid, cards)
            self.balancer.report_health(uid, True, "test", now=0.0)
            if engine is not None:
                self.say(n, loaded, now=0.0)

    def say(self, n: int, loaded: Sequence[str] | None, *, now: float) -> None:
        """What it has in memory."""
        self.sleepers.loaded(self.uids[n], loaded, asked_at=now, now=now)

    def ask(self, model: str, *, now: float, engine: str | None = None, context: int | None = None) -> Ticket:
        return self.balancer.submit(InferenceRequest("r", model, engine=engine, context_tokens=context), now=now)

    def decide(self, *, now: float) -> None:
        assert self.sleepers.decide(now) == [], "nobody calls such an endpoint"
        self.balancer.poll(now=now)

    def close(self, ticket: Ticket, *, now: float) -> None:
        self.balancer.close(ticket, Outcome.COMPLETED, now=now)

    def home(self, model: str, *, now: float) -> int:
        """Where a request goes, which ends at once."""
        ticket = self.ask(model, now=now)
        self.decide(now=now)
        at = self.place(ticket)
        self.close(ticket, now=now)
        return at

    def place(self, ticket: Ticket) -> int:
        assert ticket.state is TicketState.PLACED, (ticket.state, ticket.wait, ticket.outcome)
        return self.uids.index(ticket.placed_state.endpoint.uid)

    def memory(self, n: int, *, now: float) -> dict[str | None, str]:
        return {one.model: one.phase.value for one in self.sleepers.in_memory(now)[self.uids[n]]}


def test_requests_go_where_their_model_is_loaded() -> None:
    boxes = Boxes(NOTHING_SAID, NOTHING_SAID)
    boxes.say(1, ["a"], now=1.0)
    held = [boxes.ask("a", now=1.0 + n) for n in range(5)]
    assert {boxes.place(ticket) for ticket in held} == {1}
    assert boxes.memory(1, now=6.0) == {"a": "awake"}
    assert boxes.memory(0, now=6.0) == {}


def test_a_model_is_loaded_where_there_is_room_by_one_request_and_others_join_it() -> None:
    boxes = Boxes(NOTHING_SAID, NOTHING_SAID)
    boxes.say(0, ["a"], now=1.0)
    first, second = boxes.ask("b", now=2.0), boxes.ask("b", now=2.0)
    assert {first.wait, second.wait} == {Wait.WAKING}
    boxes.decide(now=2.1)
    assert boxes.place(first) == boxes.place(second) == boxes.place(boxes.ask("b", now=3.0)) == 1
    assert boxes.memory(1, now=3.0) == {"b": "waking"}
    boxes.say(1, ["b"], now=9.0)
    assert boxes.memory(1, now=9.0) == {"b": "awake"}


def test_what_is_idle_gives_way_and_what_has_requests_is_finished_first() -> None:
    boxes = Boxes(LoadSpec(most=1))
    boxes.say(0, ["a"], now=1.0)
    runs = boxes.ask("a", now=2.0)
    waits = boxes.ask("b", now=2.0)
    boxes.decide(now=3.0)
    assert waits.state is TicketState.WAITING
    boxes.decide(now=12.0)  # `a` had its time
    assert boxes.memory(0, now=12.0) == {"a": "draining"}
    late = boxes.ask("a", now=12.5)
    assert late.state is TicketState.WAITING
    boxes.close(runs, now=14.0)
    boxes.decide(now=14.1)
    boxes.decide(now=14.2)
    assert boxes.place(waits) == 0
    assert boxes.memory(0, now=14.2) == {"b": "waking"}


def test_what_has_long_requests_gives_way_in_the_end_and_the_next_waits_at_the_engine() -> None:
    boxes = Boxes(LoadSpec(most=1), timeout=30.0)
    boxes.say(0, ["a"], now=1.0)
    boxes.ask("a", now=2.0)
    waits = boxes.ask("b", now=2.0)
    for now in (3.0, 12.0, 17.5, 17.6):
        boxes.decide(now=now)
    assert boxes.place(waits) == 0


def test_a_request_is_not_refused_for_a_load_that_takes_longer_than_the_queue_may() -> None:
    """It waits at the engine. By its own deadline it is."""
    boxes = Boxes(LoadSpec(most=1), timeout=30.0)
    first = boxes.ask("a", now=1.0)
    boxes.decide(now=1.1)
    boxes.say(0, ["a"], now=61.0)
    boxes.close(first, now=62.0)
    boxes.say(0, [], now=70.0)
    second = boxes.ask("a", now=80.0)
    boxes.decide(now=80.1)
    assert boxes.place(second) == 0
    boxes.close(second, now=80.2)
    boxes.say(0, [], now=90.0)
    boxes.decide(now=90.1)
    late = boxes.balancer.submit(InferenceRequest("r", "a", deadline=130.0), now=100.0)
    assert (late.state, late.outcome) == (TicketState.CLOSED, Outcome.TOO_LATE)


def test_of_idle_models_another_takes_the_place_at_once() -> None:
    boxes = Boxes(LoadSpec(most=1))
    boxes.say(0, ["a"], now=1.0)
    boxes.decide(now=2.0)
    boxes.decide(now=3.5)
    waits = boxes.ask("b", now=4.0)
    boxes.decide(now=4.1)
    boxes.decide(now=4.2)
    assert boxes.place(waits) == 0


def load(boxes: Boxes, model: str, *, now: float) -> int:
    """A request has a model loaded in 10 s, and ends there. Returns where."""
    ticket = boxes.ask(model, now=now)
    for later in (0.1, 0.2, 0.3):
        boxes.decide(now=now + later)
    at = boxes.place(ticket)
    boxes.say(at, [model], now=now + 10.0)
    boxes.close(ticket, now=now + 10.5)
    return at


def test_that_model_gives_way_that_is_wanted_least() -> None:
    """`a` is used less recently, but more often: two of its requests would wait for it at any time, and one for `b`."""
    boxes = Boxes(LoadSpec(most=1), LoadSpec(most=1))
    assert (load(boxes, "a", now=1.0), load(boxes, "b", now=20.0)) == (0, 1)
    for now in (44.0, 46.0, 48.0, 50.0, 52.0):
        assert boxes.home("a", now=now) == 0
    assert boxes.home("b", now=55.0) == 1
    boxes.decide(now=64.0)
    assert load(boxes, "c", now=66.0) == 1


def test_of_a_model_that_two_have_one_may_go_at_once() -> None:
    boxes = Boxes(LoadSpec(most=1), LoadSpec(most=1))
    assert load(boxes, "a", now=1.0) == 0
    boxes.say(1, ["a"], now=20.0)
    held = [boxes.ask("a", now=40.0 + n) for n in range(6)]
    for ticket in held:
        boxes.close(ticket, now=46.0)
    boxes.decide(now=46.5)
    boxes.decide(now=48.0)
    load(boxes, "b", now=49.0)


@pytest.mark.parametrize(
    ("timeout", "waiting", "until"),
    [(1000.0, 1, 19.5), (1000.0, 3, 0.0), (30.0, 1, 15.0)],
    ids=["as long as both loads", "as many as would wait", "as long as the queue lets it"],
)
def test_a_model_that_is_asked_for_often_does_not_go_for_one_request_at_once(
    timeout: float, waiting: int, until: float
) -> None:
    boxes = Boxes(LoadSpec(most=1), timeout=timeout)
    load(boxes, "b", now=1.0)
    load(boxes, "a", now=20.0)
    for now in (44.0, 46.0, 48.0, 50.0, 52.0):
        boxes.home("a", now=now)
    boxes.decide(now=63.0)
    held = [boxes.ask("b", now=64.0) for _ in range(waiting)]
    for tenth in range(1, 10 * int(until)):
        boxes.decide(now=64.0 + 0.1 * tenth)
        assert boxes.memory(0, now=64.0 + 0.1 * tenth) == {"a": "awake"}
    for later in (0.1, 0.5, 0.6):
        boxes.decide(now=64.0 + until + later)
    assert [boxes.place(ticket) for ticket in held] == [0] * waiting


@pytest.mark.parametrize("policy", ["least-request", "adaptive"])
def test_how_many_fit_is_seen(policy: str) -> None:
    """One more than was seen is tried, until one has to go for it; more than that is believed when it is seen."""
    boxes = Boxes(NOTHING_SAID, policy=policy)
    assert [boxes.home(model, now=now) for now, model in enumerate("a", 1)] == [0]
    boxes.say(0, ["a"], now=2.0)
    boxes.home("b", now=3.0)
    assert boxes.memory(0, now=3.0) == {"a": "awake", "b": "waking"}
    held = boxes.ask("b", now=3.5)
    boxes.say(0, [], now=4.0)  # `a` had to go
    assert boxes.memory(0, now=4.0) == {"b": "waking"}
    boxes.say(0, ["b"], now=5.0)
    waits = boxes.ask("a", now=6.0)
    boxes.decide(now=6.1)
    assert waits.state is TicketState.WAITING, "there is room for one"
    boxes.say(0, ["a", "b"], now=7.0)  # somebody else has shown that there is more
    boxes.decide(now=7.1)
    assert boxes.place(waits) == 0
    boxes.close(held, now=8.0)


def test_what_is_kept_stays_and_what_is_never_loaded_is_used_if_it_is() -> None:
    boxes = Boxes(LoadSpec(most=1, keep=frozenset("a"), never=frozenset("c")), LoadSpec(most=1, never=frozenset("c")))
    boxes.say(0, ["a"], now=1.0)
    boxes.say(1, ["b"], now=1.0)
    waits = boxes.ask("c", now=2.0)
    for now in (3.0, 20.0, 21.0):
        boxes.decide(now=now)
    assert waits.state is TicketState.WAITING
    assert boxes.memory(0, now=21.0) == {"a": "awake"}
    boxes.say(1, ["c"], now=22.0)
    boxes.decide(now=22.1)
    assert boxes.place(waits) == 1


def test_a_kept_model_is_not_unloaded_for_another() -> None:
    boxes = Boxes(LoadSpec(most=1, keep=frozenset("a")))
    boxes.say(0, ["a"], now=1.0)
    waits = boxes.ask("b", now=2.0)
    for now in (3.0, 20.0, 200.0):
        boxes.decide(now=now)
    assert waits.state is TicketState.WAITING
    assert boxes.memory(0, now=200.0) == {"a": "awake"}


def test_one_that_does_not_say_what_it_has_gets_all_requests() -> None:
    boxes = Boxes(NOTHING_SAID, loaded=None)
    assert [boxes.place(boxes.ask(model, now=1.0)) for model in MODELS] == [0, 0, 0]


def test_a_load_that_no_request_is_left_for_is_none() -> None:
    boxes = Boxes(NOTHING_SAID)
    ticket = boxes.ask("a", now=1.0)
    boxes.decide(now=1.1)
    boxes.close(ticket, now=1.5)
    boxes.decide(now=4.0)
    assert boxes.memory(0, now=4.0) == {"a": "waking"}
    boxes.decide(now=7.0)
    assert boxes.memory(0, now=7.0) == {}


def test_first_bytes_that_wait_for_a_load_say_nothing_of_the_speed() -> None:
    boxes = Boxes(NOTHING_SAID, policy="adaptive")
    before = boxes.balancer.learned(now=0.0)
    ticket = boxes.balancer.submit(InferenceRequest("r", "a", True, 4000, 4000), now=1.0)
    boxes.decide(now=1.1)
    boxes.balancer.first_byte(ticket, now=61.0)
    boxes.close(ticket, now=62.0)
    after = boxes.balancer.learned(now=62.0)
    assert before is not None
    assert after is not None
    assert (after[0].base_ms, after[0].prefill_ms_per_token) == (before[0].base_ms, before[0].prefill_ms_per_token)
    told = after[1][boxes.uids[0]]
    assert told.full_by is None


def test_a_request_of_ollamas_api_has_its_model_loaded_though_another_engine_serves_it() -> None:
    boxes = Boxes(NOTHING_SAID, NOTHING_SAID)
    boxes.balancer.report_models(boxes.uids[1], [ModelCard("a", b"{}")])
    ticket = boxes.ask("a", now=1.0, engine="ollama")
    assert ticket.state is TicketState.WAITING
    boxes.decide(now=1.1)
    assert boxes.place(ticket) == 0
    assert boxes.place(boxes.ask("a", now=1.2)) in {0, 1}


def test_a_model_that_is_not_listed_any_more_is_not_waited_for() -> None:
    boxes = Boxes(NOTHING_SAID)
    boxes.balancer.report_models(boxes.uids[0], [ModelCard("a", b"{}", engine="ollama")])
    boxes.decide(now=1.0)
    ticket = boxes.ask("c", now=2.0)
    assert (ticket.state, ticket.outcome) == (TicketState.CLOSED, Outcome.MODEL_NOT_FOUND)
    assert boxes.home("a", now=3.0) == 0


def test_another_engine_at_the_address_has_all_of_its_models_in_memory() -> None:
    boxes = Boxes(NOTHING_SAID)
    boxes.balancer.report_models(boxes.uids[0], [ModelCard(name, b"{}") for name in MODELS])
    boxes.decide(now=1.0)
    assert [boxes.place(boxes.ask(model, now=2.0)) for model in MODELS] == [0, 0, 0]


def test_a_request_that_began_before_it_was_known_is_none_too_many() -> None:
    boxes = Boxes(NOTHING_SAID, engine=None)
    boxes.decide(now=1.0)
    before = boxes.ask("a", now=1.0)
    boxes.balancer.set_endpoints([replace(spec(0), loading=LoadSpec(most=1))], now=1.0)
    boxes.balancer.report_models(boxes.uids[0], [ModelCard(name, b"{}", engine="ollama") for name in MODELS])
    boxes.say(0, ["a"], now=2.0)
    boxes.close(before, now=3.0)
    boxes.ask("a", now=4.0)
    waits = boxes.ask("b", now=6.0)
    for now in (6.1, 6.2):
        boxes.decide(now=now)
    assert waits.state is TicketState.WAITING, "`a` is busy"


def test_models_of_the_settings_are_in_memory_by_the_engines_name() -> None:
    """`q`, which the settings call `a` and `b`. What else it has is not theirs."""
    boxes = Boxes(NOTHING_SAID)
    named = [replace(spec(0), models=("a", "b"), model="q", engine="ollama")]
    boxes.balancer.set_endpoints(named, now=1.0)
    uid = boxes.uids[0] = next(iter(boxes.balancer.snapshot(now=1.0).in_memory))
    boxes.balancer.report_health(uid, True, "test", now=1.0)
    boxes.balancer.report_models(uid, [ModelCard("c", b"{}", engine="ollama")])
    boxes.say(0, ["q", "x", "y"], now=2.0)
    assert boxes.memory(0, now=2.0) == {"a": "awake", "b": "awake"}


@pytest.mark.parametrize(("listed", "said"), [("a:latest", "a"), ("a", "a:latest")])
def test_what_is_kept_is_said_with_the_tag_or_without(listed: str, said: str) -> None:
    boxes = Boxes(LoadSpec(most=1, keep=frozenset({said}), never=frozenset("c")))
    boxes.balancer.report_models(boxes.uids[0], [ModelCard(one, b"{}", engine="ollama") for one in (listed, "b")])
    boxes.say(0, [listed], now=1.0)
    waits = boxes.ask("b", now=2.0)
    for now in (3.0, 20.0, 200.0):
        boxes.decide(now=now)
    assert waits.state is TicketState.WAITING
    assert boxes.memory(0, now=200.0) == {listed: "awake"}


def respond(boxes: Boxes, model: str, *, now: float, first_s: float, at: int) -> None:
    """A request goes to a box, which takes so long for the first byte."""
    ticket = boxes.ask(model, now=now)
    for later in (0.1, 0.2, 0.3):
        boxes.decide(now=now + later)
    assert boxes.place(ticket) == at
    boxes.balancer.first_byte(ticket, now=now + first_s)
    boxes.decide(now=now + first_s)
    boxes.close(ticket, now=now + first_s)


def silent(*most: int) -> Boxes:
    return Boxes(*(LoadSpec(most=one) for one in most), engine=None)


def test_where_nothing_says_it_what_responds_is_in_memory() -> None:
    """Nothing is at first. One request has a model loaded; others wait for it there, and go there when it is."""
    boxes = silent(1, 1)
    boxes.decide(now=0.5)
    assert (boxes.memory(0, now=0.5), boxes.memory(1, now=0.5)) == ({}, {})
    respond(boxes, "a", now=1.0, first_s=9.0, at=0)
    respond(boxes, "b", now=11.0, first_s=9.0, at=1)
    assert (boxes.memory(0, now=20.0), boxes.memory(1, now=20.0)) == ({"a": "awake"}, {"b": "awake"})
    assert [boxes.home("a", now=21.0 + n) for n in range(3)] == [0, 0, 0]
    boxes.decide(now=58.0)
    respond(boxes, "c", now=60.0, first_s=9.0, at=1)
    assert (boxes.memory(0, now=70.0), boxes.memory(1, now=70.0)) == ({"a": "awake"}, {"c": "awake"})


def test_a_slow_first_byte_is_no_load() -> None:
    """Of a long prompt, or behind others."""
    boxes = silent(1)
    respond(boxes, "a", now=1.0, first_s=9.0, at=0)
    before = boxes.sleepers.durations()
    respond(boxes, "a", now=20.0, first_s=60.0, at=0)
    assert (boxes.memory(0, now=81.0), boxes.sleepers.durations()) == ({"a": "awake"}, before)


def test_what_an_engine_unloads_by_itself_is_loaded_by_the_next_request() -> None:
    """As nobody used it, or for another client: the request goes where it was, and is the one that is waited for."""
    boxes = silent(1, 1)
    respond(boxes, "a", now=1.0, first_s=9.0, at=0)
    respond(boxes, "a", now=4000.0, first_s=9.0, at=0)
    assert (boxes.memory(0, now=4010.0), boxes.memory(1, now=4010.0)) == ({"a": "awake"}, {})


def test_where_two_fit_the_engine_unloads_what_was_used_least_recently() -> None:
    """However often it is asked for: lbproxy does not choose there, and must not believe another to be gone."""
    boxes = silent(2)
    respond(boxes, "b", now=1.0, first_s=9.0, at=0)
    for n in range(6):
        respond(boxes, "a", now=20.0 + n, first_s=0.5, at=0)
    respond(boxes, "b", now=30.0, first_s=0.5, at=0)
    respond(boxes, "c", now=50.0, first_s=9.0, at=0)
    assert boxes.memory(0, now=60.0) == {"b": "awake", "c": "awake"}


def test_a_late_response_of_what_gave_way_is_not_believed_for_long() -> None:
    """It was served before the model that needed its place."""
    boxes = silent(1)
    respond(boxes, "a", now=1.0, first_s=9.0, at=0)
    late = boxes.ask("a", now=11.0)
    held = boxes.ask("c", now=11.0)
    for tenth in range(110, 400):
        boxes.decide(now=0.1 * tenth)
    assert boxes.place(held) == 0
    boxes.balancer.first_byte(late, now=41.0)
    boxes.decide(now=41.1)
    boxes.balancer.first_byte(held, now=50.0)
    boxes.decide(now=50.1)
    assert boxes.memory(0, now=50.1) == {"c": "awake"}


def test_models_fit_by_their_sizes() -> None:
    """`a` and `b` together, `c` alone; one whose size is not said takes all there is."""
    gib = 1 << 30
    boxes = Boxes(LoadSpec(most=24 * gib, sizes=(("a", 8 * gib), ("b", 16 * gib))))
    assert [boxes.home(model, now=now) for now, model in enumerate("ab", 1)] == [0, 0]
    boxes.say(0, ["a", "b"], now=3.0)
    waits = boxes.ask("c", now=4.0)
    assert waits.state is TicketState.WAITING
    for tenth in range(41, 80):
        boxes.decide(now=0.1 * tenth)
    assert boxes.place(waits) == 0
    assert boxes.memory(0, now=8.0) == {"c": "waking"}, "two had to go"


def test_another_context_is_another_load() -> None:
    """Ollama loads a model anew for another `num_ctx`, and again for a request without. So it is loaded beside, where
    there is room; each request goes where its model is as it wants it; and one that is in memory is not waited for.
    """
    boxes = Boxes(LoadSpec(most=1), LoadSpec(most=1))
    cards = [ModelCard(name, b"{}", None, 4096, True, "ollama") for name in MODELS]
    boxes.balancer.report_models(boxes.uids[0], cards)
    boxes.say(0, ["a"], now=1.0)
    assert boxes.home("a", now=2.0) == 0
    longer = boxes.ask("a", now=3.0, context=8192)
    assert longer.wait is Wait.WAKING
    boxes.decide(now=3.1)
    assert boxes.place(longer) == boxes.place(boxes.ask("a", now=4.0, context=8192)) == 1
    boxes.say(1, ["a"], now=9.0)
    assert [boxes.place(boxes.ask("a", now=10.0 + n)) for n in range(3)] == [0, 0, 0]
    assert boxes.place(boxes.ask("a", now=14.0, context=8192)) == 1


def test_a_load_with_another_context_is_not_waited_for() -> None:
    """It may take a minute, and is of no use to who wants the model otherwise."""
    boxes = Boxes(LoadSpec(most=1), LoadSpec(most=1), LoadSpec(most=1))
    tickets = []
    for now, context in ((1.0, 4096), (2.0, 8192), (3.0, None)):
        tickets.append(boxes.ask("a", now=now, context=context))
        boxes.decide(now=now + 0.1)
    assert {boxes.place(ticket) for ticket in tickets} == {0, 1, 2}


def test_what_the_settings_said_of_its_memory_does_not_count_any_more() -> None:
    """Where they say nothing now, it is what it shows: not as many models as there were bytes."""
    boxes = Boxes(LoadSpec(most=8 << 30, sizes=(("a", 6 << 30), ("b", 6 << 30))))
    boxes.balancer.set_endpoints([spec(0)], now=1.0)
    boxes.say(0, ["a"], now=1.0)
    boxes.home("b", now=2.0)
    waits = boxes.ask("c", now=3.0)
    boxes.decide(now=3.1)
    assert waits.state is TicketState.WAITING


def test_where_there_is_no_room_a_model_is_loaded_anew_with_another_context() -> None:
    """It is not waited for another model to go; and what is then there is known."""
    boxes = Boxes(LoadSpec(most=1), LoadSpec(most=1, never=frozenset("a")), LoadSpec(most=1))
    boxes.say(0, ["a"], now=1.0)
    boxes.say(2, ["b"], now=1.0)
    assert boxes.place(boxes.ask("a", now=2.0, context=8192)) == 0
    assert boxes.place(boxes.ask("a", now=3.0)) == 0
    boxes.say(2, [], now=4.0)
    plain = boxes.ask("a", now=5.0)
    assert boxes.place(plain) == 0
    longer = boxes.ask("a", now=6.0, context=8192)
    boxes.decide(now=6.1)
    assert boxes.place(longer) == 2


def test_a_context_that_the_engine_says_is_the_same() -> None:
    """However it came there: another client's, or the default."""
    boxes = Boxes(LoadSpec(most=1), LoadSpec(most=1))
    boxes.say(0, ["a"], now=1.0)
    boxes.say(1, ["a"], now=1.0)
    for n, length in enumerate((4096, 8192)):
        cards = [ModelCard(name, b"{}", None, length, True, "ollama") for name in MODELS]
        boxes.balancer.report_models(boxes.uids[n], cards)
    assert [boxes.place(boxes.ask("a", now=2.0 + n, context=8192)) for n in range(3)] == [1, 1, 1]
    assert [boxes.place(boxes.ask("a", now=6.0 + n, context=4096)) for n in range(3)] == [0, 0, 0]


def test_of_names_that_it_does_not_list_nothing_is_kept() -> None:
    """Where no list is known any name goes there: a client has many."""
    boxes = silent(1)
    boxes.balancer.report_models(boxes.uids[0], None)
    boxes.decide(now=1.0)
    for number in range(100):
        ticket = boxes.ask(f"name-{number}", now=2.0, context=4096)
        boxes.balancer.first_byte(ticket, now=2.5)
        boxes.close(ticket, now=3.0)
        assert ticket.placed_on is not None
    on_demand = ticket.placed_state.standing.on_demand
    assert on_demand is not None
    assert not any([on_demand.in_flight, on_demand.asked, on_demand.contexts, on_demand.responded])
