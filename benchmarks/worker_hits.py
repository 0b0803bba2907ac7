# SPDX-License-Identifier: Apache-2.0
"""Prefix hits through several workers beside one process: `python -m benchmarks.worker_hits`.

Conversations over simulated servers, each turn on a new connection, so that any worker may get it; the same ones in the
same order through an lbproxy with one process and one with workers, in turn. Printed: the share of prompt tokens that
the servers read from their caches, and how many turns went to another server than the one before.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.process import lbproxy, mock


async def talk(url: str, conversations: int, turns: int, seed: int) -> tuple[float, int]:
    """The share of cached tokens, and the turns that moved."""
    rng = random.Random(seed)
    tokens = [0, 0]
    moved = 0

    async def one(number: int) -> None:
        nonlocal moved
        text, home = f"{seed}-{number}: " + "words of this one " * rng.randint(100, 400), ""
        messages: list[dict[str, str]] = []
        await asyncio.sleep(rng.uniform(0.0, 3.0))
        for _ in range(turns):
            messages.append({"role": "user", "content": text})
            body = {"model": "m", "max_tokens": 40, "messages": messages}
            connector = aiohttp.TCPConnector(force_close=True)
            path = f"{url}/v1/chat/completions"
            async with aiohttp.ClientSession(connector=connector) as session, session.post(path, json=body) as reply:
                found: dict[str, Any] = await reply.json()
                endpoint = reply.headers["x-lbproxy-endpoint"]
            usage = found["usage"]
            tokens[0] += usage["prompt_tokens"]
            tokens[1] += usage["prompt_tokens_details"]["cached_tokens"]
            moved += bool(home) and endpoint != home
            home = endpoint
            messages.append(found["choices"][0]["message"] | {"role": "assistant"})
            text = "and then? " * rng.randint(20, 80)
            await asyncio.sleep(rng.expovariate(2.0))

    await asyncio.gather(*(one(number) for number in range(conversations)))
    return tokens[1] / tokens[0], moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=60)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    ratios: dict[int, list[float]] = {1: [], args.workers: []}
    for seed in range(args.rounds):
        for workers, seen in ratios.items():
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                urls = [stack.enter_context(mock("--model", "m"))[1] for _ in range(4)]
                settings = f"workers: {workers}\nlog: {{access: false}}\n"
                process, url, _ = stack.enter_context(lbproxy(folder, urls, settings))
                for one in urls:
                    process.wait_for(f"{one.removeprefix('http://')} is up")
                if workers > 1:
                    process.wait_for("workers accept connections")
                ratio, moved = asyncio.run(talk(url, args.conversations, args.turns, seed))
                seen.append(ratio)
                print(f"round {seed}: workers {workers}: {100 * ratio:.2f} % cached, {moved} turns moved", flush=True)
    print(
        *(f"workers {workers}: {100 * statistics.mean(seen):.2f} % cached" for workers, seen in ratios.items()),
        sep="; ",
    )


if __name__ == "__main__":
    main()
