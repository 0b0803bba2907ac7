# SPDX-License-Identifier: Apache-2.0
"""The vLLM servers that we start: two, once. Between trials their caches are emptied.

On CPU, each has a core, and `environment` needs what `make test-real` installs (`tests.real.environment`). A GPU they
share, with half of the cores each; vLLM is installed by whoever has the GPU. The model is made here either way.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.http_routing.cells import MODEL
from benchmarks.http_routing.trial import TrialError
from benchmarks.overhead.load import ROOT
from benchmarks.overhead.process import CORES, Usage, free_port, session
from benchmarks.routing_real.fleet import Facts, ServerSet, get, under_way
from lbproxy.sim.workloads.prompts import Piece, piece_text
from tests.real.environment import FOLDER, VENV, Environment, command, made, prepare
from tests.real.servers import SERVER_ENVIRONMENT, LlmServer, vllm

LOGS = FOLDER / "routing-logs"
SERVERS = 2
MAKER = "benchmarks.routing_real.model"
ENV = {"VLLM_SERVER_DEV_MODE": "1"}
"""For /reset_prefix_cache."""


class Size(NamedTuple):
    """Of each server, in vLLM's own terms."""

    max_model_len: int
    slots: int
    """`--max-num-seqs`"""
    block_tokens: int
    blocks: int
    step_tokens: int
    """Of prompts in one step of the scheduler."""

    def facts(self, *, hardware: str, model: str, version: str, shared: bool) -> Facts:
        """For a page."""
        return Facts(
            count=SERVERS,
            model=model,
            engine=f"vLLM {version}",
            hardware=hardware,
            cache_tokens=self.blocks * self.block_tokens,
            max_model_len=self.max_model_len,
            more=f", {self.slots} slots, blocks of {self.block_tokens}, {self.step_tokens} tokens of prompts in a step",
            emptied=True,
            shared=shared,
        )

    def options(self) -> tuple[str, ...]:
        """vLLM's."""
        return (
            *("--served-model-name", MODEL, "--max-model-len", str(self.max_model_len)),
            *("--max-num-seqs", str(self.slots), "--block-size", str(self.block_tokens)),
            *("--num-gpu-blocks-override", str(self.blocks), "--max-num-batched-tokens", str(self.step_tokens)),
        )


# A step is a quarter of a second on CPU. With vLLM's default a long prompt would hold up every stream for a second and
# more.
ON_CPU = Size(max_model_len=4096, slots=6, block_tokens=32, blocks=384, step_tokens=512)
# vLLM's own default for the step; two caches that together hold what the users have said, and one does not.
ON_GPU = Size(max_model_len=20_000, slots=64, block_tokens=16, blocks=10_000, step_tokens=8192)
IDLE_S = 60.0
PROBE = piece_text(Piece(3, 3 * ON_CPU.block_tokens)).decode()
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


def with_gpu(found: Path, more: Sequence[str], say: Callable[[str], None]) -> list[LlmServer]:
    """Servers of this vLLM (its command) on this machine's GPU."""
    folder = FOLDER / "routing-model-gpu"
    FOLDER.mkdir(exist_ok=True)

    def make() -> None:
        command(str(found.parent / "python"), "-m", MAKER, str(folder), "gpu", cwd=ROOT)

    sources = [ROOT / "tests/real/model.py", ROOT / "benchmarks/routing_real/model.py"]
    made(folder, "".join(source.read_text() for source in sources), make, say)
    (snapshot,) = folder.glob("hub/*/snapshots/*")
    env = {**SERVER_ENVIRONMENT, **ENV, "VLLM_TARGET_DEVICE": "cuda", "OMP_NUM_THREADS": "4"}
    options = [*ON_GPU.options(), "--load-format", "dummy", "--gpu-memory-utilization", "0.45", "--enforce-eager"]
    options += ["--enable-request-id-headers", "--enable-prompt-tokens-details", "--host", "127.0.0.1"]
    options += more
    inner = CORES[1:-1]  # the first is the router's, the last the client's
    servers = []
    for number in range(SERVERS):
        own = ",".join(map(str, inner[number::SERVERS] or CORES))
        port = free_port()
        line = ["taskset", "-c", own, str(found), "serve", str(snapshot), "--port", str(port), *options]
        servers.append(LlmServer(f"routing-{number + 1}", line, f"http://127.0.0.1:{port}", env))
    return servers


def on_cpu(say: Callable[[str], None]) -> list[LlmServer]:
    """Servers of `make test-real`'s vLLM. Raises `tests.real.environment.Unavailable`."""
    parts, options = environment(say), ON_CPU.options()
    return [vllm(parts, f"routing-{core + 1}", "", core, *options, env=ENV) for core in range(SERVERS)]


@contextmanager
def running(servers: list[LlmServer], size: Size) -> Iterator[ServerSet]:
    """Ready, and warm. Every process is killed at the end."""
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir()
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
        yield ServerSet([server.url for server in servers], MODEL, size.max_model_len, servers)
    finally:
        for server in servers:
            server.kill()


def wait_until_idle(url: str) -> None:
    """Until it has no request. Raises TrialError, UnfitError."""
    end = time.monotonic() + IDLE_S
    while under_way(get(f"{url}/metrics").text):
        if time.monotonic() > end:
            raise TrialError(f"{url} is not idle")
        time.sleep(0.2)


def empty(server: LlmServer) -> None:
    """Empty the prefix cache of one that is idle. Raises TrialError if it cannot be."""
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


def usage(servers: Sequence[LlmServer]) -> Usage:
    """Of all their processes."""
    return Usage([pid for server in servers for pid in session(server.pid)])
