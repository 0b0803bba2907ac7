# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters through lbproxy, on simulated servers: listed, loaded and unloaded at run time, used at once."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.support.aio import run, until
from tests.support.process import lbproxy, mock

SETTINGS = "lora_management: true\nhealth: {models_interval: 1h}\n"
SERVER = ["--speed", "20", "--adapter", "a", "--max-loras", "2", "--lora-updates"]


def ask(http: httpx.Client, url: str, model: str) -> httpx.Response:
    return http.post(f"{url}/v1/completions", json={"model": model, "prompt": "x", "max_tokens": 2})


def test_an_adapter_is_usable_as_soon_as_it_is_loaded_and_gone_as_soon_as_it_is_unloaded(tmp_path: Path) -> None:
    """Models are asked for once an hour here: what is known at once comes from the call itself."""
    with (
        mock(*SERVER) as (_, one),
        mock(*SERVER) as (_, two),
        lbproxy(tmp_path, [one, two], SETTINGS) as (_, url, admin),
        httpx.Client(timeout=30) as http,
    ):
        run(until(lambda: httpx.get(f"{admin}/readyz").json()["endpoints"]["up"] == 2))
        parents = {card["id"]: card["parent"] for card in http.get(f"{url}/v1/models").json()["data"]}
        assert parents == {"sim": None, "a": "sim"}
        assert ask(http, url, "new").status_code == 404
        loaded = http.post(f"{url}/v1/load_lora_adapter", json={"lora_name": "new", "lora_path": "/new"})
        assert (loaded.status_code, [one["status"] for one in loaded.json()["data"]]) == (200, [200, 200])
        assert {ask(http, url, "new").status_code for _ in range(6)} == {200}
        # One server loses it behind lbproxy's back.
        assert http.post(f"{one}/v1/unload_lora_adapter", json={"lora_name": "new"}).status_code == 200
        answers = [ask(http, url, "new") for _ in range(6)]
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-lbproxy-endpoint"] for answer in answers} == {two.removeprefix("http://")}
        unloaded = http.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": "new"})
        assert unloaded.status_code == 404, "the worst of the two"
        assert sorted(one["status"] for one in unloaded.json()["data"]) == [200, 404]
        answer = ask(http, url, "new")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert ask(http, url, "a").status_code == 200
