"""Flows: whose requests are whose, who is served next while several wait, and what each may use.

A flow is an API key, or whatever a header says (see `flow_of`); requests without either are one flow together. While
requests of several flows wait at one priority, they are served by start-time fair queueing (Goyal, Vin and Cheng,
1996), in tokens: each flow has the virtual time at which the service that it got so far is over (`virtual_finish`);
whoever has the earliest is next, and is charged what its request costs by its weight. A flow that was away begins at
the virtual time of now: it has saved nothing up and owes nothing but what it still has in flight. What it owes halves
every `half_life`, so that nobody does penance for an hour. A cost is an uncached prompt token, and `OUTPUT_COST` for
each token of the response (as in VTC: Sheng et al., 2024): guessed when a request is placed, put right as it goes
along.

The limits: requests at endpoints at a time (more of them wait, parked by the queue), requests and tokens a minute (a
bucket each; who finds it empty is refused).

Invariants: `active` counts a flow's tickets that are in the queue's order or placed; virtual time never goes back; what
a request was charged in advance and did not use is given back when it ends. Bounded: `MAX_FLOWS`, then the strangers
share one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import exp2
from typing import Final

from lbproxy.config.sections.flows import FlowSettings, FlowsSettings
from lbproxy.core.queue.flow import (
    ANONYMOUS,
    MAX_RETRY_AFTER_S,
    MINUTE_S,
    Flow,
    FlowSnapshot,
    Refusal,
)
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.request import InferenceRequest, Usage

MAX_FLOWS: Final = 1024
"""Besides those that the settings name."""
OTHERS: Final = "others"
"""The flow of those that find no room in the table."""
OUTPUT_COST: Final = 2.0
"""Of a token of the response, beside one of the prompt that is not cached."""
BYTES_PER_TOKEN: Final = 4.0
"""Where nobody looks at prompts."""
FIRST_BINARY_TOKENS: Final = 1000.0
"""Of audio, an image or a file, where no endpoint has counted the tokens of any: its bytes do not say."""
BINARY_MODELS: Final = 64
"""For which such tokens are counted apart."""


class Flows:
    """The table of flows and the virtual time."""

    def __init__(self, settings: FlowsSettings) -> None:
        self._flows: dict[str, Flow] = {}
        self._virtual = 0.0
        """When the last placed request began, in virtual time."""
        self._full_until = 0.0
        """Nobody in the table can be forgotten before."""
        self._single_flow = True
        """There is one flow at most: nothing is charged in advance. That saves 1 µs a request."""
        self._binary_tokens: dict[str, float] = {}
        """Mean of the prompt tokens that endpoints counted of a model's binary bodies."""
        self._take(settings)

    def _take(self, settings: FlowsSettings) -> None:
        self._half_life_s = settings.half_life
        self._rules: Mapping[str, FlowSettings] = settings.rules
        self._default = settings.default

    def reconfigure(self, settings: FlowsSettings, now: float) -> None:
        """Other rules, from now on. Who is above a new limit keeps what it has."""
        self._take(settings)
        for flow in self._flows.values():
            flow.adopt(self._rule(flow.name), now)

    def _rule(self, name: str) -> FlowSettings:
        return self._rules.get(name, self._default)

    def __iter__(self) -> Iterator[Flow]:
        """Those that there are, the longest known first."""
        return iter(list(self._flows.values()))

    def snapshot(self, waiting: Mapping[Flow, int]) -> list[FlowSnapshot]:
        """All, those first that got most. `waiting`: how many of each wait; who is missing has none."""
        shown = [
            FlowSnapshot(one.name, one.weight, waiting.get(one, 0), one.in_flight, one.served_tokens, one.refused)
            for one in self._flows.values()
        ]
        return sorted(shown, key=lambda one: -one.served_tokens)

    def of(self, name: str, now: float) -> Flow:
        """The flow that is called so."""
        flow = self._flows.get(name)
        if flow is None:
            if len(self._flows) >= MAX_FLOWS + len(self._rules) and name not in self._rules and not self._forget(now):
                name = OTHERS
                if name in self._flows:
                    return self._flows[name]
            flow = self._flows[name] = Flow(name, now)
            flow.adopt(self._rule(name), now)
            self._single_flow = len(self._flows) == 1
        return flow

    def _forget(self, now: float) -> bool:
        """One flow of those that have nothing here, owe nothing and have used nothing for a minute."""
        if now < self._full_until:
            return False
        for name, flow in self._flows.items():
            idle = not flow.active and now - flow.virtual_finish_at > MINUTE_S and flow.virtual_finish <= self._virtual
            if idle and name not in self._rules:
                del self._flows[name]
                return True
        self._full_until = now + 1.0  # to look at all of them takes a while
        return False

    # Limits

    def admit(self, flow: Flow, request: InferenceRequest, now: float) -> Refusal | None:
        """None: the request may come, and counts. Else the limit that keeps it out: of two, for longest."""
        buckets = ((flow.requests, "requests"), (flow.tokens, "tokens"))
        waits = [(bucket.wait_s(1.0, now), bucket.size, unit) for bucket, unit in buckets if bucket is not None]
        wait_s, size, unit = max(waits, default=(0.0, 0.0, ""))
        if wait_s:
            flow.refused += 1
            limit = f"{unit} a minute, {size:.0f} (`{unit}_per_minute`)"
            return Refusal(flow.name, limit, min(wait_s, MAX_RETRY_AFTER_S))
        if flow.requests is not None:
            flow.requests.take(1.0)
        return None

    # Service

    def virtual_start(self, flow: Flow, now: float) -> float:
        """The virtual time at which the flow's next request would begin: the earliest goes first."""
        debt = flow.virtual_finish - self._virtual
        if debt <= 0.0:
            return self._virtual
        return self._virtual + debt * exp2((flow.virtual_finish_at - now) / self._half_life_s)

    def cost_of(self, ticket: Ticket) -> float:
        """What a waiting ticket will be charged, about, by its flow's weight: virtual time."""
        request, flow = ticket.request, ticket.flow
        assert flow is not None
        prompt = ticket.work_tokens or self._prompt_tokens(request)
        return (prompt + OUTPUT_COST * _expected_response_tokens(flow, request)) / flow.weight

    def placed(self, ticket: Ticket, now: float) -> None:
        """The ticket was placed: charge what it will cost, as far as one can tell."""
        request, flow = ticket.request, ticket.flow
        assert flow is not None
        flow.in_flight += 1
        if flow.tokens is not None:
            ticket.billed = self._prompt_tokens(request)
            flow.tokens.take(ticket.billed)
        if self._single_flow:
            return
        start = self._virtual
        if flow.virtual_finish > start:  # `virtual_start`, written out
            start += (flow.virtual_finish - start) * exp2((flow.virtual_finish_at - now) / self._half_life_s)
        self._virtual = start
        ticket.charged = cost = self._prompt_cost(ticket) + OUTPUT_COST * _expected_response_tokens(flow, request)
        flow.virtual_finish = start + cost / flow.weight
        flow.virtual_finish_at = now
        flow.served_tokens += cost

    def progress(self, ticket: Ticket, tokens: int, now: float) -> None:
        """So many more tokens of the response came: those beyond the guess are charged as they come."""
        ticket.response_tokens += tokens
        flow = ticket.flow
        assert flow is not None
        if ticket.charged:
            excess = self._prompt_cost(ticket) + OUTPUT_COST * ticket.response_tokens - ticket.charged
            if excess > 0.0:
                self._charge(flow, ticket, excess, now)
        if flow.tokens is not None:
            ticket.billed += tokens
            flow.tokens.take(tokens)

    def ended(self, ticket: Ticket, usage: Usage | None, now: float, *, served: bool) -> None:
        """A placed ticket is over; what it cost is known now. `served`: the endpoint worked for it."""
        flow = ticket.flow
        assert flow is not None
        flow.in_flight -= 1
        if not served:
            prompt = completion = billed = 0.0
        else:
            prompt, completion, billed = self._prompt_cost(ticket), float(ticket.response_tokens), ticket.billed
        if served and usage is not None:
            if usage.completion_tokens is not None:
                completion = float(usage.completion_tokens)
                flow.mean_response_tokens += 0.1 * (completion - flow.mean_response_tokens)
            if usage.prompt_tokens is not None:
                billed = usage.prompt_tokens + completion
                if ticket.request.binary:
                    self._learn_binary(ticket.request.model, usage.prompt_tokens)
                if usage.cached_tokens is not None:
                    prompt = max(0.0, float(usage.prompt_tokens - usage.cached_tokens))
        more = prompt + OUTPUT_COST * completion - ticket.charged
        if self._single_flow and more >= 0.0:
            flow.served_tokens += more
        else:
            self._charge(flow, ticket, more, now)
        if flow.tokens is not None:
            flow.tokens.take(billed - ticket.billed)

    def _charge(self, flow: Flow, ticket: Ticket, more: float, now: float) -> None:
        if more > 0.0:  # it is used now, whatever was paid for before
            flow.virtual_finish = self.virtual_start(flow, now)
            flow.virtual_finish_at = now
        flow.virtual_finish += more / flow.weight
        flow.served_tokens += more
        ticket.charged += more

    def _prompt_cost(self, ticket: Ticket) -> float:
        """Of a placed one."""
        return self._prompt_tokens(ticket.request) if ticket.placement is None else ticket.placement.uncached_tokens

    def _prompt_tokens(self, request: InferenceRequest) -> float:
        """Before the endpoint has counted them."""
        if request.binary:
            return self._binary_tokens.get(request.model or "", FIRST_BINARY_TOKENS)
        return (request.prompt_bytes or request.body_bytes) / BYTES_PER_TOKEN

    def _learn_binary(self, model: str | None, tokens: int) -> None:
        name = model or ""
        mean = self._binary_tokens.get(name)
        if mean is not None:
            self._binary_tokens[name] = mean + 0.1 * (tokens - mean)
        elif len(self._binary_tokens) < BINARY_MODELS:
            self._binary_tokens[name] = float(tokens)


def _expected_response_tokens(flow: Flow, request: InferenceRequest) -> float:
    limit = request.max_tokens
    return flow.mean_response_tokens if limit is None or limit > flow.mean_response_tokens else limit


class FlowRules:
    """What the settings say of a request's flow and priority. Immutable.

    `key`, always: the name of the API key that the request came with; None: it needed none.
    """

    def __init__(self, settings: FlowsSettings) -> None:
        self._header = settings.header
        self._rules, self._default = settings.rules, settings.default
        self._priority = settings.default.priority

    def flow_of(self, key: str | None, header: str | None) -> str:
        """Of a request with this in `x-lbproxy-flow`, which is a flow's name."""
        if header is not None and (key is None if self._header is None else self._header):
            return header
        return key or ANONYMOUS

    def priority_of(self, flow: str, asked: int | None, key: str | None) -> int:
        """Of a request of this flow that asks for a priority (None: it does not)."""
        if asked is None and not self._rules:
            return self._priority
        rule = self._rules.get(flow, self._default) if self._rules else self._default
        if asked is None:
            return rule.priority
        highest = rule.max_priority
        if highest is None and key is not None:
            highest = rule.priority
        return asked if highest is None or asked < highest else highest
