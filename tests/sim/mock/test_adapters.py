# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of the simulated server, as clients and scrapers see them: what vLLM 0.32 says and does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import openai
import orjson
import pytest

from lbproxy.core.engines.dialects import ENGINES
from lbproxy.core.engines.load_metrics import LoraMetrics
from lbproxy.core.engines.readings import PageReader
from lbproxy.core.requests.openai import read_model_list
from lbproxy.sim.mock.adapters import MAX_SERIES, Adapters
from lbproxy.sim.mock.http import MockOptions, MockServer
from tests.sim.mock.test_http import ENDLESS, HELLO, becomes, run

TWO = MockOptions(speed=50.0, adapters=("a", "b"), max_loras=2)
OPEN = MockOptions(speed=50.0, adapters=("a",), max_loras=2, lora_updates=True)
RECORDED = Path(__file__).parent.parent.parent / "fixtures/http/vllm-0.32.0/models.response.http"


def test_adapters_are_listed_as_vllm_lists_them() -> None:
    async def test(server: MockServer, _: openai.AsyncOpenAI) -> None:
        async with httpx.AsyncClient() as client:
            page = (await client.get(f"{server.url}/v1/models")).content
        cards = read_model_list(page)
        assert cards is not None
        assert [(card.id, card.parent) for card in cards] == [("sim", None), ("a", "sim"), ("b", "sim")]
        real = orjson.loads(RECORDED.read_bytes().partition(b"\r\n\r\n")[2])["data"][1]
        ours = orjson.loads(cards[1].raw)
        assert ours.keys() == real.keys()
        assert ours["max_model_len"] is None

    run(test, TWO)


def test_each_adapter_says_something_else_and_what_it_says_is_its_own() -> None:
    async def test(_: MockServer, client: openai.AsyncOpenAI) -> None:
        said: dict[str, str | None] = {}
        for model in ("sim", "a", "b", "a"):
            answer = await client.chat.completions.create(model=model, messages=HELLO)
            assert answer.model == model
            assert said.setdefault(model, answer.choices[0].message.content) == answer.choices[0].message.content
        assert len(set(said.values())) == 3
        with pytest.raises(openai.NotFoundError, match="`c` does not exist"):
            await client.chat.completions.create(model="c", messages=HELLO)

    run(test, TWO)


async def shown(server: MockServer) -> LoraMetrics | None:
    """What lbproxy makes of its page."""
    async with httpx.AsyncClient() as client:
        page = (await client.get(f"{server.url}/metrics")).content
    reading = PageReader(ENGINES["vllm"], keep_s=1.0).read(page, scraped_at=0.0, wall_time=4e9)
    assert reading.metrics is not None
    return reading.metrics.lora


def test_the_metric_names_adapters_in_use_and_forgets_those_that_are_not() -> None:
    """As vLLM: nothing before the first request, both labels alike, and an idle adapter is not named."""

    async def test(server: MockServer, client: openai.AsyncOpenAI) -> None:
        await client.completions.create(model="sim", prompt="x", max_tokens=2)
        assert await shown(server) is None
        body = {**ENDLESS, "model": "a", "stream": True}
        async with httpx.AsyncClient() as raw, raw.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            await anext(answer.aiter_bytes())
            while (lora := await shown(server)) is None or not lora.running:
                pass
            assert lora == LoraMetrics(frozenset({"a"}), frozenset({"a"}), 2)
        await becomes(server, "vllm:num_requests_running", 0.0)
        await client.completions.create(model="sim", prompt="x", max_tokens=2)
        assert await shown(server) == LoraMetrics(max_lora=2)

    run(test, replace(TWO, speed=5.0))  # at 50 an endless stream may be all that a busy machine does


def test_adapters_come_and_go_at_run_time() -> None:
    async def test(server: MockServer, client: openai.AsyncOpenAI) -> None:
        async with httpx.AsyncClient(base_url=server.url) as raw:

            async def post(path: str, **body: object) -> tuple[int, str]:
                answer = await raw.post(f"/v1/{path}_lora_adapter", json=body)
                return answer.status_code, answer.text

            loaded = await post("load", lora_name="new", lora_path="/somewhere")
            assert loaded == (200, "Success: LoRA adapter 'new' added successfully.")
            await client.chat.completions.create(model="new", messages=HELLO)
            status, text = await post("load", lora_name="new", lora_path="/somewhere")
            assert (status, orjson.loads(text)["error"]["type"]) == (400, "InvalidUserInput")
            assert "has already been loaded" in text
            assert (await post("load", lora_name="new", lora_path="/else", load_inplace=True))[0] == 200
            assert (await post("load", lora_name="new"))[0] == 400
            assert (await post("load", lora_name="sim", lora_path="/x"))[0] == 400
            assert (await post("load", lora_name=["x"], lora_path="/x"))[0] == 400
            unloaded = await post("unload", lora_name="new")
            assert unloaded == (200, "Success: LoRA adapter 'new' removed successfully.")
            status, text = await post("unload", lora_name="new")
            assert (status, orjson.loads(text)["error"]["type"]) == (404, "NotFoundError")
            assert (await post("unload"))[0] == 400
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="new", messages=HELLO)

    run(test, OPEN)


def test_without_permission_there_is_no_such_route() -> None:
    async def test(server: MockServer, _: openai.AsyncOpenAI) -> None:
        async with httpx.AsyncClient() as raw:
            answer = await raw.post(f"{server.url}/v1/load_lora_adapter", json={"lora_name": "n", "lora_path": "/n"})
        assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})

    run(test, TWO)


def test_a_request_outlives_its_adapter() -> None:
    async def test(server: MockServer, _: openai.AsyncOpenAI) -> None:
        body = {**ENDLESS, "model": "a", "stream": True}
        async with httpx.AsyncClient() as raw, raw.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            pieces = answer.aiter_bytes()
            await anext(pieces)
            assert (await raw.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "a"})).status_code == 200
            for _step in range(20):
                assert await anext(pieces)

    run(test, replace(OPEN, speed=5.0))


def test_series_are_bounded() -> None:
    adapters = Adapters("sim", ["a"])
    for n in range(1000):
        adapters.stepped([f"x{n}"], float(n))
    assert len(adapters.series) == MAX_SERIES
    assert list(adapters.series)[-1] == "x999"
