# SPDX-License-Identifier: Apache-2.0
"""What a proxy adds, counts down and passes on by itself: Via, X-Forwarded-*, Max-Forwards, 103 Early Hints.

Beside the tables, as other gateways are not asked: each has its own way with these fields.
"""

from __future__ import annotations

import asyncio
import re
from typing import NamedTuple

import pytest

from tests.conformance.case import LENGTH, LINE, http
from tests.conformance.wire import OK, OK_BODY, PACES, Endpoint, Heard, Reply, Seen, Talk, parts, turns
from tests.support.aio import run
from tests.support.rig import rig

OURS = re.compile(r"(1\.[01]) lbproxy \([0-9a-f]+\)")
"""What lbproxy says of itself to endpoints: with a word that each process has its own of."""
WORD = "1.1 lbproxy (word)"
HINTS = b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>; rel=preload\r\n\r\n"


class Hop(NamedTuple):
    """A request, and fields of it as the endpoint must get them."""

    name: str
    send: bytes
    has: dict[str, list[str]]
    more: str = ""
    """Settings."""


FORWARDED = {"X-Forwarded-For": ["127.0.0.1"], "X-Forwarded-Proto": ["http"], "X-Forwarded-Host": ["lb"]}
CLAIMS = (
    "X-Forwarded-For: 192.0.2.1",
    "X-Forwarded-Proto: https",
    "X-Forwarded-Host: evil",
    "Forwarded: for=192.0.2.1",
)
STRANGERS = 'trusted_proxies: ["192.0.2.0/24"]\n'


def options(max_forwards: str) -> bytes:
    return f"OPTIONS /v1/files HTTP/1.1\r\nHost: lb\r\nMax-Forwards: {max_forwards}\r\n\r\n".encode()


CASES = [
    Hop("Via is added", http(LENGTH), {"Via": [WORD]}),
    Hop("Via of HTTP/1.0", http(LENGTH, first=LINE[:-1] + "0"), {"Via": [WORD.replace("1.1", "1.0", 1)]}),
    Hop("behind that of others", http(LENGTH, "Via: 1.0 nginx"), {"Via": ["1.0 nginx", WORD]}),
    Hop(
        "behind that of others, in several lines",
        http(LENGTH, "Via: 1.0 nginx", "vIa: 1.1 cdn (x), 2 edge"),
        {"Via": ["1.0 nginx", "1.1 cdn (x), 2 edge", WORD]},
    ),
    Hop("behind another lbproxy's", http(LENGTH, "Via: 1.1 lbproxy (other)"), {"Via": ["1.1 lbproxy (other)", WORD]}),
    Hop("a stranger's claims are replaced", http(LENGTH, *CLAIMS), {**FORWARDED, "Forwarded": []}, STRANGERS),
    Hop("a stranger's X-Real-IP", http(LENGTH, "X-Real-IP: 192.0.2.1"), {**FORWARDED, "X-Real-IP": []}, STRANGERS),
    Hop("replace", http(LENGTH, *CLAIMS), {**FORWARDED, "Forwarded": []}, "forwarded: replace\n"),
    Hop(
        "off",
        http(LENGTH, *CLAIMS),
        {**{name: [value] for name, _, value in (one.partition(": ") for one in CLAIMS)}, "Via": [WORD]},
        'forwarded: "off"\n',
    ),
    Hop("Max-Forwards counts down", options("3"), {"Max-Forwards": ["2"]}),
    Hop("Max-Forwards to its last hop", options("1"), {"Max-Forwards": ["0"]}),
]


def as_word(value: str) -> str:
    """A field's value, with `word` for the word of this process."""
    return OURS.sub(r"\1 lbproxy (word)", value)


def in_pace(answer: bytes, pace: str) -> Reply:
    """An endpoint's script that writes this."""

    async def script(_: Endpoint, writer: asyncio.StreamWriter, __: Seen) -> None:
        for piece in parts(answer, pace):
            writer.write(piece)
            await turns(pace)

    return script


async def ask(port: int, send: bytes, pace: str) -> Heard:
    """One request, and its response."""
    talk = await Talk.open(port)
    await talk.say(send, pace)
    heard = await talk.hear(lambda heard: bool(heard.answers) and heard.answers[-1].whole, 5.0)
    talk.close()
    return heard


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_endpoints_get_the_fields_of_this_hop(case: Hop, pace: str) -> None:
    async def main() -> None:
        async with Endpoint() as endpoint, rig(endpoint.url, more=case.more) as it:
            heard = await ask(it.port, case.send, pace)
            assert [one.status for one in heard.answers] == [200]
            (seen,) = endpoint.seen
            assert {name: [as_word(value) for value in seen.values(name)] for name in case.has} == case.has

    run(main())


def values(head: bytes, name: str) -> list[str]:
    """Of a field of a response."""
    return Seen(head, b"").values(name)


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("before", [[], ["1.1 vllm-front"]])
def test_responses_say_that_they_came_by_here(before: list[str], version: str, pace: str) -> None:
    """And to clients nothing that tells one process from another."""

    async def main() -> None:
        async with Endpoint() as endpoint, rig(endpoint.url) as it:
            lines = "".join(f"Via: {value}\r\n" for value in before).encode()
            response = OK.replace(b"\r\n\r\n", b"\r\n" + lines + b"\r\n", 1)
            endpoint.script = in_pace(response.replace(b"HTTP/1.1", b"HTTP/%b" % version.encode(), 1), pace)
            heard = await ask(it.port, http(LENGTH), "whole")
            assert values(heard.answers[0].head, "via") == [*before, f"{version} lbproxy"]

    run(main())


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize(
    ("first", "interim", "heard_by_client"),
    [
        (LINE, [HINTS], [HINTS]),
        (LINE, [HINTS, HINTS], [HINTS, HINTS]),
        (LINE, [b"HTTP/1.1 100 Continue\r\n\r\n", HINTS], [HINTS]),
        (LINE, [b"HTTP/1.1 102 Processing\r\n\r\n"], []),
        (LINE, [HINTS.replace(b"Link", b"Connection: x-a\r\nX-A: 1\r\nKeep-Alive: timeout=5\r\nLink")], [HINTS]),
        (LINE[:-1] + "0", [HINTS], []),
    ],
    ids=["one", "two", "behind a 100", "a 102", "fields of one hop", "to HTTP/1.0"],
)
def test_early_hints_go_to_clients_that_know_them(
    first: str, interim: list[bytes], heard_by_client: list[bytes], pace: str
) -> None:
    async def main() -> None:
        async with Endpoint() as endpoint, rig(endpoint.url) as it:
            endpoint.script = in_pace(b"".join(interim) + OK, pace)
            heard = await ask(it.port, http(LENGTH, first=first), "whole")
            assert [head + b"\r\n\r\n" for head in heard.interim] == heard_by_client
            assert [(one.status, one.body) for one in heard.answers] == [(200, OK_BODY)]

    run(main())
