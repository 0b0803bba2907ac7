# SPDX-License-Identifier: Apache-2.0
"""What each worker gets of the limits and budgets of all."""

from __future__ import annotations

import pytest

from lbproxy.config.parse import parse
from lbproxy.config.tree import Settings
from lbproxy.processes.worker import dealt

TEXT = """
limits: {connections: 1001, memory: 900MiB, buffered_bodies: 100MiB, body: 32MiB}
retry: {budget_ratio: 0.3, budget_per_second: 10}
endpoints: [{url: 'http://a:1'}]
"""


@pytest.fixture
def settings() -> Settings:
    return parse(TEXT, environ={})


def test_limits_are_dealt_out(settings: Settings) -> None:
    """The balancer process needs memory too; and a worker can always hold one body."""
    limits = dealt(settings, 2).limits
    assert (limits.connections, limits.memory, limits.buffered_bodies) == (501, 300 << 20, 50 << 20)
    assert dealt(settings, 8).limits.buffered_bodies == 1.25 * limits.body == 40 << 20


def test_workers_together_retry_as_often_as_a_single_process(settings: Settings) -> None:
    """The part of the budget that requests earn needs no dealing out: each has those of its own requests."""
    retry = dealt(settings, 4).retry
    assert (retry.budget_per_second, retry.budget_ratio) == (2.5, 0.3)
