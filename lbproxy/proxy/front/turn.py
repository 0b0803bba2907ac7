# SPDX-License-Identifier: Apache-2.0
"""One request on a client's connection: an exchange that responds through the front end."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.requests.models import Allowed
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.proxy.exchange.exchange import Exchange
from lbproxy.proxy.exchange.exchanger import Exchanger
from lbproxy.proxy.exchange.relay import CUTS
from lbproxy.proxy.exchange.steps import FINISHED
from lbproxy.proxy.front.connection import ClientConnection
from lbproxy.proxy.front.overload import Overload
from lbproxy.proxy.request.client_request import ClientRequest
from lbproxy.proxy.request.own_responses import json_head, no_content_response
from lbproxy.proxy.request.reading import LargeFacts

PIECE_BYTES: Final = 64 << 10
"""A piece of a body of lbproxy itself that is written at a time; most bodies are smaller."""


class Front(ABC):
    """What requests share (`proxy.front.requests`), as a turn needs it."""

    exchanger: Exchanger
    overload: Overload

    @abstractmethod
    def turn_began(self) -> None:
        """Count one more running request."""

    @abstractmethod
    def turn_ended(self, record: RequestRecord) -> None:
        """Count one running request less, and emit its record."""

    @abstractmethod
    def write(self, client: ClientConnection, record: RequestRecord, response: bytes) -> None:
        """Write a complete response of lbproxy itself, or a part of one."""

    @abstractmethod
    def allowed(self, request: ClientRequest, record: RequestRecord) -> tuple[Allowed, ...]:
        """The models that the client of a request may name: see RequestReader."""

    @abstractmethod
    def refuse(
        self, client: ClientConnection, record: RequestRecord, error: LbError, *, keep_alive: bool, cors: str
    ) -> bool:
        """Write an error of lbproxy itself; returns whether the connection lives on."""


class Turn(Exchange):
    """One request on a client's connection, from its head until its record is emitted."""

    held_bytes: int = 0
    """Bytes of its body that are counted in `Overload`."""
    reading: asyncio.Future[tuple[ClientRequest, LargeFacts]] | None
    """Its large body is read in turns of the loop."""
    _rest: bytes = b""
    """The body of a response of lbproxy itself that goes out in pieces, as the client reads: all clients share it."""
    _rest_at: int = 0
    """How much of it went out."""
    _keeps: bool = False
    """Whether its head says that the connection lives on."""

    def __init__(
        self,
        front: Front,
        client: ClientConnection,
        record: RequestRecord,
        ended: Callable[[bool], None],
        *,
        keep_alive: bool,
    ) -> None:
        """`ended` is called once, with whether the connection lives on."""
        Exchange.__init__(self, front.exchanger, client, record, keep_alive=keep_alive)  # super() costs as much again
        self._front = front
        self._client_connection = client
        self._on_ended = ended
        self.reading = None  # in the class mypyc ignores None for such unions
        client.turn = self
        front.turn_began()

    def _refuse(self, error: LbError) -> bool:
        return self._front.refuse(
            self._client_connection, self.record, error, keep_alive=self.keep_alive, cors=self.cors
        )

    def hold(self, size: int) -> bool:
        try:
            self._front.overload.hold(self, size)
        except LbError:
            return False
        return True

    def _body_released(self) -> None:
        self._front.overload.release(self)

    def respond(self, status: int, body: bytes, *, allow: str | None = None) -> None:
        """End with a response of lbproxy itself, unless it is finished: now, or when the client has read enough of it.
        `allow`: the methods that are allowed here.
        """
        if self.step is not FINISHED:
            self.record.status, self.record.outcome = status, Outcome.COMPLETED
            self._keeps = self.keep_alive and self._client_connection.request_is_read
            fields = {"x-request-id": self.record.request_id} | ({} if allow is None else {"allow": allow})
            head = json_head(status, len(body), fields, keep_alive=self._keeps, more=self.cors)
            if self.record.method == "HEAD":
                body = b""
            self._rest, self._rest_at = body, PIECE_BYTES
            self._front.write(self._client_connection, self.record, head + body[:PIECE_BYTES])
            self._go_on()

    def _go_on(self) -> None:
        """A piece was written: the next one follows in another turn of the loop, which knows if the client reads."""
        if self._rest_at < len(self._rest):
            self._shared.runtime.loop.call_soon(self._write_more)
        else:
            self._rest = b""
            self.finish(self._keeps)

    def _write_more(self) -> None:
        if self._rest and not self._client_connection.writing_paused:
            piece = self._rest[self._rest_at : self._rest_at + PIECE_BYTES]
            self._rest_at += PIECE_BYTES
            self._front.write(self._client_connection, self.record, piece)
            self._go_on()

    def resume(self) -> None:
        if self._rest:
            self._write_more()
        else:
            Exchange.resume(self)

    def cut(self, why: Outcome) -> None:
        """See Exchange. Of a response of lbproxy itself a part was written: it ends before its length."""
        if self._rest and self.step is not FINISHED:
            self.record.outcome = CUTS[why][0]
            transport = self._client_connection.transport
            self.finish(False)
            if transport is not None:
                transport.abort()
        else:
            Exchange.cut(self, why)

    def respond_to_preflight(self, cors: str) -> None:
        """End with a response to a preflight request, unless it is finished. `cors`: field lines, each with its
        CRLF.
        """
        if self.step is not FINISHED:
            self.record.status, self.record.outcome = 204, Outcome.COMPLETED
            keep_alive = self.keep_alive and self._client_connection.request_is_read
            response = no_content_response(f"x-request-id: {self.record.request_id}\r\n{cors}", keep_alive=keep_alive)
            self._front.write(self._client_connection, self.record, response)
            self.finish(keep_alive)

    def received(self, data: bytes) -> None:
        """Never called: only the client of a WebSocket sends during its request."""
        raise AssertionError("no WebSocket")

    def is_unread(self) -> None:
        """Never called, likewise."""
        raise AssertionError("no WebSocket")

    def _ended(self, reusable: bool) -> None:
        self._rest = b""
        if self.reading is not None:
            self.reading.cancel()
        if self.held_bytes:
            self._front.overload.release(self)
        self._client_connection.turn = None
        try:
            self._front.turn_ended(self.record)
        finally:
            self._on_ended(reusable)
