# SPDX-License-Identifier: Apache-2.0
"""How long a request may be where it goes, and the refusals of engines to which it was too long."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from lbproxy.core.requests.openai import MAX_TOKENS, ModelCard

MARGIN: Final = 1.1
"""A prompt may well have so many times the tokens that its bytes show: texts differ. A short server gets fewer of the
prompts that would just fit then; of 10,000 mixed ones 1 % did not, and are sent again. At .8 they are 4.5 %, at .9
2.9 %, at 1.0 1.9 %, at 1.2 .6 % (tests/core/queue/test_context_lengths.py)."""
MAX_REFUSAL_BYTES: Final = 64 << 10
"""Refusals have some 300 bytes; a larger body is something else."""

_TOO_LONG: Final = re.compile(
    rb"maximum context length"  # vLLM; SGLang, with max_tokens
    rb"|longer than the (?:model's context|maximum model) length"  # SGLang; vLLM's older versions
    rb"|exceed_context_size_error"  # llama.cpp
    rb"|context_length_exceeded"  # OpenAI's code, which providers use
)


def is_too_long(refusal: bytes) -> bool:
    """Whether the body of a 400 says that the prompt, or what may be generated besides, is too long for the model."""
    return len(refusal) <= MAX_REFUSAL_BYTES and _TOO_LONG.search(refusal) is not None


def asked_context(fields: Mapping[str, object]) -> int | None:
    """The context that a body asks an Ollama for; None: it asks for none."""
    options = fields.get("options")
    asked = options.get("num_ctx") if isinstance(options, dict) else None
    return asked if type(asked) is int and 0 < asked < MAX_TOKENS else None


def prompt_limit(card: ModelCard | None, max_tokens: int | None) -> int | None:
    """The longest prompt that the model takes with so many tokens of response; None: not known."""
    if card is None or card.context_tokens is None:
        return None
    return card.context_tokens - (0 if card.context_is_of_prompt else max_tokens or 0)
