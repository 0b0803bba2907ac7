# SPDX-License-Identifier: Apache-2.0
"""A server that takes so long for the first token, whatever the prompt and whatever else it does. Sans-io.

So behaves what is fast enough to hide its queueing (a gateway to someone else's fleet, a server whose time goes into
something other than prefill): the time to first token is a constant, or evenly spread around one; each further token
comes a fixed time after the one before; prompts do not slow one another. Only slots are scarce: so many requests run
at once, and the others wait, first come, first served. Nothing is cached.

Times inside are in *work seconds*, which pass `speed` times as fast as the clock; a change of speed therefore stretches
what has begun.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from lbproxy.sim.engine.presets import BLOCK_TOKENS, Preset
from lbproxy.sim.engine.sequence import EngineGauges, FirstToken, PlainServer, SimRequest, StepDone, check_length

TICK_S = 0.1
"""Where tokens are not named, results come at least so often while some request generates (work seconds), so that the
driver looks at the progress of streams."""


class FirstTokenSpread(Enum):
    """How times to first token vary, by a spread of 0 to 1, whatever the prompt's length and the load."""

    UNIFORM = "uniform"
    """Evenly within plus or minus the spread, as a share."""
    LOGNORMAL = "lognormal"
    """Around the given time as median, with the spread as sigma."""
    BIMODAL = "bimodal"
    """As given, but for a share of the requests, the spread, ten times as long."""
    HEAVY = "heavy"
    """Never below the given time, with a heavy tail: Pareto with an exponent of one by the spread."""
    PROMPT = "prompt"
    """Lognormal, but the same for all prompts that begin alike."""


BIMODAL_FACTOR = 10.0
MAX_FACTOR = 100.0
"""No time varies more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedTimes:
    """How long things take at speed 1. Raises ValueError for what cannot be."""

    ttft_s: float
    """From the moment that a request has a slot until its first token."""
    ttft_spread: float = 0.0
    """How much that varies, as `form` says."""
    form: FirstTokenSpread = FirstTokenSpread.UNIFORM
    token_s: float = 0.02
    """From each token to the next."""

    def __post_init__(self) -> None:
        if self.ttft_s <= 0 or self.token_s <= 0:
            raise ValueError(f"times must be above 0, got {self.ttft_s} and {self.token_s}")
        if not 0 <= self.ttft_spread <= 1:
            raise ValueError(f"ttft_spread must be within 0..1, got {self.ttft_spread}")

    def factor(self, request: SimRequest, rng: random.Random) -> float:
        """What the time to a request's first token is multiplied by."""
        spread = self.ttft_spread
        if not spread:
            return 1.0
        if self.form is FirstTokenSpread.UNIFORM:
            return 1 + rng.uniform(-spread, spread)
        if self.form is FirstTokenSpread.BIMODAL:
            return BIMODAL_FACTOR if rng.random() < spread else 1.0
        if self.form is FirstTokenSpread.HEAVY:
            return min(MAX_FACTOR, rng.paretovariate(1 / spread))
        own = rng if self.form is FirstTokenSpread.LOGNORMAL else random.Random(str(request.block_hashes[:1]))
        return min(MAX_FACTOR, own.lognormvariate(0.0, spread))


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request that waits or runs."""

    request: SimRequest
    first_at: float | None = None
    """Work seconds; None = it waits."""
    named: int = 0
    """Tokens that were handed out."""
    gone: bool = False


class FixedEngine(PlainServer):
    """One server. Not to be shared by drivers. Of the preset only slots, cache size and longest context count."""

    def __init__(
        self,
        preset: Preset,
        times: FixedTimes,
        *,
        max_model_len: int | None = None,
        speed: float = 1.0,
        rng: random.Random | None = None,
        name_tokens: bool = True,
    ) -> None:
        """As `Engine`. Without `rng` there is no spread."""
        assert speed > 0
        self._times = times
        self._slots = preset.max_sequences
        self._kv_tokens = preset.kv_tokens
        self._speed = speed
        self._rng = rng
        self._name_tokens = name_tokens
        self.max_model_len = min(max_model_len or preset.max_model_len, preset.kv_tokens)
        self._clock = self._work = 0.0
        """The latest `now`, and the work seconds that had passed by then."""
        self._results: list[StepDone] = []
        self._order = 0
        self._reset()

    def _reset(self) -> None:
        self._waiting: OrderedDict[str, _Sequence] = OrderedDict()
        self._running: dict[str, _Sequence] = {}
        self._events: list[tuple[float, int, _Sequence]] = []
        """When each of the running gets its next token that is handed out, in work seconds; of those that are gone,
        too."""
        self._generating = 0
        self._tick_at = float("inf")
        self._held_tokens = 0
        self._prompt_tokens = self._generation_tokens = 0

    @property
    def kv_blocks(self) -> int:
        """As the preset has it."""
        return self._kv_tokens // BLOCK_TOKENS

    def add(self, request: SimRequest, *, now: float) -> None:
        """Take a request in, none whose KV goes from engine to engine. Raises `RequestTooLong`."""
        assert request.hold is None
        assert request.source is None
        check_length(request, self.max_model_len)
        self._run(now)
        self._waiting[request.id] = _Sequence(request)
        self._fill()

    def abort(self, request_id: str, *, now: float) -> bool:
        """Forget a request and free its slot; False if it has ended."""
        self._run(now)
        if self._waiting.pop(request_id, None) is not None:
            return True
        sequence = self._running.get(request_id)
        if sequence is None:
            return False
        self._leave(sequence)
        self._fill()
        return True

    def set_speed(self, speed: float, *, now: float) -> None:
        """Be so many times as fast from now on, also with what has begun."""
        assert speed > 0
        self._run(now)
        self._speed = speed

    def restart(self, *, now: float) -> list[str]:
        """Fail, and be there again, empty. Returns the ids of all requests that were lost, oldest first."""
        self._run(now)
        lost = [*self._running, *self._waiting]
        self._reset()
        return lost

    def generated(self, request_id: str) -> int:
        sequence = self._running.get(request_id)
        if sequence is None or sequence.first_at is None or not sequence.named:
            return 0
        since = int((self._work - sequence.first_at) / self._times.token_s + 1e-6)
        return min(sequence.request.output_tokens, 1 + since)

    def next_event(self) -> float | None:
        if self._results:
            return self._results[0].at
        work = min(self._events[0][0], self._tick_at) if self._events else self._tick_at
        return None if work == float("inf") else self._time_of(work)

    def advance(self, *, now: float) -> list[StepDone]:
        """What was sent up to `now` and not returned before, oldest first."""
        self._run(now)
        results, self._results = self._results, []
        return results

    def gauges(self) -> EngineGauges:
        """As of the latest call that was told the time. The cache's use: prompts and answers of all that run."""
        return EngineGauges(
            waiting=len(self._waiting),
            running=len(self._running),
            kv_usage=min(1.0, self._held_tokens / self._kv_tokens),
            prefix_queries=self._prompt_tokens,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            running_adapters=_adapters(self._running.values()),
            waiting_adapters=_adapters(self._waiting.values()),
        )

    # Time

    def _time_of(self, work: float) -> float:
        return self._clock + max(0.0, work - self._work) / self._speed

    def _pass(self, at: float, work: float) -> None:
        self._clock, self._work = at, work

    def _run(self, now: float) -> None:
        # Compared as times, as `next_event` gave them: work seconds computed back from a time may fall short of it.
        while self._events or self._tick_at < float("inf"):
            due = min(self._events[0][0], self._tick_at) if self._events else self._tick_at
            at = self._time_of(due)
            if at > now:
                break
            self._pass(at, max(self._work, due))
            if self._tick_at <= due:
                self._tick(at)
            else:
                self._token(heapq.heappop(self._events)[2], at)
        if now > self._clock:
            self._pass(now, self._work + (now - self._clock) * self._speed)

    def _tick(self, at: float) -> None:
        self._tick_at = self._work + TICK_S if self._generating else float("inf")
        self._results.append(StepDone(at, (), (), ()))

    # Requests

    def _fill(self) -> None:
        """Give free slots to those that wait."""
        while self._waiting and len(self._running) < self._slots:
            name, sequence = self._waiting.popitem(last=False)
            self._running[name] = sequence
            self._held_tokens += sequence.request.prompt_tokens + sequence.request.output_tokens
            factor = 1.0 if self._rng is None else self._times.factor(sequence.request, self._rng)
            sequence.first_at = self._work + self._times.ttft_s * factor
            self._expect(sequence, sequence.first_at)

    def _expect(self, sequence: _Sequence, work: float) -> None:
        self._order += 1
        heapq.heappush(self._events, (work, self._order, sequence))

    def _token(self, sequence: _Sequence, at: float) -> None:
        """A request got its next token, or its last if those in between are not named."""
        if sequence.gone:
            return
        request, first_at = sequence.request, sequence.first_at
        assert first_at is not None
        first: tuple[FirstToken, ...] = ()
        if not sequence.named:
            first = (FirstToken(request.id, 0),)
            self._prompt_tokens += request.prompt_tokens
            self._generating += 1
            if not self._name_tokens and self._tick_at == float("inf"):
                self._tick_at = self._work + TICK_S
        step = 1 if self._name_tokens or not sequence.named else request.output_tokens - sequence.named
        sequence.named += step
        self._generation_tokens += step
        finished = sequence.named == request.output_tokens
        if finished:
            self._leave(sequence)
            self._fill()
        else:
            following = sequence.named if self._name_tokens else request.output_tokens - 1
            self._expect(sequence, first_at + following * self._times.token_s)
        names = (request.id,) if self._name_tokens else ()
        self._results.append(StepDone(at, names, first, (request.id,) if finished else ()))

    def _leave(self, sequence: _Sequence) -> None:
        """It has ended, or nobody waits for it any more."""
        sequence.gone = True
        if sequence.named:
            self._generating -= 1
        del self._running[sequence.request.id]
        self._held_tokens -= sequence.request.prompt_tokens + sequence.request.output_tokens
        if not self._generating:
            self._tick_at = float("inf")


def _adapters(sequences: Iterable[_Sequence]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.request.adapter for one in sequences if one.request.adapter is not None))
