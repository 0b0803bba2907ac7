# SPDX-License-Identifier: Apache-2.0
"""The state once a second as server-sent events, for a dashboard.

Whoever finds the last frame a second old renders the next one, for all: no viewers, no cost, and twenty cost little
more than one. A viewer that is slow misses frames; one that takes nothing is let go.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import orjson
from aiohttp import web

PERIOD_S = 1.0
MAX_VIEWERS = 20
STALLED_S = 10.0
"""A viewer must take a frame in this time."""


class Feed:
    """Frames, and who sees them."""

    def __init__(self, render: Callable[[], dict[str, object]]) -> None:
        self._render = render
        self._frame = b""
        self._number = 0
        self._rendered_at = float("-inf")
        self.viewers = 0
        self._closed = asyncio.Event()

    @property
    def has_room(self) -> bool:
        """For one more viewer."""
        return self.viewers < MAX_VIEWERS

    def close(self) -> None:
        """Let all viewers go."""
        self._closed.set()

    async def show(self, request: web.Request) -> web.StreamResponse:
        """One viewer, until it leaves."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}
        )
        self.viewers += 1
        try:
            await response.prepare(request)
            await self._stream(response)
        except (ConnectionError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()
        finally:
            self.viewers -= 1
        return response

    async def _stream(self, response: web.StreamResponse) -> None:
        seen = 0
        await response.write(b"retry: 1000\n\n")
        while not self._closed.is_set():
            delay_s = self._rendered_at + PERIOD_S - time.monotonic()
            if delay_s <= 0.0:
                self._next()
            elif seen == self._number:
                await self._sleep(delay_s)
                continue
            seen = self._number
            async with asyncio.timeout(STALLED_S):
                await response.write(self._frame)

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._closed.wait()
        except TimeoutError:
            pass

    def _next(self) -> None:
        self._rendered_at = time.monotonic()
        self._number += 1
        data = orjson.dumps(self._render(), option=orjson.OPT_NON_STR_KEYS)
        self._frame = b"event: state\nid: %d\ndata: %b\n\n" % (self._number, data)
