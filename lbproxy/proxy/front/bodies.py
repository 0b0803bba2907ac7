# SPDX-License-Identifier: Apache-2.0
"""Reads a request's complete body within its limits: size, time, rate, and the memory for all bodies together.

For requests that aiohttp reads; those of the fast lane come with their body. Memory is counted as bytes arrive and not
as they are announced, so that a client that announces much and sends nothing takes no room. Time and rate are watched
by `arrivals`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from io import BytesIO
from typing import Final, Generic, Protocol, TypeAlias, TypeVar, cast

from aiohttp import web
from aiohttp.streams import StreamReader

from lbproxy.config.tree import Settings
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.requests.forms import FormWalk
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.outline import LargeJson
from lbproxy.net.connections.backlog import Backlog
from lbproxy.proxy.front.arrivals import Holder
from lbproxy.proxy.front.connection import ClientConnection, fail_body
from lbproxy.proxy.front.overload import Overload
from lbproxy.proxy.request.client_request import ClientRequest
from lbproxy.proxy.request.headers import RequestFields
from lbproxy.proxy.request.reading import LargeFacts, RequestReader, has_json
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
    limit = min(limits.json_body if is_json else limits.body, overload.max_held_bytes * BESIDE // (BESIDE + 1))
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
        body = await _read_up_to(limit, content, reader, overload, fields.content_length or 0)
        overload.release(reader)  # the caller counts it, once, before anything else happens
        return body
    except web.RequestPayloadError as error:
        raise LbError(Outcome.BAD_REQUEST, "The request body is malformed.") from error
    finally:
        client.body_reader = None
        overload.arrivals.end(reader)


async def _read_up_to(
    limit: int, content: StreamReader, reader: BodyReader, overload: Overload, announced: int
) -> bytes:
    """Read up to `limit` bytes; `announced` are expected, if that is known. Raises LbError when they are given up.

    The body grows in place: glibc moves the pages of what is mapped (telemetry.memory), and `getvalue` copies nothing.
    As a list of pieces that are joined it took twice the memory, and left holes as large as that in the heap.
    """
    arrivals, settings = overload.arrivals, reader.settings
    rate, within_s = settings.limits.body_rate, settings.timeouts.client_body
    arrivals.begin(reader, rate, lambda error: fail_body(content, error), within_s=within_s)
    size, body = 0, BytesIO()
    try:
        while piece := await content.readany():
            size += len(piece)
            if size > limit:
                raise _too_large(limit)
            arrivals.moved(reader, len(piece))
            overload.hold(reader, len(piece) + len(piece) // BESIDE, max(announced, size))
            body.write(piece)
        return body.getvalue()
    finally:  # an error refers to this frame, and is itself referred to by what it refers to
        body.close()
        piece = b""


async def read_large(
    request: ClientRequest, reading: RequestReader, reader: BodyReader, overload: Overload, backlog: Backlog
) -> tuple[ClientRequest, LargeFacts]:
    """Read a request with a large body, JSON or a form, in many short turns of the loop. Returns the request to
    send, and its content. Raises LbError.
    """
    overload.hold(reader, len(request.body))
    return await done_in_turns(_read(request, reading, reader.record), backlog)


def _read(
    request: ClientRequest, reading: RequestReader, record: RequestRecord
) -> Steps[tuple[ClientRequest, LargeFacts]]:
    body = request.body
    large = LargeJson(body) if has_json(request) else FormWalk(body, request.fields.content_type)
    yield  # it counted commas and brackets of up to 4 MiB, and may parse all of it now
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


async def done_in_turns(steps: Steps[Result], backlog: Backlog) -> Result:
    """Do all steps, in later turns of the loop, beside what others have to do. Returns what they return, or raises
    that.
    """
    # Nothing here refers to the future: an error that it raises would refer to this, and so for hours to itself.
    return await _Stepper(steps, backlog).result


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
