# SPDX-License-Identifier: Apache-2.0
"""Several engines behind one address, as vLLM with `--data-parallel-size`: each request goes to one of them.

vLLM's own balancer between the ranks knows their requests and nothing of their prefix caches, and so does this one: the
rank with the fewest requests, the first of those that have equally few. A request may also name its rank. Prompts are
therefore prefilled side by side, which a balancer that takes the server for one engine does not expect. `gauges` are of
all ranks together: counts are sums, the use of the KV cache is the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from statistics import fmean
from typing import Any

from lbproxy.sim.engine.engine import Engine
from lbproxy.sim.engine.sequence import EngineGauges, Hold, SimRequest, StepDone


class RankedEngine:
    """One server of several ranks, each an engine with the whole of the preset. Not to be shared by drivers."""

    def __init__(self, ranks: Sequence[Engine]) -> None:
        """`ranks`: alike, and at least one. Each has an `rng` of its own, so that none depends on when another is
        asked.
        """
        assert ranks
        self.ranks = ranks
        self.max_model_len = self.ranks[0].max_model_len

    @property
    def kv_blocks(self) -> int:
        """Of all ranks together: vLLM, too, shows the sum."""
        return sum(rank.kv_blocks for rank in self.ranks)

    def add(self, request: SimRequest, *, now: float) -> None:
        """To the rank that it names, or to the one with the fewest requests. Raises `RequestTooLong`."""
        if request.rank is None:
            min(self.ranks, key=lambda rank: rank.requests(now=now)).add(request, now=now)
        else:
            self.ranks[request.rank].add(request, now=now)

    def abort(self, request_id: str, *, now: float) -> bool:
        return any(rank.abort(request_id, now=now) for rank in self.ranks)

    def release(self, hold: Hold, *, now: float) -> bool:
        """Free what is held, whichever rank holds it."""
        return any(rank.release(hold, now=now) for rank in self.ranks)

    def renew(self, hold: Hold, expires_at: float, *, now: float) -> None:
        """The lease ends then, whichever rank has it."""
        for rank in self.ranks:
            rank.renew(hold, expires_at, now=now)

    def poke(self, request_id: str, *, now: float) -> None:
        """As `Engine`, whichever rank has the request."""
        for rank in self.ranks:
            rank.poke(request_id, now=now)

    def set_speed(self, speed: float, *, now: float) -> None:
        """All ranks, each from its next step on."""
        for rank in self.ranks:
            rank.set_speed(speed, now=now)

    def unload_adapter(self, adapter: str, *, now: float) -> None:
        """As `Engine`, in each rank."""
        for rank in self.ranks:
            rank.unload_adapter(adapter, now=now)

    def forget(self, *, now: float) -> None:
        """As `Engine`, in each rank."""
        for rank in self.ranks:
            rank.forget(now=now)

    def restart(self, *, now: float) -> list[str]:
        """Fail, and be there again, empty. Returns the ids of all requests that were lost, rank by rank."""
        return [request_id for rank in self.ranks for request_id in rank.restart(now=now)]

    def generated(self, request_id: str) -> int:
        return sum(rank.generated(request_id) for rank in self.ranks)

    def next_event(self) -> float | None:
        """The first of the ranks' events."""
        return min((due for rank in self.ranks if (due := rank.next_event()) is not None), default=None)

    def advance(self, *, now: float) -> list[StepDone]:
        """The steps of all ranks that ended up to `now` and were not returned before, oldest first."""
        return sorted((step for rank in self.ranks for step in rank.advance(now=now)), key=lambda step: step.at)

    def gauges(self) -> EngineGauges:
        """Of all ranks together, each as of its own latest step."""
        each = [rank.gauges() for rank in self.ranks]
        whole = EngineGauges(*map(_together, zip(*each, strict=True)))
        return whole._replace(kv_usage=fmean(one.kv_usage for one in each))


def _together(values: Sequence[Any]) -> Any:
    """Counts are added up; of names each stands once."""
    return tuple(dict.fromkeys(chain(*values))) if isinstance(values[0], tuple) else sum(values)
