# SPDX-License-Identifier: Apache-2.0
"""The load generators' environments, in `.loadgens/` of the project: made of lock files with hashes, and kept.

The lock files are in `locks/`: `uv pip compile --universal --python-version 3.11 --generate-hashes --no-header
--no-annotate NAME.in -o NAME.txt`; inference-perf with 3.12, guidellm with `--python-platform x86_64-unknown-linux-gnu`
instead of `--universal`, because torch's build without CUDA (`+cpu`, 4 GB less) has no other. vLLM's is that of
tests/real.

What cannot be had on a machine is no failure of lbproxy: `prepare` says which, and why; the others are still tested.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.loadgens.tokenizer import write_tokenizer
from tests.real import environment as real
from tests.real.environment import StepError, Unavailable, made

HERE = Path(__file__).parent
LOCKS = HERE / "locks"
FOLDER = HERE.parent.parent / ".loadgens"
TOKENIZER = FOLDER / "tokenizer"
VLLM = "vllm"
PYTHONS = {"inference-perf": "3.12"}
"""Other than 3.11."""
INSTALL_TIMEOUT_S = 1800


def locked() -> list[str]:
    """The environments that have a lock file."""
    return sorted(path.stem for path in LOCKS.glob("*.txt"))


def is_ready(name: str) -> bool:
    return real.is_ready() if name == VLLM else (FOLDER / name / ".stamp").exists()


def program(environment: str, name: str) -> Path:
    """A program of an environment."""
    return (real.VENV if environment == VLLM else FOLDER / environment) / "bin" / name


def prepare(say: Callable[[str], None]) -> dict[str, str]:
    """Make what is missing. Returns the environments that cannot be had, and why."""
    FOLDER.mkdir(exist_ok=True)
    made(TOKENIZER, (HERE / "tokenizer.py").read_text(), partial(write_tokenizer, TOKENIZER), say)
    missing: dict[str, str] = {}
    for name in locked():
        lock = LOCKS / f"{name}.txt"
        try:
            made(FOLDER / name, lock.read_text(), partial(python_environment, name, lock), say)
        except (StepError, Unavailable) as e:
            shutil.rmtree(FOLDER / name, ignore_errors=True)
            missing[name] = str(e)
    if not real.is_ready():
        try:
            real.prepare(say)
        except (StepError, Unavailable) as e:
            missing[VLLM] = str(e)
    return missing


def python_environment(name: str, lock: Path) -> None:
    """Raises StepError or Unavailable."""
    uv = (sys.executable, "-m", "uv")
    run(*uv, "venv", "--quiet", "--python", find_python(PYTHONS.get(name, "3.11")), str(FOLDER / name))
    python = str(FOLDER / name / "bin" / "python")
    run(*uv, "pip", "install", "--quiet", "--python", python, "--require-hashes", "-r", str(lock))


def find_python(version: str) -> str:
    """The path of a Python of this version. Raises Unavailable."""
    if platform.python_version().startswith(f"{version}."):
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for candidate in (f"python{version}", *map(str, pyenv.glob(f"{version}*/bin/python"))):
        answer = [candidate, "-c", "import sys; print(sys.executable)"]
        try:
            return subprocess.run(answer, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):  # a shim of pyenv fails unless its version is chosen
            continue
    raise Unavailable(f"it needs Python {version}, and there is none")


def run(*arguments: str) -> None:
    """Run one step to its end; uv looks for packages where pip does. Raises StepError."""
    links = {"UV_FIND_LINKS": os.environ["PIP_FIND_LINKS"]} if "PIP_FIND_LINKS" in os.environ else {}
    try:
        subprocess.run(
            arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=INSTALL_TIMEOUT_S,
            check=True,
            env=os.environ | links,
        )
    except subprocess.CalledProcessError as e:
        raise StepError(e.stdout.decode(errors="replace")[-800:]) from e
    except (subprocess.TimeoutExpired, OSError) as e:
        raise StepError(str(e)) from e
