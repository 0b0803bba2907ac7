# SPDX-License-Identifier: Apache-2.0
"""Roles that do not fit together are logged once, and only if they stay."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from lbproxy.config.parse import parse
from lbproxy.control.probing.roles import RoleWatch
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointSnapshot
from lbproxy.core.engines.handover import Handover, Role
from lbproxy.core.observed.snapshot import PoolSnapshot
from tests.control.telemetry.test_telemetry import seen

PREFILL = seen(1, "m", handover=Handover(Role.PREFILL, "nixl"))
DECODE = seen(2, "m", handover=Handover(Role.DECODE, "nixl"))
FOUND = "e1: role prefill, but no decode endpoint has connector nixl"


class FakePool:
    splits = True
    looks = 0

    def __init__(self, *endpoints: EndpointSnapshot) -> None:
        self.endpoints = [*endpoints]

    def snapshot(self) -> PoolSnapshot:
        self.looks += 1
        return PoolSnapshot(self.endpoints)


def watch(pool: FakePool, entry: str = "url: http://10.0.0.1:8000") -> RoleWatch:
    settings = parse(f"endpoints: [{{{entry}}}]", environ={})
    return RoleWatch(pool, lambda: settings)


def logged(caplog: pytest.LogCaptureFixture, one: RoleWatch, looks: int = 1) -> list[str]:
    caplog.clear()
    for _ in range(looks):
        one.look()
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_finding_is_logged_once_and_again_when_it_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    pool = FakePool(PREFILL)
    one = watch(pool)
    assert logged(caplog, one) == [], "engines are read one after the other"
    assert logged(caplog, one) == [FOUND]
    assert logged(caplog, one, 5) == []
    pool.endpoints.append(DECODE)
    assert logged(caplog, one, 2) == []
    pool.endpoints.pop()
    assert logged(caplog, one, 3) == [FOUND]


@pytest.mark.parametrize("differs", [{"health": Health.DOWN}, {"draining": True}, {"removed": True}], ids=str)
def test_endpoints_that_take_no_requests_are_no_partners(
    caplog: pytest.LogCaptureFixture, differs: dict[str, object]
) -> None:
    pool = FakePool(PREFILL, replace(DECODE, **differs))  # type: ignore[arg-type]
    assert logged(caplog, watch(pool), 2) == [FOUND]
    pool.endpoints = [replace(PREFILL, **differs)]  # type: ignore[arg-type]
    assert logged(caplog, watch(pool), 2) == []


def test_without_roles_nothing_is_read() -> None:
    pool = FakePool(PREFILL)
    pool.splits = False
    watch(pool).look()
    assert pool.looks == 0
    watch(pool, "url: http://10.0.0.1:8000, role: prefill").look()
    assert pool.looks == 1, "its engine may contradict that"
