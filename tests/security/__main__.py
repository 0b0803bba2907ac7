# SPDX-License-Identifier: Apache-2.0
"""Figures that a test cannot assert, because a busy machine would fail them: `python -m tests.security [NAME ...]`.

One JSON line each: how long guesses at a key take, what a stalled handshake holds, how large the metrics page gets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

import httpx

from lbproxy.core.requests.outcome import LbError
from lbproxy.proxy.request.keys import KeyRing
from tests.support.aio import until
from tests.support.endpoint import NOT_FOUND, OK, Script, ScriptedEndpoint, answer
from tests.support.load import load
from tests.support.process import LISTEN, Process, mock
from tests.support.rig import RawClient, post
from tests.support.tls import Authority

KEY = "sk-0123456789abcdefghijklmnopqrstuvwxyz"
FIRST, LAST = f"x{KEY[1:]}", f"{KEY[:-1]}!"
"""Wrong in the first character, and in the last."""


def middle(samples: list[float]) -> float:
    return statistics.median(samples)


async def timing() -> dict[str, object]:
    """The look-up alone, and whole requests; the two guesses take turns, in an order that is drawn for each pair."""
    ring = KeyRing({sha256(KEY.encode()).digest(): "a"})
    rng = random.Random(1)
    pairs, taken = 200_000, {FIRST: list[float](), LAST: list[float]()}
    lines = {key: f"Authorization: Bearer {key}\r\n".encode() for key in taken}
    for _ in range(pairs):
        for key in rng.sample((FIRST, LAST), 2):
            began = time.perf_counter_ns()
            try:
                ring.name_of(lines[key])
            except LbError:
                taken[key].append(time.perf_counter_ns() - began)
    alone = {key: middle(samples) for key, samples in taken.items()}
    with tempfile.TemporaryDirectory() as folder, mock("--speed", "20") as (_, server):
        config = Path(folder) / "cfg.yaml"
        settings = f"log: {{access: false}}\nauth: {{keys: ['{KEY}']}}\nendpoints: [{server}]\n"
        config.write_text(f"{LISTEN}\nadmin: null\n{settings}")
        with Process("--config", str(config)) as process:
            port = int(process.wait_for(r"listens on http://127.0.0.1:(\d+)")[1])
            whole: dict[str, list[float]] = {FIRST: [], LAST: []}
            asks = {key: post(more=f"Authorization: Bearer {key}\r\n") for key in whole}
            for _ in range(20_000):
                for key in rng.sample((FIRST, LAST), 2):
                    client = RawClient(*await asyncio.open_connection("127.0.0.1", port))
                    began = time.perf_counter_ns()
                    client.send(asks[key])
                    await client.head()
                    whole[key].append(time.perf_counter_ns() - began)
                    client.writer.transport.abort()
    differences = sorted(one - other for one, other in zip(whole[FIRST], whole[LAST], strict=True))
    sure = round(0.98 * len(differences) ** 0.5)  # the ranks between which the median lies, in 95 of 100 cases
    half = len(differences) // 2
    return {
        "look_up_pairs": pairs,
        "look_up_median_ns": [alone[FIRST], alone[LAST]],
        "look_up_difference_ns": alone[FIRST] - alone[LAST],
        "request_pairs": len(whole[FIRST]),
        "request_median_us": [middle(whole[FIRST]) / 1e3, middle(whole[LAST]) / 1e3],
        "request_difference_us": middle(differences) / 1e3,
        "request_difference_95_us": [differences[half - sure] / 1e3, differences[half + sure] / 1e3],
    }


async def cost() -> dict[str, object]:
    """Of the check, with a right key, among one and ten thousand."""
    figures: dict[str, object] = {}
    for count in (1, 10_000):
        ring = KeyRing({sha256(f"{KEY}{n}".encode()).digest(): "a" for n in range(count)})
        line = f"Authorization: Bearer {KEY}0\r\n".encode()
        best = float("inf")
        for _ in range(20):
            began = time.perf_counter_ns()
            for _ in range(10_000):
                ring.name_of(line)
            best = min(best, (time.perf_counter_ns() - began) / 10_000)
        figures[f"ns_of_{count}"] = round(best)
    return figures


async def names() -> dict[str, object]:
    """20,000 model names of clients, 200 of which are served."""
    served = [{"id": f"a-{n}", "object": "model"} for n in range(200)]
    listing = answer(json.dumps({"object": "list", "data": served}).encode())
    scripts: dict[str, Script] = {"/health": OK, "/metrics": NOT_FOUND, "/v1/models": listing, "/v1/completions": OK}
    with tempfile.TemporaryDirectory() as folder:
        async with ScriptedEndpoint(scripts) as endpoint:
            config = Path(folder) / "cfg.yaml"
            config.write_text(f"{LISTEN}\nadmin: 127.0.0.1:0\nendpoints: ['{endpoint.url}']\n")
            with Process("--config", str(config)) as process:
                match = await asyncio.to_thread(process.wait_for, r"listens on (http://\S+), admin on (http://\S+);")
                await until(lambda: '"to":"up"' in process.read(), "it is up")
                client = RawClient(*await asyncio.open_connection("127.0.0.1", int(match[1].rpartition(":")[2])))
                for n in range(20_000):
                    client.send(post(json.dumps({"model": f"a-{n}{'é' * (n % 60)}"}).encode(), "/v1/completions"))
                    await client.reply()
                pages, taken = [], []
                async with httpx.AsyncClient() as asker:
                    for _ in range(20):
                        began = time.perf_counter()
                        pages.append(len((await asker.get(f"{match[2]}/metrics")).content))
                        taken.append(time.perf_counter() - began)
    return {"names": 20_000, "page_bytes": max(pages), "median_ms": 1e3 * middle(taken), "worst_ms": 1e3 * max(taken)}


@asynccontextmanager
async def encrypted() -> AsyncIterator[tuple[Process, str, Authority, Path]]:
    """lbproxy with TLS before a simulated server that is up; its URL; whose certificate it has, and in which folder."""
    authority = Authority()
    with tempfile.TemporaryDirectory() as name, mock("--speed", "20") as (_, server):
        folder = Path(name)
        cert, key = authority.write(folder)
        config = folder / "cfg.yaml"
        tls = f"{{host: 127.0.0.1, port: 0, tls: {{cert: {cert}, key: {key}}}}}"
        config.write_text(f"listen: {tls}\nadmin: null\nlog: {{access: false}}\nendpoints: [{server}]\n")
        with Process("--config", str(config)) as process:
            url = process.wait_for(r"listens on (https://\S+),")[1]
            await until(lambda: '"to":"up"' in process.read(), "it is up")
            yield process, url, authority, folder


async def handshakes() -> dict[str, object]:
    """500 that stall, a third of them in the middle, while requests pass; then what an idle TLS connection holds."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    async with encrypted() as (process, url, authority, _):
        port = int(url.rpartition(":")[2])

        def rss() -> int:
            lines = Path(f"/proc/{process.process.pid}/status").read_text()
            return int(lines.partition("VmRSS:")[2].split()[0]) << 10

        async with load(url, tls=authority.client()) as clients:
            await until(lambda: clients.done > 100, "the load runs")
            before, began, done = rss(), time.monotonic(), clients.done
            stalled = [RawClient(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(500)]
            for client in stalled[::3]:
                client.send(b"\x16\x03\x01\x02\x00\x01\x00")
            held = rss() - before
            ended = []

            async def end(client: RawClient) -> None:
                with contextlib.suppress(ConnectionError):
                    await client.reader.read()
                ended.append(time.monotonic() - began)

            await asyncio.gather(*map(end, stalled))
            done = clients.done - done
        before = rss()
        context = authority.client()
        idle = [await asyncio.open_connection("127.0.0.1", port, ssl=context) for _ in range(500)]
        await asyncio.sleep(1.0)
        each = (rss() - before) / len(idle)
        for _, writer in idle:
            writer.transport.abort()
    return {
        "stalled": len(stalled),
        "closed_after_s": [round(min(ended), 2), round(max(ended), 2)],
        "bytes_each_while_stalled": held // len(stalled),
        "requests_meanwhile": done,
        "failed": len(clients.failed),
        "bytes_of_an_idle_tls_connection": round(each),
    }


async def certificates() -> dict[str, object]:
    """20 new certificates under load."""
    async with encrypted() as (process, url, authority, folder):
        async with load(url, tls=authority.client()) as clients:
            for n in range(20):
                authority.write(folder)
                await until(lambda: len(process.lines("reload")) > n, "it is read")  # noqa: B023
        refused = sum(line["level"] != "info" for line in process.lines("reload"))
    return {"reloads": 20, "refused": refused, "requests": clients.done, "failed": len(clients.failed)}


MEASURES: dict[str, Callable[[], Awaitable[dict[str, object]]]] = {
    one.__name__: one for one in (cost, timing, names, handshakes, certificates)
}


async def main(wanted: list[str]) -> None:
    for name in wanted or MEASURES:
        print(json.dumps({"measure": name, **await MEASURES[name]()}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
