# SPDX-License-Identifier: Apache-2.0
"""The side channel between simulated servers: short lines over TCP, by which one reads what another holds.

It stands for NIXL's zmq and SGLang's bootstrap server; its words are the mocks' own. `Channel` listens and calls, and
owns every connection and task of that; `RemoteKv` is the KV of one request at another server, as the engine wants it
(`KvSource`). The reader says what it wants in its first line, then `beat` while it waits, and at last `done` (it was
read) or `drop` (it is not wanted any more):

    claim ENGINE REQUEST  |  room NUMBER          ->  held [CACHED]  |  expired  |  lost

Lines come from whoever may connect: they are bounded, and what is not understood closes the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import cast

from lbproxy.sim.engine.sequence import HEARTBEATS, KvSource, KvState
from lbproxy.sim.mock.connectors.legs import Leg

MAX_LINE_BYTES = 2048
_CLOSING_S = 1.0
"""For connections to be closed at the end."""
_STATES = {"held": KvState.HELD, "expired": KvState.EXPIRED, "lost": KvState.LOST}


class ChannelPeer(asyncio.Protocol):
    """One connection. `heard` gets each line as words, `lost` is called at its end."""

    def __init__(
        self,
        heard: Callable[[ChannelPeer, list[str]], None],
        lost: Callable[[ChannelPeer], None],
        made: Callable[[ChannelPeer], None],
    ) -> None:
        self._made = made
        self.name = ""
        """For its owner: whose it is."""
        self._heard = heard
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # No isinstance: uvloop's transports are not asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._made(self)

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES or any(len(line) > MAX_LINE_BYTES for line in lines):
            self.close()
            return
        for line in lines:
            words = line.decode("utf-8", "replace").split(" ")
            self._heard(self, words)

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        self._lost(self)

    def say(self, *words: object) -> None:
        """Send a line, unless the other has gone."""
        if self._transport is not None:
            self._transport.write(" ".join(map(str, words)).encode() + b"\n")

    def close(self, *, at_once: bool = False) -> None:
        """What was said still goes out, unless it is to be at once."""
        if self._transport is not None:
            (self._transport.abort if at_once else self._transport.close)()


class Channel:
    """One server's end: where it listens, and whom it calls."""

    def __init__(self) -> None:
        self.port = 0
        self._server: asyncio.Server | None = None
        self._peers: set[ChannelPeer] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(
        self, host: str, port: int, heard: Callable[[ChannelPeer, list[str]], None], lost: Callable[[ChannelPeer], None]
    ) -> None:
        """Take calls from now on. Raises OSError."""

        self._server = await asyncio.get_running_loop().create_server(lambda: self.peer(heard, lost), host, port)
        self.port = self._server.sockets[0].getsockname()[1]

    def peer(self, heard: Callable[[ChannelPeer, list[str]], None], lost: Callable[[ChannelPeer], None]) -> ChannelPeer:
        """One that is closed with the channel, if it is connected then."""

        def gone(peer: ChannelPeer) -> None:
            self._peers.discard(peer)
            lost(peer)

        return ChannelPeer(heard, gone, self._peers.add)

    def call(self, host: str, port: int, peer: ChannelPeer, connected: Callable[[bool], None]) -> None:
        """Connect; `connected` is told whether that worked."""

        async def connect() -> None:
            try:
                await asyncio.get_running_loop().create_connection(lambda: peer, host, port)
            except (OSError, UnicodeError, OverflowError):
                connected(False)
            else:
                connected(True)

        self.run(connect())

    def run(self, work: Coroutine[object, object, None]) -> None:
        """Do what ends with the channel."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Listen and call no more. May be called twice."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for peer in list(self._peers):
            peer.close(at_once=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSING_S):
                while self._peers:  # noqa: ASYNC110 - it takes a turn or two
                    await asyncio.sleep(0)


@dataclass(frozen=True, slots=True)
class ReadTimeouts:
    """How long a reader waits; seconds."""

    reply_s: float
    """For the word that the KV is held, or not."""
    refused_s: float
    """Until a connection that cannot be made counts as failed."""
    lease_s: float | None = None
    """The lease that it renews, in seconds; None = it renews none."""


class RemoteKv:
    """The KV of one request's prompt at another server: a `KvSource` for the engine."""

    def __init__(
        self,
        channel: Channel,
        address: tuple[str, int],
        claim: tuple[object, ...],
        patience: ReadTimeouts,
        *,
        recompute: bool = False,
    ) -> None:
        """`claim`: the first line."""
        self.recompute = recompute
        self.state = KvState.PENDING
        self.changed: Callable[[], None] | None = None
        """Called when the state changes."""
        self.cached_tokens: int | None = None
        """Cached tokens of the prefill, if the other server tells."""
        self._channel = channel
        self._claim = claim
        self._address = address
        self._patience = patience
        self._last_word: str | None = None
        self._peer: ChannelPeer | None = None
        self._is_connected = self._is_over = False
        self._timer: asyncio.TimerHandle | None = None
        self._beats: asyncio.TimerHandle | None = None

    def call(self) -> None:
        """Ask the other server. May be called again."""
        if self._peer is None and not self._is_over:
            self._connect(self._address)

    def _connect(self, address: tuple[str, int]) -> None:
        self._peer = self._channel.peer(self._heard, self._lost)
        if not self._is_over:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._patience.reply_s, self._become, KvState.LOST)
        self._channel.call(*address, self._peer, self._connected)

    def begin(self, *, now: float) -> None:
        """Ask, unless that was done before."""
        self.call()

    def finish(self, *, now: float, was_read: bool) -> None:
        """Let the other free it, now or as soon as it can be told. May be called again: only the first time counts."""
        if self._is_over:
            return
        self.abandon(now=now)
        self._last_word = "done" if was_read else "drop"
        if self._is_connected:
            self._say_last_word()

    def abandon(self, *, now: float) -> None:
        """No heartbeat any more."""
        self._is_over = True
        self._stop_timers()

    def _say_last_word(self) -> None:
        assert self._peer is not None
        if self._last_word is not None:
            self._peer.say(self._last_word)
        self._peer.close()

    def _stop_timers(self) -> None:
        for timer in (self._timer, self._beats):
            if timer is not None:
                timer.cancel()
        self._timer = self._beats = None

    def _connected(self, well: bool) -> None:
        if not well:
            if not self._is_over:
                self._stop_timers()
                self._timer = asyncio.get_running_loop().call_later(
                    self._patience.refused_s, self._become, KvState.LOST
                )
            return
        assert self._peer is not None
        self._is_connected = True
        self._peer.say(*self._claim)
        if self._is_over:
            self._say_last_word()
        elif self._patience.lease_s is not None:
            self._beat(self._patience.lease_s / HEARTBEATS)

    def _beat(self, every_s: float) -> None:
        assert self._peer is not None
        self._peer.say("beat")
        self._beats = asyncio.get_running_loop().call_later(every_s, self._beat, every_s)

    def _heard(self, peer: ChannelPeer, words: list[str]) -> None:
        if words[0] not in _STATES:
            peer.close()
            return
        if len(words) > 1 and words[1].isdecimal():
            self.cached_tokens = int(words[1])
        if self._timer is not None:
            self._timer.cancel()
        self._become(_STATES[words[0]])

    def _lost(self, _peer: ChannelPeer) -> None:
        if not self._is_over and self.state in (KvState.PENDING, KvState.HELD):
            self._become(KvState.LOST)

    def _become(self, state: KvState) -> None:
        self.state = state
        if self.changed is not None and not self._is_over:
            self.changed()


class DecodeLeg(Leg):
    """The half of a call that computes the response, from KV at other servers."""

    _sources: Sequence[RemoteKv] = ()

    def watch(self, index: int, source: KvSource, poke: Callable[[], None]) -> None:
        """When the other server has replied."""
        if isinstance(source, RemoteKv):
            source.changed = poke

    def close(self) -> None:
        """Of a call that was refused before the engine had it, the prefill is told at once, too."""
        now = asyncio.get_running_loop().time()
        for source in self._sources:
            source.finish(now=now, was_read=False)
