# SPDX-License-Identifier: Apache-2.0
"""The picture of docs/routing.md: what one request costs on four endpoints, by the policy's own arithmetic.

    .venv/bin/python -m benchmarks.picture          # writes docs/routing.svg

The scene is made of real events, and the parts are what the policy says when it is asked to explain itself. Needs
matplotlib (`pip install '.[plots]'`).
"""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.decision import fleet, prompt_of
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.policies.adaptive import Adaptive
from lbproxy.core.policies.policy import Context
from lbproxy.core.requests.request import InferenceRequest

HERE = Path(__file__).parent
NOW = 100.0
PROMPT, SYSTEM = 28, 24
"""Blocks of the prompt, and of the system prompt that it begins with: 256 tokens each."""
PARTS = {
    "waits for prefills before it": ("#8da0cb", ("wait",)),
    "its own prefill": ("#4c72b0", ("prefill",)),
    "stalls the streams there": ("#dd8452", ("stall",)),
    "decode, its own and theirs": ("#55a868", ("decode", "slow_down")),
    "cache space": ("#c9b15a", ("cache_space", "space_wait")),
}
"""By what the picture calls it: colour, and the terms of `Adaptive.explain`."""


@dataclass(frozen=True)
class Place:
    """An endpoint of the scene."""

    name: str
    cached: int = 0
    """Blocks of the prompt."""
    streams: int = 0
    """Of 16 blocks each."""
    queued: int = 0
    """Prefills of 16 blocks each."""
    others: int = 0
    """Blocks of other texts in its cache."""


SCENE = (
    Place("idle, but has\nnothing of it", others=120),
    Place("has the system\nprompt, 24 streams", cached=SYSTEM, streams=24, others=120),
    Place("has it too,\n6 streams, 1 prefill\nqueued", cached=SYSTEM, streams=6, queued=1, others=120),
    Place("has it too,\nno streams, 6 prefills\nqueued", cached=SYSTEM, queued=6, others=120),
)


def scene() -> tuple[InferenceRequest, list[EndpointState]]:
    """The request and the endpoints."""
    rng = random.Random(1)
    balancer = fleet("adaptive", len(SCENE), rng)
    states = list(balancer._endpoints.candidates(None, now=0.0))

    def text(blocks: int) -> list[int]:
        return [rng.getrandbits(64) for _ in range(blocks)]

    prompt = text(PROMPT)
    for state, place in zip(states, SCENE, strict=True):
        load = state.load
        for keys in (prompt[: place.cached], text(place.others)):
            load.end(load.place(prompt_of(keys, 1024), NOW - 90), None, NOW - 80)
        for _ in range(place.streams):
            load.first_byte(load.place(prompt_of(text(16), 1024), NOW - 5), NOW - 4)
        for _ in range(place.queued):
            load.place(prompt_of(text(16), 1024), NOW)
    pool = states[0].load.pool
    pool.token_ms, pool.hit_ratio, pool.output_tokens = 0.055, 0.3, 300.0
    return prompt_of(prompt, 1024), states


def parts(request: InferenceRequest, states: Sequence[EndpointState]) -> dict[str, list[float]]:
    """Milliseconds of each part on each endpoint. The fixed time is left out: it is the same everywhere."""
    policy = Adaptive()
    prices = policy.price(request, states, Context(NOW, explains=True))
    explained = policy.explain(prices.notes, shown=range(len(states)))
    return {name: [sum(one[term] for term in terms) for one in explained] for name, (_, terms) in PARTS.items()}


def draw(found: dict[str, list[float]], form: str) -> bytes:
    """As SVG or PNG, by the form's name."""
    import matplotlib as mpl  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    mpl.rcParams["svg.hashsalt"] = "lbproxy"
    mpl.rcParams["svg.fonttype"] = "none"
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    totals = [sum(values) for values in zip(*found.values(), strict=True)]
    lowest_costs = totals.index(min(totals))
    left = [0.0] * len(SCENE)
    for name, values in found.items():
        axes.barh(range(len(SCENE)), values, left=left, color=PARTS[name][0], label=name, height=0.6)
        left = [a + b for a, b in zip(left, values, strict=True)]
    for row, total in enumerate(totals):
        word = f"  {total:,.0f} ms" + (": goes here" if row == lowest_costs else "")
        axes.text(total, row, word, va="center", fontweight="bold" if row == lowest_costs else "normal")
    axes.set_yticks(range(len(SCENE)), [place.name for place in SCENE])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(totals))
    axes.set_xlabel("what the request costs there, milliseconds")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(fontsize="small", frameon=False, loc="outside upper center", ncols=len(found), columnspacing=1.2)
    picture = io.BytesIO()
    figure.savefig(picture, format=form, metadata={"Date": None} if form == "svg" else {}, facecolor="white")
    return picture.getvalue()


def main() -> None:
    found = parts(*scene())
    for name, values in found.items():
        print(f"{name:32}", *(f"{value:8.0f}" for value in values))
    (HERE.parent / "docs" / "routing.svg").write_bytes(draw(found, "svg"))


if __name__ == "__main__":
    main()
