# SPDX-License-Identifier: Apache-2.0
"""Recording and alert rules: of families that exist, each with its words in the docs, and judged by promtool."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.docs import DOCS, ROOT, expect_generated, families

FOLDER = ROOT / "deploy/prometheus"
RULES = FOLDER / "lbproxy.rules.yml"
PROMTOOL = shutil.which("promtool")


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_rules_are_about_families_and_records_that_exist() -> None:
    kinds = ("", " of replicas", " of KV events", " of split requests", " of sleep", " of tiers")
    documented = {family.name for kind in kinds for family in families(f"families{kind}")}
    series = {name + suffix for name in documented for suffix in ("", "_bucket", "_sum", "_count")}
    records = {rule["record"] for rule in rules() if "record" in rule}
    used = {
        name for rule in rules() for name in re.findall(r"\blbproxy[_:][\w:]*", re.sub('"[^"]*"', "", rule["expr"]))
    }
    assert len(used) > 15
    assert used <= series | records
    assert records - {"lbproxy:in_flight:max_over_mean"} <= used | {
        "lbproxy:time_to_first_byte_seconds:p50_5m",
        "lbproxy:time_to_first_byte_seconds:p95_5m",
        "lbproxy:recommended_endpoints:max",
        "lbproxy:model_predicted_wait_seconds:max1m",
        "lbproxy:model_waiting_requests:sum",
        "lbproxy:model_room_ratio:min",
    }


def test_metrics_has_every_alert() -> None:
    by_severity: dict[str, list[str]] = {}
    for rule in rules():
        if "alert" in rule:
            told = f"`{rule['alert']}` {rule.get('for', 'at once')}"
            by_severity.setdefault(rule["labels"]["severity"], []).append(told)
    lines = "".join(f"- **{severity}**: {', '.join(alerts)}\n" for severity, alerts in by_severity.items())
    expect_generated(DOCS / "metrics.md", "alerts", lines)


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool: alerts NOT tested; `make test-tools`")
def test_promtool_finds_the_rules_right_and_each_alert_fires_when_it_should(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    for arguments in (["check", "rules", "lbproxy.rules.yml"], ["test", "rules", "lbproxy.test.yml"]):
        done = subprocess.run([PROMTOOL, *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    for file in FOLDER.iterdir():
        (tmp_path / file.name).write_text(file.read_text().replace("> 0.01", "> 0.99"))
    broken = subprocess.run(
        [PROMTOOL, "test", "rules", "lbproxy.test.yml"], cwd=tmp_path, capture_output=True, check=False
    )
    assert broken.returncode != 0, "a rule that never fires is found"


def test_every_alert_is_made_to_fire() -> None:
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert alerts == set(re.findall(r"Lbproxy\w+", (FOLDER / "lbproxy.test.yml").read_text()))
