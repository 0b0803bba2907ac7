# SPDX-License-Identifier: Apache-2.0
"""`lbproxy sim`: scenarios read, refused, run; the example of docs/simulator.md; figures that are the same anywhere."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from lbproxy.commands.cli import main
from lbproxy.commands.sim import fleet_options, label, run_all, runs_of
from lbproxy.config.descriptions import descriptions
from lbproxy.config.parse import parse_scenario
from lbproxy.config.scenario import (
    BalancerFaultSettings,
    ExchangeSettings,
    FaultSettings,
    OthersSettings,
    PresetName,
    Scenario,
    ServerSettings,
    WorkloadSettings,
)
from lbproxy.config.sections.flows import FlowsSettings
from lbproxy.config.text import ConfigError
from lbproxy.sim.engine.presets import PRESETS
from lbproxy.sim.figures.plots import can_plot
from lbproxy.sim.fleet.fleet import BalancerFault, ExchangeRules
from lbproxy.sim.workloads.catalogue import WORKLOADS, workload_parameters
from tests.support.docs import DOCS, blocks, expect_generated

SMALL = """
fleet: [{count: 2}]
workload: {name: own, parameters: {duration_s: 5, rate: 4, output_tokens: 20}}
policies: [round-robin, least-request]
seeds: 2
"""


def read(text: str) -> Scenario:
    return parse_scenario(text, environ={})


def problems(text: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        runs_of(read(text), source="scenario")
    return raised.value.problems


def file(folder: Path, text: str, name: str = "scenario.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_scenario_has_every_preset() -> None:
    """Config may not import the simulation, so the names stand there again."""
    assert get_args(PresetName) == tuple(PRESETS)


def test_defaults_are_one_balancer_before_eight_servers() -> None:
    scenario = read("workload: {name: own}\npolicies: [random]")
    options = fleet_options(scenario, scenario.policies[0])
    assert len(options.servers) == 8
    assert (options.balancers, options.scrape_interval_s, options.stream_share, options.size_error) == (1, 0.2, 1, 0.15)
    assert scenario.admission.queue_requests == 1_000_000


def test_fleet_is_as_the_scenario_says() -> None:
    scenario = read("""
fleet: [{count: 2, speed: 0.5, kv_tokens: 100000, max_model_len: 131072}, {preset: llama-8b-h100, max_loras: 3}]
faults: [{server: 2, at: 10s, lasts: 5s, speed: 0.2}, {server: 0, at: 1m, lasts: 500ms}]
workload: {name: lora, parameters: {adapters: 6}}
policies: [adaptive, {policy: weighted, scorers: {queue: 1}}]
""")
    options = fleet_options(scenario, scenario.policies[0])
    assert [(s.speed, s.preset.kv_tokens, s.preset.max_loras) for s in options.servers] == [
        (0.5, 100_000, 0),
        (0.5, 100_000, 0),
        (1.0, 432_000, 3),
    ]
    assert [(f.server, f.from_s, f.until_s, f.speed) for f in options.faults] == [(2, 10, 15, 0.2), (0, 60, 60.5, None)]
    assert len(options.adapters) == 6
    assert (options.balancers, options.exchange, options.balancer_faults) == (1, None, ())
    assert options.block_tokens == 256
    assert fleet_options(scenario, scenario.policies[1]).block_tokens == 0
    assert [label(routing) for routing in scenario.policies] == ["adaptive", "weighted scorers={'queue': 1.0}"]


def test_roles_and_rules_of_splitting_are_as_the_scenario_says() -> None:
    scenario = read("""
fleet: [{count: 2, role: prefill}, {role: decode}, {}]
workload: {name: own}
policies: [adaptive, {policy: adaptive, split: always}, {policy: random, split: never}, {policy: random, split: 8000}]
""")
    options = fleet_options(scenario, scenario.policies[0])
    assert [server.role.value for server in options.servers] == ["prefill", "prefill", "decode", "both"]
    labels = [label(routing) for routing in scenario.policies]
    assert labels == ["adaptive", "adaptive split=always", "random split=never", "random split=8000"]


def test_balancers_are_as_the_scenario_says() -> None:
    scenario = read("""
workload: {name: own}
policies: [adaptive]
balancers: 3
exchange: {interval: 200ms, delay: 5ms, lost: 0.01, repeated: 0.02, late: 0.03}
balancer_faults: [{balancer: 2, at: 10s, lasts: 5s}, {balancer: 0, at: 1m}]
""")
    options = fleet_options(scenario, scenario.policies[0])
    assert options.balancers == 3
    assert options.exchange == ExchangeRules(interval_s=0.2, delay_s=0.005, lost=0.01, repeated=0.02, late=0.03)
    assert options.balancer_faults == (
        BalancerFault(balancer=2, from_s=10.0, until_s=15.0),
        BalancerFault(balancer=0, from_s=60.0, until_s=60.0 + 86_400.0),
    )
    usual = read("workload: {name: own}\npolicies: [adaptive]\nexchange: {}")
    assert fleet_options(usual, usual.policies[0]).exchange == ExchangeRules(), "the defaults are the same"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("policies: [random]", "workloads: expected a list of at least one, unless there is `workload`"),
        ("workload: {name: own}\nworkloads: [{name: own}]\npolicies: [random]", "workloads: expected a list of at"),
        ("workloads: [{name: own}, {name: owl}]\npolicies: [random]", "workloads[1].name: expected one of own, "),
        (
            "workloads: [{name: azure, trace: x}, {name: azure, trace: y}]\npolicies: [random]",
            "workloads: expected at most one trace",
        ),
        ("workload: {name: own}\npolicies: []", "policies: expected at least one policy"),
        ("workload: {name: own}\npolicies: [random, random]", "policies[1]: expected another policy"),
        ("workload: {name: own}\npolicies: [fastest]", "policies[0].policy: expected 'adaptive'"),
        ("workload: {name: own, parms: {}}\npolicies: [random]", "workload.parms: unknown key, did you mean parameter"),
        ("workload: {name: own}\npolicies: [random]\nfleet: [{count: 0}]", "fleet[0].count: expected a whole number"),
        ("workload: {name: own}\npolicies: [random]\nfleet: [{count: 700}, {count: 700}]", "fleet: expected 1 to 1024"),
        (
            "workload: {name: own}\npolicies: [random]\nothers: [{server: 8, rate: 1}]",
            "others: expected servers from 0",
        ),
        (
            "workload: {name: own}\npolicies: [random]\nfleet: [{ranks: 2, ttft: 1}]",
            "fleet[0].ttft: expected no `ranks`",
        ),
        (
            "workload: {name: own}\npolicies: [random]\nfleet: [{ttft: 1, role: decode}]",
            "fleet[0].role: expected both",
        ),
        (
            "workload: {name: own}\npolicies: [random]\nfaults: [{server: 8, at: 1, lasts: 1}]",
            "faults: expected serv",
        ),
        *(
            (f"workload: {{name: own}}\npolicies: [random]\n{keys}", problem)
            for keys, problem in (
                ("exchange: {interval: 0s}", "exchange.interval: expected"),
                ("exchange: {delay: 2m}", "exchange.delay: expected"),
                ("exchange: {lost: 1.5}", "exchange.lost: expected a share"),
                ("exchange: {late: -1}", "exchange.late: expected a share"),
                ("exchange: {repeat: 1}", "exchange.repeat: unknown key, did you mean repeated"),
                ("balancer_faults: [{balancer: 1, at: 1s}]", "balancer_faults: expected balancers from 0 to 0"),
                ("balancer_faults: [{balancer: 0, at: 1s}]", "balancer_faults: expected at least one balancer that"),
                ("balancers: 2\nbalancer_faults: [{balancer: 0}]", "balancer_faults[0].at: required"),
            )
        ),
        ("workload: {name: owl}\npolicies: [random]", "workload.name: expected one of own, "),
        ("workload: {name: own, parameters: {ratte: 1}}\npolicies: [random]", "workload.parameters.ratte: unknown"),
        (
            "workload: {name: own, parameters: {rate: x}}\npolicies: [random]",
            "workload.parameters.rate: expected a",
        ),
    ],
)
def test_what_is_wrong_is_told_with_its_path(text: str, problem: str) -> None:
    (told,) = problems(text)
    assert told.startswith(problem)


def test_trace_that_cannot_be_replayed_is_refused() -> None:
    for name, line, problem in (
        ("own", "x", "workload.trace: own replays none"),
        ("mooncake", "x", "workload.trace: line 1: JSONDecodeError"),
        ("azure", "x", "workload.trace: line 1: expected the header"),
    ):
        with pytest.raises(ConfigError) as raised:
            runs_of(read(f"workload: {{name: {name}}}\npolicies: [random]"), source="s", trace=[line])
        assert raised.value.problems[0].startswith(problem)


def test_other_processes_give_the_same_results() -> None:
    runs = runs_of(read(SMALL), source="scenario")
    done: list[int] = []
    here = run_all(runs, processes=1, on_done=lambda: done.append(1))
    there = run_all(runs, processes=2, on_done=lambda: done.append(2))
    assert here == there
    assert done == [1] * 4 + [2] * 4
    assert [(run.routing.policy, run.seed) for run in runs] == [
        ("round-robin", 1),
        ("round-robin", 2),
        ("least-request", 1),
        ("least-request", 2),
    ]


def test_gauges_may_come_as_seldom_as_one_likes() -> None:
    for interval in ("10s", "1h", "null"):
        runs = runs_of(read(f"{SMALL}\nscrape_interval: {interval}"), source="scenario")
        assert run_all(runs[:1], processes=1, on_done=lambda: None)[0].summary.failed == 0


def test_command_prints_a_table_and_writes_what_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    form = ["--plot", str(tmp_path / "out.svg")] if can_plot() else []
    files = ["--json", str(tmp_path / "out.json"), "--markdown", str(tmp_path / "out.md"), *form]
    assert main(["sim", file(tmp_path, SMALL), "--processes", "1", *files]) == 0
    shown = capsys.readouterr().out
    assert "own, 2 servers, mean of 2 seeds" in shown
    assert "least-request against round-robin: TTFT " in shown
    data = json.loads((tmp_path / "out.json").read_bytes())
    assert data["whole"]["round-robin"]["over_seeds"]["failed"]["mean"] == 0
    assert len(data["whole"]["least-request"]["runs"]) == 2
    assert (tmp_path / "out.md").read_text().count("\n| ") == 3
    assert not form or "<svg" in (tmp_path / "out.svg").read_text()


def test_command_replays_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,4\n2023-11-16 18:15:47.99,396,9\n"
    trace = file(tmp_path, rows, "trace.csv")
    text = f"workload: {{name: azure, trace: '{trace}'}}\npolicies: [random]\nseeds: 1"
    assert main(["sim", file(tmp_path, text), "--json", str(tmp_path / "out.json")]) == 0
    data = json.loads((tmp_path / "out.json").read_bytes())
    assert data["whole"]["random"]["runs"][0]["requests"] == 2


def test_command_lists_the_workloads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--list"]) == 0
    shown = capsys.readouterr().out
    assert "mooncake" in shown
    assert "speedup 2" in shown


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "a scenario file or --list is required"),
        (["x.yaml", "--processes", "0"], "--processes must be at least 1"),
        (["x.yaml", "--plot", "x.jpg"], "--plot must end in .png, .svg, .pdf"),
        (["nowhere.yaml"], "there is no such file"),
    ],
)
def test_wrong_arguments_are_told(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", *arguments]) == 2
    assert problem in capsys.readouterr().err


def test_example_of_the_documentation_says_what_comes_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Digit by digit: a simulation gives the same anywhere."""
    page = DOCS / "simulator.md"
    examples = [block for block in blocks(page) if block.language == "yaml" and "workload:" in block.text]
    for name, example in zip(("scenario", "several balancers"), examples, strict=True):
        assert main(["sim", file(tmp_path, example.text), "--processes", "1"]) == 0
        lines = "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines() if line.strip())
        expect_generated(page, name, f"```\n$ lbproxy sim scenario.yaml\n{lines}```\n")


def test_documentation_has_every_workload() -> None:
    """Those in a row with the same parameters together."""
    lines = []
    for parameters, names in groupby(WORKLOADS, workload_parameters):
        shown = ", ".join(f"{key} {value:g}" for key, value in parameters.items())
        abouts = {name: (WORKLOADS[name].__doc__ or "").partition("\n\n")[0].split() for name in names}
        about = (f"**{name}**: {' '.join(words)}" for name, words in abouts.items())
        lines.append(f"- {' '.join(about)} `{shown}`\n")
    expect_generated(DOCS / "simulator.md", "workloads", "".join(lines))


NAMES_SAY_IT = {"others[].prompt_tokens", "others[].output_tokens"}
SCENARIO_SECTIONS = (
    ("", Scenario),
    ("fleet[].", ServerSettings),
    ("faults[].", FaultSettings),
    ("others[].", OthersSettings),
    ("exchange.", ExchangeSettings),
    ("balancer_faults[].", BalancerFaultSettings),
    ("workload.", WorkloadSettings),
)


def test_documentation_has_every_key_of_a_scenario() -> None:
    lines = []
    for prefix, section in SCENARIO_SECTIONS:
        for name, field in section.model_fields.items():
            default = "required" if field.is_required() else _written(field.get_default(call_default_factory=True))
            text = " ".join(descriptions(section).get(name, "").split())
            assert text or f"{prefix}{name}" in NAMES_SAY_IT, f"{prefix}{name} has no docstring"
            lines.append(f"- `{prefix}{name}` ({default}){f': {text}' if text else ''}\n")
    expect_generated(DOCS / "simulator.md", "scenario keys", "".join(lines))


def _written(value: object) -> str:
    if isinstance(value, FlowsSettings):
        return "one for all"
    if isinstance(value, tuple | BaseModel):
        return "8 servers" if value and isinstance(value, tuple) else "none" if value == () else "no limits"
    return "null" if value is None else f"{value}"
