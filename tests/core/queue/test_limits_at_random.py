# SPDX-License-Identifier: Apache-2.0
"""10,000 random requests against limits: what endpoints report is counted within .1 %, what they do not within 10 %.

Two replicas before two providers, one of which reports usage; each has limits, and so has the flow that goes there.
Streams, whole responses, uploads and WebSockets; some fail, and some clients leave. A replica is killed and starts
again with a state file of up to a minute ago, and later both stop and start.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

import pytest

from lbproxy.config.sections.flows import FlowsSettings
from lbproxy.core.capacity.allowance import Bounds
from lbproxy.core.capacity.bucket import MINUTE_S
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage, estimated
from lbproxy.core.saved.reading import encode, read_lines
from tests.support.pool import spec
from tests.support.sharing import Replica, exchange

REQUESTS = 10_000
KINDS = ("told", "untold")
"""Models, flows and providers: usage is reported, or not."""
MINUTE_TOKENS = 600_000
TICK_S = 0.25
RULE = {"tokens_per_minute": MINUTE_TOKENS, "requests_per_minute": 1000}
FLOWS = FlowsSettings.model_validate({"named": dict.fromkeys(KINDS, RULE)})


def provider(n: int, model: str) -> EndpointSpec:
    bounds = Bounds(None, 1000, MINUTE_TOKENS, 10**9)
    return replace(spec(n), bounds=bounds, tier=2, metrics=None, health=None, models=(model,), model="its")


@dataclass
class Ideal:
    """A limit per minute that knows at its beginning what each request uses."""

    level: float = MINUTE_TOKENS
    at: float = 0.0
    total: float = 0.0

    def take(self, tokens: float, now: float) -> None:
        self.level = min(MINUTE_TOKENS, self.level + (now - self.at) * MINUTE_TOKENS / MINUTE_S) - tokens
        self.at, self.total = now, self.total + tokens


@dataclass
class Asked:
    """A request, and what is going to come of it."""

    kind: str
    replica: int
    request: InferenceRequest
    prompt: int
    response: int
    end: Outcome
    ticket: Ticket | None = None


class World:
    """Replicas, what runs there, and what was really used."""

    def __init__(self, policy: str) -> None:
        self.rng, self.now, self.policy, self._ids = random.Random(11), 0.0, policy, count()
        self.replicas = [self.started(n) for n in range(2)]
        self.ideal = {kind: Ideal() for kind in KINDS}
        self.files: list[list[bytes]] = [[], []]
        self.due: list[tuple[float, int, str, Asked | None]] = []
        self.waiting: dict[int, Asked] = {}
        self.running = [0, 0]
        self.results: dict[str, int] = {}

    def started(self, n: int) -> Replica:
        replica = Replica(f"r{n}-{next(self._ids)}", 0, flows=FLOWS, policy=self.policy)
        specs = [provider(number, kind) for number, kind in enumerate(KINDS, 1)]
        replica.balancer.set_endpoints(specs, now=self.now)
        return replica

    def at(self, delay: float, what: str, asked: Asked | None = None) -> None:
        heappush(self.due, (self.now + delay, next(self._ids), what, asked))

    def ask(self) -> None:
        rng, kind = self.rng, self.rng.choice(KINDS)
        prompt, response = int(rng.lognormvariate(6.5, 1.0)) + 20, int(rng.lognormvariate(5.5, 1.0)) + 5
        form = rng.choices(("stream", "whole", "upload", "socket"), (60, 30, 5 if kind == "told" else 0, 5))[0]
        end = rng.choices((Outcome.COMPLETED, Outcome.CLIENT_CLOSED, Outcome.CONNECT_FAILED), (88, 7, 5))[0]
        size = int(4 * prompt * rng.uniform(0.95, 1.05))
        request = InferenceRequest("r", kind, form == "stream", size, size, flow=kind)
        if form == "upload":
            request = request._replace(binary=True, prompt_bytes=0, body_bytes=5_000_000)
        most = rng.choice((None, response, 2 * response))
        request = request._replace(open_ended=form == "socket", max_tokens=most)
        replica = rng.randrange(2)
        asked = Asked(kind, replica, request, prompt, response, end)
        asked.ticket = ticket = self.replicas[replica].balancer.submit(request, now=self.now)
        self.waiting[id(ticket)] = asked
        self.changed(ticket)
        for one in self.replicas[replica].balancer.poll(now=self.now):
            self.changed(one)

    def changed(self, ticket: Ticket) -> None:
        if ticket.state is TicketState.WAITING:
            return
        asked = self.waiting.pop(id(ticket))
        name = "placed" if ticket.outcome is None else ticket.outcome.value.code
        self.results[name] = self.results.get(name, 0) + 1
        if ticket.state is TicketState.PLACED:
            self.running[asked.replica] += 1
            if asked.end is not Outcome.CONNECT_FAILED:
                self.ideal[asked.kind].take(asked.prompt + asked.response, self.now)
            self.at(self.rng.uniform(0.05, 0.5), "end" if asked.end is Outcome.CONNECT_FAILED else "begin", asked)

    def begin(self, asked: Asked) -> None:
        assert asked.ticket is not None
        if asked.request.stream or asked.request.open_ended:
            self.replicas[asked.replica].balancer.first_byte(asked.ticket, now=self.now)
            for part in range(4):
                self.at(0.25 * part, "progress", asked)
        self.at(1.0 + self.rng.uniform(0.0, 3.0), "end", asked)

    def progress(self, asked: Asked) -> None:
        assert asked.ticket is not None
        seen = int(0.24 * asked.response)
        self.replicas[asked.replica].balancer.progress(asked.ticket, seen, now=self.now)

    def end(self, asked: Asked) -> None:
        balancer, ticket = self.replicas[asked.replica].balancer, asked.ticket
        assert ticket is not None
        self.running[asked.replica] -= 1
        if asked.end is Outcome.CONNECT_FAILED:
            balancer.close(ticket, asked.end, now=self.now)
            return
        usage = Usage(asked.prompt, 0, asked.response) if asked.kind == "told" else estimated(None, asked.response)
        if asked.kind == "told" or asked.end is Outcome.COMPLETED:
            balancer.first_byte(ticket, now=self.now)
        balancer.close(ticket, asked.end, now=self.now, usage=usage)

    def tick(self) -> None:
        for one in self.replicas:
            for ticket in one.balancer.poll(now=self.now):
                self.changed(ticket)
        exchange(self.replicas, self.now)

    def save(self) -> None:
        for n, one in enumerate(self.replicas):
            pieces = one.balancer.restarts.save(saved_at=1e9 + self.now, prefixes=False, now=self.now)
            self.files[n] = [encode(piece) for piece in pieces if piece is not None]

    def restart(self, *numbers: int) -> None:
        """They begin with what is in their files, and hear of the others again."""
        for n in numbers:
            for other in self.replicas:
                other.peers.lose(self.replicas[n].name, self.now)
            self.replicas[n] = self.started(n)
            saved = read_lines(self.files[n])
            self.replicas[n].balancer.restarts.restore(saved, age_s=1e9 + self.now - saved.saved_at, now=self.now)
        for other in self.replicas:
            other.journal.reset_due = True
        exchange(self.replicas, self.now)

    def run(self, requests: int, *, killed: bool = False, stopped: bool = False) -> None:
        """As many more; then everything that runs ends. `killed`: at that moment one replica begins again with an old
        file; `stopped`: both, with a new one.
        """
        for n in range(requests):
            self.at(n / 40.0, "ask")
        for n in range(int(requests / 40.0 / TICK_S) + 400):
            self.at(TICK_S * n, "tick")
        left, looks = requests, 0
        while self.due:
            self.now, _, what, asked = heappop(self.due)
            left -= what == "ask"
            if asked is None:
                getattr(self, what)()
            else:
                getattr(self, what)(asked)
            if what == "end" and self.running == [0, 0] and not (left or self.waiting):
                exchange(self.replicas, self.now)
                self.check_minutes()
                looks += 1
                if stopped:
                    self.save()
                if (killed or stopped) and looks == 1:
                    self.restart(*range(1 + stopped))
                    self.check_minutes()
        assert looks, "before the limits of a minute were refilled"
        assert self.running == [0, 0]
        assert not self.waiting

    def check_minutes(self) -> None:
        for number, kind in enumerate(KINDS):
            self.ideal[kind].take(0.0, self.now)
            level = self.ideal[kind].level
            assert level < 0.5 * MINUTE_TOKENS, "it was reached a moment ago"
            for one in self.replicas:
                state = list(one.balancer.endpoints.members())[number]
                assert state.allowance is not None
                off = (0.001 if kind == "told" else 0.1) * MINUTE_TOKENS
                of_flow = one.balancer._flows.of(kind, self.now).allowance
                for minute in (state.allowance.use(self.now).tokens, of_flow.use(self.now).tokens):
                    assert minute == pytest.approx(MINUTE_TOKENS - level, abs=off), (kind, one.name)

    def check(self) -> None:
        for number, kind in enumerate(KINDS):
            ideal, share = self.ideal[kind], 0.001 if kind == "told" else 0.1
            for one in self.replicas:
                state = list(one.balancer.endpoints.members())[number]
                assert state.allowance is not None
                of_endpoint = state.allowance.use(self.now)
                assert of_endpoint.day is not None
                assert sum(of_endpoint.day.amounts) == pytest.approx(ideal.total, rel=share), (kind, one.name)


@pytest.mark.parametrize("policy", ["adaptive", "least-request"])
def test_what_is_used_is_counted_over_replicas_and_restarts(policy: str) -> None:
    world = World(policy)
    exchange(world.replicas, 0.0)
    world.run(REQUESTS // 4)
    world.check()
    world.save()
    world.run(REQUESTS // 4, killed=True)  # a minute, of which its file says nothing
    world.check()
    world.run(REQUESTS // 4, stopped=True)
    world.check()
    world.run(REQUESTS // 4)
    world.check()
    assert sum(world.results.values()) == REQUESTS
    assert world.results.pop("placed") > 0.8 * REQUESTS
    refusals = {"rate_limit_exceeded", "rejected_saturated", "rejected_ttl_expired"}
    assert set(world.results) == refusals, "the limits were reached, and nothing else"
