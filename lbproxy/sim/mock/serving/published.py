# SPDX-License-Identifier: Apache-2.0
"""The KV events of a simulated server, if it is to publish any, and its route that clears the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from lbproxy.sim.engine.engine import Engine
from lbproxy.sim.engine.model_server import ModelServer
from lbproxy.sim.engine.ranks import RankedEngine
from lbproxy.sim.mock.mock_options import MockOptions

if TYPE_CHECKING:
    from lbproxy.sim.mock.serving.kv_publisher import KvPublisher

CLEAR_PATH = "/reset_prefix_cache"


class PublishedKv:
    """Those of all ranks."""

    def __init__(self, options: MockOptions, engine: ModelServer) -> None:
        self._options = options
        ranks: Sequence[ModelServer] = engine.ranks if isinstance(engine, RankedEngine) else [engine]
        self._engines = [one for one in ranks if isinstance(one, Engine)]
        self.publishers: list[KvPublisher] = []
        """One for each rank, while the server listens."""

    def start(self) -> None:
        """Publish from now on. Raises OSError if an address cannot be had, ImportError if pyzmq is missing."""
        events, replay = self._options.kv_events, self._options.kv_events_replay
        if events is None:
            return
        from lbproxy.sim.mock.serving.kv_publisher import KvPublisher  # noqa: PLC0415 - needs an extra

        for rank, engine in enumerate(self._engines):
            publisher = KvPublisher(events, replay, rank)
            self.publishers.append(publisher)
            engine.report_blocks(publisher)

    def publish(self) -> None:
        """A step has ended."""
        for one in self.publishers:
            one.publish()

    async def clear_cache(self, _request: web.Request) -> web.StreamResponse:
        """POST /reset_prefix_cache: vLLM says 200 whether it could or not."""
        self.clear()
        return web.Response()

    def clear(self) -> None:
        """Empty the prefix caches."""
        for engine in self._engines:
            engine.clear_cache(now=asyncio.get_running_loop().time())

    def close(self) -> None:
        """Let go of all addresses. May be called twice."""
        for one in self.publishers:
            one.close()
        self.publishers.clear()
