# SPDX-License-Identifier: Apache-2.0
"""The asyncio driver of the Balancer: it holds the clock, the callbacks of requests that wait, and the one timer.

It does the five steps of the driver's contract (see core/balancer.py) and nothing else: it passes every event on with
the time, and calls back the requests that were placed or refused, once per turn of the loop. It also passes finished
records and endpoint transitions to their sinks. All of it runs on one event loop; nothing awaits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf

from lbproxy.config.tree import Settings
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointSpec, EndpointUid
from lbproxy.core.endpoints.endpoint_set import EndpointChanges
from lbproxy.core.endpoints.hang import CHECK_S
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.engines.handover import Handover
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.engines.orca import LoadReport
from lbproxy.core.engines.server_info import Description
from lbproxy.core.observed.learned import EndpointLearned
from lbproxy.core.observed.ledger import Pair
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.observed.sink import Sink
from lbproxy.core.observed.snapshot import PoolSnapshot
from lbproxy.core.policies.policy import Policy
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.requests.openai import ModelCard
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest, Tokens, Usage
from lbproxy.core.requests.retry import FailureKind, UpstreamError, Verdict
from lbproxy.driver.model_look import ByAddress, ModelLook, ModelReader
from lbproxy.driver.request_runtime import RequestRuntime

logger = logging.getLogger("lbproxy")


class Runtime(RequestRuntime):
    """One pool of endpoints on the running loop, with its Balancer in this process."""

    def __init__(self, balancer: Balancer, sinks: Sequence[Sink] = ()) -> None:
        super().__init__(balancer.endpoints.serving, balancer.stored_responses)
        self.balancer = balancer
        self._sinks = sinks
        self._transitions = balancer.transitions
        self._waiters: dict[int, Callable[[Ticket], None]] = {}
        """The callbacks of requests that wait, by the id() of their tickets."""
        self._pump_due = False
        self._check_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for = 0.0
        self._members: dict[EndpointUid, Endpoint] = {}
        self.drained: frozenset[str] = frozenset()
        """Keys of endpoints that an operator drained, members or not: names of the settings come and go with DNS."""
        self._model_look = ModelLook(self.loop, self.now)
        self.model_readers = ByAddress[ModelReader]()
        """Who asks each endpoint for its models."""
        self.wakers = ByAddress[Callable[[], None]]()
        """What wakes scrapers, to be called when their endpoints come up."""
        self._ended: list[RequestRecord] = []
        """What the sinks are told of at the end of this turn of the loop."""

    # Requests

    def submit(
        self,
        request: InferenceRequest,
        record: RequestRecord,
        avoid: frozenset[EndpointUid],
        settled: Callable[[Ticket], None],
        suspect: EndpointUid | None = None,
        again: bool = False,
    ) -> Ticket:
        ticket = self.balancer.submit(request, now=self.now(), avoid=avoid, suspect=suspect, resubmitted=again)
        if self._transitions:
            self._tell()
        if ticket.state is TicketState.WAITING:
            self._waiters[id(ticket)] = settled
            self._arm()
        return ticket

    def is_stranded(self, ticket: Ticket) -> bool:
        return self.balancer.is_stranded(ticket, now=self.now())

    def after_failure(
        self, ticket: Ticket, error: UpstreamError, earlier: Sequence[FailureKind], decided: Verdict | None = None
    ) -> Verdict:
        """See RequestRuntime. `decided`: the verdict of the worker process in which the attempt failed."""
        verdict = self.balancer.after_failure(
            ticket,
            error.kind,
            earlier,
            now=self.now(),
            detail=error.detail,
            refused=error.refused,
            decided=decided,
            retry_after_s=error.retry_after_s,
        )
        verdict = self._final(verdict, error)
        if error.refused:
            self._ask_renewed()
        if self._transitions:
            self._tell()
        self.pump_soon()
        return verdict

    def first_byte(self, ticket: Ticket) -> None:
        self.balancer.first_byte(ticket, now=self.now())
        if self._transitions:
            self._tell()
        if self._waiters:
            self.pump_soon()

    def progress(self, ticket: Ticket, tokens: int) -> None:
        self.balancer.progress(ticket, tokens, now=self.now())

    def close(self, ticket: Ticket, outcome: Outcome, usage: Usage | None = None, *, timed_out: bool = False) -> None:
        self.balancer.close(ticket, outcome, now=self.now(), usage=usage, timed_out=timed_out)
        if self._transitions:
            self._tell()
        if self._waiters:
            self._waiters.pop(id(ticket), None)
            self.pump_soon()

    def answered(self, ticket: Ticket, outcome: Outcome, usage: Usage | None, *, began: bool, now: float) -> None:
        balancer = self.balancer
        if began:
            balancer.first_byte(ticket, now=now)
        balancer.close(ticket, outcome, now=now, usage=usage)
        if self._transitions:
            self._tell()
        if self._waiters:
            self.pump_soon()

    def adopt(self, request: InferenceRequest, key: str, *, began: bool, told_tokens: int | None) -> Ticket | None:
        """See Balancer; None if the endpoint left. The caller must `close` the ticket."""
        uid = self._uid_of(key)
        return (
            None
            if uid is None
            else self.balancer.adopt(request, uid, began=began, told_tokens=told_tokens, now=self.now())
        )

    def owns_response(self, key: str, response_id: str, request: InferenceRequest) -> None:
        """An endpoint has a stored response, unless another one is known to have it."""
        uid, stored, now = self._uid_of(key), self.stored_responses, self.now()
        if uid is not None and stored.find(response_id, now=now) is None:
            stored.remember(response_id, uid, request, now=now)

    def _uid_of(self, key: str) -> EndpointUid | None:
        state = self.balancer.endpoints.by_key.get(key)
        return None if state is None else state.endpoint.uid

    def emit(self, record: RequestRecord) -> None:
        """See RequestRuntime. The sinks hear of all of a turn of the loop together, at its end: after the responses
        were sent, and each sink's code and data come into the processor's caches once.
        """
        ended = self._ended
        ended.append(record)
        if len(ended) == 1:
            self.loop.call_soon(self.hand_out)

    def hand_out(self) -> None:
        """Tell the sinks now what ended."""
        ended, self._ended = self._ended, []
        if ended:
            for sink in self._sinks:
                sink.ended(ended)

    # Endpoints

    def set_endpoints(self, specs: Sequence[EndpointSpec]) -> EndpointChanges:
        """The complete set, from discovery."""
        changes = self.balancer.set_endpoints(specs, now=self.now())
        for gone in changes.removed:
            del self._members[gone.uid]
        for new in (*changes.added, *changes.changed):
            self._members[new.uid] = new
        for new in changes.added:
            if new.key in self.drained or new.url_key in self.drained:
                self.balancer.drain(new.uid)
        self.pump_soon()
        return changes

    def reconfigure(self, policy: Policy | None, settings: Settings) -> None:
        """Other settings, from now on. `policy`: None = the one there is, with what it learned."""
        self.balancer.reconfigure(policy, settings.balancing, now=self.now())
        self.balancer.explain(settings.explain.wanted)
        self.pump_soon()

    def report_health(self, uid: EndpointUid, ok: bool, reason: str, *, refused: bool = False) -> None:
        """A probe's response. `refused`: nothing listens there."""
        self.balancer.report_health(uid, ok, reason, now=self.now(), refused=refused)
        self._ask_renewed()
        self._tell()
        self.pump_soon()

    def check(self) -> None:
        """Apply what the time alone changes: states of endpoints, and stranded requests."""
        self._check_due = False
        stranding = self.balancer.check(now=self.now())
        self._tell()
        if stranding and self.move_stranded is not None:
            self.move_stranded()
        self.pump_soon()

    async def keep_checking(self) -> None:
        """Until cancelled: a loop for `supervise`."""
        while True:
            await asyncio.sleep(CHECK_S)
            self.check()

    def _ask_renewed(self) -> None:
        """Have endpoints asked that are other processes than before."""
        renewed = self.balancer.endpoints.judge.renewed
        if renewed:
            for uid in dict.fromkeys(renewed):
                self.doubt_models(uid)
            renewed.clear()

    def _tell(self) -> None:
        """Pass transitions to the sinks. Requests at an endpoint that went down are checked in the next turn."""
        for transition in self._transitions:
            for sink in self._sinks:
                sink.transition(transition)
            if transition.after is Health.DOWN and not self._check_due:
                self._check_due = True
                self.loop.call_soon(self.check)
            elif transition.before in {Health.EJECTED, Health.DOWN}:  # it may have been started anew
                self.doubt_models(transition.endpoint.uid)
            if transition.after is Health.UP:
                self._wake_scraper(transition.endpoint)
        self._transitions.clear()

    def drain(self, uid: EndpointUid, *, draining: bool = True, move_after_s: float = inf) -> None:
        """Give an endpoint no new requests (or again), also if discovery loses it for a while. What runs finishes, or
        goes on elsewhere after so long, if it can.
        """
        self.balancer.drain(uid, draining=draining, emptied_at=self.now() + move_after_s)
        if (member := self._members.get(uid)) is not None:
            self.drained = self.drained - {member.key, member.url_key} | ({member.key} if draining else set())
        self.pump_soon()

    def report_models(self, uid: EndpointUid, cards: Iterable[ModelCard] | None) -> None:
        """What an endpoint says it serves; None if it cannot say."""
        self.balancer.report_models(uid, cards)
        self._model_look.heard(self.ranks(uid))
        self.pump_soon()

    def report_loaded(self, uid: EndpointUid, models: Collection[str] | None, *, asked_at: float) -> None:
        """Which models an endpoint has in memory that loads them on demand; None: it does not say."""
        self.balancer.sleepers.loaded(uid, models, asked_at=asked_at, now=self.now())
        self.pump_soon()

    def report_role(self, uid: EndpointUid, handover: Handover) -> None:
        """What an engine says of its part where prefill and decode are apart."""
        self.balancer.report_role(uid, handover)
        self.pump_soon()

    def report_description(self, uid: EndpointUid, said: Description) -> None:
        """What an endpoint says of itself."""
        if said.handover is not None:
            self.report_role(uid, said.handover)
        for rank in self.ranks(uid):
            if said.tokens is not None:
                self.balancer.report_cache_size(rank, said.tokens, at_most=said.is_upper_bound)
            if said.slots is not None:
                self.balancer.report_slots(rank, said.slots)
        self.pump_soon()

    def _reader_of(self, uid: EndpointUid) -> ModelReader | None:
        member = self._members.get(uid)
        return None if member is None else self.model_readers.get(member.url_key)

    async def refresh_models(self, uid: EndpointUid) -> None:
        if (reader := self._reader_of(uid)) is not None:
            await reader.refresh_models()

    def doubt_models(self, uid: EndpointUid) -> None:
        if (reader := self._reader_of(uid)) is not None:
            reader.doubt_models()
        if (member := self._members.get(uid)) is not None and member.rank is not None:
            self._wake_scraper(member)  # the server may have other ranks now

    def look_for_models(self, looked: Callable[[], None]) -> bool:
        look = self._model_look
        if look.may_begin:
            members = self._members.values()
            asked = [one.uid for one in members if one.models is None and self.health(one.uid) is Health.UP]
            if asked:
                look.begin(asked)
            for uid in asked:
                self.doubt_models(uid)
        return look.join(looked)

    def _wake_scraper(self, endpoint: Endpoint) -> None:
        if (wake := self.wakers.get(endpoint.url_key)) is not None:
            wake()

    def report_scrape(self, uid: EndpointUid, metrics: LoadMetrics, ranks: Sequence[LoadMetrics] = ()) -> None:
        """What that scrape said, of the server and of each of its ranks: no use if other ranks are its endpoints."""
        uids = self.ranks(uid)
        loads = ranks if len(uids) > 1 else (metrics,)
        if len(loads) == len(uids):
            for one, load in zip(uids, loads, strict=True):
                self.balancer.report_scrape(one, load)
        self._ask_renewed()
        self.pump_soon()

    def ranks(self, uid: EndpointUid) -> list[EndpointUid]:
        """The endpoints at an endpoint's address, in the order of their ranks: itself alone if it is no rank."""
        return [one.endpoint.uid for one in self.balancer.endpoints.at_address(uid)]

    def report_load(self, ticket: Ticket, report: LoadReport | None) -> None:
        """See RequestRuntime. The ticket's end, which follows, pumps."""
        self.balancer.report_load(ticket, report, now=self.now())

    # Reading

    def health(self, uid: EndpointUid) -> Health | None:
        """The verdict on an endpoint; None if it left the set."""
        state = self.balancer.endpoints.get(uid)
        return None if state is None else state.health

    @property
    def block_bytes(self) -> int | None:
        return self.balancer.block_bytes

    @property
    def splits(self) -> bool:
        return self.balancer.endpoints.has_roles

    def members(self) -> Iterable[EndpointState]:
        return self.balancer.endpoints.members()

    def snapshot(self) -> PoolSnapshot:
        """Everything, now."""
        return self.balancer.snapshot(now=self.now())

    def used(self) -> Mapping[Pair, Tokens]:
        """Tokens since the start, by flow and model."""
        return self.balancer.ledger.since_start()

    def learned_of(self, uids: Iterable[EndpointUid]) -> dict[EndpointUid, EndpointLearned]:
        """The same of these members alone, about 10 µs for each; empty under policies that learn nothing."""
        states = (state for state in map(self.balancer.endpoints.get, uids) if state is not None)
        return self.balancer.learned_of(states, now=self.now())

    # The contract's steps 2 and 3

    def pump_soon(self) -> None:
        """Waiting requests may be placed now. Once per turn of the loop, however many events come in it; a caller is
        never called back within its own call.
        """
        if self._waiters and not self._pump_due:
            self._pump_due = True
            self.loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_due = False
        for ticket in self.balancer.poll(now=self.now()):
            settled = self._waiters.pop(id(ticket), None)
            if settled is not None:
                settled(ticket)
        self._arm()

    def _arm(self) -> None:
        deadline = self.balancer.next_deadline()
        if self._timer is not None:
            if deadline is not None and self._armed_for <= deadline:
                return  # it fires early enough, and arms again
            self._timer.cancel()
        self._timer = None
        if deadline is not None:
            self._armed_for = deadline
            self._timer = self.loop.call_later(max(0.0, deadline - self.now()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._pump()
