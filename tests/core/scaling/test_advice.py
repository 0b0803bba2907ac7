# SPDX-License-Identifier: Apache-2.0
"""What is recommended over time: unknown, idle, rising and falling, models that share endpoints, and hostile names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import Endpoint, SleepSpec
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage
from lbproxy.core.scaling.advice import ModelScaling
from tests.support.pool import bring_up, card, make_balancer, pool_of, show_gauges, spec

WINDOW_S = 300.0


def advice(balancer: Balancer, model: str = "m") -> ModelScaling:
    return next(one for one in balancer.snapshot(now=0.0).models if one.model == model)


def named(model: str | None, number: int = 0) -> InferenceRequest:
    return InferenceRequest(f"r{number}", model, True, 400, 400)


def pass_time(
    balancer: Balancer,
    endpoints: Sequence[Endpoint],
    from_s: float,
    seconds: int,
    *,
    rate: int = 0,
    served_s: float = 1.0,
    running: float | None = None,
    model: str = "m",
) -> float:
    """`rate` requests arrive each second, and take `served_s` and 100 tokens. `running`: what each engine reports."""
    ends: list[tuple[float, Ticket]] = []
    now = from_s

    def begun(tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            if ticket.state is TicketState.PLACED:
                balancer.first_byte(ticket, now=now)
                ends.append((now + served_s, ticket))

    for second in range(seconds):
        now = from_s + second
        for endpoint in endpoints:
            show_gauges(balancer, endpoint.uid, now=now, running=rate * served_s if running is None else running)
        for at, ticket in [one for one in ends if one[0] <= now]:
            balancer.progress(ticket, 100, now=now)
            balancer.close(ticket, Outcome.COMPLETED, now=now, usage=Usage(100, 0, 100))
            ends.remove((at, ticket))
        begun([balancer.submit(named(model, number), now=now) for number in range(rate)])
        begun(balancer.poll(now=now))
        balancer.check(now=now)
    for _, ticket in ends:
        balancer.close(ticket, Outcome.COMPLETED, now=now, usage=Usage(100, 0, 100))
    return now + 1.0


def test_unknown_is_what_there_is() -> None:
    balancer, endpoints = pool_of(3, policy="adaptive")
    pass_time(balancer, endpoints, 0.0, 20)
    one = advice(balancer)
    assert (one.endpoints, one.recommended, one.waiting, one.predicted_wait_s) == (3, 3, 0, 0.0)
    assert not one.recommended_known
    balancer.submit(named("m"), now=20.0)
    balancer.check(now=21.0)
    assert advice(balancer).recommended == 3, "of one request nothing is learned"
    for endpoint in endpoints:
        balancer.drain(endpoint.uid)
    balancer.check(now=22.0)
    one = advice(balancer)
    assert (one.endpoints, one.recommended, one.recommended_known) == (0, 3, False), "those that there were are no need"


def test_a_policy_that_learns_nothing_recommends_nothing() -> None:
    balancer, endpoints = pool_of(2, policy="round-robin")
    pass_time(balancer, endpoints, 0.0, 5, rate=2)
    one = advice(balancer)
    assert (one.endpoints, one.recommended, one.predicted_wait_s, one.room) == (2, None, None, None)


def test_without_demand_for_a_whole_window_it_is_none_and_with_the_first_request_again_some() -> None:
    balancer, endpoints = pool_of(2, policy="adaptive")
    now = pass_time(balancer, endpoints, 0.0, 30, rate=2)
    assert advice(balancer).recommended == 2, "a lower number counts after the window"
    now = pass_time(balancer, endpoints, now, 2 * int(WINDOW_S) + 100)
    assert (advice(balancer).recommended, advice(balancer).recommended_known) == (0, True)
    pass_time(balancer, endpoints, now, 1, rate=1)
    balancer.check(now=now + 1)
    assert (advice(balancer).recommended or 0) >= 1


def test_more_is_recommended_at_once_and_fewer_after_the_window() -> None:
    """Engines that report 16 requests and a queue: the limit is known, and 40 requests that run need three."""
    balancer, endpoints = pool_of(1, policy="adaptive")
    uid = endpoints[0].uid
    now = pass_time(balancer, endpoints, 0.0, 60, rate=4, served_s=2.0, running=8.0)
    assert advice(balancer).recommended == 1
    balancer.scrape_sent(uid)
    show_gauges(balancer, uid, now=now, running=16.0, waiting=5.0)
    now = pass_time(balancer, endpoints, now, 40, rate=20, served_s=2.0, running=16.0)
    high = advice(balancer).recommended or 0
    assert 2 <= high <= 4
    assert advice(balancer).recommended_known
    now = pass_time(balancer, endpoints, now, int(WINDOW_S / 2), rate=4, served_s=2.0, running=8.0)
    assert (advice(balancer).recommended or 0) >= high
    now = pass_time(balancer, endpoints, now, 3 * int(WINDOW_S), rate=4, served_s=2.0, running=8.0)
    assert advice(balancer).recommended == 1


def test_from_no_endpoint_a_request_asks_for_one() -> None:
    """Scaled to zero: the name is remembered, the request is refused, and counts."""
    balancer, endpoints = pool_of(1, policy="adaptive")
    now = pass_time(balancer, endpoints, 0.0, 30, rate=2)
    balancer.set_endpoints([], now=now)
    now = pass_time(balancer, [], now, 2 * int(WINDOW_S) + 100)
    assert (advice(balancer).endpoints, advice(balancer).recommended) == (0, 0)
    balancer.submit(named("m"), now=now)
    balancer.check(now=now)
    balancer.check(now=now + 1)
    assert advice(balancer).recommended == 1
    assert advice(balancer).predicted_wait_s is None
    now = pass_time(balancer, [], now + 1, 3700)
    assert balancer.snapshot(now=now).models == [], "after an hour it is forgotten"


def test_draining_and_down_endpoints_are_no_capacity() -> None:
    balancer, endpoints = pool_of(3, policy="adaptive")
    balancer.drain(endpoints[0].uid)
    for _ in range(3):
        balancer.report_health(endpoints[1].uid, False, "test", now=0.0, refused=True)
    balancer.check(now=1.0)
    assert advice(balancer).endpoints == 1


def test_endpoints_that_sleep_or_that_requests_overflow_to_are_no_capacity() -> None:
    balancer = make_balancer(policy="adaptive")
    specs = [spec(1), replace(spec(2), sleep=SleepSpec()), replace(spec(3), tier=2)]
    endpoints = balancer.set_endpoints(specs, now=0.0).added
    bring_up(balancer, endpoints)
    balancer.sleepers.reported(endpoints[1].base_url, True, asked_at=0.5, now=0.5)
    balancer.check(now=1.0)
    assert advice(balancer).endpoints == 1
    balancer.sleepers.reported(endpoints[1].base_url, False, asked_at=1.5, now=1.5)
    balancer.check(now=2.0)
    assert advice(balancer).endpoints == 2


def test_models_on_the_same_endpoints_are_one_demand_and_adapters_have_no_series() -> None:
    balancer, endpoints = pool_of(2, policy="adaptive")
    balancer.report_models(endpoints[0].uid, [card("m"), card("lora", "m"), card("n")])
    balancer.report_models(endpoints[1].uid, [card("n"), card("o")])
    balancer.check(now=0.0)
    models = balancer.snapshot(now=0.0).models
    assert [one.model for one in models] == ["m", "n", "o"]
    assert {one.endpoints for one in models} == {2}
    pass_time(balancer, endpoints, 1.0, 30, rate=3, model="lora")
    demand = balancer._placing.advice.demand.models
    assert demand["lora"].arrived == 90
    assert demand["lora"].output_tokens > 0


def test_names_that_clients_invent_are_not_counted() -> None:
    balancer, _ = pool_of(1, policy="adaptive")
    balancer.check(now=0.0)
    for number in range(1000):
        balancer.submit(named(f"invented-{number}"), now=0.5)
    balancer.check(now=1.0)
    assert list(balancer._placing.advice.demand.models) == ["m"]
    assert [one.model for one in balancer.snapshot(now=1.0).models] == ["m"]


def test_waiting_requests_are_counted_by_model() -> None:
    balancer, endpoints = pool_of(1, policy="adaptive")
    show_gauges(balancer, endpoints[0].uid, now=0.0, running=2.0, waiting=50.0)
    balancer.check(now=0.0)
    for number in range(40):
        balancer.submit(named("m", number), now=0.0)
    balancer.check(now=1.0)
    one = advice(balancer)
    assert one.waiting == len(balancer._queue) > 0
    assert one.room == 0.0
    assert (one.predicted_wait_s or 0.0) > 0.0


def test_what_no_endpoint_lists_any_more_is_no_part_of_the_demand() -> None:
    """A model leaves endpoints that go on with another: it has no series, and its counts do not spoil the rest."""
    balancer, endpoints = pool_of(2, policy="adaptive")
    for endpoint in endpoints:
        balancer.report_models(endpoint.uid, [card("m"), card("n")])
    now = pass_time(balancer, endpoints, 0.0, 30, rate=3, model="n")
    for endpoint in endpoints:
        balancer.report_models(endpoint.uid, [card("m")])
    now = pass_time(balancer, endpoints, now, 30, rate=3)
    assert [one.model for one in balancer.snapshot(now=now).models] == ["m"]
    assert list(balancer._placing.advice.demand.models) == ["m"]
    assert advice(balancer).recommended == 2


def test_several_models_of_endpoints_that_are_gone_are_still_one_demand() -> None:
    balancer, endpoints = pool_of(1, policy="adaptive")
    balancer.report_models(endpoints[0].uid, [card("m"), card("n")])
    now = pass_time(balancer, endpoints, 0.0, 30, rate=3)
    balancer.set_endpoints([], now=now)
    balancer.submit(named("n"), now=now)
    now = pass_time(balancer, [], now, 10)
    assert [(one.model, one.endpoints, one.recommended) for one in balancer.snapshot(now=now).models] == [
        ("m", 0, 1),
        ("n", 0, 1),
    ]


def test_of_a_large_fleet_a_part_is_read_at_a_time() -> None:
    balancer, endpoints = pool_of(500, policy="adaptive")
    now = pass_time(balancer, endpoints, 0.0, 12, rate=20)
    one = advice(balancer)
    assert one.endpoints == one.recommended == 500
    assert one.room is not None
    assert now == 12.0
