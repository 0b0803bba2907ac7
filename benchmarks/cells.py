# SPDX-License-Identifier: Apache-2.0
"""The cells of the routing benchmark: what is simulated, and at which load. Data only.

A cell is a scenario as `lbproxy sim` reads it, without policies and seeds. All run on Qwen3-32B on two H100 each, with
a context of 131,072 tokens (as with YaRN): the same servers throughout, so that cells differ in what is asked of them.
The short form has one variant of each kind, cut in time but not in load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Cell:
    workload: str
    parameters: Mapping[str, float] = field(default_factory=dict)
    servers: int = 8
    speeds: Mapping[float, int] | None = None
    """Servers by speed, instead of `servers` at 1."""
    more: Mapping[str, object] = field(default_factory=dict)
    """Other keys of the scenario."""
    max_loras: int = 0
    short: Mapping[str, float] | None = None
    """Parameters of the short form; None = not part of it."""

    def scenario(self, policies: Sequence[object], seeds: int, *, short: bool, trace: str | None) -> dict[str, object]:
        """As a file of `lbproxy sim` would have it."""
        parameters = {**self.parameters, **(self.short or {})} if short else self.parameters
        speeds = self.speeds or {1.0: self.servers}
        return {
            "fleet": [
                {"count": count, "speed": speed, "max_model_len": 131_072, "max_loras": self.max_loras}
                for speed, count in speeds.items()
            ],
            "workload": {"name": self.workload, "parameters": dict(parameters), "trace": trace},
            "policies": list(policies),
            "seeds": seeds,
            **self.more,
        }


MIX = {
    "prompt_tokens": 1500,
    "shared_tokens": 500,
    "groups": 20,
    "output_tokens": 200,
    "spread": 0.7,
    "duration_s": 180,
}
LADDER_SHORT = {"step_s": 10, "warm_up_s": 20}

AGENTS: dict[str, Cell] = {
    f"coding agents, {sessions} sessions / 4 servers": Cell(
        "coding-agents", {"sessions": sessions}, servers=4, short=cut
    )
    for sessions, cut in ((26, None), (40, {"duration_s": 300, "warm_up_s": 150}), (52, None))
}
"""For AGENTS.md. Under adaptive the most requests a second come from 44 sessions; these are 60, 90 and 120 % of them.
With more sessions the caches no longer hold all conversations, and fewer requests are answered."""

CELLS: dict[str, Cell] = {
    "b2b ladder": Cell("ladder", short=LADDER_SHORT),
    "b2b, new questions": Cell("ladder", {"fresh": 1}),
    "b2b, drawn independently": Cell("ladder", {"independent": 1}),
    "b2b, little shared": Cell("ladder", {"fresh": 1, "shared_tokens": 1200, "question_tokens": 6000, "last_rate": 25}),
    "Mooncake x1.5": Cell("mooncake", {"speedup": 1.5}),
    "Mooncake x2": Cell("mooncake", {"speedup": 2}, short={"duration_s": 200}),
    "Mooncake x5 on 16": Cell("mooncake", {"speedup": 5, "duration_s": 400}, servers=16),
    "Azure x8": Cell("azure", {"speedup": 8}, short={"duration_s": 60}),
    "Azure x12": Cell("azure", {"speedup": 12, "duration_s": 200}),
    "bursts": Cell("bursts", short={"count": 1}),
    "one prefix": Cell("one-prefix", short={"duration_s": 90}),
    "chat, 300 users": Cell("chat", {"users": 300}),
    "chat, 600 users": Cell("chat", {"users": 600}, short={"duration_s": 80}),
    "agents, 40 users": Cell("agents", {"users": 40}),
    "agents, 80 users": Cell("agents", {"users": 80}, short={"duration_s": 80}),
    "10 % long at 10/s": Cell("long-prompts", {"rate": 10}),
    "10 % long at 16/s": Cell("long-prompts", {"rate": 16}, short={"duration_s": 90}),
    "half at half speed": Cell("own", {**MIX, "rate": 35}, speeds={1.0: 4, 0.5: 4}, short={"duration_s": 60}),
    "one slow for 80 s": Cell(
        "own",
        {**MIX, "rate": 40},
        more={"faults": [{"server": 0, "at": 40, "lasts": 80, "speed": 0.2}]},
        short={"duration_s": 130},
    ),
    "one dead for 60 s": Cell("own", {**MIX, "rate": 40}, more={"faults": [{"server": 0, "at": 40, "lasts": 60}]}),
    "15 adapters, 6 x 3": Cell("lora", {"rate": 24}, servers=6, max_loras=3),
    "15 adapters, 8 x 4": Cell("lora", {"rate": 32}, servers=8, max_loras=4, short={"duration_s": 60}),
    "15 adapters, 10 x 4": Cell("lora", {"rate": 40}, servers=10, max_loras=4),
    "agents, 60 users, 100k": Cell(
        "agents", {"users": 60, "max_context": 100_000, "duration_s": 300}, short={"duration_s": 150}
    ),
    "long documents, short answers": Cell("documents", {"rate": 8}, short={"duration_s": 90}),
    "2 servers": Cell("own", {**MIX, "rate": 11}, servers=2, short={"duration_s": 90}),
    "4 servers": Cell("own", {**MIX, "rate": 22}, servers=4),
    "chat, half not streamed": Cell("chat", {"users": 600}, more={"stream_share": 0.5}),
    "chat, nothing streamed": Cell("chat", {"users": 600}, more={"stream_share": 0}, short={"duration_s": 60}),
    "gauges of 1 s": Cell("ladder", {"last_rate": 30}, more={"scrape_interval": 1, "scrape_delay": 0.05}),
    "no gauges": Cell("ladder", {"last_rate": 30}, more={"scrape_interval": None}),
    **AGENTS,
    "4 balancers": Cell("ladder", {"last_rate": 30}, more={"balancers": 4}),
    "4 balancers, told 20 ms late": Cell(
        "ladder", {"last_rate": 30}, more={"balancers": 4, "exchange": {"interval": 0.02}}
    ),
}

GIE_LORA: dict[str, object] = {
    "policy": "weighted",
    "scorers": {"queue": 2, "kv-utilization": 2, "prefix": 3, "lora": 1},
}
"""The endpoint picker's scorers and weights with that for adapters, which here reads what is loaded, not what vLLM's
metric shows, where idle adapters are missing."""
LORA: dict[str, Cell] = {
    "8 servers with 4 slots, 90/s": Cell("lora", {"rate": 90, "duration_s": 30}, servers=8, max_loras=4),
    "6 servers with 3 slots, 24/s": Cell("lora", {"rate": 24, "duration_s": 30}, servers=6, max_loras=3),
}
"""15 adapters, of which five get 60 % of the requests, five 30 % and five 10 %: at 80 % of what the fleet can do, and
with hardly more slots than adapters."""
LORA_CAPACITY = Cell("own", {"rate": 200, "duration_s": 60, "prompt_tokens": 500, "output_tokens": 150, "spread": 0.5})
"""The same requests without adapters, more than eight servers can answer."""

DISTURBED: dict[str, dict[str, object]] = {
    "as it is": {},
    "sizes exact": {"size_error": 0},
    "sizes wrong by up to 30 %": {"size_error": 0.3},
    "gauges 1 s late": {"scrape_delay": 1},
    "gauges every 5 s": {"scrape_interval": 5},
    "no gauges": {"scrape_interval": None},
    "no gauges, sizes told": {"scrape_interval": None, "sizes_declared": True},
}
"""What is wrong with what the balancer is told."""
ROBUSTNESS: dict[str, dict[str, Cell]] = {
    name: {how: replace(cell, more=more) for how, more in DISTURBED.items()}
    for name, cell in {
        "b2b ladder, 20 to 30/s": Cell("ladder", {"first_rate": 20, "last_rate": 30, "step_s": 15}),
        "agents, 80 users": Cell("agents", {"users": 80, "duration_s": 120}),
        "half at half speed": Cell("own", {**MIX, "rate": 35, "duration_s": 90}, speeds={1.0: 4, 0.5: 4}),
    }.items()
}
"""Some cells, each undisturbed and disturbed."""

PUBLISHED: dict[str, Cell] = {
    "toolagent x2.5": Cell("toolagent", {"speedup": 2.5, "duration_s": 100}),
    "Bailian chat x4": Cell("bailian-chat", {"speedup": 4, "duration_s": 100}),
    "Bailian business x4": Cell("bailian-business", {"speedup": 4, "duration_s": 60}),
    "Bailian thinking x1.3": Cell("bailian-thinking", {"speedup": 1.3, "duration_s": 200}),
    "Bailian coder x1.6": Cell("bailian-coder", {"speedup": 1.6, "duration_s": 120}),
    "BurstGPT x200": Cell("burstgpt", {"speedup": 200, "duration_s": 60}),
    "Chutes DeepSeek x0.7": Cell("chutes-deepseek", {"speedup": 0.7, "duration_s": 100}),
    "Chutes MiniMax x0.3": Cell("chutes-minimax", {"speedup": 0.3, "duration_s": 150}),
    "AgentX, 16 sessions": Cell(
        "agentx",
        {"sessions": 16, "compact_at": 200_000, "duration_s": 200, "warm_up_s": 80},
        servers=4,
        more={"fleet": [{"count": 4, "preset": "qwen-32b-4xh100", "max_model_len": 262_144}]},
    ),
}
"""For PUBLISHED.md: the traffic of other services, so many times as fast as theirs. AgentX needs larger servers, and is
compacted at 200,000 tokens."""
