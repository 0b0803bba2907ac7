# SPDX-License-Identifier: Apache-2.0
"""What KV events show of a cache reaches all that predicts it: a clear forgets prefixes only, and a measured
size counts as long as the engine does not report one.
"""

from __future__ import annotations

from dataclasses import replace

from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.sections.routing import RoutingSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.caches.cache_report import CacheReport
from lbproxy.core.caches.cache_size import GUESSED_TOKENS
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage
from tests.support.pool import bring_up, make_balancer, spec

KEYS = tuple(range(40))
FIRST = EndpointUid(1)


def pool(policy: str = "adaptive", size: int | None = None) -> Balancer:
    balancer = make_balancer(policy=policy)
    added = balancer.set_endpoints([replace(spec(n), kv_cache_tokens=size) for n in (1, 2)], now=0.0).added
    bring_up(balancer, added)
    return balancer


def ask(balancer: Balancer, at: float) -> EndpointUid:
    """One turn of a conversation, to its end; returns where it went."""
    ticket = balancer.submit(InferenceRequest("r", "m", True, 40_960, 40_960, KEYS), now=at)
    balancer.first_byte(ticket, now=at + 0.1)
    balancer.close(ticket, Outcome.COMPLETED, now=at + 0.2, usage=Usage(10_000, 0, 10))
    assert ticket.placed_on is not None
    return ticket.placed_on.endpoint.uid


def size(balancer: Balancer) -> float:
    learned = balancer.learned(now=0.0)
    assert learned is not None
    return learned[1][FIRST].capacity_tokens


def test_a_clear_forgets_the_prefixes_of_that_endpoint_and_nothing_else() -> None:
    """A conversation that was at home there is priced like everywhere from then on; speed and adapters are kept."""
    balancer = pool()
    home = ask(balancer, 1.0)
    assert [ask(balancer, at) for at in (2.0, 3.0)] == [home, home]
    state = balancer.endpoints.get(home)
    assert state is not None
    speed, adapters = state.load.speed.save(3.5), state.load.adapters
    state.load.adapters.placed("a", 3.5)
    balancer.report_cache(home, CacheReport(cleared=True))
    assert state.load.kv.cache.size == 0
    assert state.load.speed.save(3.5) == speed
    assert state.load.adapters is adapters
    assert state.load.pool.index.entries == 0
    balancer.report_cache(EndpointUid(999), CacheReport(cleared=True))


def test_a_request_in_flight_over_a_clear_ends_well() -> None:
    balancer = pool()
    ticket = balancer.submit(InferenceRequest("r", "m", True, 40_960, 40_960, KEYS), now=1.0)
    assert ticket.placed_on is not None
    balancer.report_cache(ticket.placed_on.endpoint.uid, CacheReport(cleared=True))
    balancer.first_byte(ticket, now=1.1)
    balancer.close(ticket, Outcome.COMPLETED, now=1.2, usage=Usage(10_000, 0, 10))
    assert ticket.placed_on.load.kv.cache.pinned == 0


def test_a_measured_size_counts_until_the_engine_reports_one() -> None:
    balancer = pool()
    assert size(balancer) == GUESSED_TOKENS
    balancer.report_cache(FIRST, CacheReport(tokens=100, size_tokens=300_000))
    assert size(balancer) == 300_000
    balancer.report_cache_size(FIRST, 307_200)
    balancer.report_cache(FIRST, CacheReport(tokens=100, size_tokens=300_016))
    assert size(balancer) == 307_200


def test_a_measured_size_does_not_overrule_the_settings() -> None:
    balancer = pool(size=200_000)
    balancer.report_cache(FIRST, CacheReport(size_tokens=300_000))
    assert size(balancer) == 200_000


def test_a_measured_size_is_kept_for_another_policy() -> None:
    balancer = pool("least-request")
    balancer.report_cache(FIRST, CacheReport(cleared=True, size_tokens=300_000))
    balancer.report_cache(FIRST, CacheReport())
    balancer.reconfigure(make_policy(RoutingSettings()), BalancingSettings(), now=0.0)
    assert size(balancer) == 300_000


def test_the_fill_is_shown_by_the_size_that_counts() -> None:
    balancer = pool()

    def shown() -> tuple[int | None, float | None]:
        one = balancer.snapshot(now=0.0).endpoints[0]
        return one.kv_cached_tokens, one.kv_fill

    assert shown() == (None, None)
    balancer.report_cache(FIRST, CacheReport(tokens=50_000))
    assert shown() == (50_000, None)
    balancer.report_cache(FIRST, CacheReport(tokens=50_000, size_tokens=100_000))
    assert shown() == (50_000, 0.5)
    balancer.report_cache_size(FIRST, 200_000)
    assert shown() == (50_000, 0.25)
    balancer.report_scrape(FIRST, LoadMetrics(scraped_at=0.0, kv_blocks=2_500, block_size_tokens=16))
    assert shown() == (50_000, 1.0)
    balancer.report_cache(FIRST, CacheReport())
    assert shown() == (None, None)
