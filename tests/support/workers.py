# SPDX-License-Identifier: Apache-2.0
"""Tests with worker processes: the same tests, with the data path in processes of its own.

LBPROXY_TEST_WORKERS=N in the environment has every lbproxy that a test starts run with `workers: N`, unless its
settings say otherwise, and the rig's data path be that of a worker, linked to the balancer by sockets (any N).
"""

from __future__ import annotations

import os
import re

import pytest

WORKERS = int(os.environ.get("LBPROXY_TEST_WORKERS") or 0)
"""0: a single process."""


def one_process(reason: str) -> pytest.MarkDecorator:
    """Marks what holds in a single process only, and why."""
    return pytest.mark.skipif(WORKERS > 0, reason=f"one process: {reason}")


def with_workers(text: str) -> str:
    """The text of a settings file, with as many workers as this run is to have."""
    if WORKERS < 2 or re.search(r"^workers:", text, re.MULTILINE):
        return text
    return f"{text.rstrip()}\nworkers: {WORKERS}\n"
