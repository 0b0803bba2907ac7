# SPDX-License-Identifier: Apache-2.0
"""A hung endpoint is found though its /health is fine, and one that only works long is not."""

from __future__ import annotations

import pytest

from lbproxy.config.sections.routing import AdmissionSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.breaker import Cause
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointUid
from lbproxy.core.endpoints.hang import CHECK_S, NON_STREAMING_FACTOR, SILENCE_S
from lbproxy.core.endpoints.health import Health
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.openai import synthetic_card
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.core.requests.retry import FailureKind
from tests.support.pool import MODEL, pool_of, seen, taken

K = FailureKind


class Play:
    """Two endpoints; e2 answers something every second, and e1 does what the test says."""

    def __init__(self, policy: str = "least-request", count: int = 2, *, shows_work: bool = True) -> None:
        """`shows_work`: e1 was seen to count what it computes."""
        self.balancer, self.endpoints = pool_of(count, policy=policy, admission=AdmissionSettings(hold=False))
        self.now = 100.0
        self.flows = True
        """e2 streams."""
        self.stranding: list[EndpointUid] = []
        self.other = self.place("e2") if count > 1 else None
        self.work: float | None = None
        if shows_work:
            ticket = self.place("e1")
            for self.work in (0.0, 5.0, 9.0, 20.0, 30.0):
                self.now += 0.2
                self.scrape()
            self.balancer.first_byte(ticket, now=self.now)
            self.balancer.close(ticket, Outcome.COMPLETED, now=self.now)

    def place(self, name: str, *, stream: bool = True, size: int = 400, open_ended: bool = False) -> Ticket:
        others = frozenset(one.uid for one in self.endpoints if one.name != name)
        request = InferenceRequest("r", MODEL, stream, size, size, open_ended=open_ended)
        ticket = self.balancer.submit(request, now=self.now, avoid=others)
        assert ticket.placed_on is not None
        assert ticket.placed_on.endpoint.name == name
        ticket.avoid = frozenset()  # which was only to get it there
        return ticket

    def scrape(self, running: float = 3.0, kv: float = 0.5, waiting: float = 0.0) -> None:
        uid = self.endpoints[0].uid
        self.balancer.scrape_sent(uid)
        metrics = LoadMetrics(scraped_at=self.now, waiting=waiting, running=running, kv_utilization=kv, work=self.work)
        self.balancer.report_scrape(uid, metrics)

    def go(self, seconds: float, *, scraped: bool = True, moving: bool = False) -> bool:
        """Let time pass until then, or until e1 is ejected. Returns whether it is."""
        for n in range(round(seconds / CHECK_S)):
            self.now += CHECK_S
            if scraped:
                self.scrape(kv=0.5 + 0.001 * (n % 2) * moving)
            if self.flows and self.other is not None:
                self.balancer.first_byte(self.other, now=self.now)
                self.balancer.progress(self.other, 10, now=self.now)
            self.stranding = self.balancer.check(now=self.now)
            if seen(self.balancer, self.now)["e1"].health is Health.EJECTED:
                return True
        return False


def test_three_requests_without_a_byte_and_frozen_gauges() -> None:
    it = Play()
    for _ in range(3):
        it.place("e1")
    assert not it.go(9.0)
    assert it.go(3.0)
    (change,) = taken(it.balancer)
    assert change.cause is Cause.NO_PROGRESS
    assert "from 3 requests" in change.reason
    assert it.stranding == [it.endpoints[0].uid]


@pytest.mark.parametrize("saved_by", ["fewer", "gauges", "byte", "nobody else", "alone", "off"])
def test_what_speaks_against_it(saved_by: str) -> None:
    it = Play(count=1 if saved_by == "alone" else 2)
    if saved_by == "off":
        it.balancer._judge.progress.silence_s = None
    tickets = [it.place("e1") for _ in range(2 if saved_by == "fewer" else 3)]
    it.flows = saved_by != "nobody else"
    for _ in range(5):
        assert not it.go(8.0, moving=saved_by == "gauges")
        if saved_by == "byte":
            it.balancer.first_byte(tickets[0], now=it.now)
            it.balancer.progress(tickets[0], 1, now=it.now)


@pytest.mark.parametrize("policy", ["least-request", "adaptive"])
def test_websockets_may_be_silent_for_as_long_as_they_like(policy: str) -> None:
    """Their clients may have nothing to say; other requests beside them are judged as ever."""
    play = Play(policy)
    sockets = [play.place("e1", open_ended=True) for _ in range(5)]
    for ticket in sockets:
        play.balancer.first_byte(ticket, now=play.now)
    assert not play.go(60.0)
    streams = [play.place("e1") for _ in range(3)]
    assert play.go(60.0)
    for ticket in (*sockets, *streams):
        play.balancer.close(ticket, Outcome.COMPLETED, now=play.now)
    (state, _) = play.balancer.snapshot(now=play.now).endpoints
    assert state.in_flight == 0


def test_a_websocket_teaches_nothing_of_speed() -> None:
    """It lasts as long as its client likes, and its first byte is a greeting."""
    balancer, endpoints = pool_of(1, policy="adaptive")
    before = balancer.learned(now=0.0)
    for n in range(50):
        request = InferenceRequest("r", MODEL, True, open_ended=True)
        ticket = balancer.submit(request, now=float(n))
        balancer.first_byte(ticket, now=n + 0.001)
        balancer.progress(ticket, 5, now=n + 0.3)
        balancer.close(ticket, Outcome.COMPLETED, now=n + 3600.0)
    assert before is not None
    after = balancer.learned(now=0.0)
    assert after is not None
    assert after[1][endpoints[0].uid] == before[1][endpoints[0].uid]


def test_a_shorter_queue_is_progress_and_a_longer_one_is_not() -> None:
    for waiting, is_ejected in ((lambda n: 100.0 - n, False), (float, True)):
        it = Play()
        for _ in range(3):
            it.place("e1")
        ejected = False
        for n in range(20):
            it.scrape(waiting=waiting(n))
            ejected = ejected or it.go(1.0, scraped=False)
        assert ejected is is_ejected


def test_an_endpoint_that_nobody_scrapes_may_be_computing_whole_answers() -> None:
    it = Play()
    for _ in range(5):
        it.place("e1", stream=False)
    assert not it.go(100.0, scraped=False)
    it = Play()
    streams = [it.place("e1") for _ in range(3)]
    for ticket in streams:
        it.balancer.first_byte(ticket, now=it.now)
    assert it.go(12.0, scraped=False), "streams that began do not fall silent, all of them"


def test_the_silence_of_one_request_does_not_count_for_those_that_join_it() -> None:
    it = Play()
    it.place("e1")
    assert not it.go(60.0)
    it.place("e1")
    it.place("e1")
    assert not it.go(9.0)
    assert it.go(3.0)


def test_a_pause_of_our_own_is_nobodys_silence() -> None:
    """We stood still for half a minute: what came meanwhile is not read yet."""
    it = Play()
    for _ in range(3):
        it.place("e1")
    assert not it.go(8.0)
    it.now += 30.0
    assert not it.go(9.0)
    assert it.go(3.0)


def test_a_long_prefill_is_waited_for() -> None:
    """80,000 tokens at .1 ms, 40,000 of context before each, are 16.5 s: five times that is patience enough."""
    it = Play("adaptive")
    for _ in range(3):
        it.place("e1", size=320_000)
    assert not it.go(82.0)
    assert it.go(6.0)


def test_who_waits_there_is_sent_elsewhere_within_the_budget() -> None:
    it = Play()
    tickets = [it.place("e1") for _ in range(3)]
    assert it.go(12.0)
    left = sum(it.balancer.after_failure(ticket, K.STRANDED, (), now=it.now).retry for ticket in tickets)
    assert left == 3
    verdict = it.balancer.after_failure(tickets[0], K.STRANDED, (K.STRANDED, K.RESET), now=it.now)
    assert not verdict.retry, "attempts are bounded all the same"
    assert [change.after for change in taken(it.balancer)] == [Health.EJECTED], "and nobody is blamed for it"


def test_without_anybody_else_they_stay() -> None:
    it = Play(count=1)
    ticket = it.place("e1")
    for _ in range(3):
        it.balancer.report_health(it.endpoints[0].uid, False, "503", now=it.now)
    it.now += SILENCE_S
    assert it.balancer.check(now=it.now) == [it.endpoints[0].uid]
    assert not it.balancer.after_failure(ticket, K.STRANDED, (), now=it.now).retry


def ejected_for_silence(stream: bool) -> tuple[Play, Ticket]:
    """One whose trial is under way."""
    it = Play()
    waiting = [it.place("e1") for _ in range(3)]
    assert it.go(12.0)
    for ticket in waiting:
        it.balancer.close(ticket, Outcome.UPSTREAM_TIMEOUT, now=it.now)
    it.now += 2.0
    it.balancer.check(now=it.now)
    trial = it.place("e1", stream=stream)
    assert trial.is_trial
    assert seen(it.balancer, it.now)["e1"].health is Health.HALF_OPEN
    return it, trial


@pytest.mark.parametrize("stream", [True, False])
def test_a_trial_that_hangs_too_is_over_in_time(stream: bool) -> None:
    it, trial = ejected_for_silence(stream)
    assert it.balancer.check(now=it.now) == [it.endpoints[0].uid]
    assert not it.balancer.after_failure(trial, K.STRANDED, (), now=it.now).retry, "it was sent to find out"
    assert it.go(12.0 if stream else 12.0 * NON_STREAMING_FACTOR)
    assert it.stranding == [it.endpoints[0].uid]
    assert it.balancer.after_failure(trial, K.STRANDED, (), now=it.now).retry


def test_probes_do_not_bring_back_who_hangs() -> None:
    it, trial = ejected_for_silence(stream=True)
    uid = it.endpoints[0].uid
    for _ in range(4):
        it.balancer.report_health(uid, True, "200", now=it.now)
    it.balancer.close(trial, Outcome.CLIENT_CLOSED, now=it.now)
    for _ in range(4):
        it.balancer.report_health(uid, True, "200", now=it.now)
    assert seen(it.balancer, it.now)["e1"].health is Health.HALF_OPEN


def stranding_of(balancer: Balancer, endpoints: list[Endpoint], now: float) -> set[str]:
    return {one.name for one in endpoints if one.uid in balancer.check(now=now)}


def test_who_waits_on_one_that_went_down_is_stranded_and_who_has_bytes_is_not() -> None:
    balancer, endpoints = pool_of(2)
    tickets = [balancer.submit(InferenceRequest("r", MODEL), now=0.0) for _ in range(2)]
    for ticket in tickets:
        assert ticket.placed_on is not None
        if ticket.placed_on.endpoint.name == "e2":
            balancer.first_byte(ticket, now=0.0)
    assert stranding_of(balancer, endpoints, 0.0) == set()
    for endpoint in endpoints:
        for _ in range(3):
            balancer.report_health(endpoint.uid, False, "", now=0.0)
    assert stranding_of(balancer, endpoints, SILENCE_S) == {"e1"}


# --- Work that may be running is not killed on a suspicion ------------------------------------------------------------


def test_gauges_that_were_never_seen_to_move_say_nothing_of_whole_responses() -> None:
    """llama.cpp shows no cache, SGLang two decimals of it: three responses that do not stream take 45 s each."""
    it = Play(shows_work=False)
    for _ in range(3):
        it.place("e1", stream=False)
    assert not it.go(100.0)


def test_a_counter_that_moves_seldom_is_given_several_times_as_long() -> None:
    """SGLang writes it every 40 steps of decoding: 8 s where a token takes .2 s."""
    it = Play(shows_work=False)
    tickets = [it.place("e1", stream=False) for _ in range(3)]
    it.work = 0.0
    for _ in range(5):
        assert not it.go(8.0)
        it.work += 40.0
    assert not it.go(35.0)
    assert it.go(15.0)
    assert len(tickets) == 3


def test_cache_use_that_moves_while_no_request_begins_or_ends_shows_work() -> None:
    it = Play(shows_work=False)
    for _ in range(3):
        it.place("e1", stream=False)
    for n in range(6):
        it.now += 0.2
        it.scrape(kv=0.1 + 0.001 * n)
    assert not it.go(9.0)
    assert it.go(4.0)


@pytest.mark.parametrize("by", ["our requests", "others"])
def test_cache_use_that_moves_with_requests_that_come_and_go_does_not(by: str) -> None:
    it = Play(shows_work=False)
    for n in range(6):
        if by == "our requests":
            it.place("e1", stream=False)
        it.now += 0.2
        it.scrape(kv=0.1 + 0.01 * n, running=9.0 + n if by == "others" else n + 1.0)
    for _ in range(3):
        it.place("e1", stream=False)
    assert not it.go(100.0)


def test_an_endpoint_of_another_model_is_no_measure() -> None:
    for model, is_ejected in (("other", False), (MODEL, True)):
        it = Play()
        for _ in range(3):
            it.place("e1")
        it.balancer.report_models(it.endpoints[1].uid, [synthetic_card(model)])
        assert it.go(30.0) is is_ejected


def test_the_trial_of_an_endpoint_that_shows_nothing_may_take_as_long_as_its_response() -> None:
    it = Play(shows_work=False)
    for _ in range(5):
        ticket = it.place("e1", stream=False)
        it.balancer.after_failure(ticket, K.RESET, (), now=it.now)
        it.balancer.close(ticket, Outcome.UPSTREAM_RESET, now=it.now)
    it.now += 2.0
    it.balancer.check(now=it.now)
    trial = it.place("e1", stream=False)
    assert trial.is_trial
    assert not it.go(100.0, scraped=False)
    assert seen(it.balancer, it.now)["e1"].health is Health.HALF_OPEN


def down(it: Play) -> None:
    for _ in range(3):
        it.balancer.report_health(it.endpoints[0].uid, False, "no response within 3 s", now=it.now)
    assert seen(it.balancer, it.now)["e1"].health is Health.DOWN


@pytest.mark.parametrize(
    ("shows_work", "sign", "is_dead"),
    [
        (True, "counter", False),
        (True, "still counter", True),
        (False, "page", False),
        (True, "byte", False),
        (True, "nothing", True),
        (False, "nothing", True),
    ],
)
def test_what_runs_on_an_endpoint_whose_health_checks_fail(shows_work: bool, sign: str, is_dead: bool) -> None:
    """It gets no new requests; those it has are taken from it only if nothing else is heard of it."""
    it = Play(shows_work=shows_work)
    first, _ = it.place("e1"), it.place("e1", stream=False)
    down(it)
    assert it.balancer.wants_scrape(it.endpoints[0].uid)
    for _ in range(40):
        it.now += 1.0
        if sign in {"counter", "still counter", "page"}:
            it.work = None if it.work is None else it.work + (sign == "counter")
            it.scrape()
        if sign == "byte":
            it.balancer.first_byte(first, now=it.now)
            it.balancer.progress(first, 1, now=it.now)
        it.stranding = it.balancer.check(now=it.now)
    assert bool(it.stranding) is is_dead


@pytest.mark.parametrize("shows_work", [True, False])
def test_streams_leave_at_once_what_answers_nothing_any_more_and_whole_responses_when_that_lasts(
    shows_work: bool,
) -> None:
    it = Play(shows_work=shows_work)
    it.scrape()
    stream, whole = it.place("e1"), it.place("e1", stream=False)
    it.now += 1.0
    down(it)
    assert it.balancer.check(now=it.now) == [it.endpoints[0].uid]
    assert it.balancer.is_stranded(stream, now=it.now)
    assert not it.balancer.is_stranded(whole, now=it.now + SILENCE_S - 3.0)
    assert it.balancer.is_stranded(whole, now=it.now + SILENCE_S)
    it.scrape()
    assert not it.balancer.is_stranded(stream, now=it.now)


def test_where_nobody_reads_metrics_failed_health_checks_alone_move_nobody() -> None:
    it = Play(shows_work=False)
    it.place("e1")
    down(it)
    assert it.balancer.check(now=it.now) == []
    assert it.balancer.check(now=it.now + SILENCE_S) == [it.endpoints[0].uid]


@pytest.mark.parametrize("moves", [True, False])
def test_time_outs_count_against_an_endpoint_on_which_nothing_moves(moves: bool) -> None:
    it = Play()
    tickets = [it.place("e1", stream=False) for _ in range(5)]
    it.balancer._judge.progress.silence_s = None  # the subject is what happens without that watch
    for _ in range(60):
        assert it.work is not None
        it.work += moves
        it.go(10.0, moving=False)
    for ticket in tickets:
        assert not it.balancer.after_failure(ticket, K.TIMEOUT, (), now=it.now).retry
        it.balancer.close(ticket, Outcome.UPSTREAM_TIMEOUT, now=it.now)
    assert seen(it.balancer, it.now)["e1"].health is (Health.UP if moves else Health.EJECTED)


@pytest.mark.parametrize(("timed_out", "moves"), [(True, True), (True, False), (False, True)])
def test_a_stream_that_is_silent_for_too_long_counts_if_nothing_moves(timed_out: bool, moves: bool) -> None:
    it = Play()
    tickets = [it.place("e1") for _ in range(5)]
    it.balancer._judge.progress.silence_s = None
    for ticket in tickets:
        it.balancer.first_byte(ticket, now=it.now)
    it.go(20.0, moving=moves)
    for ticket in tickets:
        it.balancer.close(ticket, Outcome.UPSTREAM_BROKE, now=it.now, timed_out=timed_out)
    up = timed_out and moves
    assert seen(it.balancer, it.now)["e1"].health is (Health.UP if up else Health.EJECTED)


# --- Old pages --------------------------------------------------------------------------------------------------------


def test_a_page_that_stands_while_streams_go_on_says_nothing() -> None:
    """A cache on the way serves it again and again, with the queue of a moment that is long over."""
    play = Play(policy="adaptive")
    ticket = play.place("e1")
    play.work = 40.0
    play.scrape(waiting=9.0)
    play.balancer.first_byte(ticket, now=play.now)
    state = ticket.placed_state
    fresh_until = state.fresh_until
    for n in range(10):
        play.now += 0.2
        play.balancer.progress(ticket, 10, now=play.now)
        play.scrape(waiting=9.0)
        if n == 1:
            assert state.fresh_until > fresh_until, "it may be slow"
            fresh_until = state.fresh_until
    assert state.fresh_until == fresh_until
    before = state.fresh_until
    play.work = 50.0
    play.scrape()
    assert state.fresh_until > before


def test_a_page_that_stands_while_nothing_streams_is_believed() -> None:
    """A long prefill, whose engine counts at its end."""
    play = Play(policy="adaptive")
    ticket = play.place("e1")
    play.work = 40.0
    for _ in range(20):
        play.now += 0.2
        play.scrape(waiting=9.0)
    state = ticket.placed_state
    assert state.fresh_until > play.now + 1.0
