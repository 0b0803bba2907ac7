# SPDX-License-Identifier: Apache-2.0
"""What others placed counts once, wherever requests count, and is gone when it ended or its replica is lost."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest

from lbproxy.config.sections.flows import FlowsSettings
from lbproxy.config.sections.routing import AdmissionSettings
from lbproxy.core.endpoints.health import Health
from lbproxy.core.queue.flows import OTHERS
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.replicas import peers as module
from lbproxy.core.replicas.batches import Batch, RequestEnded, RequestPlaced
from lbproxy.core.replicas.journal import EVENTS_IN_BATCH
from lbproxy.core.replicas.peers import MAX_PEERS
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import Usage
from lbproxy.core.saved.reading import encode, read_lines
from tests.support.compiled import interpreted
from tests.support.pool import MODEL, bring_up, card, show_gauges, spec
from tests.support.prompts import chained
from tests.support.sharing import Replica, ask, counts_of, exchange, joined

NOBODY = (0, 0, 0, 0)
AT_ONCE = AdmissionSettings(hold=False)


def pair(endpoints: int = 1, **options: object) -> tuple[Replica, Replica]:
    a, b = joined(2, endpoints, **{"admission": AT_ONCE, **options})
    return a, b


def place(replica: Replica, count: int = 1, now: float = 1.0, **request: object) -> list[Ticket]:
    tickets = [replica.balancer.submit(ask(f"q{n}", **request), now=now) for n in range(count)]  # type: ignore[arg-type]
    assert all(ticket.state is TicketState.PLACED for ticket in tickets)
    return tickets


def finish(replica: Replica, tickets: list[Ticket], now: float, usage: Usage | None = None) -> None:
    for ticket in tickets:
        replica.balancer.first_byte(ticket, now=now)
        replica.balancer.close(ticket, Outcome.COMPLETED, now=now, usage=usage)


# --- Placed, began, ended ---------------------------------------------------------------------------------------------


def test_a_request_counts_from_its_placement_to_its_end() -> None:
    a, b = pair()
    (ticket,) = place(a)
    b.hears(a.tells(1.1), 1.2)
    assert b.counts() == [(1, 1, 1, 3)]
    a.balancer.first_byte(ticket, now=1.3)
    b.hears(a.tells(1.3), 1.3)
    assert b.counts() == [(1, 0, 1, 3)]
    assert not next(iter(b.balancer.endpoints.members())).load.work.pending
    a.balancer.close(ticket, Outcome.COMPLETED, now=1.4)
    b.hears(a.tells(1.5), 1.5)
    assert b.counts() == [NOBODY]
    assert b.peer.in_flight == 0


def test_what_others_cached_is_cached_here() -> None:
    a, b = pair(2)
    (first,) = place(a)
    b.hears(a.tells(1.0), 1.0)
    finish(a, [first], 1.2)
    b.hears(a.tells(1.2), 1.2)
    (again,) = place(b, now=2.0)
    assert again.placed_state.endpoint.name == first.placed_state.endpoint.name
    assert again.placement is not None
    assert again.placement.cached_tokens > 0.0


def test_requests_of_others_do_not_count_as_ours() -> None:
    a, b = pair()
    place(a, 3)
    b.hears(a.tells(1.0), 1.0)
    (state,) = b.balancer.endpoints.members()
    assert (state.in_flight, state.awaiting_first_byte, state.placed) == (0, 0, 0)
    assert state.requests == 3
    assert not b.journal.has_news, "what others told is not told to them"


@pytest.mark.parametrize("policy", ["least-request", "adaptive"])
def test_the_next_request_goes_where_others_have_placed_fewer(policy: str) -> None:
    a, b = pair(2, policy=policy)
    (ticket,) = place(a, blocks=())
    b.hears(a.tells(1.0), 1.0)
    (own,) = place(b, blocks=())
    assert own.placed_state.endpoint.name != ticket.placed_state.endpoint.name


def test_a_request_that_ends_without_a_first_byte_leaves_nothing() -> None:
    a, b = pair()
    (ticket,) = place(a)
    a.balancer.close(ticket, Outcome.UPSTREAM_BROKE, now=1.5)
    b.hears(a.tells(2.0), 2.0)
    assert b.counts() == [NOBODY]


def test_an_end_that_is_told_a_week_later_is_an_end_of_now() -> None:
    a, b = pair()
    tickets, week_s = place(a, 2), 7 * 86_400.0
    b.hears(a.tells(1.0), 1.0)
    finish(a, tickets, 2.0)
    finish(b, place(b, now=week_s), week_s)
    b.hears(a.tells(week_s), week_s)
    assert b.counts() == [NOBODY]
    (state,) = b.balancer.endpoints.members()
    assert 0.0 < state.load.work.freed[0] < 10_000


def test_a_websocket_counts_as_in_flight_alone() -> None:
    a, b = pair()
    (ticket,) = place(a, open_ended=True)
    b.hears(a.tells(1.0), 1.0)
    assert b.counts() == [(1, 1, 0, 0)]
    a.balancer.close(ticket, Outcome.COMPLETED, now=5.0)
    b.hears(a.tells(5.0), 5.0)
    assert b.counts() == [NOBODY]


def test_policies_without_models_count_as_well() -> None:
    a, b = pair(policy="least-request")
    (ticket,) = place(a)
    b.hears(a.tells(1.0), 1.0)
    (state,) = b.balancer.endpoints.members()
    assert (state.elsewhere, state.reported.elsewhere_awaiting) == (1, 1)
    finish(a, [ticket], 2.0)
    b.hears(a.tells(2.0), 2.0)
    assert (state.elsewhere, state.reported.elsewhere_awaiting) == (0, 0)


def test_keys_of_other_block_sizes_are_not_used() -> None:
    a, b = pair()
    place(a)
    (batch,) = a.tells(1.0)
    batch.block_bytes = 512
    b.hears([batch], 1.0)
    assert b.counts() == [(1, 1, 1, 0)]


def test_an_adapter_that_another_one_uses_is_loaded() -> None:
    a, b = pair()
    for one in (a, b):
        one.balancer.report_models(one.endpoints[0].uid, [card(MODEL), card("ada", parent=MODEL)])
    (ticket,) = place(a, model="ada")
    b.hears(a.tells(1.0), 1.0)
    (state,) = b.balancer.endpoints.members()
    assert state.load.adapters.is_loaded("ada", 1.0)
    finish(a, [ticket], 2.0)
    b.hears(a.tells(2.0), 2.0)
    assert state.load.adapters.is_loaded("ada", 2.0)
    assert not state.load.adapters._active


@pytest.mark.parametrize("fails", [False, True])
def test_a_waiting_request_is_placed_when_one_of_others_ends(fails: bool) -> None:
    a, b = pair(admission=AdmissionSettings())
    tickets = [a.balancer.submit(ask(f"q{n}", tuple(range(100 * n, 100 * n + 40))), now=1.0) for n in range(9)]
    b.hears(a.tells(1.0), 1.0)
    running = [ticket for ticket in tickets if ticket.state is TicketState.PLACED]
    waiting = b.balancer.submit(ask("own"), now=1.0)
    assert waiting.state is TicketState.WAITING, "it would wait for others' prefills there"
    b.balancer.poll(now=1.0)
    for ticket in running:
        if not fails:
            a.balancer.first_byte(ticket, now=1.01)
        a.balancer.close(ticket, Outcome.UPSTREAM_BROKE if fails else Outcome.COMPLETED, now=1.01)
    b.hears([batch for batch in a.tells(1.01) if isinstance(batch.events[-1], RequestEnded)], 1.01)
    assert waiting in b.balancer.poll(now=1.01)
    assert waiting.placed_on is not None


# --- Batches that are missing, repeated, late -------------------------------------------------------------------------


def test_a_repeated_batch_counts_once() -> None:
    a, b = pair()
    place(a, 2)
    batches = a.tells(1.0)
    b.hears([*batches, *batches], 1.0)
    assert b.counts() == [(2, 2, 2, 3)]
    assert b.peer.repeated == 1


def test_a_late_batch_is_ignored_and_asked_for() -> None:
    a, b = pair()
    place(a)
    early = a.tells(1.0)
    place(a, blocks=(7,))
    late = a.tells(1.1)
    b.hears([*late, *early], 1.2)
    assert b.counts() == [(1, 1, 1, 1)]
    assert (b.peer.missed, b.peer.repeated, b.peer.is_complete) == (1, 1, False)
    (asking,) = b.tells(1.2)
    assert asking.asks == [a.name]
    a.hears([asking], 1.3)
    b.hears(a.tells(1.3), 1.3)
    assert b.counts() == [(2, 2, 2, 4)]
    assert (b.peer.resets, b.peer.is_complete) == (2, True)


def test_an_end_that_was_missed_is_known_after_the_reset() -> None:
    a, b = pair()
    tickets = place(a, 3)
    b.hears(a.tells(1.0), 1.0)
    finish(a, tickets[:2], 2.0)
    a.tells(2.0)  # lost
    a.balancer.first_byte(tickets[2], now=2.5)
    b.hears(a.tells(2.5), 2.5)
    assert b.counts() == [(3, 2, 3, 3)]
    exchange([a, b], 3.0)
    assert b.counts() == [(1, 0, 1, 3)]


def test_a_reset_with_nothing_in_flight_ends_everything() -> None:
    a, b = pair()
    tickets = place(a, 2)
    b.hears(a.tells(1.0), 1.0)
    finish(a, tickets, 2.0)
    a.journal.reset_due = True
    b.hears(a.tells(2.0), 2.0)
    assert b.counts() == [NOBODY]


def test_a_reset_is_asked_for_once_a_second() -> None:
    a, b = pair()
    asked_at = []
    for n in range(24):
        now = 1.0 + 0.125 * n
        place(a, blocks=())
        batches = a.tells(now)
        b.hears(batches if n % 2 else [], now)
        asked_at += [now for batch in b.tells(now) if batch.asks == [a.name]]
    assert asked_at == [1.125, 2.125, 3.125]


def test_a_reset_changes_nothing_for_requests_that_are_known() -> None:
    """Everybody gets the reset that one has asked for: nobody else may learn from it or charge twice."""
    a, b = pair(flows=FlowsSettings.model_validate({"default": {"tokens_per_minute": 100_000}}))
    b.balancer._flows.of("another", 0.0)
    started, pending = place(a, 2)
    a.balancer.first_byte(started, now=1.5)
    b.hears(a.tells(1.5), 1.5)
    (state,) = b.balancer.endpoints.members()
    flow = b.balancer._flows.of("anonymous", 1.5)

    def known() -> object:
        work, speed = state.load.work, state.load.speed
        charged = (flow.served_tokens, flow.virtual_finish, flow.allowance.use(60.0))
        return work.pending_tokens, work.context_tokens, asdict(speed.samples), speed.base_ms, charged, b.counts()

    before, placements = known(), [one.placement for one in b.peers._peers[a.name].tickets.values()]
    a.journal.reset_due = True
    b.hears(a.tells(60.0), 60.0)
    assert known() == before
    assert [one.placement for one in b.peers._peers[a.name].tickets.values()] == placements
    assert pending.state is TicketState.PLACED


def test_a_reset_over_several_batches_ends_nothing_before_its_last() -> None:
    a, b = pair()
    tickets = place(a, EVENTS_IN_BATCH + 5, blocks=())
    b.hears(a.tells(1.0), 1.0)
    finish(a, tickets[:1], 2.0)
    a.journal.reset_due = True
    first, second = a.tells(2.0)
    b.hears([first], 2.0)
    assert b.counts()[0][0] == EVENTS_IN_BATCH + 5, "the one that ended is not known to have"
    assert b.peer.in_flight == EVENTS_IN_BATCH + 5
    b.hears([second], 2.0)
    assert b.counts()[0][0] == EVENTS_IN_BATCH + 4


def test_a_reset_of_which_a_batch_is_missing_is_repeated() -> None:
    a, b = pair()
    place(a, 2 * EVENTS_IN_BATCH + 5, blocks=())
    first, _, third = a.tells(1.0)
    b.hears([first, third], 1.0)
    assert [one.is_complete for one in b.peers.snapshot(1.0)] == [False]
    exchange([a, b], 2.0)
    assert [one.is_complete for one in b.peers.snapshot(2.0)] == [True]
    assert b.counts()[0][0] == 2 * EVENTS_IN_BATCH + 5


def test_requests_that_a_missing_batch_of_a_reset_tells_stay_counted() -> None:
    a, b = pair()
    tickets = place(a, 2 * EVENTS_IN_BATCH + 5, blocks=())
    b.hears(a.tells(1.0), 1.0)
    a.journal.reset_due = True
    first, _, third = a.tells(2.0)
    b.hears([first, third], 2.0)
    assert b.counts()[0][0] == 2 * EVENTS_IN_BATCH + 5
    finish(a, tickets[EVENTS_IN_BATCH : EVENTS_IN_BATCH + 3], 3.0)
    exchange([a, b], 3.0)
    assert b.counts()[0][0] == b.peer.in_flight == 2 * EVENTS_IN_BATCH + 2


def test_a_reset_of_which_the_end_is_missing_is_repeated_without_leftovers() -> None:
    a, b = pair()
    tickets = place(a, EVENTS_IN_BATCH + 5, blocks=())
    b.hears(a.tells(1.0), 1.0)
    a.journal.reset_due = True
    b.hears(a.tells(2.0)[:1], 2.0)
    finish(a, tickets, 3.0)
    a.tells(3.0)  # lost
    place(a, blocks=())
    exchange([a, b], 4.0)
    assert b.counts()[0][0] == b.peer.in_flight == 1


def test_who_joins_is_told_what_is_in_flight() -> None:
    a, _ = pair()
    old, _ = place(a, 2, now=1.0)
    a.balancer.first_byte(old, now=2.0)
    late = Replica("late", 1)
    late.hears(a.tells(2.0), 2.0)
    exchange([a, late], 3.0)
    assert late.counts() == [(2, 1, 2, 3)]


@pytest.mark.parametrize("age_s", [0.01, 100.0, 1e7])
def test_a_request_that_is_told_long_after_teaches_nothing(age_s: float) -> None:
    """A joiner must not believe that first bytes take no time, or that they take a week."""
    a, _ = pair(flows=FlowsSettings.model_validate({"half_life": 1}))
    tickets = place(a, 2, now=1.0, blocks=tuple(range(20)))
    a.balancer.first_byte(tickets[0], now=1.2)
    late = Replica("late", 1, flows=FlowsSettings.model_validate({"half_life": 1}))
    late.balancer._flows.of("another", age_s)
    place(late, now=age_s)
    (state,) = late.balancer.endpoints.members()
    virtual = late.balancer._flows._virtual
    exchange([a, late], 1.3 + age_s)
    assert late.counts()[0][:2] == (2, 1)
    assert math.isfinite(state.load.work.recent_tokens(1.3 + age_s))
    assert state.load.backlog_tokens(1.3 + age_s) < 100_000
    assert late.balancer._flows._virtual - virtual < 100_000
    state.load.speed.learn_group()
    learned = state.load.speed.samples
    assert (learned.base_ms + learned.prefill_ms_per_token > 0) == (age_s < 1.0)


# --- Endpoints --------------------------------------------------------------------------------------------------------


def test_requests_at_endpoints_that_are_not_ours_are_not_counted() -> None:
    a, b = pair(2)
    b.balancer.set_endpoints([spec(1)], now=0.5)
    tickets = place(a, 4, blocks=())
    b.hears(a.tells(1.0), 1.0)
    here = sum(ticket.placed_state.endpoint.base_url == spec(1).base_url for ticket in tickets)
    assert 0 < here < 4
    assert counts_of(b.balancer, 0)[0] == here
    assert b.peer.unknown == 4 - here
    finish(a, tickets, 2.0)
    b.hears(a.tells(2.0), 2.0)
    assert counts_of(b.balancer, 0) == NOBODY
    assert b.peer.unknown == 4 - here, "their ends are not counted again"


def test_an_endpoint_that_left_keeps_its_requests_until_they_end() -> None:
    a, b = pair(2)
    tickets = place(a, 4, blocks=())
    b.hears(a.tells(1.0), 1.0)
    states = list(b.balancer.endpoints.members())
    b.balancer.set_endpoints([spec(1)], now=1.5)
    assert [state.elsewhere for state in states] == [2, 2]
    finish(a, tickets, 2.0)
    b.hears(a.tells(2.0), 2.0)
    assert [(state.elsewhere, state.reported.elsewhere_awaiting, state.load.work.in_flight) for state in states] == [
        (0, 0, 0)
    ] * 2


def test_an_endpoint_that_came_back_is_another_one() -> None:
    a, b = pair(1)
    tickets = place(a, 2)
    b.hears(a.tells(1.0), 1.0)
    b.balancer.set_endpoints([], now=1.5)
    bring_up(b.balancer, b.balancer.set_endpoints([spec(1)], now=1.6).added)
    a.journal.reset_due = True
    b.hears(a.tells(2.0), 2.0)
    finish(a, tickets, 3.0)
    b.hears(a.tells(3.0), 3.0)
    assert counts_of(b.balancer, 0) == NOBODY


def test_gauges_that_contain_requests_of_others_are_not_counted_twice() -> None:
    """Of nine requests three are ours and two of another replica, so four are of other clients."""
    a, b = pair()
    place(a, 2)
    exchange([a, b], 1.0)
    place(b, 3)
    for scrape in (1, 2):  # two in a row, as one may be chance
        show_gauges(b.balancer, b.endpoints[0].uid, now=1.0 + scrape, running=9.0)
    (state,) = b.balancer.endpoints.members()
    assert (state.in_flight, state.elsewhere, state.others) == (3, 2, 4.0)
    assert state.load.room.others.count == 4.0
    assert state.load.work.in_flight == 5


def test_of_the_reported_queue_only_the_rest_is_of_other_clients() -> None:
    a, b = pair()
    tickets = place(a, 3)
    a.balancer.first_byte(tickets[0], now=1.0)
    exchange([a, b], 1.0)
    place(b, 1)
    show_gauges(b.balancer, b.endpoints[0].uid, now=2.0, waiting=4.0, running=5.0)
    (state,) = b.balancer.endpoints.members()
    assert state.others == 5.0
    assert state.reported.others_running == 4.0, "of the four that wait three are ours or of another replica"


@pytest.mark.parametrize("own", [True, False])
def test_silence_of_requests_of_others_is_not_a_hang(own: bool) -> None:
    a, b = pair(2)
    holder = b if own else a
    tickets = place(holder, 6, blocks=())
    for ticket in tickets:
        holder.balancer.first_byte(ticket, now=1.5)
    exchange([a, b], 1.5)
    quiet, busy = (list(b.balancer.endpoints.members())[n] for n in (0, 1))
    for n in range(2, 120):
        b.balancer.check(now=float(n))
        (probe,) = [b.balancer.adopt(ask(), busy.endpoint.uid, began=True, told_tokens=None, now=float(n))]
        b.balancer.close(probe, Outcome.COMPLETED, now=float(n))
    assert (quiet.health is Health.UP) == (not own)


# --- Flows ------------------------------------------------------------------------------------------------------------


def limit(**rule: object) -> FlowsSettings:
    return FlowsSettings.model_validate({"default": rule})


def test_what_runs_at_a_peer_is_not_counted_twice_after_a_restart() -> None:
    """What was used before the restart, as it was saved, includes it."""
    a, b = pair(flows=limit(tokens_per_minute=100_000))
    large = ask("q")._replace(prompt_bytes=40_000, body_bytes=40_000, flow="f")
    a.balancer.submit(large, now=1.0)
    exchange([a, b], 1.0)
    used = b.balancer.restarts.save_limits(saved_at=1e9, now=1.0)
    again = pair(flows=limit(tokens_per_minute=100_000))[1]
    again.balancer.restarts.restore(read_lines([encode(one) for one in used if one]), age_s=0.0, now=1.0)
    a.journal.reset_due = True
    again.hears(a.tells(1.0), 1.0)
    saved = read_lines([encode(one) for one in again.balancer.restarts.save_limits(saved_at=1e9, now=1.0) if one])
    assert saved.flows["f"].tokens == pytest.approx(10_000)


def refused(replica: Replica, now: float) -> bool:
    ticket = replica.balancer.submit(ask(), now=now)
    return ticket.outcome is Outcome.RATE_LIMITED


def test_a_limit_of_requests_in_flight_holds_over_all_replicas() -> None:
    a, b = pair(flows=limit(in_flight=3))
    tickets = place(a, 2)
    exchange([a, b], 1.0)
    place(b, 1)
    parked = b.balancer.submit(ask("parked"), now=1.0)
    assert parked.state is TicketState.WAITING
    finish(a, tickets[:1], 2.0)
    exchange([a, b], 2.0)
    assert b.balancer.poll(now=2.0) == [parked]
    assert parked.placed_on is not None


def test_a_lost_replica_uses_nothing_of_a_flow() -> None:
    a, b = pair(flows=limit(in_flight=2))
    place(a, 2)
    exchange([a, b], 1.0)
    parked = b.balancer.submit(ask("parked"), now=1.0)
    assert parked.state is TicketState.WAITING
    b.peers.lose(a.name, 4.0)
    assert b.balancer.poll(now=4.0) == [parked]
    assert b.balancer._flows.of("anonymous", 4.0).elsewhere == 0


def test_a_limit_of_requests_a_minute_holds_over_three_replicas() -> None:
    replicas = joined(3, 1, admission=AT_ONCE, flows=limit(requests_per_minute=30))
    admitted = 0
    for n in range(90):
        one = replicas[n % 3]
        admitted += not refused(one, 1.0)
        exchange(replicas, 1.0)
    assert admitted == 30


def test_first_requests_of_a_flow_at_two_replicas_at_once_are_all_counted() -> None:
    a, b = pair(flows=limit(requests_per_minute=30))
    place(a, 10)
    place(b, 15)
    exchange([a, b], 1.0)
    for one in (a, b):
        assert one.balancer._flows.of("anonymous", 1.0).allowance.use(1.0).requests == 25.0


def test_a_limit_of_tokens_a_minute_holds_over_replicas() -> None:
    a, b = pair(flows=limit(tokens_per_minute=10_000))
    (ticket,) = place(a)
    finish(a, [ticket], 1.0, Usage(9_000, 0, 1_000))
    exchange([a, b], 1.0)
    assert refused(a, 1.0)
    assert refused(b, 1.0)
    assert not refused(b, 8.0), "a tenth of a minute later a tenth is there"


def test_who_joins_takes_over_what_was_used() -> None:
    settings = limit(requests_per_minute=30, tokens_per_minute=100_000)
    a, b = pair(flows=settings)
    for one in (a, b):
        finish(one, place(one, 15, blocks=()), 1.0)
    exchange([a, b], 1.0)
    late = Replica("late", 1, flows=settings)
    for one in (a, b):
        late.journal.ask(one.name)  # as drivers do for each replica that they find
    exchange([a, b, late], 1.0)
    assert refused(late, 1.0)
    used = late.balancer._flows.of("anonymous", 1.0).allowance.use(1.0)
    assert used == a.balancer._flows.of("anonymous", 1.0).allowance.use(1.0)
    assert used.requests == 30.0


def test_requests_a_minute_are_known_after_a_reset() -> None:
    """What was admitted in a batch that was lost is in the next reset, and what others admitted is not taken for it."""
    a, b = pair(flows=limit(requests_per_minute=30))
    place(b, 5)
    exchange([a, b], 1.0)
    place(a, 4)
    a.tells(1.0)  # lost
    place(a, 3)
    exchange([a, b], 1.0)
    exchange([a, b], 1.0)
    for one in (a, b):
        assert one.balancer._flows.of("anonymous", 1.0).allowance.use(1.0).requests == 12.0


def test_a_flow_that_a_replica_has_forgotten_uses_nothing_there() -> None:
    a, b = pair(flows=limit(in_flight=3))
    place(a, 2)
    (batch,) = a.tells(1.0)
    b.hears([batch], 1.0)
    flow = b.balancer._flows.of("anonymous", 1.0)
    assert flow.elsewhere == 2
    b.peers.hear(Batch(a.name, batch.number + 1, 1024, True, 0, [], [], {}, []), 2.0)
    assert flow.elsewhere == 0


@interpreted  # it patches a constant
def test_flows_of_a_replica_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FLOWS", 3)
    a, b = pair(flows=limit(in_flight=3))
    for n in range(10):
        place(a, flow=f"f{n}")
        b.hears(a.tells(1.0), 1.0)
    assert list(b.peers._peers[a.name].flows) == ["f7", "f8", "f9"]
    assert [b.balancer._flows.of(f"f{n}", 1.0).elsewhere for n in range(10)] == [0] * 7 + [1] * 3


@interpreted  # it patches a constant
def test_flows_beyond_the_table_are_not_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lbproxy.core.queue.flows.MAX_FLOWS", 2)
    a, b = pair(flows=limit(in_flight=3))
    monkeypatch.setattr("lbproxy.core.queue.flows.MAX_FLOWS", 50)
    tickets = [ticket for n in range(6) for ticket in place(a, flow=f"f{n}")]
    monkeypatch.setattr("lbproxy.core.queue.flows.MAX_FLOWS", 2)
    b.hears(a.tells(1.0), 1.0)
    assert {flow.name: flow.elsewhere for flow in b.balancer._flows} == {"f0": 1, "f1": 1, OTHERS: 0}
    finish(a, tickets, 2.0)
    b.hears(a.tells(2.0), 2.0)
    b.peers.lose(a.name, 3.0)
    assert {flow.elsewhere for flow in b.balancer._flows} == {0}


def test_fair_shares_count_what_others_served() -> None:
    a, b = pair()
    for one in (a, b):
        one.balancer._flows.of("light", 0.0)
    (ticket,) = place(a, flow="heavy")
    exchange([a, b], 1.0)
    finish(a, [ticket], 2.0, Usage(700, 0, 500))
    exchange([a, b], 2.0)
    heavy = [one.balancer._flows.of("heavy", 2.0).served_tokens for one in (a, b)]
    assert heavy[0] == heavy[1] == 700 + 2.0 * 500


# --- Stored responses -------------------------------------------------------------------------------------------------


def test_a_stored_response_is_found_through_any_replica() -> None:
    a, b = pair(2)
    a.balancer.stored_responses.remember("resp-1", a.endpoints[1].uid, ask(), now=1.0)
    exchange([a, b], 1.0)
    found = b.balancer.stored_responses.find("resp-1", now=1.0)
    assert found is not None
    assert (found.uid, found.prompt_bytes, found.block_keys) == (b.endpoints[1].uid, 3072, chained((1, 2, 3)))
    assert not b.journal.has_news
    follow = b.balancer.submit(ask(response_id="resp-1"), now=1.0)
    assert follow.placed_state.endpoint.uid == b.endpoints[1].uid


def test_a_stored_response_that_is_known_is_not_replaced() -> None:
    a, b = pair(2)
    b.balancer.stored_responses.remember("resp-1", b.endpoints[0].uid, ask(), now=1.0)
    a.balancer.stored_responses.remember("resp-1", a.endpoints[1].uid, ask(), now=1.0)
    b.hears(a.tells(1.0), 1.0)
    found = b.balancer.stored_responses.find("resp-1", now=1.0)
    assert found is not None
    assert found.uid == b.endpoints[0].uid


def test_who_joins_is_told_of_stored_responses() -> None:
    a, _ = pair(1)
    for n in range(5):
        a.balancer.stored_responses.remember(f"resp-{n}", a.endpoints[0].uid, ask(), now=1.0)
    a.tells(1.0)
    late = Replica("late", 1)
    a.peers.tell_stored(3)
    exchange([a, late], 2.0)
    found = [n for n in range(5) if late.balancer.stored_responses.find(f"resp-{n}", now=2.0) is not None]
    assert found == [2, 3, 4]


def test_a_stored_response_of_an_unknown_endpoint_is_not_noted() -> None:
    a, b = pair(2)
    b.balancer.set_endpoints([spec(1)], now=0.5)
    a.balancer.stored_responses.remember("resp-1", a.endpoints[1].uid, ask(), now=1.0)
    exchange([a, b], 1.0)
    assert b.balancer.stored_responses.find("resp-1", now=1.0) is None


# --- Replicas ---------------------------------------------------------------------------------------------------------


def test_a_lost_replica_has_nothing_in_flight() -> None:
    a, b = pair()
    started, _ = place(a, 2)
    a.balancer.first_byte(started, now=1.0)
    b.hears(a.tells(1.0), 1.0)
    b.peers.lose(a.name, 4.0)
    assert b.counts() == [NOBODY]
    assert b.peers.snapshot(4.0) == []
    b.peers.lose(a.name, 4.0)
    b.peers.lose("never heard of", 4.0)


def test_a_replica_that_was_only_silent_is_counted_again() -> None:
    a, b = pair()
    place(a, 2)
    b.hears(a.tells(1.0), 1.0)
    b.peers.lose(a.name, 4.0)
    place(a, 1)
    exchange([a, b], 5.0)
    assert b.counts() == [(3, 3, 3, 3)]


def test_a_reset_that_was_not_complete_is_lost_as_a_whole() -> None:
    a, b = pair()
    place(a, EVENTS_IN_BATCH + 5, blocks=())
    b.hears(a.tells(1.0), 1.0)
    a.journal.reset_due = True
    first, _ = a.tells(2.0)
    b.hears([first], 2.0)
    b.peers.lose(a.name, 4.0)
    assert b.counts() == [NOBODY]


def test_replicas_have_numbers_of_their_own() -> None:
    a, b, c = joined(3, 1)
    first, other = place(a)[0], place(b)[0]
    assert first.shared_number == other.shared_number
    exchange([a, b, c], 1.0)
    assert c.counts() == [(2, 2, 2, 3)]
    finish(b, [other], 2.0)
    exchange([a, b, c], 2.0)
    assert c.counts() == [(1, 1, 1, 3)]
    assert a.counts() == [(0, 0, 1, 3)]


def test_own_batches_are_ignored() -> None:
    a, _ = pair()
    place(a)
    a.hears(a.tells(1.0), 1.0)
    assert a.counts()[0][0] == 0
    assert len(a.peers.snapshot(1.0)) == 1


@interpreted  # it patches a constant
def test_replicas_and_their_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_IN_FLIGHT", 3)
    a, b = pair()
    tickets = place(a, 5)
    b.hears(a.tells(1.0), 1.0)
    assert (b.peer.in_flight, b.peer.unknown) == (3, 2)
    finish(a, tickets, 2.0)
    b.hears(a.tells(2.0), 2.0)
    assert b.counts() == [NOBODY]
    for n in range(MAX_PEERS + 5):
        b.peers.hear(Batch(f"other-{n}", 1, 1024, True, 0, [], [], {}, []), 3.0)
    assert len(b.peers.snapshot(3.0)) == MAX_PEERS


@interpreted  # it patches a constant
def test_resets_that_never_end_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_IN_FLIGHT", 3)
    a, b = pair()
    place(a)
    (batch,) = a.tells(1.0)
    (event,) = batch.events
    assert isinstance(event, RequestPlaced)
    for n in range(50):
        event.number, batch.number, batch.is_reset, batch.untold = 100 + n, 100 + n, True, 9
        b.hears([batch], 1.0)
    assert b.peer.in_flight == b.counts()[0][0] == 4
    b.peers.lose(a.name, 2.0)
    assert b.counts() == [NOBODY]


def test_events_that_make_no_sense_change_nothing() -> None:
    a, b = pair()
    place(a)
    (batch,) = a.tells(1.0)
    (placed,) = batch.events
    assert isinstance(placed, RequestPlaced)
    batch.events = [placed, placed, RequestEnded(77, 0.0, True, 3, None), RequestEnded(1, 0.0, True, 3, None), placed]
    b.hears([batch], 1.0)
    assert b.counts() == [(1, 1, 1, 3)]
    assert b.peer.unknown == 1


def test_the_snapshot_says_how_old_what_is_known_is() -> None:
    a, b = pair()
    place(a)
    b.hears(a.tells(1.0), 1.0)
    (shown,) = b.peers.snapshot(3.5)
    assert (shown.replica, shown.in_flight, shown.batches, shown.resets) == (a.name, 1, 2, 1)
    assert (shown.missed, shown.repeated, shown.unknown) == (0, 0, 0)
    assert (shown.heard_s, shown.is_complete) == (2.5, True)
