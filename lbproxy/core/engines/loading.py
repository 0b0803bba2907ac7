# SPDX-License-Identifier: Apache-2.0
"""Engines that load models when somebody asks for them: where each says which are in memory, and how it says that.

`LOADERS` has all that differs from engine to engine; the prober asks. The pages are not trusted: an entry in another
form is no model in memory, a page in another form says nothing, and nothing is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple, TypeAlias

import orjson

from lbproxy.core.engines.server_info import read_number
from lbproxy.core.requests.models import LATEST
from lbproxy.core.requests.openai import MAX_MODEL_CARDS
from lbproxy.core.requests.outline import is_light

InMemory: TypeAlias = dict[str, int | None]
"""The models in memory by all of their names, with the longest prompt in tokens that each takes there; None: not said.
"""
Fields: TypeAlias = Mapping[str, object]


class LoadedPage(NamedTuple):
    """Where an engine says what is in memory."""

    path: str
    entries: str
    """The field that lists its models. Without it the page says nothing."""
    read: Callable[[Fields], InMemory | None]
    """From an entry to what is in memory of it: nothing, or the model by its names. None: it does not say."""


class Loader(NamedTuple):
    """An engine that loads models on demand."""

    pages: tuple[LoadedPage, ...]
    """In different versions, the newest first."""
    owner: str | None = None
    """The `owned_by` of its models by which it is recognised, if one of its pages then says what is in memory."""
    always: bool = True
    """Each of its servers does, not only some."""


def _ollama(entry: Fields) -> InMemory:
    """/api/ps has only those that are in memory. A name without a tag means the latest."""
    found = _one(entry.get("name"), entry.get("context_length"))
    return found | {name.removesuffix(LATEST): tokens for name, tokens in found.items()}


def _llama_cpp(entry: Fields) -> InMemory | None:
    """A router has a state for each model, a server of one model has none (tools/server/server-models.cpp).
    One that sleeps has given its memory back, though its process counts for `--models-max`: it may be the next to go,
    as any that is idle. `n_ctx` is that of a slot.
    """
    status, meta = entry.get("status"), entry.get("meta")
    value = status.get("value") if isinstance(status, dict) else None
    if not isinstance(value, str):
        return None
    if value != "loaded":
        return {}
    found: InMemory = {}
    tokens = meta.get("n_ctx") if isinstance(meta, dict) else None
    for name in [entry.get("id"), *(aliases if isinstance(aliases := entry.get("aliases"), list) else ())]:
        found |= _one(name, tokens)
    return found


def _lm_studio(entry: Fields) -> InMemory | None:
    """A model has instances, each with a name of its own, which is the model's unless somebody gave another. Requests
    may use either.
    """
    instances = entry.get("loaded_instances")
    if not isinstance(instances, list):
        return None
    found: InMemory = {}
    for one in instances:
        if isinstance(one, dict):
            config = one.get("config")
            found |= _one(one.get("id"), config.get("context_length") if isinstance(config, dict) else None)
    return _one(entry.get("key"), None) | found if found else {}


def _lm_studio_v0(entry: Fields) -> InMemory | None:
    state = entry.get("state")
    if not isinstance(state, str):
        return None
    return _one(entry.get("id"), entry.get("loaded_context_length")) if state == "loaded" else {}


def _one(name: object, tokens: object) -> InMemory:
    return {name: read_number(tokens)} if isinstance(name, str) else {}


LOADERS: Mapping[str, Loader] = {
    "ollama": Loader((LoadedPage("/api/ps", "models", _ollama),)),
    "llamacpp": Loader((LoadedPage("/v1/models", "data", _llama_cpp),), owner="llamacpp", always=False),
    "lmstudio": Loader(  # a path that a version does not have is a 200 with an error
        (LoadedPage("/api/v1/models", "models", _lm_studio), LoadedPage("/api/v0/models", "data", _lm_studio_v0)),
        owner="organization_owner",
    ),
}
"""By the name in the settings."""


def read_loaded(page: LoadedPage, body: bytes) -> InMemory | None:
    """What a page says of the models in memory; None if it says nothing of that."""
    if not is_light(body):
        return None
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    listed = said.get(page.entries) if isinstance(said, dict) else None
    if not isinstance(listed, list):
        return None
    found = [page.read(entry) for entry in listed[:MAX_MODEL_CARDS] if isinstance(entry, dict)]
    if found and all(one is None for one in found):
        return None
    return dict(islice(_joined(found), MAX_MODEL_CARDS))


def _joined(found: list[InMemory | None]) -> Iterator[tuple[str, int | None]]:
    for one in found:
        yield from (one or {}).items()


def loads_always(engine: str) -> bool:
    """Whether each server of an engine loads models on demand."""
    return engine in LOADERS and LOADERS[engine].always


def loader_named(owner: str | None) -> str | None:
    """The engine that may load models on demand, by the `owned_by` of its models; None: another."""
    return next((name for name, one in LOADERS.items() if one.owner is not None and one.owner == owner), None)
