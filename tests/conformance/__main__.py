# SPDX-License-Identifier: Apache-2.0
"""The tables' score of lbproxy or another gateway, for docs/reliability.md.

    python -m tests.conformance NAME        lbproxy, nginx, sglang-router, vllm-router

A gateway passes a case if it does what the RFC asks of every gateway, in one write and in pieces; where the RFC leaves
it open, serving and refusing are both right. Cases about lbproxy's own paths, names and limits are left out. Kept in
tests/conformance/results/NAME.json; LBPROXY_WRITE_DOCS=1 with tests/test_docs_reliability.py then writes the table.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import uvloop

from tests.chaos.peers import PEERS
from tests.conformance import client_cases, seen_cases, upstream_cases
from tests.conformance.case import GOOD, ClientCase
from tests.conformance.judge import answer_with, answered_as_any, as_any_gateway, asking, seen_as_any
from tests.conformance.report import RESULTS, Score
from tests.conformance.seen_cases import SeenCase
from tests.conformance.upstream_cases import UpstreamCase
from tests.conformance.wire import Endpoint, Heard, Talk
from tests.support.rig import rig

PACES = ("whole", "paused")
PAUSE_S = 0.003
QUIET_S = 0.25
"""How long after an answer another one is waited for."""
HANGS_S = 2.0


async def listen(talk: Talk, most: int) -> Heard:
    """What comes: until there is enough, the end, or silence."""
    await talk.hear(lambda heard: bool(heard.answers) and heard.answers[0].whole, HANGS_S)
    if talk.heard.answers and not talk.heard.ended:
        await talk.hear(lambda heard: sum(one.whole for one in heard.answers) > most, QUIET_S)
    return talk.heard


async def client_case(case: ClientCase, port: int, endpoint: Endpoint, pace: str) -> str:
    endpoint.seen.clear()
    talk = await Talk.open(port)
    try:
        await talk.say(case.send, pace, PAUSE_S)
        if case.ends:
            talk.writer.write_eof()
        heard = await listen(talk, case.most)
        wrong = as_any_gateway(case, heard, endpoint)
        return "" if case.ends and not endpoint.seen else wrong
    finally:
        talk.close()


async def upstream_case(case: UpstreamCase, port: int, endpoint: Endpoint, pace: str) -> str:
    answer_with(case, endpoint, pace)
    talk = await Talk.open(port)
    talk.heard.method = case.method
    try:
        await talk.say(asking(case.method), "whole")
        wrong = answered_as_any(case, await listen(talk, 1))[1]
        endpoint.script = endpoint.greeting = None
        await asyncio.sleep(0.02)
        return wrong or await recovers(port)
    finally:
        talk.close()


async def recovers(port: int) -> str:
    """The next requests are answered by their own answers: at the latest the third, as breakers may be open."""
    for _ in range(3):
        other = await Talk.open(port)
        await other.say(GOOD, "whole")
        heard = await other.hear(lambda heard: bool(heard.answers) and heard.answers[0].whole, HANGS_S)
        other.close()
        statuses = [one.status for one in heard.answers]
        if statuses == [200]:
            return ""
        if statuses and statuses[0] < 500:
            return f"the next request is answered {statuses}"
        await asyncio.sleep(0.5)
    return "does not recover"


async def seen_case(case: SeenCase, port: int, endpoint: Endpoint, pace: str) -> str:
    endpoint.seen.clear()
    talk = await Talk.open(port)
    try:
        await talk.say(case.send, pace, PAUSE_S)
        await listen(talk, 1)
        return seen_as_any(case, endpoint)
    finally:
        talk.close()


@asynccontextmanager
async def gateway(name: str, endpoint: Endpoint) -> AsyncIterator[int]:
    """Its port, once it answers."""
    if name == "lbproxy":
        more = "breaker: {consecutive_failures: 1000, success_rate: 0}\nretry: {attempts: 1}"
        async with rig(endpoint.url, more=more) as it:
            yield it.port
        return
    with tempfile.TemporaryDirectory() as folder:
        peer = PEERS[name]
        if name.endswith("router"):  # one case must not decide the next
            peer = replace(peer, command=(*peer.command, "--disable-circuit-breaker", "--disable-retries"))
        starting = peer.start([endpoint.url], Path(folder))
        _, url = await asyncio.to_thread(starting.__enter__)
        try:
            yield int(url.rpartition(":")[2])
        finally:
            await asyncio.to_thread(starting.__exit__, None, None, None)


async def score(name: str) -> Score:
    """Every case that concerns others too, by table and group: how many, and which fail how."""
    found = Score(name=name, groups={}, failed={})

    def note(group: str, case: str, problems: list[str]) -> None:
        passed, of = found["groups"].get(group, (0, 0))
        wrong = next((f"{pace}: {one}" for pace, one in zip(PACES, problems, strict=True) if one), "")
        found["groups"][group] = (passed + (not wrong), of + 1)
        if wrong:
            found["failed"][f"{group}: {case}"] = wrong

    async with Endpoint() as endpoint, gateway(name, endpoint) as port:
        for one in client_cases.CASES:
            if not one.own:
                note(one.group, one.name, [await client_case(one, port, endpoint, pace) for pace in PACES])
        for two in seen_cases.CASES:
            if not two.own:
                note("what endpoints see", two.name, [await seen_case(two, port, endpoint, pace) for pace in PACES])
        for three in upstream_cases.CASES:
            if not three.own and three.method == "POST":
                group = {"head": "bad heads of answers", "answer": "good answers"}.get(three.group, "bodies of answers")
                note(group, three.name, [await upstream_case(three, port, endpoint, pace) for pace in PACES])
    return found


if __name__ == "__main__":
    result = uvloop.run(score(sys.argv[1]))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{result['name']}.json").write_text(json.dumps(result, indent=1) + "\n")
    for failed, why in result["failed"].items():
        print(f"{failed}: {why}")
    print(f"{sum(one for one, _ in result['groups'].values())} of {sum(of for _, of in result['groups'].values())}")
