# SPDX-License-Identifier: Apache-2.0
"""What does not fit together where prefill and decode are apart: a line each, for `lbproxy check` and the log.

Pure, and over plain facts: who asks has them of the settings, of the engines, or of both. An endpoint whose models are
not known may serve any. Nothing here decides where requests go: that is `core.policies.split`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from lbproxy.core.engines.handover import Handover, Role

MAX_NAMES: Final = 5
"""Endpoints or models that one line names."""


class Part(NamedTuple):
    """What is known of one endpoint."""

    name: str
    models: frozenset[str] | None
    """None: not known."""
    role: Role | None
    """As configured; None: the engine decides."""
    connector: str | None
    """As configured; None: the engine decides."""
    reported: Handover | None
    """The part that its engine reports; see `states_role`."""
    handover: Handover
    """What is used."""
    hidden_ranks: int = 1
    """Data-parallel ranks behind this one endpoint."""


def states_role(reported: Handover | None) -> bool:
    """Whether an engine states its role: vLLM shows a connector alone."""
    return reported is not None and (reported.role is not Role.BOTH or reported.connector is None)


def find_problems(parts: Sequence[Part]) -> list[str]:
    """What does not fit; empty, where no endpoint has a role. In the order of `parts` within each kind."""
    if all(one.handover.role is Role.BOTH and one.role in {None, Role.BOTH} for one in parts):
        return []
    return [
        *_contradicted(parts),
        *_without_connector(parts),
        *_without_partner(parts),
        *_without_whole_server(parts),
        *_hidden_ranks(parts),
    ]


def _contradicted(parts: Sequence[Part]) -> Iterator[str]:
    """Settings against engines."""
    for one in parts:
        reported = one.reported
        if reported is None:
            continue
        if one.role is not None and states_role(reported) and reported.role is not one.role:
            yield f"{one.name}: the settings say role: {one.role.value}, its engine says {reported.role.value}"
        if one.connector is not None and reported.connector not in {None, one.connector}:
            yield f"{one.name}: the settings say connector: {one.connector}, its engine has {reported.connector}"


def _without_connector(parts: Sequence[Part]) -> Iterator[str]:
    lacking = [one for one in parts if one.handover.role is not Role.BOTH and one.handover.connector is None]
    for role in (Role.PREFILL, Role.DECODE):
        names = [one.name for one in lacking if one.handover.role is role]
        if names:
            yield (
                f"{_listed(names)}: role {role.value}, but no connector is configured, and the engine "
                "shows none that is known: no request is split there"
            )


def _without_partner(parts: Sequence[Part]) -> Iterator[str]:
    """Endpoints that no endpoint of the other role fits."""
    for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        others = [one for one in parts if one.handover.role is other]
        alone: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for one in parts:
            connector = one.handover.connector
            if one.handover.role is not role or connector is None:
                continue
            fitting = [two for two in others if two.handover.connector == connector]
            missing = _missing(one, fitting)
            if missing is not None:
                alone.setdefault((connector, missing), []).append(one.name)
        for (connector, models), names in alone.items():
            wanted = f" and serves {_listed(models)}" if models else ""
            text = (
                f"{_listed(names)}: role {role.value}, but no {other.value} endpoint has connector {connector}{wanted}"
            )
            have = sorted({two.handover.connector or "" for two in others} - {"", connector})
            yield f"{text} (they have {', '.join(have)})" if have and not models else text


def _missing(one: Part, fitting: Sequence[Part]) -> tuple[str, ...] | None:
    """The models of an endpoint that none of those serve; empty: there are none of those; None: nothing is missing."""
    if not fitting:
        return ()
    if one.models is None or any(two.models is None for two in fitting):
        return None
    served = frozenset[str]().union(*(two.models or () for two in fitting))
    return tuple(sorted(one.models - served)) or None


def _without_whole_server(parts: Sequence[Part]) -> Iterator[str]:
    """Models of which only engines with a role are there that refuse whole requests."""
    refusing = [one for one in parts if not _serves_whole(one)]
    whole = [one for one in parts if _serves_whole(one)]
    if not refusing or any(one.models is None for one in whole):
        return
    served = frozenset[str]().union(*(one.models or () for one in whole))
    models = sorted(frozenset[str]().union(*(one.models or () for one in refusing)) - served)
    connectors = sorted({str(one.handover.connector) for one in refusing})
    what = "requests that cannot be split are refused: an endpoint of role both is missing"
    if models:
        yield f"{_listed(models)}: only {', '.join(connectors)} endpoints with a role serve it; {what}"
    elif not whole:
        yield f"there are only {', '.join(connectors)} endpoints with a role; {what}"


def _serves_whole(one: Part) -> bool:
    how = one.handover.how
    return one.handover.role is Role.BOTH or how is None or how.serves_whole


def _hidden_ranks(parts: Sequence[Part]) -> Iterator[str]:
    """Mooncake's decode asks the engine that has the prompt: it must be known which that is."""
    for one in parts:
        if one.hidden_ranks > 1 and one.handover.role is Role.PREFILL and one.handover.connector == "mooncake":
            yield (
                f"{one.name}: {one.hidden_ranks} ranks are one endpoint, but connector mooncake needs to know the rank "
                "that computes a prompt: set ranks"
            )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")
