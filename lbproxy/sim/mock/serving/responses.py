# SPDX-License-Identifier: Apache-2.0
"""Handlers of /v1/responses, and the responses that the server remembers.

As a vLLM that was started with VLLM_ENABLE_RESPONSES_API_STORE=1; another ignores `store` and refuses `background`.
vLLM never forgets one; here the least recently used go. A response in the background needs no task: its tokens come
with the driver's timer, and whoever asks for it sees how far it is.

Not simulated: GET with `stream=true`, which in vLLM repeats the events of a response in the background.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace

from aiohttp import web

from lbproxy.sim.mock.apis import responses
from lbproxy.sim.mock.apis.conversation import ConversationTurn
from lbproxy.sim.mock.apis.fields import bad_request
from lbproxy.sim.mock.apis.responses import ResponsesCall, ResponseWriter
from lbproxy.sim.mock.serving.desk import Desk, fields_of, json_response, stream
from lbproxy.sim.mock.serving.driver import Flight

MAX_STORED = 1024
MAX_STORED_BYTES = 256 * 2**20
"""All conversations together, roughly: what the requests had, with their prompts."""


@dataclass(slots=True)
class KeptResponse:
    """A response that can be asked for again."""

    request: ResponsesCall
    writer: ResponseWriter
    flight: Flight
    size: int
    ids: list[str] = field(default_factory=list)
    """At the engine, of one in the background."""
    is_cancelled: bool = False

    @property
    def status(self) -> str:
        if self.is_cancelled:
            return "cancelled"
        if not self.flight.left:
            return "completed"
        return "in_progress" if self.flight.begun else "queued"

    def body(self) -> bytes:
        return self.writer.whole(self.flight.choices, self.flight.cached_tokens, self.status)

    def turns(self) -> tuple[ConversationTurn, ...]:
        return self.request.remembered(self.flight.choices[0])


class Responses:
    """The handlers of one server, and its memory."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._stored: OrderedDict[str, KeptResponse] = OrderedDict()
        self._size = 0

    def routes(self) -> list[web.RouteDef]:
        """All that vLLM has: there is no DELETE, and there are no input items."""
        return [
            web.post("/v1/responses", self._create),
            web.get("/v1/responses/{id}", self._retrieve, allow_head=False),
            web.post("/v1/responses/{id}/cancel", self._cancel),
        ]

    async def _create(self, request: web.Request) -> web.StreamResponse:
        fields = await fields_of(request)
        previous = responses.previous_id(fields)
        former = () if previous is None else self._find(previous).turns()
        asked = _checked(responses.parse(fields, former))
        identity = self._desk.identity(request, "resp_", asked.call.model, own=True)
        size = (request.content_length or 0) + 2 * len(asked.call.prompts[0])
        # Without its prompt, which the engine has now, and which is rendered from turns for the next request.
        kept = replace(asked, call=replace(asked.call, prompts=()))
        writer = ResponseWriter(identity, kept, self._desk.max_model_len)
        if asked.background:
            choices = self._desk.plan(asked.call)
            flight = Flight(choices, per_call=1, every_token=asked.call.stream, rank=self._desk.rank(request))
            return await self._begin(request, identity.id, KeptResponse(kept, writer, flight, size))
        async with self._desk.begun(request, fields, asked.call) as flight:
            stored = KeptResponse(kept, writer, flight, size)
            if asked.call.stream:
                return await stream(request, writer, flight, lambda: self._keep(identity.id, stored))
            await flight.news()
            flight.check()
            self._keep(identity.id, stored)
            return await self._desk.complete(request, flight, stored.body())

    async def _begin(self, request: web.Request, response_id: str, stored: KeptResponse) -> web.StreamResponse:
        """One that goes on without its client."""
        stored.ids = self._desk.driver.submit(stored.flight)
        self._keep(response_id, stored)
        if stored.request.call.stream:
            return await stream(request, stored.writer, stored.flight)
        return json_response(stored.body())

    async def _retrieve(self, request: web.Request) -> web.StreamResponse:
        stored = self._find(request.match_info["id"])
        if request.query.get("stream", "").lower() in ("true", "1"):
            response_id = request.match_info["id"]
            message = f"Unknown response_id: {response_id} (parameter=response_id, value={response_id})"
            raise bad_request(message, "response_id")
        return json_response(stored.body())

    async def _cancel(self, request: web.Request) -> web.StreamResponse:
        stored = self._find(request.match_info["id"])
        if stored.status not in ("queued", "in_progress"):
            raise responses.not_cancellable()
        self._desk.driver.withdraw(stored.ids)
        stored.is_cancelled = True
        return json_response(stored.body())

    def _keep(self, response_id: str, stored: KeptResponse) -> None:
        """Remember a response, if it is to be."""
        if not stored.request.store:
            return
        self._stored[response_id] = stored
        self._size += stored.size
        while len(self._stored) > MAX_STORED or (self._size > MAX_STORED_BYTES and len(self._stored) > 1):
            _, oldest = self._stored.popitem(last=False)
            self._size -= oldest.size
            self._desk.driver.withdraw(oldest.ids)

    def _find(self, response_id: str) -> KeptResponse:
        """The response of an id. Raises ApiError."""
        stored = self._stored.get(response_id)
        if stored is None:
            raise responses.not_found(response_id)
        self._stored.move_to_end(response_id)
        return stored


def _checked(asked: ResponsesCall) -> ResponsesCall:
    if asked.background and not asked.store:
        message = "background can only be used when `store` is true"
        raise bad_request(message, "background")
    return asked
