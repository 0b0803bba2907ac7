# SPDX-License-Identifier: Apache-2.0
"""What /metrics shows of KV events: the right numbers, and nothing while none are read."""

from __future__ import annotations

from collections.abc import Mapping

from lbproxy.control.families.endpoints import render_endpoints
from lbproxy.control.families.features import kv_families
from lbproxy.core.engines.kv_events import KvStats, Problem
from tests.support.kv_events import published, snapshot

NAME = "gpu-1:8000"


def samples(events: Mapping[str, KvStats]) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name -> label values -> value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in kv_families(events):
        for one in family.samples:
            found.setdefault(one.name, {})[tuple(one.labels.values())] = one.value
    return found


def test_what_was_published() -> None:
    seen = samples(published())
    problems = seen.pop("lbproxy_kv_events_problems_total")
    assert seen == {
        "lbproxy_kv_events_messages_total": {(NAME,): 7},
        "lbproxy_kv_events_bytes_total": {(NAME,): 700},
        "lbproxy_kv_events_clears_total": {(NAME,): 1},
        "lbproxy_kv_events_restarts_total": {(NAME,): 2},
        "lbproxy_kv_events_lost_messages_total": {(NAME,): 3},
        "lbproxy_kv_events_replayed_messages_total": {(NAME,): 4},
        "lbproxy_kv_events_blocks_total": {(NAME, "stored"): 30, (NAME, "removed"): 20},
        "lbproxy_kv_events_age_seconds": {(NAME,): 1.5},
    }
    assert problems == {(NAME, one.value): 5.0 * (one is Problem.GAP) for one in Problem}


def test_there_is_nothing_while_no_events_are_read_and_no_age_before_the_first() -> None:
    assert samples({}) == {}
    assert "lbproxy_kv_events_age_seconds" not in samples({NAME: KvStats(lambda: 10.0)})


def test_the_fill_of_a_cache_is_shown_if_it_is_known() -> None:
    def page(tokens: int | None, fill: float | None) -> str:
        return b"".join(render_endpoints([snapshot(tokens, fill)], {}, {})).decode()

    assert f'lbproxy_endpoint_kv_cached_tokens{{endpoint="{NAME}"}} 3200.0' in page(3_200, 0.25)
    assert f'lbproxy_endpoint_kv_fill{{endpoint="{NAME}"}} 0.25' in page(3_200, 0.25)
    assert "lbproxy_endpoint_kv_fill{" not in page(3_200, None)
    assert "kv_cached" not in page(None, None)
