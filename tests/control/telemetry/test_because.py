"""What is said of why an endpoint was chosen, and in which unit costs are."""

from __future__ import annotations

import pytest

from lbproxy.config.sections.routing import RoutingSettings
from lbproxy.control.telemetry.recent import Recent
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointUid
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.policies.explain import Decision
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.requests.outcome import Outcome


def explained(policy: str, costs: list[float], candidates: int | None = None) -> dict[str, object]:
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
        ("adaptive", [5.0], 1, "it was the only candidate"),
        ("adaptive", [50.0, 5.0, 7.0], 3, "it had the lowest cost"),
        ("adaptive", [5.0, 5.9, 7.0], 3, "2 cost about the same, and it had gone longest without a request"),
        ("adaptive", [5.0, 5.0], 9, "2 or more cost about the same, and it had gone longest without a request"),
        ("adaptive", [5.0, 90.0, 91.0], 3, "what would cost less would begin it later"),
        ("least-request", [1.0, 1.0, 1.0], 3, "3 cost the same, and it was drawn of these"),
    ],
)
def test_a_choice_has_a_reason(policy: str, costs: list[float], candidates: int, because: str) -> None:
    assert explained(policy, costs, candidates)["because"] == because


@pytest.mark.parametrize(("policy", "unit"), [("adaptive", "ms"), ("min-ttft", "ms"), ("least-request", None)])
def test_costs_have_a_unit_where_it_has_a_name(policy: str, unit: str | None) -> None:
    assert explained(policy, [2.0, 1.0])["unit"] == unit
