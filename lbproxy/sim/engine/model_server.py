# SPDX-License-Identifier: Apache-2.0
"""What every kind of simulated model server is to those that drive it: `cluster.py` and `http.py`.

`engine.Engine` models one continuous-batching engine. The others are there to contradict a balancer that takes every
server for one of these: `ranks.RankedEngine` is several of them behind one address, `fixed.FixedEngine` takes so long
for a prompt, whatever else it does.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Protocol

from lbproxy.sim.engine.engine import JITTER_SIGMA, Engine
from lbproxy.sim.engine.fixed import FixedEngine, FixedTimes
from lbproxy.sim.engine.presets import Preset
from lbproxy.sim.engine.ranks import RankedEngine
from lbproxy.sim.engine.sequence import EngineGauges, Hold, SimRequest, StepDone


class ModelServer(Protocol):
    """One server. The calls are described at `Engine`."""

    max_model_len: int
    """Prompt and answer together, in tokens."""

    @property
    def kv_blocks(self) -> int:
        """Size of the KV cache in blocks."""
        ...

    def add(self, request: SimRequest, *, now: float) -> None:
        """Take a request in. Raises `RequestTooLong`."""
        ...

    def abort(self, request_id: str, *, now: float) -> bool:
        """Forget a request; False if it has ended."""
        ...

    def release(self, hold: Hold, *, now: float) -> bool:
        """Free KV that is held."""
        ...

    def renew(self, hold: Hold, expires_at: float, *, now: float) -> None:
        """The lease of what is held ends then."""
        ...

    def poke(self, request_id: str, *, now: float) -> None:
        """The state of a request's source has changed."""
        ...

    def set_speed(self, speed: float, *, now: float) -> None:
        """Be so many times as fast as usual from now on."""
        ...

    def unload_adapter(self, adapter: str, *, now: float) -> None:
        """Serve an adapter no more."""
        ...

    def forget(self, *, now: float) -> None:
        """Forget what is cached; what runs goes on."""
        ...

    def restart(self, *, now: float) -> list[str]:
        """Fail, and be there again, empty. Returns the ids of the requests that were lost."""
        ...

    def generated(self, request_id: str) -> int:
        """Tokens that a request has got so far; 0 if it has ended."""
        ...

    def next_event(self) -> float | None:
        """When `advance` is due; None = not before the next `add`."""
        ...

    def advance(self, *, now: float) -> list[StepDone]:
        """What was sent up to `now` and not returned before, oldest first."""
        ...

    def gauges(self) -> EngineGauges:
        """What /metrics shows."""
        ...


def make_server(  # noqa: PLR0913 - all that servers differ in
    preset: Preset,
    *,
    ranks: int = 1,
    times: FixedTimes | None = None,
    max_model_len: int | None = None,
    speed: float = 1.0,
    rng: random.Random | None = None,
    jitter: float = JITTER_SIGMA,
    name_tokens: bool = True,
) -> ModelServer:
    """`times`: it takes so long for everything; else it is one engine, or so many `ranks`. The rest as `Engine`."""
    if times is not None:
        return FixedEngine(preset, times, max_model_len=max_model_len, speed=speed, rng=rng, name_tokens=name_tokens)
    engine = partial(Engine, preset, max_model_len=max_model_len, speed=speed, jitter=jitter, name_tokens=name_tokens)
    if ranks == 1:
        return engine(rng=rng)
    own = [None if rng is None else random.Random(rng.getrandbits(64)) for _ in range(ranks)]
    return RankedEngine([engine(rng=one) for one in own])
