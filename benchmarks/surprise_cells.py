# SPDX-License-Identifier: Apache-2.0
"""Fleets and traffic that contradict a model of servers: the cells of `surprises.py`. Data only.

Each is wrong in one way: a prompt that becomes hot, a cache that is off, first bytes that have nothing to do with
prompts, gauges that lie, speeds that change, slots or streams that are not as usual. Nearly all are far from overload:
a rule of three lines serves them in time. Servers are Qwen3-32B on two H100 each if nothing else is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lbproxy.config.scenario import Scenario

Keys = Mapping[str, object]


@dataclass(frozen=True, eq=False)
class Surprise:
    """A fleet, and what clients send."""

    name: str
    fleet: Sequence[Keys]
    workloads: Sequence[Keys]
    counted_from: float = 10.0
    """Requests that come before that many seconds are not counted: nobody knows anything yet."""
    is_quick: bool = False
    """One of those that contradict most."""
    more: Keys = field(default_factory=dict)
    """Other keys of the scenario."""
    longer_than: int = 0
    """Only requests with more tokens in their prompts are counted."""
    in_time_s: float = 5.0
    """First tokens that come so soon are in time."""
    mean_at_most: float = 1.1
    """How many times the best rule's mean TTFT is right."""

    def scenario(self, policy: str, seconds: float | None = None) -> Scenario:
        """As `lbproxy sim` reads it; queue and limits are as in the product. `seconds`: so long requests come, instead
        of as long as the cell says.
        """
        workloads = self.workloads
        if seconds is not None:
            workloads = [{**one, "parameters": {**_parameters(one), "duration_s": seconds}} for one in workloads]
        keys = {"policies": [policy], "seeds": 1, "admission": {}, "fleet": self.fleet, "workloads": workloads}
        return Scenario.model_validate({**keys, **self.more})


def _parameters(workload: Keys) -> Mapping[str, float]:
    found = workload["parameters"]
    assert isinstance(found, Mapping)
    return found


def _sent(workload: str, /, **parameters: float) -> dict[str, object]:
    return {"name": workload, "parameters": parameters}


def _servers(count: int = 4, /, **server: object) -> list[dict[str, object]]:
    return [{"count": count, "max_model_len": 131_072, **server}]


NO_METRICS = {"metrics": False}
EIGHT = {"max_sequences": 8}

# A prompt that becomes hot

APPS = _sent(
    "own", rate=8, duration_s=120, groups=150, shared_tokens=6000, prompt_tokens=6200, output_tokens=400, spread=0.3
)
"""Many apps with system prompts of their own."""
HOT_FROM_S = 40.0
SLOTS = {"max_sequences": 128}


def _hot(rate: float, tokens: int = 6000, question: int = 200, output: int = 400, groups: int = 1) -> dict[str, object]:
    """A new app, or several, from `HOT_FROM_S` on."""
    return _sent(
        "own",
        rate=rate,
        duration_s=80,
        begin_s=HOT_FROM_S,
        groups=groups,
        shared_tokens=tokens,
        prompt_tokens=tokens + question,
        output_tokens=output,
        spread=0.3,
    )


def _becomes_hot(name: str, hot: Keys, *, quick: bool = False, **server: object) -> Surprise:
    return Surprise(name, _servers(**{**SLOTS, **server}), [APPS, hot], HOT_FROM_S, quick)


HOT = [
    *(_becomes_hot(f"hot prompt, {rate}/s", _hot(rate), quick=rate == 6) for rate in (3, 5, 6, 7)),
    _becomes_hot("hot prompt, 6/s, no metrics", _hot(6), **NO_METRICS),
    _becomes_hot("hot prompt of 2,000, 8/s", _hot(8, 2000)),
    _becomes_hot("hot prompt of 16,000, 4/s", _hot(4, 16_000, output=200)),
    _becomes_hot("hot document of 60,000, 1/s", _hot(1, 60_000, output=100)),
    _becomes_hot("three hot prompts, 2/s each", _hot(6, groups=3)),
    Surprise(
        "hot prompt, 12/s of 8 servers' 28",
        _servers(8, **SLOTS),
        [{**APPS, "parameters": {**_parameters(APPS), "rate": 16}}, _hot(12)],
        HOT_FROM_S,
    ),
]

# Zipf over prompts


def _zipf(name: str, skew: float, prompts: int, rate: float, **server: object) -> Surprise:
    sent = _sent(
        "own",
        rate=rate,
        duration_s=80,
        groups=prompts,
        skew=skew,
        shared_tokens=6000,
        prompt_tokens=6200,
        output_tokens=300,
        spread=0.3,
    )
    return Surprise(name, _servers(**server), [sent], 30.0)


ZIPF = [
    _zipf("Zipf 1 over 300 prompts", 1.0, 300, 14),
    _zipf("Zipf 1.5 over 300 prompts", 1.5, 300, 16),
    _zipf("Zipf 1 over 300 prompts, no metrics", 1.0, 300, 14, **NO_METRICS),
    Surprise(
        "Zipf 1.2 over documents",
        _servers(),
        [_sent("documents", rate=8, documents=200, skew=1.2, duration_s=80)],
        30.0,
    ),
]

# Caches that are off, or cleared

TALK = _sent("agents", users=36, think_s=5, max_context=30_000, shared_tokens=4000, duration_s=100)
LONG_TALK = _sent("agents", users=40, think_s=2, max_context=60_000, shared_tokens=8000, duration_s=100)
ONE_PROMPT = _sent("own", rate=9, duration_s=70, shared_tokens=4000, prompt_tokens=4300, output_tokens=200, spread=0.3)
OFF = {"prefix_cache": False}
CACHES = [
    Surprise("cache off, conversations", _servers(**OFF), [TALK], 20.0),
    Surprise("cache off, no metrics", _servers(**OFF, **NO_METRICS), [TALK], 20.0, True),
    *(
        Surprise(
            f"cache off, no metrics, {users} users of chat",
            _servers(**OFF, **NO_METRICS),
            [_sent("chat", users=users, duration_s=80)],
            30.0,
        )
        for users in (400, 600)
    ),
    Surprise(
        "cache off, no metrics, nothing of cached tokens",
        _servers(**OFF, **NO_METRICS, usage="no-cached"),
        [TALK],
        20.0,
    ),
    Surprise("cache off, no metrics, no usage", _servers(**OFF, **NO_METRICS, usage="none"), [TALK], 20.0),
    Surprise("cache off at one of four", [*_servers(1, **OFF), *_servers(3)], [TALK], 20.0),
    Surprise("cache off, one prompt for all", _servers(**OFF), [ONE_PROMPT]),
    Surprise(
        "caches cleared",
        _servers(),
        [LONG_TALK],
        20.0,
        more={"faults": [{"server": n, "at": 50, "lasts": 1, "kind": "cleared"} for n in range(4)]},
    ),
    Surprise(
        "one cache cleared every 10 s",
        _servers(),
        [LONG_TALK],
        20.0,
        more={"faults": [{"server": n % 4, "at": 20 + 10 * n, "lasts": 1, "kind": "cleared"} for n in range(7)]},
    ),
]

# First bytes that vary for no visible reason

SHORT = {"prompt_tokens": 1000, "output_tokens": 100, "spread": 0.5}


def _varies(
    name: str,
    form: str,
    ttft: float,
    spread: float,
    rate: float,
    *,
    quick: bool = False,
    groups: int = 0,
    **server: object,
) -> Surprise:
    shared = {"groups": groups, "shared_tokens": 800} if groups else {}
    fleet = _servers(ttft=ttft, ttft_spread=spread, ttft_form=form, **server)
    return Surprise(name, fleet, [_sent("own", rate=rate, duration_s=90, **SHORT, **shared)], is_quick=quick)


FIRST_BYTES = [
    _varies("first bytes after 3 to 13 s, no metrics", "uniform", 8, 0.625, 40, quick=True, **NO_METRICS),
    _varies("first bytes after .05 to 5 s, no metrics", "uniform", 2.525, 0.98, 20, **NO_METRICS),
    _varies("first bytes lognormal, no metrics", "lognormal", 0.5, 1.0, 20, quick=True, **NO_METRICS),
    _varies("first bytes lognormal", "lognormal", 0.5, 1.0, 40),
    _varies("first bytes in two kinds, no metrics", "bimodal", 0.3, 0.1, 20, **NO_METRICS),
    _varies("first bytes with a heavy tail, no metrics", "heavy", 0.2, 0.7, 20, **NO_METRICS),
    _varies("first bytes by prompt, no metrics", "prompt", 0.5, 1.0, 20, groups=40, **NO_METRICS),
    _varies("first bytes by prompt", "prompt", 0.5, 1.0, 20, groups=40),
    _varies("first bytes 1 s +- 50 %", "uniform", 1, 0.5, 40),
    _varies("first bytes 1 s +- 50 %, no metrics", "uniform", 1, 0.5, 40, **NO_METRICS),
]

# Engines that stand, and that change their speed

MIX = {"prompt_tokens": 1500, "shared_tokens": 500, "groups": 20, "output_tokens": 200, "spread": 0.7}
ORDINARY = _sent("own", rate=16, duration_s=70, **MIX)
BUSY = _sent("own", rate=20, duration_s=70, **MIX)
IN_TURNS = [{"server": n, "at": 10 + 40 * n, "lasts": 40, "speed": 0.25} for n in range(2)]
DRIFTING = _sent("own", rate=21, duration_s=90, **MIX)
SIXTY_APPS = _sent(
    "own", rate=16, duration_s=80, groups=60, shared_tokens=8000, prompt_tokens=8200, output_tokens=150, spread=0.5
)
DOCUMENTS = _sent("documents", rate=8, documents=60, skew=0.8, duration_s=80)
PACE = [
    Surprise(
        "stands for 3 s every 20 s, no metrics", _servers(pause=3, pause_every=20, **NO_METRICS), [BUSY], is_quick=True
    ),
    Surprise("stands for 3 s every 20 s", _servers(pause=3, pause_every=20), [BUSY]),
    Surprise(
        "stands for 3 s every 20 s, no metrics, no streams",
        _servers(pause=3, pause_every=20, **NO_METRICS),
        [BUSY],
        more={"stream_share": 0},
    ),
    Surprise(
        "cold experts, no metrics", _servers(cold_share=0.1, cold_load=0.5, **NO_METRICS), [ORDINARY], is_quick=True
    ),
    Surprise("cold experts", _servers(cold_share=0.1, cold_load=0.5), [ORDINARY]),
    Surprise(
        "one of four at a quarter, in turns, no metrics",
        _servers(**NO_METRICS),
        [DRIFTING],
        more={"faults": IN_TURNS},
        is_quick=True,
    ),
    Surprise("one of four at a quarter, in turns", _servers(), [DRIFTING], more={"faults": IN_TURNS}),
    Surprise(
        "two at a tenth beside two",
        [*_servers(2), *_servers(2, speed=0.1)],
        [_sent("own", rate=7, duration_s=90, prompt_tokens=3000, output_tokens=200, spread=0.3)],
    ),
    Surprise(
        "two at a tenth beside two, no metrics",
        [*_servers(2, **NO_METRICS), *_servers(2, speed=0.1, **NO_METRICS)],
        [_sent("own", rate=7, duration_s=90, prompt_tokens=3000, output_tokens=200, spread=0.3)],
    ),
    Surprise(
        "restarted unseen",
        _servers(),
        [LONG_TALK],
        20.0,
        more={"faults": [{"server": 1, "at": 50, "lasts": 1, "kind": "restarted"}]},
    ),
    Surprise(
        "restarted unseen, documents",
        _servers(),
        [DOCUMENTS],
        40.0,
        more={"faults": [{"server": 1, "at": 40, "lasts": 1, "kind": "restarted"}]},
    ),
    Surprise(
        "two of four restarted unseen, 60 apps",
        _servers(),
        [SIXTY_APPS],
        50.0,
        more={"faults": [{"server": n, "at": 50, "lasts": 1, "kind": "restarted"} for n in (0, 1)]},
    ),
    Surprise(
        "restarted unseen in turns, no metrics",
        _servers(**NO_METRICS),
        [TALK],
        20.0,
        more={"faults": [{"server": n, "at": 30 + 15 * n, "lasts": 1, "kind": "restarted"} for n in range(4)]},
    ),
]

# Gauges that lie

FROZEN = [{"server": n, "at": 20.6 + 0.2 * n, "lasts": 600, "kind": "stale"} for n in range(4)]
LIGHT = {"prompt_tokens": 500, "output_tokens": 150, "spread": 0.5}
PEAK = [_sent("own", rate=12, duration_s=70, **LIGHT), _sent("own", rate=150, duration_s=1, begin_s=20, **LIGHT)]
"""A second of many, in which pages freeze."""
GAUGES = [
    Surprise("all in flight reported as waiting", _servers(gauges="in-flight"), [ORDINARY], is_quick=True),
    Surprise("frozen pages with a queue", _servers(max_sequences=16), PEAK, 40.0, True, {"faults": FROZEN}),
    Surprise(
        "a frozen page with a queue, of one of four",
        _servers(max_sequences=16),
        PEAK,
        40.0,
        more={"faults": FROZEN[:1]},
    ),
    Surprise("frozen pages without a queue", _servers(), [ORDINARY], 30.0, more={"faults": FROZEN}),
    Surprise("gauges always zero", _servers(gauges="zero"), [ORDINARY]),
    Surprise("gauges doubled", _servers(gauges="doubled"), [ORDINARY]),
    Surprise("gauges 5 s late", _servers(), [ORDINARY], more={"scrape_delay": 5}),
    Surprise("one of four reports all as waiting", [*_servers(1, gauges="in-flight"), *_servers(3)], [ORDINARY]),
    Surprise(
        "unknown load beside reported load",
        [*_servers(1, **EIGHT, **NO_METRICS), *_servers(2, **EIGHT)],
        [_sent("own", rate=0.8, duration_s=150, prompt_tokens=1000, output_tokens=100)],
        more={"others": [{"server": n, "rate": 1.6, "prompt_tokens": 2000, "output_tokens": 200} for n in range(3)]},
    ),
]

# Streams that say little

THOUGHT = _sent("own", rate=1.6, duration_s=100, prompt_tokens=1000, output_tokens=3000, spread=0.3)
STREAMS = [
    Surprise("80 % of 3,000 tokens hidden, no metrics", _servers(hidden=0.8, **NO_METRICS), [THOUGHT], is_quick=True),
    Surprise("80 % of 3,000 tokens hidden", _servers(hidden=0.8), [THOUGHT]),
    Surprise(
        "a chunk at once, then silence, no metrics",
        _servers(hidden=0.8, role_chunk=True, **NO_METRICS),
        [THOUGHT],
    ),
]

# Few slots, long prompts, other kinds of work

ANSWERS = {"prompt_tokens": 1000, "output_tokens": 300, "spread": 0.7}
LONG_AMONG_SHORT = {
    "share": 0.01,
    "shortest": 60_000,
    "longest": 60_000,
    "short_tokens": 500,
    "output_tokens": 50,
    "duration_s": 80,
}


def _beside_chat(name: str, rate: float, tokens: int, **server: object) -> Surprise:
    """Embeddings are one token after a prompt, as whole responses."""
    embeddings = _sent("own", rate=rate, duration_s=60, prompt_tokens=tokens, output_tokens=1, spread=0.5)
    return Surprise(
        name, _servers(**server), [_sent("chat", users=200, duration_s=60), {**embeddings, "stream_share": 0}]
    )


PLACES = [
    Surprise("one server of 8 slots", _servers(1, **EIGHT), [_sent("own", rate=1.2, duration_s=150, **ANSWERS)]),
    Surprise(
        "two servers of 8 slots",
        _servers(2, **EIGHT),
        [_sent("own", rate=2.4, duration_s=150, **ANSWERS)],
        is_quick=True,
    ),
    Surprise(
        "two servers of 8 slots, no metrics",
        _servers(2, **EIGHT, **NO_METRICS),
        [_sent("own", rate=2.4, duration_s=150, **ANSWERS)],
    ),
    *(
        Surprise(
            f"1 % of 60,000 tokens at {load} %{said}",
            _servers(**more),
            [_sent("long-prompts", rate=rate, **LONG_AMONG_SHORT)],
            is_quick=load == 80 and not said,
        )
        for load, rate in ((80, 25.7), (95, 30.5))
        for said, more in (("", {}), (", no metrics", NO_METRICS))
    ),
    *(
        Surprise(
            f"the long ones of 1 % of 60,000 tokens at {load} %",
            _servers(),
            [_sent("long-prompts", rate=rate, **LONG_AMONG_SHORT)],
            longer_than=10_000,
            in_time_s=30.0,
            mean_at_most=1.3,
        )
        for load, rate in ((80, 25.7), (95, 30.5))
    ),
    _beside_chat("embeddings of documents beside chat", 10, 3000),
    *(
        _beside_chat(f"embeddings beside chat{said}", 40, 800, **more)
        for said, more in (("", {}), (", no metrics", NO_METRICS))
    ),
    Surprise(
        "one adapter, 8 slots, no metrics",
        _servers(8, **EIGHT, max_loras=2, ttft=0.3, token_time=0.02, **NO_METRICS),
        [_sent("lora", rate=85, adapters=1, duration_s=30, prompt_tokens=500, output_tokens=15)],
        is_quick=True,
    ),
]

# One server that is not an engine, or is not alone

EQUAL = {"prompt_tokens": 1000, "output_tokens": 100}
STEADY = {"ttft": 1, "ttft_spread": 0.5}
SLOW = {"ttft": 3, "max_sequences": 128}
RANKS_PROMPTS = {"prompt_tokens": 6000, "output_tokens": 200, "spread": 0.3}
LONG_PROMPTS = {"share": 1, "shortest": 15_000, "longest": 30_000, "output_tokens": 35}
NO_STREAMS = {"more": {"stream_share": 0}}


def _alone(name: str, server: Keys, workload: str, parameters: Mapping[str, float], **more: Keys) -> Surprise:
    """One server has room for all: nothing is to be decided but whether a request waits."""
    return Surprise(name, _servers(1, **server), [_sent(workload, duration_s=100, **parameters)], **more)  # type: ignore[arg-type]


def _beside_others(name: str, server: Keys, rate: float, **theirs: object) -> Surprise:
    """Two servers, both in use by others who do not use the balancer; one request a second of ours."""
    others = [{"server": number, "rate": rate, **theirs} for number in (0, 1)]
    own = _sent("own", rate=1, duration_s=120, **EQUAL)
    return Surprise(name, _servers(2, **server), [own], more={"others": others})


ALONE = [
    _alone("one server, TTFT 1 s +- 50 %", STEADY, "own", {"rate": 12, **EQUAL}),
    _alone("one server, TTFT 1 s +- 50 %, no metrics", {**STEADY, **NO_METRICS}, "own", {"rate": 12, **EQUAL}),
    _alone(
        "one server, TTFT 1 s +- 50 %, no streams", {**STEADY, **NO_METRICS}, "own", {"rate": 12, **EQUAL}, **NO_STREAMS
    ),
    _alone("one server, TTFT 3 s, 128 slots", SLOW, "own", {"rate": 15, **EQUAL}),
    _alone("one server, TTFT 3 s, 128 slots, no metrics", {**SLOW, **NO_METRICS}, "own", {"rate": 15, **EQUAL}),
    _alone("8 ranks", {"ranks": 8}, "own", {"rate": 6, **RANKS_PROMPTS}),
    _alone("8 ranks, no metrics", {"ranks": 8, **NO_METRICS}, "own", {"rate": 6, **RANKS_PROMPTS}),
    _alone("8 ranks, long prompts", {"ranks": 8}, "long-prompts", {"rate": 1.6, **LONG_PROMPTS}),
    _alone(
        "8 ranks, long prompts, no metrics", {"ranks": 8, **NO_METRICS}, "long-prompts", {"rate": 1.6, **LONG_PROMPTS}
    ),
    _beside_others("others use all slots", {"max_sequences": 8}, 1.9, prompt_tokens=2000, output_tokens=200),
    _beside_others("others send long prompts", {}, 4, prompt_tokens=4000, output_tokens=20),
    _beside_others("others send a batch", {}, 10, prompt_tokens=4000, output_tokens=20, at=20, lasts=20),
]

MANY_LENGTHS = _alone(
    "one server, TTFT 1 s +- 50 %, many lengths, no streams",
    {**STEADY, **NO_METRICS},
    "own",
    {"rate": 12, **SHORT},
    **NO_STREAMS,
)
SURPRISES = [*HOT, *ZIPF, *CACHES, *FIRST_BYTES, *PACE, *GAUGES, *STREAMS, *PLACES, *ALONE, MANY_LENGTHS]
