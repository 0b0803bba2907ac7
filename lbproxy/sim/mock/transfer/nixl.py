# SPDX-License-Identifier: Apache-2.0
"""`kv_transfer_params` of vLLM's NIXL connector: what a request may say, and what the response of a prefill says.

vLLM checks nearly nothing of it, and some of what it lets pass kills the engine or hangs the request (docs/decisions/
0041, section 3.5). So does this: `Pull` says what becomes of a request. What vLLM has no defined behaviour for, such as
a port that is a text, is refused with 400.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from lbproxy.sim.mock.apis.fields import Json, boolean, invalid, shown, typed

NAME = "kv_transfer_params"
MAX_NAME = 512
"""Characters of an id or a host."""
MAX_BLOCKS = 2**20
_REQUIRED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class Pull(Enum):
    """What a request to decode comes to."""

    READS = "reads"
    HANGS = "hangs"
    """It waits for KV that nobody is asked for."""
    KILLS = "kills"
    """An assertion in the engine fails."""


@dataclass(frozen=True, slots=True)
class NixlParams:
    """The params of one request, checked. Neither `is_prefill` nor `pull`: they ask for nothing."""

    is_prefill: bool = False
    pull: Pull | None = None
    engine_id: str = ""
    request_id: str = ""
    host: str = ""
    port: int = 0
    cached_tokens: int | None = None
    """Cached tokens of the prefill, to be reported."""


def parse(fields: Json) -> NixlParams | None:
    """What a body says; None = nothing. Raises ApiError."""
    given = typed(fields, NAME, dict, "dict")
    if given is None:
        return None
    prefills, decodes = boolean(given, "do_remote_decode"), boolean(given, "do_remote_prefill")
    blocks = _blocks(given)
    for name in _REQUIRED[:3]:
        text = typed(given, name, str, "string")
        if text is not None and not (len(text) <= MAX_NAME and text.isprintable()):
            raise invalid("string_too_long", f"body.{NAME}.{name}", f"at most {MAX_NAME} characters", shown(text))
    port = _whole(given, "remote_port", 65535)
    for name in ("tp_size", "dcp_size", "pp_size", "remote_num_tokens", "remote_registration_generation"):
        _whole(given, name, 2**31)
    cached = _whole(given, "remote_prefill_cached_tokens", 2**31)
    if not decodes:
        return NixlParams(is_prefill=prefills)
    if not any(blocks):
        return NixlParams(pull=Pull.KILLS)
    if any(not given.get(name) for name in _REQUIRED):
        return NixlParams(pull=Pull.HANGS)
    engine_id, request_id, host = (str(given[name]) for name in _REQUIRED[:3])
    return NixlParams(False, Pull.READS, engine_id, request_id, host, port or 0, cached)


def _blocks(given: Json) -> list[list[object]]:
    """`remote_block_ids`: a list of lists of ids, one for each group of layers; older vLLM had one list."""
    groups = typed(given, "remote_block_ids", list, "list") or []
    if groups and not isinstance(groups[0], list):
        groups = [groups]
    if not all(isinstance(group, list) for group in groups) or sum(map(len, groups)) > MAX_BLOCKS:
        raise invalid("list_type", f"body.{NAME}.remote_block_ids", "Input should be a valid list", shown(groups))
    if not all(type(block) is int and block >= 0 for group in groups for block in group):
        raise invalid("int_type", f"body.{NAME}.remote_block_ids", "Input should be block ids", shown(groups))
    return groups


def _whole(given: Json, name: str, at_most: int) -> int | None:
    value = given.get(name)
    if value is None or (type(value) is int and 0 <= value <= at_most):
        return value if isinstance(value, int) else None
    raise invalid("int_type", f"body.{NAME}.{name}", "Input should be a valid integer", shown(value))


def response_params(
    *, blocks: Sequence[int], engine_id: str, request_id: str, address: tuple[str, int], tokens: int, cached: int
) -> Json:
    """What the response of a prefill says of its KV, which is held."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(blocks)],
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": address[0],
        "remote_port": address[1],
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": None,
        "remote_registration_generation": 0,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": cached,
    }
