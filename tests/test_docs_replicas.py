# SPDX-License-Identifier: Apache-2.0
"""docs/metrics.md has every family that an lbproxy with replicas shows."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from lbproxy.config.tree import LogSettings
from lbproxy.control.telemetry.process_log import ProcessLog
from lbproxy.control.telemetry.telemetry import Telemetry
from tests.support.aio import run
from tests.support.docs import DOCS, expect_generated, family_lines
from tests.support.replicas import exchanged, other


def test_metrics_has_every_family_of_replicas() -> None:
    """By type, labels and meaning."""
    log = ProcessLog(LogSettings())
    telemetry = Telemetry(log)
    try:
        telemetry.watched.replicas = lambda: exchanged(other("lb-2"))
        page = run(telemetry.page())[0].decode()
    finally:
        log.close()
    shown = [family for family in text_string_to_metric_families(page) if family.name.startswith("lbproxy_replica")]
    assert len(shown) == 13
    expect_generated(DOCS / "metrics.md", "families of replicas", family_lines(shown))
