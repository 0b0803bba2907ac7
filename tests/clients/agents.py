# SPDX-License-Identifier: Apache-2.0
"""Coding agents as they install, without a terminal, each set up with what docs/agents.md says and nothing else that
concerns lbproxy.

Each has a home and a work folder of its own, and an environment without the variables of who runs the tests. What it
calls, it may run: the simulated model calls only what the prompt names.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution
from pathlib import Path

from tests.clients.environment import AGENTS, FOLDER
from tests.support.docs import DOCS, blocks

PAGE = DOCS / "agents.md"
TIMEOUT_S = 120


@dataclass(frozen=True)
class Agent:
    """One coding agent."""

    package: str
    environment: str
    """`AGENTS`, or a Python environment (tests.clients.environment)."""
    begins: str
    """How its block in docs/agents.md begins; what is set in the shell there is its environment."""
    file: str
    """Where the block is written to, below its home; empty: nowhere."""
    command: tuple[str, ...]
    """Without the prompt, which is the last argument."""
    tool: str = ""
    """Its tool that runs a command of the shell; empty: its requests offer none."""
    program: str = ""
    """Where its program is, as a pattern below node_modules, if a link to it is made by no script."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Variables that keep it from talking to others."""
    whole: tuple[str, ...] = ()
    """Arguments by which it asks for responses that are not streamed; none: it cannot."""

    def version(self) -> str:
        """That which is installed."""
        if self.environment == AGENTS:
            manifest = FOLDER / AGENTS / "node_modules" / self.package / "package.json"
            return str(json.loads(manifest.read_text())["version"])
        (packages,) = (FOLDER / self.environment / "lib").glob("python3*/site-packages")
        (found,) = Distribution.discover(name=self.package, path=[str(packages)])
        return found.version


ALL = (
    Agent(
        *("@anthropic-ai/claude-code", AGENTS, "export ANTHROPIC_BASE_URL", ""),
        ("claude", "--dangerously-skip-permissions", "-p"),
        tool="Bash",
        program="@anthropic-ai/claude-code-*/claude",
        settings={"IS_SANDBOX": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
    ),
    Agent(
        *("@openai/codex", AGENTS, 'model = "MODEL"', ".codex/config.toml"),
        ("codex", "exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check"),
        tool="exec_command",
        settings={"LBPROXY_KEY": "KEY"},
    ),
    Agent(
        *("opencode-ai", AGENTS, '{\n  "provider"', "work/opencode.json"),
        ("opencode", "run", "--model", "lbproxy/MODEL"),
        tool="bash",
        program="opencode-*/bin/opencode",
        settings={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
    ),
    Agent(
        *("@qwen-code/qwen-code", AGENTS, "OPENAI_BASE_URL=", ""),
        ("qwen", "--auth-type", "openai", "--yolo"),
        tool="run_shell_command",
    ),
    Agent(
        *("@continuedev/cli", AGENTS, "name: lbproxy", "config.yaml"),
        ("cn", "--config", "../config.yaml", "--auto", "-p"),
        tool="Bash",
        settings={"CONTINUE_TELEMETRY_ENABLED": "0"},
    ),
    Agent(
        *("aider-chat", "aider", "export OPENAI_API_BASE", ""),
        ("aider", "--model", "openai/MODEL", "--yes-always", "--no-check-update", "--analytics-disable", "--message"),
        settings={"LITELLM_LOCAL_MODEL_COST_MAP": "true"},
        whole=("--no-stream",),
    ),
)


def documented(agent: Agent) -> str:
    """What docs/agents.md says of it: a block, or code in a line."""
    texts = [block.text for block in blocks(PAGE)] + re.findall(r"`([^`\n]+)`", PAGE.read_text(encoding="utf-8"))
    text: str = next(text for text in texts if text.startswith(agent.begins))
    return text


class Session:
    """One agent in a folder of its own, before an lbproxy at `url`."""

    def __init__(self, agent: Agent, folder: Path, url: str, *, key: str, model: str = "demo") -> None:
        self.agent = agent
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        self._words = {"http://lbproxy:8080": url, "KEY": key, "MODEL": model}
        text = self._filled(documented(agent))
        if agent.file:
            path = folder / agent.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        variables = dict(re.findall(r"(?:export |^| )([A-Z_]+)=(\S+)", text)) if not agent.file else {}
        settings = {name: self._filled(value) for name, value in agent.settings.items()}
        self._environ = {
            "HOME": str(folder),
            "PATH": os.pathsep.join(map(str, (*self._programs(folder), "/usr/bin", "/bin"))),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            **settings,
            **variables,
        }
        subprocess.run(["git", "init", "--quiet"], cwd=self.work, env=self._environ, check=True)

    def start(self, prompt: str, *more: str) -> subprocess.Popen[str]:
        """In a session of its own, so that a signal to its group reaches all that it started."""
        name, *rest = self.agent.command
        return subprocess.Popen(
            [name, *more, *map(self._filled, rest), prompt],
            cwd=self.work,
            env=self._environ,
            executable=shutil.which(name, path=self._environ["PATH"]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, prompt: str, *more: str) -> tuple[int, str]:
        """To its end: the exit code, and all that it printed. AssertionError if it does not end."""
        process = self.start(prompt, *more)
        try:
            said, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired as e:
            raise AssertionError(f"it still runs after {TIMEOUT_S} s: {shlex.join(self.agent.command)}") from e
        finally:
            process.kill()
        return process.returncode, said

    def _filled(self, text: str) -> str:
        for word, value in self._words.items():
            text = re.sub(rf"(?<![A-Z_]){re.escape(word)}(?![A-Z_])", value, text)
        return text

    def _programs(self, folder: Path) -> list[Path]:
        """Folders with its program, first."""
        if self.agent.environment != AGENTS:
            return [FOLDER / self.agent.environment / "bin"]
        modules, own = FOLDER / AGENTS / "node_modules", folder / "bin"
        own.mkdir()
        if self.agent.program:
            # The one for this machine has the shortest name: others are `-musl`, `-baseline`.
            found = min(modules.glob(self.agent.program), key=lambda path: len(str(path)))
            (own / self.agent.command[0]).symlink_to(found)
        return [own, modules / ".bin", *modules.glob("node-linux-*/bin")]
