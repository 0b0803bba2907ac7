# SPDX-License-Identifier: Apache-2.0
"""What endpoints and flows used of their limits per time survives a restart, whatever the tiers and the policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lbproxy.config.sections.flows import FlowSettings, FlowsSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.capacity.allowance import Bounds
from lbproxy.core.capacity.bucket import DAY_S
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.queue.flow import Flow
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage
from lbproxy.core.restarts import MAX_ABSENT
from lbproxy.core.saved.pieces import VERSION
from lbproxy.core.saved.reading import MAX_FLOWS, Saved, encode, read_lines
from tests.support.pool import MODEL, make_balancer, pool_of, spec

WALL = 1.7e9
"""What the wall clock said when it was saved."""
BOUNDS = Bounds(requests_per_minute=60, tokens_per_minute=100_000, tokens_per_day=1_000_000)
POLICIES = ["adaptive", "least-request", "round-robin"]
VERSION_1 = Path(__file__).parents[2] / "fixtures/state/version-1.jsonl"


def provider(n: int = 1, bounds: Bounds | None = BOUNDS, **more: object) -> EndpointSpec:
    facts = {"tier": 2, "metrics": None, "health": None, "models": (MODEL,), "model": "its", **more}
    return replace(spec(n), bounds=bounds, **facts)  # type: ignore[arg-type]


def balancer_of(*specs: EndpointSpec, policy: str = "least-request", now: float = 0.0) -> Balancer:
    balancer = make_balancer(policy=policy)
    balancer.set_endpoints(specs, now=now)
    return balancer


def use(balancer: Balancer, tokens: int, *, now: float) -> None:
    ticket = balancer.submit(InferenceRequest("r", MODEL, True, 400, 400), now=now)
    assert ticket.placed_on is not None
    balancer.first_byte(ticket, now=now)
    balancer.close(ticket, Outcome.COMPLETED, now=now, usage=Usage(tokens, 0, 0))


def lines_of(balancer: Balancer, *, now: float, wall: float = WALL) -> list[bytes]:
    return [encode(one) for one in balancer.restarts.save(saved_at=wall, prefixes=True, now=now) if one is not None]


def saved_by(balancer: Balancer, *, now: float, wall: float = WALL) -> Saved:
    return read_lines(lines_of(balancer, now=now, wall=wall))


def used(balancer: Balancer, *, now: float, number: int = 0) -> dict[str, float]:
    allowance = list(balancer.endpoints.members())[number].allowance
    assert allowance is not None
    return dict(allowance.used(0, now))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tier", [1, 2])
def test_what_was_used_is_used_after_a_restart(policy: str, tier: int) -> None:
    facts: dict[str, Any] = {"tier": 1, "model": None} if tier == 1 else {}
    old = balancer_of(provider(**facts), policy=policy, now=9e5)
    use(old, 40_000, now=9e5)
    new = balancer_of(provider(**facts), policy=policy, now=77.0)
    new.restarts.restore(saved_by(old, now=9e5 + 6.0), age_s=24.0, now=77.0)
    assert used(new, now=77.0) == pytest.approx(
        {"requests_per_minute": 0.0, "tokens_per_minute": 0.0, "tokens_per_day": 0.04}, abs=1e-6
    )
    young = balancer_of(provider(**facts), policy=policy, now=77.0)
    young.restarts.restore(saved_by(old, now=9e5 + 6.0), age_s=6.0, now=77.0)
    assert used(young, now=77.0)["tokens_per_minute"] == pytest.approx(0.4 - 12.0 / 60.0)
    full = balancer_of(provider(bounds=Bounds(tokens_per_day=40_100), **facts), policy=policy, now=77.0)
    full.restarts.restore(saved_by(old, now=9e5 + 6.0), age_s=24.0, now=77.0)
    refused = full.submit(InferenceRequest("r", MODEL, True, 400, 400), now=77.0)
    assert refused.outcome is Outcome.SATURATED
    assert refused.retry_after_s == pytest.approx(DAY_S, abs=700.0)


def test_ten_restarts_in_a_day_change_nothing() -> None:
    """Clocks of processes begin anywhere; each file is a minute old when it is read."""
    balancer, wall, now = balancer_of(provider()), WALL, 0.0
    use(balancer, 500_000, now=now)
    for number in range(10):
        wall, now = wall + 8_000.0, now + 8_000.0
        saved = saved_by(balancer, now=now, wall=wall)
        wall, now = wall + 60.0, 1000.0 * number
        balancer = balancer_of(provider(), now=now)
        balancer.restarts.restore(saved, age_s=60.0, now=now)
        assert used(balancer, now=now)["tokens_per_day"] == pytest.approx(0.5), number
    left = DAY_S - (wall - WALL)
    assert used(balancer, now=now + left - 1.0)["tokens_per_day"] == pytest.approx(0.5)
    assert used(balancer, now=now + left + 601.0)["tokens_per_day"] == 0.0


@pytest.mark.parametrize("policy", POLICIES)
def test_an_endpoint_that_is_found_later_is_not_forgotten_meanwhile(policy: str) -> None:
    """Its name could not be resolved after the restart, and lbproxy is restarted again."""
    old = balancer_of(provider())
    use(old, 250_000, now=0.0)
    between = balancer_of(spec(9), policy=policy)
    between.restarts.restore(saved_by(old, now=1.0), age_s=10.0, now=0.0)
    new = balancer_of(policy=policy)
    new.restarts.restore(saved_by(between, now=3600.0, wall=WALL + 3610.0), age_s=10.0, now=0.0)
    new.set_endpoints([provider()], now=7200.0)
    assert used(new, now=7200.0)["tokens_per_day"] == pytest.approx(0.25)
    new.set_endpoints([], now=7200.0)
    assert len(saved_by(new, now=7200.0).used) == 1
    assert not saved_by_or_nothing(new, now=DAY_S + 700.0)


def saved_by_or_nothing(balancer: Balancer, *, now: float) -> dict[str, object]:
    lines = lines_of(balancer, now=now)
    return dict(read_lines(lines).used) if lines else {}


def test_a_provider_that_is_removed_and_added_again_has_no_second_budget() -> None:
    balancer = balancer_of(provider())
    use(balancer, 250_000, now=0.0)
    balancer.set_endpoints([spec(2)], now=10.0)
    balancer.set_endpoints([spec(2), provider()], now=20.0)
    assert used(balancer, now=20.0, number=1)["tokens_per_day"] == pytest.approx(0.25)
    balancer.set_endpoints([spec(2), provider(bounds=None)], now=30.0)
    assert not saved_by_or_nothing(balancer, now=30.0), "without a limit nothing is counted"


def test_endpoints_are_told_apart_by_url_and_model() -> None:
    old = balancer_of(provider(model="large"))
    use(old, 100_000, now=0.0)
    new = balancer_of(provider(model="small"), provider(model="large", name="other"), policy="adaptive")
    new.restarts.restore(saved_by(old, now=1.0), age_s=0.0, now=0.0)
    assert [used(new, now=0.0, number=n)["tokens_per_day"] for n in (0, 1)] == [0.0, 0.1]


def test_a_policy_that_learns_nothing_without_limits_saves_nothing() -> None:
    assert not lines_of(balancer_of(spec(1), provider(2, bounds=Bounds(max_in_flight=5))), now=0.0)


def test_what_one_policy_saved_another_one_reads() -> None:
    """Without what was learned, where nothing was."""
    old = balancer_of(provider())
    use(old, 100_000, now=0.0)
    new = balancer_of(provider(), policy="adaptive")
    assert new.restarts.restore(saved_by(old, now=1.0), age_s=0.0, now=0.0) is None
    assert used(new, now=0.0)["tokens_per_day"] == 0.1
    back = balancer_of(provider())
    assert back.restarts.restore(saved_by(new, now=1.0), age_s=0.0, now=0.0) is None
    assert used(back, now=0.0)["tokens_per_day"] == pytest.approx(0.1)


def test_a_file_of_the_version_before_is_read() -> None:
    """Recorded with the last lbproxy that wrote it."""
    saved = read_lines(VERSION_1.read_bytes().splitlines(keepends=True))
    assert (saved.saved_at, len(saved.endpoints), len(saved.keys)) == (1e9, 2, 40)
    assert (saved.used, saved.flows, saved.sleep) == ({}, {}, {})
    new = balancer_of(spec(1), spec(2), policy="adaptive")
    restoring = new.restarts.restore(saved, age_s=1.0, now=0.0)
    assert restoring is not None
    assert restoring.endpoints == 2
    assert VERSION == 2, "and this one has a recording too"


def test_a_clock_that_was_set_back_keeps_a_budget() -> None:
    old = balancer_of(provider())
    use(old, 100_000, now=0.0)
    saved = saved_by(old, now=1.0)
    saved.used = {
        key: one._replace(at=9e14, day=one.day and one.day._replace(at=9e14)) for key, one in saved.used.items()
    }
    new = balancer_of(provider())
    new.restarts.restore(saved, age_s=0.0, now=5.0)
    assert used(new, now=5.0)["tokens_per_day"] == 0.1
    assert used(new, now=5.0 + DAY_S + 1200.0)["tokens_per_day"] == 0.0


def test_what_is_not_there_is_bounded() -> None:
    old = balancer_of(provider())
    use(old, 100_000, now=0.0)
    saved = saved_by(old, now=1.0)
    (one,) = saved.used.values()
    saved.used = {f"http://x{n}": one for n in range(MAX_ABSENT + 50)}
    new = balancer_of(provider())
    new.restarts.restore(saved, age_s=0.0, now=0.0)
    found = saved_by(new, now=1.0).used
    assert len(found) == MAX_ABSENT + 1
    assert "http://x0" not in found


# Flows

FLOWS = FlowsSettings(
    named={
        "ada": FlowSettings(requests_per_minute=10),
        "bob": FlowSettings(tokens_per_minute=1000),
        "free": FlowSettings(in_flight=1),
    }
)


def of_flows(settings: FlowsSettings = FLOWS, policy: str = "least-request") -> Balancer:
    return pool_of(1, policy=policy, flows=settings)[0]


def asked(balancer: Balancer, flow: str, tokens: int, *, now: float) -> Outcome | None:
    """Why it was refused; None: it was served."""
    ticket = balancer.submit(InferenceRequest("r", MODEL, True, 400, 400, flow=flow), now=now)
    if ticket.outcome is not None:
        return ticket.outcome
    assert ticket.placed_on is not None
    balancer.first_byte(ticket, now=now)
    balancer.close(ticket, Outcome.COMPLETED, now=now, usage=Usage(tokens, 0, 0))
    return None


@pytest.mark.parametrize("policy", POLICIES)
def test_a_flow_goes_on_with_what_it_used(policy: str) -> None:
    old = of_flows(policy=policy)
    for flow, times, tokens in (("ada", 10, 1), ("bob", 1, 1500), ("free", 1, 1), ("eve", 1, 1)):
        for _ in range(times):
            assert asked(old, flow, tokens, now=0.0) is None
    saved = saved_by(old, now=1.0)
    assert set(saved.flows) == {"ada", "bob"}, "the others have no limit per minute"
    new = of_flows(policy=policy)
    new.restarts.restore(saved, age_s=2.0, now=50.0)
    assert asked(new, "ada", 1, now=50.0) is Outcome.RATE_LIMITED
    assert asked(new, "ada", 1, now=54.0) is None, "one in six seconds, of which two have passed"
    assert asked(new, "bob", 1, now=75.0) is Outcome.RATE_LIMITED
    assert asked(new, "bob", 1, now=80.0) is None, "500 tokens too many, and 17 a second"
    assert asked(new, "free", 1, now=50.0) is None


def test_what_flows_used_is_of_the_limits_that_there_are_now() -> None:
    old = of_flows()
    for _ in range(10):
        asked(old, "ada", 1, now=0.0)
    smaller = of_flows(FlowsSettings(named={"ada": FlowSettings(requests_per_minute=4)}))
    smaller.restarts.restore(saved_by(old, now=0.0), age_s=0.0, now=0.0)
    assert asked(smaller, "ada", 1, now=60.0) is Outcome.RATE_LIMITED
    assert asked(smaller, "ada", 1, now=105.1) is None, "6 more than 4, and one in 15 s"
    unlimited = of_flows(FlowsSettings())
    unlimited.restarts.restore(saved_by(old, now=0.0), age_s=0.0, now=0.0)
    assert [one.name for one in unlimited.snapshot(now=0.0).flows] == []
    assert asked(unlimited, "ada", 1, now=0.0) is None


def test_limits_alone_are_exported_if_there_are_any() -> None:
    balancer = of_flows(policy="adaptive")
    balancer.set_endpoints([spec(1), provider(2)], now=0.0)
    asked(balancer, "ada", 1, now=0.0)
    pieces = [one for one in balancer.restarts.save_limits(saved_at=WALL, now=1.0) if one is not None]
    assert [one["kind"] for one in pieces] == ["head", "used", "flow", "end"]
    saved = read_lines(map(encode, pieces))
    assert saved.flows["ada"].at == WALL
    assert saved.flows["ada"].requests == pytest.approx(1.0 - 10 / 60, abs=0.001)
    unlimited = of_flows()
    asked(unlimited, "free", 1, now=0.0)
    assert list(unlimited.restarts.save_limits(saved_at=WALL, now=1.0)) == []


def test_flows_that_are_saved_are_bounded_and_have_names_that_can_be_read() -> None:
    """There are as many as a reload leaves behind, and other replicas may call them anything."""
    balancer, odd = of_flows(), {"a\nb", "", "x" * 2000}
    for name in (*odd, *(f"{n}" for n in range(MAX_FLOWS + 10))):
        flow = balancer._flows._flows[name] = Flow(name, 0.0)
        flow.reconfigure(FlowSettings(requests_per_minute=9), 0.0)
        flow.allowance.take(1.0, 0.0, 0.0)
    saved = saved_by(balancer, now=0.0)
    assert len(saved.flows) == MAX_FLOWS
    assert not saved.flows.keys() & odd


@pytest.mark.parametrize("told_tokens", [None, 3000])
def test_what_runs_at_a_death_is_counted_once(told_tokens: int | None) -> None:
    """What was used before includes it if the balancer that died knew of it. It is settled when it ends."""
    flows = FlowsSettings(named={"ada": FlowSettings(requests_per_minute=10, tokens_per_minute=100_000)})
    request = InferenceRequest("r", MODEL, True, 40_000, 40_000, flow="ada")

    def of_both(balancer: Balancer, now: float) -> tuple[float, float]:
        flow = next(one for one in balancer._flows if one.name == "ada")
        share = used(balancer, now=now)["tokens_per_day"]
        return share * 1_000_000, flow.allowance.use(now).tokens

    def start() -> Balancer:
        balancer = make_balancer(flows=flows)
        balancer.set_endpoints([provider()], now=0.0)
        return balancer

    old, new = start(), start()
    if told_tokens is not None:
        ticket = old.submit(request, now=0.0)
        old.first_byte(ticket, now=0.0)
        old.progress(ticket, told_tokens, now=0.0)
        new.restarts.restore(saved_by(old, now=0.0), age_s=0.0, now=0.0)
        before = of_both(old, 0.0)
    (member,) = new.endpoints.members()
    adopted = new.adopt(request, member.endpoint.uid, began=True, told_tokens=told_tokens, now=0.0)
    if told_tokens is not None:
        assert of_both(new, 0.0) == pytest.approx(before)
    assert of_both(new, 0.0)[0] > 10_000
    new.progress(adopted, 1000, now=0.0)
    new.close(adopted, Outcome.COMPLETED, now=0.0, usage=Usage(12_000, None, 4000))
    assert of_both(new, 0.0) == pytest.approx((16_000, 16_000))
