# SPDX-License-Identifier: Apache-2.0
"""A turn that asks for a WebSocket: an exchange like any other up to a 101, and a relay of frames after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVarTuple, cast

from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import Usage
from lbproxy.core.requests.retry import FailureKind, UpstreamError
from lbproxy.net.connections.backlog import Walker
from lbproxy.net.connections.h1 import ResponseHead
from lbproxy.net.connections.pool import Connection
from lbproxy.proxy.exchange.steps import FINISHED, SWITCHED
from lbproxy.proxy.front.connection import ClientConnection
from lbproxy.proxy.front.turn import Front, Turn
from lbproxy.proxy.request.handshake import SWITCH, switch_problem
from lbproxy.proxy.request.headers import client_head
from lbproxy.proxy.sockets.own_models import OwnModels
from lbproxy.proxy.sockets.server_end import ServerEnd
from lbproxy.proxy.sockets.socket_relay import Side, SocketRelay

Arguments = TypeVarTuple("Arguments")


class SocketTurn(Turn):
    """One request for a WebSocket, until that is closed; the `SocketOwner` of its relay. Any response other than a 101
    is relayed like the response to any request; the client's connection ends with it.
    """

    _socket: SocketRelay | None = None
    _server_end: ServerEnd | None = None
    """Both set while SWITCHED."""

    def __init__(
        self, front: Front, client: ClientConnection, record: RequestRecord, ended: Callable[[bool], None]
    ) -> None:
        Turn.__init__(self, front, client, record, ended, keep_alive=False)
        self.switches = True

    # net.connections.pool.Receiver

    def head(self, head: ResponseHead) -> None:
        if head.status != 101:
            Turn.head(self, head)
            return
        connection = self._work
        assert isinstance(connection, Connection)
        problem = switch_problem(head, self.request.fields)
        if problem is not None:
            connection.abort()
            self.broke(UpstreamError(FailureKind.PROTOCOL, f"{connection.origin}: {problem}"))
        else:
            self.guarded(self._switch, head, connection)

    def _switch(self, head: ResponseHead, connection: Connection) -> None:
        """Switch to a WebSocket. The first byte is reported at once: the endpoint may wait for a message of the
        client.
        """
        self._enter(SWITCHED)
        shared, client, record = self._shared, self._client_connection, self.record
        self._server_end = end = ServerEnd(connection, self)
        assert self._ticket is not None
        shared.conceal(head, self._ticket.placed_state.endpoint)
        response = client_head(head, self._own_fields() + SWITCH, chunked=False, keep_alive=True)
        record.status = 101
        record.response_bytes = len(response)
        assert client.transport is not None, "a lost client ends its exchange"
        client.transport.write(response)
        shared.runtime.first_byte(self._ticket)
        max_bytes = shared.settings.limits.json_body
        there = Side(lambda: client.transport, masked=True, max_bytes=max_bytes)
        there.is_full = client.writing_paused
        here = Side(lambda: cast(asyncio.Transport | None, end.transport), masked=False, max_bytes=max_bytes)
        self._socket = end.relay = relay = SocketRelay(
            there, here, shared.runtime, record, shared.limits.silence_s, self
        )
        if allowed := self._front.allowed(self.request, record):
            relay.own_models = OwnModels(allowed)
        early = client.switch()
        if end.early:
            relay.from_server(end.early)
        if early:
            relay.from_client(early)

    # The client

    def received(self, data: bytes) -> None:
        if self._socket is not None:
            self.guarded(self._socket.from_client, data)

    def is_unread(self) -> None:
        """See connection.CurrentRequest."""
        if self._socket is not None:
            self.guarded(self._socket.find_gone_client)

    def pause(self) -> None:
        if self._socket is not None:
            self.guarded(self._socket.write_paused, self._socket.client)
        else:
            Turn.pause(self)

    def resume(self) -> None:
        if self._socket is not None:
            self.guarded(self._socket.write_resumed, self._socket.client)
        else:
            Turn.resume(self)

    def client_disconnected(self) -> None:
        """See Exchange. A client that sent a close frame, or got one, has not broken anything."""
        socket = self._socket
        if self.step is SWITCHED and socket is not None and (socket.client.close_received or socket.client.close_sent):
            socket.release()
            self.socket_ended(Outcome.COMPLETED, timed_out=False)
        else:
            Turn.client_disconnected(self)

    def cut(self, why: Outcome) -> None:
        if self._socket is None or self.step is not SWITCHED:
            Turn.cut(self, why)
        else:
            self._socket.cut(why)
            self._client_connection.linger()  # a close now could be a reset, and overtake the close frame

    def _release_work(self) -> None:
        if self._socket is not None:
            self._socket.release()
        else:
            Turn._release_work(self)

    def _used_so_far(self, outcome: Outcome) -> Usage | None:
        if self._socket is None:
            return Turn._used_so_far(self, outcome)
        self.record.usage = usage = self._socket.served.usage
        return usage

    # socket_relay.SocketOwner

    def progress(self, tokens: int) -> None:
        assert self._ticket is not None
        self._shared.runtime.progress(self._ticket, tokens)

    def walk_later(self, walker: Walker) -> None:
        self._shared.connections.backlog.add(walker)

    def end_server(self, *, at_once: bool) -> None:
        if self._server_end is not None:
            self._server_end.close(at_once=at_once)

    def socket_ended(self, outcome: Outcome, *, timed_out: bool) -> None:
        assert self._ticket is not None
        if self.step is not FINISHED:
            self.record.outcome = outcome
            self._shared.runtime.close(self._ticket, outcome, self._used_so_far(outcome), timed_out=timed_out)
            self.finish(False)
