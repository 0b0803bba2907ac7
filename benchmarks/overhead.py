"""Proxy CPU per request, lbproxy beside nginx, in one run.

`make bench-overhead`. The proxies run one at a time on core 0; load (wrk) and the model server (nginx, one fixed
answer) run on core 1; rounds alternate, and the median of the rounds counts. lbproxy runs as installed with its default
settings, access log and metrics included; nginx with keep-alive to the model server, unbuffered, without a log. CPU is
user + system time of the proxy's process, from /proc. wrk and nginx are Debian packages of these names.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

PROXY_CORE, LOAD_CORE = "0", "1"
SERVER_PORT, NGINX_PORT, LBPROXY_PORT = 18101, 18102, 18103
ANSWER = json.dumps(
    {
        "id": "cmpl-0",
        "object": "text_completion",
        "model": "m",
        "choices": [{"index": 0, "text": " a few words of an answer", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 250, "completion_tokens": 6, "total_tokens": 256},
    }
)
NGINX = """
worker_processes 1; daemon off; pid {folder}/nginx-{port}.pid; error_log {folder}/nginx-{port}.err error;
events {{ worker_connections 16000; }}
http {{
  access_log off; keepalive_requests 1000000000; default_type application/json; client_max_body_size 64m;
  client_body_buffer_size 1m;
  {upstream}
  server {{ listen 127.0.0.1:{port} backlog=4096; location / {{ {location} }} }}
}}
"""
WRK = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
local text = string.rep("a word or ", {tens})
wrk.body = '{"model":"m","max_tokens":6,"messages":[{"role":"user","content":"' .. text .. '"}]}'
"""


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start(core: str, command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(["taskset", "-c", core, *command], stdout=out, stderr=subprocess.STDOUT)


def start_nginx(folder: Path, core: str, port: int, location: str, upstream: str = "") -> subprocess.Popen[bytes]:
    config = folder / f"nginx-{port}.conf"
    config.write_text(NGINX.format(folder=folder, port=port, location=location, upstream=upstream))
    return start(core, ["nginx", "-c", str(config)], folder / f"nginx-{port}.log")


def worker_of(process: subprocess.Popen[bytes]) -> int:
    """nginx's worker: the child that does the work."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[0])


def load(port: int, script: Path, connections: int, seconds: float) -> int:
    """Run wrk; the number of requests. Raises if one failed."""
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    command = ["taskset", "-c", LOAD_CORE, "wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "-s", str(script), url]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in out or "Socket errors" in out:
        raise SystemExit(f"requests failed:\n{out}")
    return int(next(line.split()[0] for line in out.splitlines() if "requests in" in line))


def measure(seconds: float, rounds: int, body_bytes: int) -> dict[str, list[float]]:
    """Microseconds of proxy CPU per request, by proxy, one figure a round."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        script = folder / "post.lua"
        script.write_text(WRK.replace("{tens}", str(max(1, (body_bytes - 70) // 10))))
        config = folder / "cfg.yaml"
        config.write_text(
            f"listen: 127.0.0.1:{LBPROXY_PORT}\nadmin: null\nendpoints: ['http://127.0.0.1:{SERVER_PORT}']\n"
        )
        proxied = "proxy_pass http://u; proxy_http_version 1.1; proxy_set_header Connection ''; proxy_buffering off;"
        upstream = f"upstream u {{ server 127.0.0.1:{SERVER_PORT}; keepalive 256; keepalive_requests 1000000000; }}"
        lbproxy = [sys.executable, "-m", "lbproxy", "--config", str(config)]
        processes = [
            start_nginx(folder, LOAD_CORE, SERVER_PORT, f"return 200 '{ANSWER}';"),
            start_nginx(folder, PROXY_CORE, NGINX_PORT, proxied, upstream),
            start(PROXY_CORE, lbproxy, folder / "lbproxy.log"),
        ]
        for process in processes:
            stack.callback(process.wait)
            stack.callback(process.send_signal, signal.SIGTERM)
        time.sleep(2)
        subjects: dict[str, tuple[int, Callable[[], int]]] = {
            "lbproxy": (LBPROXY_PORT, lambda: processes[2].pid),
            "nginx": (NGINX_PORT, lambda: worker_of(processes[1])),
        }
        figures: dict[str, list[float]] = {subject: [] for subject in subjects}
        for _ in range(rounds):
            for subject, (port, pid) in subjects.items():
                before = cpu_s(pid())
                requests = load(port, script, 64, seconds)
                figures[subject].append((cpu_s(pid()) - before) / requests * 1e6)
        return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4, help="of each round and proxy")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    missing = [tool for tool in ("wrk", "nginx", "taskset") if shutil.which(tool) is None]
    if missing or (os.cpu_count() or 1) < 2:
        raise SystemExit(f"needs two cores and {', '.join(missing) or 'nothing more'}: apt-get install wrk nginx-light")
    print("| request | proxy | CPU per request, us: median | min - max | x nginx |\n|---|---|---|---|---|")
    for label, size in (("1 KB", 1024), ("32 KB", 32 * 1024)):
        figures = measure(args.seconds, args.rounds, size)
        base = statistics.median(figures["nginx"])
        for subject, values in figures.items():
            middle = statistics.median(values)
            spread = f"{min(values):.1f} - {max(values):.1f}"
            print(f"| {label} | {subject} | {middle:.1f} | {spread} | {middle / base:.2f} |", flush=True)


if __name__ == "__main__":
    main()
