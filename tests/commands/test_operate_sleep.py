# SPDX-License-Identifier: Apache-2.0
"""What `lbproxy status`, `top`, `wake` and `sleep` show of endpoints that sleep."""

from __future__ import annotations

import io
import re
from typing import Any

import httpx
import pytest
from rich.console import Console

from lbproxy.commands import operate
from lbproxy.commands.client import AdminClient, AdminError
from lbproxy.commands.tables import fleet, summary
from tests.commands.test_operate import answering, drawn, endpoint, state


def sleeping(name: str, phase: str, *, left_s: float | None = None, **more: object) -> dict[str, Any]:
    sleep = {"state": phase, "for_s": 1.0, "left_s": left_s, "failures": 0, "host": None}
    return endpoint(name, sleep=sleep, **more)


def test_each_state_is_shown_instead_of_health_and_a_wake_with_its_rest() -> None:
    rows = [
        sleeping("a", "awake"),
        sleeping("b", "asleep"),
        sleeping("c", "waking", left_s=3.2),
        sleeping("d", "falling_asleep"),
        sleeping("e", "off", health="down"),
        sleeping("f", "unknown", health="down"),
    ]
    lines = drawn(fleet(rows), width=120)
    shown = {"a": "up", "b": "asleep", "c": "waking 3 s", "d": "falling asleep", "e": "off", "f": "down"}
    for name, word in shown.items():
        assert any(re.match(rf" *{name} +{word} +3 ", line) for line in lines), (name, word, lines)


def test_a_fleet_that_sleeps_is_not_called_down() -> None:
    first = drawn(summary(state([sleeping("a", "asleep"), sleeping("b", "asleep")])), width=200)[0]
    assert "0 of 2 endpoints up" in first
    assert "2 not awake" in first
    assert "not ready" not in first


@pytest.mark.parametrize("awake", [True, False])
def test_commands_ask_for_it(awake: bool) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(200, json={"name": "a", "sleep": None})

    console = Console(file=io.StringIO(), width=80)
    assert operate.set_awake(answering(answer), console, "a", awake=awake) == 0
    assert asked == [f"/admin/endpoints/a/{'wake' if awake else 'sleep'}"]


def test_why_it_cannot_be_is_said() -> None:
    refused = httpx.Response(409, json={"error": {"message": "a cannot be woken: it is off."}})
    client: AdminClient = answering(lambda _: refused)
    with pytest.raises(AdminError, match="a cannot be woken"):
        operate.set_awake(client, Console(file=io.StringIO()), "a", awake=True)
