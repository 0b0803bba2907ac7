# SPDX-License-Identifier: Apache-2.0
"""`lbproxy` before a simulated Ollama that the settings do not name: recognised by its API, in each process."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest

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
