# SPDX-License-Identifier: Apache-2.0
"""How `lbproxy status`, `top` and `explain` show endpoints with roles and split requests."""

from __future__ import annotations

from typing import Any

from lbproxy.commands.operate import picture
from lbproxy.commands.tables import decisions, explanation, fleet
from tests.commands.test_operate import drawn, endpoint, state


def request(**more: object) -> dict[str, Any]:
    return {
        "id": "id-1",
        "endpoint": "gpu-2",
        "prefill": "gpu-1",
        "prefill_ms": 512.5,
        "outcome": "completed",
        "status": 200,
        "queue_ms": 0.0,
        "duration_ms": 812.0,
        "observed": {"first_byte_ms": 633.0},
        **more,
    }


def test_roles_stand_beside_the_names() -> None:
    rows = drawn(
        fleet([endpoint("gpu-1", role="prefill"), endpoint("gpu-2", role="decode"), endpoint("gpu-3", role="both")])
    )
    assert [row.split(" up ")[0].rstrip() for row in rows[1:]] == ["gpu-1    P", "gpu-2    D", "gpu-3"]
    (_, row) = drawn(fleet([endpoint("x" * 60, role="decode")]))
    assert "… D up" in row
    assert drawn(fleet([endpoint("gpu-1", role="both")])) == drawn(fleet([endpoint("gpu-1")])), "no column for it"


def test_a_split_request_shows_both_endpoints() -> None:
    rows = drawn(decisions([request(), request(prefill=None), request(endpoint="decode-17.cluster", prefill="p" * 30)]))
    assert "gpu-1>gpu-2" in rows[1]
    assert ">" not in rows[2]
    assert "pppppp…>decode-…" in rows[3]


def test_top_with_roles_fits_80_columns() -> None:
    names = [endpoint("n" * 40, role="prefill"), endpoint("m" * 40, role="decode")]
    lines = drawn(picture(state(names, decisions=[request(prefill="n" * 40, endpoint="m" * 40)] * 5), height=24))
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24


def decision(**more: object) -> dict[str, Any]:
    return {
        "endpoint": "gpu-1",
        "decode_on": "gpu-2",
        "second_leg": False,
        "lowest_costs": {"whole": 500.0, "split": 300.0},
        "policy": "adaptive",
        "because": "it had the lowest cost",
        "unit": "ms",
        "candidates": 2,
        "shown": [
            {"endpoint": "gpu-2", "decode_on": None, "chosen": False, "cost": 500.0, "parts": {"base": 500.0}},
            {
                "endpoint": "gpu-1",
                "decode_on": "gpu-2",
                "chosen": True,
                "cost": 300.0,
                "parts": {"base": 280.0, "transfer": 20.0},
            },
            {"endpoint": "gpu-3", "decode_on": None, "chosen": False, "cost": None, "parts": {}},
        ],
        "left_out": [],
        **more,
    }


def test_cached_tokens_of_each_candidate_stand_beside_its_cost() -> None:
    made = decision()
    assert not any("tokens" in line.split()[-1:] for line in explained(made)), "not without a prediction"
    made["shown"] = [
        one | {"cached_tokens": tokens} for one, tokens in zip(made["shown"], (0.0, 2458.2, None), strict=True)
    ]
    lines = explained(made)
    head = next(n for n, line in enumerate(lines) if line.startswith("costs in ms"))
    assert lines[head].endswith(" tokens")
    assert [line.split()[-1] for line in lines[head + 1 : head + 4]] == ["0", "2,458", "-"]


def explained(*made: dict[str, Any], **more: object) -> list[str]:
    found = {
        **request(),
        "at": "2026-11-25T10:00:00.000Z",
        "method": "POST",
        "path": "/v1/completions",
        "model": "m",
        "attempts": 1,
        "running": False,
        "stream": True,
        "waited": None,
        "failed": [],
        "error": None,
        "decisions": list(made),
        "predicted": {"first_byte_ms": 300.0, "cached_tokens": 64.0},
        "observed": {"first_byte_ms": 633.0, "prompt_tokens": 100, "cached_tokens": 64},
        **more,
    }
    return drawn(explanation(found), width=100)


def test_both_decisions_of_a_split_request_are_of_one_attempt() -> None:
    second = decision(endpoint="gpu-2", decode_on=None, second_leg=True, lowest_costs={"whole": 20.0, "split": None})
    lines = explained(decision(), second, decision(endpoint="gpu-3", decode_on=None))
    assert "completed, status 200, after 812.0 ms, on gpu-2 after prefill on gpu-1 in 512.5 ms, 1 attempt" in lines
    attempts = [line for line in lines if line.startswith("Attempt")]
    assert [line.split(",")[0] for line in attempts] == [
        "Attempt 1: gpu-1 > gpu-2",
        "Attempt 1: decode on gpu-2",
        "Attempt 2: gpu-3",
    ]
    assert lines.count("The best pair costs 300.0 ms, the best single endpoint 500.0 ms.") == 2


def test_parts_that_only_split_requests_have_get_a_column() -> None:
    lines = explained(decision())
    head = next(line for line in lines if line.startswith("costs in ms"))
    assert head.split()[-1] == "transfer"
    second, first, third = [line.split() for line in lines if line.startswith("gpu-")]
    assert first == ["gpu-1", ">", "gpu-2", "300.0", "280.0", "20.0"]
    assert second == ["gpu-2", "500.0", "500.0", "-"]
    assert third[1:] == ["-", "-", "-"], "a rule excluded it: it has no cost"


def test_a_first_leg_that_has_not_ended_has_no_time() -> None:
    lines = explained(decision(), prefill_ms=None, running=True)
    assert any("running, on gpu-2 after prefill on gpu-1, 1 attempt" in line for line in lines)


def test_how_right_the_predictions_were_is_said_where_something_was_predicted() -> None:
    said = explained(decision(), lately={"first_byte_off": 1.23, "hit_ratio": 0.3, "predicted_hit_ratio": 0.41})
    assert " ".join(said[-2:]) == (
        "Lately at gpu-2: first bytes took 1.2 times as long as predicted; "
        "30% of the prompts was cached, 41% predicted."
    )
    nothing = {"first_byte_off": None, "hit_ratio": 0.3, "predicted_hit_ratio": None}
    assert explained(decision(), lately=nothing) == explained(decision())
