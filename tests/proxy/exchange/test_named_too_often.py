# SPDX-License-Identifier: Apache-2.0
"""A body that names a model too often for another name to be put there: refused where that is found out, however the
request came there, and nothing stays in flight.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.outline import MAX_MODEL_KEYS
from tests.support.aio import run
from tests.support.endpoint import (
    LAST,
    STREAM_HEAD,
    Received,
    Script,
    ScriptedEndpoint,
    Wire,
    answer,
    chunk,
    event,
    reset,
)
from tests.support.pool import card
from tests.support.rig import post, rig

FALLBACK = "models: {big: {fallback: [small]}}\n"


def often(model: str) -> bytes:
    named = [{"model": 1}] * (MAX_MODEL_KEYS + 1)
    return json.dumps({"model": model, "stream": True, "messages": [], "x": named}).encode()


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "dialled"])
def test_where_an_endpoint_has_a_name_of_its_own(kept: bool) -> None:
    async def main() -> None:
        async with ScriptedEndpoint(answer()) as one, rig((one.url, "model: its-m, models: [m]")) as it:
            if kept:
                assert (await it.ask(post(b'{"model":"m","messages":[]}'))).status == 200
            assert (await it.ask(post(often("m")))).status == 400
            assert it.records.requests[-1].outcome is Outcome.INVALID_JSON
            assert it.in_flight() == 0
            assert len(one.requests) == kept

    run(main())


async def in_pieces(wire: Wire, _: Received) -> None:
    await wire.send(b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\n")
    await asyncio.sleep(0.05)
    await wire.send(chunk(b"{}"), LAST)


async def in_its_first_event(wire: Wire, _: Received) -> None:
    await wire.send(STREAM_HEAD, event('{"error":{"code":503,"message":"full"}}'), LAST)


FAILS: dict[str, Script] = {
    "at once": answer(status=503),
    "in pieces": in_pieces,
    "in an event": in_its_first_event,
    "by a reset": reset,
}


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "dialled"])
@pytest.mark.parametrize("how", FAILS)
def test_where_another_model_is_to_serve_it(how: str, kept: bool) -> None:
    async def main() -> None:
        one, two = ScriptedEndpoint(FAILS[how]), ScriptedEndpoint(answer())
        async with one, two, rig(one.url, two.url, more=FALLBACK) as it:
            for endpoint, name in zip(it.endpoints, ("big", "small"), strict=True):
                it.runtime.report_models(endpoint.uid, [card(name)])
            if kept:
                assert (await it.ask(post(b'{"model":"small","messages":[]}'))).status == 200
            reply = await it.ask(post(often("big")))
            assert (reply.status, it.in_flight()) == (400, 0)
            assert it.records.requests[-1].outcome is Outcome.INVALID_JSON
            assert len(two.requests) == kept

    run(main())
