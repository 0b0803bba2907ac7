"""Every test of the data path runs on both ways in: the fast lane, and aiohttp for everything. What an exchange does is
held against its table of steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lbproxy.proxy import connection
from lbproxy.proxy.exchange import Exchange
from lbproxy.proxy.steps import NEXT_STEPS, Step
from tests.support.compiled import COMPILED


@pytest.fixture(params=["lane", "aiohttp"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which way plain requests take."""
    if request.param == "aiohttp":
        monkeypatch.setattr(connection, "read_plain", lambda data, limit: None)
    return str(request.param)


class Steps:
    """Those that exchanges took, and those that their table does not have."""

    def __init__(self) -> None:
        self.taken: set[tuple[Step, Step]] = set()

    @property
    def unknown(self) -> set[tuple[Step, Step]]:
        return {(before, after) for before, after in self.taken if after not in NEXT_STEPS[before]}


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    """As the test's exchanges take them."""
    steps = Steps()
    if not COMPILED:
        enter = Exchange._enter

        def noting(exchange: Exchange, step: Step, work: object = None) -> None:
            before = exchange.step
            enter(exchange, step, work)  # type: ignore[arg-type] # whatever it is
            steps.taken.add((before, step))

        monkeypatch.setattr(Exchange, "_enter", noting)
    yield steps
    assert not steps.unknown
