# SPDX-License-Identifier: Apache-2.0
"""Other proxies under the same faults: how each is set up so that it has a fair chance.

nginx gets what its manual has for failing servers: passive checks, a retry on another server for every error that it
can retry on, POSTs included, and no buffering. The Rust routers run with their defaults, which have retries, circuit
breakers and health checks; only the checks are made as frequent as lbproxy's in these tests. Programs are looked for in
the folder that LBPROXY_CHAOS_PEERS names (default: .bench/venv/bin, which `make bench-overhead` fills), then on the
path.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from string import Template

import httpx

from tests.support.docs import ROOT
from tests.support.ports import free_port
from tests.support.process import Process, Program

FOLDER = os.environ.get("LBPROXY_CHAOS_PEERS", str(ROOT / ".bench/venv/bin"))

NGINX = """\
worker_processes 1; daemon off; pid $folder/nginx.pid; error_log $folder/nginx.log error;
events { worker_connections 8000; }
http {
  access_log off; client_max_body_size 64m; client_body_buffer_size 1m; keepalive_requests 1000000;
  upstream servers {
    $servers
    keepalive 256; keepalive_timeout 3s;
  }
  server {
    listen 127.0.0.1:$port backlog=4096;
    location / {
      proxy_pass http://servers; proxy_http_version 1.1; proxy_set_header Connection ''; proxy_buffering off;
      proxy_connect_timeout 1s; proxy_read_timeout $idle; proxy_next_upstream_tries 3;
      proxy_next_upstream error timeout invalid_header http_500 http_502 http_503 http_504 http_429 non_idempotent;
    }
  }
}
"""


@dataclass(frozen=True)
class Peer:
    """A proxy that is none of ours."""

    name: str
    command: tuple[str, ...]
    note: str

    def program(self) -> str | None:
        """Its path; None: it is not installed."""
        return shutil.which(self.command[0], path=FOLDER) or shutil.which(self.command[0])

    @contextmanager
    def start(self, urls: list[str], folder: Path) -> Iterator[tuple[Process, str]]:
        """A running one, once it answers."""
        port, spare = free_port(), free_port()
        servers = " ".join(f"server {url.removeprefix('http://')} max_fails=3 fail_timeout=2s;" for url in urls)
        values = {"port": port, "spare": spare, "folder": folder, "servers": servers, "idle": "3s"}
        (folder / "nginx.conf").write_text(Template(NGINX).substitute(values))
        words = [Template(word).substitute(values) for word in self.command[1:] if word != "$urls"]
        at = self.command.index("$urls") - 1 if "$urls" in self.command else 0
        words = [*words[:at], *urls, *words[at:]] if at else words
        with Program([self.program() or "", *words]) as running:
            url = f"http://127.0.0.1:{port}"
            _until_it_answers(url, running)
            yield running, url


def _until_it_answers(url: str, running: Process) -> None:
    end = time.monotonic() + 30
    while True:
        body = {"model": "sim", "prompt": "x", "max_tokens": 1}
        try:
            if httpx.post(f"{url}/v1/completions", json=body, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert running.process.poll() is None, running.read()
        assert time.monotonic() < end, running.read()
        time.sleep(0.1)


ROUTER = (
    *("--host", "127.0.0.1", "--port", "$port", "--worker-urls", "$urls", "--policy", "round_robin"),
    *("--prometheus-host", "127.0.0.1", "--prometheus-port", "$spare"),
    *("--health-check-interval-secs", "1", "--health-check-timeout-secs", "1", "--health-failure-threshold", "3"),
)

PEERS = {
    peer.name: peer
    for peer in (
        Peer("nginx", ("nginx", "-c", "$folder/nginx.conf"), "passive checks, retries everything, POSTs too"),
        Peer(
            "sglang-router",
            ("sglang-router", "launch", *ROUTER, "--log-level", "warn"),
            "its defaults, checks each second",
        ),
        Peer("vllm-router", ("vllm-router", *ROUTER, "--log-level", "warning"), "its defaults, checks each second"),
    )
}
