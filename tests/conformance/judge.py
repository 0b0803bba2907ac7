# SPDX-License-Identifier: Apache-2.0
"""What a gateway made of a case, and whether that is what it must."""

from __future__ import annotations

import asyncio
import json
import socket
import struct

from tests.conformance.case import GOOD, OWN_VIA, ClientCase, Must
from tests.conformance.seen_cases import SeenCase
from tests.conformance.upstream_cases import Must as Must_
from tests.conformance.upstream_cases import UpstreamCase
from tests.conformance.wire import OK_BODY, Endpoint, Heard, Seen, Talk, parts, turns


def as_any_gateway(case: ClientCase, heard: Heard, endpoint: Endpoint) -> str:
    """What is wrong by the RFC, whoever it is; empty: nothing."""
    seen = endpoint.seen
    last = heard.answers[-1] if heard.answers else None
    if last is None and not heard.ended:
        return "hangs"
    if case.no_continue and heard.interim:
        return "sent a 100"
    if not all(same_body(one.body, case.body) for one in seen):
        return f"the endpoint got another body: {[one.body[:40] for one in seen]}"
    good = [one for one in heard.answers if one.status < 400 and one.whole]
    refused = len(seen) <= case.before and (last is None or last.status >= 400 or last.status == 0)  # 0: as HTTP/0.9
    served = 1 <= len(seen) <= case.most and len(good) == len(seen)
    if case.must is Must.REFUSE:
        return "" if refused else f"not refused: {len(seen)} seen, {_statuses(heard)}"
    if case.must is Must.SERVE and case.seen == 0:  # by the gateway itself
        return "" if good and not seen else f"not served: {len(seen)} seen, {_statuses(heard)}"
    if case.must is Must.SERVE:
        return "" if served and len(seen) == case.most else f"not served: {len(seen)} seen, {_statuses(heard)}"
    return "" if refused or served else f"neither served nor refused: {len(seen)} seen, {_statuses(heard)}"


def same_body(got: bytes, sent: bytes) -> bool:
    """The same bytes; or the same JSON with more in it, as gateways write it that read it into types of their own."""
    if got == sent:
        return True
    try:
        mine, theirs = json.loads(sent), json.loads(got)
        return isinstance(mine, dict) and {**theirs, **mine} == theirs
    except (ValueError, TypeError):
        return False


def _statuses(heard: Heard) -> str:
    return f"returned {[one.status for one in heard.answers]}" + (", and closed" if heard.ended else "")


async def as_lbproxy(case: ClientCase, port: int, endpoint: Endpoint, pace: str) -> str:
    """Send a case, and say what is wrong by our own rules, which are stricter; empty: nothing."""
    via = await own_via(port, endpoint) if OWN_VIA.encode() in case.send else b""
    endpoint.seen.clear()
    talk = await Talk.open(port)
    try:
        await talk.say(case.send.replace(OWN_VIA.encode(), via) if via else case.send, pace)
        if case.ends:
            talk.writer.write_eof()
            await talk.hear(lambda heard: False, 5.0)
            return "the endpoint got it" if endpoint.seen else ""
        heard = await talk.hear(lambda heard: _enough(case, heard), 5.0)
        wrong = as_any_gateway(case, heard, endpoint)
        if any(one.body != case.body for one in endpoint.seen):
            return "the endpoint got other bytes"
        statuses = [one.status for one in heard.answers]
        expected = [200] * (case.answers - 1) if case.seen else statuses[:-1]
        if wrong:
            return wrong
        if statuses != [*expected, case.status] or len(statuses) != case.answers or len(endpoint.seen) != case.seen:
            return f"{_statuses(heard)}, {len(endpoint.seen)} seen"
        if case.closes is None:
            return ""
        if case.closes != heard.ended:
            return f"closed: {heard.ended}"
        return "" if case.closes else await _lives_on(talk, case, endpoint)
    finally:
        talk.close()


async def own_via(port: int, endpoint: Endpoint) -> bytes:
    """What an lbproxy says of itself to endpoints."""
    talk = await Talk.open(port)
    await talk.say(GOOD, "whole")
    await talk.hear(lambda heard: bool(heard.answers) and heard.answers[-1].whole, 5.0)
    talk.close()
    (via,) = endpoint.seen[-1].values("via")
    return via.encode("ascii")


def _enough(case: ClientCase, heard: Heard) -> bool:
    whole = sum(one.whole for one in heard.answers)
    return whole >= case.answers and (heard.ended or not case.closes)


async def _lives_on(talk: Talk, case: ClientCase, endpoint: Endpoint) -> str:
    """The connection can be used again: nothing of the case is left on it."""
    await talk.say(GOOD, "whole")
    heard = await talk.hear(lambda heard: len(heard.answers) > case.answers and heard.answers[-1].whole, 5.0)
    last = heard.answers[-1]
    if len(heard.answers) != case.answers + 1 or last.status != 200 or last.body != OK_BODY:
        return f"what comes next: {_statuses(heard)}"
    return "" if len(endpoint.seen) == case.seen + 1 else f"next one seen: {len(endpoint.seen)}"


# What endpoints answer


def answer_with(case: UpstreamCase, endpoint: Endpoint, pace: str) -> asyncio.Event:
    """Have the endpoint answer with the case's bytes, until `endpoint.script` and `greeting` are taken away.

    Returns what is set when all of them are written.
    """
    written = asyncio.Event()

    async def script(_: Endpoint, writer: asyncio.StreamWriter, __: Seen) -> None:
        if not case.unasked:
            await write_as(case, writer, pace)
        written.set()

    endpoint.seen.clear()
    endpoint.connections = 0
    endpoint.script = script
    endpoint.greeting = (case.answer, case.end == "close") if case.unasked else None
    if case.unasked:
        written.set()
    return written


async def write_as(case: UpstreamCase, writer: asyncio.StreamWriter, pace: str) -> None:
    """The case's bytes, and its end."""
    for piece in parts(case.answer, pace):
        if writer.transport.is_closing():
            return  # it was broken off, as it may be
        writer.write(piece)
        await turns(pace)
    if case.end == "close":
        writer.close()
    elif case.end == "reset" and not writer.transport.is_closing():
        await turns("paused")  # so that it is taken as bytes, and then a reset
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


def asking(method: str) -> bytes:
    if method == "POST":
        return GOOD
    return f"{method} /v1/files HTTP/1.1\r\nHost: lb\r\n\r\n".encode()


def answered_as_any(case: UpstreamCase, heard: Heard) -> tuple[str, str]:
    """Whether the client got the answer `whole` or `broken`, and what is wrong with that by the RFC."""
    first = heard.answers[0] if heard.answers else None
    if first is None and not heard.ended:
        return "hangs", "hangs"
    whole = first is not None and first.whole and first.status == case.status and first.body == case.body
    broken = first is None or not first.whole or first.status >= 500
    how = "whole" if whole else "broken" if broken else "changed"
    if len(heard.answers) > 1:
        return how, f"{len(heard.answers)} answers"
    if how == "changed" or (case.must is not Must_.EITHER and how != case.must.value):
        return how, f"{how}: {_statuses(heard)}"
    return how, ""


async def upstream_as_lbproxy(case: UpstreamCase, port: int, endpoint: Endpoint, pace: str) -> str:
    """Have a case answered, and another request after it. What is wrong by our own rules; empty: nothing."""
    written = answer_with(case, endpoint, pace)
    talk = await Talk.open(port)
    talk.heard.method = case.method
    other = await Talk.open(port)
    try:
        await talk.say(asking(case.method), "whole")
        heard = await talk.hear(lambda heard: bool(heard.answers) and heard.answers[0].whole, 5.0)
        how, wrong = answered_as_any(case, heard)
        if wrong or how != case.ours.value:
            return wrong or how
        if how == "broken" and heard.answers and heard.answers[0].whole and heard.answers[0].status != 502:
            return f"status {heard.answers[0].status}"
        await asyncio.wait_for(written.wait(), 5.0)  # what comes later nobody can tell from the next answer
        await turns("paused")
        before = endpoint.connections
        endpoint.script = endpoint.greeting = None
        await other.say(GOOD, "whole")
        after = await other.hear(lambda heard: bool(heard.answers) and heard.answers[0].whole, 5.0)
        if [(one.status, one.body) for one in after.answers] != [(200, OK_BODY)]:
            return f"the next request: {_statuses(after)}"
        reused = endpoint.connections == before
        return "" if case.reused is None or reused == case.reused else f"reused: {reused}"
    finally:
        talk.close()
        other.close()


def seen_as_any(case: SeenCase, endpoint: Endpoint) -> str:
    """What is wrong with what the endpoint saw, by the RFC; empty: nothing."""
    if len(endpoint.seen) != 1:
        return f"{len(endpoint.seen)} requests seen"
    (seen,) = endpoint.seen
    wrong = [f"{name}: {seen.values(name)}" for name, values in case.has if seen.values(name) != list(values)]
    wrong += [f"{name} is there" for name in case.lacks if seen.values(name) not in ([], ["close"], ["keep-alive"])]
    wrong += [seen.line] * (seen.line != case.line)
    wrong += ["another body"] * (not same_body(seen.body, case.body))
    framings = len(seen.values("content-length")) + len(seen.values("transfer-encoding"))
    wrong += [f"{framings} framings"] * (framings != 1)
    wrong += ["not one Host"] * (len(seen.values("host")) != 1)
    return "; ".join(wrong)
