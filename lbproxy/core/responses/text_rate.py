# SPDX-License-Identifier: Apache-2.0
"""How many tokens a response has that reports no usage, by its events and their text.

Servers send an event for each token, or one for several: as they are set up, under load, or as they speculate. How
many an endpoint sends, and how much text a token of a model has, show the responses that report their tokens.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from lbproxy.core.requests.request import BYTES_PER_TOKEN

_ASSUMED_TOKENS: Final = 200.0
"""The weight of the bytes that a token is assumed to have, in tokens, beside what responses report."""
_ASSUMED_EVENTS: Final = 5.0
"""The weight of an event being a token, in events."""
_KEPT_TOKENS: Final = 10_000.0
"""About so many tokens count, those reported last: a client would have to ask for as many to change what is learned."""
_WEIGHED_TOKENS: Final = 500.0
"""A longer response has no more weight than one of so many."""
_MOST_BYTES: Final = 8.0
"""A client can ask for text of large tokens, so that others look large, too: by no more than twice."""
_CLEARLY: Final = 1.25
"""The text of a single response is a tenth or two longer or shorter than usual for its tokens. It has more tokens than
its events stand for only if it has so many times more.
"""
_MAX_KEYS: Final = 1024
"""Models, and endpoints, of which something is known. The first one is forgotten for a further one."""


class TextRate(NamedTuple):
    """What the responses of a model at an endpoint are like."""

    bytes_per_token: float = BYTES_PER_TOKEN
    """Of text; at least 1."""
    tokens_per_event: float = 1.0
    """Of all events but the first, which has one token: servers send it at once. At least 1."""

    def tokens(self, events: int, text_bytes: int) -> int:
        """Of a stream with so many `events` that stand for one or more each. Whatever others were like, it has no more
        tokens than bytes of text, if it has text.
        """
        by_events = events + round(max(0, events - 1) * (self.tokens_per_event - 1.0))
        if text_bytes:
            by_events = min(by_events, max(events, text_bytes))
        by_text = round(text_bytes / self.bytes_per_token)
        return by_text if by_text > _CLEARLY * by_events else by_events


class _Sums:
    """Of responses that reported their tokens."""

    def __init__(self) -> None:
        self.text_bytes = self.tokens = self.later_events = self.later_tokens = 0.0

    def add(self, events: int, text_bytes: int, tokens: int) -> None:
        share = min(1.0, _WEIGHED_TOKENS / tokens)
        kept = 1.0 - share * tokens / _KEPT_TOKENS
        self.text_bytes = kept * self.text_bytes + share * max(text_bytes, tokens)
        self.tokens = kept * self.tokens + share * tokens
        if events > 1:
            self.later_events = kept * self.later_events + share * (min(events, tokens) - 1)
            self.later_tokens = kept * self.later_tokens + share * (tokens - 1)


class TextRates:
    """The text rates of models at endpoints, as complete streams show that report their tokens."""

    def __init__(self) -> None:
        self._models: dict[str, _Sums] = {}
        self._endpoints: dict[str, _Sums] = {}

    def learn(self, endpoint: str, model: str, events: int, text_bytes: int, tokens: int) -> None:
        """Of a complete stream with so many `events` that stand for tokens. Tokens that it does not show, such as of
        reasoning, make all look smaller, as those of others are not shown either.
        """
        if events > 0 and text_bytes > 0 and tokens > 0:
            _sums_of(self._models, model).add(events, text_bytes, tokens)
            _sums_of(self._endpoints, endpoint).add(events, text_bytes, tokens)

    def of(self, endpoint: str, model: str, prompt_rate: float) -> TextRate:
        """`prompt_rate`: bytes of a token of the prompt, which count until there are responses, and only if its
        tokens are smaller than usual: what clients send must not make tokens look larger.
        """
        by_model, by_endpoint = self._models.get(model, _NONE), self._endpoints.get(endpoint, _NONE)
        assumed = min(BYTES_PER_TOKEN, max(1.0, prompt_rate))
        size = (assumed * _ASSUMED_TOKENS + by_model.text_bytes) / (_ASSUMED_TOKENS + by_model.tokens)
        together = (_ASSUMED_EVENTS + by_endpoint.later_tokens) / (_ASSUMED_EVENTS + by_endpoint.later_events)
        return TextRate(min(_MOST_BYTES, size), together)


_NONE: Final = _Sums()


def _sums_of(known: dict[str, _Sums], name: str) -> _Sums:
    sums = known.get(name)
    if sums is None:
        if len(known) >= _MAX_KEYS:
            known.pop(next(iter(known)))
        sums = known[name] = _Sums()
    return sums
