# SPDX-License-Identifier: Apache-2.0
"""The processes of the real fleet: two vLLM servers, one `transformers serve`, and lbproxy before them.

Each is a `Daemon`: a command in a process group of its own, so that a kill reaches the workers that vLLM starts, with
its output in a file below `.real/logs`. A daemon keeps its address when it is killed and started again, as a server
does that a supervisor looks after.

vllm-1 refuses more than QUEUE_CAP requests at a time; vllm-2 has no cap, and an adapter that the other does not have.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.real.cutting import CuttingRelay, Scissors
from tests.real.environment import FOLDER, PACKAGES, Environment
from tests.support.aio import run, until
from tests.support.process import LBPROXY

LOGS = FOLDER / "logs"
MODEL, OTHER_MODEL = "tiny", "lbproxy/tiny"
"""What vLLM serves, and what `transformers serve` does: it names models by their place in its cache."""
QUEUE_CAP = 8
SLOTS = 4
RANKS = 2
DRAIN_S = 60
"""What vLLM gives running requests after SIGTERM. Tests end it sooner by letting them finish."""
# Measured: 40 s for all three on two idle cores. Twice as long on a slower disk; four times beside other work.
START_TIMEOUT_S = 240.0
PATIENCE_S = 60.0
TOOLS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
"""Options with which it calls tools."""
STRICT = ["--tool-strict-level", "parameter"]
"""Arguments are made by their schema even if a client does not send `strict`."""
PAGES = httpx.Client(timeout=30, limits=httpx.Limits(max_keepalive_connections=0))
"""Reads metrics pages. One client: to make one for each page takes more of two cores than the page. No connection is
kept: vLLM ends only when none is left."""

SERVER_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}


TIED = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
"""Before a command: the kernel kills it when we die, however we die. Servers of 1.6 GB must not be left behind."""


class Daemon:
    """One server. `url` may be given later, by whoever learns it."""

    def __init__(self, name: str, command: list[str], url: str = "", env: dict[str, str] | None = None) -> None:
        self.name = name
        self.url = url
        self.log = LOGS / f"{name}.log"
        self._command = command
        self._env = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._ours = False

    def start(self) -> None:
        """Begin to start; `wait_until_ready` waits."""
        self._ours = False
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [*TIED, *self._command], stdout=output, stderr=subprocess.STDOUT, env=self._env, start_new_session=True
            )

    @property
    def pid(self) -> int:
        """Of its first process, which leads a session of all. Only once it was started."""
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def fell(self) -> bool:
        """It ended, and no test ended it."""
        return self._process is not None and not self.alive and not self._ours

    def wait_until_ready(self) -> None:
        """Until it answers and lists models."""
        self.wait_for(lambda: status(f"{self.url}/health") == 200, "/health is 200")
        self.wait_for(lambda: status(f"{self.url}/v1/models") == 200, "/v1/models is 200")

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Until `condition`, while it lives; AssertionError with the end of its output."""
        end = time.monotonic() + START_TIMEOUT_S
        while not condition():
            assert self.alive, f"{self.name} ended:\n{self.last_words()}"
            assert time.monotonic() < end, f"{self.name}: no {what}:\n{self.last_words()}"
            time.sleep(0.1)

    def last_words(self) -> str:
        """The end of its output."""
        return self.log.read_text(errors="replace")[-3000:]

    def terminate(self) -> None:
        """SIGTERM to the first process, as a supervisor sends it."""
        assert self._process is not None
        self._ours = True
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL to the whole group, as when the machine dies. Harmless when it is dead."""
        if self._process is None:
            return
        self._ours = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """For as long as the `with` block takes, the whole group does not run: its connections stay open."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)


def sum_of(page: str, family: str, *labels: str) -> float:
    """The sum of a family's samples on a page of metrics, of those whose labels contain all of `labels`."""
    lines = [line for line in page.splitlines() if re.match(rf"{re.escape(family)}[{{ ]", line)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in labels))


class LlmServer(Daemon):
    """A real server, asked directly: around lbproxy."""

    def page(self) -> str:
        """The server's own metrics."""
        return PAGES.get(f"{self.url}/metrics").text

    def gauge(self, family: str, *labels: str) -> float:
        return sum_of(self.page(), family, *labels)

    def warm_up(self) -> None:
        """Its first answers, which take several times as long as those after them."""
        for _ in range(3):
            body = {"model": MODEL, "prompt": "The first ones", "max_tokens": 24, "ignore_eos": True}
            httpx.post(f"{self.url}/v1/completions", json=body, timeout=60).raise_for_status()

    def running(self) -> float:
        return self.gauge("vllm:num_requests_running")

    def generated_tokens(self) -> float:
        return self.gauge("vllm:generation_tokens_total")


@dataclass(frozen=True)
class Fleet:
    """Everything that runs."""

    vllm: list[LlmServer]
    transformers: LlmServer
    lbproxy: Daemon
    admin: str
    """lbproxy's admin listener."""

    @property
    def url(self) -> str:
        return self.lbproxy.url

    def family(self, name: str) -> dict[str, float]:
        """The samples of a family on lbproxy's own metrics page, by what stands between { and }."""
        page = PAGES.get(f"{self.admin}/metrics").text
        samples = [line.rsplit(" ", 1) for line in page.splitlines() if re.match(rf"{name}[{{ ]", line)]
        return {labels.removeprefix(name).strip("{}"): float(value) for labels, value in samples}

    def of(self, family: str, endpoint: LlmServer, *labels: str) -> float:
        """The sum of one endpoint's samples of a family, of those with all of `labels`."""
        wanted = (f'endpoint="{endpoint.name}"', *labels)
        return sum(value for key, value in self.family(family).items() if all(label in key for label in wanted))

    def is_up(self, endpoint: LlmServer) -> bool:
        return self.of("lbproxy_endpoint_up", endpoint) == 1

    def bring_up(self) -> None:
        """Start what an earlier test ended; wait until lbproxy counts on every endpoint and nothing is under way.

        AssertionError if a server had ended by itself: what was found before it proves little.
        """
        down = [server for server in self.vllm if not server.alive]
        fell = "".join(f"{server.name} ended by itself:\n{server.last_words()}\n" for server in down if server.fell)
        for server in down:
            server.kill()  # workers that outlived it
            server.start()
        for server in down:
            server.wait_until_ready()
        wait_until(lambda: all(self.is_up(server) for server in (*self.vllm, self.transformers)), "all are up")
        wait_until(lambda: sum(server.running() for server in self.vllm) == 0, "the servers are idle")
        wait_until(lambda: sum(self.family("lbproxy_endpoint_in_flight").values()) == 0, "lbproxy is idle")
        assert not fell, fell


def wait_until(condition: Callable[[], object], what: str, within_s: float = PATIENCE_S) -> None:
    """Wait for something that must come true, on a machine that three servers keep busy. AssertionError if not.

    `condition` mostly reads pages of metrics: asked for without a pause, they take what the servers need.
    """
    run(until(condition, what, within_s=within_s, every_s=0.05), timeout_s=2 * within_s)


def status(url: str) -> int | None:
    """The status that a GET is answered with; None if it is not."""
    try:
        return httpx.get(url, timeout=5).status_code
    except httpx.HTTPError:
        return None


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def alone_on(core: int) -> list[str]:
    """Before a command: it runs on this of our cores. Empty where there is only one, or no taskset."""
    cores = sorted(os.sched_getaffinity(0))
    return ["taskset", "--cpu-list", str(cores[core])] if core < len(cores) > 1 and shutil.which("taskset") else []


def endings(environment: Environment) -> list[str]:
    """Options with which a response ends by itself after some words, as clients of agents demand: every third token
    that begins a word ends it. In the arguments of a tool call, the grammar allows none of them.
    """
    (file,) = environment.model.glob("hub/*/snapshots/*/tokenizer.json")
    tokens = json.loads(file.read_text())["model"]["vocab"]
    words = [number for token, number in tokens.items() if token.startswith("\u0120") and token[1:2].isalpha()]
    folder = LOGS / "endings"
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, *words[::3]]}))
    return ["--generation-config", str(folder)]


def vllm(
    environment: Environment,
    name: str,
    adapters: str,
    core: int,
    *options: str,
    env: dict[str, str] | None = None,
    model: Path | None = None,
) -> LlmServer:
    """A vLLM server with these of the adapters a, b and c, at most two in one batch; without LoRA if there are none.
    It has one core to itself: two servers that share theirs are slow together and fast alone, and lbproxy would
    rightly use one at a time. The last of options that are given twice counts. `model`: by default the one in
    `environment.model`.
    """
    port = free_port()
    if model is None:
        (model,) = environment.model.glob("hub/*/snapshots/*")
    options_of_all = f"--served-model-name {MODEL} --host 127.0.0.1 --port {port} --enforce-eager"
    # With bfloat16, attention on processors with AMX uses its tiles before anything asked the kernel for them, if the
    # first prompt is one token long: the worker dies of an illegal instruction.
    options_of_all += " --dtype float32 --max-model-len 2048 --max-num-seqs 8 --enable-prefix-caching"
    options_of_all += " --block-size 32 --num-gpu-blocks-override 100"  # 16 fails on CPU; few, so that the gauge moves
    options_of_all += f" --enable-request-id-headers --enable-prompt-tokens-details --shutdown-timeout {DRAIN_S}"
    command = [*alone_on(core), str(environment.vllm), "serve", str(model), *options_of_all.split(), *options]
    if adapters:
        modules = [f"{adapter}={environment.model / 'adapters' / adapter}" for adapter in adapters]
        command += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", *modules]
    return LlmServer(name, command, f"http://127.0.0.1:{port}", {**SERVER_ENVIRONMENT, **(env or {})})


def transformers(environment: Environment) -> LlmServer:
    """`transformers serve`: a server without metrics, whose streams end without [DONE]."""
    port = free_port()
    env = {**SERVER_ENVIRONMENT, "HF_HUB_CACHE": str(environment.model / "hub")}
    options = f"serve {OTHER_MODEL} --device cpu --host 127.0.0.1 --port {port}"
    return LlmServer("transformers", [str(environment.transformers), *options.split()], f"http://127.0.0.1:{port}", env)


def lbproxy(
    endpoints: list[LlmServer], name: str = "lbproxy", *, each: list[str] | None = None, more: str = ""
) -> tuple[Daemon, str]:
    """lbproxy before them, with the URL of its admin listener. `each`: further settings of each endpoint.

    Everything is at its default but that adapters may be loaded, and the time for a connection: where two cores run
    three servers and their load, a process may not get to run for a second.
    """
    config = LOGS / f"{name}.yaml"
    own = each or [""] * len(endpoints)
    entries = zip(endpoints, own, strict=True)
    listing = "".join(f"  - {{url: '{one.url}', name: {one.name}{settings}}}\n" for one, settings in entries)
    settings = "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\ntimeouts: {connect: 10s}\nlora_management: true\n"
    config.write_text(f"{settings}{more}endpoints:\n{listing}")
    daemon = Daemon(name, [*LBPROXY, "--config", str(config)])
    daemon.log.unlink(missing_ok=True)  # of an earlier run, with another address
    daemon.start()

    def listening() -> re.Match[str] | None:
        return re.search(r"listens on (http://[\w.:]+), admin on (http://[\w.:]+)", daemon.log.read_text())

    daemon.wait_for(listening, "line that says where it listens")
    match = listening()
    assert match
    daemon.url = match[1]
    return daemon, match[2]


@contextmanager
def killed_at_the_end(*daemons: Daemon) -> Iterator[list[Daemon]]:
    """A list of daemons, to which others may be added: all of them are killed when the block ends."""
    each = [*daemons]
    try:
        yield each
    finally:
        for daemon in each:
            daemon.kill()


@contextmanager
def running(environment: Environment) -> Iterator[Fleet]:
    """The whole fleet, ready; every process is killed at the end."""
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir()
    servers = [
        vllm(environment, "vllm-1", "ab", 0, "--max-num-queued-reqs", str(QUEUE_CAP)),
        vllm(environment, "vllm-2", "abc", 1),
    ]
    other = transformers(environment)
    with killed_at_the_end(*servers, other) as daemons:
        for daemon in daemons:
            daemon.start()
        for daemon in daemons:
            daemon.wait_until_ready()
        for server in servers:
            server.warm_up()
        proxy, admin = lbproxy([*servers, other])
        daemons.append(proxy)
        yield Fleet(servers, other, proxy, admin)


@dataclass(frozen=True)
class Small:
    """Two vLLM servers, and lbproxy before them."""

    vllm: list[LlmServer]
    lbproxy: Daemon
    admin: str

    @property
    def url(self) -> str:
        return self.lbproxy.url


@contextmanager
def behind_lbproxy(both: list[LlmServer], name: str) -> Iterator[Small]:
    """Both started, and lbproxy, which is called `name`. Every process is killed at the end."""
    with killed_at_the_end(*both) as daemons:
        for server in both:
            server.start()
        for server in both:
            server.wait_until_ready()
            server.warm_up()
        proxy, admin = lbproxy(both, name)
        daemons.append(proxy)
        proxy.wait_for(lambda: status(f"{proxy.url}/v1/models") == 200, "/v1/models is 200")
        yield Small(both, proxy, admin)


@contextmanager
def small_ones(environment: Environment) -> Iterator[Small]:
    """They run SLOTS requests at a time, call tools and store responses. Beside the fleet, whose LOGS are there."""
    options = ["--max-num-seqs", str(SLOTS), *TOOLS, *STRICT, *endings(environment)]
    store = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    both = [vllm(environment, f"small-{core + 1}", "", core, *options, env=store) for core in (0, 1)]
    with behind_lbproxy(both, "lbproxy-small") as found:
        yield found


@contextmanager
def seeing(environment: Environment, model: str) -> Iterator[Small]:
    """They see. `model`: a folder that `vision.py` wrote."""
    LOGS.mkdir(exist_ok=True)
    options = ["--max-model-len", "32768", "--num-gpu-blocks-override", "2000", "--skip-mm-profiling"]
    options += ["--limit-mm-per-prompt", '{"image": 16, "video": 0}']
    env = {"PYTHONPATH": str(PACKAGES)}
    path = environment.vision / model
    both = [vllm(environment, f"{model}-{core + 1}", "", core, *options, env=env, model=path) for core in (0, 1)]
    with behind_lbproxy(both, f"lbproxy-{model}") as found:
        yield found


@dataclass(frozen=True)
class Talking(Small):
    """Two that have a trained model, each behind a relay, and lbproxy, which has streams go on."""

    scissors: Scissors

    def forget(self) -> None:
        """Nothing is in their prefix caches any more."""
        for server in self.vllm:
            httpx.post(f"{server.url}/reset_prefix_cache", timeout=30).raise_for_status()

    def health(self) -> list[str]:
        """Of each, as lbproxy sees it."""
        return [one["health"] for one in httpx.get(f"{self.admin}/admin/state", timeout=30).json()["endpoints"]]


@contextmanager
def talking(environment: Environment, *options: str) -> Iterator[Talking]:
    """Every process is killed at the end. What lbproxy thinks of servers that die so often is tested elsewhere."""
    LOGS.mkdir(exist_ok=True)
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    options = ("--num-gpu-blocks-override", "400", *options)
    both = [vllm(environment, f"words-{n}", "", 2, *options, env=env, model=environment.words) for n in (1, 2)]
    scissors = Scissors()
    relays = [CuttingRelay(server.url, scissors) for server in both]
    more = f"models: {{{MODEL}: {{continue: true}}}}\nrouting: {{policy: round-robin}}\n"
    more += "breaker: {consecutive_failures: null, success_rate: 0}\n"
    with killed_at_the_end(*both) as daemons:
        for server in both:
            server.start()
        for server in both:
            server.wait_until_ready()
            server.warm_up()
        behind = [LlmServer(server.name, [], relay.url) for server, relay in zip(both, relays, strict=True)]
        proxy, admin = lbproxy(behind, "lbproxy-words", more=more)
        daemons.append(proxy)
        proxy.wait_for(lambda: status(f"{proxy.url}/v1/models") == 200, "/v1/models is 200")
        yield Talking(both, proxy, admin, scissors)
    for relay in relays:
        relay.close()


@dataclass(frozen=True)
class Ranked:
    """One vLLM server of RANKS data-parallel ranks, and lbproxy before it."""

    server: LlmServer
    lbproxy: Daemon
    admin: str

    @property
    def names(self) -> list[str]:
        """Of the endpoints that lbproxy makes of it."""
        return [f"{self.server.name}#{rank}" for rank in range(RANKS)]

    def endpoints(self) -> dict[str, dict[str, Any]]:
        """What lbproxy's admin API says of each, by its name."""
        state = httpx.get(f"{self.admin}/admin/state", timeout=30).json()
        return {one["name"]: one for one in state["endpoints"] if not one["leaving"]}


@contextmanager
def ranked(environment: Environment, api_servers: int) -> Iterator[Ranked]:
    """Every process is killed at the end. vLLM's own default is an API server for each rank."""
    LOGS.mkdir(exist_ok=True)
    options = ["--data-parallel-size", str(RANKS), "--num-gpu-blocks-override", "400"]
    options += ["--api-server-count", str(api_servers)]
    alone = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"}  # refused with several API servers, of which ranks have one each
    server = vllm(
        environment, f"vllm-ranks-{api_servers}", "", 2, *options, env=alone
    )  # no core of its own: too many processes
    with killed_at_the_end(server) as daemons:
        server.start()
        server.wait_until_ready()
        proxy, admin = lbproxy([server], f"lbproxy-ranks-{api_servers}")
        daemons.append(proxy)
        found = Ranked(server, proxy, admin)
        proxy.wait_for(lambda: list(found.endpoints()) == found.names, "an endpoint for each rank")
        yield found


@dataclass(frozen=True)
class Apart:
    """A vLLM server for prefill, one for decode, and lbproxy before them, which splits whatever can be split."""

    connector: str
    """By lbproxy's name of it."""
    prefill: LlmServer
    decode: LlmServer
    lbproxy: Daemon
    admin: str

    @property
    def url(self) -> str:
        return self.lbproxy.url

    @property
    def both(self) -> tuple[LlmServer, LlmServer]:
        return self.prefill, self.decode

    def endpoints(self) -> dict[str, dict[str, Any]]:
        """What lbproxy's admin API says of each, by its name."""
        state = httpx.get(f"{self.admin}/admin/state", timeout=30).json()
        return {one["name"]: one for one in state["endpoints"]}

    def bring_up(self) -> None:
        """Start what an earlier test ended; wait until lbproxy uses both. AssertionError if one ended by itself."""
        fell = "".join(f"{one.name} ended by itself:\n{one.last_words()}\n" for one in self.both if one.fell)
        down = [one for one in self.both if not one.alive]
        for one in down:
            one.kill()
            one.start()
        for one in down:
            one.wait_until_ready()
        wait_until(lambda: all(one["health"] == "up" for one in self.endpoints().values()), "both are up")
        assert not fell, fell


def connector_options(connector: str, role: str) -> tuple[list[str], dict[str, str]]:
    """vLLM's options and environment for this end of a connector, by lbproxy's name of it."""
    settings: dict[str, object] = {"kv_role": "kv_producer" if role == "prefill" else "kv_consumer"}
    env = {}
    if connector == "nixl":
        settings["kv_connector"] = "NixlConnector"
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
    else:
        folder = LOGS / "kv"
        settings |= {
            "kv_connector": "ExampleConnector",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        }
    options = ["--kv-transfer-config", json.dumps(settings), "--num-gpu-blocks-override", "400"]
    # ExampleConnector stores what one step computes: 8 prompts at once must fit into one.
    return [*options, "--max-num-batched-tokens", "16384"], env


@contextmanager
def apart(environment: Environment, connector: str, *, warm: bool = True) -> Iterator[Apart]:
    """Every process is killed at the end. Servers with NIXL show it in their metrics; the other connector is told."""
    LOGS.mkdir(exist_ok=True)
    shutil.rmtree(LOGS / "kv", ignore_errors=True)
    both = []
    for core, role in enumerate(("prefill", "decode")):
        options, env = connector_options(connector, role)
        both.append(vllm(environment, f"{role}-{connector}", "", core, *options, env=env))
    with killed_at_the_end(*both) as daemons:
        for server in both:
            server.start()
        for server in both:
            server.wait_until_ready()
            if warm:
                server.warm_up()
        told = "" if connector == "nixl" else f", connector: {connector}"
        each = [f", role: {role}{told}" for role in ("prefill", "decode")]
        proxy, admin = lbproxy(both, f"lbproxy-{connector}", each=each, more="routing: {split: always}\n")
        daemons.append(proxy)
        found = Apart(connector, both[0], both[1], proxy, admin)
        found.bring_up()
        yield found
