# SPDX-License-Identifier: Apache-2.0
"""What a load report changes in the picture of an endpoint, and what it leaves as it was."""

from __future__ import annotations

from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import Endpoint
from lbproxy.core.engines.load_metrics import LoadMetrics, LoraMetrics
from lbproxy.core.engines.orca import LoadReport
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.outcome import Outcome
from tests.support.pool import pool_of, request, seen

SCRAPED = LoadMetrics(
    scraped_at=1.0,
    waiting=4.0,
    running=6.0,
    kv_utilization=0.5,
    block_size_tokens=16,
    kv_blocks=100,
    lora=LoraMetrics(frozenset("a"), frozenset(), 4),
    started_at=5e8,
)
STALE_S = 2.0


def one() -> tuple[Balancer, Endpoint, Ticket]:
    """A pool of one, with a request of ours on it that is about to be answered."""
    balancer, (endpoint,) = pool_of(1)
    return balancer, endpoint, balancer.submit(request(), now=0.0)


def scrape(balancer: Balancer, endpoint: Endpoint) -> None:
    balancer.scrape_sent(endpoint.uid)
    balancer.report_scrape(endpoint.uid, SCRAPED)


def others(ticket: Ticket) -> float | None:
    assert ticket.placed_on is not None
    return ticket.placed_on.others


def metrics(balancer: Balancer, now: float) -> LoadMetrics:
    found = seen(balancer, now)["e1"].metrics
    assert found is not None
    return found


def test_only_what_a_report_names_changes() -> None:
    balancer, endpoint, ticket = one()
    scrape(balancer, endpoint)
    balancer.report_load(ticket, LoadReport(waiting=9.0, kv_utilization=0.75), now=2.0)
    got = metrics(balancer, 2.0)
    assert (got.scraped_at, got.waiting, got.kv_utilization) == (2.0, 9.0, 0.75)
    assert (got.running, got.block_size_tokens, got.kv_blocks, got.lora, got.started_at) == (
        *(6.0, 16, 100),
        *(SCRAPED.lora, 5e8),
    )
    assert balancer.endpoints.reported_at(endpoint.uid) == 2.0


def test_a_report_makes_gauges_fresh_but_what_it_lacks_grows_old() -> None:
    """For ever believed, a number of running requests that nobody reads any more would be wrong for ever."""
    balancer, endpoint, ticket = one()
    scrape(balancer, endpoint)
    balancer.report_load(ticket, LoadReport(waiting=0.0), now=1.0 + STALE_S)
    assert not seen(balancer, 2.9 + STALE_S)["e1"].stale
    assert metrics(balancer, 3.0).running == 6.0
    balancer.report_load(ticket, LoadReport(waiting=3.0), now=1.01 + STALE_S)
    got = metrics(balancer, 3.1)
    assert (got.waiting, got.running, got.kv_utilization, got.kv_blocks) == (3.0, None, None, 100)
    assert others(ticket) == 3.0
    assert seen(balancer, 1.02 + 2 * STALE_S)["e1"].stale


def test_others_are_the_queue_that_is_not_ours_and_those_that_the_scrape_saw_running() -> None:
    balancer, endpoint, ticket = one()
    more = [balancer.submit(request(), now=0.0) for _ in range(2)]
    scrape(balancer, endpoint)
    assert others(ticket) == 4 + 6 - 3
    # Of the 4 that waited 3 may have been ours, so 1 was not; 6 of the others ran.
    balancer.report_load(ticket, LoadReport(waiting=52.0), now=1.5)
    assert others(ticket) == (52 - 2) + 6, "it brought an answer itself, so two of ours may wait"
    balancer.first_byte(ticket, now=1.5)
    balancer.report_load(ticket, LoadReport(waiting=52.0), now=1.5)
    assert others(ticket) == (52 - 2) + 6, "and is not counted off twice"
    balancer.close(more[0], Outcome.COMPLETED, now=1.6)
    balancer.report_load(ticket, LoadReport(waiting=0.0), now=1.6)
    assert others(ticket) == 6.0


def test_a_report_that_says_what_runs_needs_no_scrape() -> None:
    balancer, endpoint, ticket = one()
    balancer.report_load(ticket, LoadReport(waiting=2.0, running=8.0), now=1.0)
    assert others(ticket) == 2 + 8 - 1
    assert metrics(balancer, 1.0) == LoadMetrics(scraped_at=1.0, waiting=2.0, running=8.0)
    assert balancer.endpoints.reported_at(endpoint.uid) == 1.0


def test_what_says_nothing_of_load_changes_nothing() -> None:
    balancer, endpoint, ticket = one()
    scrape(balancer, endpoint)
    for report in (LoadReport(), None):
        balancer.report_load(ticket, report, now=1.5)
    assert metrics(balancer, 1.5) == SCRAPED
    assert balancer.endpoints.reported_at(endpoint.uid) < 0.0, "so scrapes go on"
    shown = seen(balancer, 1.5)["e1"]
    assert (shown.load_reports, shown.malformed_reports) == (1, 1)
    assert others(ticket) == 9.0


def test_a_report_of_the_cache_alone_leaves_others_as_they_are() -> None:
    balancer, endpoint, ticket = one()
    balancer.report_load(ticket, LoadReport(kv_utilization=0.5), now=1.0)
    assert others(ticket) is None
    scrape(balancer, endpoint)
    balancer.report_load(ticket, LoadReport(kv_utilization=0.5), now=1.5)
    assert others(ticket) == 4 + 6


def test_the_last_answer_of_an_endpoint_that_left_may_bring_a_report() -> None:
    balancer, endpoint, ticket = one()
    balancer.set_endpoints([], now=1.0)
    balancer.report_load(ticket, LoadReport(waiting=1.0), now=1.0)
    balancer.endpoints.ask_load(endpoint.uid, True)
    assert balancer.endpoints.reported_at(endpoint.uid) < 0.0
    balancer.close(ticket, Outcome.COMPLETED, now=1.0)
