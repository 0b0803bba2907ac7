"""What the pool is at one moment, for those who look: plain data, safe to keep."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lbproxy.core.types import Endpoint, Health, LoadMetrics

if TYPE_CHECKING:
    from lbproxy.core.flows import FlowSnapshot


@dataclass(frozen=True)
class EndpointSnapshot:
    """One endpoint's state at one moment, safe to keep."""

    endpoint: Endpoint
    health: Health
    draining: bool
    backing_off: bool
    in_flight: int
    awaiting_first_byte: int
    placed: int
    tokens_streamed: int
    metrics: LoadMetrics | None
    metrics_age_s: float | None
    stale: bool
    models: tuple[str, ...] | None
    asks_load: bool = False
    load_reports: int = 0
    malformed_reports: int = 0
    readmitted: bool = False
    """Ejected, and used all the same for want of others."""
    share: float = 1.0
    """0.1 to 1: of what it will get once its slow start is over."""
    left: bool = False
    """It is no member any more: what runs there finishes."""

    @property
    def serving(self) -> bool:
        """Requests may go there now, be it one at a time."""
        return not self.draining and (self.readmitted or self.health in {Health.UP, Health.HALF_OPEN})


@dataclass(frozen=True)
class PoolSnapshot:
    """The whole pool at one moment, endpoints in the order of the settings."""

    endpoints: list[EndpointSnapshot] = field(default_factory=list)
    waiting: int = 0
    waiting_bytes: int = 0
    flows: list[FlowSnapshot] = field(default_factory=list)
