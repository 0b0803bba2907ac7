# SPDX-License-Identifier: Apache-2.0
"""The tables of what endpoints answer, and of what they must see."""

from __future__ import annotations

import pytest

from tests.conformance import seen_cases
from tests.conformance.judge import seen_as_any, upstream_as_lbproxy
from tests.conformance.upstream_cases import CASES
from tests.conformance.wire import PACES, Endpoint, Talk
from tests.support.aio import run
from tests.support.rig import rig

NEVER_OUT = "breaker: {consecutive_failures: 1000, success_rate: 0}\nretry: {attempts: 1}"


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("group", ["head", "answer", "body"])
def test_what_endpoints_answer_is_passed_on_or_broken_as_the_table_says(group: str, pace: str) -> None:
    wrong: dict[str, str] = {}

    async def main() -> None:
        for case in CASES:
            if case.group != group:
                continue
            async with Endpoint() as endpoint, rig(endpoint.url, more=NEVER_OUT) as it:
                problem = await upstream_as_lbproxy(case, it.port, endpoint, pace)
                if problem:
                    wrong[case.name] = problem

    run(main())
    assert not wrong, "\n".join(f"{name}: {problem}" for name, problem in wrong.items())


@pytest.mark.parametrize("pace", PACES)
def test_endpoints_see_what_the_table_says(pace: str) -> None:
    wrong: dict[str, str] = {}

    async def main() -> None:
        async with Endpoint() as endpoint, rig(endpoint.url) as it:
            for case in seen_cases.CASES:
                endpoint.seen.clear()
                talk = await Talk.open(it.port)
                await talk.say(case.send, pace)
                await talk.hear(lambda heard: bool(heard.answers) and heard.answers[0].whole, 5.0)
                talk.close()
                problem = seen_as_any(case, endpoint)
                authority = f"127.0.0.1:{endpoint.port}"
                hosts = [one.values("host") + one.values("x-gateway-destination-endpoint") for one in endpoint.seen]
                if problem or hosts != [[authority, authority]]:
                    wrong[case.name] = f"{problem} {hosts}"

    run(main())
    assert not wrong, "\n".join(f"{name}: {problem}" for name, problem in wrong.items())


def test_the_tables_are_large_enough_and_have_no_row_twice() -> None:
    assert len(CASES) >= 50
    assert len({(case.group, case.name) for case in CASES}) == len(CASES)
    assert len(seen_cases.CASES) >= 20
