# SPDX-License-Identifier: Apache-2.0
"""What /metrics shows of other replicas: the right numbers, and no series of replicas that are gone."""

from __future__ import annotations

from dataclasses import replace

from lbproxy.config.tree import LogSettings
from lbproxy.control.families.features import replica_families
from lbproxy.control.telemetry.process_log import ProcessLog
from lbproxy.control.telemetry.telemetry import Telemetry
from lbproxy.core.replicas.shown import ReplicationFacts
from tests.support.aio import run
from tests.support.replicas import exchanged, other, unheard


def samples(replicas: ReplicationFacts) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name -> label values -> value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in replica_families(replicas):
        for one in family.samples:
            found.setdefault(one.name, {})[tuple(one.labels.values())] = one.value
    return found


def test_what_was_exchanged() -> None:
    seen = samples(exchanged(other("lb-2", heard_s=1.5, missed=3), other("lb-3", in_flight=9)))
    assert seen["lbproxy_replicas"] == {(): 2}
    assert seen["lbproxy_replicas_connected"] == {(): 1}
    assert seen["lbproxy_replicas_batches_total"] == {("sent",): 7, ("received",): 9}
    assert seen["lbproxy_replicas_bytes_total"] == {("sent",): 700, ("received",): 900}
    assert seen["lbproxy_replicas_malformed_batches_total"] == {(): 2}
    assert seen["lbproxy_replicas_failures_total"] == {(): 1}
    assert seen["lbproxy_replicas_append_seconds"] == {(): 0.25}
    assert seen["lbproxy_replicas_heartbeat_age_seconds"] == {(): 0.5}
    assert seen["lbproxy_replica_in_flight"] == {("lb-2",): 4, ("lb-3",): 9}
    assert seen["lbproxy_replica_batch_age_seconds"] == {("lb-2",): 1.5, ("lb-3",): 0.25}
    assert seen["lbproxy_replica_complete"] == {("lb-2",): 1, ("lb-3",): 1}
    assert seen["lbproxy_replica_resets_total"] == {("lb-2",): 1, ("lb-3",): 1}
    assert seen["lbproxy_replica_missed_batches_total"] == {("lb-2",): 3, ("lb-3",): 0}


def test_a_replica_that_was_restarted_has_one_series() -> None:
    """Each process has another id, and a name for ever: its old process may be alive for some seconds."""
    seen = samples(exchanged(other("lb-2", "old", heard_s=2.0), other("lb-2", "new", in_flight=1, is_complete=False)))
    assert seen["lbproxy_replica_in_flight"] == {("lb-2",): 5}
    assert seen["lbproxy_replica_batch_age_seconds"] == {("lb-2",): 2.0}
    assert seen["lbproxy_replica_complete"] == {("lb-2",): 0}


def test_series_of_a_replica_that_is_gone_vanish() -> None:
    assert "lb-3" in str(samples(exchanged(other("lb-2"), other("lb-3"))))
    seen = samples(exchanged(other("lb-2")))
    assert "lb-3" not in str(seen)
    assert seen["lbproxy_replicas"] == {(): 1}


def test_what_is_not_known_has_no_sample() -> None:
    shown = exchanged(unheard("lb-2"))
    shown.stats.append_s = None
    seen = samples(replace(shown, beat_age_s=None, problem="refused"))
    assert seen["lbproxy_replicas_connected"] == {(): 0}
    for name in ("replicas_heartbeat_age_seconds", "replicas_append_seconds", "replica_batch_age_seconds"):
        assert f"lbproxy_{name}" not in seen
    assert seen["lbproxy_replica_complete"] == {("lb-2",): 0}
    assert seen["lbproxy_replica_in_flight"] == {("lb-2",): 0}


def test_a_page_has_them_only_if_there_are_replicas() -> None:
    log = ProcessLog(LogSettings())
    telemetry = Telemetry(log)
    try:
        assert b"lbproxy_replica" not in run(telemetry.page())[0]
        telemetry.watched.replicas = lambda: exchanged(other("lb-2"))
        assert b'lbproxy_replica_in_flight{replica="lb-2"} 4.0' in run(telemetry.page())[0]
    finally:
        log.close()
