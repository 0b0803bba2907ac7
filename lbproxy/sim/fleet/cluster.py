# SPDX-License-Identifier: Apache-2.0
"""A fleet in virtual time: N simulated servers, one or more *real* Balancers before them, and a workload.

This is a driver of `core.balancer.Balancer` like the asyncio runtime, and of `sim.engine.engine.Engine` like the HTTP
server: what it adds is the time in between. What the proxy would know, and when, is what the Balancer is told: the
first byte of a stream when it arrives, progress at most every 250 ms, the end with its usage; of other responses
nothing before their end; gauges as old as their scrape; prompts' sizes in bytes that are wrong by a factor.

Everything random comes from the seed, and what a job gets at random depends on its id only, so every policy sees the
same jobs with the same errors. Each job ends exactly once, as one `Served`.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.endpoints.hang import CHECK_S
from lbproxy.core.endpoints.health import Transition
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import DECODE, PREFILL, InferenceRequest, Usage, estimated
from lbproxy.core.requests.retry import FailureKind
from lbproxy.sim.engine.engine import FirstToken, RequestTooLong
from lbproxy.sim.engine.model_server import ModelServer
from lbproxy.sim.fleet.around import Asking, Faults, OthersTraffic
from lbproxy.sim.fleet.arrivals import read_job
from lbproxy.sim.fleet.des import EventHeap
from lbproxy.sim.fleet.fleet import FleetOptions, QueueSample, Served, ToldUsage
from lbproxy.sim.fleet.live import Legs, LiveBalancer, LiveJob, LiveServer, engine_of, introduce
from lbproxy.sim.fleet.replicas import ReplicaExchange, hand_over
from lbproxy.sim.workloads.workload import Job, Workload

PROGRESS_S = 0.25
"""As in the proxy: how often a stream's progress is reported, at most."""
ERROR_S = 0.001
"""How long a server that fails fast takes to."""


class Fleet:
    """One simulation. `run` it once."""

    exchange_kind: type[ReplicaExchange] = ReplicaExchange
    """What balancers tell each other through; benchmarks measure it."""

    def __init__(
        self,
        options: FleetOptions,
        workload: Workload,
        make_balancer: Callable[[random.Random], Balancer],
        *,
        seed: int,
        read: Callable[[Job, InferenceRequest], InferenceRequest] | None = None,
    ) -> None:
        """`read`: what balancers are told of a job, made from what they are told otherwise."""
        self._options = options
        self._read = read
        self._workload = workload
        self._seed = seed
        self._heap = EventHeap()
        self._make_balancer = make_balancer
        self._fronts = [LiveBalancer(number, self._new_balancer(number)) for number in range(options.balancers)]
        self._exchange: ReplicaExchange | None = None
        if options.exchange is not None:
            self._exchange = self.exchange_kind(self._heap, options.exchange, self._heard, seed=seed)
            for front in self._fronts:
                self._exchange.joined(front.number, front.balancer)
        self._servers = self._build_servers()
        self._legs = Legs(self._servers)
        self._asking = Asking(self._heap, options, self._poll)
        self._live = 0
        self._served: list[Served] = []
        self._over = False
        self.transitions: list[tuple[float, Transition]] = []
        """What endpoints became in the eyes of each balancer, and when it was seen, within `CHECK_S`."""

    def run(self, *, until_s: float = float("inf")) -> list[Served]:
        """Until the workload is over and every job has ended; the jobs in the order of their arrival. `until_s`: or
        until then, and what has not ended has no outcome.
        """
        self._start_clocks()
        self._next_phase(None)
        while not self._over and self.now < until_s:
            assert self._heap.step(), "a live job always has an event before it"
        return self._served

    def settle(self, for_s: float) -> None:
        """Go on after the last job, for what is still on its way."""
        until = self.now + for_s
        while self.now < until:
            assert self._heap.step()

    def watch(self, every_s: float, note: Callable[[QueueSample], None]) -> None:
        """Have `note` told so often how long the queues are. Before `run`."""

        def look(_: None) -> None:
            gauges = tuple(server.engine.gauges() for server in self._servers)
            note(QueueSample(self.now, gauges, sum(len(front.waiting) for front in self._fronts)))
            self._heap.at(self.now + every_s, look, None)

        self._heap.at(every_s, look, None)

    def engines(self) -> list[ModelServer]:
        """Those of the servers, in their order."""
        return [server.engine for server in self._servers]

    @property
    def now(self) -> float:
        """Virtual seconds since the begin."""
        return self._heap.now

    # Setting up

    def _new_balancer(self, number: int) -> Balancer:
        return self._make_balancer(random.Random(f"{self._seed}:balancer:{number}"))

    def _build_servers(self) -> list[LiveServer]:
        servers = []
        for number, spec in enumerate(self._options.servers):
            rng = random.Random(f"{self._seed}:engine:{number}") if self._options.jitter else None
            servers.append(LiveServer(number, spec, engine_of(spec, rng), []))
        for front in self._fronts:
            introduce(front, servers, self._options, now=0.0)
        return servers

    def _start_clocks(self) -> None:
        options = self._options
        for front in self._fronts:
            self._heap.at(CHECK_S, self._check, front)
        self._asking.start(self._fronts, self._servers, random.Random(f"{self._seed}:clocks"))
        for death in options.balancer_faults:
            self._heap.at(death.from_s, self._lose_front, self._fronts[death.balancer])
            self._heap.at(death.until_s, self._replace_front, self._fronts[death.balancer])
        Faults(self._heap, self._servers, lose_all=self._lose_all, arm=self._arm).plan(options.faults)
        for number, others in enumerate(options.others):
            OthersTraffic(self._heap, others, self._servers[others.server], self._arm, number=number, seed=self._seed)

    # The workload

    def _next_phase(self, _: None) -> None:
        batch = self._workload.begin(self.now)
        while batch is not None and not batch:
            batch = self._workload.begin(self.now)
        if batch is None:
            self._over = True
            return
        self._live += len(batch)
        for at, job in batch:
            self._heap.at(at, self._arrive, job)

    def _arrive(self, job: Job) -> None:
        rng = random.Random(f"{self._seed}:{job.id}")
        front = self._front(rng)
        request, work, streamed = read_job(job, self._options, rng, now=self.now)
        if self._read is not None:
            request = self._read(job, request)
        served = Served(job, self.now, front.number, streamed)
        self._served.append(served)
        flight = LiveJob(served, work, request)
        if job.patience_s is not None:
            self._heap.at(self.now + job.patience_s, self._lose_patience, flight)
        self._submit(front, flight, frozenset())
        self._poll(front)

    def _front(self, rng: random.Random) -> LiveBalancer:
        """The balancer that a job arrives at."""
        alive = [front for front in self._fronts if front.alive]
        return alive[rng.randrange(len(alive))]

    def _lose_patience(self, flight: LiveJob) -> None:
        """The client leaves, unless it reads a response: a stream from its first token on, a whole one at its end."""
        served = flight.served
        if served.outcome is not None or (served.streamed and served.first_at is not None):
            return
        front, server = self._fronts[served.balancer], flight.server
        front.waiting.pop(id(flight.ticket), None)
        if server is not None and server.flights.pop(served.job.id, None) is not None:
            server.engine.abort(served.job.id, now=self.now)
            self._arm(server)
        # Between two attempts there is no ticket to close.
        if _ticket(flight).state is not TicketState.CLOSED:
            self._close(flight, Outcome.CLIENT_CLOSED)
        self._end(flight, Outcome.CLIENT_CLOSED)
        self._poll(front)

    # Balancers

    def _submit(self, front: LiveBalancer, flight: LiveJob, avoid: frozenset[EndpointUid]) -> None:
        if flight.served.outcome is not None or self._is_lost(flight):
            return  # its client left between two attempts
        request, again, suspect = self._legs.to_place(flight), flight.ticket is not None, flight.suspect
        flight.served.attempts += request.leg != DECODE
        ticket = front.balancer.submit(request, now=self.now, avoid=avoid, suspect=suspect, resubmitted=again)
        flight.ticket = ticket
        if ticket.state is TicketState.WAITING:
            front.waiting[id(ticket)] = flight
        else:
            self._settled(flight)

    def _poll(self, front: LiveBalancer) -> None:
        """Act on what the balancer decided, and be there when it wants to decide next."""
        if not front.waiting:
            return
        for ticket in front.balancer.poll(now=self.now):
            self._settled(front.waiting.pop(id(ticket)))
        deadline = front.balancer.next_deadline()
        if deadline is not None and deadline < front.timer_at:
            front.timer_at = deadline
            self._heap.at(deadline, self._on_timer, front)

    def _on_timer(self, front: LiveBalancer) -> None:
        if front.timer_at <= self.now:
            front.timer_at = float("inf")
            self._poll(front)

    def _settled(self, flight: LiveJob) -> None:
        """A ticket has stopped waiting."""
        ticket, served = _ticket(flight), flight.served
        if ticket.outcome is not None and ticket.request.leg == DECODE:
            self._serve_whole(flight)
            return
        if ticket.outcome is not None:
            self._end(flight, ticket.outcome)
            return
        assert ticket.placed_on is not None
        # Every balancer numbers the same list in the same order.
        first_uid = self._servers[0].uids[served.balancer]
        flight.server = self._servers[ticket.placed_on.endpoint.uid - first_uid]
        served.server = flight.server.number
        if ticket.request.leg != DECODE:
            served.placed_at = self.now
            served.prefill = flight.server.number if ticket.request.leg == PREFILL else None
        self._heap.at(self.now + self._options.network_s, self._deliver, flight)

    def _serve_whole(self, flight: LiveJob) -> None:
        """Nothing can continue what was prefilled."""
        self._drop(flight)
        flight.request = flight.request._replace(splittable=False)
        self._submit(self._fronts[flight.served.balancer], flight, _ticket(flight).avoid)

    def _drop(self, flight: LiveJob) -> None:
        """Nothing will read what is held of a request, if anything is."""
        if flight.hold is not None:
            self._legs.drop(flight, now=self.now)
            self._arm()

    def _close(self, flight: LiveJob, outcome: Outcome, usage: Usage | None = None) -> None:
        front = self._fronts[flight.served.balancer]
        front.balancer.close(_ticket(flight), outcome, now=self.now, usage=usage)

    def _end(self, flight: LiveJob, outcome: Outcome) -> None:
        """The job is over, its ticket closed."""
        served = flight.served
        assert served.outcome is None
        served.outcome = outcome
        served.ended_at = self.now
        self._drop(flight)
        following = self._workload.ended(served.job, self.now)
        for at, job in following:
            self._heap.at(at, self._arrive, job)
        self._live += len(following) - 1
        if not self._live:
            self._heap.at(self.now, self._next_phase, None)

    def _heard(self, number: int) -> None:
        """A balancer heard of others' requests."""
        self._poll(self._fronts[number])

    def _lose_front(self, front: LiveBalancer) -> None:
        """A balancer dies, with everything that it has."""
        front.alive, front.died_at = False, self.now
        if self._exchange is not None:
            self._exchange.left(front.number)
        waiting, front.waiting = front.waiting, {}
        for flight in waiting.values():
            self._end(flight, Outcome.CUT)
        for server in self._servers:
            for job_id, flight in list(server.flights.items()):
                if flight.served.balancer == front.number:
                    server.engine.abort(job_id, now=self.now)
                    del server.flights[job_id]
                    self._end(flight, Outcome.CUT)
            self._arm(server)

    def _is_lost(self, flight: LiveJob) -> bool:
        """Whether the balancer of a job died since it came; the job ends then."""
        if flight.served.submitted_at > self._fronts[flight.served.balancer].died_at:
            return False
        self._end(flight, Outcome.CUT)
        return True

    def _replace_front(self, front: LiveBalancer) -> None:
        """A new one starts, which others tell what they know."""
        front.balancer = self._new_balancer(front.number)
        introduce(front, self._servers, self._options, now=self.now)
        if self._exchange is not None:
            self._exchange.joined(front.number, front.balancer)
            known = next((other.balancer for other in self._fronts if other.alive), None)
            if known is not None:
                hand_over(known, front.balancer, self.now)
        front.alive = True

    # Servers

    def _deliver(self, flight: LiveJob) -> None:
        """The request reaches its server."""
        server, job = _server(flight), flight.served.job
        if flight.served.outcome is not None:
            return  # its client left while it was on its way
        if self._is_lost(flight):
            return
        if not server.alive:
            self._fail(flight, FailureKind.CONNECT)
            self._poll(self._fronts[flight.served.balancer])
            return
        if server.failing:
            self._heap.at(self.now + ERROR_S, self._refuse, flight)
            return
        try:
            self._legs.add(server, flight, _ticket(flight), now=self.now)
        except RequestTooLong:
            # The proxy relays a 400 like any response.
            self._close(flight, Outcome.COMPLETED)
            self._end(flight, Outcome.BAD_REQUEST)
            self._poll(self._fronts[flight.served.balancer])
            return
        server.flights[job.id] = flight
        if server.spec.role_chunk and flight.served.streamed:
            self._heap.at(self.now + self._options.network_s, self._begin_stream, flight)
        self._arm(server)

    def _begin_stream(self, flight: LiveJob) -> None:
        """The first bytes arrive, with or before the first token."""
        if flight.served.outcome is None and not flight.begun:
            flight.begun = True
            front = self._fronts[flight.served.balancer]
            front.balancer.first_byte(_ticket(flight), now=self.now)
            self._poll(front)

    def _refuse(self, flight: LiveJob) -> None:
        """A 500 arrives."""
        if flight.served.outcome is not None or self._is_lost(flight):
            return
        self._drop(flight)
        self._fail(flight, FailureKind.ERROR)
        self._poll(self._fronts[flight.served.balancer])

    def _arm(self, *servers: LiveServer) -> None:
        """Something happened at these, and perhaps through that at others."""
        for server in (*servers, *self._legs.settle(now=self.now)):
            due = server.engine.next_event()
            if due is not None and due < server.wakes_at:
                server.wakes_at = due
                self._heap.at(due + self._options.network_s, self._wake, server)

    def _wake(self, server: LiveServer) -> None:
        """What the server sent a network delay ago arrives."""
        sent_at = server.wakes_at
        if sent_at + self._options.network_s > self.now:
            return  # this event was asked for before an earlier one
        server.wakes_at = float("inf")
        touched: set[int] = set()
        for step in server.engine.advance(now=sent_at):
            arrived = step.at + self._options.network_s
            for first in step.first:
                # Absent: lost with its server while the token was on its way.
                if first.id in server.flights:
                    self._first_token(server.flights[first.id], first, arrived, touched)
            for job_id in step.finished:
                # Absent: others' requests, and those whose client left while the end was on its way.
                if job_id in server.flights:
                    self._finished(server, server.flights.pop(job_id), touched)
            for job_id in step.failed:
                # The KV of its prompt was lost with the server that held it: a 500.
                if job_id in server.flights:
                    touched.add(server.flights[job_id].served.balancer)
                    self._fail(server.flights.pop(job_id), FailureKind.ERROR)
        if server.thinking:
            self._show_thought(server, touched)
        self._report_progress(server)
        self._arm(server)
        for number in sorted(touched):
            self._poll(self._fronts[number])

    def _first_token(self, flight: LiveJob, first: FirstToken, at: float, touched: set[int]) -> None:
        served, leg = flight.served, _ticket(flight).request.leg
        if leg != DECODE:
            served.cached_tokens = first.cached_tokens
        served.loaded_adapter = first.loaded_adapter
        if leg == PREFILL:
            return  # it is the whole response, and the client's first token is another
        hidden = int(_server(flight).spec.hidden_share * served.job.answer.tokens)
        if hidden:
            _server(flight).thinking[served.job.id] = hidden
        else:
            self._show_first(flight, at, touched)

    def _show_thought(self, server: LiveServer, touched: set[int]) -> None:
        """Of requests that have generated all that their clients do not see."""
        for job_id, hidden in list(server.thinking.items()):
            flight = server.flights.get(job_id)
            if flight is None:
                del server.thinking[job_id]
            elif server.engine.generated(job_id) > hidden:
                flight.told = server.thinking.pop(job_id)
                self._show_first(flight, self.now, touched)

    def _show_first(self, flight: LiveJob, at: float, touched: set[int]) -> None:
        served = flight.served
        served.first_at = at
        if served.streamed:
            balancer = self._fronts[served.balancer].balancer
            if not flight.begun:
                flight.begun = True
                balancer.first_byte(_ticket(flight), now=self.now)
            balancer.progress(_ticket(flight), 1, now=self.now)
            flight.told += 1
            _server(flight).progress.append((self.now + PROGRESS_S, flight))
            touched.add(served.balancer)

    def _finished(self, server: LiveServer, flight: LiveJob, touched: set[int]) -> None:
        served = flight.served
        touched.add(served.balancer)
        if _ticket(flight).request.leg == PREFILL:
            self._prefilled(server, flight)
            return
        if served.first_at is None:
            flight.told = server.thinking.pop(served.job.id)
            self._show_first(flight, self.now, touched)
        tokens = served.job.answer.tokens
        balancer = self._fronts[served.balancer].balancer
        if not served.streamed:
            balancer.first_byte(_ticket(flight), now=self.now)
        elif tokens > flight.told:
            balancer.progress(_ticket(flight), tokens - flight.told, now=self.now)
        self._close(flight, Outcome.COMPLETED, _usage(served, server.spec.usage))
        self._end(flight, Outcome.COMPLETED)

    def _prefilled(self, server: LiveServer, flight: LiveJob) -> None:
        """A first leg is over; the second is placed at once."""
        served, ticket = flight.served, _ticket(flight)
        front = self._fronts[served.balancer]
        front.balancer.first_byte(ticket, now=self.now)
        self._close(flight, Outcome.COMPLETED, Usage(served.job.prompt_tokens, served.cached_tokens, None))
        flight.prefilled_at = server.uids[front.number]
        served.prefilled_at = self.now
        self._submit(front, flight, ticket.avoid)

    def _report_progress(self, server: LiveServer) -> None:
        """Of the streams whose 250 ms are over; when a step's tokens arrive, as the proxy looks at no other time."""
        due = server.progress
        while due and due[0][0] <= self.now:
            _, flight = due.popleft()
            served = flight.served
            if served.outcome is not None or flight.server is not server:
                continue
            tokens = server.engine.generated(served.job.id) - flight.told
            if tokens > 0:
                flight.told += tokens
                self._fronts[served.balancer].balancer.progress(_ticket(flight), tokens, now=self.now)
            due.append((self.now + PROGRESS_S, flight))

    # Failures

    def _fail(self, flight: LiveJob, kind: FailureKind) -> None:
        """An attempt failed before anything came."""
        served = flight.served
        front = self._fronts[served.balancer]
        verdict = front.balancer.after_failure(_ticket(flight), kind, flight.failed, now=self.now)
        flight.failed += (kind,)
        uid = _server(flight).uids[front.number]
        if kind is FailureKind.ERROR:
            flight.suspect = uid
        self._close(flight, verdict.outcome)
        if verdict.retry:
            self._again(flight, uid, verdict.delay_s)
        else:
            self._end(flight, Outcome.INTERNAL_ERROR if kind is FailureKind.ERROR else verdict.outcome)

    def _again(self, flight: LiveJob, failed: EndpointUid, delay_s: float) -> None:
        front = self._fronts[flight.served.balancer]
        avoid = frozenset({*_ticket(flight).avoid, failed})
        self._heap.at(self.now + delay_s, lambda _: self._submit(front, flight, avoid), None)

    def _check(self, front: LiveBalancer) -> None:
        """What a balancer has to be asked every second; who waits in vain is sent elsewhere, as far as it allows."""
        self._heap.at(self.now + CHECK_S, self._check, front)
        stranding = front.balancer.check(now=self.now)
        for server in self._servers:
            if server.uids[front.number] in stranding:
                for flight in list(server.flights.values()):
                    self._move(front, server, flight)
        self.transitions += [(self.now, transition) for transition in front.balancer.transitions]
        front.balancer.transitions.clear()
        self._poll(front)

    def _move(self, front: LiveBalancer, server: LiveServer, flight: LiveJob) -> None:
        if flight.begun or flight.served.balancer != front.number:
            return
        if not front.balancer.is_stranded(_ticket(flight), now=self.now):
            return
        verdict = front.balancer.after_failure(_ticket(flight), FailureKind.STRANDED, flight.failed, now=self.now)
        if verdict.retry:
            server.engine.abort(flight.served.job.id, now=self.now)
            del server.flights[flight.served.job.id]
            self._arm(server)
            flight.failed += (FailureKind.STRANDED,)
            self._close(flight, verdict.outcome)
            self._again(flight, server.uids[front.number], verdict.delay_s)

    def _lose_all(self, server: LiveServer) -> None:
        """The server's process ends."""
        for job_id in server.engine.restart(now=self.now):
            if job_id not in server.flights:
                continue  # others'
            flight = server.flights.pop(job_id)
            if not flight.begun:
                self._fail(flight, FailureKind.RESET)
            else:
                self._close(flight, Outcome.UPSTREAM_BROKE)
                self._end(flight, Outcome.UPSTREAM_BROKE)
        for front in self._fronts:
            self._poll(front)


def _ticket(flight: LiveJob) -> Ticket:
    assert flight.ticket is not None
    return flight.ticket


def _usage(served: Served, told: ToldUsage) -> Usage:
    if told is ToldUsage.NONE:
        return estimated(None, served.job.answer.tokens)
    cached = served.cached_tokens if told is ToldUsage.ALL else None
    return Usage(served.job.prompt_tokens, cached, served.job.answer.tokens)


def _server(flight: LiveJob) -> LiveServer:
    assert flight.server is not None
    return flight.server
