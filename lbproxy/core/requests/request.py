# SPDX-License-Identifier: Apache-2.0
"""The request as the balancer sees it, and the usage that an endpoint reports."""

from __future__ import annotations

from math import log
from typing import Final, NamedTuple, TypeAlias

from lbproxy.core.requests.prompt_keys import BlockKey

WHOLE: Final = 0
"""A request that one endpoint serves from its prompt to its end."""
PREFILL: Final = 1
"""The first leg of a split request: its prompt is computed at one endpoint ..."""
DECODE: Final = 2
"""... and its response generated at another, which gets the prompt's KV cache from the first."""


MAX_TIER: Final = 9
"""The highest tier of endpoints."""
BYTES_PER_TOKEN: Final = 4.0
"""English text: what counts where nothing was learned, or what was learned cannot be used."""


class InferenceRequest(NamedTuple):
    """What a routing decision may depend on: no headers, no body."""

    id: str
    model: str | None
    """As the client named it; None = not named, or a route that is not placed by model."""
    stream: bool = False
    body_bytes: int = 0
    prompt_bytes: int = 0
    """Bytes of the flattened prompt; 0 = there is no readable prompt."""
    block_keys: tuple[BlockKey, ...] = ()
    """One key for each full block of the prompt; each key stands for the prompt up to the end of its block: see
    `core.requests.prompt_keys.hash_prompt`."""
    max_tokens: int | None = None
    """The longest response that the client accepts; None = not given."""
    priority: int = 0
    """Higher is served first; below 0 is shed first."""
    session: str | None = None
    """The client's name of the conversation that the request belongs to."""
    explain: bool = False  # the client asks for an explanation of the routing decision
    flow: str = "anonymous"
    """The flow that the request belongs to: see `core.queue.flows`."""
    deadline: float | None = None
    """The time by which the client must have its first token; later the response is useless."""
    media_tokens: int = 0
    """Estimated tokens of images and other media in the prompt. Each has `core.requests.media.FILLER_BYTES` in
    `prompt_bytes`."""
    response_id: str | None = None
    """The stored response that the request continues or is about: it must go to the endpoint that stores it."""
    stores: bool = False  # the endpoint may store its response, and clients may ask for that by its id
    repeatable: bool = True  # it may be sent again even if an endpoint may have begun with it
    binary: bool = False  # its body is not JSON but audio, an image or a file
    open_ended: bool = False
    """A WebSocket: it lasts until a side closes it. Its silence is not a fault, and its duration does not show
    speed."""
    splittable: bool = False  # it may be prefilled at one endpoint and decoded at another
    leg: int = WHOLE
    """WHOLE as clients send it; DECODE for the second leg of a request that was prefilled already. The Balancer itself
    makes it PREFILL."""
    prefilled_at: int = 0
    """If it is a second leg, the uid of the endpoint that has its prompt."""
    max_tier: int = MAX_TIER
    """It must not go to an endpoint of a higher tier."""

    least_tokens: int = 0
    """Its prompt has at least so many tokens: token ids, or more than fit where it was refused as too long; 0: not
    known; -1: it has several prompts."""
    fallback_after_s: float | None = None
    """After how many seconds of waiting for a place another model serves it; infinite: not because of that; None: no
    other one may serve it."""
    fallback_from: str | None = None
    """The model in place of which `model` is to serve it; None: it is its own."""
    engine: str | None = None
    """It is in this engine's own API, which only its endpoints have; None: in one that all have."""
    context_tokens: int | None = None
    """The context with which it wants its model loaded (Ollama's `num_ctx`); None: any."""

    def as_leg(self, leg: int, prefilled_at: int = 0) -> InferenceRequest:
        """One leg of it. The first has one token of the response, and shows its progress like a stream: its whole
        response is its first byte. The session is where the prompt was computed.
        """
        if leg == PREFILL:
            return self._replace(leg=PREFILL, stream=True, max_tokens=1)
        return self._replace(leg=DECODE, prefilled_at=prefilled_at, session=None)

    def is_text(self, tokens: int) -> bool:
        """Whether `tokens` can be the tokens of the prompt's text. If not, it has images, or a count is wrong."""
        return tokens > 0 and 0.5 <= self.prompt_bytes / tokens <= 16.0


class Usage(NamedTuple):
    """What a request used, as the endpoint reported it. None = not reported."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that were read from the endpoint's prefix cache."""
    completion_tokens: int | None = None
    written_tokens: int | None = None
    """Prompt tokens that were added to the cache. Only Anthropic's API reports them: see `resolved`."""
    is_estimate: bool = False
    """Some of it is estimated: it counts for limits, and nothing is learned of it."""

    def resolved(self, expected_tokens: float) -> Usage:
        """Return the usage with the complete prompt in `prompt_tokens`, of which about `expected_tokens` are expected.

        Anthropic's `input_tokens` do not contain those read from the cache or written to it. vLLM 0.32 (as recorded)
        and SGLang (its issue 36877) count likewise, other servers count the complete prompt. Where both are possible,
        the count that is nearer to the expected length is taken.
        """
        prompt, cached, completion, written, _ = self
        if written is None or prompt is None:
            return self
        beside = (cached or 0) + written
        other = prompt + beside
        apart = abs(log(max(1.0, prompt) / max(1.0, expected_tokens)))
        if prompt < beside or abs(log(max(1.0, other) / max(1.0, expected_tokens))) < apart:
            prompt = other
        return Usage(prompt, cached, completion)


def estimated(usage: Usage | None, completion_tokens: int) -> Usage:
    """The usage with an estimate of the response's tokens. `usage`: what was reported; None = nothing."""
    prompt, cached = (None, None) if usage is None else (usage.prompt_tokens, usage.cached_tokens)
    return Usage(prompt, cached, completion_tokens, None, True)


Counts: TypeAlias = tuple[int, int, int, int, int]
"""As `Tokens`, which compiled code reads as slowly as any object."""


class Tokens(NamedTuple):
    """What requests used, whoever counted it; whole tokens, 0 or more."""

    prompt_uncached: int = 0
    prompt_cached: int = 0
    completion: int = 0
    estimated_prompt: int = 0
    """Of `prompt_uncached`, those that no server reported."""
    estimated_completion: int = 0
    """Of `completion`, the same."""

    @property
    def all(self) -> int:
        return self.prompt_uncached + self.prompt_cached + self.completion

    @property
    def estimated(self) -> int:
        """Of `all`, those that no server reported."""
        return self.estimated_prompt + self.estimated_completion

    def less(self, part: Tokens) -> Tokens:
        return Tokens(*[one - other for one, other in zip(self, part, strict=True)])

    def plus(self, more: Tokens) -> Tokens:
        return Tokens(*[one + other for one, other in zip(self, more, strict=True)])


class DayUse(NamedTuple):
    """The tokens of one day (UTC) that one run of days counted: several may have counted some of the same day."""

    day: str
    """As 2026-11-29."""
    id: str
    """Tells it from others of that day."""
    rows: dict[tuple[str, str], Tokens]
    """By flow and model."""


def reported(usage: Usage) -> Counts:
    """What was reported, of a whole request."""
    prompt = usage.prompt_tokens or 0
    cached = min(max(0, usage.cached_tokens or 0), prompt)
    return prompt - cached, cached, usage.completion_tokens or 0, 0, 0


NO_USAGE: Final = Usage()
"""For a complete response that reports no usage: its duration is learned all the same."""
