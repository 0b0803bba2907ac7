# SPDX-License-Identifier: Apache-2.0
"""Each load generator as it installs, through lbproxy: what it reports is what lbproxy reports."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.loadgens.conftest import Stand, Standing
from tests.loadgens.environment import is_ready, program
from tests.loadgens.report import Report, differences, figures, with_errors
from tests.loadgens.tools import SETTINGS, TOOLS, Summary, Tool

TIMEOUT_S = 300
REFUSING = ("--fault", "status code=400 share=0.4", "--ttft", "0.2")
"""400 is not tried again, neither by lbproxy nor by a load generator."""
SETTLED_S = 1.0


def version(tool: Tool) -> str:
    """Of its package."""
    script = f"from importlib.metadata import version; print(version({tool.package!r}))"
    command = [str(program(tool.environment, "python")), "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run(tool: Tool, url: str, folder: Path) -> Summary:
    """Run it to its end in a new folder. AssertionError if it left no summary."""
    folder.mkdir()
    if tool.settings is not None:
        (folder / SETTINGS).write_text(tool.settings(url))
    environ = os.environ | dict(tool.environ)
    done = subprocess.run(
        tool.command(url), cwd=folder, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    try:
        return tool.read(folder)
    except (OSError, LookupError, ValueError) as e:
        raise AssertionError(f"exit {done.returncode}, {e!r}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}") from e


def settle(stand: Stand) -> None:
    """Until the log is silent: what a load generator cut off is logged a moment later."""
    before = -1
    while before != (before := len(stand.process.lines("request"))):
        time.sleep(SETTLED_S)


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_a_load_generator_and_lbproxy_report_the_same(
    tool: Tool, standing: Standing, tmp_path: Path, reports: list[Report]
) -> None:
    if not is_ready(tool.environment):
        pytest.skip(f"{tool.environment} is not installed: make test-loadgens")
    with standing() as stand:
        summary = run(tool, stand.url, tmp_path / "good")
        settle(stand)
        good = stand.seen()
    with standing(*REFUSING) as stand:
        summary_of_errors = run(tool, stand.url, tmp_path / "errors")
        settle(stand)
        bad = stand.seen()
    compared = figures(tool, summary, good) | with_errors(summary_of_errors, bad)
    reports.append(Report(f"{tool.name} {version(tool)}", None, compared, good.others, good.cut))
    assert good.failed == summary.failed == 0
    assert bad.failed > 0
    assert tool.cuts or not good.cut
    assert differences(compared) == []
