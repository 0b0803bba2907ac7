# SPDX-License-Identifier: Apache-2.0
"""One request on a client's connection: an exchange that responds through the front end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.proxy.exchange.exchange import Exchange
from lbproxy.proxy.exchange.exchanger import Exchanger
from lbproxy.proxy.exchange.steps import FINISHED
from lbproxy.proxy.front.connection import ClientConnection
from lbproxy.proxy.front.overload import Overload
from lbproxy.proxy.request.own_responses import json_response, no_content_response


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
        """Write a complete response of lbproxy itself."""

    @abstractmethod
    def refuse(
        self, client: ClientConnection, record: RequestRecord, error: LbError, *, keep_alive: bool, cors: str
    ) -> bool:
        """Write an error of lbproxy itself; returns whether the connection lives on."""


class Turn(Exchange):
    """One request on a client's connection, from its head until its record is emitted."""

    held_bytes: int = 0
    """Bytes of its body that are counted in `Overload`."""

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
        client.turn = self
        front.turn_began()

    def _refuse(self, error: LbError) -> bool:
        return self._front.refuse(
            self._client_connection, self.record, error, keep_alive=self.keep_alive, cors=self.cors
        )

    def _body_released(self) -> None:
        self._front.overload.release(self)

    def respond(self, status: int, body: bytes, *, allow: str | None = None) -> None:
        """End with a response of lbproxy itself, unless it is finished. `allow`: the methods that are allowed here."""
        if self.step is not FINISHED:
            self.record.status, self.record.outcome = status, Outcome.COMPLETED
            keep_alive = self.keep_alive and self._client_connection.request_is_read
            fields = {"x-request-id": self.record.request_id} | ({} if allow is None else {"allow": allow})
            response = json_response(status, body, fields, keep_alive=keep_alive, more=self.cors)
            self._front.write(self._client_connection, self.record, response)
            self.finish(keep_alive)

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

    def _ended(self, reusable: bool) -> None:
        if self.held_bytes:
            self._front.overload.release(self)
        self._client_connection.turn = None
        try:
            self._front.turn_ended(self.record)
        finally:
            self._on_ended(reusable)
