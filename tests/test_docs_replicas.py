# SPDX-License-Identifier: Apache-2.0
"""docs/metrics.md has every family that an lbproxy with replicas shows."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from lbproxy.config.tree import LogSettings
from lbproxy.control.telemetry.process_log import ProcessLog
from lbproxy.control.telemetry.telemetry import Telemetry
from tests.support.aio import run
from tests.support.docs import DOCS, expect_generated, table
from tests.support.replicas import FakeReplicas, other


def test_metrics_has_every_family_of_replicas() -> None:
    """By type, labels and meaning."""
    log = ProcessLog(LogSettings())
    telemetry = Telemetry(log)
    try:
        telemetry.watch_replicas(FakeReplicas(other("lb-2")))
        page = run(telemetry.page())[0].decode()
    finally:
        log.close()
    rows = []
    for family in text_string_to_metric_families(page):
        if family.name.startswith("lbproxy_replica"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = dict.fromkeys(label for sample in family.samples for label in sample.labels)
            rows.append([f"`{name}`", family.type, ", ".join(labels) or "-", family.documentation])
    assert len(rows) == 13
    text = table(["family", "type", "labels", "meaning"], rows)
    expect_generated(DOCS / "metrics.md", "families of replicas", text)
