# SPDX-License-Identifier: Apache-2.0
"""What is said of why an endpoint was chosen, and in which unit costs are."""

from __future__ import annotations

from typing import Any

import pytest

from lbproxy.config.sections.routing import RoutingSettings
from lbproxy.control.telemetry.because import advantage
from lbproxy.control.telemetry.recent import Recent
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointUid
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.knowledge.pool_model import BASE_MS
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.policies.explain import Decision
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.queue.ticket import Overflow
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import Usage
from tests.core.policies.test_split import prompt
from tests.support.pool import pool_of

CACHED = "prompt tokens are expected in its cache"


def explained(
    policy: str, costs: list[float], candidates: int | None = None, *, overflow: Overflow | None = None
) -> dict[str, object]:
    """The second of the candidates was chosen."""
    states = [
        EndpointState(Endpoint(name=f"e{n}", base_url=f"http://e{n}:1", uid=EndpointUid(n)))
        for n, _ in enumerate(costs)
    ]
    chosen = states[min(1, len(states) - 1)]
    prices = costs if len(costs) > 1 else ()
    by = make_policy(RoutingSettings.model_validate({"policy": policy}))
    made = Decision(by, 10.0, chosen, states, prices, None, [])
    made.parts, made.candidates = [], candidates or len(states)
    made.overflow = None if overflow is None else overflow.value
    record = RequestRecord("r", "POST", "/v1/completions", "127.0.0.1", 10.0)
    record.attempts, record.outcome, record.ended_at, record.decision = 1, Outcome.COMPLETED, 11.0, made
    recent = Recent(1, lambda: 20.0, list)
    recent.ended([record])
    found = recent.explain("r")
    assert found is not None
    (decision,) = found["decisions"]  # type: ignore[misc]
    return decision  # type: ignore[no-any-return, has-type]


@pytest.mark.parametrize(
    ("policy", "costs", "candidates", "because"),
    [
        ("adaptive", [5.0], 1, "it was the only one that could take it"),
        ("adaptive", [50.0, 5.0], 1, "it was the only one that could take it"),  # a policy that may refuse prices it
        ("adaptive", [50.0, 5.0, 7.0], 3, "it had the lowest cost"),
        ("adaptive", [5.0, 5.9, 7.0], 3, "2 cost about the same, and it had gone longest without a request"),
        ("adaptive", [5.0, 5.0], 9, "2 or more cost about the same, and it had gone longest without a request"),
        ("adaptive", [5.0, 90.0, 91.0], 3, "what would cost less would begin it later"),
        ("least-request", [1.0, 1.0, 1.0], 3, "3 cost the same, and it was drawn of these"),
    ],
)
def test_a_choice_has_a_reason(policy: str, costs: list[float], candidates: int, because: str) -> None:
    assert explained(policy, costs, candidates)["because"] == because


def test_each_reason_to_overflow_is_said_before_the_choice_within_the_tier() -> None:
    said = {overflow: str(explained("adaptive", [5.0], overflow=overflow)["because"]) for overflow in Overflow}
    assert said[Overflow.DOWN] == "no endpoint of a lower tier took requests; it was the only one that could take it"
    assert all(one.endswith("; it was the only one that could take it") for one in said.values())
    assert len({*said.values()}) == len(Overflow)


def test_what_nothing_was_learned_of_yet_is_said_to_be_assumed() -> None:
    balancer, _ = pool_of(2, policy="adaptive")
    balancer.explain(True)
    recent = Recent(9, lambda: 20.0, list)
    for at in (1.0, 2.0):
        ticket, record = balancer.submit(prompt(8), now=at), RequestRecord(str(at), "POST", "/v1/x", "127.0.0.1", 0.0)
        record.note_placed(ticket)
        recent.ended([record])
        balancer.first_byte(ticket, now=at + 0.01)
        balancer.close(ticket, Outcome.COMPLETED, now=at + 0.02)
    explained: list[dict[str, Any]] = [recent.explain(name) or {} for name in ("1.0", "2.0")]
    (first,), (second,) = (one["decisions"] for one in explained)
    assert first["assumed"] == ["base"]
    assert {one["parts"]["base"] for one in first["shown"]} == {BASE_MS}
    assert second["assumed"] == []


@pytest.mark.parametrize(("policy", "unit"), [("adaptive", "ms"), ("min-ttft", "ms"), ("least-request", None)])
def test_costs_have_a_unit_where_it_has_a_name(policy: str, unit: str | None) -> None:
    assert explained(policy, [2.0, 1.0])["unit"] == unit


@pytest.mark.parametrize(
    ("chosen", "other", "cached", "prompt", "said"),
    [
        ({"prefill": 5.0}, {"prefill": 200.0}, (2458.2, 12.0), 2522, f"2,458 of 2,522 {CACHED}"),
        ({"prefill": 5.0}, {"prefill": 200.0}, (2860.0, 0.0), 2522, f"2,522 of 2,522 {CACHED}"),
        (
            {"prefill": 5.0},
            {"prefill": 200.0},
            (2458.2, 12.0),
            None,
            "2,458 tokens of the prompt are expected in its cache",
        ),
        ({"cache_space": 0.1}, {"cache_space": 9.0}, (2000.0, 0.0), 2522, f"2,000 of 2,522 {CACHED}"),
        # Caches that are equally full: what is cached here alone costs four times as much space elsewhere.
        ({"cache_space": 0.7}, {"cache_space": 1.9}, (300.0, 0.0), 1000, f"300 of 1,000 {CACHED}"),
        (
            {"cache_space": 0.7},
            {"cache_space": 1.9},
            (0.0, 0.0),
            1000,
            "storing the prompt there would displace less of what is cached than at gpu-2",
        ),
        ({"prefill": 100.0}, {"prefill": 200.0}, (100.0, 0.0), 2522, "it computes the prompt sooner than gpu-2"),
        ({"prefill": 100.0}, {"prefill": 200.0}, (None, None), 2522, "it computes the prompt sooner than gpu-2"),
        ({"prefill": 100.0}, {"prefill": 200.0}, (500.0, 500.0), 2522, "it computes the prompt sooner than gpu-2"),
        ({"prefill": 1.0}, {"prefill": 2.0}, (9.0, 8.0), 3, "it computes the prompt sooner than gpu-2"),
        (
            {"prefill": 5.0, "wait": 0.0},
            {"prefill": 9.0, "wait": 80.0},
            (9.0, 0.0),
            99,
            "a request waits less there than at gpu-2",
        ),
        (
            {"wait": 5.0, "adapter": 0.0},
            {"wait": 0.0, "adapter": 800.0},
            (None, None),
            None,
            "the request waits less for its adapter than at gpu-2",
        ),
        ({"prefix": -3.0}, {"prefix": -1.0}, (None, None), None, "less for `prefix` than gpu-2"),
        ({"wait": 5.0}, {"wait": 5.0}, (None, None), None, None),
        ({"wait": 5.0}, {}, (None, None), None, None),
        ({}, {}, (None, None), None, None),
    ],
)
def test_the_part_that_differs_most_is_the_reason(
    chosen: dict[str, float],
    other: dict[str, float],
    cached: tuple[float | None, float | None],
    prompt: int | None,
    said: str | None,
) -> None:
    assert advantage(chosen, other, following="gpu-2", cached=cached, prompt_tokens=prompt) == said


def test_a_prompt_that_is_cached_somewhere_is_the_reason_and_each_candidate_shows_how_much() -> None:
    """What is expected of a cache is in blocks, by an assumed size of tokens: it is shown as at most the prompt."""
    balancer, _ = pool_of(3, policy="adaptive")
    balancer.explain(True)
    record = RequestRecord("r", "POST", "/v1/completions", "127.0.0.1", 0.0)
    for at in (1.0, 2.0):
        ticket = balancer.submit(prompt(4096), now=at)
        balancer.first_byte(ticket, now=at + 0.5)
        balancer.close(ticket, Outcome.COMPLETED, now=at + 0.5)
    record.note_placed(ticket)
    record.predicted_cached_tokens = ticket.predicted_cached_tokens
    record.usage, record.outcome, record.ended_at = Usage(2522, 2458, 9), Outcome.COMPLETED, 3.0
    recent = Recent(1, lambda: 20.0, list)
    recent.ended([record])
    found: dict[str, Any] = recent.explain("r") or {}
    (made,) = found["decisions"]
    assert made["because"] == "it had the lowest cost: 2,522 of 2,522 prompt tokens are expected in its cache"
    assert {one["chosen"]: one["cached_tokens"] for one in made["shown"]} == {True: 2522.0, False: 0.0}
    assert found["predicted"]["cached_tokens"] == 2522.0
    record.usage = None
    (made,) = (recent.explain("r") or {})["decisions"]  # type: ignore[misc]
    assert max(one["cached_tokens"] for one in made["shown"]) > 2522.0
