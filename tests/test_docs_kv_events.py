# SPDX-License-Identifier: Apache-2.0
"""docs/metrics.md has the families that a page gets with KV events, and docs/kv-events.md the kinds of problems."""

from __future__ import annotations

import re

from lbproxy.control.families.endpoints import KV_GAUGES, gauge_families
from lbproxy.control.families.features import kv_families
from lbproxy.core.engines.kv_events import Problem
from tests.support.docs import DOCS, expect_generated, family_lines
from tests.support.kv_events import published, snapshot


def test_metrics_has_every_family_of_kv_events() -> None:
    lines = family_lines([*gauge_families(KV_GAUGES, [snapshot(3_200, 0.25)]), *kv_families(published())])
    expect_generated(DOCS / "metrics.md", "families of KV events", lines)


def test_each_kind_of_problem_is_explained() -> None:
    rows = re.findall(r"^\| (`[a-z`, ]+`) \|", (DOCS / "kv-events.md").read_text(), re.MULTILINE)
    kinds = {one.value for one in Problem}
    assert kinds <= {word.strip("` ") for row in rows for word in row.split(",")}
    labels = (DOCS / "metrics.md").read_text().partition("- `problem`: ")[2].partition(":")[0]
    assert {word.strip("` ") for word in labels.split(",")} == kinds
