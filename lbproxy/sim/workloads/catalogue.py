# SPDX-License-Identifier: Apache-2.0
"""The workloads that can be named, each a function of a seed and of parameters with defaults.

`WORKLOADS` is the table; `make_workload` builds one by name and checks the parameters' names. Sources: the ladder is
llm-d's published prefix-cache benchmark; the mixes are the usual shapes of traffic (chat, agents, bursts, long
documents, adapters) at loads around saturation of eight servers; the traces are `traces.py`'s, the traffic of other
services `published.py`'s, AgentX `coding_agents.py`'s.

Rates are requests a second, times seconds, lengths tokens.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from lbproxy.sim.workloads.coding_agents import Coding, CodingAgents
from lbproxy.sim.workloads.prompts import Piece
from lbproxy.sim.workloads.published import TRAFFIC, ServiceTraffic, generate
from lbproxy.sim.workloads.traces import TraceRow, azure_like, mooncake_like, replay
from lbproxy.sim.workloads.workload import (
    Arrival,
    ClosedLoop,
    Conversation,
    Job,
    OpenLoop,
    Workload,
    fresh_ids,
    lognormal,
    poisson,
    popularity,
)

LADDER_RATES = (3, 10, 15, 20, 22, 25, 30, 35, 40, 43, 46, 49, 52, 55, 57, 60)
"""llm-d's steps."""
WARM_UP = "warm-up"
MAY_BE_ZERO = frozenset({"warm_up_s", "person_share", "delegate"})
"""Parameters for which 0 means none, though it is not their default."""

Number: TypeAlias = int | float


class UnknownWorkload(ValueError):  # noqa: N818 - worded for the user
    """There is no workload, or no parameter of it, of that name; or a value cannot be."""


def ladder(  # noqa: PLR0913 - parameters with defaults, named by users
    seed: int,
    *,
    groups: int = 150,
    prompts: int = 5,
    shared_tokens: int = 6000,
    question_tokens: int = 1200,
    output_tokens: int = 1000,
    step_s: float = 30.0,
    warm_up_s: float = 50.0,
    first_rate: float = 0.0,
    last_rate: float = 60.0,
    independent: int = 0,
    fresh: int = 0,
) -> Workload:
    """llm-d's ladder: groups with a long system prompt each, the same questions again and again, at rates that rise by
    steps, drained in between.

    The questions come in one shuffled order, over and over, as in inference-perf; `independent` 1 draws each by itself
    instead, and `fresh` 1 makes each question a new one, so that only system prompts are shared. `first_rate` and
    `last_rate` cut the ladder.
    """
    rng = random.Random(f"{seed}:ladder")
    ids = fresh_ids()
    questions = [(group, Piece(ids(), question_tokens)) for group in range(groups) for _ in range(prompts)]
    rng.shuffle(questions)
    asked = 0

    def phase(name: str, rate: float, duration_s: float) -> list[Arrival]:
        nonlocal asked
        arrivals: list[Arrival] = []
        for at in poisson(rng, rate, duration_s):
            group, question = rng.choice(questions) if independent else questions[asked % len(questions)]
            prompt = (Piece(group, shared_tokens), Piece(ids(), question_tokens) if fresh else question)
            arrivals.append((at, Job(str(asked), prompt, Piece(ids(), output_tokens), phase=name)))
            asked += 1
        return arrivals

    steps = [rate for rate in LADDER_RATES if first_rate <= rate <= last_rate]
    warm_up = [phase(WARM_UP, 15.0, warm_up_s)] if warm_up_s else []
    return OpenLoop([*warm_up, *(phase(f"{rate}/s", rate, step_s) for rate in steps)])


def own(  # noqa: PLR0913
    seed: int,
    *,
    rate: float = 10.0,
    duration_s: float = 60.0,
    prompt_tokens: int = 1000,
    output_tokens: int = 200,
    spread: float = 0.0,
    shared_tokens: int = 0,
    groups: int = 1,
    skew: float = 0.0,
    begin_s: float = 0.0,
) -> Workload:
    """Poisson arrivals of your own sizes: `prompt_tokens` (the first `shared_tokens` are one of `groups` system
    prompts, popular as their number to the power of minus `skew`) and `output_tokens`; with `spread`,
    lognormal with that sigma.
    """
    rng = random.Random(f"{seed}:own")
    ids = fresh_ids()
    weights = popularity(groups, skew) if skew else None
    arrivals: list[Arrival] = []
    for number, at in enumerate(poisson(rng, rate, duration_s)):
        group = rng.randrange(groups) if weights is None else rng.choices(range(groups), cum_weights=weights)[0]
        private = Piece(ids(), lognormal(rng, max(1, prompt_tokens - shared_tokens), spread, at_most=100_000))
        prompt = (Piece(group, shared_tokens), private) if shared_tokens else (private,)
        answer = Piece(ids(), lognormal(rng, output_tokens, spread, at_most=8000))
        arrivals.append((begin_s + at, Job(str(number), prompt, answer)))
    return OpenLoop([arrivals])


def one_prefix(
    seed: int,
    *,
    prefix_tokens: int = 4000,
    question_tokens: int = 200,
    output_tokens: int = 200,
    last_rate: float = 60.0,
    duration_s: float = 180.0,
) -> Workload:
    """One system prompt for everything; the rate grows evenly from 1 to `last_rate`."""
    rng = random.Random(f"{seed}:one-prefix")
    ids = fresh_ids()
    arrivals: list[Arrival] = []
    for at in poisson(rng, last_rate, duration_s):
        # Thinning turns the constant rate into the ramp.
        if rng.random() * last_rate < 1 + (last_rate - 1) * at / duration_s:
            prompt = (Piece(0, prefix_tokens), Piece(ids(), lognormal(rng, question_tokens, 0.5)))
            arrivals.append((at, Job(str(len(arrivals)), prompt, Piece(ids(), lognormal(rng, output_tokens, 0.5)))))
    return OpenLoop([arrivals])


def bursts(
    seed: int,
    *,
    size: int = 800,
    prompt_tokens: int = 1000,
    output_tokens: int = 1000,
    count: int = 3,
    within_s: float = 1.0,
) -> Workload:
    """`count` times `size` requests of one size within `within_s`, drained in between; nothing is shared."""
    rng = random.Random(f"{seed}:bursts")
    ids = fresh_ids()
    phases: list[list[Arrival]] = []
    for burst in range(count):
        times = sorted(rng.uniform(0, within_s) for _ in range(size))
        name = f"burst {burst + 1}"
        phases.append(
            [
                (at, Job(f"{burst}-{n}", (Piece(ids(), prompt_tokens),), Piece(ids(), output_tokens), phase=name))
                for n, at in enumerate(times)
            ]
        )
    return OpenLoop(phases)


def long_prompts(  # noqa: PLR0913
    seed: int,
    *,
    rate: float = 10.0,
    share: float = 0.1,
    shortest: int = 20_000,
    longest: int = 80_000,
    short_tokens: int = 400,
    output_tokens: int = 200,
    duration_s: float = 180.0,
) -> Workload:
    """A share of very long prompts, evenly between two lengths, among short ones; nothing is shared."""
    rng = random.Random(f"{seed}:long-prompts")
    ids = fresh_ids()
    arrivals: list[Arrival] = []
    for number, at in enumerate(poisson(rng, rate, duration_s)):
        is_long = rng.random() < share
        tokens = rng.randint(shortest, longest) if is_long else lognormal(rng, short_tokens, 0.3)
        answer = Piece(ids(), lognormal(rng, output_tokens, 0.4))
        arrivals.append((at, Job(str(number), (Piece(ids(), tokens),), answer)))
    return OpenLoop([arrivals])


def lora(
    seed: int,
    *,
    rate: float = 20.0,
    adapters: int = 15,
    prompt_tokens: int = 500,
    output_tokens: int = 150,
    duration_s: float = 180.0,
) -> Workload:
    """The first third of the adapters gets 60 % of the requests, the second 30 %, the last 10 %.

    They are called as `adapter_names` says.
    """
    rng = random.Random(f"{seed}:lora")
    ids = fresh_ids()
    names = adapter_names(adapters)
    third = -(-adapters // 3)
    shares = [(0.6, 0.3, 0.1)[number // third] for number in range(adapters)]
    arrivals: list[Arrival] = []
    for number, at in enumerate(poisson(rng, rate, duration_s)):
        (adapter,) = rng.choices(names, shares)
        prompt = (Piece(ids(), lognormal(rng, prompt_tokens, 0.5)),)
        arrivals.append((at, Job(str(number), prompt, Piece(ids(), lognormal(rng, output_tokens, 0.5)), adapter)))
    return OpenLoop([arrivals])


def adapter_names(adapters: int) -> list[str]:
    """What `lora` calls its adapters."""
    return [f"adapter-{number}" for number in range(adapters)]


def chat(
    seed: int,
    *,
    users: int = 300,
    apps: int = 10,
    shared_tokens: int = 2000,
    think_s: float = 8.0,
    duration_s: float = 240.0,
) -> Workload:
    """Sessions that grow by a short turn and a response, in one of a few apps. Closed loop."""
    conversation = Conversation(
        users=users,
        apps=apps,
        shared_tokens=shared_tokens,
        turn_tokens=150,
        answer_tokens=250,
        think_s=think_s,
        max_context=30_000,
        ends=0.1,
        duration_s=duration_s,
        ramp_s=20.0,
    )
    return ClosedLoop(conversation, seed)


def agents(
    seed: int,
    *,
    users: int = 40,
    shared_tokens: int = 16_000,
    think_s: float = 2.0,
    max_context: int = 120_000,
    duration_s: float = 240.0,
) -> Workload:
    """One long system prompt, and a context that grows by long results up to `max_context`. Closed loop."""
    conversation = Conversation(
        users=users,
        shared_tokens=shared_tokens,
        turn_tokens=2000,
        answer_tokens=200,
        spread=0.8,
        think_s=think_s,
        max_context=max_context,
        duration_s=duration_s,
        ramp_s=20.0,
    )
    return ClosedLoop(conversation, seed)


def coding_agents(  # noqa: PLR0913
    seed: int,
    *,
    sessions: int = 24,
    projects: int = 8,
    turns: int = 33,
    compact_at: int = 109_000,
    tool_s: float = 0.3,
    person_share: float = 0.11,
    person_s: float = 84.0,
    delegate: float = 0.02,
    duration_s: float = 600.0,
    warm_up_s: float = 150.0,
) -> Workload:
    """Sessions of 20 to 100 turns. Closed loop. The first `warm_up_s` do not count."""
    coding = Coding(
        sessions=sessions,
        projects=projects,
        turns=turns,
        compact_at=compact_at,
        tool_s=tool_s,
        person_share=person_share,
        person_s=person_s,
        delegate=delegate,
        duration_s=duration_s,
        warm_up_s=warm_up_s,
        ramp_s=min(60.0, duration_s / 4),
    )
    return CodingAgents(coding, seed)


def documents(  # noqa: PLR0913
    seed: int,
    *,
    rate: float = 10.0,
    documents: int = 200,
    skew: float = 1.0,
    shortest: int = 8000,
    longest: int = 30_000,
    question_tokens: int = 60,
    output_tokens: int = 35,
    duration_s: float = 180.0,
) -> Workload:
    """Short questions about long documents, lengths evenly between two, popularity as with `own`."""
    rng = random.Random(f"{seed}:documents")
    ids = fresh_ids()
    texts = [Piece(number, rng.randint(shortest, longest)) for number in range(documents)]
    weights = popularity(documents, skew)
    arrivals: list[Arrival] = []
    for number, at in enumerate(poisson(rng, rate, duration_s)):
        (text,) = rng.choices(texts, cum_weights=weights)
        question = Piece(ids(), lognormal(rng, question_tokens, 0.5))
        answer = Piece(ids(), lognormal(rng, output_tokens, 0.35, at_most=100))
        arrivals.append((at, Job(str(number), (text, question), answer)))
    return OpenLoop([arrivals])


def agentx(  # noqa: PLR0913
    seed: int,
    *,
    sessions: int = 24,
    turns: int = 45,
    compact_at: int = 875_000,
    person_s: float = 84.0,
    duration_s: float = 600.0,
    warm_up_s: float = 150.0,
) -> Workload:
    """SemiAnalysis' AgentX: as `coding-agents`, with longer contexts and more sub-agents."""
    coding = Coding(
        sessions=sessions,
        projects=8,
        turns=turns,
        most_turns=400,
        result_tokens=5000,
        output_tokens=444,
        compact_at=compact_at,
        tool_s=0.3,
        person_share=0.11,
        person_s=person_s,
        delegate=0.012,
        most_sub_agents=4,
        duration_s=duration_s,
        warm_up_s=warm_up_s,
        ramp_s=min(60.0, duration_s / 4),
    )
    return CodingAgents(coding, seed)


Made: TypeAlias = Callable[..., Workload]
"""Of `seed`, `speedup`, `duration_s` and `max_context`."""


def _replayed(of: str, made: Made, *, fast: float, lasts_s: float) -> Callable[..., Workload]:
    """A workload that replays rows or, without any, is `made`. `fast` and `lasts_s`: defaults."""

    def workload(
        seed: int,
        *,
        rows: Sequence[TraceRow] | None = None,
        speedup: float = fast,
        duration_s: float = lasts_s,
        max_context: int = 130_000,
    ) -> Workload:
        if rows is None:
            return made(seed=seed, speedup=speedup, duration_s=duration_s, max_context=max_context)
        return replay(rows, seed=seed, speedup=speedup, max_context=max_context, duration_s=duration_s)

    workload.__doc__ = of
    return workload


def _made(traffic: ServiceTraffic) -> Callable[..., Workload]:
    """A workload of which there is no file to replay."""

    def workload(seed: int, *, speedup: float = 1.0, duration_s: float = 600.0, max_context: int = 130_000) -> Workload:
        return generate(traffic, seed=seed, speedup=speedup, duration_s=duration_s, max_context=max_context)

    workload.__doc__ = f"{traffic.of}."
    return workload


def _stand_in(rows: Callable[[int], Sequence[TraceRow]]) -> Made:
    return lambda seed, **parameters: replay(rows(seed), seed=seed, **parameters)


WORKLOADS: Mapping[str, Callable[..., Workload]] = {
    "own": own,
    "ladder": ladder,
    "mooncake": _replayed("Mooncake's conversations.", _stand_in(mooncake_like), fast=2.0, lasts_s=600.0),
    "azure": _replayed("Azure's conversations, which share nothing.", _stand_in(azure_like), fast=8.0, lasts_s=300.0),
    **{
        name: _made(traffic)
        if name.startswith("chutes")
        else _replayed(f"{traffic.of}.", partial(generate, traffic), fast=1.0, lasts_s=600.0)
        for name, traffic in TRAFFIC.items()
    },
    "chat": chat,
    "agents": agents,
    "coding-agents": coding_agents,
    "agentx": agentx,
    "one-prefix": one_prefix,
    "bursts": bursts,
    "long-prompts": long_prompts,
    "lora": lora,
    "documents": documents,
}
"""By the name that scenarios use."""


def workload_parameters(name: str) -> dict[str, Number]:
    """The parameters of a workload and their defaults. Raises UnknownWorkload."""
    if name not in WORKLOADS:
        raise UnknownWorkload(f"expected one of {', '.join(WORKLOADS)}, got {name}")
    parameters = inspect.signature(WORKLOADS[name]).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.name not in {"seed", "rows"}}


def takes_trace(name: str) -> bool:
    """Whether a workload replays a trace if there is one."""
    return "rows" in inspect.signature(WORKLOADS[name]).parameters


def checked(name: str, parameters: Mapping[str, Number]) -> dict[str, Number]:
    """The parameters, each as the kind of number that its default is. Raises UnknownWorkload, which names the key."""
    defaults = workload_parameters(name)
    for key, value in parameters.items():
        if key not in defaults:
            raise UnknownWorkload(f"{key}: unknown parameter of {name}, which has {', '.join(defaults)}")
        if isinstance(defaults[key], int) and value != int(value):
            raise UnknownWorkload(f"{key}: expected a whole number, got {value}")
        if not 0 <= value <= 1e9 or (value == 0 and defaults[key] != 0 and key not in MAY_BE_ZERO):
            raise UnknownWorkload(f"{key}: expected a number above 0, got {value}")
    return {key: type(defaults[key])(value) for key, value in parameters.items()}


def make_workload(
    name: str, parameters: Mapping[str, Number], *, seed: int, rows: Sequence[TraceRow] | None = None
) -> Workload:
    """The workload of that name, for one run. `rows`: of the trace, if it replays one. Raises UnknownWorkload."""
    given = checked(name, parameters)
    return WORKLOADS[name](seed, **given, **({"rows": rows} if takes_trace(name) else {}))
