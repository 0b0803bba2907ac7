# SPDX-License-Identifier: Apache-2.0
"""How many instructions a request takes in lbproxy, counted by valgrind: as many on a busy machine as on an idle one.

`python -m benchmarks.instructions` needs valgrind and cc (`apt-get install valgrind gcc`). The whole product runs as
installed, with metrics, decisions kept and the access log, but between transports that lead nowhere: no sockets, no
kernel, no event loop. So it says what a change of our code saves, and nothing about system calls. The clock goes on as
if some 10,000 requests came a second. Loads: `1k` and `32k` are requests with a whole answer, `sse` is one event of a
stream, `stream` a request whose answer has ten, and `worker` is what the balancer process does for a 1 KB request of a
worker process.

`--part lbproxy.core.policies.adaptive:Adaptive.price` counts only what happens within that function, with all that it
calls. `--functions` says in which functions the instructions are. `--checkout PATH` runs the lbproxy of another
checkout under this page's load, for a before and after. `--record`, in build/compiled, writes instructions.json, which
a test compares with what it counts: after a change that saves some, or one that costs some on purpose.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import functools
import gc
import importlib
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypedDict

import msgspec
import uvloop

from lbproxy.config.parse import parse
from lbproxy.control.telemetry import access_line as line
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.requests.openai import ModelCard
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.prompt_keys import hash_prompt
from lbproxy.core.requests.request import InferenceRequest, Usage
from lbproxy.driver.runtime import Runtime
from lbproxy.net.connections.pool import Connection
from lbproxy.net.dialing.origin import Origin
from lbproxy.net.listening.notify import Notifier
from lbproxy.processes import process
from lbproxy.processes.app import Proxy
from lbproxy.processes.data_plane import DataPlane, Parts
from lbproxy.processes.plane import WorkersPlane
from lbproxy.proxy.front.server import FrontEnd
from lbproxy.workers import messages as m
from lbproxy.workers.contents import served, submit_of
from lbproxy.workers.link import Sent
from lbproxy.workers.origins import Sending
from lbproxy.workers.server import Session

ROOT = Path(__file__).parents[1]
LOADS = ("1k", "32k", "sse", "stream", "worker")
LIBRARY = ROOT / ".bench/valgrind.so"
RECORDED = Path(__file__).with_name("instructions.json")
GUARDED = ("1k", "32k", "sse", "worker")
"""The loads of which a test allows no more than `WORSE` times what is recorded."""
WORSE = 1.03
LAYOUTS = ("", "# one", "# and another, so that what follows lies elsewhere in memory")
"""Comments in the settings. Where names lie in memory decides which of Python's look-ups of attributes displace each
other in its type cache: of one build an event took 10,407, 10,901 or 11,270 instructions.
"""
SHOWN = 60
"""Functions of a table."""
WARM, COUNTED = 600, 500
"""Requests, or events of streams."""
READS_A_SECOND = 100_000
"""The clock goes on by so much each time it is read: as if some 10,000 requests came a second."""

ANSWER = (
    b'{"id":"chatcmpl-0","object":"chat.completion","created":1700000000,"model":"m","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":" a few words of an answer"},"finish_reason":"length"}],'
    b'"usage":{"prompt_tokens":250,"completion_tokens":6,"total_tokens":256}}'
)
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(ANSWER), ANSWER)
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
DATA = (
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1700000000,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" t=00000001700000000000 "},"finish_reason":null}]}\n\n'
)
EVENT = b"%x\r\n%s\r\n" % (len(DATA), DATA)
LAST = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def request(body_bytes: int, *, stream: bool = False) -> bytes:
    """A plain request, as clients send it."""
    options = b'"stream":true' if stream else b'"max_tokens":6'
    body = b'{"model":"m",%s,"messages":[{"role":"user","content":"%s"}]}' % (
        options,
        b"a word or " * (body_bytes // 10),
    )
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )


class Nowhere(asyncio.Transport):
    """Takes bytes and remembers the last."""

    last = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.last = data  # type: ignore[assignment]

    def writelines(self, list_of_data: Any) -> None:
        self.last = list_of_data[-1]

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        pass

    close = resume_reading = pause_reading = abort

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


def _front(proxy: Proxy) -> FrontEnd:
    plane = proxy.plane
    assert isinstance(plane, DataPlane)
    return plane.front


def _set_clocks(runtime: Runtime) -> None:
    """Those of the event loop and of the log."""
    clock = itertools.count(runtime.now(), 1.0 / READS_A_SECOND)
    runtime.now = lambda: next(clock)
    wall = itertools.count(time.time(), 10.0 / READS_A_SECOND)
    vars(line)["time"] = SimpleNamespace(**{**vars(time), "time": lambda: next(wall)})


class Wiring:
    """A client's connection, so many endpoints, and all of lbproxy between them."""

    def __init__(self, policy: str, endpoints: int, more: str = "") -> None:
        urls = "\n".join(f"  - http://127.0.0.1:{port}" for port in range(1, endpoints + 1))
        settings = parse(f"{more}\nrouting: {{policy: {policy}}}\nendpoints:\n{urls}", environ={})

        self.proxy = proxy = Proxy(settings, Notifier.from_environment({}))
        runtime = proxy.runtime
        self.connections = []
        for endpoint in runtime.set_endpoints(proxy.discovery.endpoints()).added:
            runtime.report_models(endpoint.uid, [ModelCard("m", b'{"id":"m"}')])
            runtime.report_health(endpoint.uid, True, "")
            fresh = LoadMetrics(scraped_at=runtime.now() + 3600, waiting=0.0, running=0.0, kv_utilization=0.1)
            runtime.report_scrape(endpoint.uid, fresh)
            for _ in range(4):
                connection = Connection(proxy.connections, Origin.parse(endpoint.base_url))
                connection.connection_made(Nowhere())
                proxy.connections.keep(connection, idle=True)
                self.connections.append(connection)
        _set_clocks(runtime)
        self.client, self.transport = _front(proxy)(), Nowhere()
        self.client.connection_made(self.transport)
        self.client.address = "127.0.0.1"

    def turn(self) -> None:
        """What the loop would do at the end of its turn."""
        self.proxy.connections.cork.flush()
        self.proxy.runtime.hand_out()

    def answering(self) -> Connection:
        """The connection on which a request is."""
        return next(one for one in self.connections if one._receiver is not None)


def whole(wiring: Wiring, sent: bytes, rounds: int) -> None:
    """Requests and their answers, one after the other."""
    client, connections = wiring.client, wiring.connections
    for _ in range(rounds):
        client.data_received(sent)
        wiring.turn()
        for connection in connections:
            if connection._receiver is not None:
                connection.data_received(WHOLE)
        wiring.turn()


def events(wiring: Wiring, connection: Connection, rounds: int) -> None:
    """Of one stream."""
    for _ in range(rounds):
        connection.data_received(EVENT)
        wiring.turn()


def streams(wiring: Wiring, sent: bytes, rounds: int) -> None:
    """Streams of ten events."""
    client, connections = wiring.client, wiring.connections
    for _ in range(rounds):
        client.data_received(sent)
        wiring.turn()
        for connection in connections:
            if connection._receiver is not None:
                connection.data_received(STREAM + EVENT)
                for _ in range(9):
                    connection.data_received(EVENT)
                    wiring.turn()
                connection.data_received(LAST)
        wiring.turn()


class Balancing:
    """A link to a worker, and all of the balancer process behind it."""

    def __init__(self, policy: str, endpoints: int, more: str = "") -> None:
        urls = "\n".join(f"  - http://127.0.0.1:{port}" for port in range(1, endpoints + 1))
        settings = parse(f"{more}\nrouting: {{policy: {policy}}}\nendpoints:\n{urls}", environ={})
        self.proxy = proxy = Proxy(settings, Notifier.from_environment({}), self._make_plane)
        runtime = proxy.runtime
        for endpoint in runtime.set_endpoints(proxy.discovery.endpoints()).added:
            runtime.report_models(endpoint.uid, [ModelCard("m", b'{"id":"m"}')])
            runtime.report_health(endpoint.uid, True, "")
            fresh = LoadMetrics(scraped_at=runtime.now() + 3600, waiting=0.0, running=0.0, kv_utilization=0.1)
            runtime.report_scrape(endpoint.uid, fresh)
        _set_clocks(runtime)
        self.session, self.transport = Session(self.server), Nowhere()
        self.session.link.connection_made(self.transport)
        self.hears(_frame(m.Hello(0, 1)))
        self.server.ready()
        sending = Sending()
        self.frames = iter([_frames(sending, number) for number in range(WARM + COUNTED)])

    def _make_plane(self, parts: Parts) -> WorkersPlane:
        plane = WorkersPlane(parts, "", "", 1, begins=True)
        self.server = plane.server
        return plane

    def hears(self, frame: bytes) -> None:
        """What a worker sends in one turn of its loop; and the turn here."""
        self.session.link.data_received(frame)
        self.session.link.flush()
        self.proxy.runtime.hand_out()

    def ask(self, rounds: int) -> None:
        """Requests, one after the other, with the records that workers write of them."""
        for submitted, ended in itertools.islice(self.frames, rounds):
            self.hears(submitted)
            self.hears(ended)


def _frame(*messages: Sent) -> bytes:
    """As a worker sends them."""
    packed = msgspec.msgpack.encode(messages)
    return len(packed).to_bytes(4, "little") + packed


def _frames(sending: Sending, number: int) -> tuple[bytes, bytes]:
    """What a worker sends about a request: when it comes, and when its response is complete and sent to its client."""
    name, path, usage, began = f"{number:032x}", "/v1/chat/completions", Usage(250, None, 6), 1.0 + number
    asked = "POST", path, "127.0.0.1"
    keys = hash_prompt(b"a word or " * 96, model="m")
    request = InferenceRequest(name, "m", False, 1040, 960, tuple(keys))
    record = RequestRecord(name, *asked, began)
    record.number, record.route, record.model, record.endpoint = number, path, "m", "127.0.0.1:1"
    record.status, record.outcome, record.usage, record.attempts = 200, Outcome.COMPLETED, usage, 1
    record.request_bytes, record.response_bytes, record.flow = 1040, len(ANSWER), "anonymous"
    record.placed_at = record.first_byte_at = record.ended_at = began
    answered = m.Answered(number, m.OUTCOME_NUMBERS[Outcome.COMPLETED], usage, True)
    submit = sending.shortened(submit_of(number, request, record, frozenset(), None, False, None))
    return _frame(submit), _frame(served(record, answered))


async def count(load: str, policy: str, endpoints: int, part: str | None, more: str) -> None:
    """One load, under valgrind."""
    library = ctypes.CDLL(str(LIBRARY))
    wiring = (Balancing if load == "worker" else Wiring)(policy, endpoints, more)
    if isinstance(wiring, Balancing):
        run: Callable[[int], None] = wiring.ask
    elif load == "sse":
        wiring.client.data_received(request(1000, stream=True))
        wiring.turn()
        connection = wiring.answering()
        connection.data_received(STREAM + EVENT)
        run = functools.partial(events, wiring, connection)
    elif load == "stream":
        run = functools.partial(streams, wiring, request(960, stream=True))
    else:
        run = functools.partial(whole, wiring, request(960 if load == "1k" else 32_600))
    if part is not None:
        _toggled(part, library.toggle)
    process.settle()
    run(WARM)
    gc.collect()  # else the environment's size decides whether a collection falls into what is counted
    library.start()
    if part is None:
        library.toggle()
    run(COUNTED)
    if part is None:
        library.toggle()
    library.stop()
    last = wiring.transport.last
    assert load == "worker" or {"sse": b"data: {", "stream": b"[DONE]"}.get(load, b'"usage"') in last
    ended = wiring.proxy.telemetry.totals().requests
    assert load == "sse" or ended == WARM + COUNTED, f"{ended} requests ended"
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _toggled(part: str, toggle: Callable[[], object]) -> None:
    """Have a function counted."""
    module, _, path = part.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for one in outer:
        owner = getattr(owner, one)
    inner = getattr(owner, name)

    def counted(*args: Any, **named: Any) -> Any:
        toggle()
        try:
            return inner(*args, **named)
        finally:
            toggle()

    setattr(owner, name, counted)


@dataclass(frozen=True)
class How:
    """What is counted."""

    policy: str = "adaptive"
    endpoints: int = 1
    settings: str = ""
    part: str | None = None
    checkout: Path = ROOT
    profile: str = "/dev/null"
    """The file for callgrind's own output."""


class Record(TypedDict):
    """What is kept, beside what it was counted with."""

    instructions: dict[str, int]
    python: str
    machine: str


def missing() -> str | None:
    """What a count that can be compared with the recorded one lacks here; None if nothing."""
    lacking = [name for name in ("valgrind", "cc") if shutil.which(name) is None]
    if lacking:
        return f"for want of {' and '.join(lacking)}"
    if not process.is_compiled():
        return "for want of a compiled lbproxy: run it in build/compiled"
    return None


def built_with() -> tuple[str, str]:
    """On what the number of instructions depends, beside our own code: Python's version, the processor's kind."""
    return platform.python_version(), platform.machine()


def prepare() -> None:
    """Build what switches the counting on and off."""
    LIBRARY.parent.mkdir(exist_ok=True)
    source = str(ROOT / "benchmarks/valgrind.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(LIBRARY), source], check=True)


def measured(load: str, how: How = How()) -> float:
    """Instructions for each request or event, of a run in a process of its own. Ends the program if that fails."""
    path = str(how.checkout.resolve())
    run = f"import runpy, sys; sys.path[:0] = [{path!r}]; runpy.run_path({__file__!r}, run_name='__main__')"
    valgrind = ["--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no", f"--callgrind-out-file={how.profile}"]
    command = ["valgrind", *valgrind, sys.executable, "-P", "-c", run, "--child", "--load", load]
    command += ["--policy", how.policy, "--endpoints", str(how.endpoints), "--settings", how.settings]
    if how.part:
        command += ["--part", how.part]
    seeded = {**os.environ, "PYTHONHASHSEED": "0"}
    made = subprocess.run(command, capture_output=True, text=True, check=False, cwd=path, env=seeded)
    found = re.search(r"Collected : (\d+)", made.stderr)
    if found is None or made.returncode:
        raise SystemExit(made.stderr[-3000:])
    return int(found[1]) / COUNTED


def least(load: str, enough: float = 0.0) -> float:
    """The same in the best of `LAYOUTS`; others are not tried after one with at most `enough`."""
    found = inf
    for layout in LAYOUTS:
        found = min(found, measured(load, How(settings=layout)))
        if found <= enough:
            break
    return found


def by_function(profile: str) -> str:
    """The functions in which a run spends most, with their own instructions for each request or event."""
    command = ["callgrind_annotate", "--threshold=100", "--show-percs=no", "--auto=no", profile]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [re.match(r" *([0-9,]+)  (?:\S*?:)?(\S.*?)(?: \[(\S+)\])?$", line) for line in lines]
    found = [(int(row[1].replace(",", "")) / COUNTED, row[2], Path(row[3] or "").name) for row in rows if row]
    return "\n".join(f"{each:>12,.0f}  {name[:80]}  {where}" for each, name, where in found[1 : SHOWN + 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", action="append", choices=LOADS, help="may be said several times; default: all")
    parser.add_argument("--policy", default="adaptive")
    parser.add_argument("--endpoints", type=int, default=1)
    parser.add_argument("--settings", default="", metavar="YAML", help="more of them: 'explain: {requests: 0}'")
    parser.add_argument("--part", metavar="MODULE:FUNCTION")
    parser.add_argument("--functions", action="store_true", help=f"in which {SHOWN} functions they are")
    parser.add_argument("--checkout", type=Path, default=ROOT)
    parser.add_argument("--record", action="store_true", help=f"count {', '.join(GUARDED)}, and keep them")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        uvloop.run(count(args.load[0], args.policy, args.endpoints, args.part, args.settings))
        return
    prepare()
    if args.record:
        record()
        return
    for load in args.load or LOADS:
        with tempfile.NamedTemporaryFile() as file:
            how = How(args.policy, args.endpoints, args.settings, args.part, args.checkout, file.name)
            print(f"{load}: {measured(load, how):,.0f}", flush=True)
            if args.functions:
                print(by_function(file.name), flush=True)


def record() -> None:
    """Write what the test compares with."""
    if (why := missing()) is not None:
        raise SystemExit(f"not recorded, {why}")
    python, machine = built_with()
    counts = {load: round(least(load)) for load in GUARDED}
    RECORDED.write_text(json.dumps(Record(instructions=counts, python=python, machine=machine), indent=2) + "\n")
    print(counts)


if __name__ == "__main__":
    main()
