"""The front end: clients' connections, requests read under limits, and every failure rendered as an OpenAI error.

Requests are read in two ways, by aiohttp or in the fast lane (proxy/front/connection.py), and served in one. Responses
are written by lbproxy, as bytes, to the client's transport. Invariant: each request with a head leaves one record,
whatever happens to it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
import socket
from collections.abc import Sequence
from math import inf
from typing import cast

from aiohttp import web

from lbproxy.config.tree import Settings
from lbproxy.core.observed.record import MAX_PATH_CHARS, RequestRecord
from lbproxy.core.observed.trace import Sampling
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.outline import PARSE_AT_ONCE_BYTES
from lbproxy.net.dialing.vanished import find_vanished
from lbproxy.net.listening.bind import bind, bound_port
from lbproxy.net.listening.listener import Listener, connections_within
from lbproxy.proxy.exchange.adapter_calls import AdapterCalls
from lbproxy.proxy.exchange.exchanger import LARGE_BODY_BYTES, Exchanger
from lbproxy.proxy.front.bodies import read_body, read_large
from lbproxy.proxy.front.connection import CLOSE, KEEP, ClientConnection
from lbproxy.proxy.front.deadlines import Deadlines
from lbproxy.proxy.front.overload import Overload, Unmetered
from lbproxy.proxy.front.socket_turn import SocketTurn
from lbproxy.proxy.front.turn import Turn
from lbproxy.proxy.request.client_request import ClientRequest
from lbproxy.proxy.request.cors import Cors
from lbproxy.proxy.request.forwarding import Forwarding, may_forward
from lbproxy.proxy.request.handshake import read_handshake
from lbproxy.proxy.request.headers import SWITCHES, origin_form, read_request_fields
from lbproxy.proxy.request.keys import KeyRing
from lbproxy.proxy.request.own_responses import error_response, models_body
from lbproxy.proxy.request.reading import LargeFacts, Reading, has_form, has_json
from lbproxy.proxy.request.routes import ADAPTERS, find_route
from lbproxy.request_runtime import RequestRuntime

logger = logging.getLogger("lbproxy")

SEND_BUFFER_BYTES = 128 << 10
"""SO_SNDBUF: without it the kernel alone holds megabytes for each client that does not read."""
LAST_IDLE_S = 0.5
"""How long a connection waits for a last request at shutdown, if its last response did not say that it ends."""
FLUSH_S = 2.0
"""How long shutdown waits for written bytes to reach slow clients."""
MAX_LINE_BYTES = 16 << 10
MAX_FIELDS = 128


class FrontEnd(web.Server):
    """Serves clients. `listen`, then `lame_duck` and `stop`."""

    url: str | None = None
    """Where clients reach it; None: it does not listen yet. Set by the owner, which knows the scheme."""

    def __init__(
        self,
        settings: Settings,
        runtime: RequestRuntime,
        exchanger: Exchanger,
        rng: random.Random,
        overload: Overload | None = None,
    ) -> None:
        # The defaults of aiohttp that are wrong for a proxy are replaced here (docs/failures.md has the list).
        super().__init__(
            self._handle,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=settings.timeouts.client_idle,
            lingering_time=0.0,  # proxy/front/linger.py does it
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_FIELDS,
            read_bufsize=64 << 10,
        )
        self.overload = overload or Overload(settings.limits, Unmetered())
        self.overload.end_largest = self._end_largest
        self.max_plain_body_bytes = min(settings.limits.json_body, PARSE_AT_ONCE_BYTES)
        self.cork = exchanger.connections.cork
        self.keys: KeyRing | None = None
        """Each request must carry one of these; None = not required. Set by the owner, which reads them."""
        self._cors = _cors_of(settings)
        self.sampling: Sampling | None = None
        """Which requests are traced; None = none, and clients' trace fields are passed on. Set like `keys`."""
        self._reading = Reading(settings, runtime)
        self.deadlines = Deadlines(runtime, settings.timeouts)
        self._max_connections = settings.limits.connections
        self._client_stall_s = settings.timeouts.client_stall
        self._runtime = runtime
        self.exchanger = exchanger
        self._adapter_calls = AdapterCalls(runtime, exchanger.connections)
        self._rng = rng
        self._ids = itertools.count(1)
        self._id_prefix = secrets.token_hex(6)
        self.forwarding = self._forwarding(settings)
        self._last_requests = False
        """Connections are not kept alive any more."""
        self._ends_at = inf
        """During shutdown: when running requests are cut."""
        self._draining = False
        self._running = 0
        self._no_requests = asyncio.Event()
        self._no_requests.set()
        self._open = 0
        self._no_connections = asyncio.Event()
        self._no_connections.set()
        self.listener = Listener(
            self, room=self._has_room, refusal=self._connection_refusal, not_tls=self._plain_http_refusal
        )

    # Life cycle

    async def listen(self, host: str, port: int, inherited: Sequence[socket.socket] = ()) -> int:
        """Accept connections; returns the port (port 0: any free one; 0 for a Unix socket). Raises OSError.

        `inherited`: sockets that listen there already, to be used instead.
        """
        sockets = inherited or await bind(host, port)
        for sock in sockets:  # inherited by accepted sockets
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            find_vanished(sock, self._client_stall_s)
        self.listener.start(sockets)
        return bound_port(sockets)

    def reconfigure(self, settings: Settings) -> None:
        """Apply other settings to requests, bodies and connections that begin from now on."""
        self.exchanger = self.exchanger.with_settings(settings)
        self._reading = Reading(settings, self._runtime)
        self._cors = _cors_of(settings)
        self.overload.reconfigure(settings.limits)
        self.max_plain_body_bytes = min(settings.limits.json_body, PARSE_AT_ONCE_BYTES)
        self.forwarding = self._forwarding(settings)
        self._max_connections = settings.limits.connections
        self.deadlines.reconfigure(settings.timeouts)
        self._kwargs["keepalive_timeout"] = settings.timeouts.client_idle
        self._client_stall_s = settings.timeouts.client_stall
        for sock in self.listener.sockets:
            find_vanished(sock, self._client_stall_s)
        for client in self._clients():
            client.reconfigure(settings.timeouts.client_idle)

    @property
    def open_connections(self) -> int:
        """Clients' connections."""
        return self._open

    def _has_room(self) -> bool:
        return self._open + self.listener.handshaking < connections_within(self._max_connections)

    def connected(self) -> bool:
        """See connection.Front."""
        has_room = self._has_room() or self.listener.handshaking > 0  # among which it had room
        self._open += 1
        self._no_connections.clear()
        return has_room

    def disconnected(self) -> None:
        """See connection.Front."""
        self._open -= 1
        if not self._open:
            self._no_connections.set()

    @property
    def draining(self) -> bool:
        """Load balancers in front must send clients elsewhere."""
        return self._last_requests

    @property
    def running(self) -> int:
        """Requests that were read and have no complete response yet."""
        return self._running

    def running_records(self) -> list[RequestRecord]:
        """The records of running requests. They still change."""
        return [client.turn.record for client in self._clients() if client.turn is not None]

    async def lame_duck(self, within_s: float, *, accepting: bool) -> None:
        """Serve all clients, but keep no connection alive, so that clients leave: each response says `Connection:
        close`.

        `accepting`: accept new connections for the complete time; else it ends as soon as no connection is left.
        """
        self._keep_no_connection()
        if accepting:
            await asyncio.sleep(within_s)
        else:
            self.listener.close()
            await _wait_for(self._no_connections, within_s)

    async def stop(self, deadline_s: float) -> int:
        """Accept no more connections, let running requests finish until the deadline, then cut the rest, visibly.

        A connection whose last response did not say that it ends may send one more request, if that arrives soon: a
        client that sends again at once must not find it closed. Returns how many requests were cut.
        """
        cut = 0
        self._keep_no_connection()
        self.listener.close()
        self.end_within(deadline_s)
        while self._open and (left_s := self._ends_at - self._loop.time()) > 0.0:
            for client in self._clients():
                client.close_if_idle(LAST_IDLE_S)
            await _wait_for(self._no_connections, min(left_s, LAST_IDLE_S / 2))
        if self._open:
            self._draining = True
            cut = self._running
            for client in self._clients():
                client.cut(Outcome.DRAINING)
            await _wait_for(self._no_requests, FLUSH_S)
        for client in self._clients():
            client.stop()
        await _wait_for(self._no_connections, FLUSH_S)
        self.deadlines.close()
        return cut

    def end_within(self, deadline_s: float) -> None:
        """During shutdown: running requests get at most this long."""
        self._ends_at = min(self._ends_at, self._loop.time() + deadline_s)

    def _keep_no_connection(self) -> None:
        """Responses whose heads are not written yet say `Connection: close` from now on."""
        self._last_requests = True
        for client in self._clients():
            if client.turn is not None:
                client.turn.keep_alive = False

    def _end_largest(self) -> bool:
        """For `Overload`: end the request that holds most memory."""
        sizes = [(client.held_bytes, index) for index, client in enumerate(self._clients())]
        held, index = max(sizes, default=(0, 0))
        if not held:
            return False
        self._clients()[index].cut(Outcome.OVERLOADED)
        return True

    def _clients(self) -> list[ClientConnection]:
        return cast(list[ClientConnection], self.connections)

    def __call__(self) -> ClientConnection:
        """Make a connection: asyncio's protocol factory."""
        return ClientConnection(self, loop=self._loop, **self._kwargs)

    def move_stranded(self) -> None:
        """Send stranded requests to other endpoints, where possible."""
        for client in self._clients():
            if client.turn is not None:
                client.turn.move_if_stranded()

    # One request

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Handle a request of aiohttp's."""
        client = cast(ClientConnection, request.protocol)
        answered: asyncio.Future[bool] = self._loop.create_future()

        def ended(reusable: bool) -> None:
            if not answered.done():  # cancelled, with the handler
                answered.set_result(reusable)

        record = self.new_record(request.method, request.raw_path, client)
        if request.headers.get("Upgrade", "").lower() in SWITCHES:
            turn: Turn = SocketTurn(self, client, record, ended)
        else:
            # Keep-alive of HTTP/1.0 would have to be confirmed, and ends with a relayed response anyway.
            keep_alive = request.keep_alive and request.version >= (1, 1)
            last = self._last_requests or self.overload.memory_is_short
            turn = Turn(self, client, record, ended, keep_alive=keep_alive and not last)
        client.request_body = request.content
        if self._cors is not None:
            turn.cors = self._cors.fields_for(request.headers.get("Origin"))
        try:
            await client.drained()
            await self._serve(request, turn)
            reusable = await answered
        except LbError as error:
            turn.refuse(error)
            reusable = await answered
        except Exception:  # noqa: BLE001 - logged there, with its traceback
            turn.defect()
            return CLOSE
        finally:
            turn.client_disconnected()  # unless it is finished
        if reusable:
            client.aiohttp_responded()
            return KEEP
        client.linger()
        return CLOSE

    def serve_plain(self, plain: ClientRequest, client: ClientConnection) -> None:
        """Serve a request of the fast lane: see connection.Front."""
        record = self.new_record("POST", plain.target, client)
        record.id = plain.fields.request_id or record.id
        turn = Turn(
            self,
            client,
            record,
            client.lane_ended,
            keep_alive=not (self._last_requests or self.overload.memory_is_short),
        )
        try:
            if self._cors is not None:
                turn.cors = self._cors.fields_for(plain.fields.origin)
            if self.sampling is not None:
                record.trace, trace = self.sampling.begin(plain.trace)
                plain = plain._replace(trace=trace)
            if self.keys is not None:
                record.key = self.keys.name_of(plain.credentials)
                plain = plain._replace(credentials=b"")
            self._start_exchange(plain, turn)
        except LbError as error:
            turn.refuse(error)
        except Exception:  # noqa: BLE001 - logged there, with its traceback
            turn.defect()

    def turn_began(self) -> None:
        """Count one more running request."""
        self._running += 1
        if self._running == 1:
            self._no_requests.clear()

    def turn_ended(self, record: RequestRecord) -> None:
        """Count one running request less, and emit its record."""
        self._running -= 1
        if not self._running:
            self._no_requests.set()
        record.ended_at = self._runtime.now()
        if len(record.path) > MAX_PATH_CHARS:
            record.path = record.path[:MAX_PATH_CHARS]
        self._runtime.emit(record)

    async def _serve(self, request: web.BaseRequest, turn: Turn) -> None:
        """Read what aiohttp parsed, and begin to serve it. Raises LbError if nothing was sent."""
        record = turn.record
        if request.version not in {(1, 1), (1, 0)}:
            raise LbError(Outcome.BAD_REQUEST, "Only HTTP/1.1 and HTTP/1.0 are supported.")
        fields = read_request_fields(request.raw_headers, http10=request.version == (1, 0))
        record.id = fields.request_id or record.id
        target = origin_form(request.raw_path)
        record.path = target.partition("?")[0]
        if self._cors is not None and (preflight := self._cors.preflight(request.method, request.headers)):
            record.route = "preflight"
            turn.respond_to_preflight(preflight)  # without a key: browsers send none with it
            return
        if turn.switches or fields.upgrade:
            read_handshake(request.method, fields, is_switching=turn.switches)
        credentials, trace = fields.credentials, fields.trace
        if self.sampling is not None:
            record.trace, trace = self.sampling.begin(trace)
        if self.keys is not None:  # before anything is sent or read
            record.key, credentials = self.keys.name_of(credentials), b""
        settings = turn.settings
        route = find_route(request.method, record.path, lora_management=settings.lora_management)
        if route.ours and route is not ADAPTERS and request.method != "OPTIONS":
            record.route = route.name
            self._list_models(turn)
            return
        if self._draining or self.overload.refuses is not None:
            raise self._refusal()
        if fields.max_forwards is not None and not may_forward(request.method, fields):
            turn.respond(200, b"{}", allow=", ".join(sorted(route.methods)))
            return
        body = await read_body(request, fields, route, turn, self.overload)
        http10 = request.version == (1, 0)
        read = ClientRequest(request.method, target, route, fields, body, credentials, http10, trace)
        if route is ADAPTERS:
            await self._change_adapters(read, turn)
        elif len(body) <= PARSE_AT_ONCE_BYTES or not (has_json(read) or has_form(read)):
            self._start_exchange(read, turn)
        else:
            sent, facts = await read_large(read, self._reading, turn, self.overload)
            self._start_exchange(sent, turn, facts)
            record.request_bytes = len(body)

    async def _change_adapters(self, request: ClientRequest, turn: Turn) -> None:
        record, settings = turn.record, turn.settings
        record.route = request.route.name
        record.request_bytes = len(request.body)
        self._refuse_loop(request.fields.via)
        request.fields.forward += turn.client.peer.lines(request.fields, http10=request.http10)
        timeout_s, named = settings.timeouts.first_byte, settings.expose_endpoint
        turn.respond(*await self._adapter_calls.make(request, record.id, timeout_s=timeout_s, name_endpoints=named))

    def _start_exchange(self, request: ClientRequest, turn: Turn, large: LargeFacts | None = None) -> None:
        """Begin the exchange of a complete request. `large`: the content of its body, if that was read in turns.

        Raises LbError if nothing was sent.
        """
        record = turn.record
        record.route = request.route.name
        record.request_bytes = size = len(request.body)
        if request.fields.via:
            self._refuse_loop(request.fields.via)
        if self._draining or self.overload.refuses is not None:
            raise self._refusal()
        if size > LARGE_BODY_BYTES and not turn.held_bytes:
            self.overload.hold(turn, size)
        turn.start(*self._reading.interpret(request, record, large))

    def _refuse_loop(self, via: bytes) -> None:
        if self.forwarding.is_loop(via):
            raise LbError(Outcome.LOOP)

    def _refusal(self) -> LbError:
        """The error while no new requests are accepted."""
        return LbError(Outcome.DRAINING) if self._draining else self.overload.refusal()

    def _list_models(self, turn: Turn) -> None:
        """GET /v1/models, or one of them: the merged models of the endpoints that are up."""
        if not self._runtime.any_up():
            raise LbError(Outcome.NO_ENDPOINTS)
        turn.respond(200, models_body(self._reading.model_cards(), turn.record.path))

    def _forwarding(self, settings: Settings) -> Forwarding:
        return Forwarding(settings.forwarded, settings.trusted_proxies, self._id_prefix)

    # Responses and records

    def refuse(
        self, client: ClientConnection, record: RequestRecord, error: LbError, *, keep_alive: bool, cors: str
    ) -> bool:
        """Write an error, if the client is still there. Returns whether the connection lives on. `cors`: see Turn."""
        # A body that was not read would be read as the next request, or the next request as the body.
        keep_alive = keep_alive and not error.outcome.value.close and client.request_is_read
        record.outcome, record.status = error.outcome, error.outcome.value.status
        response = error_response(error, record, keep_alive=keep_alive, rng=self._rng, more=cors)
        self.write(client, record, response)
        return keep_alive

    def refuse_unread(self, client: ClientConnection, error: LbError) -> None:
        """Respond to what is not a request: see connection.Front."""
        record = self.new_record("", "", client)
        self.refuse(client, record, error, keep_alive=False, cors=self._cors_without_head())
        record.ended_at = self._runtime.now()
        self._runtime.emit(record)

    def _connection_refusal(self) -> bytes:
        """The response to a connection for which there is no room."""
        return self._unread_response(LbError(Outcome.OVERLOADED))

    def _plain_http_refusal(self) -> bytes:
        """The response to a connection that speaks plain HTTP where TLS is required."""
        return self._unread_response(LbError(Outcome.BAD_REQUEST, "This port needs TLS: use https:// in the URL."))

    def _unread_response(self, error: LbError) -> bytes:
        cors = self._cors_without_head()
        record = RequestRecord(self._new_id(), "", "", "", self._runtime.now())
        return error_response(error, record, keep_alive=False, rng=self._rng, more=cors)

    def _cors_without_head(self) -> str:
        """Field lines for a response without a request head, so without a known origin."""
        return "" if self._cors is None else self._cors.for_others

    @staticmethod
    def write(client: ClientConnection, record: RequestRecord, response: bytes) -> None:
        """Write a complete response of lbproxy itself; nothing if the client is gone."""
        if record.method == "HEAD":
            response = response[: response.index(b"\r\n\r\n") + 4]
        record.response_bytes += len(response)
        transport = client.transport
        if transport is not None and not transport.is_closing():
            transport.write(response)

    def new_record(self, method: str, path: str, client: ClientConnection) -> RequestRecord:
        """A record that begins now, with a new id."""
        return RequestRecord(self._new_id(), method, path, client.address, self._runtime.now())

    def _new_id(self) -> str:
        return f"{self._id_prefix}-{next(self._ids):x}"


def _cors_of(settings: Settings) -> Cors | None:
    """None = the settings allow no origins."""
    return Cors(settings.cors.origins) if settings.cors.origins else None


async def _wait_for(event: asyncio.Event, within_s: float) -> bool:
    """Wait for `event`. Returns whether it came in time."""
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
