# SPDX-License-Identifier: Apache-2.0
"""What happened of late: the last so many requests with the decisions about them, and what endpoints became.

A sink. Per request it keeps a reference; everything else happens when somebody asks. Bounded by the setting, and by
`core.policies.explain` in what one decision holds.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final, TypeAlias

from lbproxy.control.telemetry.access_line import stamp
from lbproxy.control.telemetry.because import because
from lbproxy.core.endpoints.endpoint import Endpoint
from lbproxy.core.endpoints.health import Health, Transition
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.policies.explain import Decision
from lbproxy.core.queue.ticket import Wait
from lbproxy.core.requests.outcome import LABEL_AND_STATUS, Outcome

Fields: TypeAlias = dict[str, object]
"""A JSON object."""
Absent: TypeAlias = Sequence[tuple[Endpoint, str]]
"""Endpoints that take no requests, with the reasons."""

REFUSED: Final = frozenset(
    {
        Outcome.SATURATED,
        Outcome.EXPIRED,
        Outcome.RATE_LIMITED,
        Outcome.TOO_LATE,
        Outcome.NO_ENDPOINTS,
        Outcome.MODEL_NOT_FOUND,
    }
)
"""What the balancer says of requests that it does not place."""
NO_FAULTS: Final = frozenset({Outcome.COMPLETED, Outcome.CLIENT_CLOSED, Outcome.CUT})
"""Ends that the endpoint did not cause by failing: those by the client and by lbproxy's own stop are among them."""
DRAINING: Final = "draining"
"""Stands among the states of health in a list of transitions."""
PREFIX: Final = re.compile("^(?:chat)?cmpl-")
"""vLLM's, before the `x-request-id` that came with the request: the id of its response."""
MIN_BEGIN: Final = 4
"""Characters of an id by which a request is found."""
ATTEMPT: Final = re.compile("[.][0-9]{1,3}$")
"""See `RequestRecord.attempt_id`."""
WAITS: Final[dict[Wait, str]] = {
    Wait.HELD: "its best endpoint was full, and others were not",
    Wait.BUSY: "every endpoint had more than a quarter of a second of queued work",
    Wait.FULL: "every endpoint had the maximum number of requests, or none was probed yet",
    Wait.BEHIND: "other requests already waited for its best endpoint",
    Wait.FLOW: "its flow had the maximum number of requests",
    Wait.WAKING: "every endpoint that serves its model was asleep or not awake yet",
}
FULL: Final[dict[str, str]] = {
    "requests": "ran as many requests as it could",
    "space": "had no space in its KV cache",
    "prefill": "had more than a quarter of a second of prefill queued",
}
"""What an endpoint that is full did: by `core.observed.learned.FULL_BY`."""
MAX_SUMMARIES: Final = 1000
"""Requests that one response lists."""
MAX_TRANSITIONS: Final = 100
LATEST: Final = 32
"""Streams of an endpoint that show how right its predictions are: few enough to compute at each look."""


class Recent:
    """A sink of the Runtime."""

    def __init__(
        self,
        limit: int,
        now: Callable[[], float],
        running: Callable[[], Iterable[RequestRecord]],
        unavailable: Callable[[], Absent] = tuple,
    ) -> None:
        """`limit`: how many ended requests are kept. `running`: those that have not ended. `unavailable`: the endpoints
        that take no requests now.
        """
        self._now = now
        self._running = running
        self._kept: deque[RequestRecord] = deque(maxlen=limit)
        self._transitions: deque[tuple[float, str, str, str, str]] = deque(maxlen=MAX_TRANSITIONS)
        """When, of which endpoint, from, to, why."""
        self._unavailable = unavailable
        self._absent: deque[tuple[RequestRecord, Absent]] = deque(maxlen=MAX_SUMMARIES)
        """Of requests for which there was no endpoint: those that took none then."""

    def reconfigure(self, limit: int) -> None:
        """Keep so many from now on: the newest stay."""
        if limit != self._kept.maxlen:
            self._kept = deque(self._kept, maxlen=limit)

    def ended(self, records: list[RequestRecord]) -> None:
        for record in records:
            if record.attempts or record.wait is not None or record.outcome in REFUSED:  # it came to the balancer
                self._kept.append(record)
                if record.outcome is Outcome.NO_ENDPOINTS:
                    self._absent.append((record, (*self._unavailable(),)))

    def transition(self, transition: Transition) -> None:
        before, after = transition.before.value, transition.after.value
        self._transitions.append((self._now(), transition.endpoint.name, before, after, transition.reason))

    def note_drain(self, endpoint: str, health: Health, *, draining: bool) -> None:
        """An operator drained an endpoint, or ended that: no change of its health, but of what it gets."""
        before, after = (health.value, DRAINING) if draining else (DRAINING, health.value)
        reason = "an operator drained it" if draining else "an operator undrained it"
        self._transitions.append((self._now(), endpoint, before, after, reason))

    def transitions(self) -> list[Fields]:
        """What endpoints became, the newest first."""
        offset = time.time() - self._now()
        return [
            {"at": stamp(at + offset), "endpoint": endpoint, "from": before, "to": after, "reason": reason}
            for at, endpoint, before, after, reason in reversed(self._transitions)
        ]

    def requests(self, limit: int, *, endpoint: str | None = None) -> list[Fields]:
        """Summaries of the last that ended, the newest first; if `endpoint` is named, of those that it had last, or
        whose prompt it computed.
        """
        chosen = (one for one in reversed(self._kept) if endpoint is None or endpoint in {one.endpoint, one.prefill})
        offset = time.time() - self._now()
        return [_summary(one, offset) for one in islice(chosen, limit)]

    def explain(self, request_id: str) -> Fields | None:
        """All that is known of one request, also of one that runs or waits. `request_id`: as an engine knows it; or as
        its client does, of several the newest; or the begin of one id alone, as tables cut them.
        """
        whole = {request_id, ATTEMPT.sub("", request_id)}
        ids = {*whole, *(PREFIX.sub("", one) for one in whole)}
        running = [one for one in self._running() if _says_something(one)]
        known = [*running, *reversed(self._kept)]
        found = next((at for at, one in enumerate(known) if one.id in ids), -1)
        if found < 0:
            found = next((at for at, one in enumerate(known) if one.request_id == request_id), -1)
        if found < 0:
            found = _begins(request_id.removesuffix("…"), known)
        if found < 0:
            return None
        record = known[found]
        fields = _explained(record, time.time() - self._now(), self._now(), running=found < len(running))
        absent = next((absent for one, absent in self._absent if one is record), ())
        fields["left_out"] = [{"endpoint": one.name, "why": why} for one, why in absent]
        return fields | {"lately": self.by_endpoint().get(record.endpoint or "")}

    def by_endpoint(self) -> dict[str, Fields]:
        """How the kept requests went on each endpoint: of those that it had last, and of those whose prompt it
        computed; and how right the predictions for it were.
        """
        groups: defaultdict[str, list[RequestRecord]] = defaultdict(list)
        for record in self._kept:
            if record.endpoint is not None and record.placed_at is not None:
                groups[record.endpoint].append(record)
                if record.prefill is not None and record.prefill != record.endpoint:
                    groups[record.prefill].append(record)
        return {name: _digest(name, records) for name, records in groups.items()}


def _begins(text: str, known: Sequence[RequestRecord]) -> int:
    """The index of the only request, or the newest of one client's id, that begins so; -1: none, or several."""
    bare = PREFIX.sub("", text)
    found = [at for at, one in enumerate(known) if one.request_id.startswith(text) or one.id.startswith(bare)]
    enough = len(bare) >= MIN_BEGIN and len({known[at].request_id for at in found}) == 1
    return found[0] if enough else -1


def _digest(name: str, records: list[RequestRecord]) -> Fields:
    """Cached tokens count where the prompt is computed; there a first leg's end is its first byte."""
    first_bytes = [took for one in records if (took := _first_byte_s(name, one)) is not None]
    told = [(*_prompt(one), one.predicted_cached_tokens) for one in records if (one.prefill or one.endpoint) == name]
    known = [(prompt, cached, predicted) for prompt, cached, predicted in told if prompt and cached is not None]
    prompts = sum(prompt for prompt, *_ in known)
    claims = [(prompt, min(predicted, prompt)) for prompt, _, predicted in known if predicted is not None]
    claimed = sum(prompt for prompt, _ in claims)
    return {
        "requests": len(records),
        "failed": sum(one.outcome not in NO_FAULTS for one in records),
        "first_byte_ms": _ms(statistics.median(first_bytes)) if first_bytes else None,
        "first_byte_off": _off([one for one in records if one.endpoint == name and one.prefill is None]),
        "hit_ratio": round(sum(cached for _, cached, _ in known) / prompts, 3) if prompts else None,
        "predicted_hit_ratio": round(sum(cached for _, cached in claims) / claimed, 3) if claimed else None,
    }


def _off(records: Sequence[RequestRecord]) -> float | None:
    """How many times as long as predicted the latest streams took to their first byte, the median; None: no stream was
    predicted.
    """
    ratios = []
    for record in islice(filter(_is_timed, reversed(records)), LATEST):
        made = record.attempt_decision
        predicted_ms = None if made is None else made.first_byte_ms()
        if predicted_ms:
            ratios.append(1000.0 * (record.first_byte_at - record.placed_at) / predicted_ms)  # type: ignore[operator]
    return round(statistics.median(ratios), 3) if ratios else None


def _prompt(record: RequestRecord) -> tuple[int, int | None]:
    """Its tokens, 0 if they are not known, and how many of them were cached."""
    usage = record.usage if record.prefill is None else record.prefill_usage
    return (0, None) if usage is None else (usage.prompt_tokens or 0, usage.cached_tokens)


def _says_something(record: RequestRecord) -> bool:
    """Whether a request that runs has come to the balancer."""
    return record.decision is not None or (record.wait is not None and record.placed_at is None)


def _first_byte_s(name: str, record: RequestRecord) -> float | None:
    if record.prefill == name:
        return record.prefill_s
    return record.first_byte_at - record.placed_at if _is_timed(record) else None  # type: ignore[operator]


def _is_timed(record: RequestRecord) -> bool:
    """The first byte of a response that is no stream is its end."""
    return record.stream and record.first_byte_at is not None and record.placed_at is not None


def _summary(record: RequestRecord, offset: float) -> Fields:
    """One line about a request. `offset`: wall time less ours."""
    outcome, status = LABEL_AND_STATUS[record.outcome]
    made = record.attempt_decision
    return {
        "id": record.request_id,
        "engine_id": record.id,
        "at": stamp(record.started_at + offset),
        "model": record.model,
        "fallback_from": record.fallback_from,
        "stream": record.stream,
        "endpoint": record.endpoint,
        "prefill": record.prefill,
        "prefill_ms": None if record.prefill is None or record.prefill_s is None else _ms(record.prefill_s),
        "status": record.status or status,
        "outcome": outcome,
        "attempts": record.attempts,
        "queue_ms": _ms(record.queue_s),
        "waited_because": None if record.wait is None else record.wait.value,
        "duration_ms": _ms(record.ended_at - record.started_at),
        "cost": None if made is None else _rounded(made.cost),
        "candidates": None if made is None else made.candidates,
        "predicted": _predicted(record),
        "observed": _observed(record),
    }


def _explained(record: RequestRecord, offset: float, now: float, *, running: bool) -> Fields:
    fields = _summary(record, offset)
    prompt_tokens = _prompt(record)[0] or None
    if running:
        fields |= {"status": None, "outcome": None, "duration_ms": None}
        if record.placed_at is None:
            fields["queue_ms"] = _ms(now - record.started_at)
    return fields | {
        "running": running,
        "method": record.method,
        "path": record.path,
        "route": record.route,
        "client": record.client,
        "flow": record.flow,
        "alias": record.alias,
        "error": record.error,
        "waited": None if record.wait is None else _waited(record, record.wait),
        "failed": [{"endpoint": endpoint, "failure": failure} for endpoint, failure in record.failed],
        "decisions": [_decision(one, offset, prompt_tokens) for one in record.decisions],
    }


def _waited(record: RequestRecord, wait: Wait) -> Fields:
    why = "" if record.full_by is None else f"; {record.held_for} {FULL[record.full_by]}"
    wake: Fields | None = None
    if wait is Wait.WAKING:
        predicted_s, took_s = record.wake_predicted_s, record.wake_took_s
        wake = {"predicted_ms": _known_ms(predicted_s), "took_ms": _known_ms(took_s)}
        why += f"; {_wake(predicted_s, took_s)}"
    return {
        "because": wait.value,
        "meaning": WAITS[wait] + why,
        "endpoint": record.held_for,
        "full_by": record.full_by,
        "wake": wake,
    }


def _wake(predicted_s: float | None, took_s: float | None) -> str:
    """The wake that a request waits for, or waited for, in words."""
    known = "it was not known how long the wake takes"
    predicted = known if predicted_s is None else f"the wake was predicted to take {predicted_s:.1f} s"
    return predicted if took_s is None else f"{predicted}, and it took {took_s:.1f} s"


def _decision(made: Decision, offset: float, prompt_tokens: int | None) -> Fields:
    """`prompt_tokens`: of the request, once its usage is known."""
    parts, cached = made.breakdown(), made.cached_tokens()
    shown: list[Fields] = [
        {
            "endpoint": one.endpoint.name,
            "decode_on": _partner(made, one),
            "chosen": one is made.chosen_state,
            "cost": _rounded(cost),
        }
        for one, cost in zip(made.shown_states, made.costs, strict=False)
    ]
    for one, part in zip(shown, parts, strict=False):
        one["parts"] = {name: _rounded(value) for name, value in part.items()}
    for n, one in enumerate(shown):
        one["cached_tokens"] = _at_most(cached[n], prompt_tokens) if cached else None
    shown.sort(key=lambda one: one["cost"] if isinstance(one["cost"], float) else float("inf"))
    whole, split = made.lowest_costs
    return {
        "at": stamp(made.at + offset),
        "policy": made.policy.name,
        "endpoint": made.chosen.name,
        "decode_on": _partner(made, made.chosen_state),
        "second_leg": made.is_second,
        "tier": made.chosen.tier,
        "overflow": made.overflow,
        "lowest_costs": {"whole": _rounded(whole), "split": _rounded(split)},
        "because": because(made, prompt_tokens),
        "cost": _rounded(made.cost),
        "unit": made.policy.unit,
        "candidates": made.candidates,
        "shown": shown,
        "assumed": [name for name, value in made.policy.assumed if any(part.get(name) == value for part in parts)],
        "left_out": [{"endpoint": one.name, "why": why} for one, why in (*made.excluded, *made.unavailable)],
    }


def _partner(made: Decision, candidate: EndpointState) -> str | None:
    """If it would only compute the prompt: the endpoint that decodes."""
    second = made.partner(candidate)
    return None if second is None else second.endpoint.name


def _predicted(record: RequestRecord) -> Fields:
    made = record.attempt_decision
    return {
        "first_byte_ms": None if made is None else _rounded(made.first_byte_ms()),
        "cached_tokens": _at_most(record.predicted_cached_tokens, _prompt(record)[0] or None),
    }


def _observed(record: RequestRecord) -> Fields:
    usage = record.usage
    timed = record.first_byte_at is not None and record.placed_at is not None
    return {
        "first_byte_ms": _ms(record.first_byte_at - record.placed_at) if timed else None,  # type: ignore[operator]
        "cached_tokens": record.cached_tokens,
        "prompt_tokens": None if usage is None else usage.prompt_tokens,
        "completion_tokens": None if usage is None else usage.completion_tokens,
    }


def _known_ms(seconds: float | None) -> float | None:
    return None if seconds is None else _ms(seconds)


def _at_most(cached: float | None, prompt_tokens: int | None) -> float | None:
    """A prediction is of blocks and bytes, and may be above the prompt's own tokens."""
    return _rounded(cached if cached is None or prompt_tokens is None else min(cached, prompt_tokens))


def _ms(seconds: float) -> float:
    return round(1000.0 * seconds, 3)


def _rounded(value: float | None) -> float | None:
    """None also for what is infinite, which JSON cannot say: it must not go there."""
    return None if value is None or value in (float("inf"), float("-inf")) else round(float(value), 3)
