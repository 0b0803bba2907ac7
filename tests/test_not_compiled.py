# SPDX-License-Identifier: Apache-2.0
"""What an lbproxy says of how it was built: `--version`, and one line of the log if it serves for more than a trial."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lbproxy import __version__
from lbproxy.processes.process import NOT_COMPILED
from tests.support.compiled import COMPILED
from tests.support.process import LBPROXY, Process, lbproxy, mock


def test_the_version_says_how_it_was_built() -> None:
    done = subprocess.run([*LBPROXY, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"lbproxy {__version__} ({'compiled' if COMPILED else 'pure Python'})\n"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_start_that_is_not_compiled_is_logged_once(workers: int, tmp_path: Path) -> None:
    """Once, and not by each process; last of what the start logs, so that it is seen."""
    with lbproxy(tmp_path, ["http://127.0.0.1:9"], f"workers: {workers}") as (process, _, _):
        if not COMPILED:
            process.wait_for("is not compiled")
        assert process.stop() == 0
        lines = process.lines("start")
    said = [line for line in lines if line["message"] == NOT_COMPILED]
    assert [line["level"] for line in said] == ([] if COMPILED else ["warning"])


def test_a_trial_is_not_told() -> None:
    with mock() as (server, _), Process("demo", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0") as demo:
        demo.wait_for(r"lbproxy is at http://")
        for process in (server, demo):
            assert process.stop() == 0
            assert "compiled" not in process.output
