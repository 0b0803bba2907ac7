# SPDX-License-Identifier: Apache-2.0
"""The network between proxy and servers: T32, connections that close as they are used; T39, a bad one."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import ExitStack
from functools import partial

import pytest

from tests.chaos.load import how_many, needless, silent, told
from tests.chaos.rig import QUICK, Rig, wait
from tests.chaos.threads import threaded
from tests.chaos.tools import packets
from tests.chaos.verdict import pick
from tests.chaos.wire import BadNetwork, Weather
from tests.support.endpoint import NOT_FOUND, OK, Received, ScriptedEndpoint, Wire, answer

MODELS = answer(b'{"object":"list","data":[{"id":"sim","object":"model"}]}')


class Impatient(ScriptedEndpoint):
    """Closes a connection a moment after each answer: just as the next request comes, often."""

    def __init__(self) -> None:
        super().__init__({"/health": OK, "/v1/models": MODELS, "/metrics": NOT_FOUND, "/v1/completions": self._answer})
        self.executed: Counter[str] = Counter()
        self.closed = 0

    async def _answer(self, wire: Wire, request: Received) -> None:
        if wire.writer.transport.is_closing():
            return  # what comes behind an end is not executed
        self.executed[json.loads(request.body)["prompt"]] += 1
        await wire.send(answer(b'{"usage":{"completion_tokens":1}}'))
        number = sum(self.executed.values())
        asyncio.get_running_loop().call_later(0.001 * (number % 8), self._close, wire)

    def _close(self, wire: Wire) -> None:
        self.closed += 1
        wire.close()


@pytest.mark.chaos("T32", "kept connections that the server closes just as they are used again")
def test_t32_keep_alive_race(rig: Rig) -> None:
    case = rig.case
    count = pick(1000, 5000, 5000)
    with threaded(Impatient) as server, rig.proxy(endpoints=[server.url]) as proxy:
        with rig.load(proxy, workers=6, rate=150.0, count=count, tokens=1, streams=0.0) as load:
            results = load.wait()
        case.figure("requests", len(results))
        case.figure("closed by the server", server.closed)
        case.expect("failed", len(results) - how_many(results, "ok"), at_most=0)
        case.expect("executed twice", sum(n > 1 for n in server.executed.values()), at_most=0)
        case.expect("endpoint taken out", proxy.total("lbproxy_endpoint_transitions_total", 'to="down"'), at_most=0)
        print(told(results))


WEATHERS = {
    "200 ms +- 50 ms": Weather(latency_s=0.1, jitter_s=0.025),
    "1 Mbit/s": Weather(bytes_per_s=125_000),
    "slices of 40 bytes": Weather(slice_bytes=40),
    "late closes": Weather(close_after_s=0.5, latency_s=0.01),
}


@pytest.mark.chaos("T39", "a bad network: latency, little bandwidth, small packets, resets, 1 % and 5 % loss")
def test_t39_bad_network(rig: Rig) -> None:
    case = rig.case
    count = pick(40, 160, 400)
    with ExitStack() as stack:
        networks = [stack.enter_context(threaded(partial(BadNetwork, one.port, Weather()))) for one in rig.servers]
        proxy = stack.enter_context(rig.proxy(QUICK, endpoints=[one.url for one in networks]))
        wait(lambda: proxy.total("lbproxy_endpoint_up") == 4, "all are up")
        for name, weather in WEATHERS.items():
            for one in networks:
                one.weather = weather
            with rig.load(proxy, workers=16, count=count, tokens=20, streams=0.7) as load:
                results = load.wait()
            print(name, told(results))
            case.expect(f"{name}: not whole", len(results) - how_many(results, "ok"), at_most=0)
        for one in networks[:2]:
            one.weather = Weather(reset_share=0.01)
        for one in networks[2:]:
            one.weather = Weather()
        with rig.load(proxy, workers=16, count=count, tokens=20, streams=0.7) as load:
            results = load.wait()
        case.figure("resets", sum(one.resets for one in networks))
        case.expect("resets: UF", needless(results), at_most=0)
        case.expect("resets: SF", silent(results), at_most=0)
        case.figure("resets: told", told(results))
        for one in networks:
            one.weather = Weather()
        for share in (0.01, 0.05):
            how = ("-m", "statistic", "--mode", "random", "--probability", str(share))
            with ExitStack() as rules:
                for one in networks:
                    rules.enter_context(packets(one.port, to="DROP", how=how, replies=True))
                with rig.load(proxy, workers=16, count=count, tokens=20, streams=0.7) as load:
                    results = load.wait()
            case.expect(f"{share:.0%} loss: UF", needless(results), at_most=0)
            case.expect(f"{share:.0%} loss: SF", silent(results), at_most=0)
            case.figure(f"{share:.0%} loss: told", told(results))
