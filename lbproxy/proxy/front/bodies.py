# SPDX-License-Identifier: Apache-2.0
"""Reads a request's complete body within its limits: size, time, rate, and the memory for all bodies together.

Memory is counted as bytes arrive and not as they are announced, so that a client that announces much and sends nothing
takes no room. Time and rate are watched by `arrivals`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from io import BytesIO
from typing import Final, Generic, Protocol, TypeAlias, TypeVar, cast

from aiohttp import web
from aiohttp.streams import StreamReader

from lbproxy.config.tree import Settings
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.requests.forms import FormWalk
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.outline import PARSE_AT_ONCE_BYTES, LargeJson
from lbproxy.net.connections.backlog import Backlog
from lbproxy.proxy.front.arrivals import Holder
from lbproxy.proxy.front.connection import ClientConnection, fail_body
from lbproxy.proxy.front.overload import Overload
from lbproxy.proxy.request.client_request import ClientRequest
from lbproxy.proxy.request.headers import RequestFields
from lbproxy.proxy.request.reading import LargeFacts, RequestReader, has_form, has_json
from lbproxy.proxy.request.routes import Form, Route, form_of

Result = TypeVar("Result")
BESIDE: Final = 4
"""What is beside bodies while they arrive takes such a fraction of them, and counts as much: reads that are not in them
yet, room to grow, and the holes that both leave in the heap. With 200 of 60 MB at once it was 127 MiB beside 512."""
Steps: TypeAlias = Generator[None, None, Result]
"""Work in steps of 1 to 2 ms at most."""


class BodyReader(Holder, Protocol):
    """The request whose body is read."""

    @property
    def settings(self) -> Settings:
        """The settings under which it is served."""

    @property
    def record(self) -> RequestRecord:
        """Its record."""


def most_held(overload: Overload) -> int:
    """The largest body for which there is ever room while it arrives."""
    return overload.max_held_bytes * BESIDE // (BESIDE + 1)


async def read_body(
    request: web.BaseRequest,
    fields: RequestFields,
    route: Route,
    reader: BodyReader,
    overload: Overload,
) -> bytes:
    """Read the complete body, which is not counted as held any more. Raises LbError: too large (before it is read, if
    announced), too slow, malformed, or no memory for it.
    """
    limits = reader.settings.limits
    is_json = form_of(route.body, fields.content_type) in {Form.JSON, Form.MAYBE_JSON}
    limit = min(limits.json_body if is_json else limits.body, most_held(overload))
    if fields.content_length is not None and fields.content_length > limit:
        raise _too_large(limit)
    content = request.content
    if content.is_eof():  # it arrived with the head, as most do
        body = content.read_nowait(-1)
        if len(body) > limit:
            raise _too_large(limit)
        return body
    client = cast(ClientConnection, request.protocol)
    if fields.expects_continue and client.transport is not None:
        client.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    client.read_from(content)
    try:
        return await _read_up_to(limit, content, reader, overload, fields.content_length or 0)
    except web.RequestPayloadError as error:
        raise LbError(Outcome.BAD_REQUEST, "The request body is malformed.") from error
    finally:
        client.body_reader = None


async def _read_up_to(
    limit: int, content: StreamReader, reader: BodyReader, overload: Overload, announced: int
) -> bytes:
    """Read up to `limit` bytes; `announced` are expected, if that is known. Raises LbError when they are given up."""
    body = ArrivingBody(reader, overload, announced, lambda error: fail_body(content, error))
    try:
        while piece := await content.readany():
            if body.size + len(piece) > limit:
                raise _too_large(limit)
            body.add(piece)
        return body.take()
    finally:  # an error refers to this frame, and is itself referred to by what it refers to
        body.drop()
        piece = b""


class ArrivingBody:
    """A body as far as it has arrived, counted and watched.

    It grows in place: glibc moves the pages of what is mapped (telemetry.memory), and `getvalue` copies nothing. As a
    list of pieces that are joined it took twice the memory, and left holes as large as that in the heap.
    """

    def __init__(
        self, reader: BodyReader, overload: Overload, announced: int, give_up: Callable[[LbError], None]
    ) -> None:
        """`announced`: bytes that are expected; 0: not known. `give_up`: ends it, with the error for its sender."""
        self.size = 0
        self.announced = announced
        self._reader, self._overload = reader, overload
        self._body = BytesIO()
        limits, within_s = reader.settings.limits, reader.settings.timeouts.client_body
        overload.arrivals.begin(reader, limits.body_rate, give_up, within_s=within_s)

    def add(self, piece: bytes) -> None:
        """More of it arrived. Raises LbError if there is no memory for it."""
        self.size += len(piece)
        self._overload.arrivals.moved(self._reader, len(piece))
        beside = len(piece) // BESIDE
        self._overload.hold(self._reader, len(piece) + beside, max(self.announced, self.size))
        self._body.write(piece)

    def take(self) -> bytes:
        """All of it, which is not counted as held any more: the caller counts it before anything else happens."""
        body = self._body.getvalue()
        self._overload.release(self._reader)
        self.drop()
        return body

    def drop(self) -> None:
        """It is not read on. A repeated call has no effect."""
        self._overload.arrivals.end(self._reader)
        self._body.close()


class LaneBody:
    """The body of a request in the fast lane that comes in several reads."""

    def __init__(self, body: ArrivingBody, arrived: Callable[[bytes], None], refuse: Callable[[LbError], None]) -> None:
        self.missing = body.announced
        """Bytes that are still to come."""
        self._body = body
        self._arrived, self._refuse = arrived, refuse

    def received(self, piece: bytes) -> None:
        """Some of the missing bytes."""
        self.missing -= len(piece)
        try:
            self._body.add(piece)
        except LbError as error:
            self._refuse(error)
            return
        if not self.missing:
            self._arrived(self._body.take())

    def drop(self) -> None:
        """The rest is not waited for."""
        self._body.drop()


def is_large(request: ClientRequest) -> bool:
    """It is read in many turns of the loop, by `read_large`."""
    return len(request.body) > PARSE_AT_ONCE_BYTES and (has_json(request) or has_form(request))


def read_large(
    request: ClientRequest, reading: RequestReader, reader: BodyReader, overload: Overload, backlog: Backlog
) -> asyncio.Future[tuple[ClientRequest, LargeFacts]]:
    """Read a request with a large body, JSON or a form, in many short turns of the loop, until the future is
    cancelled. Its result is the request to send, and its content, or an LbError. Raises LbError.
    """
    overload.hold(reader, len(request.body))
    return done_in_turns(_read(request, reading, reader.record), backlog)


def _read(
    request: ClientRequest, reading: RequestReader, record: RequestRecord
) -> Steps[tuple[ClientRequest, LargeFacts]]:
    body = request.body
    large = LargeJson(body) if has_json(request) else FormWalk(body, request.fields.content_type)
    while large.step():
        yield
    yield  # what comes next takes long enough
    facts, request = reading.read(request, record, large)
    flattening, prompt = reading.flattening(request, facts), None
    if flattening is not None:
        yield
        while flattening.step():
            yield
        yield
        prompt = flattening.prompt()
    return request, LargeFacts(facts, prompt)


def done_in_turns(steps: Steps[Result], backlog: Backlog) -> asyncio.Future[Result]:
    """Do all steps, in later turns of the loop, beside what others have to do: until the future is cancelled. Its
    result is what they return, or raise.
    """
    return _Stepper(steps, backlog).result


class _Stepper(Generic[Result]):
    """A net.connections.backlog.Walker with steps to do."""

    def __init__(self, steps: Steps[Result], backlog: Backlog) -> None:
        self.result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._steps = steps
        self._backlog = backlog
        backlog.add(self)

    def walk_on(self) -> None:
        result = self.result
        if result.done():
            return  # who waited for it has gone
        try:
            next(self._steps)
        except StopIteration as end:
            result.set_result(end.value)
        except LbError as error:
            result.set_exception(error.with_traceback(None))  # which would refer to this
        except Exception as error:  # noqa: BLE001 - who waits for it gets it
            result.set_exception(error)
        else:
            self._backlog.add(self)


def _too_large(limit: int) -> LbError:
    return LbError(Outcome.TOO_LARGE, f"The request body is larger than {limit} bytes.")
