# SPDX-License-Identifier: Apache-2.0
"""Simulated servers with lbproxy before them, and the table of what each client can do, printed at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.environment import Report
from tests.support.process import Process, mock

MOCK = ("--model", "tiny", "--speed", "20")
REPORTS = pytest.StashKey[list[Report]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REPORTS] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash[REPORTS]:
        terminalreporter.section("clients")
        terminalreporter.line("| client | passed | what |\n| --- | --- | --- |")
        for report in config.stash[REPORTS]:
            terminalreporter.line(report.row())


@pytest.fixture(scope="session")
def reports(pytestconfig: pytest.Config) -> list[Report]:
    """What is printed at the end."""
    return pytestconfig.stash[REPORTS]


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """lbproxy before two simulated servers, and an Ollama, which it recognises by its API."""
    config: Path = tmp_path_factory.mktemp("clients") / "lbproxy.yaml"
    with mock(*MOCK) as (_, one), mock(*MOCK) as (_, two), mock(*MOCK, "--engine", "ollama") as (_, three):
        config.write_text(f"listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nendpoints: ['{one}', '{two}', '{three}']\n")
        with Process("--config", str(config)) as lbproxy:
            yield lbproxy.wait_for(r"listens on (http://[\w.:]+)")[1]
