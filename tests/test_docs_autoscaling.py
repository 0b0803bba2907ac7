# SPDX-License-Identifier: Apache-2.0
"""docs/autoscaling.md and deploy/autoscaling: the example is computed, the files fit to the rules and to Kubernetes."""

from __future__ import annotations

from math import inf
from typing import Any

import kubernetes_validate
import pytest
import yaml

from lbproxy.core.scaling.capacity import Capacity, Load, endpoints_for, use_of, wait_p95_s
from tests.support.docs import DOCS, ROOT, blocks, expect_generated, table

FOLDER = ROOT / "deploy/autoscaling"
LOAD = Load(12.0, 13_000.0, 32.0)
CAPACITY = Capacity(26.7e-6, 7e-3, 7e-4, 13_000 * 26.7e-6, 30.0)
TARGET_S = 2.0


def test_the_example_is_computed() -> None:
    rows = []
    for endpoints in (4, 5, 6, 8):
        use, wait_s = use_of(LOAD, CAPACITY, endpoints), wait_p95_s(LOAD, CAPACITY, endpoints)
        running, slots = (f"{use.running:.1f}", f"{use.slots:.2f}") if use.running < inf else ("more and more", "-")
        wait = f"{wait_s:.2f} s" if wait_s < inf else "longer and longer"
        rows.append([str(endpoints), f"{use.prefill:.2f}", running, slots, wait])
    heads = ["endpoints", "prefill", "running", "slots", "wait of 95 %"]
    expect_generated(DOCS / "autoscaling.md", "example", table(heads, rows))
    text = (DOCS / "autoscaling.md").read_text()
    for said in ("12 requests a second", "13,000 tokens", "32 to generate", "26.7 µs", "7 ms", "0.7 ms", "30 requests"):
        assert said in text
    found = endpoints_for(LOAD, CAPACITY, TARGET_S - LOAD.work * CAPACITY.prefill_s)
    assert f"So {found} are recommended" in text


def load(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((FOLDER / name).read_text()))


def test_the_autoscaler_of_kubernetes_takes_its_file() -> None:
    one = load("hpa.yaml")
    kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)
    one["spec"]["maxReplica"] = one["spec"].pop("maxReplicas")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)


def test_both_ask_for_what_the_rules_record_and_change_nothing_of_it() -> None:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/lbproxy.rules.yml").read_text())["groups"]
    records = {rule["record"]: rule["expr"] for group in rules for rule in group["rules"] if "record" in rule}
    keda, hpa = load("keda.yaml")["spec"], load("hpa.yaml")["spec"]
    trigger = keda["triggers"][0]
    record, _, labels = trigger["metadata"]["query"].partition("{")
    assert records[record] == "max by (model) (lbproxy_recommended_endpoints)"
    assert labels == 'model="qwen3-8b"}'
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")
    external = hpa["metrics"][0]["external"]
    assert external["target"] == {"type": "AverageValue", "averageValue": "1"}
    assert external["metric"]["selector"]["matchLabels"] == {"model": "qwen3-8b"}
    assert record in (FOLDER / "hpa.yaml").read_text()
    assert f"name: {{as: {external['metric']['name']}}}" in (FOLDER / "hpa.yaml").read_text()
    inner = keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert inner == hpa["behavior"]
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (hpa["minReplicas"], hpa["maxReplicas"])


def test_the_behaviour_that_keda_hands_on_follows_the_schema() -> None:
    """KEDA's own kinds are not in the schema of Kubernetes; what it makes of them is."""
    one = load("hpa.yaml")
    one["spec"]["behavior"] = load("keda.yaml")["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)


def test_the_page_shows_the_trigger_of_the_file() -> None:
    shown = next(block.text for block in blocks(DOCS / "autoscaling.md") if block.text.startswith("triggers"))
    trigger, whole = yaml.safe_load(shown)["triggers"][0], load("keda.yaml")["spec"]["triggers"][0]
    assert trigger["metadata"].items() <= whole["metadata"].items()
    assert {**trigger, "metadata": None} == {**whole, "metadata": None}
