# SPDX-License-Identifier: Apache-2.0
"""The WebSocket /v1/realtime: one session for each connection, one response at a time, paced by the engine.

Close codes: 1003 for a binary message, 1008 for an unknown model in the URL, 1009 for a message that is too large. A
server that dies closes without a word. Pings are answered at all times, as the connection is read while a response is
being written.
"""

from __future__ import annotations

import asyncio

from aiohttp import WSCloseCode, WSMsgType, web

from lbproxy.sim.mock.apis import realtime
from lbproxy.sim.mock.apis.call import GenerationCall
from lbproxy.sim.mock.apis.fields import EngineError, Json, load_json, model_of, text_of, typed
from lbproxy.sim.mock.apis.realtime import RealtimeSession, error_event
from lbproxy.sim.mock.serving.desk import Desk
from lbproxy.sim.mock.serving.driver import Flight

MAX_MESSAGE_BYTES = 4 * 2**20


class Realtime:
    """The handler of one server."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/v1/realtime", self._serve, allow_head=False)]

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        model = request.query.get("model")
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES)
        await socket.prepare(request)
        identity = self._desk.identity(request, "sess-", model, own=True)
        session = RealtimeSession(identity, validated=model is not None)
        try:
            self._desk.adapter(model)
        except EngineError as error:
            await socket.send_str(error_event(error.message, "model_not_found"))
            await socket.close(code=WSCloseCode.POLICY_VIOLATION)
            return socket
        await socket.send_str(session.created())
        async with asyncio.TaskGroup() as group:
            await _Connection(self._desk, socket, session, group).read()
        return socket


class _Connection:
    def __init__(
        self, desk: Desk, socket: web.WebSocketResponse, session: RealtimeSession, group: asyncio.TaskGroup
    ) -> None:
        self._desk = desk
        self._socket = socket
        self._session = session
        self._group = group
        self._reply: asyncio.Task[None] | None = None

    async def read(self) -> None:
        """Take events until the connection ends, which also ends a response."""
        try:
            async for message in self._socket:
                if message.type != WSMsgType.TEXT:
                    await self._socket.close(code=WSCloseCode.UNSUPPORTED_DATA)
                    return
                await self._take(message.data)
        finally:
            if self._reply is not None:
                self._reply.cancel()

    async def _take(self, text: str) -> None:
        try:
            event = load_json(text.encode())
        except EngineError:
            await self._socket.send_str(error_event("Invalid JSON", "invalid_json"))
            return
        try:
            await self._handle(event)
        except EngineError as error:
            code = error.kind if error.kind.islower() else "processing_error"
            await self._socket.send_str(error_event(error.message, code))

    async def _handle(self, event: Json) -> None:
        """One event of either dialect. Raises ApiError, whose kind is the event's code."""
        kind = text_of(event, "type")
        if kind == "session.update":
            await self._update(event)
        elif kind == "input_audio_buffer.append":
            self._session.append(event)
        elif kind == "input_audio_buffer.commit":
            if not self._session.validated:
                message = "Model not validated. Make sure to validate the model by sending a session.update event."
                raise EngineError(400, message, "model_not_validated")
            if self._session.audio:
                self._start(self._session.transcription_call(), is_transcript=True)
        elif kind == "conversation.item.create":
            self._session.read_item(event)
        elif kind == "response.create":
            self._start(self._session.response_call(event), is_transcript=False)
        elif kind == "response.cancel":
            if self._reply is not None:
                self._reply.cancel()
        else:
            raise EngineError(400, f"Unknown event type: {kind}", "unknown_event")

    async def _update(self, event: Json) -> None:
        session = typed(event, "session", dict, "dictionary")
        if session is not None:
            self._session.instructions = text_of(session, "instructions") or ""
            await self._socket.send_str(self._session.updated())
            return
        model = model_of(event)
        if model is None:
            raise EngineError(400, "Missing required field: model", "invalid_event")
        try:
            self._desk.adapter(model)
        except EngineError as error:
            raise EngineError(404, error.message, "model_not_found") from None
        self._session.validated = True

    def _start(self, call: GenerationCall, *, is_transcript: bool) -> None:
        """Begin a response. Raises ApiError if one is being written."""
        if self._reply is not None and not self._reply.done():
            raise EngineError(400, "A response is in progress.", "conversation_already_has_active_response")
        flight = Flight(self._desk.plan(call), per_call=1, every_token=True)
        self._reply = self._group.create_task(self._write(flight, is_transcript=is_transcript))

    async def _write(self, flight: Flight, *, is_transcript: bool) -> None:
        """Write a response as its tokens come. Ends quietly if the client has left meanwhile."""
        (choice,) = flight.choices
        position = 0
        try:
            with self._desk.flying(flight):
                for event in [] if is_transcript else self._session.begin():
                    await self._socket.send_str(event)
                while flight.left or flight.tokens:
                    await flight.news()
                    for _ in range(len(flight.tokens)):
                        flight.tokens.popleft()
                        text = choice.answer.token(position)
                        position += 1
                        delta = realtime.transcript_delta(text) if is_transcript else self._session.delta(text)
                        await self._socket.send_str(delta)
            if is_transcript:
                await self._socket.send_str(realtime.transcript_done(choice))
                return
            self._session.say("assistant", choice.answer.text)
            for event in self._session.end(choice, flight.cached_tokens):
                await self._socket.send_str(event)
        except ConnectionResetError:  # aiohttp's for a socket that is closing
            return
