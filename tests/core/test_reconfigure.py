# SPDX-License-Identifier: Apache-2.0
"""Other settings for a running balancer: nothing that runs or is known is lost, and all that is decided from then on is
decided by them.
"""

from __future__ import annotations

from dataclasses import replace

from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.sections.endpoints import ScrapeSettings
from lbproxy.config.sections.flows import FlowsSettings
from lbproxy.config.sections.health import BreakerSettings, HealthSettings
from lbproxy.config.sections.routing import AdmissionSettings, RetrySettings, RoutingSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.caches.prefix_index import ENTRY_BYTES
from lbproxy.core.endpoints.health import Health
from lbproxy.core.policies.policy import Policy
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.queue.ticket import TicketState
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.retry import FailureKind
from tests.support.pool import make_balancer, pool_of, request, seen, show_gauges, spec


def reconfigure(
    balancer: Balancer, policy: str | Policy | None = None, *, now: float = 0.0, **sections: object
) -> None:
    """Settings at their defaults but for those that are given."""
    balancer.reconfigure(
        make_policy(RoutingSettings.model_validate({"policy": policy})) if isinstance(policy, str) else policy,
        BalancingSettings(
            admission=AdmissionSettings.model_validate(sections.get("admission", {})),
            health=HealthSettings.model_validate(sections.get("health", {})),
            breaker=BreakerSettings.model_validate(sections.get("breaker", {})),
            scrape=ScrapeSettings.model_validate(sections.get("scrape", {})),
            retry=RetrySettings.model_validate(sections.get("retry", {})),
            flows=FlowsSettings.model_validate(sections.get("flows", {})),
        ),
        now=now,
    )


def test_every_policy_takes_over_from_every_kind_of_policy_while_requests_run_and_wait() -> None:
    """Also those that hash prompts into other blocks, or into none: what was placed before ends without a trace."""
    balancer, endpoints = pool_of(2, admission=AdmissionSettings(max_in_flight_per_endpoint=2))
    tickets = []
    for policy in ("adaptive", "least-request", "gie", "cache-aware", "adaptive", "llm-d", "round-robin"):
        tickets += [balancer.submit(request(), now=0.0) for _ in range(2)]
        reconfigure(balancer, policy, admission={"max_in_flight_per_endpoint": 2})
        balancer.poll(now=0.0)
    assert [ticket.state for ticket in tickets[:4]] == [TicketState.PLACED] * 4
    assert balancer.snapshot(now=0.0).waiting == 10
    for ticket in tickets:
        balancer.close(ticket, Outcome.COMPLETED, now=1.0)
        tickets += [one for one in balancer.poll(now=1.0) if one not in tickets]
    assert all(one.in_flight == one.awaiting_first_byte == 0 for one in seen(balancer).values())
    assert {one.health for one in seen(balancer).values()} == {Health.UP}
    assert {one.endpoint.uid for one in seen(balancer).values()} == {one.uid for one in endpoints}


def test_the_same_policy_keeps_what_it_learned() -> None:
    balancer, _ = pool_of(2, policy="adaptive")
    pool = balancer._pool
    reconfigure(balancer)
    assert balancer._pool is pool
    reconfigure(balancer, "adaptive")
    assert balancer._pool is pool, "and so does another of the same blocks"


def test_memory_of_caches_is_as_the_settings_say_and_shrinks_with_them() -> None:
    def policy(memory: str) -> Policy:
        return make_policy(RoutingSettings.model_validate({"prefix_memory": memory}))

    balancer, _ = pool_of(2, policy="adaptive")
    reconfigure(balancer, policy("4MiB"))
    index = balancer._pool.index if balancer._pool is not None else None
    assert index is not None
    assert index.max_entries == 4 * 1024**2 // ENTRY_BYTES
    keys = iter(range(1, 10**6))

    def serve(blocks: int) -> None:
        asked = request()._replace(prompt_bytes=1024 * blocks, block_keys=tuple(next(keys) for _ in range(blocks)))
        balancer.close(balancer.submit(asked, now=0.0), Outcome.COMPLETED, now=0.0)

    for _ in range(40):
        serve(1000)
    assert index.max_entries // 2 < index.entries <= index.max_entries
    reconfigure(balancer, policy("1MiB"))
    for _ in range(20):
        serve(10)
    assert 0 < index.entries <= 1024**2 // ENTRY_BYTES


def test_a_higher_limit_places_those_that_wait_and_a_lower_one_takes_nobody_back() -> None:
    balancer, _ = pool_of(1, admission=AdmissionSettings(max_in_flight_per_endpoint=1))
    tickets = [balancer.submit(request(), now=0.0) for _ in range(3)]
    assert [ticket.state.value for ticket in tickets] == ["placed", "waiting", "waiting"]
    reconfigure(balancer, admission={"max_in_flight_per_endpoint": 2})
    assert balancer.poll(now=0.0) == [tickets[1]]
    reconfigure(balancer, admission={"max_in_flight_per_endpoint": 1})
    assert seen(balancer)["e1"].in_flight == 2
    balancer.close(tickets[0], Outcome.COMPLETED, now=1.0)
    assert balancer.poll(now=1.0) == []


def test_nobody_waits_longer_than_the_new_settings_say_nor_out_of_turn() -> None:
    balancer, _ = pool_of(1, admission=AdmissionSettings(max_in_flight_per_endpoint=1, queue_timeout=30.0))
    tickets = [balancer.submit(request(), now=float(now)) for now in (0, 0, 8)]
    short = {"max_in_flight_per_endpoint": 1, "queue_timeout": 5}
    reconfigure(balancer, admission=short, now=10.0)
    tickets.append(balancer.submit(request(), now=11.0))
    assert balancer.poll(now=14.9) == []
    assert balancer.poll(now=15.1) == tickets[1:3]
    assert balancer.poll(now=16.1) == tickets[3:]
    assert {ticket.outcome for ticket in tickets[1:]} == {Outcome.EXPIRED}
    reconfigure(balancer, admission={**short, "queue_timeout": 60}, now=17.0)
    late = balancer.submit(request(), now=17.0)
    assert balancer.poll(now=76.0) == []
    assert balancer.poll(now=77.1) == [late]


def test_a_smaller_queue_keeps_who_is_in_it() -> None:
    balancer, _ = pool_of(1, admission=AdmissionSettings(max_in_flight_per_endpoint=1))
    for _ in range(4):
        balancer.submit(request(), now=0.0)
    reconfigure(balancer, admission={"max_in_flight_per_endpoint": 1, "queue_requests": 1})
    assert balancer.poll(now=0.0) == []
    assert balancer.snapshot(now=0.0).waiting == 3
    assert balancer.submit(request(), now=0.0).outcome is Outcome.SATURATED


def test_health_freshness_and_retries_are_judged_by_the_new_settings() -> None:
    balancer, (one, _) = pool_of(2)
    reconfigure(balancer, health={"fall": 1}, scrape={"stale_after": "10s"}, retry={"attempts": 1})
    show_gauges(balancer, one.uid, now=0.0)
    assert not seen(balancer, now=9.0)["e1"].stale
    ticket = balancer.submit(request(), now=0.0)
    assert not balancer.after_failure(ticket, FailureKind.CONNECT, (), now=0.0).retry
    balancer.report_health(one.uid, False, "test", now=0.0)
    assert seen(balancer)["e1"].health is Health.DOWN


def test_the_breaker_goes_by_the_new_settings() -> None:
    balancer, _ = pool_of(3, policy="round-robin")
    reconfigure(balancer, breaker={"consecutive_failures": 1, "no_progress": None}, health={"slow_start": None})
    ticket = balancer.submit(request(), now=0.0)
    balancer.after_failure(ticket, FailureKind.RESET, (), now=0.0)
    assert [one.health for one in seen(balancer).values()].count(Health.EJECTED) == 1


def test_an_endpoint_that_stays_at_its_address_keeps_its_state_whatever_else_changes() -> None:
    """A reload that names the engine must not take the pool down until the next probe."""
    balancer, (one,) = pool_of(1)
    ticket = balancer.submit(request(), now=0.0)
    changes = balancer.set_endpoints([replace(spec(1), name="new", engine="sglang", health="/ping")], now=0.0)
    assert (changes.added, changes.removed) == ([], [])
    (changed,) = changes.changed
    assert (changed.uid, changed.name, changed.engine) == (one.uid, "new", "sglang")
    assert seen(balancer)["new"].in_flight == 1
    assert seen(balancer)["new"].health is Health.UP
    balancer.close(ticket, Outcome.COMPLETED, now=1.0)
    assert seen(balancer)["new"].in_flight == 0
    assert (
        balancer.set_endpoints([replace(spec(1), name="new", engine="sglang", health="/ping")], now=0.0).changed == []
    )


def test_an_endpoint_that_is_not_probed_any_more_is_up() -> None:
    """Nobody would ever say so."""
    balancer = make_balancer()
    balancer.set_endpoints([spec(1)], now=0.0)
    assert seen(balancer)["e1"].health is Health.STARTING
    balancer.set_endpoints([replace(spec(1), health=None)], now=0.0)
    assert seen(balancer)["e1"].health is Health.UP
