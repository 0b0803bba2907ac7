# SPDX-License-Identifier: Apache-2.0
"""T10: answers that are nearly right, in great number, through lbproxy's own sockets.

    python -m tests.conformance.mutants [--runs N] [--seed S]

Whatever an endpoint writes, the client gets one answer: whole, an error in OpenAI's shape, or one that is visibly cut;
nothing raises, and no memory is kept. A JSON line says how many of each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from pathlib import Path

import uvloop

from tests.conformance.case import GOOD
from tests.conformance.wire import Endpoint, Seen, Talk
from tests.fuzz import chunks, heads
from tests.fuzz.mutate import mutate, pieces
from tests.support.rig import rig

SEEDS = [*(head + b"hello\r\n0\r\n\r\n" for head in heads.SEEDS), *(chunks.HEAD + body for body in chunks.SEEDS)]
TOKENS = [token for token in (*heads.TOKENS, *chunks.TOKENS) if len(token) < 1000]
AT_ONCE = 16
MORE = "breaker: {consecutive_failures: 1000, success_rate: 0}\nretry: {attempts: 1}"


def rss_mib() -> float:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


async def answer(_: Endpoint, writer: asyncio.StreamWriter, seen: Seen) -> None:
    """The mutant whose number the request has, in pieces, and the end."""
    rng = random.Random(seen.values("x-mutant")[0])
    data = mutate(rng, SEEDS, TOKENS)
    for piece in pieces(data, rng):
        if writer.transport.is_closing():
            return
        writer.write(piece)
        await asyncio.sleep(0)
    if not writer.transport.is_closing():
        writer.close()


async def ask(number: str, port: int) -> str:
    """How it ended for the client."""
    talk = await Talk.open(port)
    try:
        first, _, rest = GOOD.partition(b"\r\n")
        await talk.say(first + b"\r\nX-Mutant: " + number.encode() + b"\r\nConnection: close\r\n" + rest, "whole")
        heard = await talk.hear(lambda heard: False, 20.0)
        if not heard.ended:
            return "hangs"
        if len(heard.answers) > 1:
            return "more than one answer"
        if not heard.answers or not heard.answers[0].whole:
            return "cut"
        return "502" if heard.answers[0].status == 502 else "whole"
    finally:
        talk.close()


async def run(runs: int, seed: int) -> dict[str, object]:
    """All of them; the figures."""
    lost: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(repr(context)))
    ends: Counter[str] = Counter()
    grown = 0.0
    async with Endpoint() as endpoint, rig(endpoint.url, more=MORE) as it:
        endpoint.script = answer
        for start in range(0, runs, AT_ONCE):
            numbers = [f"{seed}:{n}" for n in range(start, min(runs, start + AT_ONCE))]
            ends.update(await asyncio.gather(*(ask(number, it.port) for number in numbers)))
            endpoint.seen.clear()
            it.records.requests.clear()
            if start == min(runs, 5000) // AT_ONCE * AT_ONCE:
                grown = -rss_mib()
        grown += rss_mib()
        in_flight = it.in_flight()
    return {"runs": runs, "seed": seed, **ends, "lost": lost[:5], "in flight": in_flight, "MiB grown": round(grown, 1)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.mutants")
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(json.dumps(uvloop.run(run(args.runs, args.seed))))
