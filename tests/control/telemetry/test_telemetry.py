# SPDX-License-Identifier: Apache-2.0
"""The families that lbproxy shows: right numbers, bounded labels, and nothing that is not known."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from lbproxy import __version__
from lbproxy.config.tree import LogSettings
from lbproxy.control.families.requests import (
    DURATION_BUCKETS,
    FIRST_BYTE_BUCKETS,
    MAX_KINDS,
    QUEUE_BUCKETS,
    RequestCounts,
)
from lbproxy.control.telemetry.process_log import ProcessLog
from lbproxy.control.telemetry.telemetry import LEARNED_A_TURN, Telemetry
from lbproxy.control.telemetry.writer import LineWriter
from lbproxy.core.endpoints.breaker import Cause
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointUid
from lbproxy.core.endpoints.health import Health, Transition
from lbproxy.core.endpoints.state import EndpointSnapshot
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.observed.learned import FULL_BY, EndpointLearned, PoolLearned
from lbproxy.core.observed.ledger import Pair
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.observed.snapshot import PoolSnapshot
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import Tokens, Usage
from lbproxy.driver.own_load import OwnLoad
from tests.control.rig import Rig, rig
from tests.control.telemetry.test_log import HOSTILE, Reader
from tests.support.aio import run
from tests.support.pool import pool_of

Page = dict[str, dict[tuple[str, ...], float]]
"""Sample name -> label values, in the order of the label names -> value."""


LOAD = OwnLoad(None, {"memory": 2}, {"limit": 3}, 4, 5, 6, 7, 8, {"sent": 9}, 12, 13)


class FakePool:
    """Stands for the runtime and its pulse."""

    def __init__(self, *endpoints: EndpointSnapshot) -> None:
        self.now = PoolSnapshot(list(endpoints), 3, 4096)
        self.rooms: dict[EndpointUid, EndpointLearned] = {}
        self.tokens: Mapping[Pair, Tokens] = {}
        self.asked: list[int] = []
        """Of how many endpoints at once."""

    def listen(self, listener: Callable[[float], None]) -> None: ...

    def snapshot(self) -> PoolSnapshot:
        return self.now

    def used(self) -> Mapping[Pair, Tokens]:
        return self.tokens

    def learned_of(self, uids: Iterable[EndpointUid]) -> dict[EndpointUid, EndpointLearned]:
        asked = list(uids)
        self.asked.append(len(asked))
        return {uid: self.rooms[uid] for uid in asked if uid in self.rooms}


def fresh() -> tuple[PoolLearned, EndpointLearned]:
    """Of a pool of one that had no request yet."""
    balancer, endpoints = pool_of(1, policy="adaptive")
    learned = balancer.learned(now=0.0)
    assert learned is not None
    return learned[0], learned[1][endpoints[0].uid]


def seen(uid: int, *models: str, name: str = "", **differs: object) -> EndpointSnapshot:
    endpoint = Endpoint(uid=EndpointUid(uid), name=name or f"e{uid}", base_url=f"http://10.0.0.{uid}:8000")
    one = EndpointSnapshot(
        endpoint=endpoint,
        health=Health.UP,
        draining=False,
        backing_off=False,
        in_flight=2,
        awaiting_first_byte=1,
        placed=9,
        tokens_streamed=100,
        metrics=None,
        metrics_age_s=None,
        stale=True,
        models=models or None,
    )
    return replace(one, **differs)  # type: ignore[arg-type]


@contextmanager
def telemetry(*endpoints: EndpointSnapshot) -> Iterator[tuple[Telemetry, FakePool]]:
    fd = os.open(os.devnull, os.O_WRONLY)
    log = ProcessLog(LogSettings(), LineWriter(fd))
    made = Telemetry(log)
    pool = FakePool(*endpoints)
    made.watch(pool)
    made.watched.load = lambda: LOAD
    pool.listen(made.lag.observe)
    try:
        yield made, pool
    finally:
        log.close()
        os.close(fd)


def samples(made: Telemetry) -> list[Sample]:
    body, content_type = run(made.page())
    assert content_type.startswith("text/plain; version=0.0.4")
    found = [sample for family in text_string_to_metric_families(body.decode()) for sample in family.samples]
    identities = [(sample.name, *sorted(sample.labels.items())) for sample in found]
    assert len(set(identities)) == len(identities), "Prometheus refuses a page with a series twice"
    return found


def read(made: Telemetry) -> Page:
    page: Page = {}
    for sample in samples(made):
        page.setdefault(sample.name, {})[tuple(sample.labels[key] for key in sorted(sample.labels))] = sample.value
    return page


def record(n: int = 0, **differs: object) -> RequestRecord:
    one = RequestRecord(f"r{n}", "POST", "/v1/chat/completions", "10.0.0.9", 100.0)
    one.route, one.model, one.outcome, one.status = "chat_completions", "m", Outcome.COMPLETED, 200
    one.endpoint, one.attempts = "e1", 1
    one.placed_at, one.first_byte_at, one.ended_at = 100.001, 100.3, 104.0
    one.request_bytes, one.response_bytes = 100, 2000
    for name, value in differs.items():
        setattr(one, name, value)
    return one


def refused(outcome: Outcome, **differs: object) -> RequestRecord:
    facts: dict[str, object] = {"outcome": outcome, "status": outcome.value.status, "endpoint": None, "attempts": 0}
    return record(0, **{**facts, "placed_at": None, "first_byte_at": None, **differs})


def test_the_page_of_many_endpoints_reads_few_of_them_in_one_turn() -> None:
    """What was learned of a thousand takes more than 10 ms: requests may go between."""
    many = [seen(n) for n in range(1, 3 * LEARNED_A_TURN)]
    with telemetry(*many) as (made, pool):
        pool.rooms = {one.endpoint.uid: fresh()[1] for one in many[-2:]}
        page = read(made)
        assert max(pool.asked) == LEARNED_A_TURN
        assert sum(pool.asked) == len(many)
        assert len(page["lbproxy_endpoint_held_requests"]) == 2, "of the last turn, too"


def test_a_request_that_failed_after_its_head_is_an_error_or_rejected_whatever_its_status() -> None:
    """Of the dashboard's plots: the client of a stream has 200 by then (`stream_keepalive`)."""
    with telemetry(seen(1, "m")) as (made, _):
        made.ended([record(), record(status=400), refused(Outcome.MODEL_NOT_FOUND, status=200)])
        made.ended([refused(one, status=200) for one in (Outcome.EXPIRED, Outcome.TOO_LATE)])
        made.ended([refused(one, status=200) for one in (Outcome.NO_ENDPOINTS, Outcome.INTERNAL_ERROR, Outcome.CUT)])
        totals = made.totals()
    assert (totals.requests, totals.errors, totals.rejected) == (8, 3, 2)


def test_a_request_is_counted_in_every_family_it_belongs_to() -> None:
    with telemetry(seen(1, "m")) as (made, _):
        made.ended([record()])
        made.ended([record(attempts=3, outcome=Outcome.UPSTREAM_BROKE)])
        made.ended([refused(Outcome.SATURATED, request_bytes=50, response_bytes=0)])
        page = read(made)
    assert page["lbproxy_requests_total"] == {
        ("200", "completed", "chat_completions"): 1,
        ("200", "upstream_broke", "chat_completions"): 1,
        ("429", "rejected_saturated", "chat_completions"): 1,
    }
    assert page["lbproxy_endpoint_requests_total"] == {("e1", "completed"): 1, ("e1", "upstream_broke"): 1}
    assert page["lbproxy_model_requests_total"][("m", "rejected_saturated")] == 1
    assert page["lbproxy_attempts_total"] == {(): 4}
    assert page["lbproxy_retries_total"] == {(): 2}
    assert page["lbproxy_request_bytes_total"] == {(): 250}
    assert page["lbproxy_response_bytes_total"] == {(): 4000}


def test_tokens_are_counted_where_usage_says_them() -> None:
    with telemetry(seen(1, "m")) as (made, _):
        made.ended([record(usage=Usage(100, 40, 7), predicted_cached_tokens=64.0)])
        made.ended([record(usage=Usage(50, None, 3), predicted_cached_tokens=16.0)])
        made.ended([record(usage=Usage(None, 8, None))])
        made.ended([record()])
        page = read(made)
    assert page["lbproxy_prompt_tokens_total"] == {(): 150}
    assert page["lbproxy_completion_tokens_total"] == {(): 10}
    assert page["lbproxy_cached_prompt_tokens_total"] == {("predicted",): 64, ("observed",): 40}


def test_histograms_add_up() -> None:
    """Buckets are cumulative, a bound belongs to its bucket, and a refusal is in none."""
    durations = [0.05, 0.0500001, 4.0, 600.0, 601.0]
    with telemetry() as (made, _):
        for duration in durations:
            made.ended([record(ended_at=100.0 + duration, started_at=100.0, placed_at=100.0, first_byte_at=None)])
        made.ended([refused(Outcome.NO_ENDPOINTS)])
        page = read(made)
    buckets = page["lbproxy_request_duration_seconds_bucket"]
    by_bound = {float(bound): count for (bound, _), count in buckets.items()}
    assert list(by_bound) == [*DURATION_BUCKETS, float("inf")]
    for bound, count in by_bound.items():
        assert count == sum(100.0 + one - 100.0 <= bound for one in durations), bound
    assert page["lbproxy_request_duration_seconds_count"] == {("chat_completions",): 5}
    assert page["lbproxy_request_duration_seconds_sum"][("chat_completions",)] == pytest.approx(sum(durations))
    assert set(page["lbproxy_time_to_first_byte_seconds_count"].values()) == {0}
    assert page["lbproxy_queue_wait_seconds_count"] == {(): 5}
    assert max(map(len, (DURATION_BUCKETS, FIRST_BYTE_BUCKETS, QUEUE_BUCKETS))) < 12


def test_the_first_byte_of_a_stream_and_of_a_whole_answer_are_kept_apart() -> None:
    """That of a whole answer is its end: together they would say nothing about either."""
    with telemetry() as (made, _):
        for stream in (True, True, False):
            made.ended([record(stream=stream)])
        page = read(made)
    counts = {("chat_completions", "true"): 2, ("chat_completions", "false"): 1}
    assert page["lbproxy_time_to_first_byte_seconds_count"] == counts


def test_failed_attempts_are_charged_to_the_endpoint_that_failed() -> None:
    """Not to the one that answered in the end."""
    with telemetry(seen(1, "m"), seen(2, "m")) as (made, _):
        made.ended([record(endpoint="e2", attempts=2, failed=(("e1", "upstream_connect_failed"),))])
        page = read(made)
    assert page["lbproxy_endpoint_failed_attempts_total"] == {("e1", "upstream_connect_failed"): 1}
    assert page["lbproxy_endpoint_requests_total"] == {("e2", "completed"): 1}


@pytest.mark.parametrize(("level", "written"), [("info", 3), ("warning", 2), ("error", 1)])
def test_request_lines_have_a_level_and_obey_it(level: str, written: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    fd = os.open(log, os.O_WRONLY | os.O_CREAT)
    made = ProcessLog(LogSettings.model_validate({"level": level}), LineWriter(fd))
    for outcome in (Outcome.COMPLETED, Outcome.UPSTREAM_BROKE, Outcome.INTERNAL_ERROR):
        made.ended([record(outcome=outcome)])
    made.close()
    os.close(fd)
    levels = [json.loads(line)["level"] for line in log.read_text().splitlines()]
    assert levels == ["info", "warning", "error"][-written:]


def test_hostile_model_names_make_no_series() -> None:
    """A client chooses the name, so a name may be a label only if an endpoint says that it serves it."""
    rng = random.Random(1)
    with telemetry(seen(1, "m")) as (made, _):
        made.ended([record()])
        for n in range(20_000):
            name = "".join(chr(rng.randrange(32, 0x2FFF)) for _ in range(rng.randrange(1, 40))) + str(n)
            made.ended([refused(Outcome.MODEL_NOT_FOUND, model=name, ended_at=104.0 + n)])
        for text in HOSTILE:
            made.ended([refused(Outcome.MODEL_NOT_FOUND, model=text, path=text, method=text, client=text)])
        page = read(made)
    assert page["lbproxy_model_requests_total"] == {
        ("m", "completed"): 1,
        ("other", "model_not_found"): 20_000 + len(HOSTILE),
    }


def test_fallbacks_are_counted_by_models_that_are_served_or_named_in_the_settings() -> None:
    """A pattern may have other models for any name that a client writes."""
    with telemetry(seen(1, "small")) as (made, _):
        made.models = ["big"]
        for n, name in enumerate(["big", "big", *HOSTILE]):
            made.ended([record(model="small", fallback_from=name, ended_at=104.0 + n)])
        made.ended([record(model="small")])
        assert read(made)["lbproxy_fallbacks_total"] == {("big", "small"): 2, ("other", "small"): len(HOSTILE)}
        made.models = []
        assert read(made)["lbproxy_fallbacks_total"] == {("other", "small"): len(HOSTILE)}


def test_at_most_a_hundred_models_have_series() -> None:
    """And the labels of long names are cut: adapters can have any name, in any number."""
    names = [f"adapter-{n}-" + "x" * 200 for n in range(150)]
    with telemetry(seen(1, *names)) as (made, _):
        for name in names:
            made.ended([record(model=name)])
        page = read(made)
    counted = page["lbproxy_model_requests_total"]
    assert len(counted) == 101
    assert counted[("other", "completed")] == 50
    assert max(len(model) for model, _ in counted) == 128


def test_a_model_that_comes_later_gets_its_series_and_one_that_goes_loses_it() -> None:
    with telemetry(seen(1, "old")) as (made, pool):
        made.ended([record(model="old", ended_at=104.0)])
        pool.now = PoolSnapshot([seen(1, "new")])
        made.ended([record(model="new", ended_at=104.5)])  # looked for a moment ago: not again so soon
        made.ended([record(model="new", ended_at=105.5)])
        counted = read(made)["lbproxy_model_requests_total"]
    assert counted == {("other", "completed"): 1, ("new", "completed"): 1}


def test_requests_of_more_kinds_than_are_kept_are_all_counted() -> None:
    names = [f"e{n}" for n in range(MAX_KINDS + 10)]
    counts = RequestCounts(lambda: None)
    for name in [*names, *names]:
        counts.count(record(endpoint=name))
    (family, _) = counts.by_endpoint()
    assert {one.value for one in family.samples} == {2.0}
    assert len(family.samples) == len(names)
    assert counts.totals().requests == 2 * len(names)


def test_status_codes_are_bounded() -> None:
    """An endpoint may answer with any three digits."""
    with telemetry() as (made, _):
        for status in range(100, 600):
            made.ended([record(status=status)])
        made.ended([record(status=0, outcome=Outcome.CLIENT_CLOSED)])
        codes = {code for code, _, _ in read(made)["lbproxy_requests_total"]}
    assert {"200", "404", "499", "1xx", "2xx", "3xx", "4xx", "5xx"} <= codes
    assert len(codes) < 80


def test_streamed_tokens_are_counted_by_endpoint() -> None:
    with telemetry(seen(1), seen(2, tokens_streamed=7)) as (made, _):
        assert read(made)["lbproxy_endpoint_streamed_tokens_total"] == {("e1",): 100, ("e2",): 7}


def test_unknown_and_stale_signals_have_no_sample() -> None:
    """A gauge of 0 would read as idle."""
    fresh = LoadMetrics(scraped_at=1.0, running=5.0, kv_utilization=0.25)
    with telemetry(
        seen(1, metrics=fresh, metrics_age_s=0.1, stale=False),
        seen(2, metrics=fresh, metrics_age_s=9.0, stale=True),
        seen(3),
    ) as (made, _):
        page = read(made)
    assert page["lbproxy_endpoint_running"] == {("e1",): 5.0}
    assert page["lbproxy_endpoint_kv_utilization"] == {("e1",): 0.25}
    assert "lbproxy_endpoint_waiting" not in page
    assert page["lbproxy_endpoint_metrics_age_seconds"] == {("e1",): 0.1, ("e2",): 9.0}


def test_the_room_of_each_endpoint_is_shown_and_a_limit_that_nothing_showed_is_not() -> None:
    with telemetry(seen(1), seen(2), seen(3)) as (made, pool):
        assert "lbproxy_endpoint_wait_seconds" not in read(made), "the policy learns nothing"
        _, unknown = fresh()
        known = replace(unknown, limit=64.0, full_by="space", held=5, wait_ms=1250.0)
        pool.rooms = {EndpointUid(1): known, EndpointUid(2): unknown}
        page = read(made)
    assert page["lbproxy_endpoint_request_limit"] == {("e1",): 64}
    assert page["lbproxy_endpoint_held_requests"] == {("e1",): 5, ("e2",): 0}
    assert page["lbproxy_endpoint_wait_seconds"] == {("e1",): 1.25, ("e2",): 0}
    full = page["lbproxy_endpoint_full"]
    assert {key for key, value in full.items() if value} == {("e1", "space")}
    assert len(full) == 2 * len(FULL_BY)


def test_the_state_of_endpoints_and_queue_is_shown() -> None:
    with telemetry(seen(1), seen(2, health=Health.DOWN, draining=True, in_flight=0)) as (made, _):
        page = read(made)
    assert page["lbproxy_endpoint_up"] == {("e1",): 1, ("e2",): 0}
    assert page["lbproxy_endpoint_draining"] == {("e1",): 0, ("e2",): 1}
    assert page["lbproxy_endpoint_in_flight"] == {("e1",): 2, ("e2",): 0}
    assert page["lbproxy_endpoint_awaiting_first_byte"] == {("e1",): 1, ("e2",): 1}
    states = page["lbproxy_endpoint_health"]
    assert {key for key, value in states.items() if value} == {("e1", "up"), ("e2", "down")}
    assert len(states) == 2 * len(Health)
    assert page["lbproxy_waiting_requests"] == {(): 3}
    assert page["lbproxy_waiting_bytes"] == {(): 4096}
    assert page["lbproxy_client_connections"] == {(): 12}
    assert page["lbproxy_upstream_connections"] == {(): 13}
    assert page["lbproxy_overload_refusals_total"] == {("memory",): 2, ("limit",): 3}
    assert page["lbproxy_overloaded"] == {("memory",): 0}
    assert page["lbproxy_traces_total"] == {("sent",): 9}
    assert page["lbproxy_build_info"] == {(__version__,): 1}
    assert page["lbproxy_log_lines_dropped_total"] == {(): 0}
    assert page["lbproxy_internal_errors_total"] == {(): 0}
    assert page["process_open_fds"][()] > 0


def test_series_of_an_endpoint_that_left_vanish() -> None:
    """A dashboard that still shows a server of last week hides the ones of today."""

    async def main() -> None:
        async with rig() as r:
            await check(r)

    async def check(r: Rig) -> None:
        with telemetry(seen(1, "m"), seen(2, "m")) as (made, pool):
            for one in pool.now.endpoints:
                scraper = r.scraper(one.endpoint)
                scraper.status.results["ok"] = 5
                scraper.status.missing["waiting"] = True
                scraper.status.last_duration_s = 0.01
                made.watch_scrapes(scraper)
                made.transition(Transition(one.endpoint, Health.STARTING, Health.UP, "test"))
                made.ended([record(endpoint=one.endpoint.name)])
            before, _ = await made.page()
            pool.now = PoolSnapshot([seen(2, "m")])
            made.ended([record(endpoint="e1")])  # its last request ended after it left
            after, _ = await made.page()
        for family in ("scrapes_total", "scrape_missing_metrics", "scrape_duration_seconds", "endpoint_up"):
            assert f'lbproxy_{family}{{endpoint="e1"'.encode() in before
        assert before.count(b'endpoint="e1"') == before.count(b'endpoint="e2"') > 10
        assert b'endpoint="e1"' not in after
        assert after.count(b'endpoint="e2"') == before.count(b'endpoint="e2"')

    run(main())


def test_a_leaving_endpoint_and_its_successor_share_a_series() -> None:
    """A changed setting makes a new endpoint of the same name while the old one still has requests."""
    leaving = seen(1, name="e", in_flight=4, awaiting_first_byte=3, draining=True)
    with telemetry(seen(2, name="e"), leaving) as (made, _):
        page = read(made)
    assert page["lbproxy_endpoint_in_flight"] == {("e",): 6}
    assert page["lbproxy_endpoint_awaiting_first_byte"] == {("e",): 4}
    assert page["lbproxy_endpoint_draining"] == {("e",): 0}


def test_every_family_says_what_it_is() -> None:
    with telemetry(seen(1)) as (made, _):
        body, _ = run(made.page())
    families = list(text_string_to_metric_families(body.decode()))
    assert all(family.documentation.endswith(".") and len(family.documentation) > 8 for family in families)
    assert all(family.type in {"counter", "gauge", "histogram"} for family in families)
    ours = [family.name for family in families if not family.name.startswith("process_")]
    assert all(name.startswith("lbproxy_") for name in ours)
    assert len(set(ours)) == len(ours)


def test_the_log_gets_requests_and_transitions() -> None:
    reader = Reader()
    log = ProcessLog(LogSettings(), LineWriter(reader.fd))
    log.ended([record()])
    endpoint = seen(1).endpoint
    Telemetry(log).transition(Transition(endpoint, Health.UP, Health.DOWN, "GET /health returned 503"))
    log.close()
    request, transition = map(json.loads, reader.lines())
    assert (request["event"], request["id"]) == ("request", "r0")
    assert transition["event"] == "transition"
    assert transition["level"] == "warning"
    assert (transition["endpoint"], transition["from"], transition["to"]) == ("e1", "up", "down")
    assert transition["reason"] == "GET /health returned 503"


def test_the_access_log_can_be_off() -> None:
    reader = Reader()
    made = ProcessLog(LogSettings(access=False), LineWriter(reader.fd))
    made.ended([record()])
    made.close()
    assert reader.lines() == []


def test_ejections_are_counted_by_cause_and_panic_and_slow_start_shown() -> None:
    with telemetry(seen(1, share=0.25), seen(2, health=Health.EJECTED, readmitted=True)) as (made, _):
        endpoint = seen(2).endpoint
        made.transition(Transition(endpoint, Health.UP, Health.EJECTED, "5 in a row", Cause.FAULTS))
        made.transition(Transition(endpoint, Health.EJECTED, Health.HALF_OPEN, "time is over"))
        page = read(made)
    assert {key: n for key, n in page["lbproxy_endpoint_ejections_total"].items() if n} == {("faults", "e2"): 1}
    assert len(page["lbproxy_endpoint_ejections_total"]) == 2 * len(Cause), (
        "at 0 from the start, so that rates see the first"
    )
    assert page["lbproxy_endpoint_readmitted"] == {("e1",): 0, ("e2",): 1}
    assert page["lbproxy_endpoint_share"] == {("e1",): 0.25, ("e2",): 1}
    assert page["lbproxy_endpoint_up"] == {("e1",): 1, ("e2",): 0}


def test_tokens_are_shown_by_flow_and_model_and_their_parts_add_up() -> None:
    with telemetry() as (made, pool):
        pool.tokens = {("team", "m"): Tokens(10, 20, 30, 4, 5), ("others", "other"): Tokens(1)}
        found = read(made)
        of_team = {kind: found["lbproxy_tokens_total"]["team", "m", kind] for kind in Tokens._fields[:3]}
        assert of_team == {"prompt_uncached": 10, "prompt_cached": 20, "completion": 30}
        guesses = found["lbproxy_estimated_tokens_total"]
        assert guesses["team", "m", "prompt_uncached"] == 4
        assert guesses["team", "m", "completion"] == 5
        pool.tokens = {(f"flow{n}", "m"): Tokens(n) for n in range(2000)}
        assert read(made)["lbproxy_tokens_total"]["flow1999", "m", "prompt_uncached"] == 1999
