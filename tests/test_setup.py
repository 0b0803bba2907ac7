# SPDX-License-Identifier: Apache-2.0
"""Building the source says what it does at the terminal: pip shows nothing of it, and it takes minutes."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRANSLATED = """
from pathlib import Path
from setuptools import Extension

def mypycify(files, **_):
    names = [f"one{n}" for n in range(8)]
    for name in names:
        Path(f"{name}.c").write_text(f"int {name}(void) {{ return 0; }}")
    return [Extension("made", [f"{name}.c" for name in names])]
"""
"""In place of mypyc, which takes a minute."""


def built(folder: Path, **env: str) -> str:
    """What a terminal shows while the source is built, all of whose output is hidden, as pip does."""
    shutil.copy(ROOT / "setup.py", folder)
    (folder / "mypyc").mkdir()
    (folder / "mypyc/__init__.py").touch()
    (folder / "mypyc/build.py").write_text(TRANSLATED)
    (folder / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1"\n[tool.setuptools]\npackages = []\n')
    ours, theirs = pty.openpty()
    command = [sys.executable, "setup.py", "build_ext"]
    process = subprocess.Popen(
        # A shell that begins a session takes the terminal that it opens first.
        ["sh", "-c", 'exec < "$0"; exec "$@" > /dev/null 2>&1', os.ttyname(theirs), *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), **env},
        start_new_session=True,
    )
    assert process.wait(60) == 0
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 1 << 16):
            shown += data
    except OSError:  # nobody has the other side any more, and all is read
        pass
    os.close(ours)
    return shown.decode()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_build_says_what_it_does_and_how_far_it_is(tmp_path: Path) -> None:
    lines = [line.strip() for line in built(tmp_path).splitlines() if line.strip()]
    assert "LBPROXY_PURE=1" in lines[0]
    assert [line.partition(" after")[0] for line in lines[1:]] == [
        f"lbproxy: {count} of 8 files compiled" for count in (2, 4, 6, 8)
    ]


def test_a_build_that_compiles_nothing_says_nothing(tmp_path: Path) -> None:
    assert built(tmp_path, LBPROXY_PURE="1") == ""
