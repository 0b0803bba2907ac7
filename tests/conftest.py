# SPDX-License-Identifier: Apache-2.0
"""What every test runs with."""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

# No test fails because the machine is busy.
settings.register_profile("lbproxy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lbproxy")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep modules and collected tests out of every later garbage collection: `aio.run` collects after each test."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape what a test logged and printed where it is no valid text: workers send it to pytest as UTF-8."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report
