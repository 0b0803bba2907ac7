# SPDX-License-Identifier: Apache-2.0
"""docs/metrics.md has every family that an lbproxy with prefill and decode endpoints shows."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from lbproxy.core.observed.learned import LearnedTransfer
from tests.control.telemetry.test_split_families import FAMILIES, apart
from tests.control.telemetry.test_telemetry import record, telemetry
from tests.support.aio import run
from tests.support.docs import DOCS, expect_generated, family_lines


def test_metrics_has_every_family_of_split_requests() -> None:
    """By type, labels and meaning."""
    with telemetry(*apart()) as (made, pool):
        pool.now = replace(pool.now, transfer=LearnedTransfer(20.0, 0.01))
        made.ended([record(1, endpoint="e2", prefill="e1", prefill_s=0.3, first_legs=(("e1", "completed"),))])
        page = run(made.page())[0].decode()
    shown = [
        family
        for family in text_string_to_metric_families(page)
        if family.name.startswith(tuple(f"lbproxy_{one}" for one in FAMILIES))
    ]
    assert len(shown) == 7
    expect_generated(DOCS / "metrics.md", "families of split requests", family_lines(shown))
