# SPDX-License-Identifier: Apache-2.0
"""docs/metrics.md has every family that an lbproxy with tiers shows."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.control.telemetry.test_telemetry import telemetry
from tests.control.telemetry.test_tier_families import FAMILIES, tiered
from tests.support.aio import run
from tests.support.docs import DOCS, expect_generated, family_lines


def test_metrics_has_every_family_of_tiers() -> None:
    """By type, labels and meaning."""
    with telemetry(*tiered()) as (made, _):
        page = run(made.page())[0].decode()
    shown = [
        family
        for family in text_string_to_metric_families(page)
        if family.name.startswith(tuple(f"lbproxy_{one}" for one in FAMILIES))
    ]
    assert len(shown) == 3
    expect_generated(DOCS / "metrics.md", "families of tiers", family_lines(shown))
