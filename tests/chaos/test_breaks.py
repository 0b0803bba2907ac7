# SPDX-License-Identifier: Apache-2.0
"""Answers that break off, begin late, or come slowly: T06 to T09."""

from __future__ import annotations

import itertools
import json

import httpx
import openai
import pytest
from openai import OpenAI

from tests.chaos.load import how_many, needless, silent, told
from tests.chaos.rig import QUICK, Rig
from tests.chaos.verdict import pick

TIMEOUT = "upstream_timeout"
CUTS = list(
    itertools.product(("fin", "rst")[: pick(1, 2, 2)], ("event", "chunk", "line"), ("chunked", "close", "http/1.0"))
)
"""how · where · framing. Without chunks there is no inside of a chunk, and the cut is then inside the line."""


@pytest.mark.chaos("T06", "a stream is reset in the middle", peers=True)
def test_t06_reset_in_mid_stream(rig: Rig) -> None:
    case = rig.case
    server = rig.servers[0]
    count = pick(50, 100, 100)
    with rig.proxy(endpoints=[server.url]) as proxy:
        server.fault("break how=rst at=event events=20")
        with rig.load(proxy, workers=25, count=count, keep_alive=False) as load:
            results = load.wait()
        case.expect("explicit errors", how_many(results, "told", "cut", "reset"), at_least=count)
        case.expect("SF", silent(results), at_most=0)
        case.expect("events before it", min(one.events for one in results), at_least=19)  # a reset may overtake one
        case.time("error after the last event, p50", sorted(one.gap_s for one in results)[count // 2], at_most=0.1)
        print(told(results))


@pytest.mark.chaos(
    "T07",
    "an answer ends in the middle, in every place and framing; what OpenAI's SDK makes of it",
    peers=True,
)
def test_t07_end_in_mid_body(rig: Rig) -> None:
    case = rig.case
    server = rig.servers[0]
    each = pick(4, 8, 17)
    count = seen = glued = 0
    failures: list[str] = []
    raised = 0
    with (
        rig.proxy(endpoints=[server.url]) as proxy,
        OpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0, timeout=20) as client,
    ):
        for how, at, framing in CUTS:
            server.fault(f"break how={how} at={at} framing={framing} events=3")
            with rig.load(proxy, workers=each, count=2 * each, tokens=12, streams=0.5, keep_alive=False) as load:
                results = load.wait()
            count += len(results)
            seen += how_many(results, "told", "cut", "reset", "error", "dropped")
            glued += how_many(results, "glued")
            failures += [f"{how} {at} {framing}: {told(results)}"] * bool(silent(results))
            raised += sdk_raises(client)
        case.figure("ways", len(CUTS))
        case.figure("answers", count)
        case.expect("SF", count - seen - glued, at_most=0)
        case.expect("error events inside a line", glued, at_most=0)
        case.expect("SDK raised an OpenAI error", raised, at_least=len(CUTS))
        print("\n".join(failures))


def sdk_raises(client: OpenAI) -> bool:
    """Whether a program that uses the SDK sees that the stream broke."""
    try:
        for _ in client.completions.create(model="sim", prompt="x", max_tokens=12, stream=True):
            pass
    except (openai.OpenAIError, httpx.TransportError):
        return True
    except json.JSONDecodeError:
        return False
    return False


@pytest.mark.chaos("T08", "the head of the answer comes at 1 byte/s")
def test_t08_slow_heads(rig: Rig) -> None:
    case = rig.case
    for server in rig.servers:
        server.fault("slow-head every=1")
    count = pick(20, 50, 50)
    with rig.proxy(QUICK.replace("first_byte: 20s", "first_byte: 2s")) as proxy:
        before = proxy.rss_mib()
        with rig.load(proxy, workers=count, count=count, keep_alive=False) as load:
            results = load.wait()
        grown = proxy.rss_mib() - before
        case.expect(
            "504 upstream_timeout",
            # With `stream_keepalive` the client has a head by then, and is told in an event.
            sum((r.how, r.status, r.code) in {("error", 504, TIMEOUT), ("told", 200, TIMEOUT)} for r in results),
            at_least=count,
        )
        case.time("earliest before the deadline", max(0.0, 2.0 - min(one.seconds for one in results)), at_most=0.05)
        case.time("latest after the deadline", max(one.seconds for one in results) - 2.0, at_most=0.5)
        case.expect("memory for each, KiB", round(max(0.0, 1024 * grown / count), 1), at_most=64 + 4096 / count)
        print(told(results))


@pytest.mark.chaos("T09", "slow but alive: an event now and then", peers=True)
def test_t09_slow_but_alive(rig: Rig) -> None:
    case = rig.case
    for server in rig.servers:
        server.fault("slow-stream every=1")
    count = pick(20, 50, 50)
    tokens = pick(4, 8, 60)
    with rig.proxy() as proxy:
        with rig.load(proxy, workers=count, count=count, tokens=tokens, deadline_s=3 * tokens + 20.0) as load:
            results = load.wait()
        case.expect("whole", how_many(results, "ok"), at_least=count)
        case.figure("seconds each", max(one.seconds for one in results))
        case.expect("UF", needless(results), at_most=0)
        case.expect("SF", silent(results), at_most=0)
