# SPDX-License-Identifier: Apache-2.0
"""How many tokens the text of a response has that reports no usage."""

from __future__ import annotations

from math import ceil
from typing import Final

from lbproxy.core.requests.request import BYTES_PER_TOKEN

_ASSUMED_TOKENS: Final = 200.0
"""The weight of what is assumed, in tokens, beside what responses report."""
_KEPT: Final = 0.98
"""The weight that earlier responses keep at each that reports its tokens: about the last 50 count."""
_MOST_BYTES: Final = 8.0
"""A client can ask for text of large tokens, so that others look large, too: by no more than twice."""
_CLEARLY: Final = 1.25
"""Servers send an event for each token, or one for several. There are several only if the text has so many times more
tokens than events: a single response's tokens are a tenth or two longer or shorter than usual.
"""


class TextRate:
    """How many bytes of text a token has, as responses show that report their tokens."""

    def __init__(self) -> None:
        self._bytes = self._tokens = 0.0

    def learn(self, text_bytes: int, tokens: int) -> None:
        """Of a complete response. Tokens that it does not show, such as of reasoning, make all look smaller, as those
        of others are not shown either.
        """
        if text_bytes > 0 and tokens > 0:
            self._bytes = _KEPT * self._bytes + max(text_bytes, tokens)
            self._tokens = _KEPT * self._tokens + tokens

    def bytes_per_token(self, prompt_rate: float) -> float:
        """At least 1. `prompt_rate`: the same of prompts, which counts until there are responses, and only if their
        tokens are smaller than usual: what clients send must not make tokens look larger.
        """
        assumed = min(BYTES_PER_TOKEN, max(1.0, prompt_rate))
        return min(_MOST_BYTES, (assumed * _ASSUMED_TOKENS + self._bytes) / (_ASSUMED_TOKENS + self._tokens))


def tokens_of(events: int, text_bytes: int, bytes_per_token: float) -> int:
    """Tokens of a stream with so many `events` that stand for one or more each."""
    by_text = text_bytes / bytes_per_token
    return ceil(by_text) if by_text > _CLEARLY * events else events
