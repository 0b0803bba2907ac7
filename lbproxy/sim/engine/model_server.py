# SPDX-License-Identifier: Apache-2.0
"""What every kind of simulated model server is to those that drive it: `cluster.py` and `http.py`.

`engine.Engine` models one continuous-batching engine. The others are there to contradict a balancer that takes every
server for one of these: `ranks.RankedEngine` is several of them behind one address, `fixed.FixedEngine` takes so long
for a prompt, whatever else it does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from lbproxy.sim.engine.engine import JITTER_SIGMA, Engine
from lbproxy.sim.engine.fixed import FixedEngine, FixedTimes
from lbproxy.sim.engine.on_demand import Loading, OnDemandEngine
from lbproxy.sim.engine.presets import Preset
from lbproxy.sim.engine.ranks import RankedEngine

ModelServer: TypeAlias = Engine | FixedEngine | OnDemandEngine | RankedEngine
"""One server. The calls are described at `Engine`."""


def make_server(  # noqa: PLR0913 - all that servers differ in
    preset: Preset,
    *,
    ranks: int = 1,
    times: FixedTimes | None = None,
    loading: Loading | None = None,
    max_model_len: int | None = None,
    speed: float = 1.0,
    rng: random.Random | None = None,
    jitter: float = JITTER_SIGMA,
    name_tokens: bool = True,
) -> ModelServer:
    """`times`: it takes so long for everything; else it is one engine, or so many `ranks`. `loading`: it loads models
    on demand, each of which is as it would be. The rest as `Engine`.
    """
    make: Callable[..., Engine | FixedEngine]
    if times is not None:
        make = partial(FixedEngine, preset, times, max_model_len=max_model_len, speed=speed, name_tokens=name_tokens)
    else:
        make = partial(Engine, preset, max_model_len=max_model_len, speed=speed, jitter=jitter, name_tokens=name_tokens)
    if loading is not None:
        return OnDemandEngine(partial(make, rng=rng), loading, rng=rng)
    if ranks == 1:
        return make(rng=rng)
    own = [None if rng is None else random.Random(rng.getrandbits(64)) for _ in range(ranks)]
    return RankedEngine([engine for one in own if isinstance(engine := make(rng=one), Engine)])
