# SPDX-License-Identifier: Apache-2.0
"""Roles and connectors that do not fit together are found, and those that do are not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbproxy.core.engines.handover import CONNECTORS, Handover, Role
from lbproxy.core.engines.pairing import MAX_NAMES, Part, find_problems

ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}


def part(name: str, connector: str | None = "nixl", *models: str, **more: Any) -> Part:
    """Of the role that its name begins with, as configured."""
    role = ROLES[name[0]]
    connector = None if role is Role.BOTH else connector
    made = Part(name, frozenset(models or ("m",)), role, connector, None, Handover(role, connector))
    return made._replace(**more)


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [part("b1"), part("b2")],
        [part("p1"), part("d2")],
        [part("p1"), part("p2"), part("d3"), part("b4")],
        [part("p1", "mooncake"), part("d2", "mooncake"), part("p3"), part("d4")],
        [part("p1", "sglang"), part("d2", "sglang"), part("b3")],
        [part("p1", "nixl", "a"), part("p2", "nixl", "b"), part("d3", "nixl", "a", "b")],
        [part("p1", models=None), part("d2", "nixl", "a")],
        [part("p1", reported=Handover(Role.BOTH, "nixl")), part("d2")],
        [part("p1", "sglang", reported=Handover(Role.PREFILL, "sglang")), part("d2", "sglang"), part("b3")],
    ],
    ids=range(10),
)
def test_what_fits_is_not_mentioned(parts: list[Part]) -> None:
    assert find_problems(parts) == []


def test_a_role_without_its_partner() -> None:
    assert find_problems([part("p1"), part("p2"), part("b3")]) == [
        "p1, p2: role prefill, but no decode endpoint has connector nixl"
    ]
    assert find_problems([part("d1")]) == ["d1: role decode, but no prefill endpoint has connector nixl"]


def test_connectors_that_differ() -> None:
    assert find_problems([part("p1"), part("d2", "mooncake")]) == [
        "p1: role prefill, but no decode endpoint has connector nixl (they have mooncake)",
        "d2: role decode, but no prefill endpoint has connector mooncake (they have nixl)",
    ]


def test_a_model_without_its_partner() -> None:
    found = find_problems([part("p1", "nixl", "a", "b"), part("d2", "nixl", "a")])
    assert found == ["p1: role prefill, but no decode endpoint has connector nixl and serves b"]


def test_a_role_without_a_connector() -> None:
    (one,) = find_problems([part("p1", None), part("p2", None)])
    assert one.startswith("p1, p2: role prefill, but no connector is configured, and the engine shows none")


def test_settings_that_the_engine_contradicts() -> None:
    unified = part("p1", "sglang", reported=Handover(), handover=Handover())
    assert find_problems([unified]) == ["p1: the settings say role: prefill, its engine says both"]
    other = part("d2", "sglang", reported=Handover(Role.PREFILL, "sglang"), handover=Handover(Role.PREFILL, "sglang"))
    assert "d2: the settings say role: decode, its engine says prefill" in find_problems([other])
    wrong = part("p3", "mooncake", reported=Handover(Role.BOTH, "nixl"))
    assert "p3: the settings say connector: mooncake, its engine has nixl" in find_problems([wrong])


def test_whole_requests_that_no_endpoint_serves() -> None:
    pair = [part("p1", "sglang"), part("d2", "sglang")]
    (one,) = find_problems(pair)
    assert one.startswith("m: only sglang endpoints with a role serve it; requests that cannot be split are refused")
    (other,) = find_problems([*pair, part("b3", None, "another")])
    assert other == one
    assert find_problems([*pair, part("b3", models=None)]) == []
    unknown = [one._replace(models=None) for one in pair]
    assert find_problems(unknown)[0].startswith("there are only sglang endpoints with a role")


def test_ranks_that_a_connector_must_know() -> None:
    parts = [part("p1", "mooncake", hidden_ranks=4), part("d2", "mooncake", hidden_ranks=4)]
    (one,) = find_problems(parts)
    assert one.startswith("p1: 4 ranks are one endpoint, but connector mooncake")
    assert find_problems([part("p1", hidden_ranks=4), part("d2")]) == []


def test_a_line_names_few_of_many() -> None:
    (one,) = find_problems([part(f"p{n}") for n in range(MAX_NAMES + 3)])
    assert "p4 and 3 more: role prefill" in one


@given(
    st.lists(
        st.builds(
            Part,
            st.text(max_size=3),
            st.none() | st.frozensets(st.sampled_from("abc"), max_size=3),
            st.none() | st.sampled_from(Role),
            st.none() | st.sampled_from([*CONNECTORS]),
            st.none() | st.builds(Handover, st.sampled_from(Role), st.none() | st.sampled_from([*CONNECTORS])),
            st.builds(Handover, st.sampled_from(Role), st.none() | st.sampled_from([*CONNECTORS])),
            st.integers(0, 3),
        ),
        max_size=6,
    )
)
def test_whatever_is_known_findings_are_lines(parts: list[Part]) -> None:
    found = find_problems(parts)
    assert all("\n" not in one.replace("\n", "", sum(part.name.count("\n") for part in parts) * 9) for one in found)
    if all(one.handover.role is Role.BOTH and one.role in {None, Role.BOTH} for one in parts):
        assert found == []
