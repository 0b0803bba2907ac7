# SPDX-License-Identifier: Apache-2.0
"""Endpoints that refuse the key that lbproxy itself sends: no client can do anything about that."""

from __future__ import annotations

import json

import pytest

from lbproxy.core.endpoints.breaker import Cause
from tests.support.aio import run
from tests.support.endpoint import OK, Script, ScriptedEndpoint, answer
from tests.support.rig import Rig, post, rig

KEY = "api_key: sk-ours-0123456789"
ROUND = "routing: {policy: round-robin}"


def refusing(status: int) -> Script:
    return answer(b'{"error":{"message":"Incorrect API key provided: sk-ours-01*****789."}}', status=status)


def is_ejected(it: Rig) -> bool:
    return it.seen("e1").health.value == "ejected"


def flow(name: str) -> str:
    return f"x-lbproxy-flow: {name}\r\n"


@pytest.mark.parametrize("status", [401, 402])
@pytest.mark.parametrize("tier", [1, 2])
def test_a_key_that_is_refused_is_its_endpoints_fault(status: int, tier: int) -> None:
    """Half of all requests failed for good, while another endpoint could serve them, and nothing was logged."""

    async def main() -> None:
        async with ScriptedEndpoint(refusing(status)) as one, ScriptedEndpoint(OK) as two:
            first, second = (one.url, f"{KEY}, tier: 1"), (two.url, f"tier: {tier}")
            async with rig(first, second, more=f"{ROUND}\noverflow: {{after: 1s}}") as it:
                assert [(await it.ask(post())).status for _ in range(6)] == [200] * 6
                assert len(one.requests) == 1, "it is held back"
                assert is_ejected(it)
                (transition,) = it.records.transitions
                assert transition.cause is Cause.KEY
                assert "refuses the key that lbproxy sends" in transition.reason
                assert (("e1", f"upstream_{status}"),) in [record.failed for record in it.records.requests]

    run(main())


def test_where_no_other_endpoint_is_a_client_is_not_told_that_its_key_is_wrong() -> None:
    """An SDK would say so, and the words of a provider have a part of the key."""

    async def main() -> None:
        async with ScriptedEndpoint(refusing(401)) as one, rig((one.url, KEY)) as it:
            reply = await it.ask(post())
            assert (reply.status, json.loads(reply.body)["error"]["code"]) == (503, "no_endpoints")
            assert b"sk-ours" not in reply.body
            assert (await it.ask(post())).status == 503

    run(main())


@pytest.mark.parametrize("status", [401, 402, 403])
def test_a_key_of_the_client_is_the_clients(status: int) -> None:
    async def main() -> None:
        async with (
            ScriptedEndpoint(refusing(status)) as one,
            ScriptedEndpoint(OK) as two,
            rig(one.url, two.url, more=ROUND) as it,
        ):
            replies = [(await it.ask(post())).status for _ in range(4)]
            assert sorted(replies) == [200, 200, status, status]
            assert not is_ejected(it)

    run(main())


def test_a_prompt_that_is_forbidden_is_asked_for_elsewhere_and_its_endpoint_is_not_to_blame() -> None:
    """One client with flagged prompts would take a provider away from all."""

    async def main() -> None:
        async with (
            ScriptedEndpoint(refusing(403)) as one,
            ScriptedEndpoint(OK) as two,
            rig((one.url, KEY), two.url, more=ROUND) as it,
        ):
            replies = [await it.ask(post(more=flow("one"))) for _ in range(6)]
            assert [reply.status for reply in replies] == [200] * 6
            assert len(one.requests) >= 3
            assert not is_ejected(it)
            for _ in range(2):
                assert (await it.ask(post(more=flow("two")))).status == 200
            assert is_ejected(it), "requests of several flows are forbidden, and none succeeds"

    run(main())


def test_a_prompt_that_is_forbidden_everywhere_is_forbidden() -> None:
    async def main() -> None:
        async with (
            ScriptedEndpoint(refusing(403)) as one,
            ScriptedEndpoint(refusing(403)) as two,
            rig((one.url, KEY), (two.url, KEY)) as it,
        ):
            assert (await it.ask(post())).status == 403
            assert len(one.requests) == len(two.requests) == 1

    run(main())
