# SPDX-License-Identifier: Apache-2.0
"""Who is told what was observed: access log, metrics, traces."""

from __future__ import annotations

from typing import Protocol

from lbproxy.core.endpoints.health import Transition
from lbproxy.core.observed.record import RequestRecord


class Sink(Protocol):
    """Gets what is observed. Must be quick and must not raise."""

    def ended(self, records: list[RequestRecord]) -> None:
        """These requests ended. Their records do not change any more."""
        ...

    def transition(self, transition: Transition) -> None:
        """An endpoint changed its standing."""
        ...
