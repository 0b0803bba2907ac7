# SPDX-License-Identifier: Apache-2.0
"""T33: thousands of requests that hide another one. Each is refused, or the endpoint gets it once, with its body."""

from __future__ import annotations

import asyncio
import re

from tests.conformance.gadgets import Gadget, gadgets
from tests.conformance.wire import Endpoint, Talk
from tests.support.aio import run
from tests.support.rig import rig

AT_ONCE = 64
WAIT_S = 0.5
"""For one that waits for more of its body. What was hidden would be answered at once."""


async def send(gadget: Gadget, number: int, port: int) -> None:
    """On a connection of its own, marked so that the endpoint's side can tell."""
    first, _, rest = gadget.data.partition(b"\r\n")
    talk = await Talk.open(port)
    try:
        await talk.say(first + b"\r\nX-Gadget: %d\r\n" % number + rest, "whole")
        heard = await talk.hear(lambda heard: bool(heard.answers), WAIT_S)
        if heard.answers and not heard.ended:  # what was hidden would be answered now
            await talk.say(b"GET /v1/models HTTP/1.1\r\nHost: lb\r\n\r\n", "whole")
            await talk.hear(lambda heard: len(heard.answers) > 1, WAIT_S)
    finally:
        talk.close()


def wrong_with(every: list[Gadget], endpoint: Endpoint) -> list[str]:
    """Everything that the endpoint got and must not have got."""
    wrong = []
    counts = [0] * len(every)
    for seen in endpoint.seen:
        numbers = seen.values("x-gadget")
        if len(numbers) != 1:
            wrong.append(f"smuggled: {seen.line}")
            continue
        gadget = every[int(numbers[0])]
        counts[int(numbers[0])] += 1
        framing = [name for name in seen.names if re.sub("[^a-z]", "", name) in {"contentlength", "transferencoding"}]
        if seen.body != gadget.body or framing.count("content-length") != 1 or "transfer-encoding" in framing:
            wrong.append(f"{gadget.family}: {framing}, {seen.body[:60]!r}: {gadget.data[:200]!r}")
    wrong += [f"{every[n].family}: {count} times: {every[n].data!r}" for n, count in enumerate(counts) if count > 1]
    return wrong


def test_nothing_is_smuggled() -> None:
    every = gadgets()
    assert len(every) >= 1700

    async def main() -> None:
        async with Endpoint() as endpoint, rig(endpoint.url) as it:
            for start in range(0, len(every), AT_ONCE):
                group = list(enumerate(every[start : start + AT_ONCE], start))
                await asyncio.gather(*(send(gadget, number, it.port) for number, gadget in group))
            wrong = wrong_with(every, endpoint)
            assert not wrong, "\n".join(wrong[:20])
            served = len({seen.values("x-gadget")[0] for seen in endpoint.seen})
            print(f"{len(every)} gadgets: {served} served once, {len(every) - served} refused, 0 smuggled")
            assert 300 < served < len(every) - 1000

    run(main(), timeout_s=110)
