# SPDX-License-Identifier: Apache-2.0
"""The rig for each test, and its verdict."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.control import Control
from tests.chaos.peers import PEERS
from tests.chaos.rig import Rig, Server
from tests.chaos.verdict import PROXY, Case
from tests.support.authorities import few_authorities

__all__ = ["few_authorities"]

SERVERS = 4


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Peers run what applies to them."""
    if PROXY != "lbproxy":
        out = [one for one in items if (mark := one.get_closest_marker("chaos")) and not mark.kwargs.get("peers")]
        config.hook.pytest_deselected(items=out)
        items[:] = [one for one in items if one not in out]


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Four simulated servers; what they print is in files."""
    if PROXY != "lbproxy" and PEERS[PROXY].program() is None:
        pytest.skip(f"NOT TESTED here: no {PROXY} is installed")
    logs = tmp_path_factory.mktemp("servers")
    servers = [Server(logs / f"{n}.log") for n in range(SERVERS)]
    for server in servers:
        server.ready()
    yield servers
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Control]:
    """What this machine does to a process that nobody disturbs."""
    control = Control(tmp_path_factory.mktemp("control") / "seen")
    yield control
    control.close()


@pytest.fixture
def case(request: pytest.FixtureRequest, control: Control) -> Iterator[Case]:
    """The test's figures; published and judged at its end, unless it was skipped."""
    mark = request.node.get_closest_marker("chaos")
    assert mark is not None
    name, what = mark.args
    case = Case(name, what, control)
    yield case
    if case.figures:
        case.publish()


@pytest.fixture
def rig(case: Case, fleet: list[Server], tmp_path: Path) -> Iterator[Rig]:
    yield Rig(case, fleet, tmp_path)
    for server in fleet:
        server.restore()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """The verdict is part of the test: a missed bound is its failure, not an error of its teardown."""
    yield
    case = pyfuncitem.funcargs.get("case")
    if isinstance(case, Case) and case.missed and PROXY == "lbproxy":
        pytest.fail("\n".join([*case.missed, case.line()]), pytrace=False)
