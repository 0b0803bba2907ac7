# SPDX-License-Identifier: Apache-2.0
"""Tokens of responses that report none, from those that do."""

from __future__ import annotations

import json

import pytest

from lbproxy.core.responses.sse import EventScanner
from lbproxy.core.responses.text_rate import TextRate, tokens_of


def learned(text_bytes: int, tokens: int, responses: int = 100) -> TextRate:
    rate = TextRate()
    for _ in range(responses):
        rate.learn(text_bytes, tokens)
    return rate


@pytest.mark.parametrize("size", [1.5, 3.0, 4.4, 6.3])
@pytest.mark.parametrize("together", [1, 4, 50])
def test_text_of_any_language_counts_as_others_of_it_reported(size: float, together: int) -> None:
    """Whether a server sends an event for each token or for many."""
    rate = learned(round(200 * size), 200).bytes_per_token(4.0)
    found = tokens_of(400 // together, round(400 * size), rate)
    assert found == pytest.approx(400, rel=0.06)


@pytest.mark.parametrize(("prompt_rate", "expected"), [(9.0, 4.0), (4.0, 4.0), (2.5, 2.5), (0.1, 1.0)])
def test_until_then_prompts_say_how_small_tokens_are(prompt_rate: float, expected: float) -> None:
    assert TextRate().bytes_per_token(prompt_rate) == expected


def test_a_client_makes_tokens_look_twice_as_large_at_most() -> None:
    """With text of spaces, say, of which one token has sixteen."""
    assert learned(16_000, 1000).bytes_per_token(4.0) == 8.0


def test_tokens_that_are_not_shown_never_make_a_byte_more_than_one() -> None:
    assert learned(50, 1000).bytes_per_token(4.0) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(("text_bytes", "tokens"), [(0, 100), (100, 0)])
def test_what_shows_nothing_is_not_learned(text_bytes: int, tokens: int) -> None:
    assert learned(text_bytes, tokens).bytes_per_token(4.0) == 4.0


@pytest.mark.parametrize("together", [1, 3])
def test_a_single_response_of_longer_tokens_than_usual_has_no_more_of_them_than_events(together: int) -> None:
    rate = learned(800, 200).bytes_per_token(4.0)
    assert tokens_of(100, 100 * 48 // 10, rate) == 100
    assert tokens_of(100, 100 * together * 4, rate) == 100 * together


def scanned(*deltas: dict[str, str]) -> EventScanner:
    scanner = EventScanner(measures=True)
    for delta in deltas:
        event = f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n".encode()
        scanner.feed(event, 0, len(event))
    scanner.feed(b"data: [DONE]\n\n", 0, 14)
    return scanner


def test_events_that_begin_and_end_a_stream_are_no_tokens() -> None:
    assert scanned({"role": "assistant"}, *[{"content": " four"}] * 10, {}).token_events == 10


def test_a_character_of_several_tokens_counts_as_several() -> None:
    """Its first tokens have no text: a client could ask for such characters."""
    assert (
        scanned({"role": "assistant"}, *[{"content": ""}, {"content": ""}, {"content": "龘"}] * 40).token_events >= 118
    )


def test_without_any_text_every_event_counts() -> None:
    """They may have token ids only."""
    assert scanned({}, {}, {}).token_events == 4
