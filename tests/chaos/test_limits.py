# SPDX-License-Identifier: Apache-2.0
"""A proxy that runs out of descriptors or memory: T25 and T26."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.chaos.load import how_many, silent, told
from tests.chaos.rig import QUICK, Proxy, Rig, wait
from tests.chaos.tools import memory_group, need_program
from tests.chaos.verdict import pick
from tests.support.docs import ROOT
from tests.support.workers import WORKERS

LIMIT = 256


@pytest.mark.chaos("T25", "file descriptors run out (prlimit --nofile=256)")
def test_t25_descriptors(rig: Rig) -> None:
    case = rig.case
    limited = [need_program("prlimit"), f"--nofile={LIMIT}"]
    with rig.proxy(wrap=limited) as proxy, rig.load(proxy, workers=8, count=8, tokens=pick(250, 400, 600)) as streams:
        wait(lambda: proxy.in_flight() == 8, "streams run")
        hogs: list[socket.socket] = []
        began, cpu = time.monotonic(), proxy.cpu_s()
        for _ in range((LIMIT + 100) * max(1, WORKERS)):
            sock = socket.socket()
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(("127.0.0.1", proxy.port))
            hogs.append(sock)
        time.sleep(3.0)
        spent = (proxy.cpu_s() - cpu) / (time.monotonic() - began)
        case.expect("descriptors open", max(proxy.fds()), at_most=LIMIT)
        case.expect("CPU at the limit, % of a core", round(100 * spent, 1), at_most=50)
        for sock in hogs:
            sock.close()
        freed = time.monotonic()
        with rig.load(proxy, workers=1, count=1, tokens=1, streams=0.0) as one:
            one.wait()
        case.time("served again after", one.results()[-1].end - freed, at_most=1.0 + 0.5)
        results = streams.wait()
        case.expect("running streams cut", 8 - how_many(results, "ok"), at_most=0)
        case.expect("endpoints blamed", proxy.total("lbproxy_endpoint_transitions_total", 'to="down"'), at_most=0)
        case.expect("first request after it", how_many(one.results(), "ok"), at_least=1)


def joining(group: Path) -> list[str]:
    """Words before a command that put it into a group, so that it finds its limit as it starts."""
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]


BIG = """
import json, socket, sys, threading
host, port, size, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
kind = sys.argv[5]
said = {}
def ask(n):
    prompt = b"x" * size if kind == "text" else b""
    body = b'{"model":"sim","max_tokens":1,"prompt":"' + prompt + b'"}'
    if kind == "bomb":
        body = b'{"model":"sim","prompt":"x","max_tokens":1,"a":[' + b"{}," * (size // 3) + b"{}]}"
    try:
        with socket.create_connection((host, port), timeout=60) as sock:
            head = f"POST /v1/completions HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n"
            head += f"Content-Type: application/json\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
            try:
                sock.sendall(head.encode() + body)
            except OSError:
                pass
            said[n] = sock.recv(64).split()[1].decode()
    except (OSError, IndexError) as error:
        said[n] = type(error).__name__
threads = [threading.Thread(target=ask, args=(n,)) for n in range(count)]
[t.start() for t in threads]
[t.join() for t in threads]
print(json.dumps(said))
"""


def ask_big(proxy: Proxy, size: int, count: int, kind: str) -> dict[str, int]:
    """So many requests with a body of this size at once, from another process: how often each status came."""
    words = [sys.executable, "-c", BIG, "127.0.0.1", str(proxy.port), str(size), str(count), kind]
    done = subprocess.run(words, capture_output=True, check=True, cwd=ROOT, timeout=100, text=True)
    said = list(json.loads(done.stdout).values())
    return {one: said.count(one) for one in sorted(set(said))}


@pytest.mark.chaos("T26", "large bodies and JSON bombs in a memory group of 256 MiB")
def test_t26_memory(rig: Rig) -> None:
    case = rig.case
    # The share of a worker is as much as a single process has.
    with (
        memory_group(256 * 2**20 * (WORKERS + 1 if WORKERS > 1 else 1)) as group,
        rig.proxy(QUICK, lag_ms=250.0, wrap=joining(group)) as proxy,
    ):
        with rig.load(proxy, workers=4, tokens=5, streams=0.5) as load:
            load.until(good=10)
            said = {
                "1 MiB bodies": ask_big(proxy, 2**20, pick(100, 250, 1000), "text"),
                "31 MiB bodies": ask_big(proxy, 31 * 2**20, pick(8, 16, 64), "text"),
                "JSON bombs": ask_big(proxy, 30 * 2**20, pick(4, 20, 20), "bomb"),
            }
            after = time.monotonic()
            time.sleep(1.0)
        for kind, counts in said.items():
            case.figure(kind, ", ".join(f"{n} x {status}" for status, n in counts.items()))
            other = sum(n for status, n in counts.items() if status not in {"200", "400", "413", "429", "503"})
            case.expect(f"{kind} answered otherwise", other, at_most=0)
        case.expect("out-of-memory kills", killed(group), at_most=0)
        peak = int((group / "memory.max_usage_in_bytes").read_text()) / 2**20
        case.figure("memory at most, MiB", round(peak))
        case.expect("SF", silent(load.results()), at_most=0)
        late = [one for one in load.results() if one.at > after]
        assert proxy.process.process.poll() is None, f"it was killed: {said}"
        case.expect("good afterwards, of all", len(late) - how_many(late, "ok"), at_most=0)
        print(told(load.results()))


def killed(group: Path) -> int:
    words = (group / "memory.oom_control").read_text().split()
    return int(words[words.index("oom_kill") + 1])


def hostile_json() -> dict[str, bytes]:
    """Bodies under the size limit that are made to cost: names, and bytes."""
    many, size = 900_000, 31 << 20
    inside = {
        "keys": b'{"a":0,' + b",".join(b'"k%d":0' % n for n in range(many)) + b"}",
        "lists": b"[" + b"[]," * many + b"0]",
        "nested lists": b"[" + (b"[" * 900 + b"]" * 900 + b",") * 1000 + b"0]",
        "short texts": b'["' + b'a","' * (size // 4) + b'"]',
        "one text": b'"' + b"x" * size + b'"',
        "one text, escaped": b'"' + b"\\n" * (size // 2) + b'"',
        "one text, four bytes each": b'"' + "\U0001f600".encode() * (size // 4) + b'"',
        "texts of 20 KB": b'["' + (b"x" * 20_000 + b'","') * 750 + b'"]',
        "blanks": b" " * size + b"0",
        "numbers": b"[" + b"12345," * 500_000 + b"1]",
        "lists, nearly too many": b"[" + b"[]," * 80_000 + b"NaN]",
    }
    return {name: b'{"model":"sim","max_tokens":1,"prompt":"x","x":' + value + b"}" for name, value in inside.items()}


@pytest.mark.chaos("T34", "JSON made to hold the event loop, of up to 31 MiB")
def test_t34_hostile_json(rig: Rig) -> None:
    case = rig.case
    bodies = hostile_json()
    with rig.proxy(lag_ms=50.0) as proxy:
        with rig.load(proxy, workers=4, rate=4.0, tokens=5) as load:
            load.until(good=8)
            statuses = {}
            for name, body in bodies.items():
                headers = {"content-type": "application/json"}
                url = f"{proxy.url}/v1/completions"
                statuses[name] = httpx.post(url, content=body, headers=headers, timeout=60).status_code
        case.figure("bodies", len(bodies))
        case.figure("refused", sum(status == 400 for status in statuses.values()))
        case.expect("answered otherwise", sum(status not in {200, 400} for status in statuses.values()), at_most=0)
        case.expect("honest requests failed", len(load.results()) - how_many(load.results(), "ok"), at_most=0)
        print(statuses)
