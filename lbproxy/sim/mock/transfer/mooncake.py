# SPDX-License-Identifier: Apache-2.0
"""`kv_transfer_params` of vLLM's Mooncake connector, and the page by which decodes find workers.

Prefill and decode meet by `transfer_id`, in either order; see docs/decisions/0041, section 4. A wrong role kills the
engine, a missing field hangs the request. Values of the wrong type are refused with 400, as with NIXL.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

import orjson

from lbproxy.sim.mock.apis.fields import EngineError, Json, boolean, invalid, load_json, shown, typed
from lbproxy.sim.mock.transfer.nixl import MAX_NAME, NAME

QUERY_PATH = "/query"
_REQUIRED = ("transfer_id", "remote_bootstrap_addr", "remote_engine_id")


@dataclass(frozen=True, slots=True)
class MooncakeParams:
    """The params of one request, checked. A decode that is not `is_complete` waits for ever."""

    is_prefill: bool
    is_decode: bool
    transfer_id: str
    bootstrap: str = ""
    engine_id: str = ""
    is_complete: bool = False

    def kills(self, role: str) -> bool:
        """Whether this is the wrong half for a server of that role."""
        return (self.is_decode and role == "prefill") or (self.is_prefill and role == "decode")


def parse(fields: Json) -> MooncakeParams | None:
    """What a body says; None = nothing. Raises ApiError."""
    given = typed(fields, NAME, dict, "dict")
    if given is None:
        return None
    prefills, decodes = boolean(given, "do_remote_decode"), boolean(given, "do_remote_prefill")
    for name in _REQUIRED:
        text = typed(given, name, str, "string")
        if text is not None and not (len(text) <= MAX_NAME and text.isprintable() and " " not in text):
            raise invalid("string_type", f"body.{NAME}.{name}", f"one word of {MAX_NAME} characters", shown(text))
    transfer_id, bootstrap, engine_id = (str(given.get(name) or "") for name in _REQUIRED)
    if not prefills and not decodes:
        return None
    complete = bool(transfer_id and bootstrap and engine_id)
    return MooncakeParams(prefills, decodes, transfer_id, bootstrap, engine_id, complete)


def query_body(engine_id: str, address: tuple[str, int]) -> bytes:
    """The page at a prefill's bootstrap port: its one rank, and where the one worker of that is."""
    worker = {"0": {"0": f"tcp://{address[0]}:{address[1]}"}}
    return orjson.dumps({"0": {"engine_id": engine_id, "worker_addr": worker}})


def worker_of(body: bytes, engine_id: str) -> tuple[str, int] | None:
    """Where the worker of an engine is, by such a page; None = it is not there."""
    try:
        for rank in load_json(body).values():
            if isinstance(rank, dict) and rank.get("engine_id") == engine_id:
                where = urlsplit(str(rank["worker_addr"]["0"]["0"]))
                return (where.hostname, where.port) if where.hostname and where.port else None
    except (EngineError, KeyError, TypeError, ValueError):
        return None
    return None
