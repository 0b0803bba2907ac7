# SPDX-License-Identifier: Apache-2.0
"""The size of a KV cache that the settings say (`kv_cache_tokens`): it holds from the first request on, whatever the
engine says, until the settings say another. And the size that an engine says outside its metrics.
"""

from __future__ import annotations

from dataclasses import replace

from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.sections.routing import RoutingSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.caches.cache_size import GUESSED_TOKENS
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.knowledge.load_model import LoadModel
from lbproxy.core.knowledge.pool_model import PoolModel
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage
from tests.support.pool import answer_unfound, bring_up, make_balancer, spec

SAID = 307_200


def pool(*sizes: int | None, policy: str = "adaptive") -> Balancer:
    balancer = make_balancer(policy=policy)
    endpoints(balancer, *sizes)
    return balancer


def endpoints(balancer: Balancer, *sizes: int | None) -> None:
    """Endpoints at the same addresses, with these sizes in the settings."""
    specs = [replace(spec(n), kv_cache_tokens=size) for n, size in enumerate(sizes, 1)]
    bring_up(balancer, balancer.set_endpoints(specs, now=0.0).added)


def believed(balancer: Balancer) -> list[float]:
    """What each cache is taken to hold."""
    learned = balancer.learned(now=0.0)
    assert learned is not None
    return [one.capacity_tokens for one in learned[1].values()]


def scraped(balancer: Balancer, number: int, blocks: int | None, *, started_at: float = 1.0) -> None:
    metrics = LoadMetrics(scraped_at=0.0, kv_blocks=blocks, block_size_tokens=16, started_at=started_at)
    balancer.report_scrape(EndpointUid(number), metrics)


def test_it_holds_from_the_begin_for_the_endpoint_that_has_it() -> None:
    assert believed(pool(SAID, None, 600_000)) == [SAID, GUESSED_TOKENS, 600_000]


def test_it_counts_more_than_what_the_engine_says() -> None:
    """Blocks times tokens in a block is too much where groups of layers share blocks."""
    balancer = pool(SAID, None)
    for number in (1, 2):
        scraped(balancer, number, 50_000)
    assert believed(balancer) == [SAID, 800_000]


def test_it_stays_when_the_endpoint_restarts() -> None:
    balancer = pool(SAID)
    scraped(balancer, 1, None, started_at=1.0)
    scraped(balancer, 1, None, started_at=2.0)
    assert believed(balancer) == [SAID]


def become_adaptive(balancer: Balancer) -> None:
    """As by a reload."""
    balancer.reconfigure(
        make_policy(RoutingSettings()),
        BalancingSettings(),
        now=0.0,
    )


def test_it_stays_when_the_policy_changes() -> None:
    balancer = pool(SAID, None, policy="least-request")
    assert balancer.learned(now=0.0) is None
    become_adaptive(balancer)
    assert believed(balancer) == [SAID, GUESSED_TOKENS]


def test_another_value_counts_at_once_and_what_runs_goes_on() -> None:
    balancer = pool(SAID, None)
    ticket = balancer.submit(InferenceRequest("r", "m", True, 4096, 4096, tuple(range(4))), now=0.0)
    endpoints(balancer, 200_000, 100_000)
    assert believed(balancer) == [200_000, 100_000]
    assert sum(one.in_flight for one in balancer.snapshot(now=0.0).endpoints) == 1
    balancer.close(ticket, Outcome.COMPLETED, now=1.0, usage=Usage(1024, 0, 1))
    assert believed(balancer) == [200_000, 100_000]
    assert sum(one.in_flight for one in balancer.snapshot(now=1.0).endpoints) == 0


def test_without_it_again_the_engine_says_it_or_it_is_learned() -> None:
    balancer = pool(SAID, SAID)
    endpoints(balancer, None, None)
    scraped(balancer, 1, 50_000)
    assert believed(balancer) == [800_000, GUESSED_TOKENS]


def test_a_reload_that_does_not_change_it_forgets_nothing_that_the_engine_said() -> None:
    balancer = pool(None)
    scraped(balancer, 1, 50_000)
    changed = replace(spec(1), weight=2.0)
    assert len(balancer.set_endpoints([changed], now=0.0).changed) == 1
    assert believed(balancer) == [800_000]


def test_policies_without_a_model_of_caches_take_no_notice() -> None:
    balancer = pool(SAID, policy="least-request")
    endpoints(balancer, 100_000)
    scraped(balancer, 1, 50_000)
    assert balancer.submit(InferenceRequest("r", "m", True, 100), now=0.0).placed_on is not None


def test_answers_teach_nothing_about_it() -> None:
    """100 prompts that come back and are never found."""
    load: LoadModel = LoadModel(PoolModel(1024), SAID)
    for first in (*range(0, 6400, 64), *range(0, 6400, 64)):
        keys = tuple(range(first, first + 64))
        placement = load.place(InferenceRequest("r", "m", True, 65_536, 65_536, keys), 1.0)
        load.first_byte(placement, 1.1)
        load.end(placement, Usage(256 * 64, 0, 0), 1.2)
    assert load.kv.capacity_tokens == load.kv.known_tokens == SAID
    assert load.kv.cache.size * 256 <= SAID


def test_what_an_engine_says_of_itself_counts_and_is_not_learned_over() -> None:
    """Without it the same answers teach that the cache is small."""
    silent, told = pool(None), pool(None)
    told.report_cache_size(EndpointUid(1), SAID)
    assert believed(told) == [SAID]
    for balancer in (silent, told):
        answer_unfound(balancer)
    assert believed(told) == [SAID]
    assert believed(silent)[0] < GUESSED_TOKENS


def test_its_last_word_counts() -> None:
    """Its metrics are read several times a second, so what they say holds; and a restarted server says another size."""
    balancer = pool(None, None)
    balancer.report_cache_size(EndpointUid(1), SAID)
    balancer.report_cache_size(EndpointUid(2), SAID)
    balancer.report_cache_size(EndpointUid(2), 99_000)
    scraped(balancer, 1, 50_000)
    assert believed(balancer) == [800_000, 99_000]


def test_the_settings_count_more_than_what_an_engine_says_of_itself() -> None:
    balancer = pool(SAID)
    balancer.report_cache_size(EndpointUid(1), 99_000)
    assert believed(balancer) == [SAID]


def test_what_an_engine_said_under_another_policy_is_not_asked_again() -> None:
    balancer = pool(None, SAID, None, policy="least-request")
    for uid in (1, 2):
        balancer.report_cache_size(EndpointUid(uid), 99_000)
    balancer.report_cache_size(EndpointUid(3), 99_000, at_most=True)
    become_adaptive(balancer)
    assert believed(balancer) == [99_000, SAID, 99_000]
    balancer.report_cache_size(EndpointUid(1), 55_000, at_most=True)
    balancer.report_cache_size(EndpointUid(3), 55_000, at_most=True)
    assert believed(balancer) == [99_000, SAID, 55_000], "an upper bound says nothing new of what is known exactly"


def test_how_many_it_runs_at_once_is_known_under_a_policy_that_comes_later() -> None:
    balancer = pool(None, None, policy="least-request")
    balancer.report_slots(EndpointUid(1), 4)
    become_adaptive(balancer)
    balancer.report_slots(EndpointUid(2), 6)
    learned = balancer.learned(now=0.0)
    assert learned is not None
    assert [learned[1][EndpointUid(uid)].limit for uid in (1, 2)] == [4, 6]


def test_what_an_endpoint_says_that_left_is_nobodys() -> None:
    balancer = pool(None)
    balancer.report_cache_size(EndpointUid(7), 99_000)
    balancer.report_slots(EndpointUid(7), 4)
    assert believed(balancer) == [GUESSED_TOKENS]


def test_what_is_said_to_be_at_most_the_size_is_where_learning_begins() -> None:
    """llama.cpp's slots times what each may hold is several times too much where they share one cache."""
    balancer = pool(None)
    balancer.report_cache_size(EndpointUid(1), 1_500_000, at_most=True)
    assert believed(balancer) == [1_500_000]
    answer_unfound(balancer)
    learned = believed(balancer)[0]
    assert learned < 200_000
    balancer.report_cache_size(EndpointUid(1), 1_500_000, at_most=True)
    assert believed(balancer) == [learned], "saying it again teaches nothing"
    balancer.report_cache_size(EndpointUid(1), 50_000, at_most=True)
    assert believed(balancer) == [50_000]


def test_another_upper_bound_counts_while_nothing_is_learned() -> None:
    """A server that was restarted with more."""
    balancer = pool(None)
    for tokens in (50_000, 400_000):
        balancer.report_cache_size(EndpointUid(1), tokens, at_most=True)
        assert believed(balancer) == [tokens]


def test_an_upper_bound_makes_space_no_cheaper_than_saying_nothing() -> None:
    """Of four times the size it would be four times too cheap; of a small cache it is what is known best."""
    shared = PoolModel(1024)
    small, large = LoadModel(shared), LoadModel(shared)
    small.kv.size_reported(50_000.0, at_most=True)
    large.kv.size_reported(1_500_000.0, at_most=True)
    assert small.kv.known_tokens == 50_000
    assert large.kv.known_tokens == shared.size.space_tokens < 400_000
