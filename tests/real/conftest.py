# SPDX-License-Identifier: Apache-2.0
"""One fleet of real servers for all tests of this folder, and the figures that they found, shown at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.real import environment, servers
from tests.real.servers import Fleet, Small

FIGURES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starting a server takes longer than a whole test elsewhere."""
    for item in items:
        if environment.HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(600))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash[FIGURES]:
        terminalreporter.section("figures")
        for line in config.stash[FIGURES]:
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def found(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Says what a check measured; shown after the last test."""
    return pytestconfig.stash[FIGURES].append


@pytest.fixture(scope="session")
def parts() -> environment.Environment:
    if not environment.is_ready():
        pytest.skip("the real servers are not installed: make test-real")
    return environment.paths()


@pytest.fixture(scope="session")
def started(parts: environment.Environment, found: Callable[[str], None]) -> Iterator[Fleet]:
    start = time.monotonic()
    with servers.running(parts) as fleet:
        fleet.bring_up()
        found(f"start: two vLLM 0.32.0, transformers serve and lbproxy ready after {time.monotonic() - start:.0f} s")
        yield fleet


@pytest.fixture(scope="session")
def small(parts: environment.Environment, started: Fleet) -> Iterator[Small]:
    """Two more servers; `started` made the folder of their logs."""
    with servers.small_ones(parts) as small:
        yield small


@pytest.fixture
def fleet(started: Fleet) -> Fleet:
    """All servers up and idle, whatever the test before did to them."""
    started.bring_up()
    return started
