# SPDX-License-Identifier: Apache-2.0
"""Without metrics, in virtual time: what the answers say of caches is enough to know how large they are."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from statistics import fmean

import pytest

from lbproxy.core.balancer import Balancer
from lbproxy.core.caches.cache_size import GUESSED_TOKENS
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.endpoints.endpoint_set import EndpointChanges
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import Usage
from lbproxy.sim.fleet.cluster import Fleet
from lbproxy.sim.fleet.fleet import FleetOptions, Served, SimulatedServer, decisions
from lbproxy.sim.workloads.catalogue import make_workload
from tests.sim.fleet.test_cluster import QWEN, replicas


class Silent(Balancer):
    """Its servers do not say what was cached."""

    def close(
        self, ticket: Ticket, outcome: Outcome, *, now: float, usage: Usage | None = None, timed_out: bool = False
    ) -> None:
        super().close(ticket, outcome, now=now, usage=usage and usage._replace(cached_tokens=None), timed_out=timed_out)


class Telling(Balancer):
    """Its servers say how large their caches are, as SGLang does without metrics (`core.engines.server_info`)."""

    def set_endpoints(self, specs: Sequence[EndpointSpec], *, now: float) -> EndpointChanges:
        changes = super().set_endpoints(specs, now=now)
        for endpoint, tokens in zip(changes.added, SIZES, strict=True):
            self.report_cache_size(endpoint.uid, tokens)
        return changes


SIZES = (30_000, 60_000, 90_000)


def sized(kv_tokens: int) -> SimulatedServer:
    return SimulatedServer(dataclasses.replace(QWEN.preset, kv_tokens=kv_tokens))


def sizes(
    servers: tuple[SimulatedServer, ...],
    *,
    scraped: bool = False,
    kind: type[Balancer] = Balancer,
    stream_share: float = 1.0,
    seed: int = 3,
) -> list[float]:
    """What is believed of each server's cache, after 100 s in which 120 prefixes of 3,000 tokens came and went."""
    made: list[Balancer] = []
    make: Callable[[random.Random], Balancer] = replicas("adaptive", kind)

    def keep(rng: random.Random) -> Balancer:
        made.append(make(rng))
        return made[-1]

    options = FleetOptions(
        servers=servers, scrape_interval_s=0.2 if scraped else None, size_error=0.3, stream_share=stream_share
    )
    mix = {"prompt_tokens": 3400, "shared_tokens": 3000, "groups": 120, "output_tokens": 60, "rate": 8}
    fleet = Fleet(options, make_workload("own", {**mix, "duration_s": 100}, seed=seed), keep, seed=1)
    assert all(one.outcome is Outcome.COMPLETED for one in fleet.run())
    learned = made[0].learned(now=fleet.now)
    assert learned is not None
    return [one.capacity_tokens for one in learned[1].values()]


@pytest.mark.parametrize("stream_share", [1.0, 0.0])
def test_the_size_of_each_cache_is_learned_within_15_per_cent(stream_share: float) -> None:
    """Though sizes of prompts are wrong by up to 30 %, and one server has twice the cache of the other. On average, and
    by no more than 25 % of any workload."""
    believed = [sizes((sized(60_000), sized(120_000)), stream_share=stream_share, seed=seed) for seed in (3, 4, 5)]
    for each in believed:
        assert each == pytest.approx([60_000, 120_000], rel=0.25)
    assert [fmean(some) for some in zip(*believed, strict=True)] == pytest.approx([60_000, 120_000], rel=0.15)


def served(*, scraped: bool, declared: bool, kind: type[Balancer] = Balancer, seed: int = 3) -> list[Served]:
    """The requests of 40 s in which three caches of different sizes overflow."""
    options = FleetOptions(
        servers=tuple(sized(tokens) for tokens in SIZES),
        scrape_interval_s=0.2 if scraped else None,
        sizes_declared=declared,
    )
    mix = {"prompt_tokens": 3400, "shared_tokens": 3000, "groups": 90, "output_tokens": 60, "rate": 8, "duration_s": 40}
    return Fleet(options, make_workload("own", mix, seed=seed), replicas("adaptive", kind), seed=1).run()


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_with_the_sizes_told_decisions_are_as_good_as_with_metrics(seed: int) -> None:
    """Of what metrics say besides, one balancer that places everything misses little: how many wait in the engines."""
    with_metrics = served(scraped=True, declared=False, seed=seed)
    assert len(with_metrics) > 200
    declared = served(scraped=False, declared=True, seed=seed)
    assert mean_ttft(declared) == pytest.approx(mean_ttft(with_metrics), rel=0.05)
    assert mean_ttft(served(scraped=False, declared=False, seed=seed)) > 1.1 * mean_ttft(declared)
    told = served(scraped=False, declared=False, kind=Telling, seed=seed)
    assert decisions(told) == decisions(declared), "who is told by the servers knows as much"


def mean_ttft(requests: list[Served]) -> float:
    """Seconds."""
    return fmean(one.first_at - one.submitted_at for one in requests if one.first_at is not None)


def test_a_size_that_is_told_is_taken_to_the_token() -> None:
    assert sizes((sized(60_000), sized(120_000)), scraped=True) == [60_000, 120_000]


def test_nothing_is_learned_from_answers_that_do_not_say_what_was_cached() -> None:
    assert sizes((sized(60_000), sized(120_000)), kind=Silent) == [GUESSED_TOKENS] * 2
