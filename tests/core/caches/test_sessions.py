# SPDX-License-Identifier: Apache-2.0
"""A session is a hint where a prompt's keys say nothing: its home costs less, as far as engines confirm it."""

from __future__ import annotations

import pytest

from lbproxy.core.caches import sessions
from lbproxy.core.caches.prefix_index import PrefixIndex
from lbproxy.core.caches.sessions import FIRST_TRUST, Sessions
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.knowledge.load_model import LoadModel
from lbproxy.core.policies.adaptive import Adaptive
from lbproxy.core.policies.policy import Context
from lbproxy.core.requests.request import InferenceRequest, Usage
from tests.core.policies.test_adaptive import pool_of


def turn(tokens: int, keys: tuple[int, ...] = (), session: str | None = "s") -> InferenceRequest:
    return InferenceRequest("r", "m", True, 4 * tokens, 4 * tokens, keys, session=session)


def unreadable(session: str | None = "s") -> InferenceRequest:
    return InferenceRequest("r", "m", False, 1000, session=session)


def costs(request: InferenceRequest, states: list[EndpointState], now: float = 0.0) -> list[float]:
    return Adaptive().price(request, states, Context(now)).costs


def answered(load: LoadModel, request: InferenceRequest, cached: int | None, now: float = 0.0) -> None:
    placement = load.place(request, now)
    load.first_byte(placement, now + 0.1)
    load.end(placement, Usage(request.prompt_bytes // 4, cached, 10), now + 0.2)


def test_a_compacted_conversation_costs_less_at_its_home() -> None:
    """Its keys match nowhere: a coding agent replaced it by a summary."""
    _, states = pool_of(3)
    answered(states[1].load, turn(50_000, tuple(range(195))), None)
    compacted = costs(turn(10_000, tuple(range(500, 539))), states)
    stranger = costs(turn(10_000, tuple(range(500, 539)), "other"), states)
    assert compacted[1] < stranger[1]
    assert (compacted[0], compacted[2]) == (stranger[0], stranger[2])


def test_it_is_never_a_pin() -> None:
    """Sessions that were hashed to servers collapsed under load."""
    _, states = pool_of(2)
    answered(states[1].load, turn(50_000, tuple(range(195))), None)
    for n in range(3):
        states[1].load.place(turn(3_000, (1000 + n,), None), 1.0)
    home, other = costs(turn(10_000, tuple(range(500, 539))), states, 1.0)[::-1]
    assert other < home


def test_where_keys_match_they_are_believed_and_not_the_hint() -> None:
    _, states = pool_of(2)
    answered(states[1].load, turn(2048, tuple(range(8))), None)
    with_hint = costs(turn(2100, tuple(range(8))), states)
    assert with_hint == costs(turn(2100, tuple(range(8)), None), states)


def test_a_sub_agent_whose_beginning_is_cached_elsewhere_is_not_drawn_to_its_parent() -> None:
    """It has its parent's session, and tools and a system prompt that every endpoint has."""
    _, states = pool_of(2)
    for state in states:
        answered(state.load, turn(16_000, tuple(range(62)), None), None)
    answered(states[1].load, turn(60_000, (*range(62), *range(1000, 1172))), None)
    sub_agent = turn(20_000, (*range(62), *range(5000, 5016)))
    assert costs(sub_agent, states) == costs(sub_agent._replace(session=None), states)


def test_engines_overrule_it() -> None:
    """If nothing was cached at homes, a home is worth nothing any more; if all was, it is worth all."""
    for cached, low, high in ((0, 0.0, 0.02), (10_000, 0.8, 1.0)):
        pool, states = pool_of(2)
        answered(states[0].load, turn(2000, (1,), None), 5)  # it says what was cached
        for n in range(60):
            answered(states[1].load, turn(10_000, tuple(range(1000 * n, 1000 * n + 39))), cached, float(n))
        assert low <= pool.sessions.trust <= high


def test_an_engine_that_never_says_what_was_cached_teaches_nothing() -> None:
    pool, states = pool_of(2)
    for n in range(20):
        answered(states[1].load, turn(10_000, tuple(range(1000 * n, 1000 * n + 39))), None, float(n))
    assert pool.sessions.trust == FIRST_TRUST


def test_a_request_that_cannot_be_read_costs_less_at_its_home() -> None:
    _, states = pool_of(2)
    states[1].load.end(states[1].load.place(unreadable(), 0.0), Usage(), 0.01)
    home, other = costs(unreadable(), states)[::-1]
    assert home < other


def test_a_server_that_lost_its_cache_is_no_home_and_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    index, book = PrefixIndex(), Sessions()
    cache = index.join()
    for name in ("a", "b", "a", "c"):
        book.placed(name, "r", cache, 100.0, 0.0)
    assert len(book) == 2
    assert book.home("b") is None
    assert book.home("a") is not None
    renewed = index.renew(cache)
    assert book.home("a") is None
    book.placed("a", "r", renewed, 100.0, 0.0)
    assert book.home("a") is not None
