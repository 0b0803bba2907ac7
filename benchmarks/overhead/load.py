# SPDX-License-Identifier: Apache-2.0
"""The workloads, and a run of one of them against a port.

Builds server.c and load.c by the Makefile's rule, writes request bodies, starts both programs on the load's core. What
a run gives is a `Figures`: raw numbers of one window of time, with the CPU of proxy, load and server in that window.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

from benchmarks.overhead.conversation import CHAT, MESSAGES, RESPONSES, conversation
from benchmarks.overhead.process import LOAD_CORE, Usage, busy_s, cpu_s

ROOT = Path(__file__).parents[2]
BENCH = ROOT / ".bench"
"""Programs and peers, not under version control."""
METRICS_PAGE = ROOT / "tests/fixtures/metrics/vllm-0.32.0-idle-after-requests.prom"
"""What the server shows routers that scrape: 58 KB, recorded from vLLM."""
SAMPLE_S = 0.2
"""Time between two looks at a proxy's memory."""


MARK = "########"
"""In a prompt: load.c writes each request's number there."""
Kind = Literal["requests", "events", "memory", "ttft"]
"""What its table shows: CPU per request, CPU per event, memory and delays of many streams, times to first events."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What the load does. With `events` at 0, requests in a closed loop; else streams of so many events."""

    key: str
    title: str
    kind: Kind
    connections: int
    body_bytes: int
    """Of the whole body, about."""
    events: int = 0
    beat_ms: int = 20
    """Between two events of a stream."""
    warm_s: float = 0.5
    peers: tuple[str, ...] | None = None
    """The only ones that take part, besides lbproxy; None: all."""
    agent: str | None = None
    """The body is a coding agent's conversation in the form of this path: all of it is everybody's but for its end."""

    @property
    def unit(self) -> str:
        """What CPU is counted per."""
        return "event" if self.kind in ("events", "memory") else "request"

    @property
    def events_per_s(self) -> float:
        """How many come if nobody falls behind; 0 if nothing sets a pace."""
        return self.connections * 1000 / self.beat_ms if self.unit == "event" else 0.0

    def body(self) -> bytes:
        """The body of every request: the first half of the prompt is everybody's, the second half its own.

        The server takes the number of events and the beat from it.
        """
        if self.agent is not None:
            return conversation(self.body_bytes, MARK, self.agent)
        half = "a word or " * max(1, (self.body_bytes - 130) // 20)
        streamed = {"stream": True, "max_tokens": self.events, "seed": self.beat_ms}
        options = streamed if self.events else {"max_tokens": 6}
        prompt = f"{half}{MARK} {half}"
        return json.dumps({"model": "m", **options, "messages": [{"role": "user", "content": prompt}]}).encode()


DEFAULTS = ", defaults"
"""After the name of a router that runs with its own default policy."""
BESIDE_AGENTS = ("nginx", "envoy", *(f"{name}{DEFAULTS}" for name in ("sglang-router", "smg", "vllm-router")))
WARM = Workload("warm", "", "requests", 1, 1024)
"""What everybody can answer at once, to warm up with: other workloads may be long streams."""
LONG = 220 * 1024


def _of_agent(key: str, title: str, connections: int, kib: int, path: str) -> Workload:
    return Workload(key, title, "requests", connections, kib << 10, agent=path, peers=BESIDE_AGENTS)


# sse, held: streams longer than the window, so that it holds events and nothing else. streams: shorter ones, which end
# and begin anew, so that whole streams and times to first events are seen too.
WORKLOADS = (
    Workload("1k", "1 KB request", "requests", 64, 1024),
    Workload("32k", "32 KB request", "requests", 64, 32 * 1024),
    Workload("sse", "Event of a stream, 500 streams x 20 ms", "events", 500, 1024, events=400, warm_s=1.5),
    Workload("ttft", "Time to the first event at low load", "ttft", 4, 1024, events=3, beat_ms=10),
    Workload("streams", "2,000 streams x 50 ms", "memory", 2000, 1024, events=100, beat_ms=50, warm_s=3),
    *(
        Workload(f"220k-{n}", f"220 KB prompts, {n} streams at a time", "ttft", n, LONG, events=5, beat_ms=1, warm_s=1)
        for n in (20, 100, 200)
    ),
    *(
        _of_agent(f"{size}{name}", f"{size.upper()}B of an agent, {many}", n, count, CHAT)
        for size, count in (("256k", 256), ("1m", 1024), ("4m", 4096))
        for name, many, n in (("", "16 at a time", 16), ("-one", "one at a time", 1))
    ),
    *(
        _of_agent(f"{size}-{name}", f"{size.upper()}B of an agent, {path}", 16, count, path)
        for size, count in (("256k", 256), ("1m", 1024))
        for name, path in (("messages", MESSAGES), ("responses", RESPONSES))
    ),
    Workload(
        *("held", "8,900 streams x 1 s", "memory", 8900, 1024, 60, 1000, 20),
        peers=("nginx", "haproxy", "envoy"),
    ),
)


class Quantiles(TypedDict):
    """Of one kind of time, in milliseconds; 0 where none was seen."""

    p50: float
    p99: float


class Figures(TypedDict):
    """One window of one workload. load.c says what is counted as what."""

    seconds: float
    requests: int
    errors: int
    complaints: str
    """What the load said of the first errors."""
    events: int
    latency_ms: Quantiles
    ttft_ms: Quantiles
    delay_ms: Quantiles
    gap_ms: Quantiles
    cpu_s: float
    """The load's own."""
    server_cpu_s: float
    proxy_cpu_s: float | None
    """None: there was no proxy."""
    others_cpu_s: float
    """What else ran on the machine, this program included."""
    proxy_rss_bytes: int | None
    """The most that was seen in the window."""


class LoadError(Exception):
    """The load gave up; the text says what it saw."""


def build() -> None:
    """Compile both programs, if they changed. Raises LoadError."""
    targets = [".bench/server", ".bench/load"]
    made = subprocess.run(["make", "--silent", *targets], cwd=ROOT, capture_output=True, text=True, check=False)
    if made.returncode:
        raise LoadError(f"server.c and load.c do not compile:\n{made.stderr}")


@contextmanager
def server(core: str = LOAD_CORE) -> Iterator[tuple[int, int]]:
    """The model server on the load's core, or another one: its port and process id."""
    command = ["taskset", "-c", core, str(BENCH / "server"), "0", str(METRICS_PAGE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline().rpartition(" ")[2]), process.pid
        finally:
            process.terminate()


def run_load(
    workload: Workload, port: int, seconds: float, *, server_pid: int, proxy: Usage | None, core: str = LOAD_CORE
) -> Figures:
    """Load the port, and look at the proxy while the window lasts. Raises LoadError."""
    body = BENCH / f"{workload.key}.json"
    body.write_bytes(workload.body())
    numbers = (workload.connections, workload.events, workload.warm_s, seconds)
    command = ["taskset", "-c", core, str(BENCH / "load"), str(port), str(body), *map(str, numbers)]
    command.append(workload.agent or CHAT)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            with contextlib.suppress(EOFError):
                _line(process, lambda: None)
                before = cpu_s([server_pid]), proxy.cpu_s() if proxy else 0.0, busy_s()
                sizes = [proxy.rss_bytes()] if proxy else []
                result = json.loads(_line(process, lambda: sizes.append(proxy.rss_bytes()) if proxy else None))
                result["server_cpu_s"] = cpu_s([server_pid]) - before[0]
                result["proxy_cpu_s"] = proxy.cpu_s() - before[1] if proxy else None
                ours = result["cpu_s"] + result["server_cpu_s"] + (result["proxy_cpu_s"] or 0)
                result["others_cpu_s"] = max(0.0, busy_s() - before[2] - ours)
                result["proxy_rss_bytes"] = max(sizes, default=None)
                result["complaints"] = _complaints(process)
                figures: Figures = result
                return figures
            raise LoadError(_complaints(process) or "the load ended early")
        finally:
            process.kill()


def _complaints(process: subprocess.Popen[str]) -> str:
    """What the load wrote besides, on one line; waits for its end."""
    assert process.stderr is not None
    return "; ".join(process.stderr.read().split("\n")).strip("; ")


def _line(process: subprocess.Popen[str], look: Callable[[], object]) -> str:
    """The next line, with a look every now and then while it does not come. Raises EOFError."""
    assert process.stdout is not None
    while not select.select([process.stdout], [], [], SAMPLE_S)[0]:
        look()
    if line := process.stdout.readline():
        return line
    raise EOFError
