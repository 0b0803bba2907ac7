"""What the balancer sees of a request, and what an endpoint says that it used."""

from __future__ import annotations

from math import log
from typing import Final, NamedTuple

from lbproxy.core.requests.prompt_keys import BlockKey


class InferenceRequest(NamedTuple):
    """What the decision may see of a request: no headers object, no body."""

    id: str
    model: str | None
    """As the client named it; None = not named, or a route that is not placed by model."""
    stream: bool = False
    body_bytes: int = 0
    prompt_bytes: int = 0
    """Bytes of the flattened prompt; 0 = not a prompt that can be read."""
    block_keys: tuple[BlockKey, ...] = ()
    """One key for each full block of the prompt, each standing for all up to it: see
    `core.requests.prompt_keys.hash_prompt`."""
    max_tokens: int | None = None
    """The longest response that the client takes; None = it did not say."""
    priority: int = 0
    """Higher goes first; below 0 is shed first."""
    session: str | None = None
    """What the client calls the conversation that this belongs to."""
    explain: bool = False  # the client would like to know why it went where it went
    flow: str = "anonymous"
    """Whose it is: see `core.queue.flows`."""
    deadline: float | None = None
    """When the client must have its first token, or else wants none."""
    media_tokens: int = 0
    """Tokens, estimated, of images and the like in the prompt: `core.requests.media.FILLER_BYTES` of `prompt_bytes`
    each."""
    response_id: str | None = None
    """The stored response that it goes on with, or is about: the endpoint that has it must be asked."""
    stores: bool = False  # its response may be stored by the endpoint, and be asked for by its id
    repeatable: bool = True  # it may be sent again although an endpoint may have begun with it
    binary: bool = False  # its body is no JSON but audio, an image or a file
    open_ended: bool = False
    """A WebSocket: it lasts until a side closes it. Its silence is no fault, and its duration says nothing of speed."""

    def is_text(self, tokens: int) -> bool:
        """Whether so many tokens can be the prompt's text. If not, there are images in it, or somebody is wrong."""
        return tokens > 0 and 0.5 <= self.prompt_bytes / tokens <= 16.0


class Usage(NamedTuple):
    """What the endpoint said that a request used. None = it did not say."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Those of the prompt that were in the endpoint's prefix cache."""
    completion_tokens: int | None = None
    written_tokens: int | None = None
    """Those of the prompt that were added to the cache. Only Anthropic's API reports them: see `resolved`."""

    def resolved(self, expected_tokens: float) -> Usage:
        """The same with all of the prompt in `prompt_tokens`, of which about so many are expected.

        Anthropic's `input_tokens` are those that were neither read from the cache nor written to it. vLLM 0.32 (as
        recorded) and SGLang (its issue 36877) do the same, other servers count the complete prompt. Where it can be
        both, what is nearer to the expected length is taken.
        """
        prompt, cached, completion, written = self
        if written is None or prompt is None:
            return self
        beside = (cached or 0) + written
        other = prompt + beside
        apart = abs(log(max(1.0, prompt) / max(1.0, expected_tokens)))
        if prompt < beside or abs(log(max(1.0, other) / max(1.0, expected_tokens))) < apart:
            prompt = other
        return Usage(prompt, cached, completion)


NO_USAGE: Final = Usage()
"""Of a complete response that says nothing of it: how long it took is learned all the same."""
