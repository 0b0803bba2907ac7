# SPDX-License-Identifier: Apache-2.0
"""The pages on which engines that load models on demand say which are in memory; Ollama's are with its API.

Fields are those of the engines' sources and documentation.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from lbproxy.sim.engine.on_demand import OnDemandEngine
from lbproxy.sim.mock.apis.fields import Json


def llama_cpp_models(engine: OnDemandEngine, names: Sequence[str], created: int) -> bytes:
    """The body of a router's /v1/models and /models."""
    loaded, loading = engine.resident(), engine.loading()

    def entry(name: str) -> Json:
        value = "loaded" if name in loaded else "loading" if name in loading else "unloaded"
        status: Json = {"value": value, "args": ["llama-server", "--alias", name]}
        card: Json = {"id": name, "aliases": [], "tags": [], "object": "model", "owned_by": "llamacpp"}
        card |= {"created": created, "status": status, "source": "models_dir", "can_remove": False}
        return card | ({"meta": {"n_ctx": engine.max_model_len}} if value == "loaded" else {})

    return orjson.dumps({"data": [entry(name) for name in names], "object": "list"})


def llama_cpp_props(most: int) -> bytes:
    """The body of a router's /props: what it says of contexts is no context."""
    settings = {"params": {}, "n_ctx": 0}
    return orjson.dumps({"role": "router", "max_instances": most, "default_generation_settings": settings})
