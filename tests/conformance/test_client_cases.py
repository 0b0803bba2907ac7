# SPDX-License-Identifier: Apache-2.0
"""The table of what clients send: lbproxy does what each row says, in every pace and both ways in."""

from __future__ import annotations

import pytest

from tests.conformance.client_cases import CASES
from tests.conformance.judge import as_lbproxy
from tests.conformance.wire import PACES, Endpoint
from tests.support.aio import run
from tests.support.rig import rig

GROUPS = list(dict.fromkeys(case.group for case in CASES))


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("group", GROUPS)
def test_what_clients_send_is_served_or_refused_as_the_table_says(group: str, pace: str) -> None:
    wrong: dict[str, str] = {}

    async def main() -> None:
        async with Endpoint() as endpoint, rig(endpoint.url) as it:
            for case in CASES:
                if case.group == group and (problem := await as_lbproxy(case, it.port, endpoint, pace)):
                    wrong[case.name] = problem

    run(main())
    assert not wrong, "\n".join(f"{name}: {problem}" for name, problem in wrong.items())


def test_the_table_is_large_enough_and_has_no_row_twice() -> None:
    assert len(CASES) >= 120
    assert len({(case.group, case.name) for case in CASES}) == len(CASES)
    assert len({case.send for case in CASES}) > len(CASES) - 3
