# SPDX-License-Identifier: Apache-2.0
"""Workloads: paired by seed, of the sizes and rates that their parameters say."""

from collections import Counter
from itertools import pairwise

import pytest

from lbproxy.sim.workloads.catalogue import (
    LADDER_RATES,
    WORKLOADS,
    UnknownWorkload,
    make_workload,
    takes_trace,
    workload_parameters,
)
from lbproxy.sim.workloads.prompts import size
from lbproxy.sim.workloads.traces import TraceRow
from lbproxy.sim.workloads.workload import Arrival, Job, Workload


def phases(workload: Workload) -> list[list[Arrival]]:
    """All batches, each begun at 0 s."""
    found = []
    while (batch := workload.begin(0.0)) is not None:
        found.append(list(batch))
    return found


@pytest.mark.parametrize("name", WORKLOADS)
def test_equal_seeds_ask_the_same_and_others_do_not(name: str) -> None:
    cut = {"duration_s": 20} if "duration_s" in workload_parameters(name) else {}
    first, again, other = (phases(make_workload(name, cut, seed=seed)) for seed in (5, 5, 6))
    assert first == again != other
    assert sum(map(len, first)) > 10
    for batch in first:
        assert [at for at, _ in batch] == sorted(at for at, _ in batch)
    ids = [job.id for batch in first for _, job in batch]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", ["chat", "agents"])
def test_conversations_do_not_depend_on_when_others_are_served(name: str) -> None:
    """Paired also where the arrivals depend on the policy: user 3 says the same however fast the answers are."""

    def said(answer_s: float) -> list[tuple[int, int]]:
        workload = make_workload(name, {"users": 6}, seed=1)
        (_, job) = next(arrival for arrival in workload.begin(0.0) or () if arrival[1].id.startswith("3-"))
        found = []
        now = 0.0
        for _ in range(10):
            found.append((job.prompt[-1].tokens, job.answer.tokens))
            following = workload.ended(job, now + answer_s)
            ((now, job),) = following
        return found

    assert said(0.1) == said(3.0)


def test_users_are_not_one_and_the_same() -> None:
    first = make_workload("chat", {"users": 30}, seed=1).begin(0.0) or ()
    assert len({job.prompt[-1].tokens for _, job in first}) > 20
    assert len({at for at, _ in first}) == 30
    assert len({job.prompt[0].id for _, job in first}) == 10


def test_next_turn_begins_with_all_that_was_said() -> None:
    workload = make_workload("agents", {"users": 1, "shared_tokens": 160}, seed=1)
    (_, first) = (workload.begin(0.0) or ())[0]
    ((at, second),) = workload.ended(first, 5.0)
    assert at > 5.0
    assert second.prompt[: len(first.prompt) + 1] == (*first.prompt, first.answer)
    assert len(second.prompt) == len(first.prompt) + 2
    assert second.session == first.session


def test_conversation_that_grew_too_long_begins_anew_with_the_same_system_prompt() -> None:
    workload = make_workload("agents", {"users": 1, "max_context": 40_000, "duration_s": 10_000}, seed=1)
    arrival = (workload.begin(0.0) or ())[0]
    jobs: list[Job] = []
    for _ in range(60):
        jobs.append(arrival[1])
        (arrival,) = workload.ended(arrival[1], arrival[0])
    assert all(size((*job.prompt, job.answer)) <= 40_000 for job in jobs)
    assert len({job.session for job in jobs}) > 2
    assert {job.prompt[0] for job in jobs} == {jobs[0].prompt[0]}
    again = [job for before, job in pairwise(jobs) if job.session != before.session]
    assert all(len(job.prompt) == 2 for job in again)


def test_closed_loop_ends_with_its_duration() -> None:
    workload = make_workload("chat", {"users": 2, "duration_s": 30}, seed=1)
    (_, job) = (workload.begin(0.0) or ())[0]
    assert not workload.ended(job, 1000.0)
    assert workload.begin(1000.0) is None


def test_ladder_is_the_published_one() -> None:
    """About 17,000 requests; 150 groups with 5 questions each, every question asked equally often."""
    batches = phases(make_workload("ladder", {}, seed=1))
    assert [batch[0][1].phase for batch in batches] == ["warm-up", *(f"{rate}/s" for rate in LADDER_RATES)]
    for rate, batch in zip((15, *LADDER_RATES), batches, strict=True):
        seconds = 50 if batch is batches[0] else 30
        assert len(batch) == pytest.approx(rate * seconds, rel=0.35)
        assert batch[-1][0] < seconds
    jobs = [job for batch in batches for _, job in batch]
    assert len(jobs) == pytest.approx(17_600, rel=0.02)
    asked = Counter(job.prompt for job in jobs)
    assert len(asked) == 750
    assert max(asked.values()) - min(asked.values()) == 1
    assert len({prompt[0] for prompt in asked}) == 150
    assert all([piece.tokens for piece in job.prompt] == [6000, 1200] for job in jobs)
    assert all(job.answer.tokens == 1000 for job in jobs)


def test_ladder_variants() -> None:
    fresh = phases(make_workload("ladder", {"fresh": 1, "last_rate": 10, "warm_up_s": 0}, seed=1))
    assert [batch[0][1].phase for batch in fresh] == ["3/s", "10/s"]
    jobs = [job for batch in fresh for _, job in batch]
    assert len({job.prompt for job in jobs}) == len(jobs)
    independent = phases(make_workload("ladder", {"independent": 1}, seed=1))
    asked = Counter(job.prompt for batch in independent for _, job in batch)
    assert max(asked.values()) > min(asked.values()) + 10


def test_one_prefix_ramps_up() -> None:
    ((*arrivals,),) = phases(make_workload("one-prefix", {"duration_s": 100, "last_rate": 40}, seed=1))
    early = sum(at < 50 for at, _ in arrivals)
    assert early == pytest.approx(len(arrivals) / 4, rel=0.2)
    assert len({job.prompt[0] for _, job in arrivals}) == 1


def test_a_tenth_of_the_prompts_is_long() -> None:
    ((*arrivals,),) = phases(make_workload("long-prompts", {"rate": 50}, seed=1))
    long = [job for _, job in arrivals if job.prompt_tokens >= 20_000]
    assert len(long) / len(arrivals) == pytest.approx(0.1, abs=0.02)
    assert max(job.prompt_tokens for job in long) <= 80_000


def test_documents_are_as_popular_as_their_rank() -> None:
    ((*arrivals,),) = phases(make_workload("documents", {"rate": 50, "documents": 20}, seed=1))
    asked = Counter(job.prompt[0] for _, job in arrivals)
    assert len(asked) == 20
    # The harmonic series of 20 is 3.6.
    assert asked.most_common(1)[0][1] / len(arrivals) == pytest.approx(1 / 3.6, abs=0.02)
    assert all(8000 <= text.tokens <= 30_000 for text in asked)
    assert all(job.answer.tokens <= 100 for _, job in arrivals)


def test_adapters_are_asked_for_by_thirds() -> None:
    ((*arrivals,),) = phases(make_workload("lora", {"rate": 50}, seed=1))
    asked = Counter(job.model for _, job in arrivals)
    assert len(asked) == 15
    thirds = [sum(asked[f"adapter-{5 * third + n}"] for n in range(5)) / len(arrivals) for third in range(3)]
    assert thirds == pytest.approx([0.6, 0.3, 0.1], abs=0.03)


def test_traces_replace_the_stand_ins() -> None:
    rows = [TraceRow(0.0, 100, 5), TraceRow(4.0, 700, 6, (1, 2))]
    for name in ("mooncake", "azure", "toolagent", "bailian-coder", "burstgpt"):
        assert takes_trace(name)
        ((*arrivals,),) = phases(make_workload(name, {"speedup": 2}, seed=1, rows=rows))
        assert [(job.prompt_tokens, job.answer.tokens) for _, job in arrivals] == [(100, 5), (700, 6)]


@pytest.mark.parametrize(
    ("name", "parameters", "why"),
    [
        ("nothing", {}, "expected one of own, ladder"),
        ("own", {"ratte": 1}, "ratte: unknown parameter of own, which has rate, "),
        ("own", {"rate": 0}, "rate: expected a number above 0"),
        ("own", {"prompt_tokens": 1.5}, "prompt_tokens: expected a whole number"),
        ("own", {"rate": -1}, "rate: expected a number above 0"),
        ("lora", {"seed": 3}, "seed: unknown parameter"),
    ],
)
def test_wrong_names_and_values_are_refused(name: str, parameters: dict[str, float], why: str) -> None:
    with pytest.raises(UnknownWorkload) as raised:
        make_workload(name, parameters, seed=1)
    assert why in str(raised.value)
