# SPDX-License-Identifier: Apache-2.0
"""The tables of states that stand in docstrings, read: each change of a state is held against its table."""

from __future__ import annotations

import ast
from enum import Enum
from pathlib import Path
from typing import TypeVar

from lbproxy.proxy.exchange.relay import Stage
from lbproxy.proxy.exchange.steps import Step
from lbproxy.proxy.front.connection import State

S = TypeVar("S", bound=Enum)


def moves(module: str, states: type[S]) -> frozenset[tuple[S, S]]:
    """Each change that the table in a module's docstring has: three columns, below a line `state event next state`.

    `module`: its path. A row goes on until the next one names a state before or after the event; `any` is each state
    that the table leaves.
    """
    text = ast.get_docstring(ast.parse((Path(__file__).resolve().parents[2] / "lbproxy" / module).read_text())) or ""
    lines = text.splitlines()
    head = next(line for line in lines if line.split()[1:3] == ["event", "next"])
    event, after = head.index("event"), head.index("next")
    found, before = list[tuple[str, S]](), ""
    for line in lines[lines.index(head) + 1 :]:
        if not line.startswith("    "):
            break
        before = line[:event].strip() or before
        words = line[after:].replace("*", "").split(" or ") if line[after:].strip() else []
        found += [(before, states[word.strip()]) for word in words]
    left = {states[name] for name, _ in found if name != "any"}
    return frozenset((one, to) for name, to in found for one in (left - {to} if name == "any" else {states[name]}))


STEPS = moves("proxy/exchange/steps.py", Step)
STAGES = moves("proxy/exchange/relay.py", Stage)
STATES = moves("proxy/front/connection.py", State)
