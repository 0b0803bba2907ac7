# SPDX-License-Identifier: Apache-2.0
"""An endpoint that is another process than before has nothing cached, and is found out whatever it says of itself."""

from __future__ import annotations

import pytest

from lbproxy.core.balancer import Balancer
from lbproxy.core.caches.cache_loss import LOST_IN_ROW
from lbproxy.core.endpoints.endpoint import Endpoint
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.prompt_keys import hash_prompt
from lbproxy.core.requests.request import InferenceRequest, Usage
from lbproxy.core.requests.retry import FailureKind
from tests.support.pool import MODEL, pool_of

PROMPT_BYTES = 40_000


def request(text: str) -> InferenceRequest:
    prompt = (text * PROMPT_BYTES)[:PROMPT_BYTES].encode()
    return InferenceRequest("r", MODEL, True, PROMPT_BYTES, PROMPT_BYTES, hash_prompt(prompt, model=MODEL))


def ask(balancer: Balancer, text: str, now: float, cached: int | None = None) -> float:
    """A request from beginning to end; `cached`: what its response says. Returns what was expected in the cache."""
    ticket = balancer.submit(request(text), now=now)
    return finish(balancer, ticket, now, cached)


def finish(balancer: Balancer, ticket: Ticket, now: float, cached: int | None) -> float:
    assert ticket.placement is not None
    expected = ticket.placement.cached_tokens
    balancer.first_byte(ticket, now=now + 0.1)
    usage = Usage(PROMPT_BYTES // 4, cached, 10)
    balancer.close(ticket, Outcome.COMPLETED, now=now + 0.2, usage=usage)
    return expected


def one() -> tuple[Balancer, Endpoint]:
    balancer, (endpoint,) = pool_of(1, policy="adaptive")
    assert ask(balancer, "a", 1.0) == 0.0
    assert ask(balancer, "a", 2.0) > 9000.0
    return balancer, endpoint


@pytest.mark.parametrize("refused", [True, False])
def test_one_that_refused_connections_and_is_up_again_is_another_process(refused: bool) -> None:
    balancer, endpoint = one()
    for _ in range(3):
        balancer.report_health(endpoint.uid, False, "", now=3.0, refused=refused)
    for _ in range(2):
        balancer.report_health(endpoint.uid, True, "", now=4.0)
    assert (ask(balancer, "a", 5.0) == 0.0) is refused


def test_a_restart_between_two_probes_is_found_by_the_one_that_was_refused() -> None:
    balancer, endpoint = one()
    balancer.report_health(endpoint.uid, False, "", now=3.0, refused=True)
    balancer.report_health(endpoint.uid, True, "", now=4.0)
    assert ask(balancer, "a", 5.0) == 0.0


def test_a_request_that_was_refused_tells_it_too() -> None:
    balancer, endpoint = one()
    ticket = balancer.submit(request("b"), now=3.0)
    balancer.after_failure(ticket, FailureKind.CONNECT, (), now=3.0, refused=True)
    balancer.close(ticket, Outcome.CONNECT_FAILED, now=3.0)
    balancer.report_health(endpoint.uid, True, "", now=4.0)
    assert ask(balancer, "a", 5.0) == 0.0


def test_one_that_says_when_it_was_started_is_believed() -> None:
    for started_at, is_empty in ((10.0, False), (20.0, True)):
        balancer, endpoint = one()
        balancer.report_scrape(endpoint.uid, LoadMetrics(scraped_at=2.5, running=0.0, started_at=10.0))
        balancer.report_health(endpoint.uid, False, "", now=3.0, refused=True)
        balancer.report_health(endpoint.uid, True, "", now=4.0)
        balancer.report_scrape(endpoint.uid, LoadMetrics(scraped_at=4.5, running=0.0, started_at=started_at))
        assert (ask(balancer, "a", 5.0) == 0.0) is is_empty


@pytest.mark.parametrize("refused", [True, False])
def test_a_new_process_gets_requests_though_the_one_before_it_was_slow_to_begin(refused: bool) -> None:
    """It waited idle until what its predecessor had shown was half a minute old, while others had all requests."""
    balancer, endpoints = pool_of(4, policy="adaptive")
    slow = endpoints[0]
    for n in range(400):
        ticket = balancer.submit(InferenceRequest("r", MODEL, True, 40, 40), now=n / 40)
        assert ticket.placed_on is not None
        took = 0.4 if ticket.placed_on.endpoint is slow else 0.02
        balancer.first_byte(ticket, now=n / 40 + took)
        balancer.close(ticket, Outcome.COMPLETED, now=n / 40 + took)
    for ok in (False, False, False, True, True):
        balancer.report_health(slow.uid, ok, "", now=12.0, refused=refused and not ok)
    asked = [balancer.submit(InferenceRequest("r", MODEL, True, 40, 40), now=12.5) for _ in range(8)]
    found = [ticket.placed_on.endpoint for ticket in asked if ticket.placed_on is not None]
    assert len(found) == 8
    assert (slow in found) is refused


TEXTS = "abcdefghij"


def warm() -> tuple[Balancer, Endpoint]:
    balancer, (endpoint,) = pool_of(1, policy="adaptive")
    for n, text in enumerate(TEXTS):
        ask(balancer, text, 1.0 + n, cached=0)
    for n, text in enumerate(TEXTS):
        ask(balancer, text, 11.0 + n / 2, cached=9900)
    return balancer, endpoint


def test_prompts_in_a_row_that_are_not_cached_though_they_should_be() -> None:
    """And the size of the cache that they seemed to show is not believed."""
    balancer, endpoint = warm()
    size = balancer.learned(now=15.0)
    for n in range(LOST_IN_ROW):
        assert ask(balancer, TEXTS[-1 - n], 20.0 + n, cached=0) > 0.0
    assert ask(balancer, TEXTS[0], 30.0, cached=0) == 0.0
    after = balancer.learned(now=31.0)
    assert size is not None
    assert after is not None
    assert after[1][endpoint.uid].capacity_tokens == size[1][endpoint.uid].capacity_tokens


def test_one_that_is_cached_between_them_speaks_against_it() -> None:
    balancer, _ = warm()
    for n in range(4 * LOST_IN_ROW):
        hit = n % (LOST_IN_ROW - 1) == 0
        assert ask(balancer, TEXTS[n % len(TEXTS)], 20.0 + n, cached=9900 if hit else 0) > 0.0


def test_what_an_engine_never_reports_is_no_loss() -> None:
    balancer, _ = pool_of(1, policy="adaptive")
    for n in range(30):
        ask(balancer, TEXTS[n % len(TEXTS)], 1.0 + n, cached=None)
    assert ask(balancer, "a", 40.0) > 9000.0


def test_prefixes_that_requests_in_flight_share_are_no_loss() -> None:
    """A burst with one long system prompt: an engine that starts several in one step computes it for each."""
    balancer, _ = warm()
    burst = [balancer.submit(request("new"), now=20.0) for _ in range(3 * LOST_IN_ROW)]
    for ticket in burst:
        finish(balancer, ticket, 20.0, cached=0)
    assert ask(balancer, "a", 30.0, cached=0) > 9000.0
