"""The listener: clients' connections, requests read under limits, and every failure rendered as an OpenAI error.

aiohttp parses heads and bodies and keeps the connections; answers are written by us, as bytes, to the transport. The
two singletons `_KEEP` and `_CLOSE` tell aiohttp that an answer is out and whether the connection lives on. Invariant:
each request that has a head leaves one record, whatever happens to it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
import socket
from typing import cast

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.streams import StreamReader

from lbproxy.config import Settings
from lbproxy.core.models import resolve
from lbproxy.core.openai import BodyFacts, model_list, read_json_body, read_multipart_model, with_model
from lbproxy.core.types import InferenceRequest, LbError, Outcome, RequestRecord
from lbproxy.proxy.answers import error_answer, json_answer
from lbproxy.proxy.exchange import Call, Exchanger, Relay
from lbproxy.proxy.headers import RequestFields, origin_form, read_request_fields
from lbproxy.proxy.routes import Body, Route, find_route
from lbproxy.proxy.upstream import Outgoing
from lbproxy.runtime import Runtime

logger = logging.getLogger("lbproxy")

BACKLOG = 4096
SEND_BUFFER_BYTES = 128 << 10
"""SO_SNDBUF: without it the kernel alone takes megabytes for each client that does not read."""
WRITE_HIGH_WATER_BYTES = 64 << 10
"""What we hold for such a client before the endpoint is no longer read."""
LINGER_S = 2.0
"""How long the rest of a refused body is read, so that a reset does not eat the refusal."""
MAX_LINE_BYTES = 16 << 10
MAX_FIELDS = 128


class _Written(web.StreamResponse):
    """Tells aiohttp that the answer was written already. Holds no state: one instance serves all requests."""

    def __init__(self, *, keep_alive: bool) -> None:
        super().__init__()
        self._keep_alive = keep_alive

    async def prepare(self, request: web.BaseRequest) -> None:
        """Nothing to send."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing to send."""


class ClientConnection(web.RequestHandler):
    """aiohttp's connection, which also tells the relay of back-pressure and of its own end."""

    __slots__ = ("_front", "address", "body_reader", "relay")

    def __init__(self, front: FrontEnd, **options: object) -> None:
        super().__init__(front, **options)  # type: ignore[arg-type]
        self._front = front
        self.relay: Relay | None = None
        self.body_reader: StreamReader | None = None
        """The body that is being read, while it is."""
        self.address = ""
        """The client's, without its port."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        cast(asyncio.Transport, transport).set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        super().connection_made(transport)
        peer = self.peername
        self.address = peer[0] if isinstance(peer, tuple) else ""
        if self._front.open_connections > self._front.max_connections:
            self.write_refusal(LbError(Outcome.OVERLOADED))
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        """The endpoint's connection is closed here and now; the handler's cancellation comes a moment later."""
        if self.relay is not None:
            self.relay.client_gone()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        super().pause_writing()
        if self.relay is not None:
            self.relay.pause()

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        super().resume_writing()
        if self.relay is not None:
            self.relay.resume()

    def data_received(self, data: bytes) -> None:
        """A body that turns out to be malformed fails its reader too: aiohttp would leave the handler waiting."""
        super().data_received(data)
        if self.body_reader is not None and self._messages and not self.body_reader.is_eof():
            self.body_reader.set_exception(LbError(Outcome.BAD_REQUEST, "The request body is malformed."))

    def resume_reading(self, resume_parser: bool = True) -> None:
        """aiohttp calls this after each read of a body and would then parse nothing and resume what was not paused."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What aiohttp could not parse: answered in our shape, recorded like a request, never logged with traceback."""
        del request, message
        if status >= 500:
            logger.error("aiohttp failed", exc_info=exc)
            error = LbError(Outcome.INTERNAL_ERROR)
        elif isinstance(exc, LineTooLong):
            error = LbError(Outcome.HEAD_TOO_LARGE)
        else:
            error = LbError(Outcome.BAD_REQUEST)
        self.write_refusal(error)
        return _CLOSE

    def write_refusal(self, error: LbError) -> None:
        """Answer something that is no request yet; the caller closes."""
        record = self._front.new_record("", "", self)
        self._front.refuse(self, record, error, keep_alive=False)
        self._front.finish(record)


class FrontEnd(web.Server):
    """Serves clients. `listen`, then `drain` and `stop`."""

    def __init__(self, settings: Settings, runtime: Runtime, exchanger: Exchanger, rng: random.Random) -> None:
        # Everything that aiohttp gets wrong for a proxy by default is set here (docs/failures.md has the list).
        super().__init__(
            self._handle,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=settings.timeouts.client_idle,
            lingering_time=LINGER_S,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_FIELDS,
            read_bufsize=64 << 10,
        )
        self.max_connections = settings.limits.connections
        self._limits = settings.limits
        self._body_timeout_s = settings.timeouts.client_body
        self._runtime = runtime
        self._exchanger = exchanger
        self._rng = rng
        self._ids = itertools.count(1)
        self._id_prefix = secrets.token_hex(6)
        self._draining = False
        self._listener: asyncio.Server | None = None

    # Life

    async def listen(self, host: str, port: int) -> int:
        """Accept connections; returns the port (port 0: any free one). Raises OSError."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self, host, port, backlog=BACKLOG, reuse_address=True)
        for sock in self._listener.sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # inherited by accept
        return int(self._listener.sockets[0].getsockname()[1])

    @property
    def open_connections(self) -> int:
        """Clients' connections."""
        return len(self._connections)

    @property
    def draining(self) -> bool:
        """No new requests are taken."""
        return self._draining

    async def stop(self, deadline_s: float) -> None:
        """Accept nothing more, let running requests finish until the deadline, then cut the rest."""
        self._draining = True
        if self._listener is not None:
            self._listener.close()
        self.pre_shutdown()
        await self.shutdown(deadline_s)

    def __call__(self) -> ClientConnection:
        """One more connection: asyncio's protocol factory."""
        return ClientConnection(self, loop=self._loop, **self._kwargs)

    # One request

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        client = cast(ClientConnection, request.protocol)
        record = self.new_record(request.method, request.raw_path, client)
        keep_alive = request.keep_alive and not self._draining
        try:
            try:
                if await self._serve(request, client, record, keep_alive=keep_alive):
                    return _KEEP
                return _CLOSE
            except LbError as error:
                return self.refuse(client, record, error, keep_alive=keep_alive)
            except asyncio.CancelledError:
                record.outcome = Outcome.CLIENT_CLOSED
                raise
            except Exception:
                logger.exception("request %s failed", record.id)
                if record.response_bytes:
                    client.force_close()
                    return _CLOSE
                return self.refuse(client, record, LbError(Outcome.INTERNAL_ERROR), keep_alive=False)
        finally:
            self.finish(record)

    async def _serve(
        self, request: web.BaseRequest, client: ClientConnection, record: RequestRecord, *, keep_alive: bool
    ) -> bool:
        """Answer one request. Returns whether the connection lives on; raises LbError if nothing was sent."""
        if request.version not in {(1, 1), (1, 0)}:
            raise LbError(Outcome.BAD_REQUEST, "Only HTTP/1.1 and HTTP/1.0 are spoken here.")
        fields = read_request_fields(request.raw_headers)
        record.id = fields.request_id or record.id
        target = origin_form(request.raw_path)
        record.path = target.partition("?")[0]
        route = find_route(request.method, record.path)
        record.route = route.name
        if self._draining:
            raise LbError(Outcome.DRAINING)
        if route.ours and request.method != "OPTIONS":
            return self._list_models(client, record, keep_alive=keep_alive)
        body = await self._read_body(request, client, fields, route)
        record.request_bytes = len(body)
        model, stream, body = self._read_model(request.method, route, fields, body)
        record.model, record.stream = model, stream
        outgoing = Outgoing(request.method, target, fields.forward, body, record.id)
        placed = InferenceRequest(record.id, model, stream, len(body))
        http10 = request.version == (1, 0)
        call = Call(client, record, placed, outgoing, http10=http10, keep_alive=keep_alive)
        return await self._exchanger.run_exchange(call)

    def _read_model(
        self, method: str, route: Route, fields: RequestFields, body: bytes
    ) -> tuple[str | None, bool, bytes]:
        """The model to place by (None: any endpoint), whether a stream is wanted, and the body to send."""
        kind = route.body
        if method != "POST" or kind is Body.ANY:
            return None, False, body
        if kind is Body.JSON or b"json" in fields.content_type:
            facts = read_json_body(body)
            if facts.model is not None:
                return facts.model, facts.stream, body
            model = resolve(None, self._runtime.base_models())
            return model, facts.stream, with_model(body, model)
        if b"multipart/form-data" in fields.content_type:
            facts = BodyFacts(read_multipart_model(body), stream=False)
            return resolve(facts.model, self._runtime.base_models()), False, body
        return None, False, body

    async def _read_body(
        self, request: web.BaseRequest, client: ClientConnection, fields: RequestFields, route: Route
    ) -> bytes:
        """The whole body. Raises LbError: too large (told before it is read, if announced), too slow, malformed."""
        is_json = route.body is Body.JSON or b"json" in fields.content_type
        limit = self._limits.json_body if is_json else self._limits.body
        if fields.content_length is not None and fields.content_length > limit:
            raise LbError(Outcome.TOO_LARGE, f"The request body is larger than {limit} bytes.")
        content = request.content
        if content.is_eof():  # it came with the head, as most do
            body = content.read_nowait(-1)
            if len(body) > limit:
                raise LbError(Outcome.TOO_LARGE, f"The request body is larger than {limit} bytes.")
            return body
        if fields.expects_continue and client.transport is not None:
            client.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        client.body_reader = content
        try:
            async with asyncio.timeout(self._body_timeout_s):
                return await _read_up_to(content, limit)
        except TimeoutError:
            raise LbError(Outcome.BODY_TIMEOUT) from None
        except web.RequestPayloadError as error:
            raise LbError(Outcome.BAD_REQUEST, "The request body is malformed.") from error
        finally:
            client.body_reader = None

    def _list_models(self, client: ClientConnection, record: RequestRecord, *, keep_alive: bool) -> bool:
        """GET /v1/models, or one of them: what the endpoints that are up say, merged."""
        if not self._runtime.any_up():
            raise LbError(Outcome.NO_ENDPOINTS)
        cards = self._runtime.model_cards()
        wanted = record.path.removeprefix("/v1/models").removeprefix("/")
        if wanted:
            card = next((card for card in cards if card.id == wanted), None)
            if card is None:
                raise LbError(Outcome.MODEL_NOT_FOUND, f"The model `{wanted}` does not exist.", param="model")
        body = card.raw if wanted and card is not None else model_list(cards)
        record.status, record.outcome = 200, Outcome.COMPLETED
        self._write(client, record, json_answer(200, body, {"x-request-id": record.id}, keep_alive=keep_alive))
        return keep_alive

    # Answers and records

    def refuse(
        self, client: ClientConnection, record: RequestRecord, error: LbError, *, keep_alive: bool
    ) -> web.StreamResponse:
        """Write an error, if the client is still there. Returns what aiohttp wants to know."""
        keep_alive = keep_alive and not error.outcome.value.close
        record.outcome, record.status = error.outcome, error.outcome.value.status
        answer = error_answer(error, record.id, attempts=record.attempts, keep_alive=keep_alive, rng=self._rng)
        self._write(client, record, answer)
        return _KEEP if keep_alive else _CLOSE

    @staticmethod
    def _write(client: ClientConnection, record: RequestRecord, answer: bytes) -> None:
        if record.method == "HEAD":
            answer = answer[: answer.index(b"\r\n\r\n") + 4]
        record.response_bytes += len(answer)
        transport = client.transport
        if transport is not None and not transport.is_closing():
            transport.write(answer)

    def new_record(self, method: str, path: str, client: ClientConnection) -> RequestRecord:
        """A record that begins now, with an id of ours."""
        id_ = f"{self._id_prefix}-{next(self._ids):x}"
        return RequestRecord(id_, method, path, client.address, self._runtime.now())

    def finish(self, record: RequestRecord) -> None:
        """The record is complete."""
        record.ended_at = self._runtime.now()
        self._runtime.emit(record)


async def _read_up_to(content: StreamReader, limit: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while True:
        piece = await content.readany()
        if not piece:
            return b"".join(pieces)
        size += len(piece)
        if size > limit:
            raise LbError(Outcome.TOO_LARGE, f"The request body is larger than {limit} bytes.")
        pieces.append(piece)


_KEEP = _Written(keep_alive=True)
_CLOSE = _Written(keep_alive=False)
