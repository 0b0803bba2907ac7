# SPDX-License-Identifier: Apache-2.0
"""What a PromQL expression asks for, as promql-parser reads it."""

from __future__ import annotations

from typing import Any, NamedTuple

import promql_parser  # type: ignore[import-untyped, unused-ignore]


class Asked(NamedTuple):
    """Of one expression."""

    metrics: dict[str, set[str]]
    """Names of series, with the labels that they are chosen by."""
    grouped: set[str]
    """Labels that are summed up by, or matched on."""


def asked(expression: str) -> Asked:
    """Raises ValueError for what is no PromQL."""
    metrics: dict[str, set[str]] = {}
    grouped: set[str] = set()

    def see(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            assert node.name, f"a selector without a name: {expression}"
            metrics.setdefault(node.name, set()).update(one.name for one in node.matchers.matchers)
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            grouped.update(node.modifier.labels)
        elif isinstance(node, promql_parser.BinaryExpr) and node.modifier is not None and node.modifier.matching:
            grouped.update(node.modifier.matching.labels)

    promql_parser.walk(promql_parser.parse(expression), see)
    return Asked(metrics, grouped)
