# SPDX-License-Identifier: Apache-2.0
"""What a balancer learned, given to another one: as good as before, and never against what engines report."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lbproxy.config.sections.flows import FlowsSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.knowledge.load_model import LoadModel
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage
from lbproxy.core.saved.pieces import ITEMS_IN_PIECE
from lbproxy.core.saved.reading import Saved, encode, read_lines
from lbproxy.core.saved.restoring import CONTENTS_S, RATES_S, Restoring
from tests.support.pool import MODEL, bring_up, make_balancer, pool_of, spec

BLOCKS = 8
"""Of a prompt."""
STARTED_AT = 1000.5


def load_of(balancer: Balancer, number: int = 0) -> LoadModel:
    return list(balancer._endpoints.members())[number].load


def prompt(first: int, blocks: int = BLOCKS) -> InferenceRequest:
    size = 1024 * blocks
    return InferenceRequest("r", MODEL, True, size, size, tuple(range(first, first + blocks)))


def ask(
    balancer: Balancer, request: InferenceRequest, now: float, cached: int | None = None, took_s: float = 0.4
) -> float:
    """A request from beginning to end. Returns how many of its tokens were predicted to be cached."""
    ticket = balancer.submit(request, now=now)
    assert ticket.placement is not None
    expected = ticket.placement.cached_tokens
    balancer.first_byte(ticket, now=now + took_s)
    balancer.progress(ticket, 20, now=now + took_s + 1.0)
    balancer.close(ticket, Outcome.COMPLETED, now=now + took_s + 2.0, usage=Usage(256 * BLOCKS, cached, 20))
    return expected


def scrape(
    balancer: Balancer, started_at: float | None, *, now: float, number: int = 0, blocks: int | None = None
) -> None:
    uid = list(balancer._endpoints.members())[number].endpoint.uid
    balancer.scrape_sent(uid)
    balancer.report_scrape(
        uid,
        LoadMetrics(
            scraped_at=now, waiting=0.0, running=0.0, started_at=started_at, kv_blocks=blocks, block_size_tokens=16
        ),
    )


def experienced(
    *, started_at: float | None = STARTED_AT, endpoints: int = 1, flows: FlowsSettings | None = None
) -> Balancer:
    """A balancer that has served slow prompts."""
    balancer, _ = pool_of(endpoints, policy="adaptive", flows=flows)
    for number in range(endpoints):
        scrape(balancer, started_at, now=0.5, number=number)
    for number in range(40):
        ask(balancer, prompt(1000 * number), now=1.0 + 5.0 * number, cached=0, took_s=2.0)
    return balancer


def saved_by(balancer: Balancer, *, prefixes: bool = True, now: float = 500.0) -> Saved:
    """Through text, as through a file."""
    pieces = balancer.restarts.save(saved_at=0.0, prefixes=prefixes, now=now)
    return read_lines([encode(piece) for piece in pieces if piece is not None])


def restored(saved: Saved, *, age_s: float = 1.0, endpoints: int = 1, **options: object) -> tuple[Balancer, Restoring]:
    """A new balancer with the same endpoints."""
    balancer, _ = pool_of(endpoints, policy="adaptive", **options)
    restoring = balancer.restarts.restore(saved, age_s=age_s, now=0.0)
    assert restoring is not None
    while restoring.step():
        pass
    return balancer, restoring


def test_a_new_balancer_predicts_as_the_old_one_did() -> None:
    old = experienced()
    new, restoring = restored(saved_by(old), age_s=0.0)
    before, after = old.learned(now=500.0), new.learned(now=0.0)
    assert before is not None
    assert after is not None
    assert after[0] == before[0]
    assert [*after[1].values()] == [*before[1].values()]
    assert (restoring.endpoints, restoring.prompts) == (1, 40)
    assert ask(new, prompt(39_000), now=1.0) == ask(old, prompt(39_000), now=501.0) > 2000.0


def test_what_is_restored_can_be_saved_again() -> None:
    """Two restarts one after the other, before any request."""
    new, _ = restored(saved_by(experienced()), age_s=0.0)
    assert saved_by(new).pool == saved_by(experienced()).pool
    again, _ = restored(saved_by(new), age_s=0.0)
    assert ask(again, prompt(39_000), now=1.0) > 2000.0


def test_prompts_are_evicted_in_the_order_in_which_they_were_used() -> None:
    old, _ = pool_of(1, policy="adaptive")
    shared = tuple(range(4))
    prompts = [(*shared, 10 * n, 10 * n + 1) for n in range(1, 5)]
    for number, keys in enumerate((*prompts, prompts[0])):
        ask(old, prompt(0, 6)._replace(block_keys=keys), now=float(number))
    running = old.submit(prompt(0, 6)._replace(block_keys=prompts[2]), now=9.0)  # in use: the last to go
    new, _ = restored(saved_by(old), age_s=0.0)
    cache, index = load_of(new).kv.cache, load_of(new).pool.index
    left = []
    for blocks in range(cache.size, -1, -1):
        cache.trim(blocks)
        left.append([number for number, keys in enumerate(prompts) if index.longest(keys) == 6])
    assert left[0] == [0, 1, 2, 3]
    assert [one for number, one in enumerate(left) if one != left[number - 1]] == [
        [0, 1, 2, 3],
        [0, 2, 3],
        [0, 2],
        [2],
        [],
    ]
    assert running.placed_on is not None


def test_the_index_may_change_while_it_is_exported() -> None:
    """Nodes are split, shortened and dropped between two pieces: whatever is exported is a prompt that was sent."""
    rng = random.Random(5)
    for seed in range(30):
        balancer = make_balancer(policy="adaptive", seed=seed)
        bring_up(balancer, balancer.set_endpoints([spec(n) for n in (1, 2)], now=0.0).added)
        caches = [load_of(balancer, number).kv.cache for number in range(2)]
        sent: set[tuple[int, ...]] = set()

        def change(sent: set[tuple[int, ...]] = sent, caches: list = caches) -> None:  # type: ignore[type-arg]
            keys = tuple(accumulated(rng.choices("ab", k=rng.randrange(1, 12))))
            sent.add(keys)
            cache = rng.choice(caches)
            cache.unpin(cache.pin(keys)[1])
            if rng.random() < 0.1:
                cache.trim(rng.randrange(20))

        for _ in range(50):
            change()
        lines = []
        for piece in balancer.restarts.save(saved_at=0.0, prefixes=True, now=1.0):
            lines += [] if piece is None else [encode(piece)]
            change()
        saved = read_lines(lines)
        restoring = Restoring(load_of(balancer).pool, saved, 0.0, 0.0)
        for endpoint in saved.endpoints.values():
            for end in endpoint.ends:
                path = restoring._path(end)
                assert any(path == keys[: len(path)] for keys in sent)


def accumulated(letters: list[str]) -> list[int]:
    """Chained keys."""
    return [hash_of("".join(letters[: n + 1])) for n in range(len(letters))]


def hash_of(text: str) -> int:
    return int.from_bytes(text.encode().rjust(8, b"\0")[-8:], "big") ^ (len(text) << 56)


# What overrules the data


def test_another_process_keeps_nothing_that_was_saved_of_it() -> None:
    """An engine that was restarted meanwhile: speed, limits and cache are not those of the new one."""
    fresh, _ = pool_of(1, policy="adaptive")
    new, _ = restored(saved_by(experienced()))
    assert load_of(new).speed.ln_factor
    assert load_of(new).kv.cache.size
    scrape(new, STARTED_AT + 7.0, now=0.2)
    load, other = load_of(new), load_of(fresh)
    assert load.kv.cache.size == 0
    assert (load.speed.factor, load.speed.samples) == (other.speed.factor, other.speed.samples)
    assert (load.room.slots.limit, load.room.slots.response_s) == (other.room.slots.limit, 0.0)
    assert not load.room.lanes.delay_known
    assert ask(new, prompt(39_000), now=1.0) == 0.0


def test_the_same_process_keeps_it_also_after_later_pages() -> None:
    new, _ = restored(saved_by(experienced()))
    for now in (0.2, 0.4):
        scrape(new, STARTED_AT, now=now)
    assert ask(new, prompt(39_000), now=1.0) > 2000.0


def test_a_start_that_was_not_known_when_it_was_saved_proves_nothing() -> None:
    new, _ = restored(saved_by(experienced(started_at=None)))
    scrape(new, STARTED_AT, now=0.2)
    assert load_of(new).kv.cache.size == 0


@pytest.mark.parametrize("found", [0, 2000])
def test_without_a_start_time_cached_tokens_decide(found: int) -> None:
    """Two prompts that are not cached show it, not five: until then requests are sent there for nothing."""
    new, _ = restored(saved_by(experienced(started_at=None)))
    for number in (39, 38):
        assert ask(new, prompt(1000 * number), now=float(number), cached=found) > 2000.0
    assert (ask(new, prompt(37_000), now=100.0, cached=found) > 0.0) is bool(found)
    assert bool(load_of(new).speed.samples.bytes_per_token + load_of(new).room.lanes.delay_known)


def test_one_miss_in_row_after_a_hit_is_no_loss_any_more() -> None:
    new, _ = restored(saved_by(experienced(started_at=None)))
    for number, found in ((39, 2000), (38, 0), (37, 0)):
        ask(new, prompt(1000 * number), now=float(number), cached=found)
    assert load_of(new).kv.cache.size


def test_a_learned_size_is_given_up_at_the_first_misses_that_contradict_it() -> None:
    """Its hits are of a process that may have had a larger cache."""
    size = load_of(pool_of(1, policy="adaptive")[0]).pool.size
    size.restore({"tokens": 900_000.0, "least": 800_000.0})
    assert size.holds(700_000.0)
    size.learn(None, 120_000.0)
    assert size.tokens == 900_000.0, "a single miss is chance"
    size.learn(None, 110_000.0)
    assert size.tokens == 120_000.0


@pytest.mark.parametrize("how", ["reported", "configured"])
def test_a_size_that_is_reported_or_configured_is_used(how: str) -> None:
    old = experienced()
    learner = load_of(old).kv.learner
    assert learner is not None
    learner.size.restore({"tokens": 50_000.0, "least": 0.0})
    saved = saved_by(old)
    new = make_balancer(policy="adaptive")
    new.set_endpoints([replace(spec(1), kv_cache_tokens=77_000 if how == "configured" else None)], now=0.0)
    new.restarts.restore(saved, age_s=0.0, now=0.0)
    assert load_of(new).kv.capacity_tokens == (77_000 if how == "configured" else 50_000)
    if how == "reported":
        scrape(new, STARTED_AT, now=0.1, blocks=4000)
        assert load_of(new).kv.capacity_tokens == 64_000


def test_a_limit_that_is_reported_is_the_most_that_is_used() -> None:
    old = experienced()
    load_of(old).room.slots.limit = 100.0
    new, _ = restored(saved_by(old))
    assert load_of(new).room.slots.limit == 100.0
    new.report_slots(next(iter(new._endpoints.members())).endpoint.uid, 16)
    assert load_of(new).room.slots.limit == 16.0
    told, _ = pool_of(1, policy="adaptive")
    told.report_slots(next(iter(told._endpoints.members())).endpoint.uid, 16)
    told.restarts.restore(saved_by(old), age_s=0.0, now=0.0)
    assert load_of(told).room.slots.limit == 16.0


# Age


def test_rates_decay_to_the_pools() -> None:
    def factor(age_s: float) -> float:
        return load_of(restored(saved_by(experienced()), age_s=age_s)[0]).speed.ln_factor

    assert factor(0.0)
    assert factor(RATES_S) == pytest.approx(factor(0.0) / 2.718281828, rel=1e-6)
    old, _ = restored(saved_by(experienced()), age_s=40.0)
    assert load_of(old).speed.base_until < 0.0, "an own fixed time holds for 30 s after its last sample"


@pytest.mark.parametrize(("age_s", "kept"), [(CONTENTS_S - 1.0, True), (CONTENTS_S + 1.0, False)])
def test_prefixes_and_adapters_are_kept_for_five_minutes(age_s: float, kept: bool) -> None:
    old = experienced()
    load_of(old).adapters.placed("sql", 1.0)
    new, restoring = restored(saved_by(old), age_s=age_s)
    assert bool(restoring.prompts) is kept
    assert load_of(new).adapters.is_loaded("sql", 1.0) is kept
    assert load_of(new).speed.samples == load_of(old).speed.samples


def test_without_prefixes_rates_alone_are_saved() -> None:
    saved = saved_by(experienced(), prefixes=False)
    assert not saved.keys
    new, restoring = restored(saved)
    assert (restoring.endpoints, restoring.prompts) == (1, 0)
    assert load_of(new).speed.ln_factor


# Endpoints


def test_endpoints_that_join_later_take_theirs_then() -> None:
    new = make_balancer(policy="adaptive")
    restoring = new.restarts.restore(saved_by(experienced(endpoints=2)), age_s=10.0, now=0.0)
    assert restoring is not None
    new.set_endpoints([spec(1)], now=1.0)
    while restoring.step():
        pass
    assert (restoring.endpoints, restoring.is_over(1.0)) == (1, False)
    new.set_endpoints([spec(1), spec(2), spec(3)], now=CONTENTS_S)
    assert restoring.endpoints == 2
    assert not restoring.step(), "its prefixes are older than five minutes by now"
    assert restoring.is_over(CONTENTS_S)
    assert load_of(new, 1).kv.started_at == STARTED_AT
    assert load_of(new, 2).kv.started_at is None


def test_what_never_joins_is_forgotten() -> None:
    new = make_balancer(policy="adaptive")
    saved = saved_by(experienced())
    restoring = new.restarts.restore(saved, age_s=0.0, now=0.0)
    assert restoring is not None
    assert not restoring.is_over(CONTENTS_S + 1.0)
    assert not saved.keys
    assert restoring.is_over(1e6)


def test_an_endpoint_that_leaves_or_restarts_meanwhile_gets_no_prefixes() -> None:
    new, _ = pool_of(2, policy="adaptive")
    restoring = new.restarts.restore(saved_by(experienced(endpoints=2)), age_s=0.0, now=0.0)
    assert restoring is not None
    new.set_endpoints([spec(1)], now=0.0)
    scrape(new, STARTED_AT + 1.0, now=0.1)
    while restoring.step():
        pass
    assert load_of(new).pool.index.entries == 0


def test_blocks_of_another_size_are_not_restored() -> None:
    saved = saved_by(experienced())
    saved.block_bytes = 256
    _, restoring = restored(saved)
    assert (restoring.endpoints, restoring.prompts) == (1, 0)


def test_policies_that_learn_nothing_save_and_restore_nothing() -> None:
    balancer, _ = pool_of(1, policy="least-request")
    assert not list(balancer.restarts.save(saved_at=0.0, prefixes=True, now=0.0))
    assert balancer.restarts.restore(saved_by(experienced()), age_s=0.0, now=0.0) is None


def test_no_step_does_much() -> None:
    """However large the index is: requests are served between two steps."""
    balancer, _ = pool_of(1, policy="adaptive")
    cache = load_of(balancer).kv.cache
    for number in range(5000):
        cache.unpin(cache.pin((number,))[1])
    pieces = list(balancer.restarts.save(saved_at=0.0, prefixes=True, now=0.0))
    for piece in pieces:
        nodes = [] if piece is None else piece.get("nodes", [])
        assert isinstance(nodes, list)
        assert len(nodes) <= ITEMS_IN_PIECE
    new = make_balancer(policy="adaptive")
    new.set_endpoints([spec(1)], now=0.0)
    saved = read_lines([encode(piece) for piece in pieces if piece is not None])
    restoring = new.restarts.restore(saved, age_s=0.0, now=0.0)
    assert restoring is not None
    assert restoring.step()
    assert restoring.prompts == ITEMS_IN_PIECE


@pytest.mark.parametrize("started_at", [1e300, float("inf"), float("nan")])
def test_what_an_engine_reports_cannot_make_the_data_unreadable(started_at: float) -> None:
    old = experienced()
    load = load_of(old)
    load.kv.started_at = started_at
    load.room.space.limit_tokens = 0.0
    load.room.slots.limit = 1e17
    load.adapters.placed("x" * 5000, 1.0)
    load.adapters.placed("a\ud800", 1.0)
    (endpoint,) = saved_by(old).endpoints.values()
    assert (endpoint.started_at, endpoint.known) == (None, ())


def test_two_endpoints_are_told_apart_by_their_urls() -> None:
    old = experienced(endpoints=2)
    new = make_balancer(policy="adaptive")
    moved = EndpointSpec(name="e1", base_url="http://10.9.9.9:8000")
    new.set_endpoints([moved, spec(2)], now=0.0)
    restoring = new.restarts.restore(saved_by(old), age_s=0.0, now=0.0)
    assert restoring is not None
    assert restoring.endpoints == 1
    assert load_of(new, 0).kv.started_at is None
