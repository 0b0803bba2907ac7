# SPDX-License-Identifier: Apache-2.0
"""What programs use: three SDKs, whole and streamed answers, usage, adapters, the list of models; on real servers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.real.environment import Environment
from tests.real.servers import MODEL, OTHER_MODEL, Fleet

CLIENTS = Path(__file__).parent / "clients"
MAX_TOKENS = 24


def command_of(client: str, parts: Environment) -> list[str]:
    if client == "node":
        if parts.node is None:
            pytest.skip("no npm on this machine")
        return ["node", str(CLIENTS / "openai_node.mjs"), str(parts.node)]
    python = {"python": sys.executable, "python-1.30": str(parts.old_client)}[client]
    return [python, str(CLIENTS / "openai_python.py")]


@pytest.mark.parametrize("model", [MODEL, OTHER_MODEL])
@pytest.mark.parametrize("client", ["python", "python-1.30", "node"])
def test_every_sdk_gets_every_kind_of_answer(
    fleet: Fleet, parts: Environment, client: str, model: str, found: Callable[[str], None]
) -> None:
    """Streams add up to what the whole answer says: greedy, so both say the same."""
    command = [*command_of(client, parts), f"{fleet.url}/v1", model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert set(said["models"]) == {MODEL, "a", "b", "c", OTHER_MODEL}
    for kind in ("chat", "completion"):
        whole, stream = said[kind], said[f"{kind}_stream"]
        assert whole["text"]
        assert whole["tokens"] == stream["tokens"] == MAX_TOKENS
        assert stream["text"] == whole["text"]
        assert stream["finish"] == "length"
        assert stream["chunks"] > 5, "streamed in pieces"
    assert said["error"] == "404 model_not_found"
    found(
        f"client: {said['client']}, model {model}: chat, completion, both streams, usage {MAX_TOKENS} each; "
        f"{said['chat_stream']['chunks']} + {said['completion_stream']['chunks']} chunks"
    )


def text_of(url: str, model: str) -> tuple[str, str]:
    """What a model says, and which endpoint said it."""
    body = {"model": model, "prompt": "The sky is", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], answer.headers.get("x-lbproxy-endpoint", "")


def test_an_adapter_is_a_model_of_its_own(fleet: Fleet, found: Callable[[str], None]) -> None:
    """Each adapter's text is its own and comes unchanged; one that a single server has is asked of that one."""
    texts = {name: text_of(fleet.url, name)[0] for name in (MODEL, "a", "b", "c")}
    assert len(set(texts.values())) == 4
    for name in (MODEL, "a", "b"):
        assert [text_of(server.url, name)[0] for server in fleet.vllm] == [texts[name]] * 2
    assert {text_of(fleet.url, "c")[1] for _ in range(8)} == {"vllm-2"}
    for name, text in texts.items():
        found(f"adapter: {name:4} says {text!r}")
    found("adapter: 8 of 8 requests for c went to vllm-2, the only server that has it")


def test_the_list_of_models_tells_parents(fleet: Fleet, found: Callable[[str], None]) -> None:
    cards = {card["id"]: card.get("parent") for card in httpx.get(f"{fleet.url}/v1/models").json()["data"]}
    assert cards == {MODEL: None, "a": MODEL, "b": MODEL, "c": MODEL, OTHER_MODEL: None}
    found(f"models: {cards}")
