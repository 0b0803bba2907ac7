# SPDX-License-Identifier: Apache-2.0
"""How many requests one engine runs at once, learned from what shows it, and how fast it starts waiting requests.

SGLang and llama.cpp report the number (`limit_reported`, `core.engines.server_info`); it is an upper bound then, as
memory may allow less. Otherwise it shows in three ways, and each sets the limit to what was running at that moment:

- The engine reports waiting requests, more than the prefills before them explain (`learn_limit`). While there are
  fresh reports they alone count, whatever the first bytes show.
- Without reports: first bytes that are much later than the prefills before them explain (`first_byte_late`, twice in a
  row).
- Without reports and streams: responses that take longer than their length explains (`core.capacity.trends`), or
  stalled streams show that the space is used up (`core.capacity.space`).

Requests are held for a limit that nobody reports, and refused, only once something shows that they wait for others to
end (`Evidence`), as first bytes may vary for any reason: at late first bytes, one after the other, the same number
runs, where requests that do not wait for one another vary by as much as their mean; or whole responses certainly take
longer the more requests are there. Until then late first bytes do not move prices either; whole responses do.

The limit is infinite before the first of these. It grows while it is reached and nothing waits: by one for each first
byte in time, or by steps that double with each report in a row. This is the additive increase of a congestion window
(Jacobson, 1988), but the decrease needs no factor, as the same events that show a full engine also show how much it
runs.

Each of them says what it found, and `_found` alone writes the limit. Invariant: `limit` is at least 1. A few requests
more may be placed (`allowance`), so that the engine always has a next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, inf
from typing import Final

from lbproxy.core.capacity.regression import Regression
from lbproxy.core.capacity.trends import RESPONSES

QUEUE_S: Final = 0.25
"""An engine may have as many requests waiting as it starts in this time; or `MIN_QUEUE`, if that is more."""
MIN_QUEUE: Final = 2.0
"""An engine may have this many requests waiting at any rate of starts: it must not run idle."""
RATE_S: Final = 5.0
"""Time constant for the rate of starts."""
QUEUED_S: Final = 60.0
"""Time constant of the longest wait in the engine's queue."""
LATE_IN_ROW: Final = 2
"""A single late first byte is chance."""
INITIAL_LIMIT: Final = 64.0
"""Requests that an engine may have while nothing has shown its limit: no report, no first byte. Each complete response
allows one more, so that the number doubles in the time of one response."""
FULL_CACHE: Final = 0.93
"""With requests waiting and more than this share of its KV cache in use, an engine lacks space. It accepts requests as
long as their prompts fit, and returns running ones to its queue as the responses grow. So it gets no more requests than
will fit once half of the expected growth has happened; see also `MIN_SHARE_WITHOUT_SPACE`."""
MIN_SHARE_WITHOUT_SPACE: Final = 0.75
"""An engine that lacks space still gets requests up to this share of its limit: it may count merely cached blocks as in
use."""
SPACE_S: Final = 30.0
"""How long a lack of space counts, without overload."""
RUNNING_OF: Final = 16.0
"""Late first bytes that show whether the same number runs at each."""
GROWS: Final = 0.1
"""Responses take longer the more requests are there if each adds at least this share of what it would in a queue."""
ERRORS: Final = 4.0
"""And so many standard errors: every response asks, so that what three allow once in a thousand comes soon."""
EVEN: Final = 0.25
"""What runs is even if its variance is less than this share of its mean: that of requests that do not wait for one
another is as large as the mean (Poisson)."""
MAX_STEP: Final = 64.0
ASSUMED_RESPONSE_S: Final = 1.0
"""The assumed duration of a response before one was seen."""


class Evidence:
    """Whether requests wait in an engine that does not report it."""

    def __init__(self) -> None:
        self.is_shown = self.is_needed = False
        """Needed if late first bytes showed the limit, which may come late for any reason."""
        self.late_in_row = 0
        """Late first bytes since one was in time."""
        self._running = Regression(RUNNING_OF)
        """What ran at late first bytes: a mean and a variance."""
        self._growth = Regression(RESPONSES)
        """Seconds that whole responses took too long, over the requests there before."""

    def late(self, running: float) -> None:
        """Note a late first byte, with which so many requests run."""
        self.late_in_row += 1
        line = self._running
        line.learn(running, 0.0)
        if line.count >= RUNNING_OF:
            self.is_shown = line.xx < (line.mean_x if self.is_shown else EVEN * line.mean_x)

    def response(self, before: float, beyond_s: float, rate: float) -> None:
        """Note a whole response: see `Slots.response`. `rate`: requests that start in a second."""
        line = self._growth
        line.learn(before, beyond_s)
        if line.count >= RUNNING_OF and line.xx > 0.0:
            self.is_shown |= line.slope() > max(GROWS / rate, ERRORS * line.slope_error())


class Slots:
    """The slots of one engine."""

    def __init__(self) -> None:
        self.limit = inf
        """Requests that run at once; infinite: not known yet."""
        self.limited_by_space = False
        """The KV cache was full when the limit was found."""
        self._reported_limit = inf
        """The most that the engine reports to run."""
        self.reported_until = -inf
        """Until when the engine's report of its queue is fresh."""
        self.response_s = 0.0
        """The recent duration of a response, in the engine and in its queue."""
        self._initial_limit = INITIAL_LIMIT
        self._cache = 0.0
        """The share of the KV cache in use, by the latest report."""
        self._evidence = Evidence()
        self._waiting = 0.0
        self._space_until = -inf
        """Until when the lack of space counts."""
        self._in_time_at = -inf
        self._step = 1.0
        self._queued = (0.0, 0.0)
        """The longest recent wait in the engine's queue, in seconds, and as of when."""
        self._starts = 0.0
        self._starts_at = 0.0

    # Reading

    def rate(self, now: float) -> float:
        """Requests that the engine starts per second. Above 0."""
        counted = self._starts * exp((self._starts_at - now) / RATE_S) / RATE_S
        steady = 0.0 if self.limit == inf else self.limit / (self.response_s or ASSUMED_RESPONSE_S)
        rate = max(counted, steady)  # max() of three is a call of Python's, 2,000 instructions
        return max(rate, 0.01)

    def allowance(self, now: float) -> float:
        """Requests that may wait in the engine."""
        return max(MIN_QUEUE, QUEUE_S * self.rate(now))

    def is_full(self, in_flight: float, now: float) -> bool:
        """Whether no request should be added to the `in_flight` ones, ours and others'."""
        if in_flight < self.limit:
            return in_flight >= self._initial_limit and now > self.reported_until
        if in_flight - self.limit < self.allowance(now):
            return False
        return now <= self.reported_until or self.limit >= self._reported_limit or self._evidence.is_shown

    def is_idle(self, now: float) -> bool:
        """Whether the engine reports that no request waits."""
        return now <= self.reported_until and self._waiting < 1.0

    def is_cache_full(self, now: float) -> bool:
        """Whether the engine reports that its KV cache is full: it may return running requests to its queue."""
        return now <= self.reported_until and self._cache > FULL_CACHE

    def lacks_space(self, in_flight: float, growth: float, now: float, *, overloaded: bool) -> bool:
        """Whether the requests that are there will need all of the cache. `growth`: the share of it by which they are
        expected to grow.

        A burst that an engine accepts at once is sent to it, whatever follows, unless requests keep arriving faster
        than they are served or the engine lacked space recently: then all first tokens would be later.
        """
        if not self.limited_by_space or now > self.reported_until or in_flight < MIN_SHARE_WITHOUT_SPACE * self.limit:
            return False
        if not overloaded and now > self._space_until:
            return False
        return self._cache + 0.5 * growth > 1.0

    def wait_ms(self, in_flight: float, now: float) -> float:
        """How long a request waits behind `in_flight` others until it is started, in milliseconds. 0 below the
        limit, and while that is only what ran when first bytes were late.
        """
        is_guess = self._evidence.is_needed and now > self.reported_until and not self._evidence.is_shown
        waiting = in_flight + 1.0 - (self._reported_limit if is_guess else self.limit)
        return 1000.0 * waiting / self.rate(now) if waiting > 0.0 else 0.0

    def longest_wait_s(self, now: float) -> float:
        """How long a request waited at most in the engine's queue, as first bytes of the last minute show: much longer
        than the mean where responses that began together end together.
        """
        longest_s, at = self._queued
        return longest_s * exp((at - now) / QUEUED_S)

    # Over a restart of lbproxy

    def save(self) -> dict[str, float]:
        """The limit and the duration of responses, for `restore`; empty before any response."""
        if not self.response_s:
            return {}
        saved = {"response_s": self.response_s, "by_space": float(self.limited_by_space)}
        if self.limit < inf:
            saved["limit"] = self.limit
        if self._initial_limit < inf:
            saved["initial_limit"] = self._initial_limit
        return saved

    def restore(self, saved: Mapping[str, float]) -> None:
        """Start with what `save` returned. A limit that the engine reports, before or later, is an upper bound."""
        if saved:
            self.response_s = saved["response_s"]
            self._found(saved.get("limit", inf), bool(saved["by_space"]), bounded=True)
            self._evidence.is_shown = self.limit < inf
            self._initial_limit = saved.get("initial_limit", inf)

    def forget(self) -> None:
        """The engine is not the one whose limit was restored: only what this one reported is known."""
        self._found(self._reported_limit, False)
        self.response_s = 0.0
        self._initial_limit = INITIAL_LIMIT if self.limit == inf else inf

    # What shows the limit

    def _found(self, limit: float, by_space: bool, *, bounded: bool = False, by_first_bytes: bool = False) -> None:
        """Note a limit that something shows. `by_space`: the KV cache is full with so many. `bounded`: the engine does
        not run more than it reports, whatever this says. `by_first_bytes`: they are late with so many.
        """
        self.limit = max(1.0, min(self._reported_limit, limit) if bounded else limit)
        self.limited_by_space, self._evidence.is_needed = by_space, by_first_bytes

    def limit_reported(self, limit: int) -> None:
        """Note the limit that the engine reports. Memory may allow less, which is still found."""
        if limit != self._reported_limit:
            self._reported_limit, self._initial_limit = float(limit), inf
            self._found(self._reported_limit, False)

    def forget_report(self) -> None:
        """The reported limit is that of another process: what was found stays until that says more."""
        self._reported_limit = inf

    def started(self, now: float) -> None:
        """Note that the engine started a request: its first byte arrived, or the complete response."""
        self._starts = 1.0 + self._starts * exp((self._starts_at - now) / RATE_S)
        self._starts_at = now

    def finished(self, took_s: float) -> None:
        self._initial_limit += 1.0
        self.response_s += (took_s - self.response_s) / 16.0 if self.response_s else took_s

    def waited(self, waited_s: float, now: float) -> None:
        if waited_s >= self.longest_wait_s(now):
            self._queued = waited_s, now

    def response(self, before: float, beyond_s: float, now: float) -> None:
        """Note by how much a response that did not stream took longer than its prefill and its length explain, with
        `before` requests there before it.
        """
        self._evidence.response(before, beyond_s, self.rate(now))

    def first_byte_in_time(self, before: float, now: float) -> None:
        """Note a first byte in time, with `before` requests there before it."""
        self._initial_limit = inf
        if now <= self.reported_until:
            return
        self._evidence.late_in_row = 0
        self._in_time_at = now
        if before > self.limit and before >= self.limit + self.allowance(now) - 1.0:
            late = self._evidence.is_needed
            self._found(self.limit + 1.0, self.limited_by_space, bounded=True, by_first_bytes=late)

    def first_byte_late(self, running: float, before: float, waited_s: float, now: float) -> None:
        """Note a late first byte. `running`: requests that run with it, or ran and were returned to the engine's queue.
        `before`: requests there before it. `waited_s`: how long it waited for some of them to end.
        """
        self._initial_limit = inf
        if now <= self.reported_until:
            return
        self._evidence.late(running)
        if self._evidence.late_in_row >= LATE_IN_ROW:
            seen = before + 1.0 - waited_s * self.rate(now)
            self._found(min(running, 0.5 * (min(self.limit, running) + seen)), False, by_first_bytes=True)

    def first_byte_overdue(self, since: float, running: float, now: float) -> None:
        """Note a first byte that should have arrived at `since` and has not."""
        if now > self.reported_until and self._in_time_at < since and running < self.limit:
            self._found(running, self.limited_by_space, by_first_bytes=True)

    def learn_limit(
        self, waiting: float, running: float | None, explained: float, *, cache: float, until: float
    ) -> None:
        """Note the reported queue: how many requests wait and run, and the share of the KV cache in use. `explained`:
        waiting requests that prefills and adapters explain.
        """
        self._initial_limit = inf
        self.reported_until = until
        self._cache = cache
        self._waiting = waiting
        if waiting - explained >= 1.0:
            if running is not None:
                self._found(running, cache > FULL_CACHE)
                if self.limited_by_space:
                    self._space_until = until + SPACE_S
            self._step = 1.0
        elif waiting < 1.0 and running is not None and running >= self.limit:
            self._found(max(self.limit, running) + self._step, self.limited_by_space)
            self._step = min(MAX_STEP, 2.0 * self._step)
        else:
            self._step = 1.0

    def space_used_up(self, running: float, now: float) -> None:
        """Without reports: so many requests use all of the space that there is (`core.capacity.space`)."""
        if now > self.reported_until:
            self._found(min(self.limit, running), True)

    def limit_estimated(self, limit: float) -> None:
        """Note a limit that was estimated from the durations of non-streaming responses."""
        self._initial_limit = inf
        self._found(limit, False, bounded=True)

    def limit_reached(self, step: float) -> None:
        """Note that non-streaming responses do not show any wait although there are as many requests as the limit."""
        self._found(self.limit + step, self.limited_by_space)
