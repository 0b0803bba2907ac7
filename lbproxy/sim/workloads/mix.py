# SPDX-License-Identifier: Apache-2.0
"""Everyday traffic as an open loop: chats, agents and LoRA adapters of `catalogue.py`, mixed. Pure.

`chat` and `agents` are closed loops: a user's next turn follows the response to the last. Here each response is taken
to have come after a time of its own, whatever the servers really did, so that clients do not go easy on a fleet in
trouble, and equal seeds send the same at the same times.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import orjson

from lbproxy.sim.workloads.catalogue import adapter_names, make_workload
from lbproxy.sim.workloads.prompts import Piece, prompt_text
from lbproxy.sim.workloads.workload import Arrival, Job, Workload

ADAPTERS = adapter_names(6)
MAX_CONTEXT = 24_000
"""Tokens to which an agent's context grows."""
SHARES = {"chat": 0.55, "agents": 0.1, "lora": 0.35}
"""Shares of the requests."""
CYCLES_S = {"chat": 12.0, "agents": 6.0}
"""From one turn of a user to the next, thinking included."""
ANSWER_S = 4.0
"""How long a response is taken to take."""
MAX_PROMPT = 32_000
"""A turn whose prompt is longer is not sent: the model could not take it."""
MAX_ANSWER = 400
"""Tokens of a response at most, so that a server that is drained is soon empty."""
STREAMS = 0.75
"""Share of requests that want a stream."""
RUN_IN_S = 40.0
"""What is left out at the begin, so that sessions have a history already."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    at_s: float
    kind: str
    """A key of `SHARES`."""
    job: Job
    stream: bool


def everyday(seed: int, *, rate: float, duration_s: float) -> list[Ask]:
    """About `rate` requests a second for so long, in order of time."""
    length_s = RUN_IN_S + duration_s
    users = {kind: max(1, round(rate * SHARES[kind] * cycle_s)) for kind, cycle_s in CYCLES_S.items()}
    parameters: dict[str, dict[str, float]] = {
        "chat": {"users": users["chat"], "apps": 4, "think_s": CYCLES_S["chat"] - ANSWER_S},
        "agents": {
            "users": users["agents"],
            "shared_tokens": 12_000,
            "think_s": CYCLES_S["agents"] - ANSWER_S,
            "max_context": MAX_CONTEXT,
        },
        "lora": {"rate": rate * SHARES["lora"], "adapters": len(ADAPTERS)},
    }
    rng = random.Random(f"{seed}:mix")
    found: list[Ask] = []
    for number, (kind, given) in enumerate(parameters.items()):
        workload = make_workload(kind, {**given, "duration_s": length_s}, seed=seed)
        for at, job in _opened(workload):
            if at >= RUN_IN_S and job.prompt_tokens <= MAX_PROMPT:
                found.append(Ask(at - RUN_IN_S, kind, _own(job, kind, number), rng.random() < STREAMS))
    return sorted(found, key=lambda ask: (ask.at_s, ask.job.id))


def _opened(workload: Workload) -> Iterator[Arrival]:
    """All arrivals, as if each response came `ANSWER_S` after its request."""
    first = workload.begin(0.0)
    due = [(at, number, job) for number, (at, job) in enumerate(first or ())]
    heapq.heapify(due)
    count = len(due)
    while due:
        at, _, job = heapq.heappop(due)
        yield at, job
        for next_at, following in workload.ended(job, at + ANSWER_S):
            heapq.heappush(due, (next_at, count, following))
            count += 1


def _own(job: Job, kind: str, number: int) -> Job:
    """With texts that no other kind has (each workload counts its pieces from the same numbers), and not too long."""
    pieces = tuple(Piece(piece.id + (number << 62), piece.tokens) for piece in job.prompt)
    answer = job.answer._replace(tokens=min(MAX_ANSWER, job.answer.tokens))
    return replace(job, id=f"{kind}-{job.id}", prompt=pieces, answer=answer)


def body(ask: Ask, model: str) -> bytes:
    """As a chat completion: the shared text is the system prompt, then user and assistant take turns."""
    texts = [prompt_text((piece,)).decode() for piece in ask.job.prompt]
    roles = ["user"] if len(texts) == 1 else ["system", *(("user", "assistant")[n % 2] for n in range(len(texts) - 1))]
    fields: dict[str, object] = {
        "model": ask.job.model or model,
        "messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)],
        "max_tokens": ask.job.answer.tokens,
        "ignore_eos": True,
    }
    if ask.stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return orjson.dumps(fields)
