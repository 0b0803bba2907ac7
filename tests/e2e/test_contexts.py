# SPDX-License-Identifier: Apache-2.0
"""Servers whose contexts have different lengths, with OpenAI's SDK: no prompt is refused that one of them takes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.process import lbproxy, mock

LENGTHS = {"short": 256, "middle": 1024, "long": 4096}
PROMPTS: dict[str, Any] = {
    "tiny": "word " * 20,
    "medium": "word " * 600,
    "large": "word " * 2500,
    "dense": "0" * 3200,  # four bytes are a token to the simulated server: near the middle's length
    "ids": [7] * 1000,
}


@pytest.mark.parametrize("workers", ["", "workers: 2\n"])
def test_prompts_of_all_lengths_are_served(tmp_path: Path, workers: str) -> None:
    with (
        mock("--model", "m", "--max-model-len", str(LENGTHS["short"])) as (_, short),
        mock("--model", "m", "--max-model-len", str(LENGTHS["middle"])) as (_, middle),
        mock("--model", "m", "--max-model-len", str(LENGTHS["long"])) as (_, long),
    ):
        listed = [f"{{url: {url}, name: {name}}}" for name, url in zip(LENGTHS, (short, middle, long), strict=True)]
        with lbproxy(tmp_path, listed, f"models: {{alias: m}}\nretry: {{budget_ratio: 0}}\n{workers}") as it:
            process, listen, admin = it
            for name in LENGTHS:
                process.wait_for(f"{name} serves m")
            models = {
                one["id"]: one["max_model_len"] for one in httpx.get(f"{listen}/v1/models", timeout=60).json()["data"]
            }
            assert models == {"m": LENGTHS["long"], "alias": LENGTHS["long"]}
            found: dict[str, Counter[str]] = {}
            with openai.OpenAI(base_url=f"{listen}/v1", api_key="none", max_retries=0, timeout=60) as client:
                for kind, prompt in PROMPTS.items():
                    for stream in (False, True) * 5:
                        got = client.completions.with_raw_response.create(
                            model="alias", prompt=prompt, max_tokens=5, stream=stream
                        )
                        found.setdefault(kind, Counter())[got.headers["x-lbproxy-endpoint"]] += 1
                        said = got.parse()
                        assert [*said] if isinstance(said, openai.Stream) else said.choices
                with pytest.raises(openai.BadRequestError) as refused:
                    client.completions.create(model="m", prompt=[7] * 5000, max_tokens=5)
                assert "maximum context length" in refused.value.message
            assert set(found["large"]) == {"long"}
            assert "short" not in found["medium"] | found["ids"] | found["dense"]
            assert found["ids"]["middle"], "1,005 tokens fit"
            assert found["tiny"]["short"]
            process.wait_for('"status":400')
            refusal = next(one for one in process.lines("request") if one["status"] == 400)
            told = httpx.get(f"{admin}/admin/decisions/{refusal['id']}").json()
            assert {"endpoint": "short", "why": "context too short"} in told["decisions"][-1]["left_out"]
