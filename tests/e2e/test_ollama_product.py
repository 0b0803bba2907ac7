# SPDX-License-Identifier: Apache-2.0
"""`lbproxy` before a simulated Ollama that the settings do not name: recognised by its API, in each process."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest

from tests.support.aio import run, until
from tests.support.process import lbproxy, mock


@pytest.mark.parametrize("workers", ["", "workers: 2\n"])
def test_it_is_recognised(tmp_path: Path, workers: str) -> None:
    """And its API is not asked of the vLLM beside it, which serves the same model."""
    ollama, vllm = ("--model", "m", "--engine", "ollama"), ("--model", "m")
    with (
        mock(*ollama) as (_, one),
        mock(*vllm) as (_, two),
        lbproxy(tmp_path, [one, two], workers) as (process, listen, _admin),
        httpx.Client(base_url=listen, timeout=60) as client,
    ):
        process.wait_for("serves m")
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "options": {"num_predict": 5}}
        end = time.monotonic() + 60
        while client.post("/api/chat", json=body).status_code != 200:
            assert time.monotonic() < end
            time.sleep(0.1)
        for _ in range(6):
            with client.stream("POST", "/api/chat", json=body) as reply:
                said = [json.loads(line) for line in reply.iter_lines()]
            assert (reply.status_code, len(said), said[-1]["eval_count"]) == (200, 6, 5)
        for path in ("/api/tags", "/api/ps"):
            assert [model["name"] for model in client.get(path).json()["models"]] == ["m"]
        assert client.get("/").text == "Ollama is running"
        assert client.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize("workers", ["", "workers: 2\n"])
def test_a_long_prompt_goes_where_the_model_is_loaded_with_a_context_for_it(tmp_path: Path, workers: str) -> None:
    """The other one would cut it without a word."""
    box = ["--engine", "ollama", "--model", "a", "--speed", "50"]
    with (
        mock(*box) as (_, short),
        mock(*box, "--max-model-len", "32768") as (_, long),
        lbproxy(tmp_path, [f"{{url: '{short}', name: short}}", f"{{url: '{long}', name: long}}"], workers) as (
            process,
            listen,
            admin,
        ),
        httpx.Client(base_url=listen, timeout=60) as client,
    ):
        for url in (short, long):
            body: dict[str, object] = {"model": "a", "prompt": "Hello", "options": {"num_predict": 1}}
            assert httpx.post(f"{url}/api/generate", json=body, timeout=60).status_code == 200
        process.wait_for("serves a")

        def loaded() -> bool:
            state = httpx.get(f"{admin}/admin/state").json()["endpoints"]
            return all([one["state"] for one in each["in_memory"] or ()] == ["loaded"] for each in state)

        run(until(loaded, "both say that it is loaded"))

        def home(words: int, number: int) -> str:
            prompt = f"{number} " + "word " * words
            body = {"model": "a", "prompt": prompt, "options": {"num_predict": 1}, "stream": False}
            response = client.post("/api/generate", json=body)
            assert response.status_code == 200, response.text
            return response.headers["x-lbproxy-endpoint"]

        assert {home(20, number) for number in range(20)} == {"short", "long"}
        assert {home(8000, number) for number in range(10)} == {"long"}
