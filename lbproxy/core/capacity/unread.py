"""How long requests take whose work cannot be read: embeddings, audio, images, and whatever is not a prompt.

Nothing is known of such a request before it ends but the model that it is for. So it is taken to cost what others for
that model took there of late, for each request that was in flight with it: an endpoint that computes many side by side
shows a small share, one that is slow a large one, and none is ever taken for free.
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


class Unread:
    """Milliseconds per request in flight, by model. One of each endpoint, and one of all together."""

    __slots__ = ("_counts", "_ms")

    def __init__(self) -> None:
        self._ms: dict[str, float] = {}
        self._counts: dict[str, float] = {}

    def learn(self, model: str | None, took_ms: float, before: int) -> None:
        """A response is complete; so many of ours were in flight when its request was placed."""
        name = model or OTHERS
        if name not in self._ms and len(self._ms) >= MODELS:
            name = OTHERS
        count = self._counts[name] = min(MEMORY, self._counts.get(name, 0.0) + 1.0)
        known = self._ms.get(name, 0.0)
        self._ms[name] = known + (took_ms / (before + 1.0) - known) / count

    def ms(self, model: str | None, elsewhere_ms: float) -> float:
        """For a request of this model, where it takes `elsewhere_ms` with all endpoints together."""
        name = model or OTHERS
        if name not in self._ms:
            name = OTHERS
        count = self._counts.get(name, 0.0)
        return (count * self._ms.get(name, 0.0) + SURE * elsewhere_ms) / (count + SURE)
