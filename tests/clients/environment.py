# SPDX-License-Identifier: Apache-2.0
"""The clients' environments, in `.clients/` of the project: made of lock files with hashes, and kept.

Clients that cannot be installed beside each other have environments of their own. The lock files are in `locks/`:
`uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate NAME.in -o NAME.txt`, and
`npm install` with package.json.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.real.environment import StepError, Unavailable, command, made

HERE = Path(__file__).parent
LOCKS = HERE / "locks"
PROGRAMS = HERE / "programs"
FOLDER = HERE.parent.parent / ".clients"
NODE, AGENTS = "node", "agents"
"""Environments of packages from npm, by their folders in `locks/`."""
TIMEOUT_S = 300


@dataclass(frozen=True)
class Client:
    """One client library, and the program that uses it."""

    package: str
    environment: str
    """A Python environment with the lock file of this name; or NODE."""
    program: str
    argument: str = ""


CLIENTS = (
    Client("openai", "sdks", "openai_sdk.py"),
    Client("openai-agents", "sdks", "agents_sdk.py"),
    Client("anthropic", "sdks", "anthropic_sdk.py"),
    Client("langchain-openai", "sdks", "langchain_sdk.py"),
    Client("litellm", "litellm", "litellm_sdk.py"),
    Client("pydantic-ai-slim", "sdks", "pydantic_ai_sdk.py"),
    Client("instructor", "instructor", "instructor_sdk.py"),
    Client("llm", "sdks", "llm_cli.py"),
    Client("aider-chat", "aider", "aider_models.py"),
    Client("ollama", "ollama", "ollama_sdk.py"),
    Client("openai-node", NODE, "openai_node.mjs"),
    Client("@ai-sdk/openai", NODE, "ai_sdk.mjs", "@ai-sdk/openai"),
    Client("@ai-sdk/openai-compatible", NODE, "ai_sdk.mjs", "@ai-sdk/openai-compatible"),
    Client("@ai-sdk/anthropic", NODE, "ai_sdk.mjs", "@ai-sdk/anthropic"),
)
PYTHONS = sorted({client.environment for client in CLIENTS} - {NODE})


@dataclass(frozen=True)
class Report:
    """What came of one client's checks."""

    client: str
    """Name and version."""
    checks: dict[str, str | None]
    """None for a check that passed, otherwise what went wrong."""

    @property
    def passed(self) -> list[str]:
        return [name for name, error in self.checks.items() if error is None]

    @property
    def failed(self) -> dict[str, str]:
        return {name: error for name, error in self.checks.items() if error is not None}

    def row(self) -> str:
        """A row of a table in Markdown."""
        wrong = "".join(f"; **{name}** failed" for name in self.failed)
        return f"| {self.client} | {len(self.passed)} of {len(self.checks)} | {'; '.join(self.passed)}{wrong} |"


def is_ready(environment: str) -> bool:
    return (FOLDER / environment / ".stamp").exists()


def prepare(say: Callable[[str], None]) -> None:
    """Make what is missing. Raises Unavailable if packages cannot be had."""
    FOLDER.mkdir(exist_ok=True)
    try:
        for name in PYTHONS:
            lock = LOCKS / f"{name}.txt"
            made(FOLDER / name, lock.read_text(), partial(python_environment, name, lock), say)
        for name in (NODE, AGENTS) if shutil.which("npm") else ():
            lock = LOCKS / name / "package-lock.json"
            made(FOLDER / name, lock.read_text(), partial(node_environment, name), say)
    except StepError as e:
        raise Unavailable(f"clients cannot be installed: {e}") from e


def python_environment(name: str, lock: Path) -> None:
    uv = (sys.executable, "-m", "uv")
    command(*uv, "venv", "--quiet", "--python", "3.11", str(FOLDER / name))
    python = str(FOLDER / name / "bin" / "python")
    command(*uv, "pip", "install", "--quiet", "--python", python, "--require-hashes", "-r", str(lock))


def node_environment(name: str) -> None:
    shutil.copytree(LOCKS / name, FOLDER / name)
    # `ci` refuses Qwen Code's lock: it has optional packages for other systems that were never published.
    how = "install" if name == AGENTS else "ci"
    command("npm", how, "--no-audit", "--no-fund", "--silent", cwd=FOLDER / name)


def run(client: Client, url: str, model: str) -> Report:
    """Run a client's program against a server. AssertionError if it ended without a report."""
    if client.environment == NODE:
        start = ["node", str(PROGRAMS / client.program), str(FOLDER / NODE)]
    else:
        start = [str(FOLDER / client.environment / "bin" / "python"), str(PROGRAMS / client.program)]
    arguments = [*start, url, model, *filter(None, [client.argument])]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    reports = [line for line in done.stdout.splitlines() if line.startswith('{"client"')]
    assert reports, f"{client.package} ended with {done.returncode}:\n{done.stderr[-3000:]}"
    said = json.loads(reports[-1])
    return Report(said["client"], said["checks"])
