# SPDX-License-Identifier: Apache-2.0
"""`lbproxy` before simulated servers that load models on demand, which the settings do not name, in each process."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.aio import run, until
from tests.support.process import lbproxy, mock


@pytest.mark.parametrize("workers", ["", "workers: 2\n"])
@pytest.mark.parametrize("engine", ["ollama", "llamacpp", "lmstudio"])
def test_models_are_loaded_where_there_is_room_and_warm_ones_are_used(
    tmp_path: Path, engine: str, workers: str
) -> None:
    """Two boxes with room for one model each, three models that take a second to load."""
    box = ["--engine", engine, "--model", "a", "--adapter", "b", "--adapter", "c", "--max-loaded", "1"]
    box += ["--load-time", "1"]

    def in_memory(admin: str) -> dict[str, str]:
        state = httpx.get(f"{admin}/admin/state").json()["endpoints"]
        return {one["name"]: ", ".join(model["model"] for model in one["in_memory"] or ()) for one in state}

    with (
        mock(*box) as (_, one),
        mock(*box) as (_, two),
        lbproxy(tmp_path, [f"{{url: '{one}', name: one}}", f"{{url: '{two}', name: two}}"], workers) as (
            process,
            listen,
            admin,
        ),
        httpx.Client(base_url=listen, timeout=60) as client,
    ):
        run(until(lambda: process.read().count("serves a") == 2, "both say what they can load"))

        def ask(model: str) -> str:
            body = {"model": model, "prompt": "Hello", "max_tokens": 5}
            response = client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            return response.headers["x-lbproxy-endpoint"]

        homes = {model: ask(model) for model in "ab"}
        assert set(homes.values()) == {"one", "two"}
        for _ in range(3):
            assert {model: ask(model) for model in "ab"} == homes
        run(
            until(lambda: in_memory(admin) == {home: model for model, home in homes.items()}, "both say what they have")
        )
        said = client.get("/v1/models").json()["data"]
        assert {one["id"] for one in said} == {"a", "b", "c"}
        third = ask("c")
        run(until(lambda: in_memory(admin)[third] == "c", "it gave way"))
        rest = next(model for model in "ab" if homes[model] != third)
        assert ask(rest) == homes[rest]
        loads = [line for line in process.lines("sleep") if line["to"] == "waking"]
        # The first may be asked for before it is known what its server has in memory.
        assert [line["model"] for line in loads if line["model"] != "a"] == ["b", "c"]
