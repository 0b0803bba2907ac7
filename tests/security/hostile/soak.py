# SPDX-License-Identifier: Apache-2.0
"""Everything mixed, for long: cycles of hostility, each with a rest at its end, where memory and descriptors are read.

At a rest nobody is connected, so what is held then is held for nobody, and hostile servers stand still, as what they
list or report counts too, up to its limits. It is as long as lbproxy may take to read their lists again and to give
free memory back. Friends ask throughout the hostility.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path

from tests.chaos.load import quantile
from tests.security.hostile.friends import Seen
from tests.security.hostile.measure import WARM_S, Outcome, Setup, stand
from tests.security.hostile.target import MIB

STEADY = 0.02
"""By what part RSS may differ between rests in the second half."""
REST_S = 35.0
"""`health.models_interval` and `overload.REST_EVERY_S` are 30 s each."""


async def soak(setup: Setup, *, minutes: float, cycle_s: float, output: str | None = None) -> int:
    """Print and keep a JSON line of each cycle and one of all; how many faults there were."""
    it = Outcome(setup)
    rests: list[int] = []
    with tempfile.TemporaryDirectory() as name:
        async with stand(setup, Path(name)) as at:
            async with at.befriended():
                await asyncio.sleep(WARM_S)
            at.calm()
            _, descriptors, rss = await at.rest(REST_S)
            began = time.monotonic()
            if at.guests is not None:
                at.guests.seen = it.guests
            while time.monotonic() < began + 60 * minutes and at.target.alive():
                at.friends.seen = seen = Seen()
                at.target.forget_peak()
                at.calm()
                async with at.befriended():
                    crowd = await at.attack(cycle_s, setup.seed + len(rests))
                it.growth = max(it.growth, at.target.peak() - rss)
                it.alive = at.target.alive()
                if it.alive:
                    at.calm()
                    it.settled, after, left = await at.rest(REST_S)
                    it.descriptors_left, it.kept = after - descriptors, left - rss
                    rests.append(left)
                at.target.read_log()
                it.signs, it.errors = at.target.signs, at.target.errors
                it.hostile.failures.update(seen.failures)
                it.hostile.mixed += seen.mixed
                it.crowd.faults.update(crowd.faults)
                _tell(output, _cycle(len(rests), seen, it, crowd.connections))
    spread = _spread(rests[len(rests) // 2 :])
    faults = it.faults() + ([f"RSS differs by {spread:.1%} in the second half"] if spread > STEADY else [])
    _tell(output, {"cycles": len(rests), "rss_spread_of_second_half": round(spread, 4), "faults": faults})
    return len(faults)


def _spread(sizes: list[int]) -> float:
    return (max(sizes) - min(sizes)) / min(sizes) if sizes else 0.0


def _cycle(number: int, seen: Seen, it: Outcome, connections: int) -> dict[str, object]:
    return {
        "cycle": number,
        "connections": connections,
        "answers": len(seen.waits_ms),
        "p99_ms": round(quantile(seen.waits_ms, 0.99), 1),
        "failures": dict(seen.failures),
        "mixed": len(seen.mixed),
        "guests": [len(it.guests.waits_ms), len(it.guests.mixed)],
        "kept_mib": round(it.kept / MIB, 1),
        "growth_mib": round(it.growth / MIB, 1),
        "descriptors_left": it.descriptors_left,
        "settled": it.settled,
        "signs": it.signs,
        "errors": it.errors[-2:],
    }


def _tell(output: str | None, line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)
    if output:
        with Path(output).open("a") as file:
            file.write(json.dumps(line) + "\n")
