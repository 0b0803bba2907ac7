# SPDX-License-Identifier: Apache-2.0
"""Generated traffic has the statistics that `published.py` names; the tables here are what the sources state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from statistics import fmean, median, pstdev, variance

import pytest

from lbproxy.sim.workloads.catalogue import make_workload
from lbproxy.sim.workloads.workload import Arrival

PROMPTS = {
    "toolagent": (7200, 8596, 6346, 61_600),
    "bailian-chat": (7200, 2331, 1046, 14_359),
    "bailian-business": (900, 915, 574, 6294),
    "bailian-thinking": (7200, 4763, 3680, 24_962),
    "bailian-coder": (7200, 5748, 4540, 14_406),
    "burstgpt": (40_000, 479, 333, 3300),
    "chutes-deepseek": (4000, 11_850, None, None),
    "chutes-minimax": (4000, 32_045, None, None),
}
"""Seconds to look at, and tokens: mean, median, 99th percentile. BurstGPT's are those of its two kinds together."""
RESPONSES = {
    "toolagent": (182, 30, 898),
    "bailian-chat": (430, 375, 1641),
    "bailian-business": (92, 39, 1006),
    "bailian-thinking": (3651, 1665, 34_529),
    "bailian-coder": (808, 469, 5835),
    "burstgpt": (77, 15, 830),
}
KNOWN = {
    "toolagent": 0.553,
    "bailian-chat": 0.579,
    "bailian-business": 0.542,
    "bailian-thinking": 0.462,
    "bailian-coder": 0.664,
    "chutes-deepseek": 0.548,
    "chutes-minimax": 0.642,
}
"""Of all prompt tokens, which earlier prompts had."""
SESSIONS = {
    "bailian-chat": (5.98, 0.463, 0.61),
    "bailian-business": (24.0, 0.0, 1.0),
    "bailian-thinking": (1.5, 0.111, 0.947),
    "bailian-coder": (5.97, 0.386, 0.747),
    "chutes-deepseek": (11.9, 0.656, 0.407),
    "chutes-minimax": (6.98, 0.744, 0.358),
}
"""Requests a second, the share of them that continue a session, the share of sessions with a single one."""


@pytest.fixture(scope="module", params=PROMPTS)
def one(request: pytest.FixtureRequest) -> tuple[str, Sequence[Arrival]]:
    """A workload, whole: as long as its trace, and longer prompts than servers would take."""
    name = request.param
    parameters = {"duration_s": PROMPTS[name][0], "max_context": 1_000_000}
    (arrivals,) = [make_workload(name, parameters, seed=1).begin(0.0)]
    assert arrivals
    return name, arrivals


def quantile(values: Sequence[int], share: float) -> float:
    return sorted(values)[int(share * len(values))]


def test_lengths(one: tuple[str, Sequence[Arrival]]) -> None:
    """Means and medians within 15 %, tails within a quarter."""
    name, arrivals = one
    tables = [(PROMPTS[name][1:], [job.prompt_tokens for _, job in arrivals])]
    if name in RESPONSES:
        tables.append((RESPONSES[name], [job.answer.tokens for _, job in arrivals]))
    for (mean, middle, tail), found in tables:
        assert fmean(found) == pytest.approx(mean, rel=0.15)
        assert middle is None or median(found) == pytest.approx(middle, rel=0.15)
        assert tail is None or quantile(found, 0.99) == pytest.approx(tail, rel=0.25)


def test_what_is_known_from_earlier_prompts(one: tuple[str, Sequence[Arrival]]) -> None:
    """As a cache without bounds would find it that keeps no responses, as the sources count."""
    name, arrivals = one
    seen: set[int] = set()
    known = 0
    for _, job in arrivals:
        for piece in job.prompt:
            if piece.id not in seen:
                break
            known += piece.tokens
        seen.update(piece.id for piece in job.prompt)
    share = known / sum(job.prompt_tokens for _, job in arrivals)
    assert share == pytest.approx(KNOWN[name], abs=0.05) if name in KNOWN else share < 0.15


def test_sessions(one: tuple[str, Sequence[Arrival]]) -> None:
    """Fewer follow-ups than in the long run, by those that come after the end."""
    name, arrivals = one
    sessions = Counter(job.session for _, job in arrivals)
    if name in SESSIONS:
        rate, follow, single = SESSIONS[name]
        assert len(arrivals) / PROMPTS[name][0] == pytest.approx(rate, rel=0.15)
        assert 1 - len(sessions) / len(arrivals) == pytest.approx(follow, rel=0.25)
        assert sum(count == 1 for count in sessions.values()) / len(sessions) == pytest.approx(single, rel=0.12)


def test_a_turn_begins_with_what_was_said_before(one: tuple[str, Sequence[Arrival]]) -> None:
    last: dict[str | None, tuple[int, ...]] = {}
    for _, job in one[1][:5000]:
        before = last.get(job.session, ())
        assert tuple(piece.id for piece in job.prompt)[: len(before)] == before
        last[job.session] = (*(piece.id for piece in job.prompt), job.answer.id)


SPEEDUPS = {"burstgpt": 40, "bailian-business": 1}


def test_burstgpt_comes_in_bursts() -> None:
    """A gamma distribution of the shape 0.5: its coefficient of variation is 1.41, the index of dispersion of counts
    2; Qwen-Bailian's business is taken to be Poisson: 1 and 1.
    """
    for name, variation in (("burstgpt", sqrt(2)), ("bailian-business", 1.0)):
        (arrivals,) = [make_workload(name, {"speedup": SPEEDUPS[name], "duration_s": 600}, seed=3).begin(0.0)]
        assert arrivals
        times = [at for at, _ in arrivals]
        gaps = [after - before for before, after in pairwise(times)]
        assert pstdev(gaps) / fmean(gaps) == pytest.approx(variation, rel=0.06)
        per_second = Counter(int(at) for at in times)
        counts = [per_second[second] for second in range(600)]
        assert variance(counts) / fmean(counts) == pytest.approx(variation**2, rel=0.25)


def test_toolagent_has_three_system_prompts() -> None:
    (arrivals,) = [make_workload("toolagent", {}, seed=1).begin(0.0)]
    assert arrivals
    assert len({job.prompt[0].id for _, job in arrivals}) == 3


def test_longer_conversations_than_servers_take_end() -> None:
    (arrivals,) = [make_workload("chutes-minimax", {"max_context": 40_000, "speedup": 5}, seed=1).begin(0.0)]
    assert arrivals
    assert max(job.prompt_tokens + job.answer.tokens for _, job in arrivals) <= 40_000
    assert max(at for at, _ in arrivals) < 600
