"""The OpenAI API of a vLLM server, without the wire: request bodies in, response bodies and stream events out.

Parsing is where untrusted input is checked and bounded; what leaves a `parse_*` function needs no more checks but the
model's length (`plan`), which belongs to the server. Shapes and messages are those recorded from vLLM 0.32; fields that
are always null there are kept. Unknown fields are ignored, as vLLM does.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import orjson

from lbproxy.sim.engine.engine import SimRequest
from lbproxy.sim.mock.text import Answer, answer, block_hashes, embedding, from_token_ids, pad, render_chat, token_count

MAX_SEQUENCES = 2048
"""Prompts times choices in one call: OpenAI's limit for batched inputs."""
MAX_CALL_TOKENS = 2**22
"""Tokens of all prompts and choices in one call: what the server works out at once must not hold up its clock."""
MAX_STOPS = 64
MAX_DIMENSIONS = 4096
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's and vLLM's default for completions; chat has none."""
DEFAULT_DIMENSIONS = 16
FINGERPRINT = "lbproxy-mock"
DONE = b"data: [DONE]\n\n"

Json = dict[str, object]
_T = TypeVar("_T")


class ApiError(Exception):
    """A response other than 200, in vLLM's words."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        """The JSON body."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return orjson.dumps({"error": error})


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A generation request that is well-formed."""

    chat: bool
    model: str | None
    """None: not named, which means the served model."""
    prompts: tuple[bytes, ...]
    """Not empty, and none of them is."""
    max_tokens: int | None
    """At least 1; None: to the natural end, or to the model's limit with `ignore_eos`."""
    n: int
    stop: tuple[str, ...]
    ignore_eos: bool
    seed: int | None
    stream: bool
    include_usage: bool


@dataclass(frozen=True, slots=True)
class EmbeddingCall:
    """An embeddings request that is well-formed."""

    model: str | None
    prompts: tuple[bytes, ...]
    dimensions: int
    as_base64: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """One sequence of a call, and what it will say."""

    prompt_tokens: int
    answer: Answer
    block_hashes: list[int]
    adapter: str | None = None
    """The LoRA adapter that says it."""

    def request(self, request_id: str) -> SimRequest:
        """The work that this choice is for the engine."""
        return SimRequest(request_id, self.prompt_tokens, self.answer.tokens, self.block_hashes, self.adapter)


# Requests.


def load_json(body: bytes) -> Json:
    """The object in a request's body."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        context = f"'input': '<dict of 0 items>', 'ctx': {{'error': {error.msg!r}}}"
        raise _invalid("json_invalid", f"body.{error.pos}", "JSON decode error", context) from None
    if not isinstance(fields, dict):
        raise _invalid("model_attributes_type", "body", "Input should be a valid dictionary", _shown(fields))
    return fields


def parse_chat(fields: Json) -> Call:
    """A body of /v1/chat/completions."""
    limit = _integer(fields, "max_completion_tokens")
    if limit is None:
        limit = _integer(fields, "max_tokens")
    return _call(fields, chat=True, prompts=(render_chat(_messages(fields)),), max_tokens=limit)


def parse_completion(fields: Json) -> Call:
    """A body of /v1/completions."""
    limit = _integer(fields, "max_tokens")
    if limit is None:
        limit = DEFAULT_COMPLETION_TOKENS
    return _call(fields, chat=False, prompts=_prompts(fields, "prompt"), max_tokens=limit)


def parse_embedding(fields: Json) -> EmbeddingCall:
    """A body of /v1/embeddings."""
    dimensions = _integer(fields, "dimensions")
    if dimensions is None:
        dimensions = DEFAULT_DIMENSIONS
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise _refused(f"dimensions must be within 1..{MAX_DIMENSIONS}.", "dimensions", dimensions)
    encoding = fields.get("encoding_format", "float")
    if encoding not in ("float", "base64"):
        message = "Input should be 'float' or 'base64'"
        raise _invalid("literal_error", "body.encoding_format", message, _shown(encoding))
    return EmbeddingCall(_model(fields), _prompts(fields, "input"), dimensions, encoding == "base64")


def parse_tokenize(fields: Json) -> tuple[str | None, bytes]:
    """A body of /tokenize, with a prompt or with messages: the model and the text."""
    if "messages" in fields:
        return _model(fields), render_chat(_messages(fields))
    prompt = _required(fields, "prompt")
    if not isinstance(prompt, str):
        raise _invalid("string_type", "body.prompt", "Input should be a valid string", _shown(prompt))
    return _model(fields), prompt.encode()


def parse_detokenize(fields: Json) -> tuple[str | None, str]:
    """A body of /detokenize: the model and the text of the tokens."""
    tokens = _required(fields, "tokens")
    if not isinstance(tokens, list):
        raise _invalid("list_type", "body.tokens", "Input should be a valid list", _shown(tokens))
    return _model(fields), _from_ids(tokens, "tokens").rstrip(b"\0").decode("utf-8", "replace")


def plan(call: Call, *, max_model_len: int, seed: int, adapter: str | None = None) -> list[Choice]:
    """What the server will do for a call: `n` choices for each prompt, in the order of their indexes. Each adapter says
    something else.

    Raises `ApiError` for what does not fit into the model. Linear in the tokens, and so bounded.
    """
    choices: list[Choice] = []
    tokens = 0
    for prompt in call.prompts:
        prompt_tokens = token_count(len(prompt))
        limit = _output_limit(prompt_tokens, call.max_tokens, max_model_len)
        tokens += (prompt_tokens + limit) * call.n
        if tokens > MAX_CALL_TOKENS:
            raise _refused(f"At most {MAX_CALL_TOKENS} tokens in one request, prompts times n included.", "n", call.n)
        natural_end = call.max_tokens is None and not call.ignore_eos
        for choice in range(call.n):
            key = f"{seed}:{call.seed}:{choice}{'' if adapter is None else f':{adapter}'}"
            said = answer(prompt, key, max_tokens=limit, natural_end=natural_end, stop=call.stop)
            hashes = block_hashes(pad(prompt) + said.computed, adapter)
            choices.append(Choice(prompt_tokens, said, hashes, adapter))
    return choices


def embedding_work(call: EmbeddingCall, *, max_model_len: int, adapter: str | None = None) -> list[Choice]:
    """What a call is for the engine: the prefills, each with the one token that the engine cannot do without."""
    nothing = Answer(b"", 1, "stop", None, b"")
    choices: list[Choice] = []
    for prompt in call.prompts:
        prompt_tokens = token_count(len(prompt))
        _output_limit(prompt_tokens, 1, max_model_len)
        choices.append(Choice(prompt_tokens, nothing, block_hashes(pad(prompt), adapter), adapter))
    return choices


def _output_limit(prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    length = f"This model's maximum context length is {max_model_len} tokens. However, "
    if max_tokens is not None and max_tokens > max_model_len:
        message = (
            f"max_tokens={max_tokens} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens."
        )
        raise _refused(message, "max_tokens", max_tokens)
    if prompt_tokens >= max_model_len:
        # vLLM stops tokenising one token above the limit, hence "at least".
        least = min(prompt_tokens, max_model_len + 1)
        message = (
            f"{length}your prompt contains at least {least} input tokens, which exceeds this limit even without "
            "any output tokens. Please reduce the length of the input prompt."
        )
        raise _refused(message, "input_tokens", least)
    if max_tokens is None:
        return max_model_len - prompt_tokens
    if prompt_tokens + max_tokens > max_model_len:
        message = (
            f"{length}you requested {max_tokens} output tokens and your prompt contains at least {prompt_tokens} input "
            f"tokens, for a total of at least {prompt_tokens + max_tokens} tokens. Please reduce the length of the "
            "input prompt or the number of requested output tokens."
        )
        raise _refused(message, "input_tokens", prompt_tokens)
    return max_tokens


def _call(fields: Json, *, chat: bool, prompts: tuple[bytes, ...], max_tokens: int | None) -> Call:
    if max_tokens is not None and max_tokens < 1:
        raise _refused(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)
    n = _integer(fields, "n")
    n = 1 if n is None else n
    if not 1 <= n * len(prompts) <= MAX_SEQUENCES:
        raise _refused(f"n must be at least 1, and at most {MAX_SEQUENCES} with all prompts, got {n}.", "n", n)
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict):
        raise _invalid("model_type", "body.stream_options", "Input should be a valid dictionary", _shown(options))
    return Call(
        chat=chat,
        model=_model(fields),
        prompts=prompts,
        max_tokens=max_tokens,
        n=n,
        stop=_stops(fields),
        ignore_eos=_boolean(fields, "ignore_eos"),
        seed=_integer(fields, "seed"),
        stream=_boolean(fields, "stream"),
        include_usage=_boolean(options, "include_usage"),
    )


def _messages(fields: Json) -> list[tuple[str, str]]:
    messages = _required(fields, "messages")
    if not isinstance(messages, list):
        raise _invalid("list_type", "body.messages", "Input should be a valid list", _shown(messages))
    found: list[tuple[str, str]] = []
    for position, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str):
            raise _invalid("missing", f"body.messages.{position}.role", "Field required", _shown(message))
        found.append((role, _content(message.get("content"), position)))
    return found


def _content(content: object, position: int) -> str:
    """The text of one message; parts of other kinds (images) have no text and count nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        where = f"body.messages.{position}.content"
        raise _invalid("string_type", where, "Input should be a valid string or list", _shown(content))
    texts = (part.get("text") if isinstance(part, dict) else part for part in content)
    return "".join(text for text in texts if isinstance(text, str))


def _prompts(fields: Json, name: str) -> tuple[bytes, ...]:
    """One text, several, the token ids of one, or the token ids of several."""
    given = _required(fields, name)
    several = given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
    if len(several) > MAX_SEQUENCES:
        raise _refused(f"At most {MAX_SEQUENCES} prompts in one request.", name, len(several))
    prompts: list[bytes] = []
    for prompt in several:
        if isinstance(prompt, str):
            prompts.append(prompt.encode())
        elif isinstance(prompt, list):
            prompts.append(_from_ids(prompt, name))
        else:
            raise _invalid("string_type", f"body.{name}", "Input should be a valid string", _shown(prompt))
    if not all(prompts):
        raise ApiError(400, f"Either {name} or {name}_embeds must be provided and non-empty.", "BadRequestError")
    return tuple(prompts)


def _from_ids(ids: list[object], name: str) -> bytes:
    try:
        return from_token_ids(ids)  # type: ignore[arg-type]  # the packing itself is the check
    except struct.error:
        raise _invalid("int_type", f"body.{name}", "Input should be valid token ids", _shown(ids)) from None


def _stops(fields: Json) -> tuple[str, ...]:
    given = fields.get("stop")
    stops = [given] if isinstance(given, str) else given or []
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        message = f"Input should be a non-empty string or at most {MAX_STOPS} of them"
        raise _invalid("string_type", "body.stop", message, _shown(given))
    return tuple(stops)


def _model(fields: Json) -> str | None:
    return _typed(fields, "model", str, "string")


def _boolean(fields: Json, name: str) -> bool:
    return _typed(fields, name, bool, "boolean") or False


def _integer(fields: Json, name: str) -> int | None:
    value = _typed(fields, name, int, "integer")
    if isinstance(value, bool):
        raise _invalid("int_type", f"body.{name}", "Input should be a valid integer", _shown(value))
    return value


def _typed(fields: Json, name: str, kind: type[_T], word: str) -> _T | None:
    value = fields.get(name)
    if value is None or isinstance(value, kind):
        return value
    raise _invalid(f"{word}_type", f"body.{name}", f"Input should be a valid {word}", _shown(value))


def _required(fields: Json, name: str) -> object:
    if fields.get(name) is None:
        raise _invalid("missing", f"body.{name}", "Field required", _shown(fields))
    return fields[name]


def _invalid(kind: str, location: str, message: str, context: str) -> ApiError:
    """What vLLM makes of a pydantic error."""
    details = f"{{'type': '{kind}', 'loc': '{location}', 'msg': '{message}', {context}}}"
    return ApiError(400, f"1 validation error:\n  {details}", "Bad Request", location)


def _shown(value: object) -> str:
    """The input of a validation error; never more of it than helps."""
    if isinstance(value, dict | list):
        return f"'input': '<{type(value).__name__} of {len(value)} items>'"
    return f"'input': {str(value)[:64]!r}"


def _refused(message: str, parameter: str, value: object) -> ApiError:
    return ApiError(400, f"{message} (parameter={parameter}, value={value})", "BadRequestError", parameter)


# Responses.


@dataclass(frozen=True, slots=True)
class Identity:
    """What every body and event of one response repeats."""

    id: str
    created: int
    """Unix seconds."""
    model: str
    chat: bool

    def head(self, kind: str) -> Json:
        """The fields that every object starts with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage(call: Call, choices: Sequence[Choice], cached_tokens: int) -> Json:
    """The usage object of a finished call; `cached_tokens` over all of its prompts."""
    # A prompt counts once however many choices were made from it.
    prompt_tokens = sum(choice.prompt_tokens for choice in choices[:: call.n])
    completion_tokens = sum(choice.answer.tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def response_body(identity: Identity, choices: Sequence[Choice], used: Json) -> bytes:
    """The whole body of a call that does not stream."""
    body = identity.head("chat.completion" if identity.chat else "text_completion")
    body["choices"] = [_whole_choice(identity.chat, index, choice.answer) for index, choice in enumerate(choices)]
    body |= {"service_tier": None, "system_fingerprint": FINGERPRINT, "usage": used, "kv_transfer_params": None}
    return orjson.dumps(body)


def _whole_choice(chat: bool, index: int, said: Answer) -> Json:
    text = said.text.decode("ascii")
    message = {"role": "assistant", "content": text, "refusal": None, "function_call": None, "reasoning": None}
    return {
        "index": index,
        **({"message": message} if chat else {"text": text}),
        "logprobs": None,
        "finish_reason": said.finish_reason,
        "stop_reason": said.stop_reason,
        "token_ids": None,
    }


class EventWriter:
    """The server-sent events of one streamed response: one for each token, cheap enough for hundreds of streams."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._kind = "chat.completion.chunk" if identity.chat else "text_completion"
        head = orjson.dumps(identity.head(self._kind))[:-1]
        self._before_index = b"data: " + head + b',"choices":[{"index":'
        if identity.chat:
            self._before_text = b',"delta":{"content":'
            self._after_text = b'},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
        else:
            self._before_text = b',"text":'
            self._after_text = (
                b',"logprobs":null,"finish_reason":null,"stop_reason":null,'
                b'"prompt_token_ids":null,"token_ids":null}]}\n\n'
            )

    def opening(self, choices: int) -> bytes:
        """What goes before the first token: the roles in a chat, nothing in a completion."""
        if not self._identity.chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            self._event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
            for index in range(choices)
        )

    def token(self, index: int, text: str) -> bytes:
        """One token of one choice, not its last."""
        return b"%b%d%b%b%b" % (self._before_index, index, self._before_text, orjson.dumps(text), self._after_text)

    def last_token(self, index: int, text: str, said: Answer) -> bytes:
        """The last token of one choice, with the reason of its end."""
        choice: Json = {
            "index": index,
            **({"delta": {"content": text}} if self._identity.chat else {"text": text}),
            "logprobs": None,
            "finish_reason": said.finish_reason,
            "stop_reason": said.stop_reason,
            "token_ids": None,
        }
        return self._event([choice], system_fingerprint=FINGERPRINT)

    def usage(self, used: Json) -> bytes:
        """The event that `include_usage` asks for, after all choices have ended."""
        return self._event([], usage=used, system_fingerprint=FINGERPRINT)

    def _event(self, choices: list[Json], **more: object) -> bytes:
        return b"data: " + orjson.dumps(self._identity.head(self._kind) | {"choices": choices} | more) + b"\n\n"


def embedding_body(identity: Identity, call: EmbeddingCall, choices: Sequence[Choice]) -> bytes:
    """The body of an embeddings response."""
    data: list[Json] = []
    for index, prompt in enumerate(call.prompts):
        vector: list[float] | str = embedding(prompt, call.dimensions)
        if call.as_base64:
            vector = base64.b64encode(struct.pack(f"<{call.dimensions}f", *vector)).decode("ascii")
        data.append({"index": index, "object": "embedding", "embedding": vector})
    tokens = sum(choice.prompt_tokens for choice in choices)
    used = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": None}
    return orjson.dumps(identity.head("list") | {"data": data, "usage": used})


def models_body(
    model: str, *, created: int, max_model_len: int, engine: str = "vllm", adapters: Sequence[Json] = ()
) -> bytes:
    """The body of /v1/models. `adapters`: their entries."""
    card = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": engine,
        "root": model,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [],
    }
    return orjson.dumps({"object": "list", "data": [card, *adapters]})
