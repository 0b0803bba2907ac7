# SPDX-License-Identifier: Apache-2.0
"""The night in docs/operations.md is what `make night` wrote, and it shows what it is there to show."""

from __future__ import annotations

from itertools import pairwise

import orjson

from benchmarks.night import RESULT, Result, night, page
from lbproxy.demo.timeline import names
from tests.support.docs import DOCS, expect_generated

FOUND: Result = orjson.loads(RESULT.read_bytes())
SLOW, DEAD = "server-3", "server-5"


def test_operations_has_the_night() -> None:
    expect_generated(DOCS / "operations.md", "night", page(FOUND))


def test_it_is_this_night() -> None:
    steps = night(tuple(names(6))).steps
    assert [(phase["at_s"], phase["says"]) for phase in FOUND["phases"]] == [(step.at_s, step.says) for step in steps]


def test_each_trouble_has_its_alert_in_time_and_a_deploy_has_none() -> None:
    fired = {(one["alert"], one["endpoint"]): one["at_s"] for one in FOUND["alerts"] if one["state"] == "firing"}
    assert set(fired) == {("LbproxyEndpointSlow", SLOW), ("LbproxyEndpointDown", DEAD)}
    begins = [phase["at_s"] for phase in FOUND["phases"]]
    assert begins[1] < fired["LbproxyEndpointSlow", SLOW] < begins[2]
    assert begins[2] < fired["LbproxyEndpointDown", DEAD] < begins[3]
    over = {one["endpoint"] for one in FOUND["alerts"] if one["state"] == "over" and one["at_s"] > begins[3]}
    assert {SLOW, DEAD} <= over


def test_no_client_failed_but_those_whose_answer_the_dead_server_had_begun() -> None:
    assert [phase["clients"]["failed"] for phase in FOUND["phases"]] == [0] * 5
    assert [bool(phase["clients"]["cut"]) for phase in FOUND["phases"]] == [False, False, True, False, False]
    assert {one["endpoint"] for one in FOUND["wrong"]} == {DEAD}


def test_the_commands_name_the_reason() -> None:
    text = ["\n".join(shown["output"] for shown in phase["shown"]) for phase in FOUND["phases"]]
    assert f"{DEAD} failed" in text[2]
    assert "upstream_broke" in text[2]
    assert f"not asked: {DEAD} (slow start)" in text[3]
    assert "server-1 (draining)" in text[4]
    assert "server-1 is drained" in text[4]
    assert "server-2 takes requests again" in text[4]
    for before, after in pairwise(FOUND["alerts"]):
        assert before["at_s"] <= after["at_s"]
