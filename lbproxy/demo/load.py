# SPDX-License-Identifier: Apache-2.0
"""Clients that send everyday traffic, open loop, and note what became of each request.

Only what the wire shows is believed: a response is good if its status was 200 and it is whole, a stream's with
`[DONE]`. Times count from when a request was due, so that a client that is late does not make the fleet look fast.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import aiohttp

from lbproxy.demo.timeline import Timeline
from lbproxy.sim.figures.report import percentile
from lbproxy.sim.workloads.mix import Ask, body

TIMEOUT_S = 300.0
"""For one response: a patient client's."""
DONE = b"data: [DONE]"
ERROR = b'data: {"error"'


@dataclass(slots=True)
class Seen:
    """One request, as its client saw it."""

    id: str
    at_s: float
    """When it was due, since the begin."""
    kind: str
    stream: bool
    endpoint: str | None = None
    """Who answered it."""
    attempts: int = 0
    first_s: float | None = None
    """From `at_s` to the first byte of a stream; None = none came, or it is no stream."""
    ended_s: float = 0.0
    """When it had ended, since the begin."""
    wrong: str | None = None
    """What was wrong with it; None = nothing."""

    @property
    def cut(self) -> bool:
        """It failed after its client had some of it: nobody could have tried it again."""
        return self.wrong is not None and self.first_s is not None

    @property
    def failed(self) -> bool:
        """It failed before its client had anything."""
        return self.wrong is not None and self.first_s is None


class DemoLoad:
    """One run of it."""

    def __init__(self, url: str, model: str, asks: Sequence[Ask]) -> None:
        """`asks` in order of time."""
        self.seen: list[Seen] = []
        """Requests that have ended."""
        self.heads: deque[tuple[float, str]] = deque(maxlen=1000)
        """The last responses that began: when, since the begin, and from whom. A stream's head comes at once."""
        self.running = 0
        self._url = url
        self._model = model
        self._asks = asks
        self._began_at: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Since the begin; 0 before."""
        return 0.0 if self._began_at is None else time.monotonic() - self._began_at

    async def run(self) -> None:
        """Send everything when it is due, and wait for the last response. Cancel it to leave at once."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http, asyncio.TaskGroup() as group:
            self._began_at = time.monotonic()
            for ask in self._asks:
                # Made before it is due: the text of a long prompt takes a millisecond.
                asked = body(ask, self._model)
                await asyncio.sleep(max(0.0, ask.at_s - self.elapsed_s))
                group.create_task(self._call(http, ask, asked))

    async def _call(self, http: aiohttp.ClientSession, ask: Ask, asked: bytes) -> None:
        seen = Seen(ask.job.id, ask.at_s, ask.kind, ask.stream)
        headers = {"Content-Type": "application/json", "X-Request-Id": seen.id}
        if ask.job.session is not None:
            headers["X-Session-Id"] = f"{ask.kind}-{ask.job.session}"
        self.running += 1
        try:
            async with http.post(f"{self._url}/v1/chat/completions", data=asked, headers=headers) as answer:
                seen.endpoint = answer.headers.get("x-lbproxy-endpoint")
                seen.attempts = int(answer.headers.get("x-lbproxy-attempts", "0"))
                if seen.endpoint is not None:
                    self.heads.append((self.elapsed_s, seen.endpoint))
                await self._read(answer, seen)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            seen.wrong = f"{type(error).__name__}: {error}"
        finally:
            self.running -= 1
        seen.ended_s = self.elapsed_s
        self.seen.append(seen)

    async def _read(self, answer: aiohttp.ClientResponse, seen: Seen) -> None:
        if answer.status != 200:
            seen.wrong = f"status {answer.status}: {(await answer.read())[:200]!r}"
            return
        if not seen.stream:
            await answer.read()
            return
        tail = b""
        async for chunk in answer.content.iter_any():
            if seen.first_s is None:
                seen.first_s = self.elapsed_s - seen.at_s
            tail = (tail + chunk)[-2048:]
        if ERROR in tail or DONE not in tail:
            seen.wrong = f"cut: {tail[-200:]!r}"


@dataclass(frozen=True, slots=True)
class Figures:
    """What clients saw of the requests that were due in some time."""

    requests: int
    failed: int
    """Their clients had nothing yet, and got nothing."""
    cut: int
    """Answers that broke off: their server died under them."""
    again: int
    """Requests that were tried on another server, and answered."""
    first_p50_s: float | None
    """To the first byte of a stream; None: there was none."""
    first_p99_s: float | None


def of_phase(seen: Iterable[Seen], timeline: Timeline, number: int) -> Figures:
    """Of a phase: requests and first bytes of what was due in it, failures when they happened."""
    begin, end = timeline.phase(number)
    last = number == len(timeline.steps) - 1
    every = list(seen)
    due = [one for one in every if begin <= one.at_s < end]
    wrong = [one for one in every if one.wrong is not None and begin <= one.ended_s and (last or one.ended_s < end)]
    return _figures(due, wrong)


def of_all(seen: Iterable[Seen]) -> Figures:
    """Of a whole run."""
    every = list(seen)
    return _figures(every, [one for one in every if one.wrong is not None])


def _figures(due: Sequence[Seen], wrong: Sequence[Seen]) -> Figures:
    first = sorted(one.first_s for one in due if one.first_s is not None)
    return Figures(
        len(due),
        failed=sum(one.failed for one in wrong),
        cut=sum(one.cut for one in wrong),
        again=sum(one.attempts > 1 and one.wrong is None for one in due),
        first_p50_s=percentile(first, 50) if first else None,
        first_p99_s=percentile(first, 99) if first else None,
    )


def shares(heads: Iterable[tuple[float, str]], names: Sequence[str], since_s: float) -> dict[str, float]:
    """Each server's share of the responses that began since then; all 0 if there were none."""
    counts = Counter(name for at_s, name in heads if at_s >= since_s)
    total = max(1, counts.total())
    return {name: counts[name] / total for name in names}
