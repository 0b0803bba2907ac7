# SPDX-License-Identifier: Apache-2.0
"""Every test of the data path runs on both ways in: the fast lane, and aiohttp for everything. What an exchange does is
held against its table of steps, a relay against that of its stages, a client's connection against that of its states.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lbproxy.proxy.exchange.exchange import Exchange
from lbproxy.proxy.exchange.relay import Relay, Stage
from lbproxy.proxy.exchange.steps import Step
from lbproxy.proxy.front import connection
from lbproxy.proxy.front.connection import ClientConnection, State
from tests.support.compiled import COMPILED
from tests.support.state_tables import STAGES, STATES, STEPS


@pytest.fixture(params=["lane", "aiohttp"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which way plain requests take."""
    if request.param == "aiohttp":
        monkeypatch.setattr(connection, "read_plain", lambda data, limit: None)
        monkeypatch.setattr(connection, "read_begun", lambda data, limit: None)
    return str(request.param)


class Steps:
    """Those that exchanges took, and those that their table does not have."""

    def __init__(self) -> None:
        self.taken: set[tuple[Step, Step]] = set()

    @property
    def unknown(self) -> set[tuple[Step, Step]]:
        return self.taken - STEPS


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


class Stages:
    """Those that relays took, and those that their table does not have."""

    def __init__(self) -> None:
        self.taken: set[tuple[Stage, Stage]] = set()

    @property
    def unknown(self) -> set[tuple[Stage, Stage]]:
        return self.taken - STAGES


@pytest.fixture(autouse=True)
def stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stages]:
    """As the test's relays take them."""
    stages = Stages()
    if not COMPILED:
        enter = Relay._enter

        def noting(relay: Relay, stage: Stage) -> None:
            before = relay.stage
            enter(relay, stage)
            stages.taken.add((before, stage))

        monkeypatch.setattr(Relay, "_enter", noting)
    yield stages
    assert not stages.unknown


class States:
    """Those that clients' connections took, one after the other."""

    def __init__(self) -> None:
        self.taken: set[tuple[State, State]] = set()

    @property
    def unknown(self) -> set[tuple[State, State]]:
        """Those that their table does not have."""
        return self.taken - STATES


@pytest.fixture(autouse=True)
def states(monkeypatch: pytest.MonkeyPatch) -> Iterator[States]:
    """As the test's connections take them."""
    states = States()
    write = ClientConnection.__setattr__

    def noting(client: ClientConnection, name: str, value: object) -> None:
        if name == "state" and isinstance(value, State):
            before = getattr(client, name, value)
            if before is not value:
                states.taken.add((before, value))
        write(client, name, value)

    monkeypatch.setattr(ClientConnection, "__setattr__", noting)
    yield states
    assert not states.unknown
