# SPDX-License-Identifier: Apache-2.0
"""The bodies of the two legs of a split request, and what prefill returns for decode. Pure.

docs/decisions/0041 says what each engine wants of them, and which requests it cannot split. What an endpoint returns is
not trusted: an incomplete hand-over makes decode wait for ever, or kills its engine.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any, Final

import orjson

from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.outline import PARSE_AT_ONCE_BYTES, cost, is_light
from lbproxy.core.requests.request import Usage
from lbproxy.core.responses.usage import read_usage

MAX_COST: Final = 4_000_000
"""The most that a split body may cost (see `core.requests.outline`): it is parsed and written at once, in 10 ms."""
MAX_HANDOVER_BYTES: Final = 8 << 20
"""What prefill returns: 6 bytes for each block of the prompt, and one token."""
MAX_WRITTEN_DEPTH: Final = 250
"""How deep orjson writes what it has read: 254 levels."""
MAX_ROOM: Final = (1 << 63) - 1

KV_PARAMS: Final = "kv_transfer_params"
OWN_FIELDS: Final = (
    *(KV_PARAMS, "ec_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank"),
)
"""Fields by which legs find each other. From a client they could take another request's KV cache, or kill an engine."""
_MORE_FIELDS: Final = "vllm_xargs"
"""An object whose members vLLM puts beside the fields of its own that `OWN_FIELDS` become, or in their place."""
_LIMITS: Final = {
    "completions": "max_tokens",
    "chat_completions": "max_tokens",
    "messages": "max_tokens",
    "responses": "max_output_tokens",
}
"""Routes whose requests may be split, and the field with the length of the response."""
_LIMIT_FIELDS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def refuse_own_fields(fields: Mapping[str, object], body: bytes) -> None:
    """Raise LbError RESERVED_FIELD if a client sets what only lbproxy may set where prefill and decode are apart.

    `fields`: its parsed body. A null says nothing, unless the same key stands there a second time: a server may read
    that one.
    """
    more = fields.get(_MORE_FIELDS)
    for name in OWN_FIELDS:
        is_set = name in fields and (fields[name] is not None or _may_be_repeated(name, body))
        if is_set or (isinstance(more, dict) and name in more):
            raise LbError(Outcome.RESERVED_FIELD, f"`{name}` cannot be set here: lbproxy sets it itself.", param=name)


def _may_be_repeated(name: str, body: bytes) -> bool:
    """Whether a key that is in a JSON body may be there more than once, in whatever spelling and at whatever depth. A
    large body is not searched.
    """
    if len(body) > PARSE_AT_ONCE_BYTES:
        return True
    spelled = b"".join(rb"(?:%c|\\u00(?i:%02x))" % (each, each) for each in name.encode())
    return len(re.findall(b'"%b"' % spelled, body)) > 1


def is_splittable(route: str, fields: Mapping[str, Any], body: bytes) -> bool:
    """Whether a request can be prefilled at one endpoint and decoded at another: one prompt and one response of more
    than one token, of a kind that engines hand over. `fields`: its parsed body, whose values may be of any type: what
    is not understood here is not split.
    """
    # No sets: what a client sends may have no hash.
    if route not in _LIMITS or any(fields.get(name) not in (None, 1) for name in ("n", "best_of")):
        return False
    if any(fields.get(name) for name in ("use_beam_search", "echo", "prompt_embeds", "background")):
        return False
    if any(not _is_limit(fields.get(name)) for name in _LIMIT_FIELDS):
        return False
    if fields.get("prompt_logprobs") is not None:
        return False
    if route == "responses" and (fields.get("store") is not False or fields.get("previous_response_id")):
        return False
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) != 1 and not (prompt and isinstance(prompt[0], int)):
        return False
    return cost(body) <= MAX_COST


def _is_limit(value: object) -> bool:
    """Whether a limit of the response's length leaves more than one token to decode. None: there is no limit."""
    return value is None or (isinstance(value, int) and value > 1)


class Bodies:
    """The bodies of one request's legs. Raises ValueError if the body cannot be read again, or not be written."""

    def __init__(self, route: str, body: bytes) -> None:
        self._route, self._body = route, body
        fields = orjson.loads(body)
        if not isinstance(fields, dict):
            raise ValueError("no object")
        if body.count(b"{") + body.count(b"[") > MAX_WRITTEN_DEPTH:
            try:
                orjson.dumps(fields)
            except orjson.JSONEncodeError as error:
                raise ValueError(str(error)) from None
        self._fields: dict[str, Any] = fields

    def first(self, params: Mapping[str, object] | None, *, min_tokens: int | None = None) -> bytes:
        """For prefill in vLLM: one token, not streamed. `params`: its `kv_transfer_params`, if it needs any."""
        fields = {**self._fields, "stream": False}
        for name in ("stream_options", "min_tokens"):
            fields.pop(name, None)
        if min_tokens is not None:
            fields["min_tokens"] = min_tokens
        for name in _LIMIT_FIELDS:
            if fields.get(name) is not None:
                fields[name] = 1
        fields[_LIMITS[self._route]] = 1
        if "max_completion_tokens" in fields:
            fields.pop("max_tokens", None)
        if params is not None:
            fields[KV_PARAMS] = params
        return orjson.dumps(fields)

    def second(self, params: Mapping[str, object] | None) -> bytes:
        """For decode in vLLM: as the client sent it, with `kv_transfer_params`. None: unchanged."""
        return self._body if params is None else self.with_fields({KV_PARAMS: params})

    def with_fields(self, more: Mapping[str, object]) -> bytes:
        """As the client sent it, with more fields: the bytes of its own stay."""
        if any(name in self._fields for name in more):  # null, from the client: a key must not occur twice
            return orjson.dumps({**self._fields, **more})
        end = self._body.rstrip().removesuffix(b"}")
        return b"%b,%b" % (end, orjson.dumps(more)[1:])


NIXL_FIRST: Final = {"do_remote_decode": True, "do_remote_prefill": False}


def nixl_second(body: bytes) -> Mapping[str, object] | None:
    """What prefill with NIXL returned for decode, verbatim; None if it is incomplete: decode computes the prompt."""
    params = _fields_of(body).get(KV_PARAMS)
    if not isinstance(params, dict) or params.get("do_remote_prefill") is not True:
        return None
    blocks = params.get("remote_block_ids")
    if not isinstance(blocks, list) or not any(blocks):  # a list, or one for each group of the KV cache
        return None
    try:
        orjson.dumps({KV_PARAMS: params})
    except orjson.JSONEncodeError:  # nested too deep
        return None
    named = all(isinstance(params.get(name), str) and params[name] for name in ("remote_engine_id", "remote_host"))
    port = params.get("remote_port")
    return params if named and isinstance(port, int) and not isinstance(port, bool) else None


def mooncake_first(transfer_id: str) -> Mapping[str, object]:
    """For prefill with Mooncake in vLLM."""
    return {**NIXL_FIRST, "transfer_id": transfer_id}


def mooncake_second(transfer_id: str, bootstrap: str, engine_id: str) -> Mapping[str, object]:
    """For decode with Mooncake in vLLM. `bootstrap`: `http://host:port` of prefill."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_bootstrap_addr": bootstrap,
        "remote_engine_id": engine_id,
        "transfer_id": transfer_id,
    }


def read_engine_ids(page: bytes) -> dict[int, str]:
    """The engine ids on Mooncake's bootstrap page, by rank. Empty if it is no such page."""
    found = {}
    for rank, entry in _fields_of(page).items():
        engine_id = entry.get("engine_id") if isinstance(entry, dict) else None
        if rank.isdecimal() and isinstance(engine_id, str) and 0 < len(engine_id) <= 256:
            found[int(rank)] = engine_id
    return found


def sglang_rooms(host: str, port: int, rank: int | None, ranks: int, rng: random.Random) -> Mapping[str, object]:
    """For both legs in SGLang: where they meet. Prefill takes the room by its rank, as `bootstrap_room % ranks`."""
    room = rng.randrange(MAX_ROOM)
    if rank is not None:
        room = room - room % ranks + rank
        room = room if room <= MAX_ROOM else rank
    return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}


def first_usage(body: bytes) -> Usage | None:
    """What prefill used: its response has no part in what the client gets."""
    usage = read_usage(body)
    return None if usage is None else Usage(usage.prompt_tokens, usage.cached_tokens, None, usage.written_tokens)


def _fields_of(page: bytes) -> dict[str, Any]:
    if not is_light(page):
        return {}
    try:
        fields = orjson.loads(page)
    except orjson.JSONDecodeError:
        return {}
    return fields if isinstance(fields, dict) else {}
