"""One flow: its limits and what is left of them, its place in the order of service, its figures. See `flows`."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Final, NamedTuple

from lbproxy.config.sections.flows import FlowSettings

ANONYMOUS: Final = "anonymous"
"""The flow of requests that say nothing of theirs."""
FIRST_GUESS_TOKENS: Final = 200.0
"""Of a response, before a flow had any."""
MINUTE_S: Final = 60.0
MAX_RETRY_AFTER_S: Final = 60.0


class Bucket:
    """What may be used in a minute, and was not yet. `level` may be below 0: what was used is known afterwards."""

    __slots__ = ("_at", "_level", "size")

    def __init__(self, size: float, now: float) -> None:
        self.size = self._level = size
        self._at = now

    def resize(self, size: float) -> None:
        """Another size; what was used stays used."""
        self._level += size - self.size
        self.size = size

    def wait_s(self, needed: float, now: float) -> float:
        """In how many seconds `needed` is there, at most all that ever is; 0 = now."""
        self._level = min(self.size, self._level + self.size * (now - self._at) / MINUTE_S)
        self._at = now
        missing = min(needed, self.size) - self._level
        return missing * MINUTE_S / self.size if missing > 0 else 0.0

    def take(self, amount: float) -> None:
        """Use it, there or not. Below 0 it is given back."""
        self._level -= amount


class Refusal(NamedTuple):
    """Which limit of its flow kept a request from being served."""

    flow: str
    limit: str
    """In words, its value and its key in the settings among them."""
    retry_after_s: float | None
    """When it would not have; None: that depends on when others end."""

    @property
    def message(self) -> str:
        """For the client. It names the flow, whose name is never the key."""
        text = f"Flow `{self.flow}` has reached its limit of {self.limit}."
        return text if self.retry_after_s is None else f"{text} Try again in {ceil(self.retry_after_s)} s."


class Flow:
    """One flow. Written by `Flows` and, as to `active`, by the Balancer."""

    __slots__ = (
        "active",
        "in_flight",
        "limit",
        "limited",
        "mean_response_tokens",
        "name",
        "refused",
        "requests",
        "served_tokens",
        "tokens",
        "virtual_finish",
        "virtual_finish_at",
        "weight",
    )

    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.weight = 1.0
        self.limit: int | None = None
        """Of `active`."""
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.limited = False
        """It has any of these."""
        self.active = 0
        """Tickets that are placed, or wait and are not parked."""
        self.in_flight = 0
        """Of these, placed."""
        self.virtual_finish = 0.0
        """Virtual time at which what it was charged is over, as of `virtual_finish_at`."""
        self.virtual_finish_at = now
        self.mean_response_tokens = FIRST_GUESS_TOKENS
        """Mean length of its responses."""
        self.served_tokens = 0.0
        """All that it was charged, ever."""
        self.refused = 0
        """Requests, for one of the limits of a minute."""

    @property
    def is_full(self) -> bool:
        """One more has to be parked."""
        return self.limit is not None and self.active >= self.limit

    def concurrency_refusal(self) -> Refusal:
        """Of a request that was parked until it had to end."""
        return Refusal(
            self.name, f"requests at a time, {self.limit} (`in_flight`), and this one could wait no longer", None
        )

    def adopt(self, rule: FlowSettings, now: float) -> None:
        """Live by this rule from now on."""
        self.weight, self.limit = rule.weight, rule.in_flight
        self.requests = _bucket(self.requests, rule.requests_per_minute, now)
        self.tokens = _bucket(self.tokens, rule.tokens_per_minute, now)
        self.limited = any(one is not None for one in (self.limit, self.requests, self.tokens))


def _bucket(bucket: Bucket | None, size: int | None, now: float) -> Bucket | None:
    if size is None:
        return None
    if bucket is None:
        return Bucket(size, now)
    bucket.resize(size)
    return bucket


@dataclass(frozen=True)
class FlowSnapshot:
    """One flow at one moment."""

    name: str
    weight: float
    waiting: int
    in_flight: int
    served_tokens: float
    """Since it is known: prompt tokens that were not cached, and answer tokens times `OUTPUT_COST`."""
    refused: int
