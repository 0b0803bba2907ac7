"""What a gateway made of a case, and whether that is what it must."""

from __future__ import annotations

from tests.conformance.case import GOOD, ClientCase, Must
from tests.conformance.wire import OK_BODY, Endpoint, Heard, Talk


def as_any_gateway(case: ClientCase, heard: Heard, endpoint: Endpoint) -> str:
    """What is wrong by the RFC, whoever it is; empty: nothing."""
    seen = endpoint.seen
    last = heard.answers[-1] if heard.answers else None
    if last is None and not heard.ended:
        return "hangs"
    if case.no_continue and heard.interim:
        return "sent a 100"
    if any(one.body != case.body for one in seen):
        return f"the endpoint got another body: {[one.body[:40] for one in seen]}"
    good = [one for one in heard.answers if one.status < 400 and one.whole]
    refused = len(seen) <= case.before and (last is None or last.status >= 400)
    served = 1 <= len(seen) <= case.most and len(good) == len(seen)
    if case.must is Must.REFUSE:
        return "" if refused else f"not refused: {len(seen)} seen, {_statuses(heard)}"
    if case.must is Must.SERVE:
        return "" if served and len(seen) == case.most else f"not served: {len(seen)} seen, {_statuses(heard)}"
    return "" if refused or served else f"neither served nor refused: {len(seen)} seen, {_statuses(heard)}"


def _statuses(heard: Heard) -> str:
    return f"answered {[one.status for one in heard.answers]}" + (", and closed" if heard.ended else "")


async def as_lbproxy(case: ClientCase, port: int, endpoint: Endpoint, pace: str) -> str:
    """Send a case, and say what is wrong by our own rules, which are stricter; empty: nothing."""
    endpoint.seen.clear()
    talk = await Talk.open(port)
    try:
        await talk.say(case.send, pace)
        if case.ends:
            talk.writer.write_eof()
            await talk.hear(lambda heard: False, 5.0)
            return "the endpoint got it" if endpoint.seen else ""
        heard = await talk.hear(lambda heard: _enough(case, heard), 5.0)
        wrong = as_any_gateway(case, heard, endpoint)
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
