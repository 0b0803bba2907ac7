# SPDX-License-Identifier: Apache-2.0
"""Agents whose server dies (-9) inside a response, with `continue: true`: turns of text of the chat API go on, and no
agent notices. Tool calls and the other APIs break with an error, which makes each agent ask again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.clients.agents import ALL, Agent, Session
from tests.clients.environment import is_ready
from tests.clients.test_agents import HELLO, SAID
from tests.support.process import Process, lbproxy, mock

TURN_S = 120
ALONE = {"opencode-ai": ("--title", "hello")}
"""Arguments without which an agent makes another request beside that of its turn: the wrong one might break."""
RETRIED = {"@anthropic-ai/claude-code", "@openai/codex"}
"""Their APIs are not continued."""


@dataclass(frozen=True)
class Dying:
    """lbproxy before two simulated servers, one of which is to die."""

    servers: list[tuple[Process, str]]
    lbproxy: Process
    url: str

    def tokens(self) -> list[float]:
        """How many each server generated."""
        family = "vllm:generation_tokens_total"
        pages = [httpx.get(f"{url}/metrics").text.splitlines() for _, url in self.servers]
        return [sum(float(line.split()[-1]) for line in page if line.startswith(family)) for page in pages]

    def slow_down(self) -> None:
        """A turn takes ten seconds or more."""
        for _, url in self.servers:
            httpx.post(f"{url}/faults", content=b"slow-down factor=40").raise_for_status()

    def kill_at(self, tokens: int, session: Session, prompt: str) -> str:
        """Run a turn, and kill the server that generates it when it has so many. Returns what was printed."""
        before = self.tokens()
        process = session.start(prompt, *ALONE.get(session.agent.package, ()))
        try:
            made, end = [0.0], time.monotonic() + TURN_S
            while max(made) < tokens:
                assert process.poll() is None, process.communicate()[0][-600:]
                assert time.monotonic() < end, "nothing is generated"
                made = [now - then for now, then in zip(self.tokens(), before, strict=True)]
            self.servers[made.index(max(made))][0].kill()
            said, _ = process.communicate(timeout=TURN_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, said[-600:]
        return said

    def broken(self, count: int) -> list[dict[str, object]]:
        """The log lines of requests whose response a server's death met, after `count` lines."""
        self.lbproxy.wait_for("server closed the connection")
        return [line for line in self.lbproxy.lines("request")[count:] if "closed" in str(line.get("error"))]


@contextmanager
def dying(folder: Path) -> Iterator[Dying]:
    mocks = ("--model", "demo", "--ttft", "0.1", "--token-time", "0.005")
    folder.mkdir()
    with (
        mock(*mocks) as one,
        mock(*mocks) as two,
        lbproxy(folder, [one[1], two[1]], "models: {demo: {continue: true}}") as (process, url, _),
    ):
        for _, server in (one, two):
            process.wait_for(f"{server.removeprefix('http://')} is up")
        yield Dying([one, two], process, url)


def text_of(said: str) -> list[str]:
    """The lines that the model said."""
    return [line for line in said.splitlines() if SAID.match(line)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("agent", ALL, ids=lambda agent: agent.package)
def test_an_agent_shows_the_whole_text_once(agent: Agent, tmp_path: Path) -> None:
    """As before with the same prompt, to which a simulated model always says the same."""
    if not is_ready(agent.environment):
        pytest.skip(f"{agent.environment} is not installed: make test-clients")
    with dying(tmp_path / "lbproxy") as fleet:
        session = Session(agent, tmp_path / "agent", fleet.url, key="any")
        code, said = session.run(HELLO, *ALONE.get(agent.package, ()))
        assert code == 0, said[-600:]
        undisturbed = text_of(said)
        assert undisturbed, said[-600:]
        before = len(fleet.lbproxy.lines("request"))
        fleet.slow_down()
        assert text_of(fleet.kill_at(12, session, HELLO)) == undisturbed
        (broken,) = fleet.broken(before)
        goes_on = agent.package not in RETRIED
        assert broken["outcome"] == ("completed" if goes_on else "upstream_broke")
        assert broken.get("moves", 0) == goes_on


@pytest.mark.timeout(600)
@pytest.mark.parametrize("agent", [one for one in ALL if one.tool], ids=lambda agent: agent.package)
def test_a_tool_whose_call_broke_runs_once(agent: Agent, tmp_path: Path) -> None:
    """The call does not go on at another server: the agent is told, and asks again."""
    if not is_ready(agent.environment):
        pytest.skip(f"{agent.environment} is not installed: make test-clients")
    with dying(tmp_path / "lbproxy") as fleet:
        session = Session(agent, tmp_path / "agent", fleet.url, key="any")
        fleet.slow_down()
        said = fleet.kill_at(8, session, f"Use the {agent.tool} tool to run `echo it-ran >> ran.txt`.")
        assert SAID.search(said), said[-600:]
        assert (session.work / "ran.txt").read_text() == "it-ran\n"
        (broken,) = fleet.broken(0)
        assert broken["outcome"] == "upstream_broke"
        assert "moves" not in broken
        assert agent.package in RETRIED or "not continued: it has `tool_calls`" in str(broken["error"])
