# SPDX-License-Identifier: Apache-2.0
"""A server with data-parallel ranks behind lbproxy: simulated servers that distribute by themselves as vLLM does."""

from __future__ import annotations

import asyncio
import random
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from tests.support.aio import run, until
from tests.support.ports import free_port
from tests.support.process import LBPROXY, Process, lbproxy, mock

RANKS = 4
TALKS, TURNS = 12, 4
WORDS = "The quick brown fox jumps over the lazy dog. "


class Talk:
    """A conversation."""

    def __init__(self, number: int) -> None:
        self.messages: list[Any] = [{"role": "user", "content": f"{number}: {WORDS * 60}"}]
        self.where: set[str | None] = set()
        self.cached = self.tokens = 0
        """Of the prompts of later turns."""

    async def turn(self, client: AsyncOpenAI) -> None:
        got = await client.chat.completions.with_raw_response.create(model="sim", messages=self.messages, max_tokens=5)
        self.where.add(got.headers.get("x-lbproxy-endpoint"))
        parsed = got.parse()
        assert parsed.usage is not None
        if len(self.messages) > 1 and parsed.usage.prompt_tokens_details is not None:
            self.cached += parsed.usage.prompt_tokens_details.cached_tokens or 0
            self.tokens += parsed.usage.prompt_tokens
        self.messages += [
            parsed.choices[0].message.model_dump(exclude_none=True),
            {"role": "user", "content": WORDS},
        ]


async def talks(url: str, first: int, *, at_once: bool) -> tuple[list[set[str | None]], float]:
    """Conversations numbered from `first`: where each was served, and the cached share of later prompts.

    Each turn is that of all conversations, in any order; `at_once`, or one request at a time.
    """
    every = [Talk(first + n) for n in range(TALKS)]
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for turn in range(TURNS):
            turns = [one.turn(client) for one in random.Random(turn).sample(every, TALKS)]
            if at_once:
                await asyncio.gather(*turns)
            else:
                for one in turns:
                    await one
    return [one.where for one in every], sum(one.cached for one in every) / sum(one.tokens for one in every)


def endpoints(admin: str) -> dict[str, dict[str, Any]]:
    state = httpx.get(f"{admin}/admin/state").json()
    return {one["name"]: one for one in state["endpoints"] if not one["leaving"]}


def test_conversations_return_to_their_ranks(tmp_path: Path) -> None:
    """Through lbproxy, one request at a time: or the price may justly say that an idle rank is worth
    computing the prompt anew. Asked directly, the server finds a prefix by chance: it balances by requests alone.
    """

    async def main() -> None:
        with mock("--ranks", str(RANKS)) as (_, server), lbproxy(tmp_path, [server]) as (_, url, admin):
            name = server.removeprefix("http://")
            await until(lambda: list(endpoints(admin)) == [f"{name}#{n}" for n in range(RANKS)])
            where, cached = await talks(url, 0, at_once=False)
            assert all(len(one) == 1 for one in where), where
            assert len(set.union(*where)) == RANKS, "and all ranks are used"
            assert cached > 0.9
            _, directly = await talks(server, TALKS, at_once=True)
            assert directly < 0.8

    run(main(), timeout_s=120.0)


def test_a_restart_with_fewer_ranks_fails_no_request(tmp_path: Path) -> None:
    """The server refuses ranks that are gone with 400, until its metrics are read again."""

    async def main() -> None:
        port = free_port()
        other = f"http://127.0.0.1:{port}"

        async def ask(client: httpx.AsyncClient) -> int:
            body = {"model": "sim", "prompt": WORDS, "max_tokens": 4}
            return (await client.post("/v1/completions", json=body)).status_code

        more = "scrape: {interval: 1s, stale_after: 5s}"
        async with AsyncExitStack() as stack:
            _, server = stack.enter_context(mock())
            _, url, admin = stack.enter_context(lbproxy(tmp_path, [server, other], more))
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30.0))
            for ranks, count in ((4, 5), (2, 3), (1, 2), (3, 4)):
                serving = Process("mock", "--port", str(port), "--ranks", str(ranks))
                with serving as process:
                    await asyncio.to_thread(process.wait_for, "at http")
                    statuses: list[int] = []
                    while len(endpoints(admin)) != count or len(statuses) < 60:
                        statuses += await asyncio.gather(*(ask(client) for _ in range(12)))
                        assert len(statuses) < 3000, "the ranks are not found"
                    assert set(statuses) == {200}

    run(main(), timeout_s=120.0)


def test_a_server_is_drained_by_its_name_and_a_rank_by_its_own(tmp_path: Path) -> None:
    def command(*words: str) -> dict[str, Any]:
        done = subprocess.run([*LBPROXY, *words], capture_output=True, text=True, check=False, timeout=30)
        assert done.returncode == 0, done.stderr
        return {}

    with mock("--ranks", "2") as (_, server), mock() as (_, other):
        name = server.removeprefix("http://")
        with lbproxy(tmp_path, [f"{{url: '{server}', ranks: 2}}", other]) as (_, url, admin):
            run(until(lambda: all(one["health"] == "up" for one in endpoints(admin).values())))
            command("drain", name, "--admin", admin)
            assert [one["draining"] for one in endpoints(admin).values()] == [True, True, False]
            command("undrain", f"{name}#1", "--admin", admin)
            assert [one["draining"] for one in endpoints(admin).values()] == [True, False, False]
            body = {"model": "sim", "prompt": WORDS, "max_tokens": 4}
            seen = {httpx.post(f"{url}/v1/completions", json=body).headers["x-lbproxy-endpoint"] for _ in range(6)}
            assert seen == {f"{name}#1", other.removeprefix("http://")}
            lines = httpx.get(f"{admin}/metrics").text.splitlines()
            scrapes = [line for line in lines if line.startswith("lbproxy_scrapes_total") and name in line]
            assert scrapes, "one page is read for both"
            assert all("#" not in line for line in scrapes)


def test_settings_that_the_metrics_contradict(tmp_path: Path) -> None:
    with (
        mock("--ranks", "2") as (_, server),
        lbproxy(tmp_path, [f"{{url: '{server}', ranks: 3}}"]) as (process, _, admin),
    ):
        process.wait_for("the settings say 3 data-parallel ranks, and its metrics show 2")
        assert len(endpoints(admin)) == 3
    (tmp_path / "one").mkdir()
    with (
        mock("--ranks", "2") as (_, server),
        lbproxy(tmp_path / "one", [f"{{url: '{server}', ranks: 1}}"]) as (_, _, admin),
    ):
        run(until(lambda: next(iter(endpoints(admin).values()))["running"] is not None, "its page is read"))
        assert list(endpoints(admin)) == [server.removeprefix("http://")]
