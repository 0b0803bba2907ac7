# SPDX-License-Identifier: Apache-2.0
"""The vLLM servers of a run: two, one on each core, started once. Between trials their caches are emptied.

`fleet` needs what `make test-real` installs (`tests.real.environment`) and makes the model beside it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import httpx

from benchmarks.http_routing.cells import MODEL
from benchmarks.http_routing.trial import TrialError
from benchmarks.overhead.load import ROOT
from benchmarks.overhead.process import Usage, session
from lbproxy.sim.workloads.prompts import Piece, piece_text
from tests.real.environment import FOLDER, VENV, Environment, command, made, prepare
from tests.real.servers import LlmServer, sum_of, vllm

LOGS = FOLDER / "routing-logs"
SERVERS = 2
MAKER = "benchmarks.routing_real.model"
SLOTS = 6
BLOCK_TOKENS = 32
BLOCKS = 384
STEP_TOKENS = 512
"""Of prompts in one step of the scheduler: a quarter of a second here. With vLLM's default a long prompt would hold up
every stream for a second and more."""
OPTIONS = (
    *("--served-model-name", MODEL, "--max-model-len", "4096", "--max-num-seqs", str(SLOTS)),
    *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(BLOCKS)),
    *("--max-num-batched-tokens", str(STEP_TOKENS)),
)
IDLE_S = 60.0
PROBE = piece_text(Piece(3, 3 * BLOCK_TOKENS)).decode()
"""A prompt that is cached after each trial, so that a cache that was not emptied shows."""


def environment(say: Callable[[str], None]) -> Environment:
    """Everything installed, and the model made. Raises `tests.real.environment.Unavailable`."""
    found = prepare(say)
    folder = FOLDER / "routing-model"
    sources = [ROOT / "tests/real/model.py", ROOT / "benchmarks/routing_real/model.py"]

    def make() -> None:
        command(str(VENV / "bin/python"), "-m", MAKER, str(folder), cwd=ROOT)

    made(folder, "".join(source.read_text() for source in sources), make, say)
    return replace(found, model=folder)


@contextmanager
def fleet(parts: Environment) -> Iterator[list[LlmServer]]:
    """Ready, and warm. Every process is killed at the end."""
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir()
    env = {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache
    servers = [vllm(parts, f"routing-{core + 1}", "", core, *OPTIONS, env=env) for core in range(SERVERS)]
    for server in servers:
        server.log = LOGS / f"{server.name}.log"
    try:
        for server in servers:
            server.start()
            prefer(server.pid)
        for server in servers:
            server.wait_until_ready()
        for server in servers:
            for number in range(8):  # the first requests of each shape take several times as long
                ask(server, piece_text(Piece(100 + number, 200 * (number + 1))).decode())
        yield servers
    finally:
        for server in servers:
            server.kill()


def empty(server: LlmServer) -> None:
    """Wait until it is idle, and empty its prefix cache. Raises TrialError if it cannot be."""
    end = time.monotonic() + IDLE_S
    while (page := server.page()) and sum_of(page, "vllm:num_requests_running") + sum_of(
        page, "vllm:num_requests_waiting"
    ):
        if time.monotonic() > end:
            raise TrialError(f"{server.name} is not idle")
        time.sleep(0.2)
    httpx.post(f"{server.url}/reset_prefix_cache", timeout=30).raise_for_status()
    if found := ask(server, PROBE):
        raise TrialError(f"{server.name} has {found} tokens in a cache that was emptied")


def ask(server: LlmServer, prompt: str) -> int:
    """Ask it directly; how many tokens of the prompt came from its cache."""
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    response = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60).raise_for_status()
    details = response.json()["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def prefer(pid: int) -> None:
    """Let a session of processes run before other work on the machine, as far as the system allows: Linux gives each
    session an equal share, whatever the niceness of its processes (autogroups).
    """
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text("-19")


def usage(servers: list[LlmServer]) -> Usage:
    """Of all their processes."""
    return Usage([pid for server in servers for pid in session(server.pid)])
