"""The limits of requests and tokens a minute that a paid provider puts on a key, and how it says them.

A limit is a bucket that holds a minute's worth and fills evenly, as api.openai.com has it: after a pause of a minute a
whole minute's worth may come at once. A request is charged before it runs, for its prompt and the tokens that it may
generate; what it uses in the end changes nothing. Refused ones are not charged. Pure: `now` is seconds of any clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

from lbproxy.sim.mock.apis.fields import Json

MINUTE_S = 60.0
_LENGTHS = ("max_completion_tokens", "max_output_tokens", "max_tokens")


class Refusal(NamedTuple):
    """Why a request must wait."""

    kind: str
    """`requests` or `tokens`: the limit that it exceeds."""
    limit: int
    used: int
    requested: int
    wait_s: float
    """Until it is accepted if nothing else comes; infinite: never."""


class Bucket:
    """What is left of one limit."""

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at: float | None = None

    def level(self, now: float) -> float:
        """How much is left."""
        if self._at is not None:
            filled = (now - self._at) * self.per_minute / MINUTE_S
            self._level = min(float(self.per_minute), self._level + filled)
        self._at = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Take what is there."""
        self._level = self.level(now) - amount

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until so much is left; 0: it is now, infinite: it never is."""
        if amount > self.per_minute:
            return inf
        return max(0.0, amount - self.level(now)) * MINUTE_S / self.per_minute


@dataclass(frozen=True, slots=True)
class Quota:
    """Both limits of one key; None: no limit."""

    requests: Bucket | None = None
    tokens: Bucket | None = None

    def take(self, tokens: int, now: float) -> Refusal | None:
        """Charge one request of so many tokens, or say why not."""
        asked = [("requests", self.requests, 1), ("tokens", self.tokens, tokens)]
        limits = [(kind, bucket, amount) for kind, bucket, amount in asked if bucket is not None]
        for kind, bucket, amount in limits:
            wait_s = bucket.wait_s(amount, now)
            if wait_s > 0.0:
                used = bucket.per_minute - int(bucket.level(now))
                return Refusal(kind, bucket.per_minute, used, amount, wait_s)
        for _, bucket, amount in limits:
            bucket.take(amount, now)
        return None

    def headers(self, now: float) -> dict[str, str]:
        """What every response says of them."""
        said = {}
        for kind, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                said[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
                said[f"x-ratelimit-remaining-{kind}"] = str(int(bucket.level(now)))
                said[f"x-ratelimit-reset-{kind}"] = duration(bucket.wait_s(bucket.per_minute, now))
        return said


def quota(requests_per_minute: int | None, tokens_per_minute: int | None) -> Quota:
    """The limits that options say."""
    return Quota(
        None if requests_per_minute is None else Bucket(requests_per_minute),
        None if tokens_per_minute is None else Bucket(tokens_per_minute),
    )


def charged_tokens(fields: Json, body_bytes: int) -> int:
    """What a request is charged: a quarter of its bytes, and the most that it may generate if it says so."""
    lengths = [value for name in _LENGTHS if type(value := fields.get(name)) is int]
    return max(1, body_bytes // 4) + max(0, *lengths, 0)


def duration(seconds: float) -> str:
    """As the headers word it: `120ms`, `1.5s`, `6m0s`."""
    if seconds < 1.0:
        return f"{ceil(1000.0 * seconds)}ms"
    minutes, rest = divmod(ceil(1000.0 * seconds), 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1000:g}s"
