# SPDX-License-Identifier: Apache-2.0
"""The targets of routing: runs are kept and not repeated, and verdicts follow the figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.cells import Cell
from benchmarks.decision import prompt_of
from benchmarks.oracle import ORACLES
from benchmarks.picture import PARTS as PICTURED
from benchmarks.picture import SCENE, parts, scene
from benchmarks.targets import BOUND, OURS, PARTS, Found, Kept, Runner
from benchmarks.verdicts import JUDGES, ladder, never_worse, no_loss, page, ratio, within_3_percent
from lbproxy.core.policies.adaptive import Adaptive
from lbproxy.core.policies.policy import Context
from lbproxy.core.policies.registry import POLICIES
from lbproxy.sim.figures.report import Summary

SAME = Summary(100, 0, 1.0, 1.0, 2.0, 3.0, 10.0, 0.02, 0.04, 5000.0, 0.9, 0.5, 1.0, 0.0, 0.0)
TINY = Cell("own", {"duration_s": 3, "rate": 4, "output_tokens": 10}, servers=2)


def runs(*ttfts: float, steps: Mapping[str, float] | None = None, **figures: float) -> list[Found]:
    values = {**asdict(SAME), **figures}
    return [Found(Summary(**{**values, "ttft_mean": ttft}), steps or {}) for ttft in ttfts]


def test_a_run_that_is_kept_is_not_done_again(tmp_path: Path) -> None:
    said: list[str] = []
    file = tmp_path / "runs.json"
    first = Runner(Kept(file), {}, said.append).run("tiny", TINY, "random", 2)
    assert len(said) == 1
    again = Runner(Kept(file), {}, said.append)
    assert again.run("tiny", TINY, "random", 2) == first
    assert again.kept("tiny", TINY, "random", 2) == first
    assert len(said) == 1
    # Another seed, policy, length or oracle is another run.
    longer = replace(TINY, parameters={**TINY.parameters, "duration_s": 4})
    assert again.kept("tiny", TINY, "random", 1) is None
    assert again.kept("tiny", TINY, "p2c", 2) is None
    assert again.kept("tiny", longer, "random", 2) is None
    assert again.kept("tiny", TINY, ORACLES[0], 2) is None
    assert again.run("tiny", TINY, ORACLES[0], 2) != first
    assert not list(tmp_path.glob("*.new"))


def test_a_ratio_is_over_the_seeds_that_both_ran() -> None:
    found = ratio(runs(1.0, 2.0, 100.0), runs(2.0, 4.0), "ttft_mean")
    assert (found.mean, found.low, found.high) == (0.5, 0.5, 0.5)
    spread = ratio(runs(1.0, 2.0, 3.0), runs(1.0, 1.0, 1.0), "ttft_mean")
    assert spread.low < spread.mean == 2.0 < spread.high


@pytest.mark.parametrize(("ttft", "met"), [(1.02, True), (1.04, False)])
def test_within_3_percent_of_the_best(ttft: float, met: bool) -> None:
    """Of the best baseline; an oracle is none."""
    found = {OURS: runs(ttft), "gie": runs(5.0), "llm-d": runs(1.0), ORACLES[0]: runs(0.1)}
    first, _ = within_3_percent(found, "cell")
    assert first.met is met
    assert "llm-d" in first.wanted


def test_one_seed_that_is_worse_misses_never_worse() -> None:
    better = {OURS: runs(0.9, 0.99), "gie": runs(1.0, 1.0)}
    assert [verdict.met for verdict in never_worse(better, "cell")] == [True, True]
    worse = {OURS: runs(0.5, 1.01), "gie": runs(1.0, 1.0)}
    assert [verdict.met for verdict in never_worse(worse, "cell")] == [False, True]


def test_the_ladder_is_judged_as_a_whole_and_at_its_top() -> None:
    ours = runs(1.0, steps={"3/s": 100.0, "60/s": 2000.0}, output_tokens_s=1900.0)
    floor = runs(1.0, steps={"3/s": 100.0, "60/s": 1000.0}, output_tokens_s=1000.0)
    whole, top = ladder({OURS: ours, "gie": ours, "round-robin": floor}, "cell")[2:]
    assert (whole.met, top.met) == (True, False)
    assert top.measured.startswith("2x")


def test_a_loss_to_least_request_is_named() -> None:
    """More is better for tokens and goodput, less for all else; TTFT p99 does not count."""
    verdict, table = no_loss(
        {"a": {OURS: runs(1.0, output_tokens_s=4000.0, ttft_p99=99.0), "least-request": runs(1.0)}}
    )
    assert not verdict.met
    assert verdict.measured == "a: tokens/s 0.80x"
    assert "**0.80x**" in table
    assert no_loss({"a": {OURS: runs(1.04), "least-request": runs(1.0)}})[0].met


def test_the_page_says_what_there_is() -> None:
    """Also of parts that were not run to the end."""
    step = {"3/s": 100.0, "60/s": 1000.0}
    found = {
        "b2b ladder": {
            name: runs(1.0, steps=step) for name in ("round-robin", "gie", "least-request", OURS, ORACLES[0])
        },
        "bursts": {"least-request": runs(1.0), OURS: runs(1.0)},
    }
    text = page(found, seeds=5, replays="the published traces")
    assert "| bursts | mean TTFT <= 1.03x the best's, least-request | 1x [1, 1] | 1 | yes |" in text
    assert "at the top step | 1x [1, 1] | 1 | **no** |" in text
    assert "agents" not in text


def test_names_are_those_of_policies_and_cells() -> None:
    for part in PARTS:
        assert set(part.named) <= set(POLICIES)
        assert set(part.seeds) <= {*POLICIES, *ORACLES}
        assert part.full.parameters is not None
    cells = {part.cell for part in PARTS}
    assert set(JUDGES) | set(BOUND) <= cells


def test_the_picture_adds_up() -> None:
    """The parts and the fixed time are the price; each hundred milliseconds in the picture is one that counts."""
    request, states = scene()
    costs = Adaptive().price(request, states, Context(100.0)).costs
    found = parts(request, states)
    assert list(found) == list(PICTURED)
    assert all(min(values) >= 0.0 for values in found.values())
    sums = [sum(values) for values in zip(*found.values(), strict=True)]
    fixed = [cost - total for cost, total in zip(costs, sums, strict=True)]
    assert fixed == pytest.approx([states[0].load.pool.base_ms] * len(SCENE))
    assert costs.index(min(costs)) == 2
    # What docs/routing.md says of two prefills more.
    for _ in range(2):
        states[2].load.place(prompt_of([], 1024)._replace(prompt_bytes=16 << 10), 100.0)
    costs = Adaptive().price(request, states, Context(100.0)).costs
    assert costs.index(min(costs)) == 1
