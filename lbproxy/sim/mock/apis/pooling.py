# SPDX-License-Identifier: Apache-2.0
"""What reads text and writes none: embeddings, pooling, classification, scores, rerank; /tokenize and /detokenize.

A real vLLM serves one kind of model; this one serves all of these, with values that are hashes of the text.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import shake_128
from itertools import zip_longest

from lbproxy.sim.mock.apis.call import MAX_SEQUENCES, Identity, PlannedChoice, prompt_tokens_of, prompts_in, text_of_ids
from lbproxy.sim.mock.apis.chat import chat_prompt
from lbproxy.sim.mock.apis.fields import (
    Json,
    bad_request,
    boolean,
    dump,
    integer,
    invalid,
    model_of,
    refused,
    required,
    shown,
)
from lbproxy.sim.mock.text import TOKEN_BYTES, embedding, pad, to_token_ids

MAX_DIMENSIONS = 4096
DEFAULT_DIMENSIONS = 16
_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""The names that /score takes: what is compared, and with what."""


@dataclass(frozen=True, slots=True)
class PoolingCall:
    """A request that is well-formed."""

    kind: str
    """embd, pooling, classify, score, rerank: what its id begins with, but for rerank."""
    model: str | None
    prompts: tuple[bytes, ...]
    dimensions: int = DEFAULT_DIMENSIONS
    as_base64: bool = False
    documents: list[object] = field(default_factory=list)
    """Documents of a rerank, as they came."""
    top_n: int = 0
    """0 = all."""

    @property
    def prefix(self) -> str:
        """What its id begins with."""
        return "score" if self.kind == "rerank" else self.kind


def parse_texts(kind: str, fields: Json) -> PoolingCall:
    """A body of /v1/embeddings, /pooling or /classify: `input`, or messages."""
    dimensions = integer(fields, "dimensions")
    if dimensions is None:
        dimensions = DEFAULT_DIMENSIONS
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise refused(f"dimensions must be within 1..{MAX_DIMENSIONS}.", "dimensions", dimensions)
    encoding = fields.get("encoding_format", "float")
    if encoding not in ("float", "base64"):
        message = "Input should be 'float' or 'base64'"
        raise invalid("literal_error", "body.encoding_format", message, shown(encoding))
    prompts = (chat_prompt(fields)[0],) if "messages" in fields else prompts_in(fields, "input")
    return PoolingCall(kind, model_of(fields), prompts, dimensions, encoding == "base64")


def parse_score(fields: Json) -> PoolingCall:
    """A body of /score: one text with one or several, or as many with as many."""
    for left_name, right_name in _PAIRS:
        if left_name in fields and right_name in fields:
            left, right = _texts(fields, left_name), _texts(fields, right_name)
            break
    else:
        raise invalid("missing", "body.text_1", "Field required", shown(fields))
    if len(left) not in (1, len(right)):
        raise bad_request("Input lengths must be either 1:1, 1:N or N:N")
    pairs = zip_longest(left, right, fillvalue=left[0])
    return PoolingCall("score", model_of(fields), tuple(_pair(one, other) for one, other in pairs))


def parse_rerank(fields: Json) -> PoolingCall:
    """A body of /rerank."""
    top_n = integer(fields, "top_n") or 0
    if top_n < 0:
        message = "Input should be greater than or equal to 0"
        raise invalid("greater_than_equal", "body.top_n", message, shown(top_n))
    (query,) = _texts(fields, "query")[:1]
    documents = required(fields, "documents")
    prompts = tuple(_pair(query, text) for text in _texts(fields, "documents"))
    given = documents if isinstance(documents, list) else [documents]
    return PoolingCall("rerank", model_of(fields), prompts, documents=given, top_n=top_n)


def _pair(one: bytes, other: bytes) -> bytes:
    return pad(one + b"\n", b"\n") + other


def _texts(fields: Json, name: str) -> list[bytes]:
    """One text or several; a document may be an object with content parts, of which texts count."""
    given = required(fields, name)
    several = given if isinstance(given, list) else [given]
    if not 1 <= len(several) <= MAX_SEQUENCES:
        raise refused(f"There must be 1 to {MAX_SEQUENCES} texts.", name, len(several))
    return [_text(one, name) for one in several]


def _text(one: object, name: str) -> bytes:
    if isinstance(one, str):
        return one.encode()
    parts = one.get("content") if isinstance(one, dict) else None
    if isinstance(parts, list):
        texts = (part.get("text") for part in parts if isinstance(part, dict))
        return "".join(text for text in texts if isinstance(text, str)).encode()
    raise invalid("string_type", f"body.{name}", "Input should be a valid string", shown(one))


# Responses.


def response_body(identity: Identity, call: PoolingCall, choices: Sequence[PlannedChoice]) -> bytes:
    tokens = prompt_tokens_of(choices)
    used: Json = {"prompt_tokens": tokens, "total_tokens": tokens}
    if call.kind == "rerank":
        return dump({"id": identity.id, "model": identity.model, "usage": used, "results": _reranked(call)})
    used |= {"completion_tokens": 0, "prompt_tokens_details": None}
    data = [_datum(call, index, prompt) for index, prompt in enumerate(call.prompts)]
    return dump(identity.head("list") | {"data": data, "usage": used})


def _datum(call: PoolingCall, index: int, prompt: bytes) -> Json:
    if call.kind == "score":
        return {"index": index, "object": "score", "score": score(prompt)}
    if call.kind == "classify":
        first = score(prompt)
        label = "LABEL_0" if first >= 0.5 else "LABEL_1"
        return {"index": index, "label": label, "probs": [first, 1 - first], "num_classes": 2}
    vector: list[float] | str = embedding(prompt, call.dimensions)
    if call.as_base64:
        vector = base64.b64encode(struct.pack(f"<{call.dimensions}f", *vector)).decode("ascii")
    if call.kind == "pooling":
        return {"index": index, "object": "pooling", "data": vector}
    return {"index": index, "object": "embedding", "embedding": vector}


def _reranked(call: PoolingCall) -> list[Json]:
    results: list[Json] = []
    scores = [score(prompt) for prompt in call.prompts]
    for index in sorted(range(len(scores)), key=lambda one: -scores[one]):
        document = call.documents[index]
        shown_document: Json = {"text": document, "multi_modal": None}
        if isinstance(document, dict):
            shown_document = {"text": None, "multi_modal": document.get("content")}
        results.append({"index": index, "document": shown_document, "relevance_score": scores[index]})
    return results[: call.top_n or len(results)]


def score(text: bytes) -> float:
    """A number from 0 to 1 that depends on all of the text."""
    return int.from_bytes(shake_128(b"score:" + text).digest(4), "little") / (2**32 - 1)


# Tokens.


def parse_tokenize(fields: Json) -> tuple[str | None, bytes, bool]:
    """A body of /tokenize, with a prompt, messages, or llama.cpp's `content`: the model, the text, and whether each
    token's is wanted.
    """
    wanted = boolean(fields, "return_token_strs")
    if "messages" in fields:
        return model_of(fields), chat_prompt(fields)[0], wanted
    prompt = fields["content"] if "content" in fields else required(fields, "prompt")
    if not isinstance(prompt, str):
        raise invalid("string_type", "body.prompt", "Input should be a valid string", shown(prompt))
    return model_of(fields), prompt.encode(), wanted


def tokenize_body(text: bytes, max_model_len: int, *, with_strings: bool) -> bytes:
    ids = to_token_ids(text)
    strings = None
    if with_strings:
        pieces = (text[at : at + TOKEN_BYTES] for at in range(0, len(text), TOKEN_BYTES))
        strings = [piece.decode("utf-8", "replace") for piece in pieces]
    return dump({"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": strings})


def parse_detokenize(fields: Json) -> tuple[str | None, str]:
    """A body of /detokenize: the model and the text of the tokens."""
    tokens = required(fields, "tokens")
    if not isinstance(tokens, list):
        raise invalid("list_type", "body.tokens", "Input should be a valid list", shown(tokens))
    return model_of(fields), text_of_ids(tokens, "tokens").rstrip(b"\0").decode("utf-8", "replace")
