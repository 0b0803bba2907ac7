# SPDX-License-Identifier: Apache-2.0
"""Warns once of roles and connectors that do not fit together: `core.engines.pairing`, for the log.

A finding counts when two looks in a row have it, since engines are read one after the other; when it is gone and comes
back, it is logged again. Endpoints that are not up are not looked at. Where no endpoint has a role, a look costs
nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

from lbproxy.config.tree import Settings
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointSnapshot
from lbproxy.core.engines.pairing import Part, find_problems
from lbproxy.core.observed.snapshot import PoolSnapshot

logger = logging.getLogger("lbproxy")
LOOK_S: Final = 10.0


class Pool(Protocol):
    """Where endpoints are read: the Runtime."""

    @property
    def splits(self) -> bool:
        """Whether any endpoint has the role prefill or decode."""

    def snapshot(self) -> PoolSnapshot:
        """Everything, now."""


class RoleWatch:
    """Looks now and then."""

    def __init__(self, pool: Pool, settings: Callable[[], Settings]) -> None:
        self._pool, self._settings = pool, settings
        self._last: frozenset[str] = frozenset()
        """What the last look found."""
        self._logged: frozenset[str] = frozenset()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        found = find_problems(self._parts()) if self._has_roles() else []
        for problem in found:
            if problem in self._last and problem not in self._logged:
                logger.warning("%s", problem, extra={"event": "roles"})
        self._logged = frozenset(one for one in found if one in self._last)
        self._last = frozenset(found)

    def _has_roles(self) -> bool:
        return self._pool.splits or any(one.role not in {"auto", "both"} for one in self._settings().endpoints)

    def _parts(self) -> list[Part]:
        endpoints = self._pool.snapshot().endpoints
        return [_part(one) for one in endpoints if one.health is Health.UP and not (one.draining or one.removed)]


def _part(one: EndpointSnapshot) -> Part:
    spec = one.endpoint
    models = None if one.models is None else frozenset(one.models)
    return Part(spec.name, models, spec.role, spec.connector, one.reported_handover, one.handover)
