# SPDX-License-Identifier: Apache-2.0
"""Several balancers before one fleet, and what they tell each other: the real batches, over a network with faults.

Balancers that share nothing ruin every kind of prefix routing: each fills all caches with its own view. With a
`ReplicaExchange` each makes batches of what it did (`core.replicas`) at the same interval, not at the same moments;
they arrive later as bytes, and some of them never, twice, or after batches that were sent later.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from lbproxy.core.balancer import Balancer
from lbproxy.core.replicas.batches import decode, encode
from lbproxy.core.replicas.journal import Journal
from lbproxy.core.replicas.peers import Peers
from lbproxy.core.saved.reading import encode as encode_piece
from lbproxy.core.saved.reading import read_lines
from lbproxy.sim.fleet.des import EventHeap
from lbproxy.sim.fleet.fleet import ExchangeRules

LOST_S = 3.0
"""A replica that is not heard of for this long is gone."""


@dataclass(slots=True, eq=False)
class _Member:
    """One balancer, as part of the exchange."""

    number: int
    incarnation: int
    journal: Journal
    peers: Peers
    alive: bool = True

    @property
    def name(self) -> str:
        return f"r{self.number}-{self.incarnation}"


@dataclass(slots=True)
class Traffic:
    """What went over the network."""

    batches: int = 0
    bytes: int = 0
    largest: int = 0
    """Bytes of the largest batch."""
    lost: int = 0
    repeated: int = 0
    late: int = 0


class ReplicaExchange:
    """What balancers tell each other."""

    def __init__(self, heap: EventHeap, options: ExchangeRules, heard: Callable[[int], None], *, seed: int) -> None:
        """`heard` is called with the number of each balancer that heard something."""
        self._heap = heap
        self._options = options
        self._heard = heard
        self._rng = random.Random(f"{seed}:exchange")
        self._members: dict[int, _Member] = {}
        self.traffic = Traffic()

    def joined(self, number: int, balancer: Balancer) -> None:
        """A balancer takes part from now on. One that comes later asks the others what they have in flight."""
        before = self._members.get(number)
        incarnation = 0 if before is None else before.incarnation + 1
        alive = [one for one in self._members.values() if one.alive]
        journal, peers = balancer.share(f"r{number}-{incarnation}")
        for other in alive:
            journal.ask(other.name)
        self._members[number] = member = _Member(number, incarnation, journal, peers)
        first_s = self._rng.uniform(0.0, self._options.interval_s) if not alive or before is None else 0.0
        self._heap.at(self._heap.now + first_s, self._send, member)

    def left(self, number: int) -> None:
        """A balancer died. The others notice it some time later."""
        member = self._members[number]
        member.alive = False
        self._heap.at(self._heap.now + LOST_S, self._lose, member)

    def peers(self, number: int) -> Peers:
        """What a balancer knows of the others."""
        return self._members[number].peers

    def all_peers(self) -> list[Peers]:
        """What each living balancer knows of the others."""
        return [one.peers for one in self._members.values() if one.alive]

    def take(self, journal: Journal) -> bytes | None:
        """What a balancer tells next, as bytes."""
        batch = journal.take(self._heap.now)
        return None if batch is None else encode(batch)

    def hear(self, peers: Peers, data: bytes) -> None:
        """A batch arrives."""
        peers.hear(decode(data), self._heap.now)

    def _lose(self, gone: _Member) -> None:
        for member in self._members.values():
            member.peers.lose(gone.name, self._heap.now)

    def _send(self, member: _Member) -> None:
        if not member.alive:
            return
        now = self._heap.now
        self._heap.at(now + self._options.interval_s, self._send, member)
        while (data := self.take(member.journal)) is not None:
            self.traffic.batches += 1
            self.traffic.bytes += len(data)
            self.traffic.largest = max(self.traffic.largest, len(data))
            for other in self._members.values():
                if other is not member:
                    self._post(other, data)

    def _post(self, to: _Member, data: bytes) -> None:
        options, rng = self._options, self._rng
        if rng.random() < options.lost:
            self.traffic.lost += 1
            return
        times = 1
        if rng.random() < options.repeated:
            self.traffic.repeated += 1
            times = 2
        for _ in range(times):
            delay_s = options.delay_s * rng.uniform(0.5, 1.5)
            if rng.random() < options.late:
                self.traffic.late += 1
                delay_s += 3.0 * options.interval_s
            self._heap.at(self._heap.now + delay_s, self._arrive, (to, data))

    def _arrive(self, posted: tuple[_Member, bytes]) -> None:
        to, data = posted
        if to.alive:
            self.hear(to.peers, data)
            self._heard(to.number)


def hand_over(old: Balancer, new: Balancer, now: float) -> None:
    """Give a new balancer what another one has learned, as a replica that joins does."""
    pieces = old.restarts.save(saved_at=0.0, prefixes=True, now=now)
    lines = [encode_piece(piece) for piece in pieces if piece is not None]
    restoring = new.restarts.restore(read_lines(lines), age_s=0.0, now=now) if lines else None
    while restoring is not None and restoring.step():
        pass
