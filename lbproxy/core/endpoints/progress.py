# SPDX-License-Identifier: Apache-2.0
"""What one endpoint showed of its work: bytes of responses, and metrics that change. `hang` uses it."""

from __future__ import annotations

from math import inf
from typing import Final

from lbproxy.core.engines.load_metrics import LoadMetrics

MIN_METRIC_CHANGES: Final = 3
"""How often a metric must change until it is trusted to show work."""
INTERVAL_DECAY: Final = 0.9
"""The longest interval is reduced to this share with each change."""
STANDS_FOR: Final = 3.0
"""After so many times the longest interval without a change, a page on which streams go on is an old one."""


class Progress:
    """What one endpoint showed of its work."""

    def __init__(self) -> None:
        self.last_at = -inf
        """When the last byte of a response arrived, or its metrics changed."""
        self.silent_since = -inf
        """Silence before this time does not count."""
        self.failing_since = -inf
        """Since when each of its health checks failed, if they do."""
        self.metric_changes = 0
        """How often its metrics changed with its work."""
        self.open_ended = 0
        """Requests in flight whose silence shows nothing: WebSockets, whose clients may be idle."""
        self.tokens_streamed = 0
        """Tokens of streams since the endpoint was added."""
        self.interval_s = 0.0
        """The longest recent interval between two changes."""
        self._busy_since = inf
        """When its metrics last changed, if it had requests ever since."""
        self._streamed = 0
        """`tokens_streamed` at that moment."""
        self._placed = self._ended = 0
        """Numbers of tickets at the last scrape."""

    @property
    def shows_work(self) -> bool:
        """Its metrics change when it works, so that it does not work if they do not change."""
        return self.metric_changes >= MIN_METRIC_CHANGES

    def is_old(self, now: float) -> bool:
        """Whether the last page is an old one, from a cache on the way: it stands for longer than it ever did while
        the endpoint worked, and streams went on.
        """
        stood_s = now - self._busy_since
        return self.shows_work and self.tokens_streamed > self._streamed and stood_s > STANDS_FOR * self.interval_s

    def scraped(
        self, metrics: LoadMetrics, before: LoadMetrics | None, *, placed: int, in_flight: int, others: float | None
    ) -> None:
        """Note a metrics page that followed the page `before`. `placed`: all our requests there so far, of which
        `in_flight` have not ended. `others`: requests of others there.
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
                self.metric_changes += 1
                self.interval_s = max(now - self._busy_since, INTERVAL_DECAY * self.interval_s)
            self._busy_since, self._streamed = now, self.tokens_streamed
        if not in_flight:
            self._busy_since = inf
        if worked or _changed(before, metrics):
            self.last_at = now


def _changed(before: LoadMetrics, metrics: LoadMetrics) -> bool:
    """Whether other gauges show progress: more or fewer requests run, cache was filled or freed, or the queue is
    shorter.
    """
    if metrics.running != before.running or metrics.kv_utilization != before.kv_utilization:
        return True
    return metrics.waiting is not None and before.waiting is not None and metrics.waiting < before.waiting
