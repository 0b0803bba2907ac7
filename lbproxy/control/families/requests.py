# SPDX-License-Identifier: Apache-2.0
"""What /metrics says of requests that ended. Pure; compiled, as `RequestCounts.count` runs once for each request.

Theory of operation. Requests of the same route, outcome, status, endpoint and model are of one `_Kind`. A request is
counted in its kind, which takes one look-up; whenever the series are read, or series are dropped, kinds are added to
them: each series has some of a kind's labels. Invariants:

- Labels are bounded: routes, outcomes and endpoints by design, status codes to registered ones and our own, models to
  the first 100 that endpoints say they serve, or the settings name. Whatever else a client writes into `model` is
  `other`.
- Series of an endpoint or model that is gone vanish.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from prometheus_client.core import Metric

from lbproxy.control.families.common import RequestTotals, add_to, counter, counters, histogram, keep
from lbproxy.control.families.histogram import Histogram
from lbproxy.control.families.placements import PlacementCounts
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.observed.snapshot import PoolSnapshot
from lbproxy.core.requests.outcome import LABEL_AND_STATUS, Outcome
from lbproxy.core.requests.request import Usage

MAX_MODEL_LABELS: Final = 100
MAX_LABEL_CHARS: Final = 128
MODELS_EVERY_S: Final = 1.0
"""How often an unknown model name may make us look again at what the endpoints serve."""
MAX_KINDS: Final = 4096
"""About 1 MB. Of so many all are added to the series, and begin anew."""
OTHER: Final = "other"

# Seconds; with +Inf 12 buckets each. A short chat answer takes about 1 s, a long generation minutes.
DURATION_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 180.0, 600.0)
FIRST_BYTE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 120.0)
QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 10.0, 30.0)

_BROKEN: Final = {one.label for one in (Outcome.UPSTREAM_BROKE, Outcome.CUT)}
_STATUSES: Final = {one.label: one.value.status for one in Outcome}
"""What a client would have got that had no head yet."""
_CODES_SHOWN: Final = frozenset(map(int, HTTPStatus)) | {one.value.status for one in Outcome}


class _RouteTimes:
    """The histograms of one route."""

    def __init__(self) -> None:
        self.duration = Histogram(DURATION_BUCKETS)
        self.streaming = Histogram(FIRST_BYTE_BUCKETS)
        """Times to the first byte, where a stream was wanted."""
        self.non_streaming = Histogram(FIRST_BYTE_BUCKETS)
        """Times to the first byte where no stream was wanted: it is the end of the response."""


class _Kind:
    """Requests that are counted in the same series."""

    def __init__(
        self, route: str, outcome: str, status: int, endpoint: str | None, label: str | None, times: _RouteTimes
    ) -> None:
        self.route, self.outcome, self.status, self.endpoint = route, outcome, status, endpoint or ""
        self.label = label
        """The label of the model; None = no model is named."""
        self.times = times
        self.count = 0
        self.placed = 0
        """How many of these requests were placed."""


class _Series:
    """Requests by labels, but for those still in `_kinds`."""

    def __init__(self) -> None:
        self.by_route: defaultdict[tuple[str, str, int], int] = defaultdict(int)
        self.by_endpoint: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.by_model: defaultdict[tuple[str, str], int] = defaultdict(int)

    def add(self, kind: _Kind) -> None:
        self.by_route[kind.route, kind.outcome, kind.status] += kind.count
        if kind.placed:
            self.by_endpoint[kind.endpoint, kind.outcome] += kind.placed
        if kind.label is not None:
            self.by_model[kind.label, kind.outcome] += kind.count


@dataclass
class _Tokens:
    """As the usage of responses reports them."""

    prompt: int = 0
    completion: int = 0
    whole: int = 0
    """Of responses that are no streams."""
    told: int = 0
    """Of prompts of which the response says how many were cached."""
    told_cached: int = 0
    """How many of these were cached."""
    predicted: float = 0.0
    """Of prompts, expected in a cache where the response says how many were."""
    observed: float = 0.0
    """How many of these were."""


class RequestCounts:
    """Counts requests that ended."""

    def __init__(self, relearn: Callable[[], None]) -> None:
        """`relearn` has `forget_the_gone` called with what there is now."""
        self._relearn = relearn
        self._kinds: dict[tuple[str, Outcome, int, str | None, str | None], _Kind] = {}
        self._times: defaultdict[str, _RouteTimes] = defaultdict(_RouteTimes)
        self._queue_wait = Histogram(QUEUE_BUCKETS)
        self._attempts = 0
        self._retries = 0
        self._tokens = _Tokens()
        self._request_bytes = 0
        self._response_bytes = 0
        self._failed: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._fallbacks: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._special = PlacementCounts()
        self._labels: dict[str, str] = {}
        """Labels of the models that are served."""
        self._models_due_at = float("-inf")
        self._series = _Series()

    def count(self, record: RequestRecord) -> None:
        kind = self._kinds.get((record.route, record.outcome, record.status, record.endpoint, record.model))
        if kind is None:
            kind = self._kind_of(record)
        kind.count += 1
        if record.placed_at is not None:
            # Refusals take no time and would hide how long the real ones take.
            kind.placed += 1
            times, started_at, first_byte_at = kind.times, record.started_at, record.first_byte_at
            times.duration.observe(record.ended_at - started_at)
            if first_byte_at is not None:
                (times.streaming if record.stream else times.non_streaming).observe(first_byte_at - started_at)
            self._queue_wait.observe(record.queue_s)
            attempts = record.attempts
            self._attempts += attempts
            if attempts > 1:
                self._retries += attempts - 1
        if record.failed:
            for failure in record.failed:
                self._failed[failure] += 1
        if record.usage is not None:
            self._count_tokens(record.usage, record)
        if record.fallback_from is not None:
            labels = (self._label_of(one or "", record.ended_at) for one in (record.fallback_from, record.model))
            self._fallbacks[next(labels), next(labels)] += 1
        if record.tier > 1 or record.prefill is not None or record.first_legs:
            self._special.count(record)
        self._request_bytes += record.request_bytes
        self._response_bytes += record.response_bytes

    def _count_tokens(self, usage: Usage, record: RequestRecord) -> None:
        tokens = self._tokens
        tokens.prompt += usage.prompt_tokens or 0
        tokens.completion += usage.completion_tokens or 0
        if not record.stream:
            tokens.whole += usage.completion_tokens or 0
        predicted = record.predicted_cached_tokens
        cached = usage.cached_tokens if record.prefill is None else record.cached_tokens
        if cached is not None:
            tokens.told += usage.prompt_tokens or 0
            tokens.told_cached += cached
            if predicted is not None:
                tokens.predicted += predicted
                tokens.observed += cached

    def _kind_of(self, record: RequestRecord) -> _Kind:
        """The kind of a record, of which there was none yet; or that of all models that are not known to be served."""
        model = record.model
        label = None if model is None else self._label_of(model, record.ended_at)
        known = model if label is None or model in self._labels else OTHER
        outcome, status = LABEL_AND_STATUS[record.outcome]
        key = record.route, record.outcome, record.status, record.endpoint, known
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= MAX_KINDS:
                self._add_up()
            times = self._times[record.route]
            kind = _Kind(record.route, outcome, record.status or status, record.endpoint, label, times)
            self._kinds[key] = kind
        return kind

    def _label_of(self, model: str, now: float) -> str:
        label = self._labels.get(model)
        if label is None and now >= self._models_due_at:
            self._models_due_at = now + MODELS_EVERY_S
            self._relearn()
            label = self._labels.get(model)
        return OTHER if label is None else label

    def _add_up(self) -> None:
        """Add what the kinds have to the series, and forget the kinds."""
        for kind in self._kinds.values():
            self._series.add(kind)
        self._kinds.clear()

    @property
    def placed(self) -> int:
        return sum(self._queue_wait.counts)

    def totals(self) -> RequestTotals:
        """What was counted since the start."""
        self._add_up()
        totals = RequestTotals(first_bytes=[0] * (len(FIRST_BYTE_BUCKETS) + 1), tokens=self._tokens.whole)
        totals.prompt_tokens, totals.cached_tokens = self._tokens.told, self._tokens.told_cached
        for (_, outcome, status), count in self._series.by_route.items():
            totals.requests += count
            worst = max(status, _STATUSES[outcome])
            if worst >= 500 or outcome in _BROKEN:
                totals.errors += count
            elif worst == 429:
                totals.rejected += count
        for times in self._times.values():
            for index, count in enumerate(times.streaming.counts):
                totals.first_bytes[index] += count
        return totals

    def forget_the_gone(self, names: Collection[str], served: Iterable[str]) -> None:
        """Drop the series of other endpoints and models than these, and learn the models."""
        self._add_up()
        keep(self._series.by_endpoint, lambda key: key[0] in names)
        keep(self._failed, lambda key: key[0] in names)
        self._special.forget_the_gone(names)
        models = dict.fromkeys(served)
        kept = [model for model in self._labels if model in models]
        new = [model for model in models if model not in self._labels]
        self._labels = {model: model[:MAX_LABEL_CHARS] for model in [*kept, *new][:MAX_MODEL_LABELS]}
        labels = {OTHER, *self._labels.values()}
        keep(self._series.by_model, lambda key: key[0] in labels)
        keep(self._fallbacks, labels.issuperset)

    def families(self) -> Iterator[Metric]:
        """Those that are about all requests together, and by model."""
        self._add_up()
        requests: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        for (route, outcome, status), count in self._series.by_route.items():
            code = str(status) if status in _CODES_SHOWN else f"{status // 100}xx"
            requests[route, outcome, code] += count
        text = "Requests that ended, by route, outcome and status"
        yield counters("requests", text, ("route", "outcome", "code"), requests.items())
        text = "From a request's head to the end of its response, without refused requests"
        duration = histogram("request_duration_seconds", text)
        text = "From a request's head to the first byte of the response body; non-streaming: to its end"
        first_byte = histogram("time_to_first_byte_seconds", text, ("route", "stream"))
        for route, times in self._times.items():
            add_to(duration, [route], times.duration)
            add_to(first_byte, [route, "false"], times.non_streaming)
            add_to(first_byte, [route, "true"], times.streaming)
        yield duration
        yield first_byte
        queue_wait = histogram("queue_wait_seconds", "Time in the queue, all attempts of a request together", ())
        add_to(queue_wait, [], self._queue_wait)
        yield queue_wait
        yield counter("attempts", "Attempts to send a request to an endpoint", self._attempts)
        yield counter("retries", "Attempts after a request's first", self._retries)
        yield counter("prompt_tokens", "Prompt tokens, if the response's usage reports them", self._tokens.prompt)
        yield counter(
            "completion_tokens", "Response tokens, if the response's usage reports them", self._tokens.completion
        )
        text = "Cached prompt tokens: as predicted at placement, and as observed if usage reports them"
        kinds = ((("predicted",), self._tokens.predicted), (("observed",), self._tokens.observed))
        yield counters("cached_prompt_tokens", text, ("kind",), kinds)
        yield counter("request_bytes", "Bytes of request bodies", self._request_bytes)
        yield counter("response_bytes", "Bytes of responses sent to clients", self._response_bytes)
        text = f"Requests by model; other: models that no endpoint lists, and all after the first {MAX_MODEL_LABELS}"
        yield counters("model_requests", text, ("model", "outcome"), self._series.by_model.items())
        text = "Requests that were sent for another model, as no endpoint served theirs"
        yield counters("fallbacks", text, ("model", "target"), self._fallbacks.items())

    def by_endpoint(self) -> Iterator[Metric]:
        self._add_up()
        text = "Requests that ended, by the endpoint of their last attempt"
        yield counters("endpoint_requests", text, ("endpoint", "outcome"), self._series.by_endpoint.items())
        text = "Failed attempts before a response, by failure"
        yield counters("endpoint_failed_attempts", text, ("endpoint", "failure"), self._failed.items())

    def special(self, snapshot: PoolSnapshot) -> Iterator[Metric]:
        """Those about requests that were placed in a special way."""
        return self._special.families(snapshot, self.placed)
