# SPDX-License-Identifier: Apache-2.0
"""Streams before servers that are killed (-9) again and again, and return after a second: no client notices.

LBPROXY_TEST_STREAMS=2000 is the full form: streams of half a minute, 200 at a time, before eight servers, one of which
is killed every two seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import anthropic
import openai
import pytest

from tests.support.aio import run
from tests.support.ports import free_port
from tests.support.process import Process, lbproxy, mock

STREAMS = int(os.environ.get("LBPROXY_TEST_STREAMS", "0"))
TOKENS = 150 if STREAMS else 60
TOKEN_TIME = "0.2" if STREAMS else "0.05"
AT_ONCE, SERVERS, EVERY_S, LEAST_UP = (200, 8, 2.0, 5) if STREAMS else (10, 3, 0.7, 3)
"""None is killed while fewer are up, in truth and as lbproxy sees it: on a busy machine both are late."""
SETTINGS = "models: {m: {continue: true}}\nhealth: {interval: 500ms, down_interval: 500ms}\n"


class Server:
    """A simulated server that returns on its port."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._start()

    def _start(self) -> None:
        times = "--ttft", "0.1", "--token-time", TOKEN_TIME
        self.process = Process("mock", "--model", "m", "--port", str(self.port), *times)

    def ends(self) -> None:
        stdout = self.process.process.stdout
        if stdout is not None and not stdout.closed:
            self.process.__exit__(None, None, None)

    async def dies(self) -> None:
        await asyncio.to_thread(self.ends)
        await asyncio.sleep(1.0)
        self._start()
        await asyncio.to_thread(self.process.wait_for, "at http")


def asked(number: int) -> dict[str, Any]:
    return {
        "model": "m",
        "max_tokens": TOKENS,
        "messages": [{"role": "user", "content": f"Tell me something about {number}."}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def streamed(client: aiohttp.ClientSession, url: str, number: int) -> tuple[str, int, int, int]:
    """Its text, the events that end it, and the tokens of prompt and response."""
    text, ends, usage = "", 0, {"prompt_tokens": -1, "completion_tokens": -1}
    async with client.post(f"{url}/v1/chat/completions", json=asked(number)) as reply:
        assert reply.status == 200
        async for line in reply.content:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                return text, ends, usage["prompt_tokens"], usage["completion_tokens"]
            said = json.loads(line[6:])
            assert "error" not in said, said
            usage = said.get("usage") or usage
            for choice in said["choices"]:
                text += choice["delta"].get("content") or ""
                ends += choice["finish_reason"] is not None
    raise AssertionError("no [DONE]")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("workers", ["", "workers: 2\n"])
def test_no_stream_breaks_and_each_says_what_it_would_have_said(tmp_path: Path, workers: str) -> None:
    count = STREAMS or 40

    async def main(process: Process, listen: str, admin: str, undisturbed: str, servers: list[Server]) -> Counter[str]:
        failed: Counter[str] = Counter()
        limits, done = asyncio.Semaphore(AT_ONCE), asyncio.Event()

        async def one(client: aiohttp.ClientSession, number: int) -> None:
            async with limits:
                whole = await streamed(client, undisturbed, number)
                try:
                    found = await streamed(client, listen, number)
                except (AssertionError, aiohttp.ClientError) as error:
                    failed[f"broken: {error!r:.200}"] += 1
                    return
            failed["text"] += found[0] != whole[0]
            failed["ends"] += found[1] != 1
            failed["prompt tokens"] += found[2] != whole[2]
            failed["tokens"] += found[3] != whole[3]

        async def seen_up(client: aiohttp.ClientSession) -> set[str]:
            """The URLs of the servers that take requests, as lbproxy sees it."""
            async with client.get(f"{admin}/admin/state") as reply:
                return {one["url"] for one in (await reply.json())["endpoints"] if one["health"] == "up"}

        async def kill(client: aiohttp.ClientSession) -> None:
            rng = random.Random(7)
            returning: dict[Server, asyncio.Task[None]] = {}

            async def dies(server: Server) -> None:
                await server.dies()
                del returning[server]

            while not done.is_set():
                await asyncio.sleep(EVERY_S)
                process.read()  # a full pipe would lose lines
                seen = await seen_up(client)
                alive = [one for one in servers if one not in returning and one.url in seen]
                if len(alive) < LEAST_UP:
                    continue
                server = rng.choice(alive)
                failed["deaths"] += 1
                returning[server] = asyncio.create_task(dies(server))
            await asyncio.gather(*returning.values())

        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as client:
            killer = asyncio.create_task(kill(client))
            await asyncio.gather(*(one(client, number) for number in range(count)))
            done.set()
            await killer
        return failed

    with ExitStack() as stack:
        _, undisturbed = stack.enter_context(mock("--model", "m", "--speed", "200"))
        servers = [Server() for _ in range(SERVERS)]
        for server in servers:
            stack.callback(server.ends)
            server.process.wait_for("at http")
        process, listen, admin = stack.enter_context(
            lbproxy(tmp_path, [one.url for one in servers], workers + SETTINGS)
        )
        process.wait_for("serves m")
        began = time.monotonic()
        failed = run(main(process, listen, admin, undisturbed, servers), timeout_s=1000.0)
        moves = sum(cast(int, line.get("moves", 0)) for line in process.lines("request"))
        print(f"{count} streams in {time.monotonic() - began:.0f} s, {moves} moves, {dict(failed)}")
        assert failed.pop("deaths") > 0
        assert moves > 0
        assert not +failed, failed


@contextmanager
def slow(folder: Path) -> Iterator[tuple[dict[str, Process], Process, str, str]]:
    """Two servers, by their names, and lbproxy before them."""
    times = "--model", "m", "--ttft", "0.1", "--token-time", "0.1"
    with mock(*times) as (one, first), mock(*times) as (two, second):
        endpoints = [f"{{url: '{first}', name: one}}", f"{{url: '{second}', name: two}}"]
        with lbproxy(folder, endpoints, "models: {m: {continue: true}}\n") as (process, listen, admin):
            process.wait_for("one serves m")
            process.wait_for("two serves m")
            yield {"one": one, "two": two}, process, listen, admin


@pytest.mark.parametrize("how", ["kill -9", "drain"])
def test_the_sdk_of_openai_does_not_notice(how: str, tmp_path: Path) -> None:
    with slow(tmp_path) as (servers, process, listen, admin):
        client = openai.OpenAI(base_url=f"{listen}/v1", api_key="none", max_retries=0, timeout=60)
        whole = client.chat.completions.create(**asked(1) | {"stream": False, "stream_options": None})
        stream = client.chat.completions.with_raw_response.create(**asked(1))
        chunks = []
        for chunk in stream.parse():
            chunks.append(chunk)
            if len(chunks) == 10:
                name = stream.headers["x-lbproxy-endpoint"]
                if how == "kill -9":
                    servers[name].kill()
                    continue
                with Process("drain", name, "--move-after", "0", "--wait", "--admin", admin) as drain:
                    assert drain.process.wait(60) == 0
                    assert "drained" in drain.read()
        choices = [choice for chunk in chunks for choice in chunk.choices]
        assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
        assert [one.finish_reason for one in choices if one.finish_reason] == [whole.choices[0].finish_reason]
        assert [one.usage.completion_tokens for one in chunks if one.usage] == [whole.usage.completion_tokens]
        assert len({(one.id, one.created, one.model) for one in chunks}) == 1
        process.wait_for('"moves":1')


LOOK = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
SAME: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Use the look tool."}], "stream": True}
BREAKS = {
    "tool call": ("chat", SAME | {"tools": [{"type": "function", "function": LOOK}]}, "not continued: it has `tool_ca"),
    "forced call": (
        "chat",
        SAME | {"tools": [{"type": "function", "function": LOOK}], "tool_choice": "required"},
        "not continued: the request has `tool_choice`",
    ),
    "logprobs": ("chat", SAME | {"logprobs": True}, "not continued: the request has `logprobs`"),
    "Responses": ("responses", {"model": "m", "input": "Say hello.", "stream": True}, r"lost after \d+ events$"),
    "Messages": ("messages", SAME | {"max_tokens": TOKENS}, r"lost after \d+ events'"),
}


@pytest.mark.parametrize("kind", BREAKS)
def test_the_sdks_raise_their_error_where_a_stream_does_not_go_on(kind: str, tmp_path: Path) -> None:
    """It says why. Of the APIs that are not continued it says what it does without the setting."""
    api, fields, message = BREAKS[kind]
    with slow(tmp_path) as (servers, _, listen, _):
        theirs = openai.OpenAI(base_url=f"{listen}/v1", api_key="none", max_retries=0, timeout=60)
        other = anthropic.Anthropic(base_url=listen, api_key="none", max_retries=0, timeout=60)
        resources: dict[str, Any] = {"chat": theirs.chat.completions, "responses": theirs.responses}
        stream = resources.get(api, other.messages).with_raw_response.create(**fields)
        events = iter(stream.parse())
        next(events), next(events)
        servers[stream.headers["x-lbproxy-endpoint"]].kill()
        with pytest.raises((openai.APIError, anthropic.APIError), match=message):
            list(events)
