# SPDX-License-Identifier: Apache-2.0
"""The same as `benchmarks.restart` over HTTP: real processes, SIGUSR2, a state file.

Four simulated servers (Qwen3-32B on two H100 each, in one process), the questions of the b2b workload in a small form
(30 groups of 5 questions, 6,000 + 1,200 tokens, responses of 300), Poisson arrivals. Each variant starts with cold
servers: a minute to warm up, a minute, the restart, a minute.

    python -m benchmarks.restart_http                 # 10 minutes; one core is enough
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import aiohttp

from benchmarks.http_routing.cells import MODEL
from benchmarks.restart import table
from lbproxy import __version__

GROUPS, QUESTIONS = 30, 5
SHARED_BYTES, QUESTION_BYTES, OUTPUT_TOKENS = 24_000, 4_800, 300
MINUTE_S = 60.0
VARIANTS = {"no file": None, "prefixes: false": "false", "prefixes: true": "true"}


def words(rng: random.Random, size: int) -> str:
    return " ".join(str(rng.randrange(10**7)) for _ in range(size // 7))[:size]


def questions(rng: random.Random) -> list[str]:
    found = []
    for _ in range(GROUPS):
        shared = words(rng, SHARED_BYTES)
        found += [f"{shared} {words(rng, QUESTION_BYTES)}" for _ in range(QUESTIONS)]
    rng.shuffle(found)
    return found


@contextmanager
def servers(count: int) -> Iterator[list[str]]:
    command = [sys.executable, "-m", "benchmarks.http_routing.servers", str(count), "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield [f"http://127.0.0.1:{port}" for port in process.stdout.readline().split()]
        process.kill()


class Proxy:
    """lbproxy, and its successor."""

    def __init__(self, folder: Path, urls: list[str], prefixes: str | None) -> None:
        state = "" if prefixes is None else f"state: {{file: {folder / 'state'}, prefixes: {prefixes}}}\n"
        listing = "".join(f"  - {url}\n" for url in urls)
        config = folder / "cfg.yaml"
        more = "log: {access: false}\n"
        config.write_text(f"listen: 127.0.0.1:0\nadmin: null\n{more}{state}endpoints:\n{listing}")
        command = [sys.executable, "-m", "lbproxy", "--config", str(config)]
        self._log = folder / "log"
        self._process = subprocess.Popen(command, stdout=self._log.open("wb"))
        self.url = self._wait_for(r"listens on (http://[\w.:]+),")
        self._wait_for(rf"(?s)(serves .*){{{len(urls)}}}")
        self._pid = self._process.pid

    def _wait_for(self, pattern: str) -> str:
        while (match := re.search(pattern, self._log.read_text())) is None:
            assert self._process.poll() is None, self._log.read_text()
            time.sleep(0.05)
        return match[1]

    def restart(self) -> None:
        self._process.send_signal(signal.SIGUSR2)
        self._pid = int(self._wait_for(r'"pid":(\d+)'))

    def stop(self) -> None:
        for pid in {self._pid, self._process.pid}:
            with contextlib.suppress(ProcessLookupError):
                subprocess.run(["kill", "-9", str(pid)], check=False)
        self._process.wait()


async def ask(session: aiohttp.ClientSession, url: str, prompt: str, sent: list[tuple[float, float]]) -> None:
    """Notes when the request was sent, and seconds to its first token."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": True}
    began_at = time.monotonic()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for _ in response.content.iter_any():
            if began_at:
                sent.append((began_at, time.monotonic() - began_at))
                began_at = 0.0


async def load(proxy: Proxy, rate: float, seed: int) -> list[str]:
    rng = random.Random(seed)
    prompts, sent = questions(rng), list[tuple[float, float]]()
    began_at = at = time.monotonic()
    asked, restarting = 0, None
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session,
        asyncio.TaskGroup() as tasks,
    ):
        while at < began_at + 3 * MINUTE_S:
            if restarting is None and at >= began_at + 2 * MINUTE_S:
                restarting = tasks.create_task(asyncio.to_thread(proxy.restart))
            tasks.create_task(ask(session, proxy.url, prompts[asked % len(prompts)], sent))
            asked += 1
            at += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, at - time.monotonic()))
    spans = [(MINUTE_S, 2 * MINUTE_S), (2 * MINUTE_S, 2 * MINUTE_S + 10.0), (2 * MINUTE_S, 3 * MINUTE_S)]
    before, first, after = (fmean(s for a, s in sent if low <= a - began_at < high) for low, high in spans)
    return [f"{before:.3f}", f"{first:.3f}", f"{after:.3f}", f"{after / before:.2f}x"]


def main() -> None:
    parser = argparse.ArgumentParser(description="What a hot restart costs over HTTP.")
    parser.add_argument("--rate", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(f"`python -m benchmarks.restart_http`, lbproxy {__version__}, {args.rate:g} requests/s, seed {args.seed}\n")
    rows = [["hot restart", "minute before, s", "first 10 s", "first minute", "first minute / before"]]
    for name, prefixes in VARIANTS.items():
        with servers(4) as urls, tempfile.TemporaryDirectory() as folder:
            proxy = Proxy(Path(folder), urls, prefixes)
            try:
                rows.append([name, *asyncio.run(load(proxy, args.rate, args.seed))])
            finally:
                proxy.stop()
    print(table(rows))


if __name__ == "__main__":
    main()
