# SPDX-License-Identifier: Apache-2.0
"""The stages of a relay: its table says what happens, no less and no more (`conftest.stages` sees to the latter)."""

from __future__ import annotations

import asyncio

from tests.proxy.conftest import Stages
from tests.support.aio import run, until
from tests.support.compiled import interpreted
from tests.support.endpoint import LAST, STREAM_HEAD, Received, ScriptedEndpoint, Wire, event
from tests.support.rig import post, rig
from tests.support.state_tables import STAGES


@interpreted
def test_every_stage_of_the_table_is_taken_by_something(stages: Stages) -> None:
    first = asyncio.Event()

    async def script(wire: Wire, request: Received) -> None:
        if b"at once" in request.body:
            await wire.send(STREAM_HEAD + event("1") + LAST)
        elif b"refused" in request.body:
            await wire.send(STREAM_HEAD + event('{"error":{"message":"no","code":503}}'))
        elif b"late" in request.body:
            await wire.send(STREAM_HEAD)
            await first.wait()
            await wire.send(event("1") + LAST)
        else:
            await wire.send(STREAM_HEAD)
            await first.wait()
            wire.reset()

    def ask(how: str) -> bytes:
        return post(b'{"model":"m","stream":true,"user":"%b"}' % how.encode())

    async def main() -> None:
        more = "retry: {budget_per_second: 100}"
        async with (
            ScriptedEndpoint(script) as one,
            ScriptedEndpoint(script) as two,
            rig(one.url, two.url, more=more) as it,
        ):
            for how in ("at once", "refused"):
                client = await it.connect()
                client.send(ask(how))
                await client.reader.read(1)
                client.writer.transport.abort()
            clients = [await it.connect() for _ in range(2)]
            for client, how in zip(clients, ("late", "dies"), strict=True):
                client.send(ask(how))
                await client.reader.readuntil(b"\r\n\r\n")  # the head alone
            first.set()
            for client in clients:
                await client.reader.read(1)
            await until(lambda: it.in_flight() == 0)

    run(main())
    assert stages.taken == STAGES
