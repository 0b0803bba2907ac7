# SPDX-License-Identifier: Apache-2.0
"""A real vLLM with data-parallel ranks: conversations return to the rank that has their prefix."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.real import servers
from tests.real.environment import Environment
from tests.real.servers import MODEL, RANKS, Ranked, wait_until

TALKS, TURNS, AT_ONCE = 16, 6, 5
WORDS = "The quick brown fox jumps over the lazy dog. "
RETURNS = 0.95


@pytest.fixture(scope="module", params=[1, RANKS], ids=lambda count: f"API servers: {count}")
def two(parts: Environment, request: pytest.FixtureRequest) -> Iterator[Ranked]:
    with servers.ranked(parts, request.param) as found:
        yield found


class Talks:
    """Conversations side by side, which are prompts that grow."""

    def __init__(self, url: str, name: str) -> None:
        self._url, self._name = url, name
        self._lock = threading.Lock()
        self.where: list[list[str]] = []
        """The endpoints of each conversation."""
        self.cached = self.prompt = 0
        """Tokens of all turns but the first."""

    def run(self) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool, httpx.Client(base_url=self._url, timeout=120) as client:
            list(pool.map(lambda number: self._talk(client, number), range(TALKS)))

    def _talk(self, client: httpx.Client, number: int) -> None:
        text, where = f"{self._name} {number}: {WORDS * 36}", []
        for turn in range(TURNS):
            body = {"model": MODEL, "prompt": text, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
            response = client.post("/v1/completions", json=body).raise_for_status()
            where.append(response.headers.get("x-lbproxy-endpoint", ""))
            said, usage = response.json()["choices"][0]["text"], response.json()["usage"]
            with self._lock:
                if turn:
                    self.cached += (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
                    self.prompt += usage["prompt_tokens"]
            text += f"{said} {WORDS * 2}"
        with self._lock:
            self.where.append(where)


def test_data_parallel_conversations_return_to_their_rank(two: Ranked, found: Callable[[str], None]) -> None:
    through, direct = Talks(two.lbproxy.url, "through"), Talks(two.server.url, "direct")
    through.run()
    direct.run()
    returned = sum(one == talk[0] for talk in through.where for one in talk[1:])
    share = returned / (TALKS * (TURNS - 1))
    used = {one for talk in through.where for one in talk}
    hits = [one.cached / one.prompt for one in (through, direct)]
    talks = f"{TALKS} conversations of {TURNS} turns over {RANKS} ranks"
    found(f"ranks: {two.server.name}: {talks}: {share:.0%} of the turns returned")
    found(
        f"ranks: prompt tokens of later turns that were cached: {hits[0]:.3f} through lbproxy, {hits[1]:.3f} directly"
    )
    assert share >= RETURNS
    assert used == set(two.names)
    assert hits[0] > hits[1]


def test_data_parallel_gauges_are_those_of_each_rank(two: Ranked, found: Callable[[str], None]) -> None:
    """What is asked around lbproxy, of one rank, is seen at that rank alone. With two API servers vLLM's page often
    shows nothing of it: the last value of either counts, and one of them has no request.
    """
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 900, "ignore_eos": True}
    rank = {"X-data-parallel-rank": "1"}
    seen = dict.fromkeys(two.names, 0.0)
    with ThreadPoolExecutor(6) as pool, httpx.Client(base_url=two.server.url, timeout=120) as client:
        asked = [pool.submit(client.post, "/v1/completions", json=body, headers=rank) for _ in range(6)]
        while not all(one.done() for one in asked):
            for name, one in two.endpoints().items():
                seen[name] = max(seen[name], one["running"] or 0.0)
        assert [one.result().status_code for one in asked] == [200] * 6
    found(f"ranks: {two.server.name}: running at most, while rank 1 has 6 requests of other clients: {seen}")
    assert seen[two.names[0]] == 0
    assert seen[two.names[1]] > 0 or "-2" in two.server.name
    wait_until(lambda: two.endpoints()[two.names[1]]["running"] in {0, None}, "they have ended")


def test_a_data_parallel_rank_that_is_not_there_is_refused(two: Ranked) -> None:
    """What lbproxy takes for a rank that is gone: the status and the words."""
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 2}
    rank = {"X-data-parallel-rank": str(RANKS)}
    response = httpx.post(f"{two.server.url}/v1/completions", json=body, headers=rank, timeout=60)
    assert response.status_code == 400
    assert f"data_parallel_rank {RANKS} is out of range" in response.json()["error"]["message"]
