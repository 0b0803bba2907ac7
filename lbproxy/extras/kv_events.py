# SPDX-License-Identifier: Apache-2.0
"""Has the KV events of endpoints read as the settings ask, with a package that lbproxy does without, and only then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from lbproxy.config.sections.endpoints import EndpointSettings
from lbproxy.config.text import ConfigError
from lbproxy.core.balancer import Balancer
from lbproxy.core.caches.cache_report import CacheReport
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointUid
from lbproxy.core.engines.kv_events import KvStats
from lbproxy.driver.runtime import Runtime
from lbproxy.extras.installing import needs
from lbproxy.extras.kv_pace import Pace

if TYPE_CHECKING:
    from lbproxy.extras.kv_feed import KvFeed
    from lbproxy.extras.kv_sockets import ZmqSockets

logger = logging.getLogger("lbproxy")


class KvEvents:
    """What is read, of all endpoints."""

    def __init__(self, balancer: Balancer, runtime: Runtime) -> None:
        self._balancer = balancer
        self._runtime = runtime
        self._pace = Pace()
        self._means: tuple[ZmqSockets, type[KvFeed]] | None = None
        self.stats: dict[str, KvStats] = {}
        """What was published, by the names of the endpoints that are read now."""

    async def follow(self, endpoint: Endpoint) -> None:
        """A loop for `supervise`: the events of one endpoint, or of one rank."""
        if self._means is None:
            kinds = await asyncio.to_thread(_import)
            if kinds is None:  # an entry of a file: the settings were checked
                extra = {"event": "kv_events", "endpoint": endpoint.name}
                logger.error("KV events of %s are not read: it %s", endpoint.name, needs("kv-events"), extra=extra)
                return
            self._means = self._means or (kinds[0](), kinds[1])
        sockets, feed_of = self._means
        stats = KvStats(self._runtime.now)
        feed = feed_of(endpoint, sockets, self._pace, stats, partial(self._report, endpoint.uid))
        self.stats[endpoint.name] = stats
        try:
            await feed.run()
        finally:
            if self.stats.get(endpoint.name) is stats:
                del self.stats[endpoint.name]

    def _report(self, uid: EndpointUid, report: CacheReport) -> None:
        self._balancer.report_cache(uid, report)
        self._runtime.pump_soon()

    def close(self) -> None:
        """Let go of all sockets. When no loop runs any more."""
        if self._means is not None:
            self._means[0].close()


def find_kv_events(endpoints: Iterable[EndpointSettings]) -> None:
    """Raise ConfigError if endpoints have KV events and the package that reads them is missing. Blocks."""
    wanted = [index for index, one in enumerate(endpoints) if one.kv_events is not None]
    if wanted and _import() is None:
        raise ConfigError("settings", [f"endpoints[{wanted[0]}].kv_events: {needs('kv-events')}"])


def _import() -> tuple[type[ZmqSockets], type[KvFeed]] | None:
    """None = pyzmq is missing."""
    try:
        from lbproxy.extras.kv_feed import KvFeed  # noqa: PLC0415 - for those who want it, like the next
        from lbproxy.extras.kv_sockets import ZmqSockets  # noqa: PLC0415
    except ImportError as error:
        if error.name is None or not error.name.startswith("zmq"):
            raise
        return None
    return ZmqSockets, KvFeed
