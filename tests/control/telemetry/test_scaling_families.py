# SPDX-License-Identifier: Apache-2.0
"""What /metrics says for autoscalers: one series a model, nothing for what is not known, and never too many."""

from __future__ import annotations

from dataclasses import replace

from lbproxy.control.families.features import MAX_LABEL_CHARS, MAX_MODELS
from lbproxy.core.scaling.advice import ModelScaling
from tests.control.telemetry.test_telemetry import read, seen, telemetry


def test_each_model_has_one_series_of_each() -> None:
    with telemetry(seen(1, "m")) as (made, pool):
        pool.now = replace(
            pool.now, models=[ModelScaling("m", 1, 3, True, 7, 0.5, 0.25), ModelScaling("n", 0, 0, True, 0, None, None)]
        )
        page = read(made)
    assert page["lbproxy_recommended_endpoints"] == {("m",): 3, ("n",): 0}
    assert page["lbproxy_model_endpoints"] == {("m",): 1, ("n",): 0}
    assert page["lbproxy_model_waiting_requests"] == {("m",): 7, ("n",): 0}
    assert page["lbproxy_model_predicted_wait_seconds"] == {("m",): 0.5}
    assert page["lbproxy_model_room_ratio"] == {("m",): 0.25}


def test_without_advice_there_is_no_sample() -> None:
    with telemetry(seen(1, "m")) as (made, pool):
        pool.now = replace(pool.now, models=[ModelScaling("m", 1, None, False, 0, None, None)])
        page = read(made)
    assert page.get("lbproxy_recommended_endpoints", {}) == {}
    assert page["lbproxy_model_endpoints"] == {("m",): 1}


def test_labels_are_bounded() -> None:
    models = [ModelScaling(f"{n:04}" + "x" * 1000, 1, 1, True, 0, 0.0, 1.0) for n in range(MAX_MODELS + 50)]
    with telemetry(seen(1, "m")) as (made, pool):
        pool.now = replace(pool.now, models=models)
        series = read(made)["lbproxy_recommended_endpoints"]
    assert len(series) == MAX_MODELS
    assert {len(label) for (label,) in series} == {MAX_LABEL_CHARS}
