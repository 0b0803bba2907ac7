# SPDX-License-Identifier: Apache-2.0
"""Real vLLM servers with models that see: conversations with images keep their home, and weigh what the engine counts.

One model counts an image by its pixels, as lbproxy assumes; the other counts every image the same, whatever lbproxy
assumes (`vision.py`).
"""

from __future__ import annotations

import base64
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import pytest

from lbproxy.core.requests.prompts import chat_prompt
from tests.real import servers
from tests.real.environment import Environment
from tests.real.servers import MODEL, Small

TURNS, SIDE = 5, 1000
"""A conversation with 20 MB of base64: of noise, a picture of 1000 x 1000 pixels has 4 MB."""
TALKS, SHORT_TURNS, AT_ONCE = 16, 5, 4
SIZES = ((800, 600), (1024, 768), (640, 480), (900, 700))
RETURNS = 0.95
KNOWN_AFTER = 3
"""Responses with images, after which is known what the engine counts for one."""
WITHIN = 2.0


@pytest.fixture(scope="module", params=["pixels", "fixed"])
def two(parts: Environment, request: pytest.FixtureRequest) -> Iterator[Small]:
    with servers.seeing(parts, request.param) as found:
        yield found


def picture(width: int, height: int, seed: int) -> str:
    """A PNG of noise, as a data URL."""
    noise = random.Random(seed)
    rows = b"".join(b"\0" + noise.randbytes(3 * width) for _ in range(height))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 0)) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


class Talk:
    """A conversation in which each question has a picture."""

    def __init__(self, two: Small, name: str) -> None:
        self._two = two
        self._messages: list[dict[str, Any]] = []
        self._name = name
        self.where: list[str] = []
        self.usages: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.estimates: list[float] = []
        """Tokens of each prompt, by what lbproxy knows before it."""
        self.body_bytes = 0

    def ask(self, url: str) -> None:
        """The next turn, with this picture."""
        text = {"type": "text", "text": f"{self._name}: what is this? " * 20}
        self._messages.append({"role": "user", "content": [text, {"type": "image_url", "image_url": {"url": url}}]})
        body = {"model": MODEL, "messages": self._messages, "max_tokens": 8, "temperature": 0}
        learned = httpx.get(f"{self._two.admin}/admin/state", timeout=30).json()["learned"]
        prompt = chat_prompt(body)
        text_bytes, media = len(prompt.text), prompt.media_tokens
        self.estimates.append((text_bytes - 4 * media) / learned["bytes_per_token"] + learned["media_scale"] * media)
        response = httpx.post(f"{self._two.url}/v1/chat/completions", json=body, timeout=120).raise_for_status()
        self.where.append(response.headers["x-lbproxy-endpoint"])
        self.ids.append(response.headers["x-request-id"])
        self.usages.append(response.json()["usage"])
        self.body_bytes = len(response.request.content)
        self._messages.append(response.json()["choices"][0]["message"])

    @property
    def prompts(self) -> list[int]:
        return [usage["prompt_tokens"] for usage in self.usages]

    @property
    def cached(self) -> list[int]:
        return [(usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0 for usage in self.usages]

    def predicted_cached(self) -> list[float]:
        """Tokens of each prompt that lbproxy believed to be cached."""
        urls = [f"{self._two.admin}/admin/decisions/{one}" for one in self.ids]
        return [httpx.get(url, timeout=30).json()["predicted"]["cached_tokens"] or 0.0 for url in urls]


def test_a_conversation_of_20_mb_stays_and_weighs_what_the_engine_counts(
    two: Small, found: Callable[[str], None]
) -> None:
    talk = Talk(two, "one")
    with httpx.Client(base_url=two.url, timeout=120) as client:
        for turn in range(TURNS):
            talk.ask(picture(SIDE, SIDE, turn))
            for number in range(3):  # so that the other server has been used, too
                other = {"model": MODEL, "prompt": f"{turn} {number} something else " * 30, "max_tokens": 8}
                client.post("/v1/completions", json=other).raise_for_status()
    name = two.vllm[0].name.removesuffix("-1")
    ratios = [estimate / real for estimate, real in zip(talk.estimates, talk.prompts, strict=True)]
    predicted = talk.predicted_cached()
    found(
        f"vision: {name}: {talk.body_bytes / 1e6:.1f} MB, prompt tokens {talk.prompts}, estimated over real "
        f"{[round(one, 2) for one in ratios]}, cached {talk.cached}, predicted {[round(one) for one in predicted]}"
    )
    assert talk.body_bytes > 20e6
    assert set(talk.where) == {talk.where[0]}
    known = 0 if name == "pixels" else KNOWN_AFTER
    assert all(1 / WITHIN <= ratio <= WITHIN for ratio in ratios[known:])
    assert all(talk.cached[1:])
    for expected, real in list(zip(predicted, talk.cached, strict=True))[max(1, known) :]:
        assert real / WITHIN <= expected <= real * WITHIN


def test_conversations_with_images_return(two: Small, found: Callable[[str], None]) -> None:
    talks = [Talk(two, f"talk {number}") for number in range(TALKS)]

    def run(number: int) -> None:
        for turn in range(SHORT_TURNS):
            talks[number].ask(picture(*SIZES[(number + turn) % len(SIZES)], seed=100 * number + turn))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(run, range(TALKS)))
    returned = sum(one == before for talk in talks for before, one in pairwise(talk.where))
    share = returned / (TALKS * (SHORT_TURNS - 1))
    later = [pair for talk in talks for pair in zip(talk.estimates, talk.prompts, strict=True)][-TALKS:]
    ratios = sorted(estimate / real for estimate, real in later)
    name = two.vllm[0].name.removesuffix("-1")
    found(
        f"vision: {name}: {TALKS} conversations of {SHORT_TURNS} turns: {share:.0%} of the turns returned; estimated "
        f"over real tokens of the last {TALKS}: {ratios[0]:.2f} to {ratios[-1]:.2f}"
    )
    assert share >= RETURNS
    assert {one for talk in talks for one in talk.where} == {server.name for server in two.vllm}
