# SPDX-License-Identifier: Apache-2.0
"""Installs wheels as users do, and runs what they install: `python -m release.install dist/*.whl`.

Each wheel gets an empty virtual environment of its Python, with nothing but that on PATH: no compiler, no git. There
`pip install` must bring all that it needs, and the installed command must say its version, run a demo that serves a
request, check settings against a simulated server, and start with these settings. Then it is installed with pipx and
run with uvx, as the notes of a release say.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from release.notes import install_lines
from release.wheels import ENVIRONMENTS, run

WITHIN_S = 60.0
"""How long any command may take until it says what is waited for, and to its end."""
WARNING = "lbproxy is not compiled"


class InstallError(Exception):
    """An installed lbproxy does not do what it must."""


def python_of(wheel: Path) -> Path:
    """The Python that a wheel was built for, by its tag; for one of Python modules alone, this one."""
    match = re.search(r"-(cp3\d+)-", wheel.name)
    return Path(sys.executable) if match is None else ENVIRONMENTS / match[1] / "bin/python"


def kind_of(wheel: Path) -> str:
    """What `lbproxy --version` must say of it."""
    return "pure Python" if wheel.name.endswith("-py3-none-any.whl") else "compiled"


def install(wheel: Path, folder: Path) -> tuple[Path, float]:
    """Install it into a new environment in `folder`; returns the command `lbproxy`, and how long pip took in s."""
    run(python_of(wheel), "-m", "venv", folder)
    began = time.monotonic()
    installed = ("-m", "pip", "--disable-pip-version-check", "--quiet", "install", wheel)
    run(folder / "bin/python", *installed, env=_bare(folder / "bin"))
    return folder / "bin/lbproxy", time.monotonic() - began


def _bare(path: Path) -> dict[str, str]:
    """An environment in which nothing but `path` is on PATH, so that no compiler is."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LBPROXY_", "VIRTUAL"))}
    return {name: value for name, value in kept.items() if name not in {"CC", "CFLAGS"}} | {"PATH": str(path)}


def exercise(command: Sequence[str], env: Mapping[str, str], folder: Path, *, version: str) -> None:
    """Run an installed lbproxy as its users do first. `version` as `--version` must print it. Raises InstallError."""
    said = subprocess.run(
        [*command, "--version"], env=env, capture_output=True, text=True, timeout=WITHIN_S, check=True
    ).stdout
    _expect(said == f"lbproxy {version}\n", f"--version says {said!r}")
    with _running([*command, "demo", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"], env) as demo:
        _complete(demo.wait_for(r"lbproxy is at http://([\w.:]+)")[1], "demo")
        demo.stop()
        _expect(WARNING not in demo.output, "a demo warns that it is not compiled")
    with _running([*command, "mock", "--port", "0"], env) as server:
        url = server.wait_for(r"at (http://[\w.:]+)")[1]
        config = folder / "lbproxy.yaml"
        config.write_text(f"listen: 127.0.0.1:0\nadmin: null\ndrain: {{lame_duck: 0s}}\nendpoints: ['{url}']\n")
        done = subprocess.run(
            [*command, "check", "--config", config],
            env=env,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        _expect(done.returncode == 0, f"check: {done.stdout}{done.stderr}")
        with _running([*command, "--config", str(config)], env) as proxy:
            at = proxy.wait_for(r"listens on http://([\w.:]+)")[1]
            proxy.wait_for("serves sim")
            _complete(at, "sim")
            proxy.stop()
            count = proxy.output.count(WARNING)
            _expect(count == (0 if "compiled" in version else 1), f"{count} lines warn that it is not compiled")


def install_as_told(wheel: Path, folder: Path) -> None:
    """Run the lines that a release names, below `folder`. Raises InstallError."""
    python = python_of(wheel)
    homes = {"PIPX_HOME": str(folder / "pipx"), "PIPX_BIN_DIR": str(folder / "bin"), "UV_PYTHON": str(python)}
    env = {**os.environ, **homes, "PIPX_DEFAULT_PYTHON": str(python)}
    uv = [sys.executable, "-m", "uv", "tool", "run"]
    for line in install_lines(str(wheel)):
        program, *arguments = shlex.split(line)
        if arguments[-1] == "demo":
            arguments[-1] = "--version"
        done = subprocess.run(
            [*uv, *([program] if program == "pipx" else []), *arguments],
            env=env,
            capture_output=True,
            text=True,
            timeout=10 * WITHIN_S,
            check=False,
        )
        _expect(done.returncode == 0, f"{line}: {done.stderr}")
    said = run(folder / "bin/lbproxy", "--version")
    _expect(kind_of(wheel) in said, f"pipx installed {said!r}")


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InstallError(otherwise)


def _complete(at: str, model: str) -> None:
    """Send one request, which must be served."""
    connection = http.client.HTTPConnection(at, timeout=WITHIN_S)
    body = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 3})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    _expect(response.status == 200 and "text_completion" in text, f"{response.status}: {text}")


class _Running:
    """A command that runs; a thread reads what it prints."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            command, env={**env, "PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.output = ""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.output += line
                self._changed.notify_all()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until the output matches. Raises InstallError if it does not in time."""
        with self._changed:
            self._changed.wait_for(lambda: re.search(pattern, self.output), WITHIN_S)
            match = re.search(pattern, self.output)
        if match is None:
            raise InstallError(f"no {pattern!r} in:\n{self.output}")
        return match

    def close(self) -> None:
        """Kill it, if it still runs."""
        self.process.kill()
        self.process.wait()
        self._reader.join(WITHIN_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def stop(self) -> None:
        """End it by SIGTERM; it must end well. All its output is there afterwards."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(WITHIN_S)
        self._reader.join(WITHIN_S)
        _expect(code == 0, f"it ended with {code}:\n{self.output}")


@contextmanager
def _running(command: Sequence[str], env: Mapping[str, str]) -> Iterator[_Running]:
    running = _Running(command, env)
    try:
        yield running
    finally:
        running.close()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m release.install")
    parser.add_argument("wheels", nargs="+", type=Path)
    for wheel in parser.parse_args().wheels:
        version = wheel.name.split("-")[1]
        with tempfile.TemporaryDirectory(prefix="lbproxy-install-") as name:
            folder = Path(name)
            command, took = install(wheel.absolute(), folder / "venv")
            exercise([str(command)], _bare(folder / "venv/bin"), folder, version=f"{version} ({kind_of(wheel)})")
            install_as_told(wheel.absolute(), folder)
        print(f"{wheel.name}: installed in {took:.0f} s, serves", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
