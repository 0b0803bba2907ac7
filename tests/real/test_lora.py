# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters on real vLLM servers: each finds a home, and they come and go at run time, all through lbproxy."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.real.environment import Environment
from tests.real.servers import MODEL, Fleet
from tests.real.test_clients import text_of

REQUESTS, CLIENTS, SETTLING = 120, 4, 24
STRAYS = 0.03


def manage(url: str, what: str, adapter: str, **more: str) -> httpx.Response:
    body = {"lora_name": adapter, "base_model_name": MODEL, **more}
    return httpx.post(f"{url}/v1/{what}_lora_adapter", json=body, timeout=120)


def statuses(answer: httpx.Response) -> dict[str, int]:
    return {one["endpoint"]: one["status"] for one in answer.json()["data"]}


def path_of(parts: Environment, adapter: str) -> str:
    return str(parts.model / "adapters" / adapter)


@pytest.fixture
def three(fleet: Fleet, parts: Environment, found: Callable[[str], None]) -> Iterator[Fleet]:
    """Both servers have x, y and z, which is one more than has room in either, and were never asked for one of them."""
    answers = [
        manage(fleet.url, "load", new, lora_path=path_of(parts, adapter))
        for new, adapter in zip("xyz", "abc", strict=True)
    ]
    for answer in answers:
        assert (answer.status_code, statuses(answer)) == (200, {"vllm-1": 200, "vllm-2": 200})
    found(f"lora: x, y and z loaded through lbproxy: {[statuses(answer) for answer in answers]}")
    yield fleet
    for name in "xyz":
        assert manage(fleet.url, "unload", name).status_code == 200


def test_each_adapter_settles_in_a_home(three: Fleet, found: Callable[[str], None]) -> None:
    """Three adapters, two servers with two slots each. The fourth slot is a second home for one of them, or empty; no
    server has to load an adapter again and again.
    """
    fleet = three
    rng = random.Random(1)
    order = [rng.choice("xyz") for _ in range(REQUESTS)]

    def ask(adapter: str) -> tuple[str, str]:
        text, endpoint = text_of(fleet.url, adapter)
        assert text
        return adapter, endpoint

    with ThreadPoolExecutor(CLIENTS) as clients:
        served = Counter(list(clients.map(ask, order))[SETTLING:])
    for adapter in "xyz":
        where = {server.name: served[adapter, server.name] for server in fleet.vllm}
        found(f"lora: requests for {adapter}, without the first {SETTLING} of all: {where}")
        assert sum(where.values()) > 20, "enough to tell"
    for server in fleet.vllm:
        counts = sorted(served[adapter, server.name] for adapter in "xyz")
        assert counts[0] <= STRAYS * served.total(), "two adapters fit"


def test_adapters_come_and_go_at_run_time(fleet: Fleet, parts: Environment, found: Callable[[str], None]) -> None:
    assert httpx.post(f"{fleet.url}/v1/completions", json={"model": "new", "prompt": "x"}).status_code == 404
    loaded = manage(fleet.url, "load", "new", lora_path=path_of(parts, "a"))
    assert (loaded.status_code, statuses(loaded)) == (200, {"vllm-1": 200, "vllm-2": 200})
    cards = {card["id"]: card.get("parent") for card in httpx.get(f"{fleet.url}/v1/models").json()["data"]}
    assert cards["new"] == MODEL
    assert text_of(fleet.url, "new")[0] == text_of(fleet.url, "a")[0], "the same weights under another name"
    # One of the two loses it, and lbproxy is not told.
    assert manage(fleet.vllm[0].url, "unload", "new").status_code == 200
    served = [text_of(fleet.url, "new")[1] for _ in range(8)]
    assert set(served) == {"vllm-2"}
    unloaded = manage(fleet.url, "unload", "new")
    assert (unloaded.status_code, statuses(unloaded)) == (404, {"vllm-1": 404, "vllm-2": 200})
    assert httpx.post(f"{fleet.url}/v1/completions", json={"model": "new", "prompt": "x"}).status_code == 404
    found(f"lora: new loaded {statuses(loaded)}, 8 of 8 answered after vllm-1 lost it, unloaded {statuses(unloaded)}")
