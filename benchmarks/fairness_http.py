# SPDX-License-Identifier: Apache-2.0
"""Three experiments of `benchmarks.fairness` through HTTP, beside virtual time: `python -m benchmarks.fairness_http`.

lbproxy as installed, with an API key for each flow, before two servers as `lbproxy mock` runs one, and an open-loop
client: those of `benchmarks.http_routing`, in a process each, which say how late they were. A seed's arrivals are the
simulation's, and each run is simulated once more with them. What the balancer decided is read from the access log, the
queue's length from /metrics. Writes `results/fairness-http.json` and the last part of `FAIRNESS.md`; six minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

import aiohttp
import orjson
import uvloop

from benchmarks.fairness import BEGIN, END, EXPERIMENTS, HERE, LEVELS, PAGE, Figures, cell, figures_of, inversions
from benchmarks.http_routing.client import Answer, Call, Client, Request
from benchmarks.http_routing.trial import MAX_LAG_S, TrialError, lateness, servers
from benchmarks.overhead.load import BENCH, ROOT
from benchmarks.overhead.process import LOAD_CORE, Proxy, free_port
from lbproxy import __version__
from lbproxy.commands.sim import Run, runs_of, serve, workload_of
from lbproxy.config.scenario import Scenario
from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.figures.report import as_table
from lbproxy.sim.figures.sharing import REFUSED
from lbproxy.sim.fleet.fleet import Served
from lbproxy.sim.workloads.workload import Arrival, Job

RESULTS = HERE / "results" / "fairness-http.json"
ONE_FLOW, FLOWS, PRIORITIES = "prefill, shortest, one flow", "prefill, shortest, flows", "priorities"
SERVERS = 2
SECONDS = 30.0
"""Of arrivals, instead of the simulation's 45."""
QUEUE_S = 15.0
"""`admission.queue_timeout`, instead of 30: half of the arrivals here, too."""
STAMP_S = 0.002
"""The access log's times are of milliseconds, and a request is read before it is one of the balancer's."""
POLL_S = 0.2
"""Between two looks at the queue."""
READY_S = 30.0
CLIENT_S = 300.0
"""More than any replay takes."""
ANYBODY = "everybody"
"""The flow of all, where there are none."""


# What is asked


def run_of(name: str, seed: int, seconds: float) -> Run:
    """The experiment as it is run here, in `lbproxy sim`'s words."""
    whole = Scenario.model_validate({**EXPERIMENTS[name], "seeds": seed, "size_error": 0})
    shorter = tuple(
        one.model_copy(update={"parameters": {**one.parameters, "duration_s": seconds}}) for one in whole.workloads
    )
    admission = whole.admission.model_copy(update={"queue_timeout": QUEUE_S})
    found = whole.model_copy(update={"workloads": shorter, "admission": admission})
    return runs_of(found, source=name)[seed - 1]


def arrivals(run: Run) -> list[Arrival]:
    """All that its clients send, in order of time."""
    return list(workload_of(run).begin(0.0) or ())


def key(flow: str) -> str:
    """A flow's."""
    return f"sk-fairness-{flow}"


def settings(run: Run, port: int, admin: int, urls: Sequence[str]) -> str:
    """lbproxy's: an API key for each flow; what a simulated client asks for by a header, its flow has."""
    admission = run.scenario.admission
    flows = [ANYBODY, *dict.fromkeys(job.flow for _, job in arrivals(run))]
    named = {one.flow: {"priority": one.priority} for one in run.scenario.workloads if one.priority is not None}
    fields = {
        "listen": f"127.0.0.1:{port}",
        "admin": f"127.0.0.1:{admin}",
        "endpoints": urls,
        "auth": {"keys": [{"name": flow, "key": key(flow)} for flow in flows]},
        "admission": {"queue_requests": admission.queue_requests, "queue_timeout": admission.queue_timeout},
        "flows": {"named": named},
        "drain": {"lame_duck": 0},
    }
    return orjson.dumps(fields).decode()  # which is YAML


class Replay(Request):
    """What the client's process is told. Its `cell` is the experiment."""

    seconds: float


class KeyedClient(Client):
    """Sends an experiment's arrivals, each with its flow's key and its own id."""

    def __init__(self, replay: Replay, http: aiohttp.ClientSession) -> None:
        """`http`: for the servers' metrics."""
        super().__init__(replay, http)
        self._run = run_of(replay["cell"], replay["seed"], replay["seconds"])

    def phases(self) -> list[list[Arrival]]:
        """See Client."""
        return [arrivals(self._run)]

    def headers(self, job: Job) -> str:
        """See Client."""
        flow = job.flow if self._run.scenario.fair else ANYBODY
        return f"Authorization: Bearer {key(flow)}\r\nX-Request-ID: {job.id}\r\n"


async def replay() -> None:
    """The client's process: what to do on standard input, its Answer on standard output."""
    told: Replay = orjson.loads(sys.stdin.buffer.read())
    async with aiohttp.ClientSession() as http:
        answer = await KeyedClient(told, http).run()
    sys.stdout.buffer.write(orjson.dumps(answer))


# One run


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of a run."""

    name: str
    seed: int
    figures: Figures
    """By the client's clock; inversions by the access log; the longest queue that /metrics showed."""
    simulated: Figures
    """The same arrivals in virtual time."""
    looks: int
    """At the queue."""
    failed: int
    """Requests neither answered whole nor refused."""
    retried: int
    server_lag_s: float
    client_lag_s: float
    rejected: str | None
    """Why it is not believed."""
    again: bool = False
    """The first try was not believed."""


def measure(name: str, seed: int, seconds: float) -> Trial:
    """Do it. Raises TrialError."""
    run = run_of(name, seed, seconds)
    virtual = figures_of(serve(run))
    BENCH.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BENCH) as folder, servers(SERVERS, seed) as (ports, _):
        urls = [f"http://127.0.0.1:{one}" for one in ports]
        port, admin, config = free_port(), free_port(), Path(folder) / "cfg.yaml"
        config.write_text(settings(run, port, admin, urls), "utf-8")
        command = (sys.executable, "-m", "lbproxy", "--config", str(config))
        told = Replay(cell=name, seed=seed, short=False, trace=None, port=port, servers=urls, seconds=seconds)
        with Proxy(command, port, Path(folder)) as proxy:
            get_ready(proxy, admin)
            with watched(admin) as seen:
                answer = ask(told)
            offset = time.time() - time.monotonic()
            time.sleep(1.0)  # the log's last lines
            log = read_log(proxy.log.read_bytes())
    sent = arrivals(run)
    found = figures_of(by_client(sent, answer["phases"][0]))
    passed_over = inversions(by_log(sent, log, offset), STAMP_S)
    refused = sum(one["outcome"] in {outcome.label for outcome in REFUSED} for one in log.values())
    done = sum(call["failure"] is None for call in answer["phases"][0])
    return Trial(
        name=name,
        seed=seed,
        figures=Figures(found.flows, passed_over, max(seen, default=0), found.in_time),
        simulated=virtual,
        looks=len(seen),
        failed=len(sent) - refused - done,
        retried=sum(int(str(one["attempts"])) > 1 for one in log.values()),
        server_lag_s=answer["server_lag_s"],
        client_lag_s=answer["client_lag_s"],
        rejected=lateness(answer),
    )


def believed(name: str, seed: int, seconds: float) -> Trial:
    """Do it, and again if it is not believed; not a third time. Raises TrialError."""
    first = measure(name, seed, seconds)
    return first if first.rejected is None else replace(measure(name, seed, seconds), again=True)


def ask(told: Replay) -> Answer:
    """Let the client's process replay it. Raises TrialError."""
    command = ["taskset", "-c", LOAD_CORE, sys.executable, "-m", "benchmarks.fairness_http", "--client"]
    try:
        ran = subprocess.run(
            command, input=orjson.dumps(told), stdout=subprocess.PIPE, cwd=ROOT, timeout=CLIENT_S, check=True
        )
    except subprocess.SubprocessError as error:
        raise TrialError(f"the client failed: {error}") from None
    answer: Answer = orjson.loads(ran.stdout)
    return answer


def get_ready(proxy: Proxy, admin: int) -> None:
    """Wait until all servers serve. Raises TrialError."""
    end = time.monotonic() + READY_S
    while time.monotonic() < end and proxy.process.poll() is None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if orjson.loads(get(admin, "/readyz"))["endpoints"]["serving"] == SERVERS:
                return
        time.sleep(0.1)
    raise TrialError(f"lbproxy did not get ready: {proxy.last_words()}")


def get(port: int, path: str) -> bytes:
    """A page of 127.0.0.1. Raises OSError, HTTPException."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().read()


@contextmanager
def watched(admin: int) -> Iterator[list[int]]:
    """How many requests wait, every `POLL_S` while this lasts; filled by a thread."""
    seen: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(POLL_S):
            with contextlib.suppress(OSError, http.client.HTTPException):
                seen.append(waiting(get(admin, "/metrics")))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


# What is read


def waiting(page: bytes) -> int:
    """Requests in the queue, of lbproxy's /metrics."""
    found = re.search(rb"^lbproxy_waiting_requests (\S+)$", page, re.MULTILINE)
    assert found is not None, "lbproxy says how many wait"
    return int(float(found[1]))


def read_log(output: bytes) -> dict[str, dict[str, object]]:
    """The access log's lines by the request's id."""
    lines = [orjson.loads(line) for line in output.splitlines() if line.startswith(b"{")]
    return {str(line["id"]): line for line in lines if line["event"] == "request"}


def by_client(sent: Sequence[Arrival], calls: Sequence[Call]) -> list[Served]:
    """What the client saw of each request, which for it came when it was due; times from the begin of the arrivals."""
    found = []
    for (due, job), call in zip(sent, calls, strict=True):
        assert job.id == call["id"]
        one = Served(job, due, 0, True, ended_at=due + call["ended"])
        one.first_at = None if call["first"] is None else due + call["first"]
        one.cached_tokens = call["cached_tokens"]
        failure = call["failure"]
        if failure is None:
            one.outcome = Outcome.COMPLETED
        else:
            one.outcome = Outcome.SATURATED if failure.startswith("status 429") else Outcome.UPSTREAM_BROKE
        found.append(one)
    return found


def by_log(sent: Sequence[Arrival], log: Mapping[str, Mapping[str, object]], offset: float) -> list[Served]:
    """When each request came and was placed, by the access log. `offset`: of its clock to another, seconds."""
    found = []
    for _, job in sent:
        line = log[job.id]
        ended_at = datetime.fromisoformat(str(line["time"])).timestamp() - offset
        one = Served(job, ended_at - float(str(line["duration_ms"])) / 1e3, 0, True, ended_at=ended_at)
        if line["queue_ms"] is not None:
            one.placed_at = one.submitted_at + float(str(line["queue_ms"])) / 1e3
        found.append(one)
    return found


# The page's part


def section(trials: Sequence[Trial], seconds: float, version: str) -> str:
    """The last part of FAIRNESS.md."""
    by_name: dict[str, list[Trial]] = {}
    for trial in trials:
        by_name.setdefault(trial.name, []).append(trial)
    seeds = len({trial.seed for trial in trials})
    server_lag, client_lag = (max(getattr(one, f"{who}_lag_s") for one in trials) for who in ("server", "client"))
    rejected = [f"{one.name}, seed {one.seed}: {one.rejected}" for one in trials if one.rejected]
    text = (
        f"## Over HTTP\n\n`python -m benchmarks.fairness_http`, lbproxy {version}, {seeds} seeds. An API key for each "
        f"flow, {SERVERS} servers of `lbproxy mock`,\n{seconds:g} s of arrivals, `admission.queue_timeout` "
        f"{QUEUE_S:g} s, order `shortest`. *simulated*: the same arrivals in virtual time. Neither answered "
        "whole\nnor refused: "
        f"{sum(one.failed for one in trials)} of {sum(requests(one.figures) for one in trials)}; sent a second time: "
        f"{sum(one.retried for one in trials)}. How late tokens came out of the servers, p99 of the worst run: "
        f"{1e3 * server_lag:.1f} ms; the\nclient's clock: {1e3 * client_lag:.1f} ms. With more than "
        f"{1e3 * MAX_LAG_S:g} ms a run is done again, once: {sum(one.again for one in trials)} of {len(trials)} were.\n"
    )
    parts = [text]
    if rejected:
        lines = "".join(f"- {line}\n" for line in rejected)
        parts.append(f"**Late the second time as well, so that milliseconds of these mean nothing:**\n\n{lines}")
    parts += [crowd_part(by_name), priorities_part(by_name[PRIORITIES])]
    return "\n".join(parts)


def requests(figures: Figures) -> int:
    """Of all flows."""
    return sum(int(one["requests"]) for one in figures.flows.values())


def crowd_part(by_name: Mapping[str, Sequence[Trial]]) -> str:
    """A heavy flow and nine light ones."""
    rows = []
    for how, name in (("one key", ONE_FLOW), ("a key each", FLOWS)):
        for where, runs in sides(by_name[name]).items():
            light = [cell(runs, "light", figure) for figure in ("ttft_mean", "ttft_p99", "refused")]
            heavy = [cell(runs, "heavy", "ttft_mean", ".1f"), cell(runs, "heavy", "done_s", ".1f")]
            rows.append([f"{how}, {where}", *light, *heavy])
    heads = ["", "light: TTFT", "p99", "refused", "heavy: TTFT", "heavy/s"]
    return f"### A heavy flow and nine light ones\n\n{as_table(heads, rows)}"


def priorities_part(trials: Sequence[Trial]) -> str:
    """Three priorities at twice the capacity."""
    real, virtual = sides(trials).values()
    bound = run_of(PRIORITIES, 1, SECONDS).scenario.admission.queue_requests
    looks = sum(one.looks for one in trials)
    text = (
        "### Strict priority\n\nPlaced while a more important one waited, by the access log: "
        f"{sum(run.inversions for run in real)} of {sum(map(requests, real))} requests "
        f"(simulated: {sum(run.inversions for run in virtual)}). The\nlongest queue in {looks} looks at /metrics: "
        f"{max(run.longest_queue for run in real)} (simulated: {max(run.longest_queue for run in virtual)}); it "
        f"may hold {bound}.\n"
    )
    rows = [
        [f"{of}: {LEVELS[of]}, {where}", *(cell(runs, of, figure) for figure in ("ttft_mean", "ttft_p99", "refused"))]
        for of in LEVELS
        for where, runs in sides(trials).items()
    ]
    return f"{text}\n{as_table(['priority', 'TTFT', 'p99', 'refused'], rows)}"


def sides(trials: Sequence[Trial]) -> dict[str, list[Figures]]:
    """What was measured, and what was simulated."""
    return {"HTTP": [one.figures for one in trials], "simulated": [one.simulated for one in trials]}


def dumped(trials: Sequence[Trial], seconds: float) -> bytes:
    """For `RESULTS`."""
    data = {"lbproxy": __version__, "seconds": seconds, "trials": [asdict(one) for one in trials]}
    return orjson.dumps(data)


def rendered(results: bytes) -> str:
    """The part of the page that these results are, with its marks."""
    data = orjson.loads(results)
    trials = []
    for one in data["trials"]:
        one["figures"], one["simulated"] = Figures(**one["figures"]), Figures(**one["simulated"])
        trials.append(Trial(**one))
    return f"{BEGIN}\n{section(trials, data['seconds'], data['lbproxy'])}{END}\n"


# The command


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fairness_http", description="Flows over HTTP.")
    parser.add_argument("--seeds", type=int, default=2, metavar="N")
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help="of arrivals in a run")
    parser.add_argument("--dry", action="store_true", help="print what came of it, and write nothing")
    parser.add_argument("--render", action="store_true", help="write the page of the runs that there are")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        uvloop.run(replay())
        return 0
    if not args.render:
        trials = []
        for seed in range(1, args.seeds + 1):
            # Every second time the other way round, so that what the machine does is done to all alike.
            for name in (ONE_FLOW, FLOWS, PRIORITIES)[:: 1 if seed % 2 else -1]:
                trials.append(believed(name, seed, args.seconds))
                print(f"{name}, seed {seed}: {trials[-1]}", file=sys.stderr, flush=True)
        results = dumped(trials, args.seconds)
        if args.dry:
            print(rendered(results))
            return 0
        RESULTS.write_bytes(results)
    text = rendered(RESULTS.read_bytes())
    PAGE.write_text(f"{PAGE.read_text('utf-8').partition(BEGIN)[0].rstrip()}\n\n{text}", "utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
