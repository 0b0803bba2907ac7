# SPDX-License-Identifier: Apache-2.0
"""What the dashboard costs lbproxy: its CPU time with viewers and without, in turns, in one run.

    python -m benchmarks.dashboard                       100 endpoints, 5 viewers
    python -m benchmarks.dashboard --pictures FOLDER     and what it looks like (needs Chromium); `make pictures`

All endpoints are simulated servers in one process, scraped and probed at the defaults; 1,000 requests have been made,
so that as many are remembered. A viewer reads the feed as the page does. CPU time is user and system time by /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp

from tests.support.browser import Page
from tests.support.browser import page as browser_page
from tests.support.fleet import MODEL, fleet
from tests.support.pictures import save
from tests.support.process import Process, changing, lbproxy, mock

TURNS = 2
REMEMBERED = 1000
USERS = 12
LOADED_S = 60.0
WIDE, NARROW = 1440, 390
DOCS = Path("docs/images")
READY = "document.getElementById('connection-text').textContent === 'Live'"


def cpu_s(pid: int) -> float:
    """What the process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def viewers(admin: str, count: int) -> AsyncIterator[list[int]]:
    """So many read the feed; how many bytes each has had."""
    read = [0] * count

    async def view(client: aiohttp.ClientSession, number: int) -> None:
        async with client.get(f"{admin}/admin/events", timeout=aiohttp.ClientTimeout(total=None)) as answer:
            async for chunk in answer.content.iter_any():
                read[number] += len(chunk)

    async with aiohttp.ClientSession() as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(view(client, number)) for number in range(count)]
        yield read
        for task in tasks:
            task.cancel()


async def ask(client: aiohttp.ClientSession, url: str, rng: random.Random, tokens: int) -> None:
    """One streamed chat request of one of some populations with prefixes of their own."""
    prefix = f"You are assistant {rng.randrange(7)}. " * 120
    body = {
        "model": MODEL,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": prefix + "q" * rng.randrange(40, 3000)}],
    }
    headers = {"x-request-id": f"chat-{rng.randrange(10**6):06d}"}
    async with client.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        await answer.read()


async def measure(pid: int, admin: str, count: int, seconds: float) -> tuple[float, int]:
    """Percent of a core, and the bytes that a viewer had per second."""
    async with viewers(admin, count) as read:
        await asyncio.sleep(2.0)  # connected, and the first frame is out
        before, bytes_before = cpu_s(pid), sum(read)
        await asyncio.sleep(seconds)
        return 100.0 * (cpu_s(pid) - before) / seconds, int((sum(read) - bytes_before) / seconds / max(1, count))


async def run_cost(pid: int, url: str, admin: str, options: argparse.Namespace) -> None:
    """Print the figures."""
    rng = random.Random(1)
    async with aiohttp.ClientSession() as client:
        for _ in range(0, REMEMBERED, 50):
            await asyncio.gather(*(ask(client, url, rng, 2) for _ in range(50)))
    figures: dict[int, list[float]] = {0: [], options.viewers: []}
    each = 0
    for turn in range(TURNS):
        for count, seen in figures.items():
            percent, each = await measure(pid, admin, count, options.seconds)
            seen.append(percent)
            print(f"turn {turn + 1}: {count} viewers: {percent:.2f} % of a core", flush=True)
    cost = statistics.mean(figures[options.viewers]) - statistics.mean(figures[0])
    print(
        f"{options.endpoints} endpoints, {options.viewers} viewers, {options.seconds:.0f} s in each of {TURNS} turns:"
    )
    print(f"the dashboard costs {cost:.2f} % of a core; a viewer gets {each / 1024:.0f} KiB a second")


async def run_pictures(victim: Process, url: str, admin: str, options: argparse.Namespace) -> None:
    """PNG files of the page under load: one endpoint is draining, `victim`'s is down."""
    rng = random.Random(1)

    async def use(client: aiohttp.ClientSession) -> None:
        while True:
            with suppress(aiohttp.ClientError):  # its server was killed
                await ask(client, url, rng, rng.randrange(20, 160))
            await asyncio.sleep(rng.random())

    options.pictures.mkdir(parents=True, exist_ok=True)
    async with aiohttp.ClientSession() as client, browser_page() as tab, asyncio.TaskGroup() as group:
        tasks = [group.create_task(use(client)) for _ in range(USERS * (5 if options.endpoints > 10 else 1))]
        await tab.look(WIDE, 900)
        await tab.visit(f"{admin}/dashboard")
        await tab.until(READY)
        await asyncio.sleep(LOADED_S)
        async with client.get(f"{admin}/admin/endpoints") as answer:
            names = [one["name"] for one in (await answer.json())["endpoints"]]
        await client.post(f"{admin}/admin/endpoints/{names[2]}/drain", headers=changing(admin))
        victim.kill()
        await asyncio.sleep(8.0)
        await take(tab, options.pictures)
        for task in tasks:
            task.cancel()


async def take(tab: Page, folder: Path) -> None:
    """The page on a wide screen and on a phone, in light and dark, and what explains a request: for the documentation
    only what that shows.
    """
    for name, width, height in (("dashboard", WIDE, 1100), ("dashboard-phone", NARROW, 844)):
        for scheme in ("dark", "light"):
            await tab.look(width, height, scheme)
            await asyncio.sleep(1.0)
            if folder != DOCS or scheme == "light":
                save(await tab.picture(), folder / (f"{name}.png" if scheme == "light" else f"{name}-{scheme}.png"))
    if folder != DOCS:
        await tab.look(WIDE, 1100)
        await tab.js("document.querySelector('button.id').click()")
        await tab.until("document.getElementById('explanation').innerText.includes('Attempt 1')")
        save(await tab.picture(), folder / "dashboard-explain.png")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--endpoints", type=int, default=100)
    parser.add_argument("--viewers", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--pictures", type=Path)
    options = parser.parse_args()
    with fleet(options.endpoints) as urls, tempfile.TemporaryDirectory() as folder, ExitStack() as mortal:
        width = 3 if options.endpoints > 10 else 1
        named = [f"{{url: '{url}', name: gpu-{n:0{width}d}}}" for n, url in enumerate(urls, 1)]
        victim, its_url = mortal.enter_context(mock("--model", MODEL))
        named.append(f"{{url: '{its_url}', name: gpu-{options.endpoints + 1:0{width}d}}}")
        with lbproxy(Path(folder), named, "log: {access: false}\n") as (process, url, admin):
            process.wait_for("listens on")
            asyncio.run(wait_up(admin, len(named)))
            if options.pictures is not None:
                asyncio.run(run_pictures(victim, url, admin, options))
            else:
                asyncio.run(run_cost(process.process.pid, url, admin, options))


async def wait_up(admin: str, count: int) -> None:
    """Until every endpoint is up."""
    async with aiohttp.ClientSession() as client, asyncio.timeout(120):
        while True:
            async with client.get(f"{admin}/admin/state") as answer:
                state = await answer.json()
            if sum(one["health"] == "up" for one in state["endpoints"]) == count:
                return
            await asyncio.sleep(0.2)


if __name__ == "__main__":
    main()
