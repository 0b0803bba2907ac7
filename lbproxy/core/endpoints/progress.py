"""What one endpoint showed of its work: bytes of responses, and metrics that move. `hang` judges by it."""

from __future__ import annotations

from math import inf
from typing import Final

from lbproxy.core.engines.load_metrics import LoadMetrics

MIN_MOVEMENTS: Final = 3
"""Movements of a metric until it is taken to show work."""
INTERVAL_DECAY: Final = 0.9
"""What is left, with each movement, of the longest time that it took."""


class Progress:
    """What one endpoint showed of its work."""

    __slots__ = (
        "_busy_since",
        "_ended",
        "_placed",
        "failing_since",
        "interval_s",
        "last_at",
        "movements",
        "open_ended",
        "silent_since",
    )

    def __init__(self) -> None:
        self.last_at = -inf
        """When a byte of a response last came from it, or its metrics moved."""
        self.silent_since = -inf
        """Silence before this does not count."""
        self.failing_since = -inf
        """Since when each of its health checks failed, if they do."""
        self.movements = 0
        """How often its metrics moved with its work."""
        self.open_ended = 0
        """Requests in flight of which silence is no sign: WebSockets, whose clients may have nothing to say."""
        self.interval_s = 0.0
        """The time between two of these: the longest, of late."""
        self._busy_since = inf
        """When its metrics last moved, if requests were there ever since."""
        self._placed = self._ended = 0
        """Tickets, as of the last scrape."""

    @property
    def shows_work(self) -> bool:
        """Its metrics move when it works, so that it does not work if they stand still."""
        return self.movements >= MIN_MOVEMENTS

    def scraped(
        self, metrics: LoadMetrics, before: LoadMetrics | None, *, placed: int, in_flight: int, others: float | None
    ) -> None:
        """A page of metrics came, after the one `before`. `placed`: our requests there ever, of which `in_flight` have
        not ended; `others`: requests of others there.
        """
        now, ended = metrics.scraped_at, placed - in_flight
        alone = placed == self._placed and ended == self._ended
        self._placed, self._ended = placed, ended
        if before is None:
            self.last_at = now
            return
        if metrics.work is not None and before.work is not None:
            worked = metrics.work != before.work
        else:
            worked = metrics.kv_utilization != before.kv_utilization and alone and not others
        if worked:
            if in_flight and self._busy_since < inf:
                self.movements += 1
                self.interval_s = max(now - self._busy_since, INTERVAL_DECAY * self.interval_s)
            self._busy_since = now
        if not in_flight:
            self._busy_since = inf
        if worked or _changed(before, metrics):
            self.last_at = now


def _changed(before: LoadMetrics, metrics: LoadMetrics) -> bool:
    """Other gauges that say of progress: more or fewer requests run, cache was filled or freed, or a shorter queue."""
    if metrics.running != before.running or metrics.kv_utilization != before.kv_utilization:
        return True
    return metrics.waiting is not None and before.waiting is not None and metrics.waiting < before.waiting
