# SPDX-License-Identifier: Apache-2.0
"""`lbproxy sim`: from a scenario to simulations in parallel processes, and a table of what came out.

The simulation itself is `lbproxy.sim`; here it meets the real `Balancer` with the real settings. A `Run` is plain data,
so it can go to another process; equal runs give equal results, in whichever process. Files are `cli`'s.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import TypeAlias

import orjson
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.scenario import ExchangeSettings, Scenario, ServerSettings, WorkloadSettings
from lbproxy.config.sections.endpoints import ScrapeSettings
from lbproxy.config.sections.routing import RoutingSettings
from lbproxy.config.text import ConfigError
from lbproxy.config.values import split_rule
from lbproxy.core.balancer import Balancer
from lbproxy.core.engines.handover import Role
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.queue.flows import FlowRules
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.extras.installing import needs
from lbproxy.sim.engine.fixed import FirstTokenSpread, FixedTimes
from lbproxy.sim.engine.presets import PRESETS
from lbproxy.sim.figures import plots, sharing
from lbproxy.sim.figures.report import (
    Estimate,
    Summary,
    as_json,
    as_table,
    by_phase,
    cells,
    headings,
    markdown,
    paired,
    summarise,
)
from lbproxy.sim.figures.sharing import Share, by_flow
from lbproxy.sim.fleet.cluster import Fleet
from lbproxy.sim.fleet.fleet import (
    TOKEN_BYTES,
    BalancerFault,
    ExchangeRules,
    FaultKind,
    FleetOptions,
    OtherTraffic,
    Reported,
    Served,
    ServerFault,
    SimulatedServer,
    ToldUsage,
)
from lbproxy.sim.workloads.catalogue import (
    WORKLOADS,
    UnknownWorkload,
    adapter_names,
    checked,
    make_workload,
    takes_trace,
    workload_parameters,
)
from lbproxy.sim.workloads.traces import TraceError, TraceRow, read_azure, read_bailian, read_burstgpt, read_mooncake
from lbproxy.sim.workloads.workload import Clients, Job, Source, Workload

_TRACE_READERS: Mapping[str, Callable[[Iterable[str]], list[TraceRow]]] = {
    "mooncake": read_mooncake,
    "azure": read_azure,
    "toolagent": read_mooncake,
    "burstgpt": read_burstgpt,
    **dict.fromkeys(("bailian-chat", "bailian-business", "bailian-thinking", "bailian-coder"), read_bailian),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation: a scenario with one of its policies and one of its seeds."""

    scenario: Scenario
    routing: RoutingSettings
    seed: int
    rows: tuple[TraceRow, ...] | None = None
    """Rows of the trace that the workload replays."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a run."""

    summary: Summary
    phases: dict[str, Summary]
    flows: dict[str, Share]


@dataclass(frozen=True, slots=True)
class Comparison:
    """All runs of a scenario: by policy, in the order of the seeds."""

    scenario: Scenario
    results: dict[str, list[Result]]

    def summaries(self) -> dict[str, list[Summary]]:
        """The runs as a whole."""
        return {policy: [result.summary for result in results] for policy, results in self.results.items()}

    def phases(self) -> dict[str, dict[str, list[Summary]]]:
        """The runs' phases: by phase, by policy."""
        names = next(iter(self.results.values()))[0].phases
        return {
            name: {policy: [result.phases[name] for result in results] for policy, results in self.results.items()}
            for name in names
        }

    def flows(self) -> dict[str, list[dict[str, Share]]]:
        """What each flow got: by policy, in the order of the seeds. Empty if there is but one flow."""
        several = any(len(result.flows) > 1 for results in self.results.values() for result in results)
        return {policy: [result.flows for result in results] for policy, results in self.results.items() if several}

    def json(self) -> bytes:
        """Everything, for a program."""
        found: dict[str, object] = {
            "scenario": self.scenario.model_dump(mode="json"),
            "whole": as_json(self.summaries()),
            "phases": {name: as_json(phase) for name, phase in self.phases().items()},
            "flows": sharing.as_json(self.flows()),
        }
        return orjson.dumps(found, option=orjson.OPT_INDENT_2)

    def markdown(self) -> bytes:
        """The tables, for a document: the whole, then each phase if there are several."""
        phases = self.phases()
        parts = [markdown(self.summaries())]
        if len(phases) > 1:
            parts += [f"\n{name}\n\n{markdown(phase)}" for name, phase in phases.items()]
        if flows := self.flows():
            parts.append(f"\n{as_table(sharing.headings(), sharing.rows(flows), left=2)}")
        return "".join(parts).encode()

    def plot(self, form: str) -> bytes:
        """A picture. Raises ImportError without the extra `plots`."""
        found = {policy: [result.phases for result in results] for policy, results in self.results.items()}
        return plots.plot(found, title=title_of(self.scenario), form=form)


def unusable(*, scenario: str | None, processes: int, plot: str | None) -> str | None:
    """What is wrong with the command's arguments; None = nothing. `plot`: the form of the picture, if one is wanted."""
    if scenario is None:
        return "a scenario file or --list is required; docs/simulator.md has an example"
    if processes < 1:
        return f"--processes must be at least 1, got {processes}"
    if plot is not None and plot not in plots.FORMS:
        return f"--plot must end in {', '.join(f'.{form}' for form in plots.FORMS)}"
    if plot is not None and not plots.can_plot():
        return f"--plot {needs('plots')}"
    return None


def title_of(scenario: Scenario) -> str:
    """What a scenario is called: its workloads."""
    return " + ".join(dict.fromkeys(source.name for source in scenario.sources))


# Running


def runs_of(scenario: Scenario, *, source: str, trace: Iterable[str] | None = None) -> list[Run]:
    """Every policy with every seed. `trace`: the lines of the scenario's trace. Raises ConfigError."""
    rows = None
    for number, workload in enumerate(scenario.sources):
        path = "workload" if scenario.workload is not None else f"workloads[{number}]"
        try:
            checked(workload.name, workload.parameters)
        except UnknownWorkload as error:
            key = "parameters." if workload.name in WORKLOADS else "name: "
            raise ConfigError(source, [f"{path}.{key}{error}"]) from None
        if trace is None or (workload.trace is None and len(scenario.sources) > 1):
            continue
        if not takes_trace(workload.name):
            raise ConfigError(source, [f"{path}.trace: {workload.name} replays none"])
        try:
            rows = tuple(_TRACE_READERS[workload.name](trace))
        except TraceError as error:
            raise ConfigError(source, [f"{path}.trace: {error}"]) from None
    seeds = range(1, scenario.seeds + 1)
    return [Run(scenario, routing, seed, rows) for routing in scenario.policies for seed in seeds]


def simulate(run: Run) -> Result:
    """One simulation, from begin to end. Deterministic."""
    return result_of(run.scenario, serve(run))


def result_of(scenario: Scenario, served: Sequence[Served]) -> Result:
    """What came of a run in which these requests were served."""
    servers = sum(group.count for group in scenario.fleet)
    return Result(summarise(served, servers), by_phase(served, servers), by_flow(served, servers))


def serve(run: Run) -> list[Served]:
    """What became of each job of a run."""
    return serve_workload(run, workload_of(run))


SEEDS_APART = 1_000_003
"""The seeds of two clients in a row differ by this."""


def workload_of(run: Run) -> Workload:
    """All that the clients of a run send."""
    clients: list[Source] = []
    for one in run.scenario.sources:
        rows = run.rows if one.trace is not None or run.scenario.workload is not None else None
        for copy in range(1, one.copies + 1):
            seed = run.seed + SEEDS_APART * len(clients)
            workload = make_workload(one.name, one.parameters, seed=seed, rows=rows)
            flow = one.flow if one.copies == 1 else f"{one.flow}-{copy}"
            clients.append(Source(workload, flow, one.priority, one.slo_ttft, one.patience, one.stream_share))
    return (
        Clients(clients)
        if run.scenario.workload is None or _says_something(run.scenario.workload)
        else clients[0].workload
    )


def _says_something(workload: WorkloadSettings) -> bool:
    """Its requests have something that those of a workload by itself have not."""
    return bool(workload.model_fields_set & {"flow", "copies", "priority", "slo_ttft", "patience", "stream_share"})


def serve_workload(run: Run, workload: Workload) -> list[Served]:
    """What became of each job of a workload, on the fleet and with the policy and the seed of a run."""
    return fleet_of(run, workload).run()


Read: TypeAlias = Callable[[Job, InferenceRequest], InferenceRequest]


def fleet_of(run: Run, workload: Workload, read: Read | None = None) -> Fleet:
    """The fleet, the policy and the seed of a run, before a workload. `read`: see `Fleet`."""
    settings = balancing_of(run.scenario)
    return Fleet(
        fleet_options(run.scenario, run.routing),
        workload,
        lambda rng: Balancer(make_policy(run.routing, rng), settings, rng=rng),
        seed=run.seed,
        read=read,
    )


def balancing_of(scenario: Scenario) -> BalancingSettings:
    """The settings of a scenario's balancers."""
    return BalancingSettings(scenario.admission, scenario.flows, scrape=_scraping(scenario.scrape_interval))


def _scraping(interval_s: float | None) -> ScrapeSettings:
    """As somebody would set it who scrapes so seldom: gauges are believed until the next but one is due."""
    usual = ScrapeSettings()
    if interval_s is None:
        return usual
    return ScrapeSettings(interval=interval_s, stale_after=max(usual.stale_after, 2 * interval_s))


def fleet_options(scenario: Scenario, routing: RoutingSettings) -> FleetOptions:
    """A scenario's fleet, in the simulation's own words."""
    block_bytes = make_policy(routing).block_bytes
    adapters = max(_adapters(one) for one in scenario.sources)
    return FleetOptions(
        servers=tuple(server for group in scenario.fleet for server in _servers(group)),
        faults=tuple(
            ServerFault(
                server=fault.server,
                from_s=fault.at,
                until_s=fault.at + fault.lasts,
                speed=fault.speed,
                kind=FaultKind(fault.kind),
            )
            for fault in scenario.faults
        ),
        others=tuple(
            OtherTraffic(
                server=one.server,
                rate=one.rate,
                prompt_tokens=one.prompt_tokens,
                output_tokens=one.output_tokens,
                from_s=one.at,
                until_s=one.at + one.lasts,
            )
            for one in scenario.others
        ),
        adapters=tuple(adapter_names(adapters)),
        adapters_known=scenario.adapters_known,
        sizes_declared=scenario.sizes_declared,
        scrape_interval_s=scenario.scrape_interval,
        scrape_delay_s=scenario.scrape_delay,
        network_s=scenario.network_delay,
        stream_share=scenario.stream_share,
        size_error=scenario.size_error,
        block_tokens=0 if block_bytes is None else block_bytes // TOKEN_BYTES,
        balancers=scenario.balancers,
        exchange=None if scenario.exchange is None else _exchanged(scenario.exchange),
        balancer_faults=tuple(
            BalancerFault(balancer=one.balancer, from_s=one.at, until_s=one.at + one.lasts)
            for one in scenario.balancer_faults
        ),
        flow_rules=FlowRules(scenario.flows),
        fair=scenario.fair,
    )


def _servers(group: ServerSettings) -> list[SimulatedServer]:
    """Those of a group, each with pauses at other times."""
    usual = PRESETS[group.preset]
    preset = replace(
        usual,
        kv_tokens=group.kv_tokens or usual.kv_tokens,
        max_model_len=group.max_model_len or usual.max_model_len,
        max_loras=group.max_loras,
        max_sequences=group.max_sequences or usual.max_sequences,
        prefix_caching=group.prefix_cache,
        pause_s=group.pause,
        pause_every_s=group.pause_every,
        cold_share=group.cold_share,
        cold_ms=1000 * group.cold_load,
    )
    times = None
    if group.ttft is not None:
        form, spread = FirstTokenSpread(group.ttft_form), group.ttft_spread
        times = FixedTimes(ttft_s=group.ttft, ttft_spread=spread, form=form, token_s=group.token_time)
    server = SimulatedServer(
        preset,
        group.speed,
        ranks=group.ranks,
        times=times,
        jitter=group.jitter,
        metrics=group.metrics,
        shows_waiting=group.waiting,
        reported=Reported(group.gauges),
        usage=ToldUsage(group.usage),
        hidden_share=group.hidden,
        role_chunk=group.role_chunk,
        weight=group.weight,
        role=Role(group.role),
    )
    apart_s = group.pause_every / group.count if group.pause else 0.0
    return [replace(server, preset=replace(preset, pause_at_s=number * apart_s)) for number in range(group.count)]


def _exchanged(exchange: ExchangeSettings) -> ExchangeRules:
    return ExchangeRules(
        interval_s=exchange.interval,
        delay_s=exchange.delay,
        lost=exchange.lost,
        repeated=exchange.repeated,
        late=exchange.late,
    )


def _adapters(workload: WorkloadSettings) -> int:
    """How many of `adapter_names` a workload asks for."""
    return int(workload.parameters.get("adapters", workload_parameters(workload.name).get("adapters", 0)))


def run_all(runs: Sequence[Run], *, processes: int, on_done: Callable[[], None]) -> list[Result]:
    """All runs, in that order; `on_done` is called after each. With one process, in this one."""
    if processes == 1 or len(runs) == 1:
        results = []
        for run in runs:
            results.append(simulate(run))
            on_done()
        return results
    # Not forked: a fork copies whatever threads of this process hold locked.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(runs)), mp_context=context) as pool:
        futures = [pool.submit(simulate, run) for run in runs]
        try:
            for future in as_completed(futures):
                future.result()
                on_done()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def compare(runs: Sequence[Run], *, processes: int, console: Console) -> Comparison:
    """Run a scenario's runs under a progress bar."""
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(runs))
        results = run_all(runs, processes=processes, on_done=lambda: progress.advance(task))
    by_policy: dict[str, list[Result]] = {}
    for run, result in zip(runs, results, strict=True):
        by_policy.setdefault(label(run.routing), []).append(result)
    return Comparison(runs[0].scenario, by_policy)


def label(routing: RoutingSettings) -> str:
    """What a table calls a policy: its name, and what of it is not the default."""
    usual = RoutingSettings().model_dump()
    others = {key: value for key, value in routing.model_dump(exclude={"policy"}).items() if value != usual[key]}
    if "split" in others:
        others["split"] = split_rule(others["split"])
    return " ".join([routing.policy, *(f"{key}={value}" for key, value in others.items())])


# Showing


SHOWN = (
    "ttft_mean",
    "ttft_p90",
    "ttft_p99",
    "e2e_mean",
    "tpot_mean",
    "output_tokens_s",
    "goodput",
    "hit_ratio",
    "failed",
)
"""What fits on a terminal; `--json` and `--markdown` have all."""


def show(comparison: Comparison, console: Console) -> None:
    """A line for each policy, and how it differs from the first."""
    scenario = comparison.scenario
    servers = sum(group.count for group in scenario.fleet)
    seeds = "1 seed" if scenario.seeds == 1 else f"mean of {scenario.seeds} seeds"
    summaries = comparison.summaries()
    table = Table(box=box.SIMPLE_HEAD, title=f"{title_of(scenario)}, {servers} servers, {seeds}", title_justify="left")
    for number, heading in enumerate(headings(SHOWN)):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for policy, runs in summaries.items():
        table.add_row(*cells(policy, runs, SHOWN))
    console.print(table)
    first, base = next(iter(summaries.items()))
    for policy, runs in list(summaries.items())[1:]:
        changes = ", ".join(
            f"{name} {_change(paired(runs, base, figure))}"
            for name, figure in (("TTFT", "ttft_mean"), ("E2E", "e2e_mean"), ("tokens/s", "output_tokens_s"))
        )
        console.print(f"{policy} against {first}: {changes}", soft_wrap=True)
    if flows := comparison.flows():
        shares = Table(box=box.SIMPLE_HEAD)
        for number, heading in enumerate(sharing.headings()):
            shares.add_column(heading, justify="right" if number > 1 else "left", no_wrap=True)
        for row in sharing.rows(flows):
            shares.add_row(*row)
        console.print(shares)


def _change(found: Estimate) -> str:
    """In percent, with its interval if there is one."""
    if found.low == found.high:
        return f"{found.mean:+.1%}"
    return f"{found.mean:+.1%} ({found.low:+.1%} to {found.high:+.1%})"


def show_workloads(console: Console) -> None:
    """The workloads and their parameters with defaults."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("workload", "what", "parameters and defaults"):
        table.add_column(heading, overflow="fold")
    for name, make in WORKLOADS.items():
        about = " ".join((make.__doc__ or "").partition("\n\n")[0].split())
        parameters = ", ".join(f"{key} {value:g}" for key, value in workload_parameters(name).items())
        table.add_row(name, about, parameters)
    console.print(table)
