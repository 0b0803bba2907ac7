# SPDX-License-Identifier: Apache-2.0
"""What the balancer process shows of its workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from lbproxy.processes.plane import WorkersFront


@pytest.mark.parametrize(
    ("least", "counts", "accepts"),
    [
        (2, [0, 1, 2, 1, 0, 1], [False, False, True, True, False, True]),
        (1, [0, 1, 2, 1, 0], [False, True, True, True, False]),
    ],
)
def test_workers_accept_once_all_were_there_and_while_one_is(
    least: int, counts: list[int], accepts: list[bool]
) -> None:
    """One of two was ready while the other had not started. Of two that served, one serves while the other is started
    again; and a balancer process that takes the place of another waits for one alone.
    """
    server = SimpleNamespace(sessions=[], most_sessions=0)
    front = WorkersFront(cast(Any, server), "http://127.0.0.1:8080", least)
    found = []
    for count in counts:
        server.sessions = [object()] * count
        server.most_sessions = max(server.most_sessions, count)
        found.append(front.url is not None)
    assert found == accepts
