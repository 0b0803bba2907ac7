"""What reading engines' metrics costs: CPU per page, and for a fleet.

`python -m benchmarks.scrape`. Three figures for each recorded page: `parse`, prometheus_client's parser alone, for
scale; `read`, what lbproxy makes of the page, bytes to `LoadMetrics`; `scrape`, all of one scrape by the Scraper's own
functions over loopback, HTTP included, without the pauses. CPU is user + system time of this process; the server is
another process. Rounds alternate between pages, and the median of the rounds counts. The last column is the share of a
core that 100 such endpoints cost at one scrape every 200 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop
from prometheus_client.parser import text_string_to_metric_families

from lbproxy.control.scraper import Target, fetch_page
from lbproxy.core.engines import ENGINES
from lbproxy.core.readings import PageReader
from lbproxy.net.pool import ConnectionPool, Origin

PAGES = Path(__file__).parents[1] / "tests" / "fixtures" / "metrics"
MEASURED = {
    "vllm-0.32.0-load-lora-t0": "vllm",
    "vllm-0.32.0-dp2-load": "vllm",
    "sglang-0.5.23-load": "sglang",
    "llama.cpp-b11434-load": "llamacpp",
}
"""Page -> engine. Whole pages only, as the servers sent them."""
ENDPOINTS, INTERVAL_S = 100, 0.2


def serve(told: Connection) -> None:
    """Answer GET /NAME with that page, for ever, on a port that is told."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.readline():
            await reader.readuntil(b"\r\n\r\n")
            page = (PAGES / f"{request.split()[1].decode().strip('/')}.prom").read_bytes()
            head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {len(page)}\r\n\r\n"
            writer.write(head.encode() + page)
            await writer.drain()

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def per_call_us(call: Callable[[], object], repeat: int) -> float:
    """CPU microseconds of one call."""
    began = time.process_time()
    for _ in range(repeat):
        call()
    return (time.process_time() - began) / repeat * 1e6


async def measure(port: int, rounds: int, repeat: int) -> dict[str, dict[str, list[float]]]:
    """CPU microseconds by page and by what is done with it, one figure a round."""
    connections = ConnectionPool()
    figures: dict[str, dict[str, list[float]]] = {name: {"parse": [], "read": [], "scrape": []} for name in MEASURED}
    pages = {name: (PAGES / f"{name}.prom").read_bytes() for name in MEASURED}
    readers = {name: PageReader(ENGINES[engine], keep_s=2.0) for name, engine in MEASURED.items()}
    try:
        for _ in range(rounds):
            for name, page in pages.items():
                reader, target = readers[name], Target(Origin(("127.0.0.1", port)), f"/{name}", None)

                def read(page: bytes, reader: PageReader = reader) -> None:
                    assert reader.read(page, scraped_at=time.monotonic(), wall_time=time.time()).metrics is not None

                took = figures[name]
                took["parse"].append(per_call_us(lambda: list(text_string_to_metric_families(page.decode())), 2))  # noqa: B023
                took["read"].append(per_call_us(lambda: read(page), repeat))  # noqa: B023
                began = time.process_time()
                for _ in range(repeat):
                    read(await fetch_page(target, connections, timeout_s=5.0, max_bytes=1 << 21))
                took["scrape"].append((time.process_time() - began) / repeat * 1e6)
    finally:
        connections.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeat", type=int, default=200, help="pages in each round")
    args = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    try:
        figures = uvloop.run(measure(ours.recv(), args.rounds, args.repeat))
    finally:
        server.terminate()
    print("CPU time in us, median of rounds (best round)\n")
    print(f"| page | KB | parse | read | scrape | {ENDPOINTS} endpoints |\n|---|---|---|---|---|---|")
    for name, took in figures.items():
        cells = [f"{statistics.median(values):.0f} ({min(values):.0f})" for values in took.values()]
        share = statistics.median(took["scrape"]) / 1e6 * ENDPOINTS / INTERVAL_S
        size = (PAGES / f"{name}.prom").stat().st_size / 1000
        print(f"| {name} | {size:.0f} | {' | '.join(cells)} | {share:.0%} of a core |", flush=True)


if __name__ == "__main__":
    main()
