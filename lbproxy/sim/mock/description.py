# SPDX-License-Identifier: Apache-2.0
"""How SGLang and llama.cpp describe themselves, as far as somebody reads it: how much their cache holds and
how many requests they run at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson

from lbproxy.sim.mock.apis.fields import Json

DESCRIPTIONS: Mapping[str, tuple[str, ...]] = {
    "sglang": ("/server_info", "/get_server_info"),
    "llamacpp": ("/props",),
}
"""Where, by the engine."""


def describe(engine: str, kv_tokens: int, slots: int, *, role: str = "both", bootstrap_port: int = 8998) -> bytes:
    """The page of an engine whose cache holds `kv_tokens` and that runs `slots` requests at a time. llama.cpp says how
    many tokens each of these has, rounded down. SGLang's says what `role` it has, if not both.
    """
    pages: Mapping[str, Mapping[str, object]] = {
        "sglang": {
            "max_running_requests": None,
            "max_total_num_tokens": kv_tokens,
            "dp_size": 1,
            "disaggregation_mode": "null" if role == "both" else role,
            "disaggregation_bootstrap_port": bootstrap_port,
            "disaggregation_transfer_backend": "mooncake",
            "disaggregation_decode_enable_radix_cache": False,
            "internal_states": [{"effective_max_running_requests_per_dp": slots}],
        },
        "llamacpp": {"total_slots": slots, "default_generation_settings": {"n_ctx": kv_tokens // slots}},
    }
    return orjson.dumps(pages[engine])


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
