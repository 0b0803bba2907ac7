# SPDX-License-Identifier: Apache-2.0
"""Flows: which flow a request belongs to, which flow is served next, and what each flow may use.

A flow is an API key, or the value of a header (see `flow_of`); requests without either are one flow. While requests of
several flows wait at one priority, they are served by start-time fair queueing (Goyal, Vin and Cheng, 1996), in tokens.
Each flow has a virtual time at which the service it received so far is finished (`virtual_finish`). The flow with the
earliest is next, and is charged the cost of its request divided by its weight. A flow that had no requests starts at
the current virtual time: it has no credit from the past, and its only debt is what it still has in flight. The debt
halves every `half_life`, so that no flow is delayed for an hour. The cost is an uncached prompt token, and
`OUTPUT_COST` for each token of the response (as in VTC: Sheng et al., 2024): estimated at the placement, and corrected
later.

The limits: concurrent requests at endpoints (further requests wait, parked in the queue), and requests and tokens per
minute (a bucket each; a request that finds it empty is refused).

Invariants: `active` counts a flow's tickets that are in the order of service or placed. Virtual time never goes back.
What a request was charged in advance and did not use is returned when it ends. Bounded: `MAX_FLOWS`, then unknown flows
share one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import exp2
from typing import Final

from lbproxy.config.sections.flows import FlowSettings, FlowsSettings
from lbproxy.core.capacity.allowance import Use
from lbproxy.core.capacity.bucket import MINUTE_S
from lbproxy.core.queue.flow import (
    ANONYMOUS,
    MAX_RETRY_AFTER_S,
    Flow,
    FlowSnapshot,
    Refusal,
)
from lbproxy.core.queue.limits import Limits, expected_response
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.models import Allowed
from lbproxy.core.requests.request import MAX_TIER, InferenceRequest, Usage

MAX_FLOWS: Final = 1024
"""In addition to those in the settings."""
OTHERS: Final = "others"
"""The flow of requests for whose flow the table has no room."""
OUTPUT_COST: Final = 2.0
"""The cost of a response token, relative to an uncached prompt token."""


class Flows:
    """The table of flows and the virtual time."""

    def __init__(self, settings: FlowsSettings, limits: Limits) -> None:
        self.limits: Final = limits
        self._flows: dict[str, Flow] = {}
        self._virtual = 0.0
        """The virtual time at which the last placed request began."""
        self._full_until = 0.0
        """Before this time no flow in the table can be removed."""
        self._single_flow = True
        """There is at most one flow: nothing is charged in advance, which saves 1 µs a request."""
        self._take(settings)

    def _take(self, settings: FlowsSettings) -> None:
        self._half_life_s = settings.half_life
        self._rules: Mapping[str, FlowSettings] = settings.rules
        self._default = settings.default

    def reconfigure(self, settings: FlowsSettings, now: float) -> None:
        """Apply other rules from now on. A flow above a new limit keeps its requests."""
        self._take(settings)
        for flow in self._flows.values():
            flow.reconfigure(self._rule(flow.name), now)

    def _rule(self, name: str) -> FlowSettings:
        return self._rules.get(name, self._default)

    def __iter__(self) -> Iterator[Flow]:
        """The flows, oldest first."""
        return iter(list(self._flows.values()))

    def snapshot(self, waiting: Mapping[Flow, int]) -> list[FlowSnapshot]:
        """All flows, those that were charged most first. `waiting`: how many requests of each wait; 0 for
        missing ones.
        """
        shown = [
            FlowSnapshot(one.name, one.weight, waiting.get(one, 0), one.in_flight, one.served_tokens, one.refused)
            for one in self._flows.values()
        ]
        return sorted(shown, key=lambda one: -one.served_tokens)

    def of(self, name: str, now: float) -> Flow:
        """The flow with this name; created if necessary."""
        flow = self._flows.get(name)
        if flow is None:
            if len(self._flows) >= MAX_FLOWS + len(self._rules) and name not in self._rules and not self._forget(now):
                name = OTHERS
                if name in self._flows:
                    return self._flows[name]
            flow = self._flows[name] = Flow(name, now)
            flow.reconfigure(self._rule(name), now)
            self._single_flow = len(self._flows) == 1
        return flow

    def uses(self, now: float) -> dict[str, Use]:
        """What flows used of their limits per minute, by name; of those that used some."""
        uses = {one.name: one.allowance.use(now) for one in self._flows.values() if one.allowance.is_timed}
        return {name: use for name, use in uses.items() if not use.is_nothing}

    def resume(self, name: str, use: Use, now: float) -> None:
        """Count what a flow used before, of the limits that it has now."""
        rule = self._rule(name)
        if rule.requests_per_minute is not None or rule.tokens_per_minute is not None:
            self.of(name, now).allowance.resume(use, now)

    def limited(self) -> list[Flow]:
        return [one for one in self._flows.values() if one.limited]

    def _forget(self, now: float) -> bool:
        """Remove a flow that has no requests and no debt, and was not used for a minute. Returns whether there
        was one.
        """
        if now < self._full_until:
            return False
        for name, flow in self._flows.items():
            paid = now - flow.virtual_finish_at > MINUTE_S and flow.virtual_finish <= self._virtual
            if paid and not (flow.active or flow.elsewhere) and name not in self._rules:
                del self._flows[name]
                return True
        self._full_until = now + 1.0  # checking all of them takes a while
        return False

    # Limits

    def admit(self, flow: Flow, request: InferenceRequest, now: float) -> Refusal | None:
        """Admit a request, and count it. Returns None; or the limit that refuses it: of two, the one that lasts
        longer.
        """
        reached = flow.allowance.reached(now)
        if reached is not None:
            flow.refused += 1
            unit = reached.key.partition("_")[0]
            limit = f"{unit} a minute, {reached.size:.0f} (`{reached.key}`)"
            return Refusal(flow.name, limit, min(reached.wait_s, MAX_RETRY_AFTER_S))
        flow.admitted += 1
        flow.allowance.take(1.0, 0.0, now)
        return None

    # Service

    def virtual_start(self, flow: Flow, now: float) -> float:
        """The virtual time at which the flow's next request would begin: the earliest is served first."""
        debt = flow.virtual_finish - self._virtual
        if debt <= 0.0:
            return self._virtual
        return self._virtual + debt * exp2((flow.virtual_finish_at - now) / self._half_life_s)

    def cost_of(self, ticket: Ticket) -> float:
        """About what a waiting ticket will be charged, divided by its flow's weight: virtual time."""
        request, flow = ticket.request, ticket.flow
        assert flow is not None
        prompt = ticket.work_tokens or self.limits.prompt_tokens(request)
        return (prompt + OUTPUT_COST * expected_response(request, flow.allowance)) / flow.weight

    def placed(self, ticket: Ticket, now: float) -> None:
        """Charge a placed ticket its estimated cost."""
        request, flow = ticket.request, ticket.flow
        assert flow is not None
        if self._single_flow:
            return
        start = self._virtual
        if flow.virtual_finish > start:  # `virtual_start`, inlined
            start += (flow.virtual_finish - start) * exp2((flow.virtual_finish_at - now) / self._half_life_s)
        self._virtual = start
        ticket.charged_cost = cost = self._prompt_cost(ticket) + OUTPUT_COST * expected_response(
            request, flow.allowance
        )
        flow.virtual_finish = start + cost / flow.weight
        flow.virtual_finish_at = now
        flow.served_tokens += cost

    def progress(self, ticket: Ticket, now: float) -> None:
        """There is more of the response: what is beyond the estimate is charged now."""
        flow = ticket.flow
        assert flow is not None
        if ticket.charged_cost:
            excess = self._prompt_cost(ticket) + OUTPUT_COST * ticket.response_tokens - ticket.charged_cost
            if excess > 0.0:
                self._charge(flow, ticket, excess, now)

    def ended(self, ticket: Ticket, usage: Usage | None, now: float, *, served: bool) -> None:
        """Correct the charges of a placed ticket that ended. `served`: the endpoint worked for it."""
        flow = ticket.flow
        assert flow is not None
        prompt = completion = 0.0
        if served:
            prompt, completion = self._prompt_cost(ticket), float(ticket.response_tokens)
            if usage is not None and usage.completion_tokens is not None:
                completion = float(usage.completion_tokens)
            if usage is not None and usage.prompt_tokens is not None and usage.cached_tokens is not None:
                prompt = max(0.0, float(usage.prompt_tokens - usage.cached_tokens))
        more = prompt + OUTPUT_COST * completion - ticket.charged_cost
        if self._single_flow and more >= 0.0:
            flow.served_tokens += more
        else:
            self._charge(flow, ticket, more, now)

    def _charge(self, flow: Flow, ticket: Ticket, more: float, now: float) -> None:
        if more > 0.0:  # it is used now, whatever was charged before
            flow.virtual_finish = self.virtual_start(flow, now)
            flow.virtual_finish_at = now
        flow.virtual_finish += more / flow.weight
        flow.served_tokens += more
        ticket.charged_cost += more

    def _prompt_cost(self, ticket: Ticket) -> float:
        """The prompt cost of a placed ticket."""
        placement = ticket.placement
        return self.limits.prompt_tokens(ticket.request) if placement is None else placement.uncached_tokens


class FlowRules:
    """The flow and priority of requests by the settings. Immutable.

    `key`: the name of the API key of the request; None: keys are not required.
    """

    def __init__(self, settings: FlowsSettings) -> None:
        self._header = settings.header
        self._rules, self._default = settings.rules, settings.default
        self._priority = settings.default.priority
        rules = (settings.default, *self._rules.values())
        self._bounds_tiers = any(one.max_tier is not None for one in rules)
        self.bounds_models = any(one.models is not None for one in rules)
        """Some clients have models of their own."""
        self._allowed = {one.models: Allowed(one.models) for one in rules if one.models is not None}

    def flow_of(self, key: str | None, header: str | None) -> str:
        """The flow of a request. `header`: the value of `x-lbproxy-flow`, a valid flow name."""
        if header is not None and (key is None if self._header is None else self._header):
            return header
        return key or ANONYMOUS

    def max_tier_of(self, flow: str, asked: int | None, key: str | None) -> int:
        """The highest tier of endpoints to which a request of this flow may go. `asked`: the client's own bound.

        The bound of the API key holds whichever flow the request chose.
        """
        most = MAX_TIER if asked is None else asked
        if not self._bounds_tiers:
            return most
        for name in (flow, flow if key is None else key):
            own = self._rules.get(name, self._default).max_tier
            most = most if own is None else min(most, own)
        return most

    def may_fall_back(self, flow: str, asked: bool | None, key: str | None) -> bool:
        """Whether another model may serve a request of this flow. `asked`: as the client says. The rule of the API key
        holds whichever flow the request chose.
        """
        if asked is not None:
            return asked
        return all(self._rules.get(name, self._default).fallback is not False for name in (flow, key or flow))

    def models_of(self, flow: str, key: str | None) -> tuple[Allowed, ...]:
        """Each model that a request of this flow names must be in all of these; empty: it may name any. Those of the
        API key hold whichever flow the request chose. One list of the settings is one object.
        """
        names = (flow,) if key is None or key == flow else (flow, key)
        lists = [self._rules.get(name, self._default).models for name in names]
        return tuple(self._allowed[one] for one in lists if one is not None)

    def keepalive_of(self, flow: str, key: str | None) -> float | None:
        """See `stream_keepalive` in the settings of flows; None: not said."""
        rule = None if key is None else self._rules.get(key)
        return (rule or self._rules.get(flow, self._default)).stream_keepalive

    def priority_of(self, flow: str, asked: int | None, key: str | None) -> int:
        """The priority of a request of this flow. `asked`: the requested priority; None: none."""
        if asked is None and not self._rules:
            return self._priority
        rule = self._rules.get(flow, self._default) if self._rules else self._default
        if asked is None:
            return rule.priority
        highest = rule.max_priority
        if highest is None and key is not None:
            highest = rule.priority
        return asked if highest is None or asked < highest else highest
