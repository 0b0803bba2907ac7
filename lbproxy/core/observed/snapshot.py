# SPDX-License-Identifier: Apache-2.0
"""The pool at one moment: plain data that does not change."""

from __future__ import annotations

from dataclasses import dataclass, field

from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.endpoints.state import EndpointSnapshot
from lbproxy.core.observed.learned import LearnedTransfer
from lbproxy.core.queue.flow import FlowSnapshot
from lbproxy.core.scaling.advice import ModelScaling
from lbproxy.core.sleeping.sleepers import SleepSnapshot


@dataclass(frozen=True)
class PoolSnapshot:
    """The pool at one moment, endpoints in the order of the settings."""

    endpoints: list[EndpointSnapshot] = field(default_factory=list)
    waiting: int = 0
    waiting_bytes: int = 0
    flows: list[FlowSnapshot] = field(default_factory=list)
    transfer: LearnedTransfer | None = None
    """None: nothing was learned of it."""
    models: list[ModelScaling] = field(default_factory=list)
    """What autoscalers want to know, in the order of their names."""
    sleep: dict[EndpointUid, SleepSnapshot] = field(default_factory=dict)
    """How endpoints are that may sleep."""
    in_memory: dict[EndpointUid, list[SleepSnapshot]] = field(default_factory=dict)
    """The models of endpoints that load them on demand."""
