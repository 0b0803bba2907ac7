# SPDX-License-Identifier: Apache-2.0
"""Servers with contexts of different lengths: prompts go where they fit, as far as that can be known."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lbproxy.config.sections.routing import AdmissionSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage
from lbproxy.core.requests.retry import FailureKind
from tests.support.pool import MODEL, card, make_balancer, pool_of

SHORT, MIDDLE, LONG = 8192, 32_768, 131_072
ONE_EACH = AdmissionSettings(max_in_flight_per_endpoint=1, queue_timeout=30.0)


def fleet(*lengths: int | None, of_prompt: bool = False, **options: object) -> Balancer:
    """An endpoint with a context of each length; None: it does not say."""
    balancer, endpoints = pool_of(len(lengths), **{"policy": "round-robin", **options})
    for endpoint, length in zip(endpoints, lengths, strict=True):
        listed = replace(card(MODEL), context_tokens=length, context_is_of_prompt=of_prompt)
        balancer.report_models(endpoint.uid, [listed])
    return balancer


def ask(tokens: int, bytes_per_token: float = 4.0, **more: object) -> InferenceRequest:
    size = round(tokens * bytes_per_token)
    return InferenceRequest("r", MODEL, True, size, size)._replace(**more)  # type: ignore[arg-type]


def length_at(ticket: Ticket) -> int | None:
    return ticket.placed_state.prompt_limit(ticket.request._replace(max_tokens=None))


def places(balancer: Balancer, request: InferenceRequest, count: int = 20) -> set[int | None]:
    """The lengths of the contexts where such requests go, one after the other."""
    found = set()
    for n in range(count):
        ticket = balancer.submit(request, now=n / 100)
        found.add(length_at(ticket))
        if n % 2:  # half of them stay, so that they spread
            balancer.close(ticket, Outcome.COMPLETED, now=n / 100)
    return found


@pytest.mark.parametrize("policy", ["least-request", "round-robin"])
def test_a_prompt_goes_where_it_fits(policy: str) -> None:
    balancer = fleet(SHORT, MIDDLE, LONG, None, policy=policy)
    assert places(balancer, ask(50)) == {SHORT, MIDDLE, LONG, None}
    assert places(balancer, ask(20_000)) == {MIDDLE, LONG, None}
    assert places(balancer, ask(60_000)) == {LONG, None}
    assert places(balancer, ask(900_000)) == {None}


def test_the_response_counts_where_the_engine_counts_it() -> None:
    assert places(fleet(SHORT, LONG), ask(50, max_tokens=8100)) == {SHORT, LONG}
    assert places(fleet(SHORT, LONG), ask(500, max_tokens=8100)) == {LONG}
    assert places(fleet(SHORT, LONG, of_prompt=True), ask(500, max_tokens=8100)) == {SHORT, LONG}


def test_token_ids_count_exactly() -> None:
    for tokens, found in ((SHORT, {SHORT, LONG}), (SHORT + 1, {LONG})):
        assert places(fleet(SHORT, LONG), ask(tokens, least_tokens=tokens)) == found


def test_several_prompts_are_not_one_long_one() -> None:
    assert places(fleet(SHORT, LONG), ask(100_000, least_tokens=-1)) == {SHORT, LONG}


def test_an_adapter_has_the_context_of_its_base() -> None:
    balancer = fleet(SHORT, LONG)
    for endpoint, length in zip(balancer.endpoints.members(), (SHORT, LONG), strict=True):
        base = replace(card(MODEL), context_tokens=length)
        balancer.report_models(endpoint.endpoint.uid, [base, card("sql", MODEL)])
    assert places(balancer, ask(20_000, model="sql")) == {LONG}


def test_a_request_that_asks_for_a_context_has_that_wherever_it_goes() -> None:
    """Of Ollama: the model is loaded with it."""
    balancer = fleet(SHORT, LONG, of_prompt=True)
    assert places(balancer, ask(2 * SHORT)) == {LONG}
    held = [balancer.submit(ask(2 * SHORT, context_tokens=4 * SHORT), now=1.0) for _ in range(4)]
    assert len({ticket.placed_state.endpoint.uid for ticket in held}) == 2


def test_without_one_that_is_long_enough_the_endpoints_decide() -> None:
    assert places(fleet(SHORT, MIDDLE), ask(100_000)) == {MIDDLE}
    balancer = fleet(SHORT, LONG)
    _, long = balancer.endpoints.members()
    balancer.drain(long.endpoint.uid)
    assert places(balancer, ask(100_000)) == {SHORT}


def test_it_waits_for_a_long_one_while_short_ones_are_free() -> None:
    balancer = fleet(SHORT, LONG, policy="least-request", admission=ONE_EACH)
    running = balancer.submit(ask(60_000), now=0.0)
    waiting = balancer.submit(ask(60_000), now=0.0)
    assert (length_at(running), waiting.state) == (LONG, TicketState.WAITING)
    assert length_at(balancer.submit(ask(50), now=0.0)) == SHORT
    balancer.close(running, Outcome.COMPLETED, now=1.0)
    assert balancer.poll(now=1.0) == [waiting]
    assert length_at(waiting) == LONG


def test_a_higher_tier_serves_what_is_too_long_for_the_first() -> None:
    own, there = EndpointSpec(name="a", base_url="http://10.0.0.1:8000"), "https://x.example/v1"
    provider = EndpointSpec(name="b", base_url=there, tier=2, metrics=None, health=None, models=(MODEL,))
    balancer = make_balancer(policy="adaptive")
    first, _ = balancer.set_endpoints([own, provider], now=0.0).added
    balancer.report_models(first.uid, [replace(card(MODEL), context_tokens=SHORT)])
    balancer.report_health(first.uid, True, "", now=0.0)
    assert balancer.submit(ask(50), now=0.0).placed_state.endpoint.name == "a"
    assert balancer.submit(ask(50_000), now=0.0).placed_state.endpoint.name == "b"
    assert balancer.submit(ask(50_000, max_tier=1), now=0.0).placed_state.endpoint.name == "a"


KINDS = {"English": (4.3, 0.12), "Chinese": (3.4, 0.15), "code": (3.2, 0.18)}
"""Bytes of a token, and how they vary from text to text (of their logarithm): rough, for a test of a wide margin."""


def test_mixed_prompts_are_refused_by_none_and_sent_twice_rarely() -> None:
    """10,000 of them, over servers of three lengths that refuse what is too long."""
    rng, now = random.Random(5), 0.0
    balancer = fleet(SHORT, SHORT, MIDDLE, LONG, policy="adaptive")
    again = refused = 0
    short_at: dict[int | None, int] = {}
    running: list[tuple[float, Ticket, int]] = []
    for _ in range(10_000):
        now += 0.05
        tokens = round(min(LONG - 1000, 100 * 10 ** rng.uniform(0.0, 3.1)))
        kind = rng.choice([*KINDS, "token ids"])
        mean, spread = KINDS.get(kind, (4.0, 0.0))
        request = ask(tokens, mean * rng.lognormvariate(0.0, spread), max_tokens=rng.choice([None, 200]))
        if kind == "token ids":
            request = request._replace(least_tokens=tokens)
        ticket = place(balancer, request, now)
        while tokens + (request.max_tokens or 0) > (length_at(ticket) or 0):
            again += 1
            limit = ticket.placed_state.prompt_limit(request) or 0
            verdict = balancer.after_failure(ticket, FailureKind.TOO_LONG, (), now=now)
            balancer.close(ticket, verdict.outcome, now=now)
            if not verdict.retry:
                refused += 1
                break
            avoid = ticket.avoid | {ticket.placed_state.endpoint.uid}
            request = request._replace(least_tokens=limit + 1)
            ticket = place(balancer, request, now, avoid)
        else:
            if tokens < 1000:
                short_at[length_at(ticket)] = short_at.get(length_at(ticket), 0) + 1
            balancer.first_byte(ticket, now=now)
            running.append((now + 0.5, ticket, tokens))
        while running and running[0][0] <= now:
            _, done, prompt = running.pop(0)
            balancer.close(done, Outcome.COMPLETED, now=now, usage=Usage(prompt, 0, 50))
    print(f"{again} of 10,000 sent again, {refused} refused; short prompts at {short_at}")
    assert refused == 0
    assert again <= 200
    assert short_at[SHORT] > 0.4 * sum(short_at.values())


def place(balancer: Balancer, request: InferenceRequest, now: float, avoid: frozenset = frozenset()) -> Ticket:  # type: ignore[type-arg]
    ticket = balancer.submit(request, avoid=avoid, now=now)
    assert ticket.state is TicketState.PLACED, ticket.outcome
    return ticket
