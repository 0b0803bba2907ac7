# SPDX-License-Identifier: Apache-2.0
"""What is remembered and explained of requests that are split between prefill and decode endpoints."""

from __future__ import annotations

from math import inf
from statistics import median
from typing import Any

import pytest

from lbproxy.control.telemetry.recent import LATEST, Recent
from lbproxy.core.balancer import Balancer
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.policies.explain import MAX_SHOWN, compact
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import DECODE, Usage
from tests.core.policies.test_split import apart, busy, prompt


def served(balancer: Balancer, tokens: int, now: float, *, splittable: bool = True) -> RequestRecord:
    """A request that was served, as its record."""
    request = prompt(tokens, splittable=splittable)
    record = RequestRecord("r", "POST", "/v1/completions", "127.0.0.1", now)
    ticket = balancer.submit(request, now=now)
    record.note_placed(ticket)
    if ticket.request.leg and ticket.prefill is None:
        first = ticket.placed_state.endpoint.uid
        balancer.first_byte(ticket, now=now + 0.5)
        balancer.close(ticket, Outcome.COMPLETED, now=now + 0.5, usage=Usage(tokens, 512, 1))
        record.prefill_s, record.prefill_usage = 0.5, Usage(tokens, 512, 1)
        ticket = balancer.submit(request.as_leg(DECODE, first), now=now + 0.5, resubmitted=True)
        record.note_placed(ticket)
    balancer.first_byte(ticket, now=now + 0.75)
    balancer.close(ticket, Outcome.COMPLETED, now=now + 1.0, usage=Usage(tokens, tokens, 100))
    record.usage, record.first_byte_at, record.ended_at = Usage(tokens, tokens, 100), now + 0.75, now + 1.0
    record.stream, record.outcome, record.status = True, Outcome.COMPLETED, 200
    return record


def explained(record: RequestRecord) -> dict[str, Any]:
    recent = Recent(10, lambda: 20.0, list)
    recent.ended([record])
    found = recent.explain("r")
    assert found is not None
    return found


def explaining(shape: str, **options: Any) -> Balancer:
    balancer, _ = apart(shape, **options)
    balancer.explain(True)
    return balancer


def test_a_split_request_is_one_attempt_with_a_decision_for_each_leg() -> None:
    balancer = explaining("pdb", split="always")
    found = explained(served(balancer, 8192, 1.0))
    assert (found["prefill"], found["endpoint"], found["prefill_ms"], found["attempts"]) == ("p1", "d2", 500.0, 1)
    both, second = found["decisions"]
    assert (both["endpoint"], both["decode_on"], both["second_leg"]) == ("p1", "d2", False)
    assert (second["endpoint"], second["decode_on"], second["second_leg"]) == ("d2", None, True)
    assert {one["endpoint"]: one["decode_on"] for one in both["shown"]} == {"p1": "d2", "d2": None, "b3": None}
    (pair,) = [one for one in both["shown"] if one["chosen"]]
    assert pair["parts"]["transfer"] > 0.0
    assert sum(pair["parts"].values()) == pytest.approx(pair["cost"], abs=0.01)
    assert second["shown"][0]["parts"]["transfer"] > 0.0
    assert "base" not in second["shown"][0]["parts"]


def test_what_was_predicted_and_observed_is_of_the_whole_attempt() -> None:
    """The decision about the second leg alone predicts less, and decode reports that all was cached."""
    found = explained(served(explaining("pd", split="always"), 8192, 1.0))
    both, second = found["decisions"]
    assert (found["cost"], found["candidates"]) == (both["cost"], both["candidates"])
    assert found["cost"] > second["cost"]
    assert found["predicted"]["first_byte_ms"] > second["cost"] * 0.5
    assert found["observed"] == {
        "first_byte_ms": 750.0,
        "cached_tokens": 512,
        "prompt_tokens": 8192,
        "completion_tokens": 100,
    }


def test_the_best_pair_and_the_best_single_endpoint_are_compared() -> None:
    balancer = explaining("pd")
    busy(balancer)
    (whole,) = explained(served(balancer, 8, 1.9))["decisions"]
    assert (whole["endpoint"], whole["decode_on"]) == ("d2", None)
    assert whole["lowest_costs"]["whole"] == whole["cost"] < whole["lowest_costs"]["split"]
    split, _ = explained(served(balancer, 32_768, 2.0))["decisions"]
    assert split["lowest_costs"]["split"] == split["cost"] < split["lowest_costs"]["whole"]


def test_a_rule_leaves_nothing_to_compare() -> None:
    both, _ = explained(served(explaining("pd", split="always"), 8192, 1.0))["decisions"]
    assert both["lowest_costs"] == {"whole": None, "split": both["cost"]}
    (whole,) = explained(served(explaining("pdb", split="never"), 8192, 1.0))["decisions"]
    assert [one["decode_on"] for one in whole["shown"]] == [None] * 2, "prefill endpoints take no whole requests"


@pytest.mark.parametrize("in_full", [True, False])
def test_of_a_large_fleet_the_lowest_costs_of_both_kinds_are_kept(*, in_full: bool) -> None:
    balancer = explaining("p" * (MAX_SHOWN + 4) + "db")
    busy(balancer)
    record = served(balancer, 32_768, 2.0)
    made = record.attempt_decision
    assert made is not None
    assert len(made.shown) <= MAX_SHOWN
    whole, split = made.lowest_costs
    assert whole is not None
    assert split is not None
    assert split < whole < inf
    if in_full:
        assert explained(record)["decisions"][0]["lowest_costs"]["whole"] == round(whole, 3)


def test_a_concurrent_pair_is_one_decision() -> None:
    balancer = explaining("pd", connector="sglang")
    busy(balancer)
    found = explained(served(balancer, 32_768, 2.0))
    (made,) = found["decisions"]
    assert (found["prefill"], found["endpoint"], found["attempts"]) == ("p1", "d2", 1)
    assert (made["endpoint"], made["decode_on"]) == ("p1", "d2")


def test_without_roles_nothing_is_a_pair() -> None:
    (made,) = explained(served(explaining("bb"), 8192, 1.0))["decisions"]
    assert (made["decode_on"], made["second_leg"]) == (None, False)
    assert made["lowest_costs"] == {"whole": made["cost"], "split": None}


def test_another_attempt_forgets_the_first_leg_of_the_one_before() -> None:
    balancer = explaining("pd", split="always")
    record = served(balancer, 8192, 1.0)
    record.note_placed(balancer.submit(prompt(8192, 5000), now=3.0))
    assert (record.prefill, record.prefill_s, record.prefill_usage, record.attempts) == ("p1", None, None, 2)
    assert record.cached_tokens is None, "not those of the attempt before"
    record.prefill_s = 0.5
    record.note_placed(balancer.submit(prompt(8192, splittable=False), now=4.0))
    left = {name: getattr(record, name) for name in ("prefill", "prefill_s", "endpoint", "attempts")}
    assert left == {"prefill": None, "prefill_s": None, "endpoint": "d2", "attempts": 3}


@pytest.mark.parametrize("connector", ["nixl", "sglang"])
def test_cached_tokens_are_predicted_where_the_prompt_is_computed(connector: str) -> None:
    """A second leg expects what was transferred."""
    balancer, endpoints = apart("pd", connector=connector, split="always")
    served(balancer, 8192, 1.0)
    ticket = balancer.submit(prompt(8192), now=5.0)
    predicted = ticket.predicted_cached_tokens
    assert predicted is not None
    assert predicted > 4000, "the first leg has it from the request before"
    if connector == "nixl":
        balancer.first_byte(ticket, now=5.1)
        balancer.close(ticket, Outcome.COMPLETED, now=5.1)
        second = balancer.submit(prompt(8192).as_leg(DECODE, endpoints["p1"].uid), now=5.1, resubmitted=True)
        assert second.placement is not None
        assert second.predicted_cached_tokens is None
    else:
        assert ticket.prefill is not None
        assert ticket.prefill.placement is not None
        assert predicted == ticket.prefill.placement.cached_tokens


def test_a_client_that_asks_gets_both_names() -> None:
    record = served(explaining("pd", split="always"), 8192, 1.0)
    assert record.attempt_decision is not None
    line = compact(record.attempt_decision)
    assert line.startswith("endpoint=d2; prefill=p1; cost=")
    assert "transfer=" in line


def test_endpoints_are_judged_by_the_leg_that_they_had() -> None:
    """Hits are those of the endpoint that computes the prompt."""
    recent = Recent(10, lambda: 20.0, list)
    record = served(explaining("pd", split="always"), 8192, 1.0)
    recent.ended([record])
    unknown = dict.fromkeys(("first_byte_off", "hit_ratio", "predicted_hit_ratio"))
    assert recent.by_endpoint() == {
        "p1": {"requests": 1, "failed": 0, "first_byte_ms": 500.0, **unknown, "hit_ratio": round(512 / 8192, 3)},
        "d2": {"requests": 1, "failed": 0, "first_byte_ms": 750.0, **unknown},
    }
    for name in ("p1", "d2"):
        assert [one["id"] for one in recent.requests(10, endpoint=name)] == ["r"]
    assert recent.requests(10, endpoint="b3") == []


def test_how_right_the_predictions_for_an_endpoint_were_is_said_of_each_request_there() -> None:
    """A model that cannot be seen to be wrong is believed by whoever looks."""
    balancer = explaining("bb", split="never")
    recent = Recent(100, lambda: 20.0, list)
    records = [served(balancer, 8192, float(n)) for n in range(80)]
    for one in records:
        one.predicted_cached_tokens = 4096.0
    recent.ended(records)
    there = [one for one in records if one.endpoint == records[-1].endpoint]
    predicted_ms = [made.first_byte_ms() for one in there if (made := one.attempt_decision) is not None]
    lately = recent.by_endpoint()[there[-1].endpoint or ""]
    off = median(750.0 / (one or inf) for one in predicted_ms[-LATEST:])
    assert lately["first_byte_off"] == pytest.approx(off, abs=0.001)
    assert (lately["hit_ratio"], lately["predicted_hit_ratio"]) == (1.0, 0.5)
    found = recent.explain("r")
    assert found is not None
    assert found["lately"] == lately
