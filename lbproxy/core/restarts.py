# SPDX-License-Identifier: Apache-2.0
"""What survives a restart: exported in pieces, and given to a new Balancer.

What a policy learned of tier 1 is in the endpoint set (`core.saved.restoring`). The rest depends on no policy and no
tier: what endpoints and flows used of their limits per time, and how long servers took to wake
(`core.sleeping.servers`).

The use of an endpoint that is not there is kept as long as it counts, and saved again: discovery may find it later, and
a provider that is removed from the settings and added again does not get its budget a second time. Invariant: the use
of an endpoint is counted in its `Allowance`, or kept here, never both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Final

from lbproxy.core.capacity.allowance import Use
from lbproxy.core.capacity.bucket import DAY_S, MAX_RESUMED_MINUTES, MINUTE_S, SLOT_S
from lbproxy.core.endpoints.endpoint_set import EndpointSet
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.queue.flows import Flows
from lbproxy.core.requests.request import DayUse
from lbproxy.core.saved.pieces import Piece, flow_piece, is_name, pieces, sleep_piece, tokens_pieces, used_piece
from lbproxy.core.saved.reading import MAX_FLOWS, Saved
from lbproxy.core.saved.restoring import Restoring
from lbproxy.core.sleeping.sleepers import Sleepers

MINUTES_S: Final = MAX_RESUMED_MINUTES * MINUTE_S
"""After this no use of a minute's limits counts any more."""
MAX_ABSENT: Final = 1024
"""Endpoints of which the use is kept though they are not there; the ones that left first are dropped."""


class Restarts:
    """Owns the use of endpoints that are not there."""

    def __init__(self, endpoints: EndpointSet, flows: Flows, sleepers: Sleepers) -> None:
        self._endpoints, self._flows, self._sleepers = endpoints, flows, sleepers
        self._limited: dict[str, EndpointState] = {}
        """The members with limits per time, by key, when the set last changed."""
        self._absent: dict[str, Use] = {}

    def follow(self, now: float) -> None:
        """Note that the set of endpoints changed."""
        before = self._limited
        self._limited = {one.endpoint.key: one for one in self._endpoints.members() if _is_limited(one)}
        for key, state in before.items():
            if self._limited.get(key) is not state and _is_limited(state) and state.allowance is not None:
                self._keep(key, state.allowance.use(now))
        for key, state in self._limited.items():
            if before.get(key) is not state:
                self._take(key, state, now)
        self._forget(now)

    def save(
        self, *, saved_at: float, prefixes: bool, now: float, days: Sequence[DayUse] = ()
    ) -> Iterator[Piece | None]:
        """Export all of it, for `restore` in another process: see `core.saved.pieces`. Empty if there is nothing, as
        under a policy that learns nothing without limits and servers that sleep. `saved_at`: the wall time. `days`: who
        used how many tokens.
        """
        learned, durations = self._endpoints.learned(), self._sleepers.durations()
        flows = self._flows.uses(now)
        if learned is None and not (self._limited or self._absent or flows or durations or days):
            return iter(())
        slept = (sleep_piece(url, times) for url, times in durations.items())
        others = chain(self._limits(flows, saved_at, now), slept, tokens_pieces(days))
        return pieces(learned, others, saved_at=saved_at, prefixes=prefixes, now=now)

    def save_limits(self, *, saved_at: float, now: float, days: Sequence[DayUse] = ()) -> Iterator[Piece | None]:
        """Export only `days`, and what was used of limits: of each endpoint that has some, and of flows that used some
        of theirs. Empty if there are none.
        """
        flows = self._flows.uses(now)
        if not (self._limited or self._absent or flows or days):
            return iter(())
        others = chain(self._limits(flows, saved_at, now), tokens_pieces(days))
        return pieces(None, others, saved_at=saved_at, prefixes=False, now=now)

    def restore(self, saved: Saved, *, age_s: float, now: float) -> Restoring | None:
        """Start with what was saved `age_s` ago. Call `step` of the result until it returns False, and again when
        endpoints joined. None if nothing was learned, or under policies that learn nothing.
        """
        behind_s = now - saved.saved_at - age_s
        """How far the driver's clock is behind the wall clock."""
        for key, use in saved.used.items():
            day = use.day
            if day is not None:
                day = day._replace(at=min(now, day.at + behind_s))
            self._keep(key, Use(min(now, use.at + behind_s), use.requests, use.tokens, day))
        for key, state in self._limited.items():
            self._take(key, state, now)
        for name, use in saved.flows.items():
            self._flows.resume(name, use._replace(at=min(now, use.at + behind_s)), now)
        self._sleepers.remember(saved.sleep)
        return self._endpoints.restore(saved, age_s=age_s, now=now) if saved.pool else None

    def _limits(self, flows: Mapping[str, Use], saved_at: float, now: float) -> Iterator[Piece]:
        ahead_s = saved_at - now
        for key, use in self._uses(now):
            yield used_piece(key, use, ahead_s)
        # Other replicas name flows, too; and a reload with other names may make them many for a minute.
        named = ((name, use) for name, use in flows.items() if is_name(name))
        for name, use in islice(named, MAX_FLOWS):
            yield flow_piece(name, use, ahead_s)

    def _uses(self, now: float) -> Iterator[tuple[str, Use]]:
        """Of members and of others."""
        self._forget(now)
        for key, state in list(self._limited.items()):
            if state.allowance is not None:
                yield key, state.allowance.use(now)
        yield from list(self._absent.items())

    def _keep(self, key: str, use: Use) -> None:
        self._absent.pop(key, None)
        self._absent[key] = use
        if len(self._absent) > MAX_ABSENT:
            del self._absent[next(iter(self._absent))]

    def _take(self, key: str, state: EndpointState, now: float) -> None:
        use = self._absent.pop(key, None)
        if use is not None and state.allowance is not None:
            state.allowance.resume(use, now)

    def _forget(self, now: float) -> None:
        """Drop what does not count any more."""
        over = [key for key, use in self._absent.items() if _is_over(use, now)]
        for key in over:
            del self._absent[key]


def _is_limited(state: EndpointState) -> bool:
    return state.allowance is not None and state.allowance.is_timed


def _is_over(use: Use, now: float) -> bool:
    if now - use.at <= MINUTES_S:
        return False
    amounts = () if use.day is None else use.day.amounts
    newest = next((age for age, amount in enumerate(amounts) if amount), None)
    return use.day is None or newest is None or now - (use.day.at - newest * SLOT_S) > DAY_S + SLOT_S
