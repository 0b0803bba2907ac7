# SPDX-License-Identifier: Apache-2.0
"""Ids of requests: an engine never has two requests of one id, whatever clients send; and nobody guesses another's."""

from __future__ import annotations

import asyncio
import re

import pytest

from lbproxy.control.telemetry.access_line import access_line
from lbproxy.control.telemetry.recent import Recent
from tests.support.aio import run, until
from tests.support.endpoint import OK, Received, Script, ScriptedEndpoint, Wire, reset
from tests.support.rig import RawClient, post, rig
from tests.support.workers import WORKERS

OURS = re.compile("[0-9a-f]{24}")
SUFFIX = re.compile("-[0-9a-f]{16}")


def test_an_id_says_nothing_of_any_other() -> None:
    """They were a prefix and a number: whoever got one knew the next client's."""

    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            ids = [str((await it.ask(post())).field("x-request-id")) for _ in range(300)]
            assert all(OURS.fullmatch(one) for one in ids)
            assert len({one[:8] for one in ids}) == len({one[-8:] for one in ids}) == 300
            assert [one.field("x-request-id") for one in endpoint.requests] == ids
            assert not any(one.encode() in endpoint.requests[0].head.partition(b"Via:")[2][:60] for one in ids)

    run(main())


def test_two_requests_of_one_id_are_two_at_the_engine() -> None:
    """Of one client or of several, at the same time: older vLLM ended on that. Each client has the id that it sent."""
    go = asyncio.Event()

    async def waits(wire: Wire, request: Received) -> None:
        await go.wait()
        await wire.send(OK)

    async def main() -> None:
        async with ScriptedEndpoint(waits) as endpoint, rig(endpoint.url) as it:
            said = "x" * 128
            clients: list[RawClient] = [await it.connect() for _ in range(3)]
            for client in clients:
                client.send(post(more=f"x-request-id: {said}\r\n"))
            await until(lambda: len(endpoint.requests) == 3, "all run")
            known = [str(one.field("x-request-id")) for one in endpoint.requests]
            # A client that has seen what the engine made of another's id gets no further with it.
            more = await it.connect()
            more.send(post(more="x-request-id: stolen-0123456789abcdef\r\n"))
            await until(lambda: len(endpoint.requests) == 4, "it runs")
            known.append(str(endpoint.requests[3].field("x-request-id")))
            assert len(set(known)) == 4
            assert all(SUFFIX.fullmatch(one.removeprefix(said)) for one in known[:3])
            assert SUFFIX.fullmatch(known[3].removeprefix("stolen-0123456789abcdef"))
            go.set()
            assert [(await one.reply()).field("x-request-id") for one in clients] == [said] * 3
            assert (await more.reply()).field("x-request-id") == "stolen-0123456789abcdef"

    run(main())


@pytest.mark.parametrize("more", ["", "x-request-id: mine\r\n"])
def test_an_attempt_has_another_id_than_the_one_before(more: str) -> None:
    """An engine may still run the attempt that broke for us."""

    async def main() -> None:
        seen: list[Received] = []
        script = once_reset(seen)
        async with ScriptedEndpoint(script) as one, ScriptedEndpoint(script) as two, rig(one.url, two.url) as it:
            reply = await it.ask(post(more=more))
            assert reply.status == 200
            first, second = [str(one.field("x-request-id")) for one in seen]
            assert second == f"{first}.2"
            assert reply.field("x-request-id") == ("mine" if more else first)

    run(main())


def once_reset(seen: list[Received]) -> Script:
    """Breaks the first connection."""

    async def serve(wire: Wire, request: Received) -> None:
        seen.append(request)
        if len(seen) == 1:
            await reset(wire, request)
        else:
            await wire.send(OK)

    return serve


@pytest.mark.parametrize("sent", ["mine", "a-0123456789abcdef", "n.5", "chatcmpl-x"])
def test_a_request_is_found_by_what_its_client_and_its_engine_call_it(sent: str) -> None:
    """And in the log by both."""

    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            for _ in range(3):
                await it.ask(post(more=f"x-request-id: {sent}\r\n"))
            await it.settle()
            recent = Recent(10, it.runtime.now, list)
            recent.ended(it.records.requests)
            ids = [str(one.field("x-request-id")) for one in endpoint.requests]
            for at, made in enumerate(ids):
                for name in (made, f"chatcmpl-{made}", f"cmpl-{made}", f"{made}.2"):
                    found = recent.explain(name)
                    assert found is not None
                    assert (found["id"], found["engine_id"]) == (sent, made), at
            found = recent.explain(sent)
            assert found is not None
            assert found["engine_id"] == ids[-1]
            if not WORKERS:
                line = access_line(it.records.requests[0], b"now")
                assert b'"id":"%b"' % sent.encode() in line
                assert b'"engine_id":"%b"' % ids[0].encode() in line

    run(main())
