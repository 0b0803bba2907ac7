# SPDX-License-Identifier: Apache-2.0
"""Large bodies are read in many short turns of the event loop, in which other requests are served."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from collections.abc import Generator

import pytest

from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.outline import PARSE_AT_ONCE_BYTES
from lbproxy.net.connections.backlog import Backlog
from lbproxy.proxy.front import requests
from lbproxy.proxy.front.bodies import done_in_turns, read_large
from lbproxy.proxy.front.overload import Overload
from lbproxy.proxy.front.turn import Turn
from lbproxy.proxy.request.client_request import ClientRequest
from lbproxy.proxy.request.reading import LargeFacts, RequestReader
from tests.support.aio import run
from tests.support.endpoint import ScriptedEndpoint
from tests.support.rig import post, rig

LARGE = 16 * PARSE_AT_ONCE_BYTES


def upload(size: int) -> bytes:
    """A form with the file before the model."""
    part = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    body = part % (b"file", b"x" * size) + part % (b"model", b"m") + b"--b--\r\n"
    head = b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: lb\r\nContent-Length: %d\r\n" % len(body)
    return head + b"Content-Type: multipart/form-data; boundary=b\r\n\r\n" + body


def prompt(size: int) -> bytes:
    return post(b'{"model":"m","prompt":"%b"}' % (b"word " * (size // 5)), "/v1/completions")


@pytest.mark.parametrize("send", [prompt(LARGE), upload(LARGE)], ids=["JSON", "form"])
def test_a_large_body_leaves_turns_of_the_loop_to_others(send: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies of 15 to 47 MB held the loop for 80 to 176 ms."""
    turns, taken = 0, []

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def counted(
        request: ClientRequest, reading: RequestReader, turn: Turn, overload: Overload, backlog: Backlog
    ) -> asyncio.Future[tuple[ClientRequest, LargeFacts]]:
        began = turns
        read = read_large(request, reading, turn, overload, backlog)
        read.add_done_callback(lambda _: taken.append(turns - began))
        return read

    monkeypatch.setattr(requests, "read_large", counted)

    async def main() -> None:
        counting = asyncio.create_task(count())
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            it.connections.backlog = Backlog(asyncio.get_running_loop(), itertools.count().__next__)
            assert (await it.ask(send)).status == 200
            assert endpoint.requests[0].body == send.partition(b"\r\n\r\n")[2]
        counting.cancel()

    run(main())
    assert len(taken) == 1
    assert taken[0] >= 4, "a turn for each MiB"


def test_a_small_body_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of the loop cost each request more than its few bytes."""

    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(requests, "read_large", never)

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            for send in (prompt(PARSE_AT_ONCE_BYTES - 1000), upload(PARSE_AT_ONCE_BYTES - 1000)):
                assert (await it.ask(send)).status == 200

    run(main())


def test_the_steps_of_many_bodies_take_no_more_of_a_turn_than_those_of_one() -> None:
    """One step of each in every turn: 200 bodies made everybody wait for 200 of them."""
    done = 0

    def steps(number: int) -> Generator[None, None, int]:
        nonlocal done
        for _ in range(number):
            done += 1
            yield
        return number

    async def main() -> None:
        loop = asyncio.get_running_loop()
        backlog = Backlog(loop, itertools.count().__next__)  # a step takes a second
        tasks = [done_in_turns(steps(5 + n), backlog) for n in range(20)]
        tasks[7].cancel()
        while not all(task.done() for task in tasks):
            before = done
            await asyncio.sleep(0)
            assert done - before <= 1
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [one for one in results if isinstance(one, int)] == [5 + n for n in range(20) if n != 7]
        assert done <= sum(range(5, 25)) - 12

    run(main(), plain=True)


class Body:
    """What a reader holds."""


def test_a_body_that_is_refused_is_free_at_once() -> None:
    """An error that refers to what it is raised from, and is referred to by that, is looked at hours later."""
    held: list[weakref.ref[Body]] = []

    def steps() -> Generator[None, None, None]:
        body = Body()
        held.append(weakref.ref(body))
        yield
        raise LbError(Outcome.INVALID_JSON)

    async def main() -> None:
        gc.disable()
        try:
            with pytest.raises(LbError):
                await done_in_turns(steps(), Backlog(asyncio.get_running_loop()))
            assert held[0]() is None
        finally:
            gc.enable()

    run(main())
