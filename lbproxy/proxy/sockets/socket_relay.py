# SPDX-License-Identifier: Apache-2.0
"""A WebSocket between a client and an endpoint: frames both ways, and one end for both.

Theory of operation. Each frame is passed on as soon as it is complete, with its opcode, its FIN bit and its payload
unchanged; only the mask differs. So fragments stay fragments, pings and pongs are the peers' own, and a message may be
larger than what lbproxy holds. A large frame becomes fragments as it arrives, so that nearly nothing of it is held. As
no frame is sent in parts, a close frame of lbproxy can follow any frame.

    stage     event                                                             next stage
    OPEN      a close frame of one side was passed on                           CLOSING
    CLOSING   that of the other too, or it did not arrive within `CLOSE_S`      FINISHED
    any       a side is lost, sends invalid frames, responds to no ping;        FINISHED
              lbproxy stops, or has no memory

Invariants:

- A side is read only while the other one reads what it is sent, and once all that was read of it is passed on: a
  portion at once, the rest in later turns of the loop (`net.connections.backlog`).
- Each side gets one close frame, unless its connection is lost; nothing follows it.
- Nothing is retried: messages cannot be sent again by lbproxy.
"""

from __future__ import annotations

import asyncio
import secrets
import select
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Final, Protocol, TypeVarTuple

from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.requests.outcome import Outcome
from lbproxy.driver.request_runtime import RequestRuntime
from lbproxy.net.connections.backlog import Walker
from lbproxy.proxy.exchange.relay import PROGRESS_S
from lbproxy.proxy.sockets import frames
from lbproxy.proxy.sockets.frames import (
    DATA,
    Frame,
    FrameError,
    FrameReader,
    close_frame,
    is_close,
    is_pong,
    ping_frame,
)
from lbproxy.proxy.sockets.own_models import OwnModels
from lbproxy.proxy.sockets.served import ServedMessages

_GONE: Final = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
"""Not every system tells that the peer sends nothing more."""
PORTION_BYTES: Final = 64 << 10
"""What is passed on of one side in a turn of the event loop: about 0.2 ms."""
FRAME_BYTES: Final = 4 << 10
"""What a frame costs besides its payload."""
CLOSE_S: Final = 10.0
"""How long a side may take to respond to a close frame with its own: the time-out of the library `websockets`."""
PONG_S: Final = 20.0
"""How long a side may take to respond to our ping: likewise."""
_CUTS: Final = {
    Outcome.DRAINING: (Outcome.CUT, frames.GOING_AWAY, "the load balancer is stopping"),
    Outcome.OVERLOADED: (Outcome.OVERLOADED, frames.TRY_AGAIN_LATER, "the load balancer is out of resources"),
}
"""How it ends, and what the client is told."""


class Side:
    """One of the two peers of a relayed WebSocket: a client or an endpoint. It is read only as long as the other side
    reads what it is sent.
    """

    def __init__(self, transport: Callable[[], asyncio.Transport | None], *, masked: bool, max_bytes: int) -> None:
        """`transport`: None once it is lost. `masked`: its frames are, so it is a client. `max_bytes`: of a frame."""
        self.reader = FrameReader(masked=masked, max_bytes=max_bytes)
        self.heard_at = 0.0
        """When something last arrived from it."""
        self.is_full = False
        """Its buffer is full."""
        self.has_backlog = False
        """Frames of it arrived that were not passed on yet."""
        self.close_received = False
        """Its close frame was passed on."""
        self.close_sent = False
        """A close frame was sent to it, ours or the other side's."""
        self.is_paused = False
        """It is not read."""
        self.go_on: Callable[[], None] = lambda: None
        """Passes more of what arrived on."""
        self._transport = transport
        self._masks = not masked

    def walk_on(self) -> None:
        self.go_on()

    def send(self, frame: Frame) -> int:
        """Write a frame, if the connection is open. Returns its size in bytes."""
        data = frame.serialize(mask=self._masks)
        transport = self._transport()
        if transport is None or transport.is_closing():
            return 0
        transport.write(data)
        return len(data)

    def read(self, wanted: bool) -> None:
        """Read from it from now on, or do not."""
        transport = self._transport()
        if self.is_paused is not wanted or transport is None or transport.is_closing():
            return
        self.is_paused = not wanted
        if wanted:
            transport.resume_reading()
        else:
            transport.pause_reading()

    def abort_if_gone(self) -> bool:
        """Abort the connection if its peer has closed it, which is not noticed while nothing is read. Returns whether
        that was done, or it is closed.
        """
        transport = self._transport()
        if transport is None or transport.is_closing():
            return True
        look = select.poll()
        look.register(transport.get_extra_info("socket"), _GONE)
        if not look.poll(0):
            return False
        transport.abort()
        return True


Arguments = TypeVarTuple("Arguments")


class SocketOwner(Protocol):
    """The owner of a WebSocket relay."""

    def guarded(self, step: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        """Run a step; nothing above handles its exceptions. If it raises, that is a defect, and ends everything."""

    def progress(self, tokens: int) -> None:
        """Report more tokens of the endpoint's responses, as far as known; at most every `PROGRESS_S`."""

    def walk_later(self, walker: Walker) -> None:
        """Have it walk on in a later turn of the loop."""

    def end_server(self, *, at_once: bool) -> None:
        """Close the endpoint's connection, when everything is sent or `at_once`."""

    def socket_ended(self, outcome: Outcome, *, timed_out: bool) -> None:
        """Called once: it has ended, and the client has its close frame. Not called after `release`."""


class SocketStage(Enum):
    """See the module."""

    OPEN = "open"
    CLOSING = "closing"
    FINISHED = "over"


class SocketRelay:
    """One WebSocket, from the 101 on."""

    def __init__(
        self,
        client: Side,
        server: Side,
        runtime: RequestRuntime,
        record: RequestRecord,
        idle_s: float,
        owner: SocketOwner,
    ) -> None:
        """`idle_s`: after this time without a byte from either side, both are pinged."""
        self.client = client
        self.server = server
        self.stage = SocketStage.OPEN
        self.own_models: OwnModels | None = None
        """What the client may name; None: every model."""
        self._runtime = runtime
        self._record = record
        self._owner = owner
        self._idle_s = idle_s
        self._ping = b""
        """The payload of our ping, while it is out."""
        self._asks_at = 0.0
        """When a client that is not read may be sent a ping again."""
        self.served = ServedMessages()
        """What the endpoint's messages took."""
        self._progress_at = 0.0
        self._lost: str | None = None
        """Why the endpoint's connection was lost, before all that came of it was passed on."""
        for side in (client, server):
            side.go_on = partial(owner.guarded, self._walk_on, side)
        client.heard_at = server.heard_at = self._armed_at = runtime.now()
        self._timer = runtime.loop.call_later(idle_s, self._on_timer)

    @property
    def is_finished(self) -> bool:
        """It has ended; nothing is passed on any more."""
        return self.stage is SocketStage.FINISHED

    # Received from the two sides

    def from_client(self, data: bytes) -> None:
        """The next bytes of the client."""
        self._record.request_bytes += len(data)
        self._take(self.client, data)

    def from_server(self, data: bytes) -> None:
        """The next bytes of the endpoint."""
        self._take(self.server, data)
        now = self._runtime.now()
        if now >= self._progress_at:
            self._progress_at = now + PROGRESS_S
            self._report_progress()

    def write_paused(self, side: Side) -> None:
        """The buffer of this side is full."""
        side.is_full = True
        self._read(self._other(side))

    def write_resumed(self, side: Side) -> None:
        """The buffer of this side has room again."""
        side.is_full = False
        other = self._other(side)
        if other.has_backlog:
            self._owner.walk_later(other)
        self._read(other)

    def server_lost(self, problem: str) -> None:
        """The endpoint's connection is closed or broken."""
        if self.is_finished:
            return
        if self.server.has_backlog:
            self._lost = problem
        elif self.server.close_received or self.client.close_received:
            self._send_close(self.client, frames.NORMAL, "")
            self._end(Outcome.COMPLETED)
        else:
            self._record.error = problem
            self._send_close(self.client, frames.INTERNAL_ERROR, "the connection to the model server was lost")
            self._end(Outcome.UPSTREAM_BROKE)

    def find_gone_client(self) -> None:
        """Ask a client of which nothing is read for long; abort its connection if it has gone. Its host tells that only
        when it is sent something: its own end waits behind all that was not read.
        """
        client, now = self.client, self._runtime.now()
        if not client.abort_if_gone() and now >= self._asks_at and not client.close_sent:
            self._asks_at = now + PONG_S
            self._record.response_bytes += client.send(ping_frame(b""))  # a pong that nobody asked for means nothing

    def cut(self, why: Outcome) -> None:
        """lbproxy stops (DRAINING) or has no memory (OVERLOADED)."""
        if not self.is_finished:
            outcome, code, reason = _CUTS[why]
            self._send_close(self.client, code, reason)
            self._send_close(self.server, frames.GOING_AWAY, reason)
            self._end(outcome)

    def release(self) -> None:
        """The client is lost, or a defect ends everything. `socket_ended` is not called."""
        if not self.is_finished:
            self._send_close(self.client, frames.INTERNAL_ERROR, "the load balancer failed")
            self._send_close(self.server, frames.GOING_AWAY, "the client left")
            self._close()

    # Frames

    def _take(self, side: Side, data: bytes) -> None:
        if self.is_finished or side.close_received:
            return  # RFC 6455, section 5.5.1: nothing follows a close frame
        if data:
            side.heard_at = self._runtime.now()
        left = PORTION_BYTES
        try:
            for frame in side.reader.feed(data):
                if not self._pass(side, frame):
                    return
                left -= FRAME_BYTES + len(frame.data)
                if left <= 0:
                    break
        except FrameError as error:
            self._malformed(side, error)
            return
        if left <= 0 and side.reader.held_bytes:
            side.has_backlog = True
            self._owner.walk_later(side)
        self._read(side)

    def _pass(self, side: Side, frame: Frame) -> bool:
        """Pass one frame to the other side. Returns whether more may follow from this one."""
        if self._ping and is_pong(frame, self._ping):
            return True
        if side is self.server:
            self._record.response_bytes += self.client.send(frame)
            if frame.opcode in DATA:
                self._note_message(frame)
        else:
            if self.own_models is not None:
                self.own_models.check(frame)
            self.server.send(frame)
        if not is_close(frame):
            return True
        side.close_received = self._other(side).close_sent = True
        if self._other(side).close_received:
            self._end(Outcome.COMPLETED)
        else:
            self._note_close(side, frame)
            self.stage = SocketStage.CLOSING
            self._arm(CLOSE_S)
        return False

    def _note_message(self, frame: Frame) -> None:
        if self._record.first_byte_at is None:
            self._record.first_byte_at = self._runtime.now()
        self.served.note(frame)

    def _note_close(self, side: Side, frame: Frame) -> None:
        """Log an endpoint that closes for a reason of its own. The text of the reason may contain parts of the
        prompt.
        """
        code = frames.close_code(frame)
        if side is self.server and code not in {None, frames.NORMAL, frames.GOING_AWAY}:
            self._record.error = f"the endpoint closed the WebSocket with code {code}"

    def _walk_on(self, side: Side) -> None:
        """Pass more of what was read on; `write_resumed` has it walk on if the other side is full."""
        if not side.has_backlog or (self._other(side).is_full and self.stage is SocketStage.OPEN):
            return
        side.has_backlog = False
        self._take(side, b"")
        if self._lost is not None and not self.server.has_backlog:
            self.server_lost(self._lost)

    def _malformed(self, side: Side, error: FrameError) -> None:
        if side is self.client:
            self._record.error = f"the client broke the protocol: {error}"
            self._send_close(self.client, error.code, str(error))
            self._send_close(self.server, frames.GOING_AWAY, "the client broke the protocol")
            self._end(Outcome.BAD_REQUEST)
        else:
            self._record.error = f"the endpoint broke the protocol: {error}"
            self._send_close(self.client, frames.INTERNAL_ERROR, "the model server broke the protocol")
            self._send_close(self.server, error.code, str(error))
            self._end(Outcome.UPSTREAM_BROKE)

    # Back-pressure

    def _other(self, side: Side) -> Side:
        return self.server if side is self.client else self.client

    def _read(self, side: Side) -> None:
        side.read(not (self._other(side).is_full or side.has_backlog))

    # Time

    def _arm(self, seconds: float) -> None:
        self._timer.cancel()
        self._armed_at = self._runtime.now()
        self._timer = self._runtime.loop.call_later(seconds, self._on_timer)

    def _on_timer(self) -> None:
        self._owner.guarded(self._timer_fired)

    def _timer_fired(self) -> None:
        now = self._runtime.now()
        if self.stage is SocketStage.CLOSING:
            self._send_close(self.client, frames.NORMAL, "")
            self._end(Outcome.COMPLETED)
        elif self._runtime.pulse.stood_still_since(self._armed_at):
            self._arm(PONG_S)  # received frames may be unread
        elif self._ping:
            self._judge_silence()
        elif (left_s := max(self.client.heard_at, self.server.heard_at) + self._idle_s - now) > 0.0:
            self._arm(left_s)
        else:
            self._ping = secrets.token_bytes(8)
            self._record.response_bytes += self.client.send(ping_frame(self._ping))
            self.server.send(ping_frame(self._ping))
            self._arm(PONG_S)

    def _judge_silence(self) -> None:
        """Both were pinged: a side that sent nothing since is considered dead. One that is not read is not."""
        self._ping = b""
        silent = [one for one in (self.server, self.client) if one.heard_at < self._armed_at and not one.is_paused]
        if not silent:
            self._arm(self._idle_s)
        elif silent[0] is self.server:
            self._record.error = f"silent for {self._idle_s:g} s, and no answer to a ping within {PONG_S:g} s"
            self._send_close(self.client, frames.INTERNAL_ERROR, "the model server does not answer")
            self._end(Outcome.UPSTREAM_BROKE, timed_out=True)
        else:
            self._record.error = "the client did not answer a ping"
            self._send_close(self.server, frames.GOING_AWAY, "the client does not answer")
            self._end(Outcome.CLIENT_CLOSED)

    # The end

    def _send_close(self, side: Side, code: int, reason: str) -> None:
        """Send a close frame of lbproxy, unless one was sent there before."""
        if not side.close_sent:
            side.close_sent = True
            sent = side.send(close_frame(code, reason))
            if side is self.client:
                self._record.response_bytes += sent

    def _end(self, outcome: Outcome, *, timed_out: bool = False) -> None:
        self._close()
        self._owner.socket_ended(outcome, timed_out=timed_out)

    def _close(self) -> None:
        self.stage = SocketStage.FINISHED
        self._timer.cancel()
        self.client.reader.discard()
        self.server.reader.discard()
        self._report_progress()
        self._owner.end_server(at_once=self.server.is_full)

    def _report_progress(self) -> None:
        tokens = self.served.take()
        if tokens:
            self._owner.progress(tokens)
