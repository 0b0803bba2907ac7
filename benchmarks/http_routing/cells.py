# SPDX-License-Identifier: Apache-2.0
"""What is asked of the routers: cells, the arrivals of a seed, and the bytes of a request. No I/O, no chance but seeds.

Time is real here, so a cell is minutes of an open loop on a few servers, at the load *per server* that the cells of
`benchmarks.cells` put on eight: a trace is thinned by whole conversations and never stretched, as requests that come
back after a minute find another cache than those that come back after two. Each seed looks at another stretch of the
trace. A cell begins with empty caches; its first phase or seconds are a warm-up that does not count.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import orjson
import xxhash

from benchmarks.page import AGENTS_PAGE, PUBLISHED_PAGE, Page
from lbproxy.sim.workloads.catalogue import WARM_UP, make_workload
from lbproxy.sim.workloads.prompts import prompt_text
from lbproxy.sim.workloads.traces import TraceRow, mooncake_like
from lbproxy.sim.workloads.workload import Arrival, Job

MODEL = "sim"
PRESET = "qwen-32b-2xh100"
MAX_MODEL_LEN = 131_072
"""As the simulated cells have it (YaRN)."""
WHOLE_TRACE_SERVERS = 4
"""Mooncake's 3.4 requests/s over four servers are what the simulated `Mooncake x2` puts on each of eight."""


@dataclass(frozen=True)
class Cell:
    """A workload and its fleet."""

    title: str
    workload: str
    servers: int
    parameters: Mapping[str, float]
    short: Mapping[str, float] = field(default_factory=dict)
    """Parameters of the short form, in place of the others."""
    share: float = 1.0
    """Of a trace's conversations."""
    warm_up_s: float = 0.0
    """Of a trace: arrivals before do not count. A ladder has a warm-up of its own."""
    group: str = "routing"
    """Of `GROUPS`: what is measured together, and stands on one page."""
    in_short: bool = True
    in_full: bool = True
    """Measured if no cell is named."""
    api: str | None = None
    """Of `apis.APIS`: a closed loop of coding agents, which speak it (`sessions.py`); None = an open loop of chat
    completions."""

    def named(self, *, short: bool) -> dict[str, float]:
        """The workload's parameters."""
        return {**self.parameters, **(self.short if short else {})}


AGENT_APIS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages, as Claude Code does",
    "responses": "/v1/responses, all items in each request",
    "responses-id": "/v1/responses with previous_response_id",
}

CELLS: dict[str, Cell] = {
    "b2b": Cell(
        "llm-d's prefix benchmark: 75 system prompts of 6,000 tokens, 5 questions each, answers of 100 tokens",
        "ladder",
        4,
        # Ten a second on four servers are its step 20 on eight, where load-only routing begins to collapse. At the next
        # step it has so many streams that the servers cannot write their tokens in time; hence, too, a tenth of its
        # answers' length.
        {"groups": 75, "warm_up_s": 20, "step_s": 30, "first_rate": 10, "last_rate": 10, "output_tokens": 100},
        {"warm_up_s": 20, "step_s": 20},
    ),
    "mooncake": Cell(
        "Mooncake's conversations, 0.64 requests/s and server (as x1.5 on eight)",
        "mooncake",
        3,
        {"speedup": 1, "duration_s": 80},
        {"speedup": 1, "duration_s": 45},
        share=0.5625,
        warm_up_s=30,
    ),
    "mooncake, saturated": Cell(
        "Mooncake's conversations, 0.85 requests/s and server (as x2 on eight)",
        "mooncake",
        4,
        {"speedup": 1, "duration_s": 150},
        warm_up_s=30,
        in_short=False,
    ),
    # As `benchmarks.replicas` has it on eight servers: sped up, so that two minutes see conversations come back.
    "mooncake, x1.5": Cell(
        "Mooncake's conversations, half of them, at 1.5 times their pace",
        "mooncake",
        4,
        {"speedup": 1.5, "duration_s": 120},
        share=0.5,
        warm_up_s=40,
        in_short=False,
        in_full=False,
    ),
    # On four servers at half the pace that `benchmarks.cells` has on eight.
    **{
        name: Cell(
            f"{of}, as published, {speedup:g} times as fast",
            name,
            4,
            {"speedup": speedup, "duration_s": 150},
            {"speedup": speedup, "duration_s": 90},
            warm_up_s=30,
            group="published",
        )
        for name, of, speedup in (
            ("toolagent", "Tools and agents at Mooncake", 1.25),
            ("bailian-chat", "Chat at Qwen-Bailian", 2.0),
            ("bailian-coder", "Coding at Qwen-Bailian", 0.8),
        )
    },
    **{
        f"agents-{api}": Cell(
            "40 sessions that share tools and system prompt, through " + how,
            "coding-agents",
            4,
            {"sessions": 40, "duration_s": 240, "warm_up_s": 90},
            {"sessions": 40, "duration_s": 120, "warm_up_s": 60},
            group="agents",
            api=api,
        )
        for api, how in AGENT_APIS.items()
    },
}
GROUPS: Mapping[str, Page | None] = {"routing": None, "agents": AGENTS_PAGE, "published": PUBLISHED_PAGE}
"""Their pages; None = ROUTING_HTTP.md, which is all theirs."""


def arrivals(cell: Cell, seed: int, rows: Sequence[TraceRow] | None, *, short: bool) -> list[list[Arrival]]:
    """The phases of a cell, each with times from its begin; of a closed loop, the first requests alone. Equal
    arguments, equal arrivals.

    `rows`: of the Mooncake trace; without it a stand-in with its statistics, as in the simulated cells.
    """
    parameters = cell.named(short=short)
    if cell.api is not None:
        return _phases(cell, parameters, seed, None)
    if cell.workload == "mooncake":
        stretch_s = parameters["duration_s"] * parameters["speedup"]
        rows = thinned(window(mooncake_like(seed) if rows is None else rows, stretch_s, seed), cell.share)
    # A ladder's warm-up is a phase, and has no end.
    warm_up_s = min(cell.warm_up_s, parameters.get("duration_s", 0.0) / 3)
    return [
        [
            (at, replace(job, phase=WARM_UP if at < warm_up_s else job.phase, session=_session(cell.workload, job)))
            for at, job in phase
        ]
        for phase in _phases(cell, parameters, seed, rows)
    ]


def _session(workload: str, job: Job) -> str | None:
    """A system prompt is an app, or a user; Mooncake's rows all begin with one block, and the second tells
    conversations apart; published traffic has sessions of its own.
    """
    return job.session or str(job.prompt[:2][-1 if workload == "mooncake" else 0].id)


def _phases(
    cell: Cell, parameters: Mapping[str, float], seed: int, rows: Sequence[TraceRow] | None
) -> list[list[Arrival]]:
    workload = make_workload(cell.workload, parameters, seed=seed, rows=rows)
    found = []
    while (phase := workload.begin(0.0)) is not None:
        found.append(list(phase))
    return found


def window(rows: Sequence[TraceRow], duration_s: float, seed: int) -> list[TraceRow]:
    """A stretch of a trace, chosen by the seed; times count from its begin."""
    begin = random.Random(f"{seed}:window").uniform(0, max(0.0, rows[-1].at_s - duration_s))
    return [row._replace(at_s=row.at_s - begin) for row in rows if begin <= row.at_s < begin + duration_s]


def thinned(rows: Iterable[TraceRow], share: float) -> list[TraceRow]:
    """A share of a trace's conversations, each with all of its rows: thinning by rows would thin the reuse, too."""
    return [row for row in rows if _draw(row.blocks[:2][-1]) < share]


def _draw(conversation: int) -> float:
    """Evenly from 0 to 1."""
    return xxhash.xxh3_64_intdigest(b"%d" % conversation) / 2**64


def body(job: Job) -> bytes:
    """A job as a streamed chat completion: the first piece as the system prompt, the rest as the question."""
    # Text of pieces is ASCII.
    system, question = prompt_text(job.prompt[:1]).decode(), prompt_text(job.prompt[1:]).decode()
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question or "go on"}]
    return orjson.dumps(
        {
            "model": MODEL,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": job.answer.tokens,
            "ignore_eos": True,
        }
    )


def digest(phases: Sequence[Sequence[Arrival]]) -> str:
    """Of all arrivals and bytes, to show that two runs asked the same."""
    state = xxhash.xxh3_64()
    for phase in phases:
        for at, job in phase:
            state.update(b"%.6f" % at)
            state.update(f"{job.session}".encode())
            state.update(body(job))
    return state.hexdigest()
