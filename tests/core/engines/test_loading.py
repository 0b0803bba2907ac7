# SPDX-License-Identifier: Apache-2.0
"""Where engines that load models on demand say which are in memory."""

from __future__ import annotations

import orjson
import pytest

from lbproxy.core.engines.loading import LOADERS, InMemory, loader_named, loads_always, read_loaded
from lbproxy.core.requests.openai import MAX_MODEL_CARDS

PAGES = {(name, page.path): page for name, one in LOADERS.items() for page in one.pages}
EXPECTED: dict[tuple[str, str], tuple[dict[str, list[dict[str, object]]], InMemory]] = {
    ("ollama", "/api/ps"): (
        {
            "models": [
                {"name": "a:8b", "model": "a:8b", "size": 6591830464, "size_vram": 5333539264, "context_length": 4096},
                {"name": "b:latest", "model": "b:latest", "size": 1},
            ]
        },
        {"a:8b": 4096, "b:latest": None, "b": None},
    ),
    ("llamacpp", "/v1/models"): (
        {
            "data": [
                {
                    "id": "one-GGUF:Q4_K_M",
                    "aliases": ["one", 7],
                    "object": "model",
                    "owned_by": "llamacpp",
                    "created": 1,
                    "status": {"value": "loaded", "args": ["llama-server", "-ctx", "4096"]},
                    "source": "cache",
                    "meta": {"n_ctx": 4096, "n_ctx_train": 131072},
                },
                {"id": "two", "status": {"value": "loaded", "args": []}},
                {"id": "three", "status": {"value": "unloaded", "exit_code": 1, "failed": True}},
                *(
                    dict[str, object](id=value, status={"value": value}, meta={"n_ctx": 4096})
                    for value in ("loading", "sleeping", "downloading", "downloaded", "of a later version")
                ),
            ]
        },
        {"one-GGUF:Q4_K_M": 4096, "one": 4096, "two": None},
    ),
    ("lmstudio", "/api/v1/models"): (
        {
            "models": [
                {
                    "type": "llm",
                    "key": "a",
                    "loaded_instances": [{"id": "a", "config": {"context_length": 4096, "flash_attention": True}}],
                    "max_context_length": 32768,
                },
                {
                    "type": "llm",
                    "key": "b",
                    "loaded_instances": [{"id": "mine", "config": {"context_length": 4096}}, {"id": "b:2"}],
                },
                {"type": "embedding", "key": "c", "loaded_instances": [], "max_context_length": 2048},
            ]
        },
        {"a": 4096, "b": None, "mine": 4096, "b:2": None},
    ),
    ("lmstudio", "/api/v0/models"): (
        {
            "data": [
                {"id": "a", "type": "llm", "state": "loaded", "loaded_context_length": 4096},
                {"id": "b", "type": "vlm", "state": "loaded", "max_context_length": 32768},
                {"id": "c", "type": "embeddings", "state": "not-loaded", "max_context_length": 2048},
                {"id": "d", "type": "llm", "state": "loading"},
            ]
        },
        {"a": 4096, "b": None},
    ),
}
"""Of each page what it may say, and what is read."""
NAMES = {"/api/ps": "name", "/v1/models": "id", "/api/v1/models": "key", "/api/v0/models": "id"}


@pytest.mark.parametrize("key", PAGES)
def test_the_models_in_memory_are_read(key: tuple[str, str]) -> None:
    page, expected = EXPECTED[key]
    assert read_loaded(PAGES[key], orjson.dumps(page)) == expected


@pytest.mark.parametrize("key", PAGES)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"error":"Unexpected endpoint or method. (GET /api/v1/models)"}',
        b'{"models":{},"data":{},"running":{}}',
        b'{"models":null,"data":null,"running":"x"}',
        b"[" * 200_000 + b"]" * 200_000,
        b"<html>",
    ],
    ids=lambda body: body[:20].decode(),
)
def test_another_page_says_nothing(key: tuple[str, str], body: bytes) -> None:
    """Which is not the same as that nothing is in memory."""
    assert read_loaded(PAGES[key], body) is None


@pytest.mark.parametrize("key", PAGES)
@pytest.mark.parametrize("value", [None, 1, True, [], {}, [None], {"value": 1}, {"config": 1}, 1.5, -1, 2**62])
def test_a_field_in_another_form_is_no_model(key: tuple[str, str], value: object) -> None:
    """Nor a length, and all others are read."""
    page, expected = EXPECTED[key]
    entries = page[PAGES[key].entries]
    spoilt = [one | {field: value} for one in entries for field in one]
    body = orjson.dumps({PAGES[key].entries: [*spoilt, value, *entries]})
    said = read_loaded(PAGES[key], body)
    assert said is not None
    assert {name: said[name] for name in expected} == expected
    assert all(tokens is None or tokens in {4096} for tokens in said.values())


@pytest.mark.parametrize("key", PAGES)
def test_a_page_is_read_up_to_a_number_of_models(key: tuple[str, str]) -> None:
    """All else that is counted of them has a bound then."""
    page, _ = EXPECTED[key]
    first = page[PAGES[key].entries][0]
    listed = [first | {NAMES[key[1]]: f"m{number}"} for number in range(MAX_MODEL_CARDS + 1)]
    said = read_loaded(PAGES[key], orjson.dumps({PAGES[key].entries: listed}))
    assert said is None or len(said) <= MAX_MODEL_CARDS


def test_a_llama_cpp_of_one_model_is_no_router() -> None:
    """It has no states."""
    page = PAGES["llamacpp", "/v1/models"]
    assert read_loaded(page, b'{"data":[{"id":"m","owned_by":"llamacpp","meta":{"n_ctx":4096}}]}') is None
    assert not loads_always("llamacpp")
    assert loads_always("ollama")
    assert loads_always("lmstudio")
    assert not loads_always("vllm")


@pytest.mark.parametrize(
    ("owner", "engine"),
    [("llamacpp", "llamacpp"), ("organization_owner", "lmstudio"), ("library", None), ("vllm", None), (None, None)],
)
def test_the_owner_of_models_names_an_engine(owner: str | None, engine: str | None) -> None:
    assert loader_named(owner) == engine
