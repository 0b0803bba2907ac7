# SPDX-License-Identifier: Apache-2.0
"""The own APIs of SGLang (/generate), llama.cpp (/completion, /infill) and vLLM (/inference/v1/generate), as far as
clients use them.

SGLang's events repeat the text from the start, as SGLang does unless it is told otherwise; llama.cpp's are one token
each, and its stream ends without `[DONE]`.
"""

from __future__ import annotations

from collections.abc import Sequence

from lbproxy.sim.mock.apis.call import (
    MAX_SEQUENCES,
    GenerationCall,
    Identity,
    PlannedChoice,
    Writer,
    at_least_one,
    prompts_in,
    text_of_ids,
)
from lbproxy.sim.mock.apis.chat import DONE, usage
from lbproxy.sim.mock.apis.fields import (
    Json,
    boolean,
    dump,
    integer,
    invalid,
    refused,
    required,
    server_event,
    shown,
    stops,
    text_of,
    typed,
)
from lbproxy.sim.mock.text import TOKEN_BYTES, to_token_ids

SGLANG_TOKENS = 128
"""SGLang's default for `max_new_tokens`."""


def parse_generate(fields: Json) -> tuple[GenerationCall, bool]:
    """A body of SGLang's /generate, and whether its response is a list: it is for several prompts or choices."""
    name = "text" if fields.get("text") is not None else "input_ids"
    prompts = prompts_in(fields, name)
    options = typed(fields, "sampling_params", dict, "dictionary") or {}
    limit = integer(options, "max_new_tokens")
    n = integer(options, "n")
    n = 1 if n is None else n
    if not 1 <= n * len(prompts) <= MAX_SEQUENCES:
        raise refused(f"n must be at least 1, and at most {MAX_SEQUENCES} with all prompts.", "n", n)
    call = GenerationCall(
        model=text_of(fields, "lora_path"),
        prompts=prompts,
        max_tokens=at_least_one(SGLANG_TOKENS if limit is None else limit, "max_new_tokens"),
        n=n,
        stop=stops(options),
        ignore_eos=boolean(options, "ignore_eos"),
        stream=boolean(fields, "stream"),
    )
    given = fields.get(name)
    several = isinstance(given, list) and bool(given) and isinstance(given[0], str | list)
    return call, several or n > 1


def _generated(identity: Identity, choice: PlannedChoice, tokens: int, cached_tokens: int) -> Json:
    said = choice.answer
    ended = tokens == said.tokens
    reason: Json = {"type": said.finish_reason}
    if said.finish_reason == "length":
        reason["length"] = said.tokens
    else:
        reason["matched"] = said.stop_reason
    text = said.text[: tokens * TOKEN_BYTES]
    return {
        "text": text.decode("ascii"),
        "output_ids": to_token_ids(text),
        "meta_info": {
            "id": identity.id,
            "finish_reason": reason if ended else None,
            "prompt_tokens": choice.prompt_tokens,
            "weight_version": "default",
            "completion_tokens": tokens,
            "cached_tokens": cached_tokens,
        },
    }


class GenerateWriter(Writer):
    """SGLang's /generate."""

    def __init__(self, identity: Identity, *, several: bool) -> None:
        self._identity, self._several = identity, several

    def whole(self, choices: Sequence[PlannedChoice], cached_tokens: int) -> bytes:
        bodies = [_generated(self._identity, choice, choice.answer.tokens, cached_tokens) for choice in choices]
        return dump(bodies if self._several else bodies[0])

    def token(self, choice: PlannedChoice, index: int, position: int) -> bytes:
        """All of the text up to one token. What was cached stands in the last event only: it is known by then."""
        if choice.is_last(position):
            return b""
        return server_event(_generated(self._identity, choice, position + 1, 0) | {"index": index})

    def closing(self, choices: Sequence[PlannedChoice], cached_tokens: int) -> bytes:
        """The complete text of each choice, and the end."""
        bodies = [
            _generated(self._identity, choice, choice.answer.tokens, cached_tokens) | {"index": index}
            for index, choice in enumerate(choices)
        ]
        return b"".join(map(server_event, bodies)) + DONE


def parse_llamacpp(fields: Json, *, infill: bool) -> GenerationCall:
    """A body of llama.cpp's /completion, or of /infill: what stands before and behind, with the prompt in between."""
    limit = integer(fields, "n_predict")
    if limit is not None and limit < 0:
        limit = None
    if infill:
        pieces = [text_of(fields, name) or "" for name in ("input_prefix", "prompt", "input_suffix")]
        fields = {**fields, "prompt": f"<|fim_prefix|>{pieces[0]}{pieces[1]}<|fim_suffix|>{pieces[2]}<|fim_middle|>"}
    prompts = prompts_in(fields, "prompt")
    if len(prompts) > 1:
        raise refused("Several prompts in one request are not simulated.", "prompt", shown(fields["prompt"]))
    return GenerationCall(
        model=text_of(fields, "model"),
        prompts=prompts,
        max_tokens=at_least_one(limit, "n_predict"),
        stop=stops(fields),
        ignore_eos=boolean(fields, "ignore_eos"),
        seed=integer(fields, "seed"),
        stream=boolean(fields, "stream"),
    )


def completed(identity: Identity, choice: PlannedChoice, cached_tokens: int, *, content: str) -> Json:
    """The body of llama.cpp, and the last event of a stream, which has no text."""
    said = choice.answer
    kind = "limit" if said.finish_reason == "length" else "eos" if said.stop_reason is None else "word"
    return {
        "index": 0,
        "content": content,
        "tokens": [],
        "id_slot": 0,
        "stop": True,
        "model": identity.model,
        "tokens_predicted": said.tokens,
        "tokens_evaluated": choice.prompt_tokens,
        "has_new_line": False,
        "truncated": False,
        "stop_type": kind,
        "stopping_word": said.stop_reason or "",
        "tokens_cached": choice.prompt_tokens + said.tokens - 1,
        "timings": {
            "cache_n": cached_tokens,
            "prompt_n": choice.prompt_tokens - cached_tokens,
            "predicted_n": said.tokens,
        },
    }


class LlamacppWriter(Writer):
    """llama.cpp's own API."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def whole(self, choices: Sequence[PlannedChoice], cached_tokens: int) -> bytes:
        (choice,) = choices
        return dump(completed(self._identity, choice, cached_tokens, content=choice.answer.text.decode("ascii")))

    def token(self, choice: PlannedChoice, index: int, position: int) -> bytes:
        text = choice.answer.token(position)
        body: Json = {"index": 0, "content": text, "tokens": to_token_ids(text.encode()), "stop": False, "id_slot": 0}
        counts = {"tokens_predicted": position + 1, "tokens_evaluated": choice.prompt_tokens}
        return server_event(body | counts)

    def closing(self, choices: Sequence[PlannedChoice], cached_tokens: int) -> bytes:
        return server_event(completed(self._identity, choices[0], cached_tokens, content=""))


def parse_tokens(fields: Json) -> tuple[GenerationCall, bool]:
    """A body of vLLM's /inference/v1/generate, and whether a stream ends with its usage."""
    ids = required(fields, "token_ids")
    if not isinstance(ids, list) or not ids:
        raise invalid("list_type", "body.token_ids", "Input should be a valid list", shown(ids))
    required(fields, "sampling_params")
    options = typed(fields, "sampling_params", dict, "dictionary") or {}
    n = integer(options, "n") or 1
    if not 1 <= n <= MAX_SEQUENCES:
        raise refused(f"n must be at least 1, and at most {MAX_SEQUENCES}.", "n", n)
    call = GenerationCall(
        model=text_of(fields, "model"),
        prompts=(text_of_ids(ids, "token_ids"),),
        max_tokens=at_least_one(integer(options, "max_tokens")),
        n=n,
        stop=stops(options),
        ignore_eos=boolean(options, "ignore_eos"),
        seed=integer(options, "seed"),
        stream=boolean(fields, "stream"),
    )
    return call, boolean(typed(fields, "stream_options", dict, "dictionary") or {}, "include_usage")


def _token_choice(index: int, choice: PlannedChoice, text: bytes, *, ended: bool) -> Json:
    reason = choice.answer.finish_reason if ended else None
    return {"index": index, "logprobs": None, "finish_reason": reason, "token_ids": to_token_ids(text)}


class TokensWriter(Writer):
    """/inference/v1/generate."""

    def __init__(self, identity: Identity, *, include_usage: bool) -> None:
        self._identity, self._include_usage = identity, include_usage

    def _body(self, choices: list[Json], used: Json | None) -> Json:
        return {"request_id": self._identity.id, "choices": choices, "usage": used}

    def _event(self, choices: list[Json], used: Json | None = None) -> bytes:
        return server_event(self._body(choices, used))

    def whole(self, choices: Sequence[PlannedChoice], cached_tokens: int) -> bytes:
        said = [_token_choice(index, choice, choice.answer.text, ended=True) for index, choice in enumerate(choices)]
        return dump(self._body(said, usage(choices, len(choices), cached_tokens)) | {"prompt_logprobs": None})

    def token(self, choice: PlannedChoice, index: int, position: int) -> bytes:
        text = choice.answer.text[position * TOKEN_BYTES : (position + 1) * TOKEN_BYTES]
        return self._event([_token_choice(index, choice, text, ended=choice.is_last(position))])

    def closing(self, choices: Sequence[PlannedChoice], cached_tokens: int) -> bytes:
        used = self._event([], usage(choices, len(choices), cached_tokens)) if self._include_usage else b""
        return used + DONE
