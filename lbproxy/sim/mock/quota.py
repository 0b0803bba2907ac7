# SPDX-License-Identifier: Apache-2.0
"""The limits of requests and tokens a minute that a paid provider puts on a key, and how it says them.

A limit is a bucket that holds a minute's worth and fills evenly, as api.openai.com has it: after a pause of a minute a
whole minute's worth may come at once. A request is charged before it runs, for its prompt and the tokens that it may
generate; what it uses in the end changes nothing. Refused ones are not charged, and what is larger than the bucket is
always refused. Pure: `now` is seconds of any clock that begins at 0 or later.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

from lbproxy.core.capacity.bucket import Bucket, resized
from lbproxy.sim.mock.apis.fields import Json

_LENGTHS = ("max_completion_tokens", "max_output_tokens", "max_tokens")


class QuotaRefusal(NamedTuple):
    """Why a request must wait."""

    kind: str
    """`requests` or `tokens`: the limit that it exceeds."""
    limit: int
    used: int
    requested: int
    wait_s: float
    """Until it is accepted if nothing else comes; infinite: never."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Both limits of one key; None: no limit."""

    requests: Bucket | None = None
    tokens: Bucket | None = None

    def take(self, tokens: int, now: float) -> QuotaRefusal | None:
        """Charge one request of so many tokens, or say why not."""
        asked = [("requests", self.requests, 1), ("tokens", self.tokens, tokens)]
        limits = [(kind, bucket, amount) for kind, bucket, amount in asked if bucket is not None]
        for kind, bucket, amount in limits:
            wait_s = inf if amount > bucket.size else bucket.wait_s(amount, now)
            if wait_s > 0.0:
                return QuotaRefusal(kind, int(bucket.size), ceil(bucket.used(now)), amount, wait_s)
        for _, bucket, amount in limits:
            bucket.take(amount, now)
        return None

    def headers(self, now: float) -> dict[str, str]:
        """What every response says of them."""
        said = {}
        for kind, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                said[f"x-ratelimit-limit-{kind}"] = str(int(bucket.size))
                said[f"x-ratelimit-remaining-{kind}"] = str(int(bucket.size - bucket.used(now)))
                said[f"x-ratelimit-reset-{kind}"] = duration(bucket.wait_s(bucket.size, now))
        return said


def quota(requests_per_minute: int | None, tokens_per_minute: int | None) -> Quota:
    """The limits that options say."""
    return Quota(resized(None, requests_per_minute, 0.0), resized(None, tokens_per_minute, 0.0))


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
