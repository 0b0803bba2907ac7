# SPDX-License-Identifier: Apache-2.0
"""Several workloads at a time, each of a flow of its own: clients that know nothing of each other.

What they send shares no text, and each has its own seed, so that one of them is the same whoever else there is. Those
that come in steps wait for one another between steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lbproxy.sim.workloads.prompts import Piece
from lbproxy.sim.workloads.workload import Arrival, Job, Workload

TEXTS_APART = 1 << 51
"""Between the ids of the pieces of one workload and the next: more than any has of either kind (see `ANSWER_IDS`). And
256 of them stay below 2**61 - 1, modulo which Python hashes integers.
"""


@dataclass(frozen=True, slots=True)
class Source:
    """One of the workloads, and what all its requests say."""

    workload: Workload
    flow: str
    priority: int | None = None
    slo_ttft_s: float | None = None
    patience_s: float | None = None
    stream_share: float | None = None


class Clients:
    """A workload made of several."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._sources = tuple(sources)
        self._live: dict[str, tuple[int, Job]] = {}
        """Jobs that have not ended: which source each is of, and what it is there."""

    def begin(self, now: float) -> Sequence[Arrival] | None:
        """The next batch of each."""
        batches = [source.workload.begin(now) for source in self._sources]
        if all(batch is None for batch in batches):
            return None
        arrivals = [self._marked(number, *one) for number, batch in enumerate(batches) for one in batch or ()]
        return sorted(arrivals, key=lambda arrival: arrival[0])

    def ended(self, job: Job, now: float) -> Sequence[Arrival]:
        """What the same client sends next."""
        number, own = self._live.pop(job.id)
        return [self._marked(number, *one) for one in self._sources[number].workload.ended(own, now)]

    def _marked(self, number: int, at: float, job: Job) -> Arrival:
        source = self._sources[number]
        marked = replace(
            job,
            id=f"{number}/{job.id}",
            prompt=tuple(_apart(piece, number) for piece in job.prompt),
            answer=_apart(job.answer, number),
            session=None if job.session is None else f"{number}/{job.session}",
            flow=source.flow,
            priority=source.priority,
            slo_ttft_s=source.slo_ttft_s,
            patience_s=source.patience_s,
            stream_share=source.stream_share,
        )
        self._live[marked.id] = number, job
        return at, marked


def _apart(piece: Piece, number: int) -> Piece:
    return Piece(piece.id + number * TEXTS_APART, piece.tokens)
