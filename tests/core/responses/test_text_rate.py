# SPDX-License-Identifier: Apache-2.0
"""Tokens of responses that report none, from those that do."""

from __future__ import annotations

import json

import pytest

from lbproxy.core.responses.sse import EventScanner
from lbproxy.core.responses.text_rate import TextRates


def events_of(tokens: int, together: int) -> int:
    """As vLLM with --stream-interval: the first token comes at once."""
    return 1 + -(-(tokens - 1) // together)


def learned(text_bytes: int, tokens: int, *, together: int = 1, responses: int = 100) -> TextRates:
    """Of a model m at an endpoint e, which sends so many tokens together in an event."""
    rates = TextRates()
    for _ in range(responses):
        rates.learn("e", "m", events_of(tokens, together), text_bytes, tokens)
    return rates


@pytest.mark.parametrize("size", [1.5, 3.0, 4.4, 6.3])
@pytest.mark.parametrize("together", [1, 4, 50])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_text_of_any_language_counts_as_others_of_it_reported(size: float, together: int, elsewhere: bool) -> None:
    """Whether a server sends an event for each token or for many, and if no response of it reported any."""
    rates = learned(round(200 * size), 200, together=1 if elsewhere else together)
    rate = rates.of("other" if elsewhere else "e", "m", 4.0)
    assert rate.tokens(events_of(400, together), round(400 * size)) == pytest.approx(400, rel=0.06)


@pytest.mark.parametrize(("prompt_rate", "expected"), [(9.0, 4.0), (4.0, 4.0), (2.5, 2.5), (0.1, 1.0)])
def test_until_then_prompts_say_how_small_tokens_are(prompt_rate: float, expected: float) -> None:
    assert TextRates().of("e", "m", prompt_rate) == (expected, 1.0)


@pytest.mark.parametrize(("one", "other"), [(6.3, 1.5), (1.5, 6.3)])
def test_models_whose_tokens_are_larger_and_smaller_are_told_apart(one: float, other: float) -> None:
    """Both at one server, that sends an event for each; streams of the larger counted as 1.6 times their tokens."""
    rates = TextRates()
    for _ in range(100):
        rates.learn("e", "one", 200, round(200 * one), 200)
        rates.learn("e", "other", 200, round(200 * other), 200)
    assert rates.of("e", "one", 4.0).tokens(400, round(400 * one)) == 400
    assert rates.of("e", "other", 4.0).tokens(400, round(400 * other)) == 400


@pytest.mark.parametrize("size", [1.0, 2.0, 4.4, 6.3])
def test_a_client_that_asks_for_small_tokens_of_a_server_that_joins_them_is_charged_them(size: float) -> None:
    """Rare characters have several tokens: of a server that sends five in an event, a fifth counted."""
    rate = learned(880, 200, together=5).of("e", "m", 4.0)
    assert rate.tokens(events_of(400, 5), round(400 * size)) >= 0.95 * 400


def test_a_client_cannot_cheaply_make_a_server_look_as_if_it_joined_no_tokens() -> None:
    """By a thousand responses of one token, which is one event."""
    rates = learned(880, 200, together=5)
    for _ in range(1000):
        rates.learn("e", "m", 1, 4, 1)
    assert rates.of("e", "m", 4.0).tokens(events_of(400, 5), 400) >= 0.95 * 400


def test_no_byte_of_text_is_more_than_a_token_whatever_others_hid() -> None:
    """Tokens that others do not show, as of tools, must not make those of a text more than it can have."""
    rates = learned(20, 1000, together=1000)
    assert rates.of("e", "m", 4.0).tokens(10, 40) == 40
    assert rates.of("e", "m", 4.0).tokens(10, 4) == 10


def test_a_long_response_is_not_all_that_counts() -> None:
    rates = learned(880, 200)
    rates.learn("e", "m", 100_000, 100_000, 100_000)
    assert rates.of("e", "m", 4.0).bytes_per_token > 4.1


def test_a_client_makes_tokens_look_twice_as_large_at_most() -> None:
    """With text of spaces, say, of which one token has sixteen."""
    assert learned(16_000, 1000).of("e", "m", 4.0).bytes_per_token == 8.0


def test_tokens_that_are_not_shown_never_make_a_byte_more_than_one() -> None:
    assert learned(50, 1000).of("e", "m", 4.0).bytes_per_token == pytest.approx(1.0, rel=0.07)


@pytest.mark.parametrize(("text_bytes", "tokens"), [(0, 100), (100, 0)])
def test_what_shows_nothing_is_not_learned(text_bytes: int, tokens: int) -> None:
    rates = TextRates()
    rates.learn("e", "m", 100, text_bytes, tokens)
    rates.learn("e", "m", 0, 100, 100)
    assert rates.of("e", "m", 4.0) == (4.0, 1.0)


def test_a_thousand_names_are_known_at_most() -> None:
    """Of adapters, say."""
    rates = learned(1200, 200)
    for number in range(1024):
        assert rates.of("e", "m", 4.0).bytes_per_token == pytest.approx(6.0, rel=0.02)
        rates.learn("e", f"m{number}", 200, 400, 200)
    assert rates.of("e", "m", 4.0).bytes_per_token == 4.0


@pytest.mark.parametrize("together", [1, 3])
def test_a_single_response_of_longer_tokens_than_usual_has_no_more_of_them_than_events(together: int) -> None:
    rate = learned(800, 200).of("e", "m", 4.0)
    assert rate.tokens(100, 100 * 48 // 10) == 100
    assert rate.tokens(100, 100 * together * 4) == 100 * together


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
