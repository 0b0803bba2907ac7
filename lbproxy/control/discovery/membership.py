"""Hands the set of endpoints to the balancer, and what changed in it to the loops that look after endpoints.

An endpoint that joins takes the balancer some 25 µs. A name that suddenly has a thousand addresses would hold up the
event loop, which requests share: so of many new endpoints the last join in later turns of the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice
from typing import Final

from lbproxy.control.discovery.watch import APART_S, Watches
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.runtime import Runtime

JOINED_AT_ONCE: Final = 100
"""Endpoints that join in the same turn of the loop."""


class Membership:
    """Who is in the set of one runtime."""

    def __init__(self, runtime: Runtime, watches: Watches) -> None:
        self.watches = watches
        """Follow each change of the set."""
        self._runtime = runtime
        self._rest: asyncio.Handle | None = None

    def adopt(self, specs: Sequence[EndpointSpec]) -> None:
        """Make the set equal to `specs`: at once, or if more than `JOINED_AT_ONCE` are new, in later turns of the loop.
        What an earlier call has left for later turns does not count any more.
        """
        if self._rest is not None:
            self._rest.cancel()
        later = self._later(specs)
        if later:  # to find them, and to make so many specs, took long enough
            self._rest = self._runtime.loop.call_soon(self._adopt_some, specs)
        else:
            self._rest = None
            self.watches.follow(self._runtime.set_endpoints(specs))

    def _adopt_some(self, specs: Sequence[EndpointSpec]) -> None:
        later = self._later(specs)
        self.watches.follow(self._runtime.set_endpoints([one for one in specs if one.base_url not in later]))
        self._rest = self._runtime.loop.call_later(APART_S, self._adopt_some, specs) if later else None

    def _later(self, specs: Sequence[EndpointSpec]) -> set[str]:
        """The base URLs of new endpoints beyond the first `JOINED_AT_ONCE`."""
        known = self._runtime.base_urls()
        return set(islice((one.base_url for one in specs if one.base_url not in known), JOINED_AT_ONCE, None))
