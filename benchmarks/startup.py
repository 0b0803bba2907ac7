# SPDX-License-Identifier: Apache-2.0
"""How long lbproxy takes from its start to the first answer that it relays.

    .venv/bin/python -m benchmarks.startup [--rounds 15] [--json] [--lbproxy PATH]

Each round starts `python -c pass`, which is what Python itself takes, and then `lbproxy --config FILE` with its
defaults before one endpoint; a client asks until it gets 200. Time is from the start of the process to the answer's
last byte, CPU is user and system time of the process up to then. Bytecode is compiled beforehand, as an installation
does.

    .venv/bin/python -m benchmarks.startup --parts [--write]

What of the time and memory of a start the libraries take, and what lbproxy: each is imported after the ones before it,
in a process of its own for each round, and then lbproxy runs with one endpoint. `--write` puts it into
benchmarks/COST.md.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.overhead.plan import machine, today
from benchmarks.overhead.process import cpu_s, free_port, rss_bytes
from benchmarks.overhead.report import insert, table

ROOT = Path(__file__).parents[1]
GIVE_UP_S = 30.0
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]})
ANSWER = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()
PAGE = ROOT / "benchmarks" / "COST.md"
MARK = "<!-- generated: parts of a start -->"
PARTS = {
    "Python": "",
    "asyncio, uvloop": "asyncio uvloop",
    "pydantic, PyYAML": "pydantic yaml",
    "aiohttp, with the `ssl` module": "aiohttp aiohttp.web",
    "msgspec, orjson, xxhash, websockets": "msgspec orjson xxhash websockets.frames",
    "prometheus-client": "prometheus_client",
    "lbproxy": "lbproxy.commands.cli lbproxy.processes.app",
}
"""What is imported, in this order."""
IMPORTER = """
import importlib, json, os, sys, time
found = []
for names in json.loads(sys.argv[1]):
    began = time.process_time()
    for name in names.split():
        importlib.import_module(name)
    pages = int(open("/proc/self/statm").read().split()[1])
    found.append((1e3 * (time.process_time() - began), pages * os.sysconf("SC_PAGE_SIZE") / 1e6))
print(json.dumps(found))
"""


class Took(NamedTuple):
    """One start, in milliseconds."""

    wall_ms: float
    cpu_ms: float
    rss_mb: float = 0.0
    """At the first response."""


class _Endpoint(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        # In one write: Nagle's algorithm would hold a second one back for 40 ms.
        self.wfile.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(ANSWER), ANSWER)
        )

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class calls it so
        pass


class _Endpoints(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        pass  # each start ends by a kill, which resets its connections


@contextmanager
def endpoint() -> Iterator[int]:
    """A server that says 200 to everything: its port."""
    with _Endpoints(("127.0.0.1", 0), _Endpoint) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def bare() -> Took:
    """Python alone."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    _, _, used = os.wait4(process.pid, 0)
    process.returncode = 0
    return Took((time.perf_counter() - began) * 1e3, (used.ru_utime + used.ru_stime) * 1e3)


def start(folder: Path, server_port: int, where: Path) -> Took:
    """lbproxy, up to the first 200. Raises AssertionError if it does not come."""
    port, config, log = free_port(), folder / "cfg.yaml", folder / "log"
    config.write_text(
        f"listen: 127.0.0.1:{port}\nadmin: 127.0.0.1:{free_port()}\nendpoints: ['http://127.0.0.1:{server_port}']\n"
    )
    with log.open("wb") as out:
        began = time.perf_counter()
        command = [sys.executable, "-m", "lbproxy", "--config", str(config)]
        with subprocess.Popen(command, stdout=out, stderr=out, cwd=where) as process:
            try:
                while not _answers(port):
                    assert process.poll() is None, log.read_text()
                    assert time.perf_counter() - began < GIVE_UP_S, log.read_text()
                    time.sleep(0.002)
                wall_ms, pids = (time.perf_counter() - began) * 1e3, [process.pid]
                return Took(wall_ms, cpu_s(pids) * 1e3, rss_bytes(pids) / 1e6)
            finally:
                process.kill()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/chat/completions", BODY, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            return answer.status == 200
    return False


def measure(rounds: int, places: dict[str, Path]) -> dict[str, list[Took]]:
    """All starts, by who was started. The kinds take turns, and each has one start before that is not kept."""
    found: dict[str, list[Took]] = {"python -c pass": [], **{name: [] for name in places}}
    for where in places.values():
        compileall.compile_dir(str(where / "lbproxy"), quiet=1)
    with TemporaryDirectory() as name, endpoint() as port:
        for number in range(-1, rounds):
            for kind, took in found.items():
                one = start(Path(name), port, places[kind]) if kind in places else bare()
                if number >= 0:
                    took.append(one)
    return found


def parts(rounds: int) -> str:
    """The table of what is imported."""
    command = [sys.executable, "-c", IMPORTER, json.dumps(list(PARTS.values()))]
    runs = [json.loads(subprocess.check_output(command, cwd=ROOT)) for _ in range(rounds)]
    middles = [[statistics.median(column) for column in zip(*each, strict=True)] for each in zip(*runs, strict=True)]
    starts = measure(rounds, {"lbproxy": ROOT})
    bare_ms, done = (statistics.median(one.cpu_ms for one in starts[kind]) for kind in ("python -c pass", "lbproxy"))
    rows, so_far = [], 0.0
    for name, (cpu_ms, mb) in zip(PARTS, middles, strict=True):
        rows.append([name, f"{bare_ms if name == 'Python' else cpu_ms:.0f}", f"{mb - so_far:.1f}"])
        so_far = mb
    imported_ms = bare_ms + sum(cpu_ms for cpu_ms, _ in middles[1:])
    rss_mb = statistics.median(one.rss_mb for one in starts["lbproxy"])
    rows.append(["settings, sockets, probes, the first request", f"{done - imported_ms:.0f}", f"{rss_mb - so_far:.1f}"])
    rows.append(["in all", f"{done:.0f}", f"{rss_mb:.1f}"])
    about = f"`python -m benchmarks.startup --parts --write`, medians of {rounds} rounds, {today()}. {machine()}."
    return f"{about}\n\n{table(['what', 'CPU, ms', 'resident memory, MB'], rows)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="nothing but the medians, as a JSON object")
    parser.add_argument("--lbproxy", action="append", type=Path, default=[], metavar="CHECKOUT", help="this one too")
    parser.add_argument("--parts", action="store_true", help="what of it the libraries take")
    parser.add_argument("--write", action="store_true", help="with --parts: into COST.md")
    args = parser.parse_args()
    if args.parts:
        text = parts(args.rounds)
        print(text)
        if args.write:
            PAGE.write_text(insert(PAGE.read_text(), text, MARK))
        return
    places = {"lbproxy": ROOT, **{f"lbproxy ({path.name})": path.absolute() for path in args.lbproxy}}
    found = measure(args.rounds, places)
    if args.json:
        middles = {name: statistics.median(one.wall_ms for one in took) for name, took in found.items()}
        print(json.dumps({"first_answer_ms": middles["lbproxy"], "python_ms": middles["python -c pass"]}))
        return
    print("| started | first answer, ms: median | least | most | CPU, ms: median | least |\n|---|---|---|---|---|---|")
    for name, took in found.items():
        walls, used = [one.wall_ms for one in took], [one.cpu_ms for one in took]
        figures = (statistics.median(walls), min(walls), max(walls), statistics.median(used), min(used))
        print(f"| {name} | {' | '.join(f'{value:.0f}' for value in figures)} |")


if __name__ == "__main__":
    main()
