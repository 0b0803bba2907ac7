# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode apart: whether a request is split, and between which endpoints.

`Split` is a policy around another. It prices whole requests on the endpoints that take them, and split ones on pairs:
the cost of the first leg at a prefill endpoint is that of the prompt alone, and that of the second at a decode endpoint
has the transfer of the prompt's KV cache instead of its computation. The two do not depend on each other, so the best
pair of a connector is the best of each. All are compared in the same milliseconds, and the lowest cost wins: short or
cached prompts stay whole, others are split while the decode endpoints have better things to do.

A request that cannot be split is served whole: by endpoints without a role, or by decode endpoints whose engine does
that. If there are none of either, prefill endpoints whose engine does that serve it: better than an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import cast

from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.engines.handover import Role
from lbproxy.core.policies.policy import NEVER_SPLIT, PRICED, Context, Policy, Prices
from lbproxy.core.requests.request import BYTES_PER_TOKEN, DECODE, PREFILL, InferenceRequest


class _Notes:
    """What explanations need: the notes of each price, and which candidates it was for."""

    def __init__(self) -> None:
        self.whole: tuple[list[int], object] = ([], None)
        self.prefill: tuple[list[int], object] = ([], None)
        self.decode: dict[int, dict[str, float]] = {}
        """By the index of a prefill endpoint: the parts of the second leg's cost."""
        self.stalls: dict[int, float] = {}
        """By the index of one that serves whole requests: what its streams lose in addition."""


class Split(Policy):
    """A policy, for endpoints with roles."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.block_bytes = policy.block_bytes
        self.holds, self.tolerance, self.may_refuse = policy.holds, policy.tolerance, policy.may_refuse
        self.name, self.unit, self.first_byte_parts = policy.name, policy.unit, policy.first_byte_parts | {"transfer"}
        self.split_above = policy.split_above

    # Which endpoints

    def usable(self, request: InferenceRequest, members: Sequence[EndpointState]) -> Sequence[EndpointState]:
        """Those of `members` that take the request, whole or one leg of it."""
        pairs = self._pairs(members) if request.splittable and self.split_above < NEVER_SPLIT else set()
        if pairs:
            return [state for state in members if _serves_whole(state) or state.handover.connector in pairs]
        return whole_servers(members)

    def can_serve(self, request: InferenceRequest, members: Sequence[EndpointState]) -> bool:
        """Whether `members` include one that is there for it whole, or a pair."""
        if any(_serves_whole(state) for state in members):
            return True
        return request.splittable and self.split_above < NEVER_SPLIT and bool(self._pairs(members))

    def _pairs(self, members: Sequence[EndpointState]) -> set[str | None]:
        """The connectors of which `members` have both ends."""
        first = {state.handover.connector for state in members if _prefills(state)}
        return {state.handover.connector for state in members if _decodes(state, first)}

    def second(self, members: Sequence[EndpointState], first: EndpointState) -> list[EndpointState]:
        """Those of `members` that can continue what `first` prefilled."""
        return [state for state in members if _decodes(state, {first.handover.connector})]

    # Prices

    def price(self, request: InferenceRequest, candidates: Sequence[EndpointState], context: Context) -> Prices:
        """See Policy. `candidates`: of a second leg those that can continue its first; else as `usable` returned them.
        In any order; at least one.
        """
        if request.leg == DECODE:
            return self.policy.price(request, candidates, context)
        count = len(candidates)
        first = [n for n, state in enumerate(candidates) if _prefills(state)] if request.splittable else []
        connectors = {candidates[n].handover.connector for n in first}
        second = [state for state in candidates if _decodes(state, connectors)]
        whole = [n for n, state in enumerate(candidates) if _serves_whole(state)]
        if not first or not second or self.split_above == NEVER_SPLIT:
            first, second, whole = [], [], whole or [*range(count)]
        costs, notes = [inf] * count, _Notes()
        waits, works = [inf] * count, [0.0] * count
        has_waits = True
        if whole:
            has_waits &= self._fill(request, whole, candidates, costs, waits, works, notes, context)
            if first and has_waits:
                indexed = [candidates[n] for n in whole], [works[n] for n in whole]
                stalls = self.policy.stalls_ms(*indexed, now=context.now)
                for n, stall in zip(whole, stalls, strict=True):
                    costs[n] += stall
                    notes.stalls[n] = stall
        decode_on: dict[str, EndpointState] = {}
        if first:
            leg = request.as_leg(PREFILL)
            has_waits &= self._fill(leg, first, candidates, costs, waits, works, notes, context)
            self._add_second(request, first, second, candidates, costs, notes, decode_on, context)
            self._apply_rule(request, first, whole, candidates, costs)
        return Prices(
            costs,
            waits if has_waits else None,
            works if has_waits else None,
            notes if context.explains else None,
            decode_on,
        )

    def _fill(  # noqa: PLR0913, PLR0917 - one place for three lists
        self,
        request: InferenceRequest,
        indices: list[int],
        candidates: Sequence[EndpointState],
        costs: list[float],
        waits: list[float],
        works: list[float],
        notes: _Notes,
        context: Context,
    ) -> bool:
        """Price the candidates with these indices. Returns whether there are waits."""
        prices = self.policy.price(request, [candidates[n] for n in indices], context)
        if request.leg == PREFILL:
            notes.prefill = indices, prices.notes
        else:
            notes.whole = indices, prices.notes
        for at, n in enumerate(indices):
            costs[n] = prices.costs[at]
            if prices.waits_ms is not None and prices.work_tokens is not None:
                waits[n], works[n] = prices.waits_ms[at], prices.work_tokens[at]
        return prices.waits_ms is not None

    def _add_second(  # noqa: PLR0913, PLR0917 - as above
        self,
        request: InferenceRequest,
        first: list[int],
        second: list[EndpointState],
        candidates: Sequence[EndpointState],
        costs: list[float],
        notes: _Notes,
        decode_on: dict[str, EndpointState],
        context: Context,
    ) -> None:
        """Add the cost of the best second leg to that of each first one."""
        prices = self.policy.price(request._replace(leg=DECODE), second, context)
        best: dict[str, int] = {}
        for at, state in enumerate(second):
            name = cast(str, state.handover.connector)
            if name not in best or prices.costs[at] < prices.costs[best[name]]:
                best[name] = at
        for name, at in best.items():
            decode_on[name] = second[at]
        parts = self.policy.explain(prices.notes, shown=range(len(second))) if context.explains else []
        for n in first:
            at = best[cast(str, candidates[n].handover.connector)]
            costs[n] += prices.costs[at]
            if parts:
                notes.decode[n] = _renamed(parts[at])

    def _apply_rule(
        self,
        request: InferenceRequest,
        first: list[int],
        whole: list[int],
        candidates: Sequence[EndpointState],
        costs: list[float],
    ) -> None:
        """Unless the costs decide: exclude whole requests, or split ones, by the length of what must be computed."""
        is_priced = self.split_above == PRICED and self.policy.unit == "ms"
        if is_priced or not whole:
            return
        above = max(0.0, self.split_above)
        excluded = whole if self._uncached_tokens(request, [candidates[n] for n in whole]) > above else first
        for n in excluded:
            costs[n] = inf

    def _uncached_tokens(self, request: InferenceRequest, whole: list[EndpointState]) -> float:
        """Of the prompt, at the endpoint of `whole` that has most of it cached."""
        if self.policy.block_bytes is None:
            return (request.prompt_bytes or request.body_bytes) / BYTES_PER_TOKEN
        pool = whole[0].load.pool
        depths = pool.index.match(request.block_keys)
        cached = max([depths[state.load.kv.member_id] for state in whole]) * pool.block_tokens(request)
        return pool.prompt_tokens(request) - cached

    def is_full(self, state: EndpointState, now: float, overloaded: bool) -> bool:
        """See Policy."""
        return self.policy.is_full(state, now, overloaded)

    # Explanations

    def explain(self, notes: object, *, shown: Sequence[int]) -> list[dict[str, float]]:
        """See Policy. The parts of a split request are those of both legs."""
        if not isinstance(notes, _Notes):
            parts = self.policy.explain(notes, shown=shown)
            return [_renamed(one) for one in parts]
        found: dict[int, dict[str, float]] = {}
        for indices, own in (notes.whole, notes.prefill):
            if indices:
                found.update(zip(indices, self.policy.explain(own, shown=range(len(indices))), strict=False))
        for n, stall in notes.stalls.items():
            if n in found:
                found[n] = {**found[n], "stall": found[n].get("stall", 0.0) + stall}
        for n, second in notes.decode.items():
            if n in found:
                found[n] = {key: found[n].get(key, 0.0) + second.get(key, 0.0) for key in {**found[n], **second}}
        return [found.get(n, {}) for n in shown] if found else []

    def cached_tokens(self, notes: object, *, shown: Sequence[int]) -> list[float | None]:
        """See Policy: of a pair at its prefill endpoint."""
        if not isinstance(notes, _Notes):
            return self.policy.cached_tokens(notes, shown=shown)
        found: dict[int, float | None] = {}
        for indices, own in (notes.whole, notes.prefill):
            if indices:
                found.update(zip(indices, self.policy.cached_tokens(own, shown=range(len(indices))), strict=False))
        return [found.get(n) for n in shown] if found else []


def whole_servers(members: Sequence[EndpointState]) -> list[EndpointState]:
    """Those of `members` that serve whole requests; if none is meant to, prefill endpoints that can."""
    whole = [state for state in members if _serves_whole(state)]
    return whole or [state for state in members if _prefills(state) and _can_serve_whole(state)]


def _renamed(parts: dict[str, float]) -> dict[str, float]:
    """The parts of a second leg's cost: its base is the transfer."""
    return {"transfer" if name == "base" else name: value for name, value in parts.items()}


def _serves_whole(state: EndpointState) -> bool:
    """Whether it takes whole requests."""
    role = state.handover.role
    return role is Role.BOTH or (role is Role.DECODE and _can_serve_whole(state))


def _can_serve_whole(state: EndpointState) -> bool:
    how = state.handover.how
    return how is None or how.serves_whole


def _prefills(state: EndpointState) -> bool:
    return state.handover.role is Role.PREFILL


def _decodes(state: EndpointState, connectors: set[str | None]) -> bool:
    """Whether it takes second legs from an endpoint with one of these connectors."""
    handover = state.handover
    return handover.role is Role.DECODE and handover.connector is not None and handover.connector in connectors
