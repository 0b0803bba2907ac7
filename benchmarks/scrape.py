# SPDX-License-Identifier: Apache-2.0
"""What reading engines' metrics costs: CPU per page, and for a fleet.

`python -m benchmarks.scrape`. Two figures for each recorded page: `parse`, prometheus_client's parser alone, for scale;
`read`, what lbproxy makes of the page, bytes to `LoadMetrics`. Rounds alternate between pages, and the median of the
rounds counts. Then the fleet, for each page: the installed `lbproxy` in a process of its own, before 100 endpoints that
answer with that page every 200 ms, without a client. What it takes is user + system time of that process as
/proc/PID/stat has it, less what the same process takes before endpoints that are not scraped, so that probes and timers
are told apart. Times are CPU times, so that other work on the machine hardly matters; it makes lbproxy come later to
its scrapes, though, so they are counted (by lbproxy's own /metrics), and the share of a core is given for 500 a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from lbproxy.core.engines.dialects import ENGINES
from lbproxy.core.engines.readings import PageReader

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
    """Model servers on ports that are told: /metrics is the page that was posted last, all else is well."""
    pages = {"": b""}

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.readline():
            await reader.readuntil(b"\r\n\r\n")
            method, path = request.decode().split()[:2]
            body, kind = b'{"object":"list","data":[{"id":"m"}]}', "application/json"
            if method == "POST":
                pages[""] = (PAGES / f"{path.strip('/')}.prom").read_bytes()
            elif path == "/metrics":
                body, kind = pages[""], "text/plain; version=0.0.4"
            writer.write(
                f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            )
            await writer.drain()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):  # a proxy that stops resets its connections
            await talk(reader, writer)

    async def main() -> None:
        servers = [await asyncio.start_server(answer, "127.0.0.1", 0) for _ in range(ENDPOINTS)]
        told.send([server.sockets[0].getsockname()[1] for server in servers])
        await asyncio.Event().wait()

    asyncio.run(main())


def per_call_us(call: Callable[[], object], repeat: int) -> float:
    """CPU microseconds of one call."""
    began = time.process_time()
    for _ in range(repeat):
        call()
    return (time.process_time() - began) / repeat * 1e6


def measure_pages(rounds: int, repeat: int) -> dict[str, dict[str, list[float]]]:
    """CPU microseconds by page and by what is done with it, one figure a round."""
    figures: dict[str, dict[str, list[float]]] = {name: {"parse": [], "read": []} for name in MEASURED}
    readers = {name: PageReader(ENGINES[engine], keep_s=2.0) for name, engine in MEASURED.items()}
    for _ in range(rounds):
        for name, reader in readers.items():
            page = (PAGES / f"{name}.prom").read_bytes()
            parse, read = partial(_parse, page.decode()), partial(_read, reader, page)
            figures[name]["parse"].append(per_call_us(parse, 2))
            figures[name]["read"].append(per_call_us(read, repeat))
    return figures


def _parse(page: str) -> None:
    assert list(text_string_to_metric_families(page))


def _read(reader: PageReader, page: bytes) -> None:
    assert reader.read(page, scraped_at=time.monotonic(), wall_time=time.time()).metrics is not None


# --- The fleet --------------------------------------------------------------------------------------------------------


class Fleet(NamedTuple):
    """What one process took in one window."""

    cpu_s: float
    wall_s: float
    scrapes: float


@contextmanager
def lbproxy(ports: list[int], *, scraped: bool) -> Iterator[tuple[int, str]]:
    """The product before these endpoints, once all are up and, if so, read: its process, and its admin URL."""
    more = "" if scraped else ", metrics: null"
    endpoints = "".join(f"  - {{url: 'http://127.0.0.1:{port}'{more}}}\n" for port in ports)
    with TemporaryDirectory() as folder:
        config = Path(folder) / "cfg.yaml"
        config.write_text(f"listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\ndrain: {{lame_duck: 0s}}\nendpoints:\n{endpoints}")
        command = [sys.executable, "-m", "lbproxy", "--config", str(config)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                found = None
                while found is None:
                    found = re.search(r"admin on (http://[0-9.:]+)", process.stdout.readline())
                wanted = "lbproxy_endpoint_waiting{" if scraped else "lbproxy_endpoint_up{"
                while httpx.get(f"{found[1]}/metrics").text.count(f"\n{wanted}") < len(ports):
                    time.sleep(0.1)
                yield process.pid, found[1]
            finally:
                process.terminate()


def cpu_s(pid: int) -> float:
    """User and system time of a process so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def scrapes_of(admin: str) -> float:
    """Good scrapes so far. Any other is a defect of the measurement."""
    page = httpx.get(f"{admin}/metrics").text
    results = re.findall(r'\nlbproxy_scrapes_total\{.*result="(\w+)"\} (\S+)', page)
    assert all(result == "ok" for result, _ in results), results
    return sum(float(count) for _, count in results)


def measure_fleet(ports: list[int], *, scraped: bool, seconds: float) -> Fleet:
    """One window of one process."""
    with lbproxy(ports, scraped=scraped) as (pid, admin):
        time.sleep(2.0)
        scrapes, began, began_cpu_s = scrapes_of(admin), time.monotonic(), cpu_s(pid)
        time.sleep(seconds)
        took_s, wall_s = cpu_s(pid) - began_cpu_s, time.monotonic() - began
        return Fleet(took_s, wall_s, scrapes_of(admin) - scrapes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeat", type=int, default=200, help="pages in each round")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each window of the fleet")
    parser.add_argument("--json", action="store_true", help="nothing but vLLM's page before a fleet, as a JSON object")
    args = parser.parse_args()
    if args.json:
        with fleet() as ports:
            print_target(ports, args.seconds)
        return
    print("CPU time in us, median of rounds (best round)\n\n| page | KB | parse | read |\n|---|---|---|---|")
    for name, took in measure_pages(args.rounds, args.repeat).items():
        cells = [f"{statistics.median(values):.0f} ({min(values):.0f})" for values in took.values()]
        size = (PAGES / f"{name}.prom").stat().st_size / 1000
        print(f"| {name} | {size:.0f} | {' | '.join(cells)} |", flush=True)
    with fleet() as ports:
        print_fleets(ports, args.seconds)


@contextmanager
def fleet() -> Iterator[list[int]]:
    """The model servers' ports."""
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    try:
        yield ours.recv()
    finally:
        server.terminate()


class Share(NamedTuple):
    """What scraping a page costs."""

    seen: Fleet
    each_s: float
    """CPU time of a scrape."""
    cores: float
    """All of lbproxy at exactly ENDPOINTS / INTERVAL_S scrapes a second."""


def share_of(name: str, ports: list[int], alone_share: float, seconds: float) -> Share:
    """The fleet with this page."""
    httpx.post(f"http://127.0.0.1:{ports[0]}/{name}")
    seen = measure_fleet(ports, scraped=True, seconds=seconds)
    each_s = (seen.cpu_s - alone_share * seen.wall_s) / seen.scrapes
    return Share(seen, each_s, alone_share + each_s * ENDPOINTS / INTERVAL_S)


def print_target(ports: list[int], seconds: float) -> None:
    alone = measure_fleet(ports, scraped=False, seconds=seconds)
    share = share_of(next(iter(MEASURED)), ports, alone.cpu_s / alone.wall_s, seconds)
    figures = {"cores": share.cores, "each_us": share.each_s * 1e6, "scrapes_per_s": share.seen.scrapes / seconds}
    print(json.dumps(figures))


def print_fleets(ports: list[int], seconds: float) -> None:
    print(f"\n{ENDPOINTS} endpoints, own process, {seconds:.0f} s each\n")
    print("| page | scrapes a second | CPU for each | share of a core | at 500 a second |\n|---|---|---|---|---|")
    alone = measure_fleet(ports, scraped=False, seconds=seconds)
    alone_share = alone.cpu_s / alone.wall_s
    print(f"| not scraped | 0 | | {alone_share:.1%} | |", flush=True)
    for name in MEASURED:
        seen, each_s, cores = share_of(name, ports, alone_share, seconds)
        cells = [
            f"{seen.scrapes / seen.wall_s:.0f}",
            f"{each_s * 1e6:.0f} us",
            f"{seen.cpu_s / seen.wall_s:.1%}",
            f"{cores:.1%}",
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
