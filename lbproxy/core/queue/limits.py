# SPDX-License-Identifier: Apache-2.0
"""What requests use of limits: from a request and what came of it to tokens, for its flow and its endpoint alike.

A placed ticket has one count, `used_tokens`: of its prompt, and of its response so far. Its flow is charged just that;
its endpoint also what is expected of its response (`reserved_tokens`), so that what runs there is within its limits. At
the end both are corrected to what was used: as reported, else as estimated, never nothing for what was served. Of a
limit per minute all is used at the placement, whenever it is known and at whichever replica, so that all count the
same. A second leg has no prompt, as the first had it; and of a first leg no response counts, as the second begins with
it.

`tokens` is the same for the account of who used how much (`core.observed.ledger`), whether there are limits or not.
"""

from __future__ import annotations

from typing import Final

from lbproxy.core.capacity.allowance import Allowance
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.request import (
    BYTES_PER_TOKEN,
    DECODE,
    NO_USAGE,
    PREFILL,
    Counts,
    InferenceRequest,
    Usage,
    estimated,
)

FIRST_BINARY_TOKENS: Final = 1000.0
"""For audio, an image or a file, at least, until an endpoint reports its tokens: its bytes do not show them."""
BINARY_MODELS: Final = 64
"""Models whose tokens of binary bodies are learned separately."""
USUAL_GAP_S: Final = 0.02
"""Between two tokens of a response, under policies that learn none."""


class Limits:
    """Writes the allowances of flows and endpoints. Owns what is learned of binary bodies."""

    def __init__(self) -> None:
        self._binary_tokens: dict[str, float] = {}
        """Mean of the prompt tokens that endpoints reported for a model's binary bodies."""

    # Expected

    def prompt_tokens(self, request: InferenceRequest) -> float:
        """The estimated prompt tokens, before the endpoint reports them."""
        if request.leg == DECODE:
            return 0.0
        if request.binary:
            learned = self._binary_tokens.get(request.model or "", 0.0)
            return max(learned, FIRST_BINARY_TOKENS)  # clients choose what is learned
        return (request.prompt_bytes or request.body_bytes) / BYTES_PER_TOKEN

    def expected_tokens(self, request: InferenceRequest, allowance: Allowance) -> float:
        return self.prompt_tokens(request) + expected_response(request, allowance)

    def wait_s(self, ticket: Ticket, allowance: Allowance, now: float) -> float:
        """In how many seconds a waiting ticket is within an endpoint's limits per time; 0 = now."""
        requests, tokens = 1.0, self.expected_tokens(ticket.request, allowance)
        claim = allowance.claim
        if claim is not None and claim is not ticket.claim and claim.priority >= ticket.request.priority:
            requests, tokens = 2.0, tokens + claim.tokens
        return allowance.wait_s(requests, tokens, now)

    # Counted

    def placed(self, ticket: Ticket, now: float) -> None:
        """Charge a placed ticket, unless it is `counted`."""
        request, flow, allowance = ticket.request, ticket.flow, ticket.placed_state.allowance
        assert flow is not None
        used = ticket.used_tokens = ticket.reserved_tokens = self._prompt(ticket) + ticket.response_tokens
        if allowance is not None:
            response = max(float(ticket.response_tokens), expected_response(request, allowance))
            ticket.reserved_tokens = used - ticket.response_tokens + response
        if not ticket.counted:
            at = ticket.placed_at
            flow.allowance.take(0.0, used, now, at)
            if allowance is not None:
                allowance.take(1.0, ticket.reserved_tokens, now, at)

    def progress(self, ticket: Ticket, tokens: int, now: float) -> None:
        self._charge(ticket, ticket.used_tokens + tokens, max(ticket.reserved_tokens, ticket.used_tokens + tokens), now)

    def ended(self, ticket: Ticket, usage: Usage | None, now: float, *, served: bool) -> float:
        """Correct the charges of a ticket that ended, to what it used. Returns that."""
        used = self._used(ticket, usage) if served else 0.0
        self.settle(ticket, used, now)
        first, prompt = ticket.prefill, None if usage is None else usage.prompt_tokens
        if first is not None and prompt is not None and ticket.request.leg == DECODE:
            self.settle(first, float(prompt), now)  # its endpoint handed the prompt over and reported nothing
        return used

    def settle(self, ticket: Ticket, used: float, now: float) -> None:
        """Correct them to so many tokens."""
        self._charge(ticket, used, used, now)

    def learn(self, ticket: Ticket, usage: Usage | None) -> None:
        """Learn of the usage that an endpoint reported. Nothing of estimates, nor of a first leg's length."""
        flow, allowance, request = ticket.flow, ticket.placed_state.allowance, ticket.request
        if usage is None or flow is None:
            return
        is_one = request.leg != PREFILL and not request.open_ended  # a WebSocket has many responses
        if usage.completion_tokens is not None and not usage.is_estimate and is_one:
            flow.allowance.responded(usage.completion_tokens)
            if allowance is not None:
                allowance.responded(usage.completion_tokens)
        if request.binary and usage.prompt_tokens is not None:
            self._learn_binary(request.model or "", usage.prompt_tokens)

    def _charge(self, ticket: Ticket, used: float, reserved: float, now: float) -> None:
        flow, allowance = ticket.flow, ticket.placed_state.allowance
        assert flow is not None
        flow.allowance.take(0.0, used - ticket.used_tokens, now, ticket.placed_at)
        if allowance is not None:
            allowance.take(0.0, reserved - ticket.reserved_tokens, now, ticket.placed_at)
        ticket.used_tokens, ticket.reserved_tokens = used, reserved

    def tokens(self, ticket: Ticket, usage: Usage | None) -> Counts:
        """What a ticket used that was served. A request with two tickets counts with that of its second leg."""
        leg, first = ticket.request.leg, ticket.prefill
        if leg == PREFILL and not ticket.counts_in_flow:
            return 0, 0, 0, 0, 0
        prompt, cached, completion, _, is_estimate = NO_USAGE if usage is None else usage  # an attribute costs more
        response = 0 if leg == PREFILL else ticket.response_tokens if completion is None else completion
        guess = response if completion is None or is_estimate else 0
        if leg == DECODE and first is None:
            return 0, 0, response, 0, guess
        if prompt is None:
            size = round(self._expected_prompt(ticket if first is None else first))
            return size, 0, response, size, guess
        cached = 0 if cached is None or cached < 0 else min(cached, prompt)
        return prompt - cached, cached, response, 0, guess

    def _used(self, ticket: Ticket, usage: Usage | None) -> float:
        """The tokens of a ticket that was served, as reported, or else as estimated."""
        leg = ticket.request.leg
        response = float(ticket.response_tokens)
        if usage is not None and usage.completion_tokens is not None:
            response = float(usage.completion_tokens)
        if leg == PREFILL:
            response = 0.0
        if usage is None or usage.prompt_tokens is None or leg == DECODE:
            return self._prompt(ticket) + response
        return usage.prompt_tokens + response

    def _expected_prompt(self, ticket: Ticket) -> float:
        """The tokens of a placed ticket's prompt, as far as was learned of others."""
        if ticket.placement is None or not ticket.request.prompt_bytes:
            return self.prompt_tokens(ticket.request)
        return ticket.placement.prompt_tokens

    def _prompt(self, ticket: Ticket) -> float:
        """The tokens of a placed ticket's prompt, before the endpoint reports them. What was learned of other prompts
        can only make them more: clients choose what is learned.
        """
        tokens = self.prompt_tokens(ticket.request)
        if ticket.placement is None or not ticket.request.prompt_bytes or not tokens:
            return tokens
        return max(tokens, ticket.placement.prompt_tokens)

    def _learn_binary(self, model: str, tokens: int) -> None:
        mean = self._binary_tokens.get(model)
        if mean is not None:
            self._binary_tokens[model] = mean + 0.1 * (tokens - mean)
        elif len(self._binary_tokens) < BINARY_MODELS:
            self._binary_tokens[model] = float(tokens)


def expected_response(request: InferenceRequest, allowance: Allowance) -> float:
    """How long its response is expected to be, by those before it."""
    if request.leg == PREFILL:
        return 0.0
    limit = request.max_tokens
    mean = allowance.mean_response_tokens
    return mean if limit is None or limit > mean else float(limit)


def with_estimate(ticket: Ticket, usage: Usage | None, now: float) -> Usage | None:
    """The usage of a ticket that ended; where only a part of it is known, with an estimate of the rest."""
    if usage is None or not usage.is_estimate:
        return usage
    tokens = max(ticket.response_tokens, usage.completion_tokens or _unseen_tokens(ticket, now))
    ticket.response_tokens = tokens
    return estimated(usage, tokens)


def _unseen_tokens(ticket: Ticket, now: float) -> int:
    """About how many tokens of a response were generated that is no stream, and of which nothing came until now."""
    request = ticket.request
    if request.stream or request.open_ended or ticket.placed_at is None:
        return 0
    load, placement = ticket.load, ticket.placement
    gap_s = USUAL_GAP_S if load is None else max(0.001, load.pool.gap_ms / 1000.0)
    prefill_s = 0.0 if placement is None else placement.predicted_s
    tokens = max(0, int((now - ticket.placed_at - prefill_s) / gap_s))
    return tokens if request.max_tokens is None else min(tokens, request.max_tokens)
