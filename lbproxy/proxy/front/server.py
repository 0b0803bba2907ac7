# SPDX-License-Identifier: Apache-2.0
"""The front end: clients' connections, requests read under limits, and every failure rendered as an OpenAI error.

Requests are read in two ways, by aiohttp or in the fast lane (proxy/front/connection.py), and served in one. Responses
are written by lbproxy, as bytes, to the client's transport. Invariant: each request with a head leaves one record,
whatever happens to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
from collections.abc import Sequence
from math import inf
from typing import cast

from aiohttp import web

from lbproxy.config.tree import Settings
from lbproxy.core.endpoints.health import Health
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.outline import PARSE_AT_ONCE_BYTES
from lbproxy.driver.request_runtime import RequestRuntime
from lbproxy.net.dialing.vanished import find_vanished
from lbproxy.net.listening.bind import bind, bound_port
from lbproxy.net.listening.deadlines import Deadlines
from lbproxy.net.listening.listener import Listener, connections_within
from lbproxy.net.listening.sites import is_loopback
from lbproxy.proxy.exchange.exchanger import Exchanger
from lbproxy.proxy.front.adapter_calls import AdapterCalls
from lbproxy.proxy.front.bodies import most_held, read_body
from lbproxy.proxy.front.connection import CLOSE, KEEP, ClientConnection
from lbproxy.proxy.front.ollama_lists import OllamaLists
from lbproxy.proxy.front.overload import Overload, Unmetered
from lbproxy.proxy.front.requests import LISTS_S, Requests
from lbproxy.proxy.front.socket_turn import SocketTurn
from lbproxy.proxy.front.turn import Turn
from lbproxy.proxy.request.client_request import ClientRequest
from lbproxy.proxy.request.forwarding import may_forward
from lbproxy.proxy.request.handshake import read_handshake
from lbproxy.proxy.request.headers import SWITCHES, RequestFields, asking_as_it_is, origin_form, read_request_fields
from lbproxy.proxy.request.own_responses import ModelList
from lbproxy.proxy.request.routes import ADAPTERS, HEALTH, HEALTH_PATH, OLLAMA_LISTS, Route, find_route, may_generate

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
        # The defaults of aiohttp that are wrong for a proxy are replaced here.
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
        overload = overload or Overload(settings.limits, Unmetered())
        overload.end_largest = self._end_largest
        self.requests = Requests(settings, runtime, exchanger, rng, overload)
        self.serve_plain = self.requests.serve_plain
        """See connection.ConnectionOwner."""
        self.forwarding = self.requests.forwarding
        self._bound_bodies(settings)
        self.cork = exchanger.connections.cork
        head_s, stall_s = settings.timeouts.client_head, settings.timeouts.client_stall
        self.deadlines = Deadlines(
            runtime.loop, runtime.pulse, head_s=head_s, stall_s=stall_s, arrivals=overload.arrivals
        )
        self._runtime = runtime
        self._models = ModelList()
        self._adapter_calls = AdapterCalls(runtime, exchanger.connections)
        self._ollama_lists = OllamaLists(runtime, exchanger.connections)
        self._ends_at = inf
        """During shutdown: when running requests are cut."""
        self._open = 0
        self._last_client_at = -inf
        """When the last connection of a client began or ended."""
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
            find_vanished(sock, self.deadlines.stall_s)
        self.requests.local.applies = is_loopback(sockets)
        self.listener.start(sockets)
        return bound_port(sockets)

    def reconfigure(self, settings: Settings) -> None:
        """Apply other settings to requests, bodies and connections that begin from now on."""
        self.requests.reconfigure(settings, self.requests.exchanger.with_settings(settings))
        self.forwarding, self._models = self.requests.forwarding, ModelList()
        self.overload.reconfigure(settings.limits)
        self._bound_bodies(settings)
        self.deadlines.reconfigure(head_s=settings.timeouts.client_head, stall_s=settings.timeouts.client_stall)
        self._kwargs["keepalive_timeout"] = settings.timeouts.client_idle
        for sock in self.listener.sockets:
            find_vanished(sock, self.deadlines.stall_s)
        for client in self._clients():
            client.reconfigure(settings.timeouts.client_idle)

    def _bound_bodies(self, settings: Settings) -> None:
        self.max_body_bytes = min(settings.limits.json_body, most_held(self.overload))
        self.max_plain_body_bytes = min(self.max_body_bytes, PARSE_AT_ONCE_BYTES)

    @property
    def overload(self) -> Overload:
        """What is refused because lbproxy is the bottleneck."""
        return self.requests.overload

    @property
    def exchanger(self) -> Exchanger:
        """What exchanges share that begin now."""
        return self.requests.exchanger

    @property
    def open_connections(self) -> int:
        return self._open

    def _has_room(self) -> bool:
        return self._open + self.listener.handshaking < connections_within(self.exchanger.settings.limits.connections)

    def connected(self) -> bool:
        has_room = self._has_room() or self.listener.handshaking > 0  # among which it had room
        self._open += 1
        self._last_client_at = self._loop.time()
        self._no_connections.clear()
        return has_room

    def disconnected(self) -> None:
        self._open -= 1
        self._last_client_at = self._loop.time()
        if not self._open:
            self._no_connections.set()

    @property
    def draining(self) -> bool:
        """Load balancers in front must send clients elsewhere."""
        return self.requests.last

    @property
    def running(self) -> int:
        """Requests that were read and have no complete response yet."""
        return self.requests.running

    def running_records(self) -> list[RequestRecord]:
        """The records of running requests. They still change."""
        return [client.turn.record for client in self._clients() if client.turn is not None]

    async def lame_duck(self, within_s: float, *, accepting: bool) -> None:
        """Serve all clients, but keep no connection alive, so that clients leave: each response says `Connection:
        close`.

        `accepting`: accept new connections for the complete time; else it ends as soon as no connection is left. It
        ends at once where no client was connected for `timeouts.client_idle`: nobody has to be sent elsewhere.
        """
        self._keep_no_connection()
        if accepting:
            idle_s = self._loop.time() - self._last_client_at
            if self._open or self.listener.passing or idle_s < self._kwargs["keepalive_timeout"]:
                await asyncio.sleep(within_s)
        else:
            self.listener.close()
            await self._wait_for_no_connections(within_s)

    async def stop(self, deadline_s: float) -> int:
        """Accept no more connections, let running requests finish until the deadline, then cut the rest, visibly.

        A connection whose last response did not say that it ends may send one more request, if that arrives soon: a
        client that sends again at once must not find it closed. Returns how many requests were cut.
        """
        cut = 0
        self._keep_no_connection()
        self.listener.accept_rest()
        self.listener.close()
        self.end_within(deadline_s)
        while (self._open or self.listener.passing) and (left_s := self._ends_at - self._loop.time()) > 0.0:
            self.listener.end_silent(LAST_IDLE_S)
            for client in self._clients():
                client.close_if_idle(LAST_IDLE_S)
            await self._wait_for_no_connections(min(left_s, LAST_IDLE_S / 2))
        if self._open:
            self.requests.draining = True
            cut, idle = self.requests.running, asyncio.Event()
            self.requests.on_idle = idle.set
            for client in self._clients():
                client.cut(Outcome.DRAINING)
            if self.requests.running:
                await _wait_for(idle, FLUSH_S)
        for client in self._clients():
            client.stop()
        await _wait_for(self._no_connections, FLUSH_S)
        self.deadlines.close()
        return cut

    async def _wait_for_no_connections(self, within_s: float) -> None:
        """Those that were accepted and are still in their TLS handshake included: their requests follow."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.listener.passed()
                await self._no_connections.wait()

    def end_within(self, deadline_s: float) -> None:
        """During shutdown: running requests get at most this long."""
        self._ends_at = min(self._ends_at, self._loop.time() + deadline_s)

    def _keep_no_connection(self) -> None:
        """Responses whose heads are not written yet say `Connection: close` from now on."""
        self.requests.last = True
        for client in self._clients():
            if client.turn is not None:
                client.turn.keep_alive = False

    def _end_largest(self) -> bool:
        """For `Overload`: end the request that holds most memory, or the connection whose client does not read."""
        sizes = [(client.held_bytes, index) for index, client in enumerate(self._clients())]
        held, index = max(sizes, default=(0, 0))
        if not held:
            return False
        self._clients()[index].shed()
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
                client.turn.guarded(client.turn.move_if_stranded)

    # One request

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Handle a request of aiohttp's."""
        client = cast(ClientConnection, request.protocol)
        answered: asyncio.Future[bool] = self._loop.create_future()

        def ended(reusable: bool) -> None:
            if not answered.done():  # cancelled, with the handler
                answered.set_result(reusable)

        record = self.requests.new_record(request.method, request.raw_path, client)
        if request.headers.get("Upgrade", "").lower() in SWITCHES:
            turn: Turn = SocketTurn(self.requests, client, record, ended)
        else:
            # Keep-alive of HTTP/1.0 would have to be confirmed, and ends with a relayed response anyway.
            keep_alive = request.keep_alive and request.version >= (1, 1)
            last = self.requests.last or self.overload.memory_is_short
            turn = Turn(self.requests, client, record, ended, keep_alive=keep_alive and not last)
        client.request_body = request.content
        if self.requests.cors is not None:
            turn.cors = self.requests.cors.fields_for(request.headers.get("Origin"))
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
        if reusable and client.request_is_read:
            client.aiohttp_responded()
            return KEEP
        client.linger()
        return CLOSE

    async def _serve(self, request: web.BaseRequest, turn: Turn) -> None:
        """Read what aiohttp parsed, and begin to serve it. Raises LbError if nothing was sent."""
        record, requests = turn.record, self.requests
        if request.version not in {(1, 1), (1, 0)}:
            raise LbError(Outcome.BAD_REQUEST, "Only HTTP/1.1 and HTTP/1.0 are supported.")
        fields = read_request_fields(request.raw_headers, http10=request.version == (1, 0))
        requests.note_id(record, fields.request_id)
        target = origin_form(request.raw_path)
        record.path = target.partition("?")[0]
        requests.refuse_pages(fields, record.path)
        if requests.cors is not None and (preflight := requests.cors.preflight(request.method, request.headers)):
            record.route = "preflight"
            turn.respond_to_preflight(preflight)  # without a key: browsers send none with it
            return
        if turn.switches or fields.upgrade:
            read_handshake(request.method, fields, is_switching=turn.switches)
        credentials, trace = fields.credentials, fields.trace
        if requests.sampling is not None:
            record.trace, trace = requests.sampling.begin(trace)
        if requests.keys is not None and record.path != HEALTH_PATH:  # before anything is sent or read
            record.key, credentials = requests.keys.name_of(credentials), b""
        settings = turn.settings
        allowed, paths = settings.lora_management, settings.inference_paths
        route = find_route(request.method, record.path, lora_management=allowed, inference_paths=paths)
        if route.ours and route is not ADAPTERS and request.method != "OPTIONS":
            record.route = route.name
            await self._respond(route, turn, fields)
            return
        if requests.draining or requests.overload.refuses is not None:
            raise requests.refusal()
        if fields.max_forwards is not None and not may_forward(request.method, fields):
            turn.respond(200, b"{}", allow=", ".join(sorted(route.methods)))
            return
        body = await read_body(request, fields, route, turn, self.overload)
        if may_generate(request.method, record.path):
            fields.forward = asking_as_it_is(fields.forward)
        http10 = request.version == (1, 0)
        read = ClientRequest(request.method, target, route, fields, body, credentials, http10, trace)
        await self._lists_read()
        if route is ADAPTERS:
            await self._change_adapters(read, turn)
        else:
            requests.begin(read, turn)

    async def _first_probes(self) -> None:
        """Wait until the health of an endpoint is known, as requests for inference do: clients list models first."""
        runtime = self._runtime
        while not runtime.any_up() and any(one.health is Health.STARTING for one in runtime.members()):  # noqa: ASYNC110
            await asyncio.sleep(LISTS_S)

    async def _lists_read(self) -> None:
        if self.requests.reading.waits_for_lists():
            read = asyncio.Event()
            self.requests.after_lists(read.set)
            await read.wait()

    async def _change_adapters(self, request: ClientRequest, turn: Turn) -> None:
        record, settings = turn.record, turn.settings
        record.route = request.route.name
        record.request_bytes = len(request.body)
        if self.requests.reading.allowed(request.fields, record):  # the path of an adapter may be any model's
            raise LbError(Outcome.FORBIDDEN, "Adapters are not managed by clients with models of their own.")
        self.requests.refuse_loop(request.fields.via)
        request.fields.forward += turn.client.peer.lines(request.fields, http10=request.http10)
        timeout_s, named = settings.timeouts.first_byte, settings.expose_endpoint
        turn.respond(*await self._adapter_calls.make(request, record, timeout_s=timeout_s, name_endpoints=named))

    async def _respond(self, route: Route, turn: Turn, fields: RequestFields) -> None:
        """GET /v1/models, or one of them: the merged models of the endpoints that are up, as far as the client may name
        them; or a list of Ollama's. GET /health: a 503 from the moment that lbproxy begins to stop. Raises LbError.
        """
        reading, record = self.requests.reading, turn.record
        if route is not HEALTH:
            await self._first_probes()
        if route is OLLAMA_LISTS:
            allowed, rules = reading.allowed(fields, record), self.exchanger.model_rules
            turn.respond(200, await self._ollama_lists.body(record.path, rules, allowed))
        elif not self._runtime.any_up():
            raise LbError(Outcome.NO_ENDPOINTS)
        elif route is not HEALTH:
            turn.respond(200, self._models.body(reading.model_cards(), record.path, reading.allowed(fields, record)))
        elif self.requests.last:
            raise LbError(Outcome.DRAINING)
        else:
            turn.respond(200, b'{"status":"ok"}')

    # Responses and records

    def refuse_unread(self, client: ClientConnection, error: LbError) -> None:
        """Respond to what is not a request: see connection.ConnectionOwner."""
        requests = self.requests
        record = requests.new_record("", "", client)
        requests.refuse(client, record, error, keep_alive=False, cors=requests.cors_without_head())
        requests.end(record)

    def _connection_refusal(self) -> bytes:
        """The response to a connection for which there is no room."""
        return self.requests.unread_response(LbError(Outcome.OVERLOADED))

    def _plain_http_refusal(self) -> bytes:
        """The response to a connection that speaks plain HTTP where TLS is required."""
        error = LbError(Outcome.BAD_REQUEST, "This port needs TLS: use https:// in the URL.")
        return self.requests.unread_response(error)


async def _wait_for(event: asyncio.Event, within_s: float) -> bool:
    """Wait for `event`. Returns whether it came in time."""
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
