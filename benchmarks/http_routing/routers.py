# SPDX-License-Identifier: Apache-2.0
"""The routers: how each is configured and started before a fleet. A further one is one more entry of `routers`.

Everyone runs as its project ships it, and once more with one tuning that its own documentation gives. Limits that a run
would meet (concurrent requests, timeouts) are raised for those who have them. lbproxy runs with its defaults alone.

How they are found, pinned and started is the overhead benchmark's (`subjects.py`, `process.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.http_routing.cells import MODEL
from benchmarks.overhead.load import BENCH
from benchmarks.overhead.subjects import Subject

OURS = "lbproxy"
STORES = ("redis-server", "valkey-server")


@dataclass(frozen=True, slots=True)
class Several:
    """Several lbproxies, each with a part of the connections."""

    count: int
    store: str | None
    """The program over which they share, of `STORES`; None: each is alone."""

    @property
    def name(self) -> str:
        """In tables and on the command line."""
        return f"{self.count} lbproxies, {self.store or 'unshared'}"


SEVERAL = [Several(count, store) for count in (2, 3) for store in (*STORES, None)]


@dataclass(frozen=True, slots=True)
class Router:
    """A router in front of a fleet."""

    subject: Subject
    simulated: str | None = None
    """The policy of ours that has its rule, for the comparison with virtual time; None: there is none."""
    in_short: bool = False
    in_full: bool = True
    """Part of the full run; False: only if it is named."""

    @property
    def name(self) -> str:
        """In tables and on the command line."""
        return self.subject.name


def local(ports: Sequence[int]) -> list[str]:
    """The URLs of servers on this machine."""
    return [f"http://127.0.0.1:{port}" for port in ports]


def routers(urls: Sequence[str]) -> list[Router]:
    """All that there are, installed or not, before these servers, each `http://HOST:PORT`."""
    several = [_several(urls, one) for one in SEVERAL]
    return [_lbproxy(urls), *_nginx(urls), *_rust(urls), *_litellm(urls), *several]


def names() -> list[str]:
    """Of all routers."""
    return [router.name for router in routers([])]


# lbproxy


LBPROXY = """\
listen: 127.0.0.1:$port
admin: 127.0.0.1:$spare
endpoints: [{urls}]
"""


def _lbproxy(urls: Sequence[str]) -> Router:
    subject = Subject(
        OURS,
        (sys.executable, "-m", "lbproxy", "--config", "$folder/cfg.yaml"),
        "as installed: adaptive, scraping, probing, access log to a file",
        {"cfg.yaml": LBPROXY.format(urls=", ".join(f'"{url}"' for url in urls))},
        version_option="--version",
    )
    return Router(subject, "adaptive", in_short=True)


def _several(urls: Sequence[str], several: Several) -> Router:
    """Their admin listeners are on ports that their output names."""
    command = (sys.executable, "-m", "benchmarks.http_routing.several", str(several.count), "$folder/cfg.yaml", "$port")
    settings = LBPROXY.replace("$spare", "0").format(urls=", ".join(f'"{url}"' for url in urls))
    subject = Subject(
        several.name,
        command if several.store is None else (*command, "--store", several.store),
        "on one port, each with a share of the connections",
        {"cfg.yaml": settings},
    )
    return Router(subject, in_full=False)


# nginx


NGINX = """\
worker_processes 1; daemon off; pid $folder/pid; error_log $folder/error.log error;
events {{ worker_connections 16000; }}
http {{
  access_log off; client_max_body_size 64m; client_body_buffer_size 1m;
  upstream servers {{ {method} {servers} keepalive 1024; }}
  server {{
    listen 127.0.0.1:$port backlog=4096;
    location / {{
      proxy_pass http://servers; proxy_http_version 1.1; proxy_set_header Connection ''; proxy_buffering off;
      proxy_read_timeout 600s;
    }}
  }}
}}
"""


def _nginx(urls: Sequence[str]) -> list[Router]:
    lines = " ".join(f"server {url.removeprefix('http://')};" for url in urls)
    variants = (("round robin", "", "round-robin", False), ("least_conn", "least_conn;", "least-request", True))
    return [
        Router(
            Subject(
                f"nginx {name}",
                ("nginx", "-c", "$folder/cfg"),
                f"{name}; one worker, unbuffered, kept connections",
                {"cfg": NGINX.format(method=method, servers=lines)},
            ),
            simulated,
            in_short,
        )
        for name, method, simulated, in_short in variants
    ]


# The routers in Rust, which have inherited their options from one another


def _rust(urls: Sequence[str]) -> list[Router]:
    common = (
        *("--host", "127.0.0.1", "--port", "$port", "--worker-urls", *urls),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", "$spare", "--log-level"),
    )
    # The tuning of SGLang's "Cache-Aware policy" section and of vllm-router's docs/load_balancing.
    tuned = ("--cache-threshold", "0.5", "--balance-abs-threshold", "32", "--balance-rel-threshold")

    def router(
        package: str, name: str, options: tuple[str, ...], simulated: str | None = None, *, in_short: bool = False
    ) -> Router:
        start = (package, *(("launch",) if package != "vllm-router" else ()), *common)
        level = "warning" if package == "vllm-router" else "warn"
        note = " ".join(options) or "defaults: cache_aware"
        return Router(
            Subject(f"{package}{name}", (*start, level, *options), note, package=package), simulated, in_short
        )

    return [
        router("sglang-router", "", (), "cache-aware", in_short=True),
        router("sglang-router", " tuned", (*tuned, "1.5")),
        router("vllm-router", "", (), "cache-aware", in_short=True),
        router("vllm-router", " tuned", (*tuned, "1.1")),
        # By the header X-Session-ID, which every router gets.
        router("vllm-router", " consistent_hash", ("--policy", "consistent_hash")),
        router("smg", "", ("--disable-tokenizer-autoload",)),
        router("smg", " prefix_hash", ("--disable-tokenizer-autoload", "--policy", "prefix_hash"), "prefix-hash"),
    ]


# LiteLLM, in an environment of its own: its pins do not go with the others'


LITELLM = """\
model_list:
{models}
router_settings: {{routing_strategy: {strategy}, num_retries: 0}}
litellm_settings: {{request_timeout: 600, telemetry: false}}
general_settings: {{dangerously_permit_weak_or_unset_master_key: true}}
"""


def _litellm(urls: Sequence[str]) -> list[Router]:
    models = "\n".join(
        f"  - {{model_name: {MODEL}, litellm_params: "
        f'{{model: hosted_vllm/{MODEL}, api_base: "{url}/v1", api_key: none}}}}'
        for url in urls
    )
    program = str(BENCH / "litellm/bin/litellm")
    return [
        Router(
            Subject(
                f"litellm{name}",
                (program, "--config", "$folder/cfg.yaml", "--host", "127.0.0.1", "--port", "$port"),
                f"routing_strategy {strategy}, one worker",
                {"cfg.yaml": LITELLM.format(models=models, strategy=strategy)},
                version_option="--version",
            ),
            simulated,
        )
        for name, strategy, simulated in (
            ("", "simple-shuffle", "random"),
            (" least-busy", "least-busy", "least-request"),
        )
    ]
