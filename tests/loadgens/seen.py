# SPDX-License-Identifier: Apache-2.0
"""What lbproxy reports of a run: its metrics, and its access log."""

from __future__ import annotations

import math
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

ROUTES = ("completions", "chat_completions")
PATHS = ("/v1/completions", "/v1/chat/completions")
CUT = "client_closed_request"


@dataclass(frozen=True)
class Seen:
    """The requests of a run for completions, those excluded that the client cut off."""

    good: int
    failed: int
    """Status 400 or more."""
    cut: int
    """Closed by the client."""
    prompt_tokens: int
    completion_tokens: int
    """The tokens of all, those that were cut off included, as far as the servers reported them."""
    ttft_s: float
    """Mean of those that succeeded: from the head of the request to the first byte of the response's body."""
    duration_s: float
    """Mean of those that succeeded: from the head of the request to the end of the response."""
    others: dict[str, int]
    """Other requests, by method, path and status."""


class Page:
    """A scrape of /metrics."""

    def __init__(self, admin_url: str) -> None:
        with urllib.request.urlopen(f"{admin_url}/metrics", timeout=10) as response:
            text = response.read().decode()
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples if sample.value
        ]

    def total(self, name: str, where: Callable[[dict[str, str]], bool] = lambda labels: True) -> float:
        """The sum of a family's samples with these labels."""
        return sum(one.value for one in self._samples if one.name == name and where(one.labels))


def seen(lines: list[dict[str, object]], page: Page) -> Seen:
    """What the access log and the metrics say. AssertionError if they differ from each other."""
    asked = [line for line in lines if line["path"] in PATHS]
    cut = [line for line in asked if line["outcome"] == CUT]
    good = [line for line in asked if line["outcome"] == "completed" and _number(line["status"]) < 400]
    failed = len(asked) - len(cut) - len(good)

    def ours(labels: dict[str, str]) -> bool:
        return labels["route"] in ROUTES

    assert page.total("lbproxy_requests_total", ours) == len(asked)
    assert page.total("lbproxy_request_duration_seconds_count", ours) == len(asked)
    _same(page.total("lbproxy_request_duration_seconds_sum", ours), sum(_seconds(one, "duration_ms") for one in asked))
    began = [one for one in asked if one["ttfb_ms"] is not None]
    assert page.total("lbproxy_time_to_first_byte_seconds_count", ours) == len(began)
    _same(page.total("lbproxy_time_to_first_byte_seconds_sum", ours), sum(_seconds(one, "ttfb_ms") for one in began))
    return Seen(
        good=len(good),
        failed=failed,
        cut=len(cut),
        prompt_tokens=int(page.total("lbproxy_prompt_tokens_total")),
        completion_tokens=int(page.total("lbproxy_completion_tokens_total")),
        ttft_s=_mean([_seconds(one, "ttfb_ms") for one in good]),
        duration_s=_mean([_seconds(one, "duration_ms") for one in good]),
        others=dict(Counter(f"{one['method']} {one['path']} {one['status']}" for one in lines if one not in asked)),
    )


def _same(one: float, other: float) -> None:
    assert math.isclose(one, other, rel_tol=1e-4), f"{one} in the metrics, {other} in the log"


def _number(value: object) -> int:
    assert isinstance(value, int)
    return value


def _seconds(line: dict[str, object], field: str) -> float:
    value = line[field]
    assert isinstance(value, (int, float))
    return value / 1000


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
