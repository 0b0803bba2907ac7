# SPDX-License-Identifier: Apache-2.0
"""The pages on which engines that load models on demand say which are in memory; Ollama's are with its API.

Fields are those of the engines' sources and documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import orjson

from lbproxy.sim.engine.model_server import ModelServer
from lbproxy.sim.engine.on_demand import OnDemandEngine
from lbproxy.sim.mock.apis.fields import Json
from lbproxy.sim.mock.mock_options import MockOptions


def on_demand_pages(options: MockOptions, engine: ModelServer, created: int) -> Mapping[str, Callable[[], bytes]]:
    """The bodies of these pages by path, as they are when they are asked for: none, if it is no such server."""
    names = (options.model, *options.adapters)
    if isinstance(engine, OnDemandEngine) and options.engine == "llamacpp":
        models, props = partial(_llama_cpp, engine, names, created), partial(_llama_cpp_props, options)
        return {"/v1/models": models, "/models": models, "/props": props}
    if isinstance(engine, OnDemandEngine) and options.engine == "lmstudio":
        newer, older = partial(_lm_studio, engine, names), partial(_lm_studio_v0, engine, names)
        return {"/api/v1/models": newer, "/api/v0/models": older}
    return {}


def _llama_cpp(engine: OnDemandEngine, names: Sequence[str], created: int) -> bytes:
    """The body of a router's /v1/models and /models."""
    loaded, loading = engine.resident(), engine.loading()

    def entry(name: str) -> Json:
        value = "loaded" if name in loaded else "loading" if name in loading else "unloaded"
        status: Json = {"value": value, "args": ["llama-server", "--alias", name]}
        card: Json = {"id": name, "aliases": [], "tags": [], "object": "model", "owned_by": "llamacpp"}
        card |= {"created": created, "status": status, "source": "models_dir", "can_remove": False}
        return card | ({"meta": {"n_ctx": engine.max_model_len}} if value == "loaded" else {})

    return orjson.dumps({"data": [entry(name) for name in names], "object": "list"})


def _lm_studio(engine: OnDemandEngine, names: Sequence[str]) -> bytes:
    """The body of /api/v1/models."""
    instance, loaded = {"context_length": engine.max_model_len, "flash_attention": True}, engine.resident()

    def entry(name: str) -> Json:
        instances = [{"id": name, "config": instance}] if name in loaded else []
        card: Json = {"type": "llm", "publisher": "sim", "key": name, "display_name": name, "format": "gguf"}
        return card | {"loaded_instances": instances, "max_context_length": engine.max_model_len}

    return orjson.dumps({"models": [entry(name) for name in names]})


def _lm_studio_v0(engine: OnDemandEngine, names: Sequence[str]) -> bytes:
    """The body of /api/v0/models."""
    loaded = engine.resident()

    def entry(name: str) -> Json:
        card: Json = {"id": name, "object": "model", "type": "llm", "state": "not-loaded"}
        card |= {"max_context_length": engine.max_model_len}
        return card | ({"state": "loaded", "loaded_context_length": engine.max_model_len} if name in loaded else {})

    return orjson.dumps({"object": "list", "data": [entry(name) for name in names]})


def _llama_cpp_props(options: MockOptions) -> bytes:
    """The body of a router's /props: what it says of contexts is no context."""
    settings = {"params": {}, "n_ctx": 0}
    return orjson.dumps(
        {"role": "router", "max_instances": options.max_loaded, "default_generation_settings": settings}
    )
