# SPDX-License-Identifier: Apache-2.0
"""A worker without a balancer process places requests by itself: tiers hold there too."""

from __future__ import annotations

import pytest

from lbproxy.core.endpoints.endpoint import Endpoint, EndpointUid
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.engines.handover import Handover
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.workers.contents import member, read_endpoint
from lbproxy.workers.known import Known
from tests.support.pool import MODEL, card

ASK = InferenceRequest("r", MODEL)
OWN = Endpoint(uid=EndpointUid(1), name="a1", base_url="http://10.0.0.1:8000")
ELSEWHERE = Endpoint(
    uid=EndpointUid(2),
    name="b1",
    base_url="https://b.example:443/v1",
    tier=2,
    model="its-m",
    forward_headers=("x-a",),
)


def known(health: Health) -> Known:
    found = Known()
    told = [read_endpoint(member(one, "up", Handover(), draining=False)) for one in (OWN, ELSEWHERE)]
    healths = (health, Health.UP)
    news = [(one, state, False, Handover(), "", 0) for one, state in zip(told, healths, strict=True)]
    found.note_members(news, [one.uid for one in told])
    for uid in (1, 2):
        found.list_models([uid], [card(MODEL)])
    return found


def test_a_worker_knows_what_passes_to_a_provider() -> None:
    told = read_endpoint(member(ELSEWHERE, "up", Handover(), draining=False))
    assert (told.tier, told.model, told.forward_headers) == (2, "its-m", ("x-a",))


def name(chosen: EndpointState | Outcome) -> str:
    return chosen.label if isinstance(chosen, Outcome) else chosen.endpoint.name


@pytest.mark.parametrize(
    ("health", "avoid", "where", "private"),
    [
        (Health.UP, (), "a1", "a1"),
        (Health.DOWN, (), "b1", "no_endpoints"),
        (Health.UP, (1,), "b1", "no_endpoints"),
        (Health.UP, (1, 2), "no_endpoints", "no_endpoints"),
    ],
)
def test_the_lowest_tier_that_can(health: Health, avoid: tuple[int, ...], where: str, private: str) -> None:
    tried = frozenset(map(EndpointUid, avoid))
    assert name(known(health).choose(ASK, tried, 0.0)) == where
    assert name(known(health).choose(ASK._replace(max_tier=1), tried, 0.0)) in {private, "model_not_found"}


def test_what_names_no_model_does_not_go_where_it_must_be_renamed() -> None:
    assert name(known(Health.DOWN).choose(ASK._replace(model=None), frozenset(), 0.0)) == "no_endpoints"


def test_a_stored_response_elsewhere_is_not_continued_there() -> None:
    found = known(Health.UP)
    found.stored_responses.remember("resp", EndpointUid(2), ASK, now=0.0)
    asked = ASK._replace(response_id="resp")
    assert name(found.choose(asked, frozenset(), 0.0)) == "b1"
    assert name(found.choose(asked._replace(max_tier=1), frozenset(), 0.0)) == "response_not_found"
