# SPDX-License-Identifier: Apache-2.0
"""`make help` names targets that exist, the main ones among them."""

from __future__ import annotations

import re
import subprocess

from tests.support.docs import ROOT


def test_help_names_targets_that_exist() -> None:
    done = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    named = re.findall(r"^make (\S+) +\S", done.stdout, re.MULTILINE)
    assert len(named) == len(done.stdout.splitlines()), "one line each"
    assert {"run", "test", "check"} <= {*named} <= {*re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)}
