"""How long requests take whose work cannot be read: embeddings, audio, images, and whatever is not a prompt.

Nothing is known of such a request before it ends but the model that it is for and how large its body is. So it is taken
to cost what others for that model took there of late, for each request that was in flight with it: an endpoint that
computes many side by side shows a small share, one that is slow a large one, and none is ever taken for free. Whether a
large body takes longer than a small one, and by how much, is learned by all endpoints together (`Sizes`).
"""

from __future__ import annotations

from typing import Final

MODELS: Final = 64
"""That are told apart; more share one."""
OTHERS: Final = "\0"
FIRST_MS: Final = 10.0
SURE: Final = 5.0
"""So many responses of an endpoint count as much as what all endpoints took."""
MEMORY: Final = 16.0
FEW: Final = 8.0
"""With fewer responses for a model all of its requests count as equal."""
SIZE_MEMORY: Final = 64.0
LEAST_FACTOR: Final = 0.05
MOST_FACTOR: Final = 50.0


class Unread:
    """Milliseconds per request in flight, by model. One of each endpoint, and one of all together."""

    __slots__ = ("_counts", "_ms", "in_flight")

    def __init__(self) -> None:
        self._ms: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        self.in_flight = 0.0
        """By how much those in flight are more than their number, by their sizes; below 0: less."""

    def learn(self, model: str | None, took_ms: float, units: float) -> None:
        """A response is complete; so many requests of mean size were in flight, itself included."""
        name = model or OTHERS
        if name not in self._ms and len(self._ms) >= MODELS:
            name = OTHERS
        count = self._counts[name] = min(MEMORY, self._counts.get(name, 0.0) + 1.0)
        known = self._ms.get(name, 0.0)
        self._ms[name] = known + (took_ms / units - known) / count

    def mean_ms(self, model: str | None) -> float:
        """For a request of this model, of mean size, by what was seen alone; `FIRST_MS` before anything was. What all
        endpoints took is no guess that must be outvoted: each of them is compared with it.
        """
        name = model or OTHERS
        return self._ms.get(name if name in self._ms else OTHERS, FIRST_MS)

    def ms(self, model: str | None, elsewhere_ms: float) -> float:
        """For a request of this model, of mean size, where it takes `elsewhere_ms` with all endpoints together."""
        name = model or OTHERS
        if name not in self._ms:
            name = OTHERS
        count = self._counts.get(name, 0.0)
        return (count * self._ms.get(name, 0.0) + SURE * elsewhere_ms) / (count + SURE)


class _Line:
    """Time by size of one model's requests: a regression that forgets."""

    __slots__ = ("count", "cov", "ms", "size", "square")

    def __init__(self) -> None:
        self.count = self.size = self.ms = self.square = self.cov = 0.0


class Sizes:
    """How much more work a larger request is, by model."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}

    def learn(self, model: str | None, size: int, ms: float) -> None:
        """A request with a body of so many bytes took so long, for each that was in flight."""
        name = model or OTHERS
        line = self._lines.get(name)
        if line is None:
            if len(self._lines) >= MODELS:
                return
            line = self._lines[name] = _Line()
        line.count = min(SIZE_MEMORY, line.count + 1.0)
        weight = 1.0 / line.count
        off_size, off_ms = size - line.size, ms - line.ms
        line.size += weight * off_size
        line.ms += weight * off_ms
        rest = 1.0 - weight
        line.square = rest * (line.square + weight * off_size * off_size)
        line.cov = rest * (line.cov + weight * off_size * off_ms)

    def factor(self, model: str | None, size: int) -> float:
        """How much work a request of so many bytes is, beside one of mean size. 1 until enough were seen."""
        line = self._lines.get(model or OTHERS)
        if line is None or line.count < FEW or line.square <= 0.0 or line.cov <= 0.0 or line.ms <= 0.0:
            return 1.0
        slope = line.cov / line.square
        if line.size > 0.0:
            slope = min(slope, line.ms / line.size)  # more would be less than nothing for an empty one
        return min(MOST_FACTOR, max(LEAST_FACTOR, 1.0 + slope * (size - line.size) / line.ms))
