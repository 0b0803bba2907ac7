# SPDX-License-Identifier: Apache-2.0
"""Reads the KV events of one endpoint, and reports what they show of its prefix cache to the Balancer.

No request ever waits for it. Messages in order are applied; after a gap a replay is asked for, if the settings say
where. What stays lost makes the count of blocks unknown. It does not make the predicted prefixes unknown, although a
clear may have been among it: docs/decisions/0043-kv-events.md. A publisher that starts again is a new process of the
engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from math import inf
from typing import Final

from lbproxy.config.publishers import read_publisher
from lbproxy.core.caches.cache_report import RESTARTED, CacheReport
from lbproxy.core.caches.kv_blocks import KvBlocks
from lbproxy.core.endpoints.endpoint import Endpoint
from lbproxy.core.engines.kv_events import (
    GPU,
    BlocksStored,
    Cleared,
    KvEventError,
    KvMessage,
    KvOrder,
    KvSequence,
    KvStats,
    Problem,
    decode_event,
    read_message,
    read_replayed,
    replay_request,
    split_batch,
)
from lbproxy.extras.kv_pace import Pace
from lbproxy.extras.kv_sockets import KvDisconnectedError, KvSocketError, ZmqSocket, ZmqSockets

logger = logging.getLogger("lbproxy")

LOG_EVERY_S: Final = 60.0
"""The least time between two lines about the same kind of problem of one endpoint."""
OPEN_FIRST_S, OPEN_MAX_S = 0.5, 10.0
"""Pauses between attempts to open a socket: a predecessor may still be bound."""
REPLAY_S: Final = 10.0
"""For a whole replay: 10,000 messages, what vLLM keeps, take 5 s at the pace of all readers."""
REPLAY_SILENT_S: Final = 1.5
"""Engines look for requests for a replay between two steps, or ten times a second."""
REPLAY_AGAIN_S: Final = 30.0
"""After a replay that failed none is tried for so long."""
MAX_FRAMES: Final = 8
"""Frames of one message: more are read and dropped."""


class KvFeed:
    """The events of one endpoint, or of one rank. `run` it as a loop."""

    def __init__(
        self,
        endpoint: Endpoint,
        sockets: ZmqSockets,
        pace: Pace,
        stats: KvStats,
        report: Callable[[CacheReport], None],
    ) -> None:
        self._endpoint = endpoint
        self._sockets = sockets
        self._pace = pace
        self._stats = stats
        self._report = report
        self._now = stats.now
        self._sequence = KvSequence()
        self._blocks = KvBlocks()
        self._logged: dict[Problem, float] = {}
        """When a kind of problem was last written to the log."""
        self._no_replay_until = -inf

    async def run(self) -> None:
        """Until cancelled. Nothing is known of the cache then."""
        delay_s = OPEN_FIRST_S
        try:
            while True:
                try:
                    await self._follow()
                except KvDisconnectedError as error:
                    self._note(Problem.DISCONNECTED, str(error))
                    self._report(CacheReport())
                    await asyncio.sleep(OPEN_FIRST_S)
                    delay_s = OPEN_FIRST_S
                except KvSocketError as error:
                    text = "KV events of %s cannot be received: %s"
                    if delay_s == OPEN_FIRST_S:
                        extra = {"event": "kv_events", "endpoint": self._endpoint.name}
                        logger.warning(text, self._endpoint.name, error, extra=extra)
                    await asyncio.sleep(delay_s)
                    delay_s = min(OPEN_MAX_S, 2.0 * delay_s)
        finally:
            self._report(CacheReport())

    async def _follow(self) -> None:
        address = read_publisher(self._endpoint.kv_events or "")
        assert address is not None
        socket = self._sockets.subscribe(self._url(self._endpoint.kv_events), bind=address.bind)
        try:
            while True:
                await socket.readable()
                async with self._pace.turn():
                    frames = await self._receive(socket)
                    await self._pace.spend()
                    message = None if frames is None else self._read(frames)
                if message is not None:
                    await self._take(message)
        finally:
            socket.close()

    def _url(self, written: str | None) -> str:
        """Of an address in the settings: that of this rank."""
        address = read_publisher(written or "")
        assert address is not None
        return address.url(self._endpoint.authority.rpartition(":")[0], self._endpoint.rank or 0)

    async def _receive(self, socket: ZmqSocket) -> list[bytes] | None:
        """The frames of one message, at most one more than `MAX_FRAMES`; None = nothing is there."""
        frames: list[bytes] = []
        while (part := socket.receive()) is not None:
            frame, is_last = part
            if len(frames) <= MAX_FRAMES:
                frames.append(frame)
            if is_last:
                return frames
            await self._pace.spend()
        return None

    def _read(self, frames: list[bytes]) -> KvMessage | None:
        stats = self._stats
        stats.messages += 1
        stats.bytes += sum(map(len, frames))
        stats.heard_at = self._now()
        try:
            return read_message(frames)
        except KvEventError as error:
            self._note(error.problem, str(error))
            return None

    async def _take(self, message: KvMessage) -> None:
        """Apply one message, after those before it that are missing."""
        expected = self._sequence.expected
        order = self._sequence.judge(message.topic, message.sequence, self._now())
        if order is KvOrder.FOREIGN:
            self._note(Problem.TOPIC, f"another publisher sends there as well, with the topic {message.topic[:64]!r}")
            return
        if order is KvOrder.RESTART:
            async with self._pace.turn():
                self._stats.restarts += 1
                self._blocks.start_again()
                self._report(RESTARTED)
        start = expected if order is KvOrder.GAP and expected is not None else 0
        cleared = False
        if order is not KvOrder.NEXT:
            cleared = await self._fill(start, message.sequence)
        async with self._pace.turn():
            # A clear before the first message is older than what is predicted.
            cleared = await self._apply(message.payload) or (cleared and order is not KvOrder.FIRST)
            self._report(CacheReport(False, cleared, self._blocks.tokens, self._blocks.size_tokens))

    async def _fill(self, start: int, end: int) -> bool:
        """Apply what was published from `start` on before `end`, as far as it can be replayed. Returns whether the
        cache was cleared.
        """
        if not start:
            self._blocks.begin()
        if start == end:
            return False
        url, cleared = self._endpoint.kv_events_replay, False
        if url is not None and self._now() >= self._no_replay_until:
            start, cleared = await self._replay(self._url(url), start, end)
        if start < end:
            self._lose(start, end)
        return cleared

    def _lose(self, start: int, end: int) -> None:
        """Messages cannot be had."""
        self._blocks.forget()
        if self._stats.messages > 1:  # before the first one nothing was lost
            self._stats.lost += end - start
            self._note(Problem.GAP, f"messages {start} to {end - 1} were lost, so what is in the cache is not known")

    async def _replay(self, url: str, start: int, end: int) -> tuple[int, bool]:
        """Returns the first message that is missing still, and whether the cache was cleared."""
        cleared = False
        try:
            async with self._pace.turn():
                socket = self._sockets.dial(url)
            try:
                socket.send(replay_request(start))
                async with asyncio.timeout(REPLAY_S):
                    while start < end:
                        message = await self._replayed(socket)
                        if message is None or message.sequence >= end:
                            break
                        if message.sequence < start:
                            raise KvEventError(Problem.REPLAY, f"{message.sequence} after {start - 1}")
                        if message.sequence > start:
                            self._lose(start, message.sequence)
                        start = message.sequence + 1
                        self._stats.replayed += 1
                        async with self._pace.turn():
                            cleared = await self._apply(message.payload) or cleared
            finally:
                socket.close()
        except (KvSocketError, KvEventError, TimeoutError) as error:
            self._no_replay_until = self._now() + REPLAY_AGAIN_S
            self._note(Problem.REPLAY, f"the replay at {url} failed: {error or 'no response'}")
        return start, cleared

    async def _replayed(self, socket: ZmqSocket) -> KvMessage | None:
        while True:
            async with asyncio.timeout(REPLAY_SILENT_S):
                await socket.readable()
            async with self._pace.turn():
                frames = await self._receive(socket)
                await self._pace.spend()
                if frames is not None:
                    return read_replayed(frames)

    async def _apply(self, payload: bytes) -> bool:
        """Apply one batch, within a turn. Returns whether the cache was cleared."""
        stats, blocks, cleared = self._stats, self._blocks, False
        try:
            events = split_batch(payload)
        except KvEventError as error:
            self._unreadable(error)
            return False
        for raw in events:
            await self._pace.spend()
            try:
                event = decode_event(raw)
            except KvEventError as error:
                self._unreadable(error)
                continue
            if event is None or event.medium != GPU:
                continue
            if isinstance(event, Cleared):
                stats.clears += 1
                blocks.begin()
                cleared = True
            elif isinstance(event, BlocksStored):
                stats.stored += len(event.blocks)
                if not blocks.stored(event.blocks, event.block_size, event.group):
                    self._note(Problem.BLOCKS, "too many blocks to count")
            else:
                stats.removed += len(event.blocks)
                blocks.removed(event.blocks, event.group)
        return cleared

    def _unreadable(self, error: KvEventError) -> None:
        self._blocks.forget()
        self._note(error.problem, str(error))

    def _note(self, problem: Problem, text: str) -> None:
        """Count a problem, and log it if its kind was not logged of late."""
        self._stats.problems[problem] += 1
        now = self._now()
        if now >= self._logged.get(problem, -inf) + LOG_EVERY_S:
            self._logged[problem] = now
            extra = {"event": "kv_events", "endpoint": self._endpoint.name, "problem": problem.value}
            logger.warning("KV events of %s: %s", self._endpoint.name, text, extra=extra)
