# SPDX-License-Identifier: Apache-2.0
"""Engines that are slow and well: none is ejected and nothing that runs there is killed.

By hand, with times as they are in life, and of another build: see `main`.

    LBPROXY_COMMAND="env PYTHONPATH=/other/build python -P -m lbproxy" python -m tests.e2e.test_slow_engines
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.support.aio import run, until
from tests.support.endpoint import LAST, OK, STREAM_HEAD, Received, Script, ScriptedEndpoint, Wire, answer, event
from tests.support.process import Process, lbproxy_beside

MODELS = answer(b'{"object":"list","data":[{"id":"m","object":"model"}]}')
PATH = "/v1/chat/completions"
SCALED = """
health: {interval: 100ms, timeout: 300ms, fall: 3}
scrape: {interval: 100ms, timeout: 1s}
breaker: {no_progress: 1s}
"""
"""The times by which engines are judged, a tenth of what they are."""


class Engine(ScriptedEndpoint):
    """A server with so many slots, in which each response takes `response_s`. What waits for a slot waits here."""

    def __init__(self, response_s: float, *, slots: int = 1, health_s: float = 0.0, moves: bool = False) -> None:
        """`health_s`: how long /health takes. `moves`: its counter of tokens does with each token; else when a response
        is complete.
        """
        scripts: dict[str, Script] = {
            "/health": self._health,
            "/v1/models": MODELS,
            "/metrics": self._metrics,
            PATH: self._respond,
        }
        super().__init__(scripts)
        self._response_s, self.health_s, self._moves = response_s, health_s, moves
        self._slots = asyncio.Semaphore(slots)
        self._running = self._waiting = self._tokens = 0
        self.most_waiting = self.aborted = 0

    async def _health(self, wire: Wire, _: Received) -> None:
        await asyncio.sleep(self.health_s)
        await wire.send(OK)

    async def _metrics(self, wire: Wire, _: Received) -> None:
        values = {
            "requests_processing": self._running,
            "requests_deferred": self._waiting,
            "tokens_predicted_total": self._tokens,
            "n_decode_total": self._tokens,
        }
        page = "".join(f"llamacpp:{name} {value}\n" for name, value in values.items())
        await wire.send(answer(page.encode(), kind="text/plain; version=0.0.4"))

    async def _respond(self, wire: Wire, request: Received) -> None:
        stream = b'"stream":true' in request.body
        watching = asyncio.create_task(wire.watch())
        self._waiting += 1
        self.most_waiting = max(self.most_waiting, self._waiting)
        async with self._slots:
            self._waiting -= 1
            self._running += 1
            await self._generate(wire, stream)
            self._running -= 1
        watching.cancel()
        with suppress(ConnectionError):
            if wire.gone.is_set():
                self.aborted += 1
            else:
                await wire.send(event("[DONE]") + LAST if stream else OK)

    async def _generate(self, wire: Wire, stream: bool) -> None:
        ends_at = time.monotonic() + self._response_s
        if stream:
            await wire.send(STREAM_HEAD)
        while time.monotonic() < ends_at and not wire.gone.is_set():
            await asyncio.sleep(0.05)
            self._tokens += self._moves
            if stream:
                await wire.send(event("x"))
        self._tokens += 100


class Seen(NamedTuple):
    """What clients, engines and the log saw."""

    answers: list[tuple[float, float, str]]
    """When each request was sent, and answered, and how."""
    engines: list[Engine]
    transitions: Counter[str]

    def __str__(self) -> str:
        aborted, waited = sum(one.aborted for one in self.engines), [one.most_waiting for one in self.engines]
        lines = [f"  {sent:6.1f} s -> {came:6.1f} s  {how}" for sent, came, how in self.answers]
        return "\n".join(
            [*lines, f"  aborted: {aborted}; most in an engine's queue: {waited}; {dict(self.transitions)}"]
        )


async def observe(engines: list[Engine], requests: list[bool], apart_s: float, more: str, folder: Path) -> Seen:
    """Requests (True: of a stream) so long apart, each of a client of its own, through lbproxy with these settings."""
    began = time.monotonic()

    async def ask(client: httpx.AsyncClient, url: str, at_s: float, stream: bool) -> tuple[float, float, str]:
        await asyncio.sleep(at_s)
        body = json.dumps({"model": "m", "stream": stream, "messages": []}, separators=(",", ":"))
        sent = time.monotonic() - began
        try:
            response = await client.post(url + PATH, content=body, headers={"content-type": "application/json"})
            whole = not stream or "[DONE]" in response.text
            how = str(response.status_code) + ("" if whole else " broken")
        except httpx.TransportError as error:
            how = type(error).__name__
        return sent, time.monotonic() - began, how

    def transitions(process: Process) -> Counter[str]:
        return Counter(f"{one['from']} -> {one['to']}" for one in process.lines("transition"))

    async with lbproxy_beside(folder, [one.url for one in engines], more) as (process, url, _):
        await until(lambda: transitions(process).total() == len(engines), "they are up", within_s=60.0)
        async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as client:
            asking = (ask(client, url, n * apart_s, stream) for n, stream in enumerate(requests))
            answers = await asyncio.gather(*asking)
        return Seen(answers, engines, transitions(process))


async def one_slot(response_s: float, apart_s: float, more: str, folder: Path) -> Seen:
    """Two servers with one slot, and three whole responses in the queue of each."""
    one, two = Engine(response_s), Engine(response_s)
    async with one, two:
        return await observe([one, two], [False] * 8, apart_s, more, folder)


async def slow_health(response_s: float, health_s: float, more: str, folder: Path) -> Seen:
    """Two servers, of which one's /health takes longer than probes wait, once it has something to do."""
    slow, well = Engine(response_s, slots=8, moves=True), Engine(response_s, slots=8, moves=True)
    async with slow, well:

        async def worsen() -> None:
            await until(lambda: slow.asked(PATH) >= 3, within_s=60.0)
            slow.health_s = health_s

        worsening = asyncio.create_task(worsen())
        seen = await observe([slow, well], [True, False] * 4, 0.0, more, folder)
        await worsening
        return seen


def test_what_waits_for_the_one_slot_of_a_server_is_answered_each_after_the_one_before(tmp_path: Path) -> None:
    """llama.cpp's way: no byte for minutes from several whole responses, while others' end elsewhere."""
    more = "routing: {policy: round-robin}\n" + SCALED
    seen = run(one_slot(2.5, 0.4, more, tmp_path))
    assert [how for _, _, how in seen.answers] == ["200"] * 8, seen
    assert [one.most_waiting for one in seen.engines] >= [3, 3], seen
    assert [one.asked(PATH) for one in seen.engines] == [4, 4], seen
    assert not any(one.aborted for one in seen.engines), seen
    assert seen.transitions == {"starting -> up": 2}, seen


def test_an_engine_whose_health_path_is_slow_finishes_what_it_generates(tmp_path: Path) -> None:
    """It takes no new requests for a while, and is ejected for nothing."""
    more = "routing: {policy: round-robin}\n" + SCALED
    seen = run(slow_health(5.0, 1.0, more, tmp_path))
    assert [how for _, _, how in seen.answers] == ["200"] * 8, seen
    assert [one.asked(PATH) for one in seen.engines] == [4, 4], seen
    assert not any(one.aborted for one in seen.engines), seen
    assert not any(name.endswith("ejected") for name in seen.transitions), seen
    assert seen.transitions["up -> down"] >= 1, "probes did fail"


def main() -> None:
    """Times as in life, and the settings that lbproxy has without any."""
    policy = "routing: {policy: round-robin}\n"
    what = {
        "one_slot": lambda folder: one_slot(45.0, 5.0, policy, folder),
        "slow_health": lambda folder: slow_health(60.0, 8.0, policy, folder),
    }
    for name in sys.argv[1:] or what:
        with tempfile.TemporaryDirectory() as folder:
            print(name, asyncio.run(what[name](Path(folder))), sep="\n", flush=True)


if __name__ == "__main__":
    main()
