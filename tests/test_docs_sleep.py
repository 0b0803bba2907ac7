# SPDX-License-Identifier: Apache-2.0
"""docs/sleep.md has the states of the state machine, and docs/metrics.md the families of endpoints that may sleep."""

from __future__ import annotations

from collections import Counter

from lbproxy.control.families.features import sleep_families
from lbproxy.control.families.histogram import Histogram
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointUid
from lbproxy.core.endpoints.state import EndpointState, snapshot_of
from lbproxy.core.observed.snapshot import PoolSnapshot
from lbproxy.core.sleeping.phase import Phase
from lbproxy.core.sleeping.sleepers import SleepSnapshot
from tests.support.docs import DOCS, expect_generated, family_lines

MEANINGS = {
    Phase.UNKNOWN: "not asked yet, or down",
    Phase.AWAKE: "takes requests",
    Phase.DRAINING: "gets no new requests; is put to sleep when it has none",
    Phase.FALLING_ASLEEP: "`/sleep` was called",
    Phase.ASLEEP: "sleeps",
    Phase.WAKING: "`/wake_up` was called",
    Phase.OFF: "down, and the webhook can start it",
    Phase.STARTING: "the webhook was called",
}


class FakeSleeping:
    is_needed = True
    waited = 3

    def __init__(self) -> None:
        self.results = Counter({("e", "wake", "ok"): 2, ("e", "sleep", "ok"): 1, ("e", "start", "failed"): 1})
        self.wake_times = Histogram((1.0, 10.0))


def snapshot() -> PoolSnapshot:
    uid = EndpointUid(1)
    state = EndpointState(Endpoint(name="e", base_url="http://e:1", uid=uid), models=None)
    phase = SleepSnapshot(Phase.WAKING, 1.0, 2.0, 1, None)
    return PoolSnapshot([snapshot_of(state, 1.0, False, 0.0)], sleep={uid: phase})


def test_metrics_has_every_family_of_sleep() -> None:
    lines = family_lines(sleep_families(FakeSleeping(), snapshot()))
    expect_generated(DOCS / "metrics.md", "families of sleep", lines)


def test_the_current_state_and_only_that_is_1() -> None:
    families = {one.name: one for one in sleep_families(FakeSleeping(), snapshot())}
    states = {one.labels["state"]: one.value for one in families["lbproxy_endpoint_sleep_state"].samples}
    assert states == {phase.value: float(phase is Phase.WAKING) for phase in Phase}
    assert [one.value for one in families["lbproxy_endpoint_sleep_failures"].samples] == [1.0]


def test_nothing_is_shown_where_no_endpoint_sleeps() -> None:
    sleeping = FakeSleeping()
    sleeping.is_needed = False
    assert list(sleep_families(sleeping, snapshot())) == []


def test_states_are_explained() -> None:
    assert {*MEANINGS} == {*Phase}
    lines = "".join(f"- `{phase.value}`: {meaning}\n" for phase, meaning in MEANINGS.items())
    expect_generated(DOCS / "sleep.md", "sleep states", lines)
