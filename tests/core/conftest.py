# SPDX-License-Identifier: Apache-2.0
"""Marks the tests of this folder, so that a run of several folders can leave out some of them (Makefile)."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The hook gets the items of all folders."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.core)
