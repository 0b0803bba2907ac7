# SPDX-License-Identifier: Apache-2.0
"""Everyday traffic: the same for a seed, as much as was asked for, and with the sharing that caches live on."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from lbproxy.sim.workloads.mix import ADAPTERS, MAX_ANSWER, MAX_PROMPT, SHARES, Ask, body, everyday
from lbproxy.sim.workloads.prompts import prompt_text


@pytest.fixture(scope="module")
def asks() -> list[Ask]:
    return everyday(1, rate=12.0, duration_s=120.0)


def test_equal_seeds_ask_the_same_and_others_do_not(asks: list[Ask]) -> None:
    assert everyday(1, rate=12.0, duration_s=120.0) == asks
    assert everyday(2, rate=12.0, duration_s=120.0) != asks


def test_the_rate_and_the_mix_are_about_those_that_were_asked_for(asks: list[Ask]) -> None:
    assert [ask.at_s for ask in asks] == sorted(ask.at_s for ask in asks)
    assert asks[0].at_s >= 0.0
    assert asks[-1].at_s < 120.0
    assert len({ask.job.id for ask in asks}) == len(asks)
    assert 0.85 * 12 < len(asks) / 120.0 < 1.15 * 12
    kinds = Counter(ask.kind for ask in asks)
    for kind, share in SHARES.items():
        assert 0.7 * share < kinds[kind] / len(asks) < 1.3 * share, kind
    assert 0.7 < sum(ask.stream for ask in asks) / len(asks) < 0.8
    assert max(ask.job.answer.tokens for ask in asks) == MAX_ANSWER
    assert max(ask.job.prompt_tokens for ask in everyday(1, rate=12.0, duration_s=480.0)) <= MAX_PROMPT
    assert {ask.job.model for ask in asks} == {None, *ADAPTERS}


def test_a_session_grows_by_turns_from_one_shared_text(asks: list[Ask]) -> None:
    sessions = defaultdict(list)
    for ask in asks:
        if ask.job.session is not None:
            sessions[ask.kind, ask.job.session].append(ask.job.prompt)
    assert max(map(len, sessions.values())) >= 4
    for prompts in sessions.values():
        for before, after in pairwise(prompts):
            assert after[: len(before)] == before
            assert (len(after) - len(before)) % 2 == 0
    shared = {kind: {ask.job.prompt[0] for ask in asks if ask.kind == kind} for kind in ("chat", "agents")}
    assert len(shared["chat"]) == 4
    assert len(shared["agents"]) == 1


def test_kinds_share_no_text(asks: list[Ask]) -> None:
    """Else an agent's prompt would warm the cache for a chat, which no real one does."""
    pieces = {kind: {piece.id for ask in asks if ask.kind == kind for piece in ask.job.prompt} for kind in SHARES}
    assert not pieces["chat"] & pieces["agents"]
    assert not pieces["chat"] & pieces["lora"]
    assert not pieces["agents"] & pieces["lora"]


def test_a_body_is_a_chat_of_turns(asks: list[Ask]) -> None:
    ask = max((ask for ask in asks if ask.kind == "chat" and ask.stream), key=lambda ask: len(ask.job.prompt))
    fields = json.loads(body(ask, "m"))
    roles = [message["role"] for message in fields["messages"]]
    assert roles[:4] == ["system", "user", "assistant", "user"]
    assert roles[-1] == "user"
    assert "".join(message["content"] for message in fields["messages"]) == prompt_text(ask.job.prompt).decode()
    assert (fields["model"], fields["stream"], fields["max_tokens"]) == ("m", True, ask.job.answer.tokens)
    alone = json.loads(body(next(ask for ask in asks if ask.kind == "lora" and not ask.stream), "m"))
    assert [message["role"] for message in alone["messages"]] == ["user"]
    assert alone["model"] in ADAPTERS
    assert "stream" not in alone
