# SPDX-License-Identifier: Apache-2.0
"""How a metrics page becomes `LoadMetrics`, by one engine's table.

The rules:

1. A signal that no spec finds is *missing*: named in `PageReading.missing` and never 0, and the others still count. A
   page on which every signal is missing is a failed scrape: there is no new `LoadMetrics`, and the old one ages.
2. A series matches if it has all wanted labels with those values; more labels are allowed. Names match exactly.
3. Of several series, those with a `priority` other than "" are parts of the total and left out; of those with
   timestamps the newest count; of a series that occurs twice the last value counts; of series that differ in ranks that
   do not divide the load (tensor, pipeline, expert, context: `_without_copies`) the first rank's. Then requests and
   blocks are summed over series (data-parallel ranks, several models), and utilisation is averaged, weighted by blocks
   if the blocks of every series are known.
4. A value that is NaN, infinite, negative or above 1e9 counts as missing. Utilisation is clamped to 0..1.

A missing value is kept from an earlier page, and ages. A gauge is kept until it is `keep_s` old; then it is None, which
every reader treats as unknown. `LoadMetrics` has one `scraped_at` for all values, so an old gauge must not look fresh
for longer. A fact (block size, blocks) cannot change while a server runs, so its age does not matter: it is kept until
the page shows that another process responds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from lbproxy.config.sections.engines import MetricRatio, MetricSpec, Signal
from lbproxy.core.engines.dialects import SIGNALS, EngineTable
from lbproxy.core.engines.exposition import KnownLabels, Sample, Samples, Scanner
from lbproxy.core.engines.load_metrics import LoadMetrics, LoraMetrics

MAX_VALUE = 1e9
"""No server has so many requests or blocks: a larger value is a defect of the page, and would outweigh all
endpoints."""
MAX_LORA_FUTURE_S = 60.0
"""vLLM's LoRA gauge is a time. With several API servers the times are added up and lie far in the future: such a series
is ignored. Clocks may differ by this much."""
_TOTALS = ("deferred", "kv_tokens", "slots", "awake")
"""What is optional and summed over series."""
STARTED = "process_start_time_seconds"
"""Prometheus' convention for client libraries."""
MAX_LORA = "max_lora"
"""Named in `PageReading.missing` if adapters are reported, but not how many fit."""
_FACTS = frozenset({"block_size_tokens", "kv_blocks", "kv_tokens", "slots"})
_DIVIDING = frozenset({"dp_rank", "data_parallel_rank"})
MAX_SHARED = 128
"""Samples beside those of ranks that are of all of them, and are read for each."""
MAX_RANKS = 64
"""Data-parallel ranks of one address."""
_RANK = re.compile("0|[1-9][0-9]{0,4}")
_WHOLE_NUMBER = re.compile("[1-9][0-9]{0,9}")


class Value(NamedTuple):
    """A series that counts for a signal, and the value to use for it."""

    sample: Sample
    value: float


@dataclass(frozen=True, slots=True)
class PageReading:
    """The result of reading one page."""

    metrics: LoadMetrics | None
    """None = no wanted signal was on the page: the scrape failed."""
    missing: tuple[str, ...]
    """Those of `SIGNALS`, in their order, that the table has and the page did not have; then perhaps `MAX_LORA`."""
    ranks: tuple[LoadMetrics, ...] = ()
    """The metrics of each data-parallel rank alone, if there are several, in the order of their labels."""


class PageReader:
    """Reads the pages of one endpoint, in their order. Costs about 0.1 ms for a vLLM page of 60 KB."""

    def __init__(self, table: EngineTable, *, keep_s: float, blocks_of: int = 1) -> None:
        """`keep_s`: how long a gauge that is missing keeps its last value. `blocks_of`: the page is that of one of so
        many ranks, and its blocks are those of all.
        """
        self._table = table
        self._blocks_of = blocks_of if table.each_series_is_total else 1
        self._ranks: list[PageReader] = []
        """One for each rank of the last page, if there were several."""
        self._keep_s = keep_s
        self._scanner = _scanner(table)
        self._known = KnownLabels()
        self._kept: dict[str, tuple[float, float]] = {}
        """The last value of each signal, and when it was reported."""
        self._started_at: float | None = None
        self.is_single = False
        """The last page is from one process with one rank. Several processes cannot report when they started."""

    def read(self, page: bytes, *, scraped_at: float, wall_time: float) -> PageReading:
        """Read a page. Never raises.

        `scraped_at`: when the page was requested. `wall_time`: now, in seconds since the epoch.
        """
        samples = _without_copies(self._table, self._scanner.scan(page, self._known))
        reading = self._read(samples, scraped_at, wall_time)
        if reading.metrics is None:
            return reading
        ranks = self._read_ranks(samples, scraped_at, wall_time)
        return PageReading(reading.metrics, reading.missing, ranks) if ranks else reading

    def _read_ranks(self, samples: Samples, scraped_at: float, wall_time: float) -> tuple[LoadMetrics, ...]:
        name = self._table.rank_label
        labels = () if name is None else rank_labels(self._table, samples)
        if name is None or len(labels) < 2 or _shared(samples, name) > MAX_SHARED:
            self._ranks.clear()
            return ()
        if len(self._ranks) != len(labels):
            self._ranks = [PageReader(self._table, keep_s=self._keep_s, blocks_of=len(labels)) for _ in labels]
        read = []
        parts = _by_rank(samples, name, labels)
        for reader, own in zip(self._ranks, parts, strict=True):
            # Before its first request a rank shows no gauges at all: it has no requests.
            read.append(reader._read(own, scraped_at, wall_time).metrics or LoadMetrics(scraped_at=scraped_at))
        return tuple(read)

    def _read(self, samples: Samples, scraped_at: float, wall_time: float) -> PageReading:
        values = _signals(self._table, samples)
        lora = _lora(self._table.lora, samples, wall_time)
        missing = [name for name in SIGNALS if getattr(self._table, name) and values[name] is None]
        if lora is not None and lora.max_lora is None:
            missing.append(MAX_LORA)
        if all(value is None for value in values.values()):
            return PageReading(None, tuple(missing))
        started_at = _started_at(samples)
        self.is_single = started_at is not None and _count(self._table.running, samples) <= 1
        if started_at is not None and started_at != self._started_at:
            self._started_at = started_at
            self._kept.clear()
        values |= {name: _total(_first(getattr(self._table, name), samples)[1]) for name in _TOTALS}
        for name, value in values.items():
            if value is not None:
                self._kept[name] = value, scraped_at
        block_size_tokens = self._kept_value("block_size_tokens", scraped_at)
        kv_blocks = self._kept_value("kv_blocks", scraped_at)
        stated, slots = self._kept_value("kv_tokens", scraped_at), self._kept_value("slots", scraped_at)
        metrics = LoadMetrics(
            scraped_at=scraped_at,
            waiting=self._kept_value("waiting", scraped_at),
            running=self._kept_value("running", scraped_at),
            kv_utilization=self._kept_value("kv_utilization", scraped_at),
            block_size_tokens=None if block_size_tokens is None else int(block_size_tokens),
            kv_blocks=None if kv_blocks is None else int(kv_blocks) // self._blocks_of,
            stated_tokens=int(stated) if stated else None,
            deferred=self._kept_value("deferred", scraped_at),
            slots=int(slots) if slots else None,
            asleep=self._kept_value("awake", scraped_at) == 0.0 and not values["running"],
            work=_work(self._table.work, samples),
            lora=lora,
            started_at=started_at,
        )
        return PageReading(metrics, tuple(missing))

    def _kept_value(self, name: str, now: float) -> float | None:
        value, shown_at = self._kept.get(name, (None, now))
        return value if name in _FACTS or now - shown_at <= self._keep_s else None


def _without_copies(table: EngineTable, samples: Samples) -> Samples:
    """The samples without copies: each scheduler of a tensor-parallel group says the same, and so do those of pipeline,
    expert and context parallelism, each perhaps with the `pid` of its own. Only data-parallel ranks divide the load.
    """
    return {family: _first_ranks(table, series) if len(series) > 1 else series for family, series in samples.items()}


def _first_ranks(table: EngineTable, series: list[Sample]) -> list[Sample]:
    names = {name for one in (series[0], series[-1]) for name in one.labels if name.endswith("_rank")}
    copies = sorted(names - _DIVIDING - {table.rank_label})
    if not copies:
        return series
    kept: dict[tuple[tuple[str, str], ...], tuple[list[tuple[int, str]], Sample]] = {}
    for one in series:
        key = tuple((name, value) for name, value in one.labels.items() if name not in copies and name != "pid")
        place = [(len(rank), rank) for rank in (one.labels.get(name, "") for name in copies)]
        known = kept.get(key)
        if known is None or place <= known[0]:
            kept[key] = place, one
    return [one for _, one in kept.values()]


def rank_labels(table: EngineTable, samples: Samples) -> Sequence[str]:
    """The labels of the data-parallel ranks on a page, in their order; empty if no family has several, or they are not
    numbers, or too many.
    """
    name = table.rank_label
    if name is None:
        return ()
    found: set[str] = set()
    for family in _rank_families(table):
        series = samples.get(family, ())
        if len(series) > 1:
            found.update(one.labels[name] for one in series if name in one.labels)
    are_numbers = all(_RANK.fullmatch(label) for label in found)
    return sorted(found, key=int) if are_numbers and len(found) <= MAX_RANKS else ()


def _shared(samples: Samples, name: str) -> int:
    return sum(name not in one.labels for series in samples.values() for one in series)


def _by_rank(samples: Samples, name: str, labels: Sequence[str]) -> Sequence[Samples]:
    """The samples of each rank; those without the label are of every rank."""
    parts: list[dict[str, list[Sample]]] = [{family: [] for family in samples} for _ in labels]
    places = {label: [part] for label, part in zip(labels, parts, strict=True)}
    for family, series in samples.items():
        for one in series:
            label = one.labels.get(name)
            for part in parts if label is None else places.get(label, ()):
                part[family].append(one)
    return parts


@lru_cache(maxsize=128)
def _rank_families(table: EngineTable) -> Sequence[str]:
    signals = (table.waiting, table.running, table.kv_utilization, table.kv_blocks)
    return sorted({spec.family for signal in signals for spec in signal if isinstance(spec, MetricSpec)})


@lru_cache(maxsize=128)  # one for each engine, not for each endpoint
def _scanner(table: EngineTable) -> Scanner:
    return Scanner([*table.families(), STARTED])


def _count(signal: Signal, samples: Samples) -> int:
    """How many series the signal has, usable or not."""
    return sum(len(samples.get(spec.family, ())) for spec in signal if isinstance(spec, MetricSpec))


def _signals(table: EngineTable, samples: Samples) -> dict[str, float | None]:
    """The value of each of `SIGNALS` on the page."""
    _, blocks = _first(table.kv_blocks, samples)
    return {
        "waiting": _total(_first(table.waiting, samples)[1], _first(table.also_waiting, samples)[1]),
        "running": _total(_first(table.running, samples)[1]),
        "kv_utilization": _utilization(table, samples, blocks),
        "block_size_tokens": _agreed(_first(table.block_size_tokens, samples)[1]),
        "kv_blocks": _blocks(blocks, table.each_series_is_total),
    }


# --- From samples to the series that count ----------------------------------------------------------------------------


def select(spec: MetricSpec, samples: Samples) -> list[Value]:
    """The series that count, each with its value: rules 2 to 4 before adding up."""
    matching: Sequence[Sample] = samples.get(spec.family, ())
    if spec.labels:
        matching = [s for s in matching if all(s.labels.get(name, "") == value for name, value in spec.labels)]
    usable = [Value(s, value) for s in matching if (value := _value(spec, s)) is not None]
    if len(usable) < 2 and all("priority" not in one.sample.labels for one in usable):
        return usable
    if all(name != "priority" for name, _ in spec.labels):
        # SGLang has a total with priority="" next to one series for each priority: adding all would double the sum.
        usable = [one for one in usable if one.sample.labels.get("priority", "") == ""]
    stamps = [one.sample.timestamp for one in usable if one.sample.timestamp is not None]
    # In this format a sample without a timestamp is current, so it is never older than one that has a timestamp.
    newest = None if len(stamps) < len(usable) else max(stamps, default=None)
    return _distinct([one for one in usable if one.sample.timestamp == newest])


def _distinct(series: list[Value]) -> list[Value]:
    """A series that occurs twice on a page counts once, with its last value: otherwise it would be added twice."""
    if len(series) < 2 or (len(series) == 2 and series[0].sample.labels != series[1].sample.labels):
        return series
    return list({tuple(one.sample.labels.items()): one for one in series}.values())


def _value(spec: MetricSpec, sample: Sample) -> float | None:
    value = sample.value
    if spec.value_label is not None:
        text = sample.labels.get(spec.value_label, "")
        if not _WHOLE_NUMBER.fullmatch(text):  # vLLM writes "None" until it has measured
            return None
        value = float(text)
    if not 0.0 <= value <= MAX_VALUE:  # NaN fails every comparison
        return None
    if value > 1.0 and spec.above_one != "clamp":
        return value / 100.0 if spec.above_one == "per_cent" else None
    return value


def _first(signal: Signal, samples: Samples) -> tuple[MetricSpec | None, list[Value]]:
    """The first spec that is not a ratio and selects anything, and what it selects."""
    for spec in signal:
        if isinstance(spec, MetricSpec) and (series := select(spec, samples)):
            return spec, series
    return None, []


def _matching_values(series: Sequence[Value], others: Sequence[Value], pinned: Collection[str]) -> list[float | None]:
    """For each series the value of the one other series with the same values of all labels that both have.

    Linear: it compares the labels that every series of both has, except those in the specs; vLLM's is `engine`. None
    where there is no such series, or more than one.
    """
    shared = set.intersection(*(set(one.sample.labels) for one in (*series, *others)))
    names = sorted(shared.difference(pinned))
    found: dict[tuple[str, ...], float | None] = {}
    for other in others:
        key = tuple(other.sample.labels[name] for name in names)
        found[key] = None if key in found else other.value
    return [found.get(tuple(one.sample.labels[name] for name in names)) for one in series]


# --- From the series that count to one value --------------------------------------------------------------------------


def _total(series: Sequence[Value], more: Sequence[Value] = ()) -> float | None:
    return sum(one.value for one in (*series, *more)) if series else None


def _agreed(series: Sequence[Value]) -> float | None:
    """The whole number that all series have; None if there is none or they differ."""
    values = {one.value for one in series}
    value = values.pop() if len(values) == 1 else 0.0
    return value if value >= 1 and value.is_integer() else None


def _blocks(series: Sequence[Value], each_is_total: bool) -> float | None:
    values = [one.value for one in series]
    total = math.floor(max(values, default=0.0) if each_is_total else sum(values))
    return total if 1 <= total <= MAX_VALUE else None


def _utilization(table: EngineTable, samples: Samples, blocks: Sequence[Value]) -> float | None:
    """The utilisation by the first spec or ratio that finds anything."""
    pinned = {name for spec in table.kv_blocks if isinstance(spec, MetricSpec) for name, _ in spec.labels}
    for spec in table.kv_utilization:
        if isinstance(spec, MetricRatio):
            share = _ratio(spec, samples)
        else:
            series = select(spec, samples)
            weights: list[float | None] = []
            if len(series) > 1 and blocks:
                weights = _matching_values(series, blocks, pinned.union(name for name, _ in spec.labels))
            share = _mean_share([one.value for one in series], weights)
        if share is not None:
            return share
    return None


def _mean_share(shares: Sequence[float], weights: Sequence[float | None]) -> float | None:
    """The mean of values clamped to 0..1, weighted if all of them have a weight."""
    if not shares:
        return None
    clamped = [min(share, 1.0) for share in shares]
    known = [weight for weight in weights if weight]
    if len(known) < len(shares):
        return sum(clamped) / len(clamped)
    return sum(share * weight for share, weight in zip(clamped, known, strict=True)) / sum(known)


def _ratio(ratio: MetricRatio, samples: Samples) -> float | None:
    """Used by capacity, over the series that have both."""
    used, capacity = select(ratio.used, samples), select(ratio.capacity, samples)
    if not used or not capacity:
        return None
    pinned = {name for spec in (ratio.used, ratio.capacity) for name, _ in spec.labels}
    known = [
        (one.value, room) for one, room in zip(used, _matching_values(used, capacity, pinned), strict=True) if room
    ]
    return _mean_share([value / room for value, room in known], [room for _, room in known])


# --- Adapters, and when the process started ---------------------------------------------------------------------------


def _lora(signal: Signal, samples: Samples, wall_time: float) -> LoraMetrics | None:
    """From the newest series: old ones stay on the page for ever, and the value of each is when it was last valid."""
    for spec in signal:
        if not isinstance(spec, MetricSpec):
            continue
        wanted = spec.labels
        usable_samples = [
            sample
            for sample in samples.get(spec.family, ())
            if 0.0 <= sample.value <= wall_time + MAX_LORA_FUTURE_S
            and all(sample.labels.get(name, "") == value for name, value in wanted)
        ]
        if usable_samples:
            labels = max(usable_samples, key=lambda sample: sample.value).labels
            max_lora = labels.get("max_lora", "")
            return LoraMetrics(
                _adapters(labels.get("running_lora_adapters", "")),
                _adapters(labels.get("waiting_lora_adapters", "")),
                int(max_lora) if _WHOLE_NUMBER.fullmatch(max_lora) else None,
            )
    return None


def _work(signal: Signal, samples: Samples) -> float | None:
    """The sum of all series of the first family on the page. Counters may be larger than any gauge."""
    for spec in signal:
        if isinstance(spec, MetricSpec) and (series := samples.get(spec.family)):
            total = sum({tuple(one.labels.items()): one.value for one in series}.values())
            return total if math.isfinite(total) else None
    return None


def _adapters(text: str) -> frozenset[str]:
    return frozenset(name for part in text.split(",") if (name := part.strip()))


def _started_at(samples: Samples) -> float | None:
    """Of several processes the start of the last one."""
    return max((s.value for s in samples.get(STARTED, ()) if 0.0 < s.value < math.inf), default=None)
