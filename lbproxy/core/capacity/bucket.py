# SPDX-License-Identifier: Apache-2.0
"""Amounts over time: a token bucket over a minute, and what was used in the last day."""

from __future__ import annotations

from typing import Final, NamedTuple

MINUTE_S: Final = 60.0
DAY_S: Final = 86400.0
SLOT_S: Final = 600.0
"""What was used is forgotten in steps of this."""
SLOTS: Final = 145
"""A day, and the step that has begun: what is shown as used in a day is never too little."""
FULL_TIMES: Final = 4
"""With 1, 2 and 3 the largest error of 10,000 requests over two replicas is .22, .14 and .08 % of a minute."""
MAX_RESUMED_MINUTES: Final = 10.0
"""A bucket that goes on with an earlier level lacks at most so many minutes' worth, whatever that level was."""


class Spent(NamedTuple):
    """What was used in a day, by steps of `SLOT_S`."""

    at: float
    """When the newest step began."""
    amounts: tuple[float, ...]
    """Of each step, the newest first; 0 or more, at most `SLOTS`."""


class Bucket:
    """A token bucket over a minute. The level may be below 0, as usage is known afterwards."""

    def __init__(self, size: float, now: float) -> None:
        self.size = self._level = size
        self._at = now
        self._full = [(float("-inf"), now)]
        """Since when and until when it was full, the last `FULL_TIMES` times: nothing was refilled then."""

    def _refill(self, now: float) -> None:
        """Before the level is read or written, so that what is taken is not refilled for a time before that."""
        if now > self._at:
            excess = self._level + self.size * (now - self._at) / MINUTE_S - self.size
            if excess >= 0.0:
                since = now - excess * MINUTE_S / self.size
                if self._level >= self.size and self._full and self._full[-1][1] == self._at:
                    since = self._full.pop()[0]
                self._full.append((since, now))
                del self._full[:-FULL_TIMES]
            self._level = self.size + min(0.0, excess)
            self._at = now

    def used(self, now: float) -> float:
        """What is missing to a full bucket."""
        self._refill(now)
        return max(0.0, self.size - self._level)

    def resume(self, used: float, age_s: float, now: float) -> None:
        """Count what was used of another bucket so long ago."""
        self.take(max(0.0, min(used, MAX_RESUMED_MINUTES * self.size) - self.size * age_s / MINUTE_S), now)

    def resize(self, size: float, now: float) -> None:
        """Change the size; what was used stays used."""
        self._refill(now)
        self._level += size - self.size
        self.size = size

    def wait_s(self, needed: float, now: float) -> float:
        """In how many seconds `needed`, or at most the size of the bucket, is available; 0 = now."""
        self._refill(now)
        missing = min(needed, self.size) - self._level
        return missing * MINUTE_S / self.size if missing > 0 else 0.0

    def take(self, amount: float, at: float) -> None:
        """Take an amount, available or not. A negative amount is returned. `at` may be long ago: then it makes the
        difference that it would have made if it had been known at once.
        """
        self._refill(at)
        if at < self._at:
            amount = self._since_full(amount, at)
        self._level = min(self.size, self._level - amount)

    def _since_full(self, amount: float, at: float) -> float:
        """What is left now of the difference that an amount made then: none of what the bucket was full without, and
        less of what could be refilled while it was full.
        """
        full = self._full
        if amount <= 0.0:
            return 0.0 if full and full[-1][1] > at else amount
        self._full = []
        for since, until in full:
            begin = max(since, at)
            refills = self.size * max(0.0, until - begin) / MINUTE_S
            if refills <= 0.0:
                self._full.append((since, until))
                continue
            if since < begin:
                self._full.append((since, begin))
            if amount < refills:
                self._full.append((begin + amount * MINUTE_S / self.size, until))
            amount = max(0.0, amount - refills)
        del self._full[:-FULL_TIMES]
        return amount


def resized(bucket: Bucket | None, size: int | None, now: float) -> Bucket | None:
    """The bucket with another size, or a new one; None if there is no limit."""
    if size is None:
        return None
    if bucket is None:
        return Bucket(size, now)
    bucket.resize(size, now)
    return bucket


class Day:
    """What was used in the last 24 hours, of at most `size`."""

    def __init__(self, size: float, now: float) -> None:
        self.size = size
        self._phase = 0.0
        """Steps begin at multiples of `SLOT_S` after this."""
        self._slots = [0.0] * SLOTS
        self._step = int(now // SLOT_S)
        self._total = 0.0

    def used(self, now: float) -> float:
        """The amount. It may be above `size`, as usage is known afterwards."""
        step = int((now - self._phase) // SLOT_S)
        if step > self._step:
            for passed in range(max(self._step, step - SLOTS) + 1, step + 1):
                self._slots[passed % SLOTS] = 0.0
            self._step = step
            self._total = sum(self._slots)
        return max(0.0, self._total)

    def wait_s(self, needed: float, now: float) -> float:
        """In how many seconds `needed`, or at most `size`, is available; 0 = now."""
        excess = self.used(now) + min(needed, self.size) - self.size
        if excess <= 0.0:
            return 0.0
        for step in range(self._step - SLOTS + 1, self._step + 1):
            excess -= self._slots[step % SLOTS]
            if excess <= 0.0:
                return max(1.0, self._phase + (step + SLOTS) * SLOT_S - now)
        return DAY_S

    def take(self, amount: float, now: float) -> None:
        """Take an amount, available or not. A negative amount is returned."""
        self.used(now)
        self._slots[self._step % SLOTS] += amount
        self._total += amount

    def spent(self, now: float) -> Spent:
        """What was used, for `resume`. What a step returned is taken from those before it."""
        self.used(now)
        amounts, returned = [], 0.0
        for step in range(self._step, self._step - SLOTS, -1):
            amount = self._slots[step % SLOTS] + returned
            returned = min(0.0, amount)
            amounts.append(max(0.0, amount))
        while amounts and not amounts[-1]:
            amounts.pop()
        return Spent(self._phase + self._step * SLOT_S, tuple(amounts))

    def resume(self, spent: Spent, now: float) -> None:
        """Count what was used before. Its steps begin when they did then, so that none of it counts for longer."""
        used, at = self.used(now), min(spent.at, now)
        self._phase = at % SLOT_S
        self._step = int((now - self._phase) // SLOT_S)
        self._slots = [0.0] * SLOTS
        self._slots[self._step % SLOTS] = used
        newest = round((at - self._phase) / SLOT_S)
        for age, amount in enumerate(spent.amounts):
            if self._step - SLOTS < newest - age <= self._step:
                self._slots[(newest - age) % SLOTS] += amount
        self._total = sum(self._slots)

    def at_least(self, spent: Spent, now: float) -> None:
        """What was used here is part of this, or the other way round: the larger counts."""
        other = Day(self.size, now)
        other.resume(spent, now)
        if other.used(now) > self.used(now):
            self._phase, self._slots, self._step, self._total = other._phase, other._slots, other._step, other._total
