# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode apart: which requests are split, and between which endpoints."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.sections.routing import AdmissionSettings, RoutingSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import Endpoint
from lbproxy.core.endpoints.health import Health
from lbproxy.core.engines.handover import Handover, Role
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.queue.ticket import Ticket, TicketState, Wait
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import DECODE, PREFILL, WHOLE, InferenceRequest, Usage
from lbproxy.core.requests.retry import FailureKind
from tests.support.pool import MODEL, bring_up, make_balancer, seen, spec

ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}


def apart(
    shape: str, *, connector: str | None = "nixl", policy: str = "adaptive", split: object = "priced"
) -> tuple[Balancer, dict[str, Endpoint]]:
    """Endpoints by their roles: "ppd" is p1, p2 and d3."""
    balancer = make_balancer(policy=policy)
    rules = RoutingSettings.model_validate({"policy": policy, "split": split})
    balancer.reconfigure(make_policy(rules), BalancingSettings(), now=0.0)
    specs = [
        replace(spec(n), name=f"{kind}{n}", role=ROLES[kind], connector=None if kind == "b" else connector)
        for n, kind in enumerate(shape, start=1)
    ]
    endpoints = balancer.set_endpoints(specs, now=0.0).added
    bring_up(balancer, endpoints)
    return balancer, {one.name: one for one in endpoints}


def prompt(tokens: int, first: int = 0, *, splittable: bool = True) -> InferenceRequest:
    blocks = tuple(range(first, first + tokens // 256))
    return InferenceRequest("r", MODEL, True, 4 * tokens, 4 * tokens, blocks, splittable=splittable)


def name_of(ticket: Ticket) -> str:
    assert ticket.state is TicketState.PLACED, ticket.outcome
    return ticket.placed_state.endpoint.name


def in_flight(balancer: Balancer) -> dict[str, int]:
    return {name: one.in_flight for name, one in seen(balancer, 1.0).items()}


def serve(balancer: Balancer, request: InferenceRequest, now: float) -> list[str]:
    """Where the legs of a request went."""
    ticket = balancer.submit(request, now=now)
    went = [name_of(ticket)]
    if ticket.request.leg == PREFILL:
        first = ticket.placed_state.endpoint.uid
        balancer.first_byte(ticket, now=now + 0.1)
        balancer.close(ticket, Outcome.COMPLETED, now=now + 0.1, usage=Usage(request.prompt_bytes // 4, 0, None))
        ticket = balancer.submit(request.as_leg(DECODE, first), now=now + 0.1, resubmitted=True)
        went.append(name_of(ticket))
    balancer.first_byte(ticket, now=now + 0.2)
    balancer.close(ticket, Outcome.COMPLETED, now=now + 0.3, usage=Usage(None, None, 100))
    return went


def busy(balancer: Balancer, streams: int = 12) -> None:
    """Streams that are being decoded, which a long prefill beside them would stall."""
    for n in range(streams):
        ticket = balancer.submit(prompt(256, 50_000 + 1000 * n, splittable=False), now=0.1 * n)
        balancer.first_byte(ticket, now=0.1 * n + 0.05)


def test_a_long_prompt_is_split_and_a_short_one_is_not() -> None:
    balancer, _ = apart("pd")
    busy(balancer, streams=2)
    assert serve(balancer, prompt(64), 1.9) == ["d2"], "to compute it costs less than to fetch it"
    assert serve(balancer, prompt(32_768), 2.0) == ["p1", "d2"]


def test_while_nothing_is_decoded_nothing_is_gained_by_a_split() -> None:
    balancer, _ = apart("pd")
    assert serve(balancer, prompt(32_768), 1.0) == ["d2"]


def test_a_prompt_that_is_cached_where_it_is_decoded_stays_whole() -> None:
    balancer, _ = apart("pd")
    busy(balancer)
    assert serve(balancer, prompt(32_768), 2.0) == ["p1", "d2"]
    assert serve(balancer, prompt(32_768), 3.0) == ["d2"], "the transfer left it there"


def test_a_prompt_in_full_caches_costs_no_more_if_it_is_split() -> None:
    """It takes space at both ends, but what it displaces at a prefill endpoint is worth no more than what it leaves
    there. When that was priced, long prompts stayed whole, and stalled all streams.
    """
    balancer, _ = apart("pd", split="always")
    for n in range(60):
        serve(balancer, prompt(16_384, 1000 * n), 0.5 + 0.01 * n)
    balancer.reconfigure(make_policy(RoutingSettings()), BalancingSettings(), now=1.0)
    busy(balancer, streams=2)
    assert serve(balancer, prompt(16_384, 90_000), 2.0) == ["p1", "d2"]


@pytest.mark.parametrize(("tokens", "streams", "route"), [(1024, 6, ["d2"]), (8192, 2, ["p1", "d2"])])
def test_a_long_stall_of_streams_weighs_more_than_short_ones(tokens: int, streams: int, route: list[str]) -> None:
    """A wait for prefill is better than two streams that stop for long; a short stop, a response's tokens hide."""
    balancer, _ = apart("pd", split="always")
    assert name_of(balancer.submit(prompt(2304, 7000), now=1.5)) == "p1"
    balancer.reconfigure(make_policy(RoutingSettings()), BalancingSettings(), now=1.5)
    busy(balancer, streams=streams)
    assert serve(balancer, prompt(tokens), 1.5) == route


def test_a_second_leg_avoids_prompts_that_are_computed_where_others_decode() -> None:
    """The steps of a prefill delay every stream beside it."""
    balancer, endpoints = apart("pdd")
    stream = balancer.submit(prompt(12_288, splittable=False), now=0.5)
    balancer.first_byte(stream, now=1.0)
    whole = balancer.submit(prompt(8192, 1000, splittable=False), now=1.0)
    assert name_of(whole) != name_of(stream)
    leg = prompt(4096, 2000).as_leg(DECODE, endpoints["p1"].uid)
    assert name_of(balancer.submit(leg, now=1.0, resubmitted=True)) == name_of(stream)


def test_a_split_request_is_not_held_for_prompts_that_are_computed_where_it_will_be_decoded() -> None:
    """By then they are done, and the prefill endpoint must not be idle meanwhile."""
    balancer, _ = apart("pd", split="always")
    whole = balancer.submit(prompt(32_768, splittable=False), now=1.0)
    assert name_of(whole) == "d2"
    assert name_of(balancer.submit(prompt(8192, 1000), now=1.0)) == "p1"


def test_both_legs_are_counted_where_they_are_and_nothing_is_left() -> None:
    balancer, endpoints = apart("pd", split="always")
    ticket = balancer.submit(prompt(8192), now=1.0)
    assert ticket.request.leg == PREFILL
    assert in_flight(balancer) == {"p1": 1, "d2": 0}
    balancer.first_byte(ticket, now=2.0)
    balancer.close(ticket, Outcome.COMPLETED, now=2.0, usage=Usage(8192, 0, None))
    second = balancer.submit(prompt(8192).as_leg(DECODE, endpoints["p1"].uid), now=2.0, resubmitted=True)
    assert name_of(second) == "d2"
    assert in_flight(balancer) == {"p1": 0, "d2": 1}
    balancer.close(second, Outcome.CLIENT_CLOSED, now=3.0)
    assert in_flight(balancer) == {"p1": 0, "d2": 0}


@pytest.mark.parametrize("connector", ["sglang", "mooncake"])
def test_a_concurrent_connector_has_both_legs_placed_at_once(connector: str) -> None:
    balancer, _ = apart("pd", connector=connector, split="always")
    ticket = balancer.submit(prompt(8192), now=1.0)
    assert (name_of(ticket), ticket.request.leg) == ("d2", DECODE)
    assert ticket.prefill is not None
    assert (name_of(ticket.prefill), ticket.prefill.request.leg) == ("p1", PREFILL)
    assert in_flight(balancer) == {"p1": 1, "d2": 1}
    balancer.first_byte(ticket, now=2.0)
    assert in_flight(balancer) == {"p1": 0, "d2": 1}, "its KV is handed over"
    balancer.close(ticket, Outcome.COMPLETED, now=3.0)
    assert in_flight(balancer) == {"p1": 0, "d2": 0}


def test_a_concurrent_pair_that_fails_leaves_nothing() -> None:
    balancer, _ = apart("ppd", connector="sglang", split="always")
    ticket = balancer.submit(prompt(8192), now=1.0)
    balancer.close(ticket, Outcome.CONNECT_FAILED, now=1.1)
    assert set(in_flight(balancer).values()) == {0}


@pytest.mark.parametrize("policy", ["adaptive", "least-request", "gie", "min-ttft"])
@pytest.mark.parametrize(("split", "went"), [("always", ["p1", "d2"]), ("never", ["d2"]), (4000, ["p1", "d2"])])
def test_a_rule_overrules_prices(policy: str, split: object, went: list[str]) -> None:
    balancer, _ = apart("pd", policy=policy, split=split)
    assert serve(balancer, prompt(8192), 1.0) == went
    assert serve(balancer, prompt(512, 9000), 2.0) == (["d2"] if split == 4000 else went)


@pytest.mark.parametrize("split", ["priced", "always", 1])
def test_what_cannot_be_split_is_served_whole(split: object) -> None:
    balancer, _ = apart("pdb", split=split)
    for n in range(8):
        assert serve(balancer, prompt(32_768, 1000 * n, splittable=False), 1.0 + n) in (["d2"], ["b3"])


def test_without_any_decode_endpoint_prefill_ones_serve_whole_requests_if_their_engine_does() -> None:
    balancer, endpoints = apart("pd")
    for _ in range(3):
        balancer.report_health(endpoints["d2"].uid, False, "test", now=1.0)
    ticket = balancer.submit(prompt(32_768), now=2.0)
    assert (name_of(ticket), ticket.request.leg) == ("p1", WHOLE)


def test_an_engine_that_cannot_serve_whole_requests_gets_none() -> None:
    balancer, endpoints = apart("pd", connector="sglang")
    ticket = balancer.submit(prompt(8192, splittable=False), now=1.0)
    assert (ticket.state, ticket.outcome) == (TicketState.CLOSED, Outcome.NO_ENDPOINTS)
    for _ in range(3):
        balancer.report_health(endpoints["d2"].uid, False, "test", now=1.0)
    assert balancer.submit(prompt(8192), now=2.0).request.leg == DECODE, "the pair is tried, by one request"
    assert balancer.submit(prompt(8192), now=2.0).outcome is Outcome.NO_ENDPOINTS


def test_connectors_are_not_mixed() -> None:
    balancer = make_balancer(policy="adaptive")
    specs = [
        replace(spec(1), name="p1", role=Role.PREFILL, connector="nixl"),
        replace(spec(2), name="d2", role=Role.DECODE, connector="mooncake"),
    ]
    bring_up(balancer, balancer.set_endpoints(specs, now=0.0).added)
    assert name_of(balancer.submit(prompt(32_768), now=1.0)) == "d2"


def test_what_the_engine_says_of_its_role_overrules_the_settings() -> None:
    """A unified SGLang server that is configured as prefill serves everything; one that says it is prefill, nothing
    whole.
    """
    balancer, endpoints = apart("pb", connector=None)
    balancer.report_role(endpoints["p1"].uid, Handover())
    went = {name_of(balancer.submit(prompt(1024, 100 * n), now=1.0)) for n in range(6)}
    assert went == {"p1", "b2"}
    balancer.report_role(endpoints["b2"].uid, Handover(Role.PREFILL, "sglang", 8998))
    assert name_of(balancer.submit(prompt(1024, 5000, splittable=False), now=2.0)) == "p1"


def test_a_second_leg_goes_elsewhere_after_a_failure_and_nowhere_if_there_is_nothing_else() -> None:
    balancer, endpoints = apart("pdd", split="always")
    first = endpoints["p1"].uid
    second = balancer.submit(prompt(8192).as_leg(DECODE, first), now=1.0, resubmitted=True)
    verdict = balancer.after_failure(second, FailureKind.CONNECT, (), now=1.1, refused=True)
    balancer.close(second, verdict.outcome, now=1.1)
    avoid = frozenset({second.placed_state.endpoint.uid})
    other = balancer.submit(prompt(8192).as_leg(DECODE, first), now=1.1, avoid=avoid, resubmitted=True)
    assert name_of(other) != name_of_closed(second)
    both = avoid | {other.placed_state.endpoint.uid}
    none = balancer.submit(prompt(8192).as_leg(DECODE, first), now=1.2, avoid=both, resubmitted=True)
    assert (none.state, none.outcome) == (TicketState.CLOSED, Outcome.NO_ENDPOINTS)


def name_of_closed(ticket: Ticket) -> str:
    return ticket.placed_state.endpoint.name


def test_where_one_end_is_up_an_unreachable_other_end_is_tried() -> None:
    """SGLang serves nothing whole: without a trial, all requests would be refused until the next health check."""
    balancer, endpoints = apart("pd", connector="sglang", split="always")
    for at in (1.0, 2.0, 3.0):
        balancer.report_health(endpoints["p1"].uid, False, "refused", now=at)
    ticket = balancer.submit(prompt(8192), now=60.0)
    assert name_of(ticket) == "d2"
    assert ticket.prefill is not None
    assert name_of(ticket.prefill) == "p1"
    assert ticket.prefill.is_trial
    assert not ticket.is_trial


def test_the_parts_of_a_split_requests_cost_add_up() -> None:
    balancer, _ = apart("ppdd")
    busy(balancer)
    balancer.explain(True)
    ticket = balancer.submit(prompt(32_768), now=2.0)
    assert ticket.decision is not None
    assert ticket.request.leg == PREFILL
    parts = ticket.decision.breakdown()
    assert len(parts) == len(ticket.decision.costs) == 4
    for cost, own in zip(ticket.decision.costs, parts, strict=True):
        assert sum(own.values()) == pytest.approx(cost)
    assert "transfer" in parts[ticket.decision.chosen_index]
    assert ticket.decision.first_byte_ms() is not None


def test_a_request_that_is_best_split_is_held_while_either_end_is_full() -> None:
    """Work for a prefill endpoint beyond its room waits here, and is placed when a first leg ends."""
    balancer, _ = apart("pd", split="always")
    placed = [balancer.submit(prompt(32_768, 1000 * n), now=1.0) for n in range(4)]
    waiting = [one for one in placed if one.state is TicketState.WAITING]
    assert waiting, "3 s of prefill are queued there"
    running = next(one for one in placed if one.state is TicketState.PLACED)
    balancer.first_byte(running, now=4.0)
    balancer.close(running, Outcome.COMPLETED, now=4.0, usage=Usage(32_768, 0, None))
    changed = balancer.poll(now=4.0)
    assert {one.request.leg for one in changed} == {PREFILL}
    assert 0 < len(changed) < len(waiting), "the first, and one to test what it computes in parallel"


def test_legs_teach_what_they_show() -> None:
    """A transfer is no prefill, and one token is no response."""
    balancer, _ = apart("pd", split="always")
    for n in range(30):
        serve(balancer, prompt(8192, 1000 * n), 1.0 + n)
    learned = balancer.learned(now=40.0)
    assert learned is not None
    pool, _ = learned
    assert pool.answer_tokens == pytest.approx(200.0 + (100.0 - 200.0) * (1 - 0.98**30), rel=0.05)


def test_a_decode_endpoint_that_backs_off_or_starts_slowly_is_no_reason_to_serve_whole_requests_at_prefill() -> None:
    balancer, _ = apart("pd", split="always")
    ticket = balancer.submit(prompt(8192), now=1.0)
    first = ticket.placed_state.endpoint.uid
    balancer.close(ticket, Outcome.COMPLETED, now=1.1)
    second = balancer.submit(prompt(8192).as_leg(DECODE, first), now=1.1, resubmitted=True)
    balancer.after_failure(second, FailureKind.BUSY, (), now=1.2)
    balancer.close(second, Outcome.CONNECT_FAILED, now=1.2)
    whole = balancer.submit(prompt(512, 9000, splittable=False), now=1.21)
    assert name_of(whole) == "d2"
    again = balancer.submit(prompt(8192, 5000), now=1.21)
    assert (name_of(again), again.request.leg) == ("p1", PREFILL)


def test_a_pair_waits_for_the_configured_limit_of_its_only_decode_endpoint() -> None:
    balancer, _ = apart("pd", split="always")
    limits = BalancingSettings(admission=AdmissionSettings(max_in_flight_per_endpoint=1))
    balancer.reconfigure(None, limits, now=0.0)
    whole = balancer.submit(prompt(512, 9000, splittable=False), now=1.0)
    assert name_of(whole) == "d2"
    waiting = balancer.submit(prompt(8192), now=1.0)
    assert (waiting.state, waiting.wait) == (TicketState.WAITING, Wait.FULL)
    balancer.close(whole, Outcome.COMPLETED, now=2.0)
    assert [one.request.leg for one in balancer.poll(now=2.0)] == [PREFILL]


def test_other_replicas_count_a_second_leg_as_one() -> None:
    """Else they would wait there for a prefill that is none."""
    here, endpoints = apart("pd", split="always")
    there, _ = apart("pd", split="always")
    journal, _ = here.share("a")
    _, peers = there.share("b")
    first = here.submit(prompt(32_768), now=1.0)
    here.first_byte(first, now=2.0)
    here.close(first, Outcome.COMPLETED, now=2.0, usage=Usage(32_768, 0, None))
    here.submit(prompt(32_768).as_leg(DECODE, endpoints["p1"].uid), now=2.0, resubmitted=True)
    batch = journal.take(2.0)
    assert batch is not None
    peers.hear(batch, now=2.0)
    states = {one.endpoint.name: one for one in there.endpoints.members()}
    assert states["d2"].elsewhere == 1
    assert states["d2"].load.work.pending_tokens == 0.0


@pytest.mark.parametrize("connector", ["nixl", "sglang"])
def test_the_breaker_leaves_each_role_some_endpoints(connector: str) -> None:
    """Half of all are well, but without prefill endpoints they are of no use, or do all of it."""
    balancer, endpoints = apart("ppdd", connector=connector, split="always")
    for name in ("p1", "p2"):
        uid = endpoints[name].uid
        avoid = frozenset(one.uid for one in endpoints.values() if one.name[0] == "p" and one.uid != uid)
        for n in range(5):
            ticket = balancer.submit(prompt(8192, 1000 * n), now=1.0, avoid=avoid)
            at = ticket.prefill or ticket
            assert name_of(at) == name
            balancer.after_failure(at, FailureKind.RESET, (), now=1.0)
            balancer.close(ticket, Outcome.UPSTREAM_RESET, now=1.0)
    healths = {name: one.health for name, one in seen(balancer, 1.1).items()}
    assert healths["p1"] is healths["p2"] is Health.EJECTED
    ticket = balancer.submit(prompt(8192, 90_000), now=1.1)
    assert (ticket.prefill or ticket).request.leg == PREFILL
