# SPDX-License-Identifier: Apache-2.0
"""A model that no endpoint listed may be there by now: endpoints are asked anew, seldom, while the request waits."""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from lbproxy.config.sections.health import HealthSettings
from lbproxy.control.probing.prober import Prober
from lbproxy.core.endpoints.endpoint import EndpointSpec, EndpointUid
from lbproxy.core.endpoints.health import Health
from lbproxy.core.requests.openai import synthetic_card
from lbproxy.driver.model_look import LOOK_AGAIN_S, LOOK_S
from tests.support.aio import run, until
from tests.support.endpoint import OK, Script, ScriptedEndpoint, answer
from tests.support.rig import Rig, post, rig


class Reader:
    """As a prober does: asked soon, it reports what its server lists."""

    def __init__(self, it: Rig, uid: EndpointUid, *names: str, says: bool = True) -> None:
        self.it, self.uid, self.names, self.says = it, uid, list(names), says
        self.url = next(one.base_url for one in it.endpoints if one.uid == uid)
        self.asked = 0

    async def refresh_models(self) -> None:
        self.asked += 1
        if self.says:
            self.it.runtime.report_models(self.uid, [synthetic_card(name) for name in self.names])

    def doubt_models(self) -> None:
        self.it.runtime.loop.call_later(0.05, lambda: asyncio.ensure_future(self.refresh_models()))


def asking(it: Rig, *readers: Reader) -> AsyncExitStack:
    stack = AsyncExitStack()
    for reader in readers:
        stack.enter_context(it.runtime.model_readers.kept(reader.url, reader))
        it.runtime.report_models(reader.uid, [synthetic_card(name) for name in reader.names])
    return stack


NEW = post(b'{"model":"new"}')


def test_a_model_that_was_loaded_since_is_found_and_a_name_that_nobody_has_is_404() -> None:
    async def main() -> None:
        async with ScriptedEndpoint(OK) as one, ScriptedEndpoint(OK) as two, rig(one.url, two.url) as it:
            first, second = (Reader(it, endpoint.uid, "m") for endpoint in it.endpoints)
            async with asking(it, first, second):
                second.names.append("new")
                replies = await asyncio.gather(it.ask(NEW), it.ask(NEW), it.ask(post(b'{"model":"never"}')))
                assert [reply.status for reply in replies] == [200, 200, 404]
                assert (first.asked, second.asked) == (1, 1), "one look for all"
                assert len(two.requests) == 2
                assert not it.in_flight()

    run(main())


def test_many_names_that_nobody_has_cost_one_look() -> None:
    async def main() -> None:
        async with ScriptedEndpoint(OK) as one, rig(one.url) as it:
            reader = Reader(it, it.endpoints[0].uid, "m")
            async with asking(it, reader):
                for n in range(50):
                    body = json.dumps({"model": f"x{n}"}).encode()
                    assert (await it.ask(post(body))).status == 404
                assert reader.asked == 1
                it.runtime._model_look._began_at -= LOOK_AGAIN_S
                assert (await it.ask(NEW)).status == 404
                assert reader.asked == 2
                assert not one.requests

    run(main())


@pytest.mark.parametrize("leaves", [True, False])
def test_an_endpoint_that_does_not_say_holds_nobody_for_long(leaves: bool) -> None:
    async def main() -> None:
        async with ScriptedEndpoint(OK) as one, rig(one.url) as it:
            reader = Reader(it, it.endpoints[0].uid, "m", says=False)
            async with asking(it, reader):
                client = await it.connect()
                began = time.monotonic()
                client.send(NEW)
                if leaves:
                    await asyncio.sleep(0.1)
                    client.writer.transport.abort()
                    await until(lambda: it.records.requests)
                    await asyncio.sleep(LOOK_S)
                    assert it.records.requests[0].status == 0
                    return
                assert (await client.reply()).status == 404
                assert time.monotonic() - began >= LOOK_S * 0.9

    run(main())


def test_nobody_is_asked_whose_models_the_settings_say() -> None:
    async def main() -> None:
        async with ScriptedEndpoint(OK) as one, rig(one.url) as it:
            reader = Reader(it, it.endpoints[0].uid, "m")
            async with asking(it, reader):
                it.runtime._members[reader.uid] = replace(it.endpoints[0], models=("m",))
                assert (await it.ask(NEW)).status == 404
                assert reader.asked == 0

    run(main())


def test_what_an_operator_drained_stays_so_when_discovery_loses_it_for_a_while() -> None:
    async def main() -> None:
        async with ScriptedEndpoint(OK) as one, ScriptedEndpoint(OK) as two, rig(one.url, two.url) as it:
            it.runtime.drain(it.endpoints[0].uid)
            specs = [EndpointSpec(name=one.name, base_url=one.base_url) for one in it.endpoints]
            it.runtime.set_endpoints(specs[1:])
            added = it.runtime.set_endpoints(specs).added
            assert [one.name for one in added] == ["e1"]
            assert {one.endpoint.name: one.draining for one in it.snapshots()} == {"e1": True, "e2": False}
            it.runtime.drain(added[0].uid, draining=False)
            it.runtime.set_endpoints(specs[1:])
            it.runtime.set_endpoints(specs)
            assert not any(one.draining for one in it.snapshots())

    run(main())


def test_an_endpoint_that_a_trial_brings_back_is_asked_for_its_models() -> None:
    """No probe may have seen that it was started anew: by others, or with other models."""

    async def main() -> None:
        async with ScriptedEndpoint(OK) as one, rig(one.url) as it:
            reader = Reader(it, it.endpoints[0].uid, "m")
            async with asking(it, reader):
                reader.names = ["new"]
                for _ in range(5):
                    it.runtime.report_health(reader.uid, False, "503", refused=False)
                assert it.runtime.health(reader.uid) is Health.DOWN
                for _ in range(20):
                    await it.ask(post(b'{"model":"m"}'))
                    if it.runtime.health(reader.uid) is Health.UP:
                        break
                    await asyncio.sleep(0.2)
                await until(lambda: reader.asked, "asked")
                await until(lambda: [card.id for card in it.runtime.serving.model_cards()] == ["new"], "its new list")

    run(main())


def test_a_server_that_comes_back_with_other_models_between_two_probes_is_asked_for_them() -> None:
    """A trial request found it first: what it lists now must not wait for the next look, half a minute later."""

    def listing(name: str) -> bytes:
        return answer(b'{"object":"list","data":[{"id":"%b","object":"model"}]}' % name.encode())

    async def main() -> None:
        paths: dict[str, Script] = {"/health": OK, "/v1/models": listing("m"), "/v1/chat/completions": OK}
        more = "health: {fall: 1, rise: 1}"
        async with ScriptedEndpoint(paths) as server, rig(server.url, more=more) as it:
            seldom = HealthSettings(interval=3600.0, down_interval=3600.0)
            prober = Prober(it.endpoints[0], it.runtime, it.connections, seldom, random.Random(1))
            probing = asyncio.create_task(prober.run())
            await until(lambda: server.asked("/v1/models") == server.asked("/health") == 1, "it was asked once")
            await server.stop()
            assert (await it.ask(post())).status >= 500
            uid = it.endpoints[0].uid
            assert it.runtime.health(uid) is Health.DOWN
            server.scripts["/v1/models"] = listing("new")
            async with server:
                while it.runtime.health(uid) is not Health.UP:
                    await it.ask(post())
                await until(lambda: [card.id for card in it.runtime.serving.model_cards()] == ["new"], "its new list")
                assert (await it.ask(NEW)).status == 200
                assert (await it.ask(post())).status == 404
                assert server.asked("/health") == 1
            probing.cancel()

    run(main())
