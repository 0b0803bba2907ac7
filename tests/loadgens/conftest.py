# SPDX-License-Identifier: Apache-2.0
"""Simulated servers with lbproxy before them, new for each run, and the table of the runs, printed and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.loadgens import report
from tests.loadgens.report import Report
from tests.loadgens.seen import Page, Seen, seen
from tests.loadgens.tools import MODEL
from tests.support.process import Process, lbproxy, mock

REPORTS = pytest.StashKey[list[Report]]()
TTFT_S, TOKEN_S = 2.0, 0.02
"""Long beside what a load generator in Python takes to notice a token on a busy machine."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REPORTS] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if reports := config.stash[REPORTS]:
        terminalreporter.section("load generators: what they report, and lbproxy")
        terminalreporter.line(report.comparison(reports))
        terminalreporter.line(report.other_requests(reports))
        report.keep(reports)


@pytest.fixture(scope="session")
def reports(pytestconfig: pytest.Config) -> list[Report]:
    """What is printed and kept."""
    return pytestconfig.stash[REPORTS]


@dataclass
class Stand:
    """lbproxy before two simulated servers."""

    url: str
    admin: str
    process: Process

    def seen(self) -> Seen:
        """What it reports; the connections of the load generator are closed."""
        return seen(self.process.lines("request"), Page(self.admin))


Standing = Callable[..., AbstractContextManager[Stand]]


@pytest.fixture
def standing(tmp_path: Path) -> Standing:
    """Starts one, with further arguments for the servers: the last of one name counts."""

    @contextmanager
    def start(*more: str) -> Iterator[Stand]:
        arguments = ("--model", MODEL, "--ttft", str(TTFT_S), "--token-time", str(TOKEN_S), *more)
        with (
            mock(*arguments) as (_, one),
            mock(*arguments) as (_, two),
            lbproxy(tmp_path, [one, two]) as (process, url, admin),
        ):
            process.wait_for(r'(?s)"to":"up".*"to":"up"')
            yield Stand(url, admin, process)

    return start
