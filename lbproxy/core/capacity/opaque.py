# SPDX-License-Identifier: Apache-2.0
"""How long opaque requests take, whose work cannot be read: embeddings, audio, images, and whatever is not a prompt.

Before such a request ends, only its model and the size of its body are known. So its expected cost is what recent
requests for that model took there, for each request that was in flight with it: an endpoint that computes many in
parallel shows a small share, a slow one a large share, and no endpoint is considered free of cost. Whether a large body
takes longer than a small one, and by how much, is learned from all endpoints together (`BodySizes`).
"""

from __future__ import annotations

from typing import Final

from lbproxy.core.capacity.regression import Regression

MODELS: Final = 64
"""Models with a time of their own; further models share one."""
OTHERS: Final = "\0"
FIRST_MS: Final = 10.0
PRIOR_COUNT: Final = 5.0
"""The mean over all endpoints counts as much as this many responses of an endpoint."""
MEMORY: Final = 16.0
MIN_COUNT: Final = 8.0
"""With fewer responses for a model, all of its requests count as equal."""
SIZE_MEMORY: Final = 64.0
MIN_FACTOR: Final = 0.05
MAX_FACTOR: Final = 50.0


class OpaqueTimes:
    """Milliseconds per request in flight, by model. There is one for each endpoint, and one for all together."""

    def __init__(self) -> None:
        self._ms: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        self.extra_weight = 0.0
        """By how much the requests in flight there weigh more than their number, by their sizes; below 0: less."""

    def learn(self, model: str | None, took_ms: float, units: float) -> None:
        """Learn from a complete response, while `units` requests of mean size were in flight, itself included."""
        name = model or OTHERS
        if name not in self._ms and len(self._ms) >= MODELS:
            name = OTHERS
        count = self._counts[name] = min(MEMORY, self._counts.get(name, 0.0) + 1.0)
        known = self._ms.get(name, 0.0)
        self._ms[name] = known + (took_ms / units - known) / count

    def mean_ms(self, model: str | None) -> float:
        """The time of a request of mean size for this model, by measured values alone; `FIRST_MS` before there are any.
        For the mean over all endpoints, with which each of them is compared.
        """
        name = model or OTHERS
        return self._ms.get(name if name in self._ms else OTHERS, FIRST_MS)

    def ms(self, model: str | None, elsewhere_ms: float) -> float:
        """The time of a request of mean size for this model, which takes `elsewhere_ms` on average over all
        endpoints.
        """
        name = model or OTHERS
        if name not in self._ms:
            name = OTHERS
        count = self._counts.get(name, 0.0)
        return (count * self._ms.get(name, 0.0) + PRIOR_COUNT * elsewhere_ms) / (count + PRIOR_COUNT)


class BodySizes:
    """How much more work a larger request is, by model."""

    def __init__(self) -> None:
        self._lines: dict[str, Regression] = {}
        """Milliseconds over bytes, by model."""

    def learn(self, model: str | None, size: int, ms: float) -> None:
        """Learn from a request with a body of `size` bytes that took `ms` for each request in flight."""
        name = model or OTHERS
        line = self._lines.get(name)
        if line is None:
            if len(self._lines) >= MODELS:
                return
            line = self._lines[name] = Regression(SIZE_MEMORY)
        line.learn(size, ms)

    def factor(self, model: str | None, size: int) -> float:
        """The work of a request of `size` bytes relative to one of mean size. 1 until enough were seen."""
        line = self._lines.get(model or OTHERS)
        if line is None or line.count < MIN_COUNT or line.xx <= 0.0 or line.xy <= 0.0 or line.mean_y <= 0.0:
            return 1.0
        slope = line.slope()
        if line.mean_x > 0.0:
            slope = min(slope, line.mean_y / line.mean_x)  # more would be negative for an empty body
        return min(MAX_FACTOR, max(MIN_FACTOR, 1.0 + slope * (size - line.mean_x) / line.mean_y))
