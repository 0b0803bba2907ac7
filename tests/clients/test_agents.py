# SPDX-License-Identifier: Apache-2.0
"""Coding agents complete their turns through lbproxy before simulated servers, and say what is wrong where not."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.clients.agents import ALL, Agent, Session
from tests.clients.environment import Report, is_ready
from tests.support.process import Process, lbproxy, mock

KEY = "sk-of-the-agents-0123456789"
SAID = re.compile("The scheduler|A quiet server|Every good answer|The patient client")
"""How the simulated model begins its sentences."""
HELLO = "Say hello."
SLOW = "0.02"
"""Speed at which a turn takes half a minute."""


@contextmanager
def served(folder: Path, speed: str = "4") -> Iterator[tuple[str, str, Process]]:
    """lbproxy with a key before two simulated servers: its URLs, and one of the servers."""
    mocks = ("--model", "demo", "--speed", speed)
    settings = f"auth: {{keys: [{{name: agents, key: {KEY}}}]}}"
    folder.mkdir()
    with (
        mock(*mocks) as (one, first),
        mock(*mocks) as (_, second),
        lbproxy(folder, [first, second], settings) as (process, url, admin),
    ):
        for server in (first, second):
            process.wait_for(f"{server.removeprefix('http://')} is up")
        yield url, admin, one


def state(admin: str) -> list[dict[str, int]]:
    """lbproxy's endpoints."""
    endpoints: list[dict[str, int]] = httpx.get(f"{admin}/admin/state").json()["endpoints"]
    return endpoints


def completes(session: Session, prompt: str = HELLO, *more: str) -> None:
    """The turn ends well, with what the model said."""
    code, said = session.run(prompt, *more)
    assert code == 0, f"exit code {code}: {said[-600:]}"
    assert SAID.search(said), f"nothing of the model: {said[-600:]}"


def calls_a_tool(session: Session) -> None:
    """The call is carried out, and its result responded to."""
    completes(session, f"Use the {session.agent.tool} tool to run `echo it-ran > ran.txt`.")
    assert (session.work / "ran.txt").read_text() == "it-ran\n"


def says_that_the_key_is_wrong(session: Session) -> None:
    """And does not try for minutes."""
    _, said = session.run(HELLO)
    assert "valid API key is required" in " ".join(said.split()), said[-600:]


def is_cancelled(session: Session, admin: str) -> None:
    """Who stops the agent frees the server."""
    process = session.start(HELLO)
    try:
        wait_until(lambda: any(one["in_flight"] for one in state(admin)), 60)
        os.killpg(process.pid, signal.SIGINT)
        wait_until(lambda: not any(one["in_flight"] for one in state(admin)), 60)  # some agents finish first
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_until(condition: Callable[[], bool], within_s: float) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"not within {within_s} s"
        time.sleep(0.1)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("agent", ALL, ids=lambda agent: agent.package)
def test_an_agent_completes_its_turns(agent: Agent, tmp_path: Path, reports: list[Report]) -> None:
    if not is_ready(agent.environment):
        pytest.skip(f"{agent.environment} is not installed: make test-clients")
    checks: dict[str, str | None] = {}

    def check(name: str, url: str, what: Callable[[Session], None], key: str = KEY) -> None:
        try:
            what(Session(agent, tmp_path / name.replace(" ", "-"), url, key=key))
            checks[name] = None
        except AssertionError as error:
            checks[name] = str(error)

    with served(tmp_path / "lbproxy") as (url, _, one):
        check("turn", url, completes)
        if agent.whole:
            check("turn not streamed", url, lambda session: completes(session, HELLO, *agent.whole))
        if agent.tool:
            check("tool", url, calls_a_tool)
        check("wrong key", url, says_that_the_key_is_wrong, "sk-of-nobody")
        one.kill()
        check("a dead server", url, completes)
    with served(tmp_path / "slow", SLOW) as (url, admin, _):
        check("cancel", url, lambda session: is_cancelled(session, admin))
    report = Report(f"{agent.package} {agent.version()}", checks)
    reports.append(report)
    assert report.failed == {}
