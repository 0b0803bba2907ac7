# SPDX-License-Identifier: Apache-2.0
"""One flow: its limits and what is left of them, its position in the order of service, its figures. See `flows`."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Final, NamedTuple

from lbproxy.config.sections.flows import FlowSettings
from lbproxy.core.capacity.allowance import Allowance, Bounds, Rates

ANONYMOUS: Final = "anonymous"
"""The flow of requests that name no flow and have no key."""
MAX_RETRY_AFTER_S: Final = 60.0


class Refusal(NamedTuple):
    """The limit of its flow by which a request was refused."""

    flow: str
    limit: str
    """In words, with its value and its key in the settings."""
    retry_after_s: float | None
    """When the limit would admit it; None: that depends on when other requests end."""

    @property
    def message(self) -> str:
        """For the client. It contains the name of the flow, which is never the key."""
        text = f"Flow `{self.flow}` has reached its limit of {self.limit}."
        return text if self.retry_after_s is None else f"{text} Try again in {ceil(self.retry_after_s)} s."


class Flow:
    """One flow. Written by `Flows` and, as to `active`, by the Balancer."""

    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.weight = 1.0
        self.allowance = Allowance(Bounds(), now)
        """What its limits leave of it; `max_in_flight` is that of `active`."""
        self.limited = False
        """It has any limit."""
        self.active = 0
        """Tickets that are placed, or wait and are not parked."""
        self.in_flight = 0
        """Those of them that are placed."""
        self.elsewhere = 0
        """`active` of all other replicas together, as far as is known (`core.replicas`)."""
        self.admitted = 0
        """Requests that its limits per minute admitted here."""
        self.virtual_finish = 0.0
        """The virtual finish time of everything it was charged, as of `virtual_finish_at`."""
        self.virtual_finish_at = now
        self.served_tokens = 0.0
        """The total that it was charged."""
        self.told: Rates | None = None
        """In a worker process: what the balancer process said of its limits per minute."""
        self.refused = 0
        """Requests that were refused by one of the limits per minute."""

    @property
    def is_full(self) -> bool:
        """One more request must be parked."""
        limit = self.allowance.max_in_flight
        return limit is not None and self.active + self.elsewhere >= limit

    def rates(self, now: float) -> Rates | None:
        """What is left of its limits per minute; None: it has none."""
        if not self.limited:
            return None
        return self.told or (self.allowance.rates(now) if self.allowance.is_timed else None)

    def concurrency_refusal(self) -> Refusal:
        """The refusal of a request that was parked until it had to end."""
        limit = self.allowance.max_in_flight
        return Refusal(self.name, f"requests at a time, {limit} (`in_flight`), and this one could wait no longer", None)

    def reconfigure(self, rule: FlowSettings, now: float) -> None:
        self.weight = rule.weight
        self.allowance.reconfigure(Bounds(rule.in_flight, rule.requests_per_minute, rule.tokens_per_minute), now)
        self.limited = self.allowance.is_timed or rule.in_flight is not None


def told_flow(rates: Rates) -> Flow:
    """In a worker process: the flow of a ticket, of which only this is known."""
    flow = Flow("", 0.0)
    flow.told, flow.limited = rates, True
    return flow


@dataclass(frozen=True)
class FlowSnapshot:
    """One flow at one moment."""

    name: str
    weight: float
    waiting: int
    in_flight: int
    served_tokens: float
    """The total since it is known: uncached prompt tokens, and response tokens times `OUTPUT_COST`."""
    refused: int
