# SPDX-License-Identifier: Apache-2.0
"""What /metrics says where prefill and decode are apart; nothing, where they are not."""

from __future__ import annotations

from dataclasses import replace

from lbproxy.core.endpoints.state import EndpointSnapshot
from lbproxy.core.engines.handover import Handover, Role
from lbproxy.core.observed.learned import LearnedTransfer
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import Usage
from tests.control.telemetry.test_telemetry import read, record, refused, seen, telemetry

FAMILIES = ("endpoint_role", "split_requests", "whole_requests", "prefill_leg", "transfer_")


def apart() -> tuple[EndpointSnapshot, EndpointSnapshot, EndpointSnapshot]:
    return (
        seen(1, "m", handover=Handover(Role.PREFILL, "nixl")),
        seen(2, "m", handover=Handover(Role.DECODE, "nixl")),
        seen(3, "m"),
    )


def test_without_roles_there_is_none_of_these_families() -> None:
    with telemetry(seen(1, "m"), seen(2, "m")) as (made, _):
        made.ended([record(1), record(2)])
        assert not [name for name in read(made) if name.startswith(tuple(f"lbproxy_{one}" for one in FAMILIES))]


def test_requests_are_split_or_whole_by_their_last_attempt() -> None:
    with telemetry(*apart()) as (made, _):
        made.ended(
            [
                record(1, endpoint="e2", prefill="e1", prefill_s=0.3, first_legs=(("e1", "completed"),)),
                record(2, endpoint="e2", prefill="e1", outcome=Outcome.CLIENT_CLOSED),
                record(3, endpoint="e3", first_legs=(("e1", "failed"), ("e1", "refused"))),
                record(4, endpoint="e3"),
                refused(Outcome.SATURATED),
            ]
        )
        page = read(made)
    assert page["lbproxy_split_requests_total"] == {("e1",): 2}
    assert page["lbproxy_whole_requests_total"] == {(): 2}, "what was refused was neither"
    assert page["lbproxy_prefill_legs_total"] == {("e1", "completed"): 1, ("e1", "failed"): 1, ("e1", "refused"): 1}
    assert page["lbproxy_prefill_leg_seconds_count"] == {(): 1}
    assert page["lbproxy_prefill_leg_seconds_sum"] == {(): 0.3}
    assert page["lbproxy_endpoint_role"] == {
        ("nixl", "e1", "prefill"): 1,
        ("nixl", "e2", "decode"): 1,
        ("", "e3", "both"): 1,
    }


def test_series_exist_before_the_first_request_and_end_with_their_endpoint() -> None:
    with telemetry(*apart()) as (made, pool):
        page = read(made)
        assert page["lbproxy_split_requests_total"] == {("e1",): 0}
        assert set(page["lbproxy_prefill_legs_total"].values()) == {0}
        made.ended([record(1, endpoint="e2", prefill="e1", first_legs=(("e1", "completed"),))])
        pool.now = replace(pool.now, endpoints=pool.now.endpoints[1:])
        page = read(made)
        assert not page.get("lbproxy_split_requests_total")
        assert not page.get("lbproxy_prefill_legs_total")
        assert page["lbproxy_whole_requests_total"] == {(): 0}, "it stays a counter"


def test_transfers_are_shown_once_they_were_learned() -> None:
    with telemetry(*apart()) as (made, pool):
        assert "lbproxy_transfer_fixed_seconds" not in read(made)
        pool.now = replace(pool.now, transfer=LearnedTransfer(fixed_ms=20.0, ms_per_token=0.01))
        page = read(made)
    assert page["lbproxy_transfer_fixed_seconds"] == {(): 0.02}
    assert page["lbproxy_transfer_token_seconds"] == {(): 1e-05}


def test_cached_tokens_of_a_split_request_are_those_of_the_first_leg() -> None:
    """Decode reports none, or all that was transferred."""
    split = {"endpoint": "e2", "prefill": "e1", "predicted_cached_tokens": 60.0}
    with telemetry(*apart()) as (made, _):
        made.ended(
            [
                record(1, **split, usage=Usage(100, 100, 5), prefill_usage=Usage(100, 64, 1)),
                record(2, **split, usage=Usage(100, 100, 5)),
                record(3, **split, usage=Usage(100, None, 5), prefill_usage=Usage(100, 32, 1)),
            ]
        )
        page = read(made)
    assert page["lbproxy_cached_prompt_tokens_total"] == {("observed",): 96, ("predicted",): 120}
    assert page["lbproxy_prompt_tokens_total"] == {(): 300}
