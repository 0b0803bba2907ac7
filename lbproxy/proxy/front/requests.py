# SPDX-License-Identifier: Apache-2.0
"""Requests of all clients' connections: what they share, how one begins, and how it is counted at its end.

Apart from the front end, as this is compiled: a request passes through it five times, which cost as much as interpreted
code as the decision where it goes. Invariant: every turn that began ends once, and leaves one record.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Sequence
from typing import Final

from lbproxy.config.sections.cors import ANY_ORIGIN
from lbproxy.config.tree import Settings
from lbproxy.core.observed.record import MAX_PATH_CHARS, SUFFIX_CHARS, RequestRecord
from lbproxy.core.observed.trace import Sampling
from lbproxy.core.requests.models import Allowed
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.driver.request_runtime import RequestRuntime
from lbproxy.net.listening.sites import is_cross_origin, is_loopback_name, name_of
from lbproxy.proxy.exchange.exchanger import LARGE_BODY_BYTES, Exchanger
from lbproxy.proxy.exchange.steps import FINISHED
from lbproxy.proxy.front.bodies import ArrivingBody, LaneBody, is_large, read_large
from lbproxy.proxy.front.connection import ClientConnection
from lbproxy.proxy.front.overload import Overload
from lbproxy.proxy.front.turn import Front, Turn
from lbproxy.proxy.request.client_request import ClientRequest
from lbproxy.proxy.request.cors import Cors
from lbproxy.proxy.request.forwarding import Forwarding
from lbproxy.proxy.request.headers import RequestFields
from lbproxy.proxy.request.keys import KeyRing
from lbproxy.proxy.request.own_responses import error_response
from lbproxy.proxy.request.reading import LargeFacts, RequestReader
from lbproxy.proxy.request.routes import HEALTH_PATH

LISTS_S: Final = 0.05
"""Between two looks whether the first lists of models are read."""
ID_CHARS: Final = 24
"""The id of a request whose client gives it none: 96 random bits."""
_DRAWN_BYTES: Final = 3072
"""For 256 of them: a call of the system costs more than all else."""
MAX_KNOWN: Final = 256
"""Pairs of host and origin that are remembered: a handful of programs, or who tries many."""
_WRONG_HOST: Final = (
    "Without API keys, this address of lbproxy serves requests for localhost and loopback addresses only, and the Host "
    "of this one is another name. If it is lbproxy's, add it to listen.allowed_hosts."
)
_WRONG_ORIGIN: Final = (
    "Without API keys, this address of lbproxy refuses requests of web pages of other origins. If this page may use "
    "it, add its origin to cors.origins."
)


class Requests(Front):
    """What requests share. One for each FrontEnd, which owns it."""

    def __init__(
        self, settings: Settings, runtime: RequestRuntime, exchanger: Exchanger, rng: random.Random, overload: Overload
    ) -> None:
        self.overload = overload
        self.keys: KeyRing | None = None
        """Each request must carry one of these; None = not required."""
        self.sampling: Sampling | None = None
        """Which requests are traced; None = none, and clients' trace fields are passed on."""
        self.last = False
        """Connections are not kept alive any more."""
        self.draining = False
        """New requests are refused."""
        self.local = LocalRequests()
        """What is served where only this machine connects; the owner says whether it does."""
        self.running = 0
        """Requests that were read and have no complete response yet."""
        self.on_idle: Callable[[], None] | None = None
        """Called when the last running request ended; None: nobody waits for that."""
        self._runtime = runtime
        self._rng = rng
        self._ids = _Ids()
        self.reconfigure(settings, exchanger)

    def reconfigure(self, settings: Settings, exchanger: Exchanger) -> None:
        """Apply other settings to requests that begin from now on."""
        self.exchanger = exchanger
        self.reading = RequestReader(settings, self._runtime, exchanger.model_rules)
        self.local.reconfigure(settings.listen.allowed_hosts, settings.cors.origins)
        self.cors: Cors | None = Cors(settings.cors.origins) if settings.cors.origins else None
        """None = the settings allow no origins."""
        self.forwarding = Forwarding(settings.forwarded, settings.trusted_proxies, self._ids.instance)

    # A request

    def serve_plain(self, plain: ClientRequest, client: ClientConnection, length: int = 0) -> None:
        """Serve a request of the fast lane: see connection.ConnectionOwner."""
        target = plain.target
        record = self.new_record("POST", target.partition("?")[0] if "?" in target else target, client)
        self.note_id(record, plain.fields.request_id)
        turn = Turn(
            self, client, record, client.lane_ended, keep_alive=not (self.last or self.overload.memory_is_short)
        )
        try:
            if self.cors is not None:
                turn.cors = self.cors.fields_for(plain.fields.origin)
            if self.sampling is not None:
                record.trace, trace = self.sampling.begin(plain.trace)
                plain = plain._replace(trace=trace)
            if self.keys is not None:
                record.key = self.keys.name_of(plain.credentials)
                plain = plain._replace(credentials=b"")
            elif self.local.applies:
                self.local.require(plain.fields.host, plain.fields.origin)
            if length:
                self._await_body(plain, client, turn, length)
            elif self.reading.waits_for_lists():
                self.after_lists(lambda: self.begin(plain, turn))
            else:
                self.start_exchange(plain, turn)
        except LbError as error:
            turn.refuse(error)
        except Exception:  # noqa: BLE001 - logged there, with its traceback
            turn.defect()

    def _await_body(self, plain: ClientRequest, client: ClientConnection, turn: Turn, length: int) -> None:
        """Go on when the connection has received all of the body. Raises LbError."""
        if self.draining or self.overload.refuses is not None:
            raise self.refusal()

        def arrived(body: bytes) -> None:
            self.after_lists(lambda: self.begin(plain._replace(body=body), turn))

        first, plain = plain.body, plain._replace(body=b"")
        client.arriving = LaneBody(ArrivingBody(turn, self.overload, length, turn.refuse), arrived, turn.refuse)
        client.arriving.received(first)

    def begin(self, request: ClientRequest, turn: Turn) -> None:
        """Begin to serve a complete request, unless its client has gone; one with a large body is read in many turns of
        the loop before.
        """
        if turn.step is not FINISHED:
            turn.guarded(self._begin, request, turn)

    def _begin(self, request: ClientRequest, turn: Turn) -> None:
        if is_large(request):
            backlog = self.exchanger.connections.backlog
            turn.reading = read_large(request, self.reading, turn, self.overload, backlog)
            turn.reading.add_done_callback(lambda done: self._was_read(done, turn))
        else:
            self.start_exchange(request, turn)

    def _was_read(self, done: asyncio.Future[tuple[ClientRequest, LargeFacts]], turn: Turn) -> None:
        turn.reading = None
        error = None if done.cancelled() else done.exception()
        if done.cancelled() or turn.step is FINISHED:
            return
        if isinstance(error, LbError):
            turn.refuse(error)  # raised, it would refer to this, which refers to it
        else:
            turn.guarded(self._start_read, done, turn)

    def _start_read(self, done: asyncio.Future[tuple[ClientRequest, LargeFacts]], turn: Turn) -> None:
        sent, facts = done.result()
        self.start_exchange(sent, turn, facts)

    def after_lists(self, call: Callable[[], object]) -> None:
        """Call it when no model may be listed for the first time in a moment: see RequestReader.waits_for_lists."""
        if self.reading.waits_for_lists():
            self._runtime.loop.call_later(LISTS_S, self.after_lists, call)
        else:
            call()

    def start_exchange(self, request: ClientRequest, turn: Turn, large: LargeFacts | None = None) -> None:
        """Begin the exchange of a complete request. `large`: the content of its body, if that was read in turns.

        Raises LbError if nothing was sent.
        """
        record = turn.record
        record.route = request.route.name
        record.request_bytes = size = len(request.body)
        if request.fields.via:
            self.refuse_loop(request.fields.via)
        if self.draining or self.overload.refuses is not None:
            raise self.refusal()
        if size > LARGE_BODY_BYTES and not turn.held_bytes:
            self.overload.hold(turn, size)
        read, placed = self.reading.interpret(request, record, large)
        turn.start(read, placed)

    def refuse_pages(self, fields: RequestFields, path: str) -> None:
        """Raise LbError if a web page from elsewhere may have sent it, and nothing else keeps that out."""
        if self.local.applies and self.keys is None and path != HEALTH_PATH:
            self.local.require(fields.host, fields.origin)

    def refuse_loop(self, via: bytes) -> None:
        """Raise LbError if a request came from us."""
        if self.forwarding.is_loop(via):
            raise LbError(Outcome.LOOP)

    def refusal(self) -> LbError:
        """The error while no new requests are accepted."""
        return LbError(Outcome.DRAINING) if self.draining else self.overload.refusal()

    # turn.Front

    def turn_began(self) -> None:
        self.running += 1

    def turn_ended(self, record: RequestRecord) -> None:
        self.running -= 1
        if not self.running and self.on_idle is not None:
            self.on_idle()
        self.end(record)

    def end(self, record: RequestRecord) -> None:
        record.ended_at = self._runtime.now()
        if len(record.path) > MAX_PATH_CHARS:
            record.path = record.path[:MAX_PATH_CHARS]
        self._runtime.emit(record)

    def allowed(self, request: ClientRequest, record: RequestRecord) -> tuple[Allowed, ...]:
        return self.reading.allowed(request.fields, record)

    def refuse(
        self, client: ClientConnection, record: RequestRecord, error: LbError, *, keep_alive: bool, cors: str
    ) -> bool:
        # A body that was not read would be read as the next request, or the next request as the body.
        keep_alive = keep_alive and not error.outcome.value.close and client.request_is_read
        record.outcome, record.status = error.outcome, error.outcome.value.status
        self.write(client, record, error_response(error, record, keep_alive=keep_alive, rng=self._rng, more=cors))
        return keep_alive

    def write(self, client: ClientConnection, record: RequestRecord, response: bytes) -> None:
        """See turn.Front. Nothing if the client is gone."""
        if record.method == "HEAD":
            end = response.index(b"\r\n\r\n") + 4  # not in the slice: tests/test_compiled.py says why
            response = response[:end]
        record.response_bytes += len(response)
        transport = client.transport
        if transport is not None and not transport.is_closing():
            transport.write(response)

    # Records

    def new_record(self, method: str, path: str, client: ClientConnection) -> RequestRecord:
        """A record that begins now, with a new id."""
        return RequestRecord(self._ids.take(ID_CHARS), method, path, client.address, self._runtime.now())

    def note_id(self, record: RequestRecord, request_id: str | None) -> None:
        """Make an id of the client's, if it sends one: it may send that again, or took another client's."""
        if request_id is not None:
            record.id = f"{request_id}-{self._ids.take(SUFFIX_CHARS)}"

    def unread_response(self, error: LbError) -> bytes:
        """The response to a connection on which nothing was read."""
        record = RequestRecord(self._ids.take(ID_CHARS), "", "", "", self._runtime.now())
        return error_response(error, record, keep_alive=False, rng=self._rng, more=self.cors_without_head())

    def cors_without_head(self) -> str:
        """Field lines for a response without a request head, so without a known origin."""
        return "" if self.cors is None else self.cors.for_others


class _Ids:
    """Random digits for ids of requests. Engines know requests by these alone, and clients see their own: one that
    could be guessed, or sent again, might end another client's request, or the engine.
    """

    def __init__(self) -> None:
        self.instance = secrets.token_hex(6)
        """Names this process in Via. It is no part of an id: servers are told it."""
        self._digits = ""
        self._at = 0

    def take(self, chars: int) -> str:
        """So many hexadecimal digits that nobody got before."""
        start, end = self._at, self._at + chars
        if end > len(self._digits):
            self._digits = secrets.token_hex(_DRAWN_BYTES)
            start, end = 0, chars
        self._at = end
        return self._digits[start:end]


class LocalRequests:
    """Which requests are served where nobody needs a key because only this machine connects: those that no web page
    from elsewhere makes its browser send.

    The rule, under one set of settings. A request that is like one before costs a look-up.
    """

    def __init__(self) -> None:
        self.applies = False
        """Only this machine connects."""
        self.reconfigure((), ())

    def reconfigure(self, hosts: Sequence[str], origins: Sequence[str]) -> None:
        """`hosts`: names besides localhost, in lower case; `origins`: those of pages from elsewhere that are let in."""
        self._hosts = frozenset(hosts)
        self._origins = frozenset(origins)
        self._known: set[tuple[bytes, str | None]] = set()

    def require(self, host: bytes, origin: str | None) -> None:
        """Raise LbError FORBIDDEN unless the sender may be served. `host`: empty if there is none."""
        known = (host, origin)
        if known in self._known:
            return
        text = host.decode("latin-1")
        name = name_of(text)
        if name and name not in self._hosts and not is_loopback_name(name):
            raise LbError(Outcome.FORBIDDEN, _WRONG_HOST)
        if origin is not None and is_cross_origin(origin, text) and not self._origins & {origin, ANY_ORIGIN}:
            raise LbError(Outcome.FORBIDDEN, _WRONG_ORIGIN)
        if len(self._known) < MAX_KNOWN:
            self._known.add(known)
