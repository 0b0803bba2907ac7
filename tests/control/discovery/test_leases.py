# SPDX-License-Identifier: Apache-2.0
"""Endpoints that register themselves: how long they stay, and over what. All time is passed in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbproxy.config.parse import parse, read_ttl, with_endpoint, with_endpoints
from lbproxy.config.text import ConfigError
from lbproxy.config.tree import MAX_ENDPOINTS, Settings
from lbproxy.control.discovery.overlay import LEASES_LOOK_S, Lease, NotLeasedError, Overlay, UnknownEntryError

FILE = "endpoints: [{url: http://10.0.0.1:8000, name: e1}]"
GPU = {"url": "http://10.0.0.7:8000", "name": "gpu"}


def settings(text: str = FILE) -> Settings:
    return parse(text, environ={})


def registered(now: float = 0.0, ttl_s: float = 30.0, text: str = FILE) -> tuple[Overlay, Settings]:
    overlay, changed, is_new = Overlay().register(settings(text), GPU, Lease.begin(ttl_s, now))
    assert is_new
    return overlay, changed


def names(changed: Settings) -> list[str]:
    return [one.name for one in changed.endpoints]


def test_it_stays_as_long_as_it_is_renewed() -> None:
    overlay, now_in_force = registered()
    assert names(now_in_force) == ["e1", "gpu"]
    for now in (10.0, 35.0, 64.9):
        assert overlay.ended(now, now) == []
        assert overlay.renew(now_in_force, GPU, 30.0, now) == "gpu"
        assert overlay.rest_s("gpu", now) == 30.0
    assert overlay.ended(94.8, 94.8) == []
    assert overlay.ended(94.9, 94.9) == ["gpu"]
    assert overlay.renew(now_in_force, GPU, 30.0, 94.9) is None, "it is about to be removed"
    _, left = overlay.remove(now_in_force, "gpu")
    assert names(left) == ["e1"]


def test_a_renewal_makes_nothing_anew() -> None:
    """But another time to live holds at once."""
    overlay, now_in_force = registered()
    before = overlay.added["gpu"]
    assert overlay.renew(now_in_force, dict(reversed(GPU.items())), 5.0, 1.0) == "gpu"
    assert overlay.added["gpu"] is before
    assert overlay.ended(6.0, 6.0) == ["gpu"]


@pytest.mark.parametrize(
    "entry",
    [
        GPU | {"url": "http://10.0.0.8:8000"},
        GPU | {"weight": 2},
        {"url": "http://10.0.0.7:8000"},
        GPU | {"weight": "no"},
        {"url": "http://10.0.0.1:8000", "name": "e1"},
        {},
    ],
)
def test_what_says_something_else_is_no_renewal(entry: dict[str, object]) -> None:
    overlay, now_in_force = registered()
    assert overlay.renew(now_in_force, entry, 30.0, 1.0) is None


def test_another_url_under_the_name_replaces_it() -> None:
    overlay, now_in_force = registered()
    other = GPU | {"url": "http://10.0.0.8:8000"}
    overlay, now_in_force, is_new = overlay.register(now_in_force, other, Lease.begin(30.0, 20.0))
    assert not is_new
    assert [one.url for one in now_in_force.endpoints] == ["http://10.0.0.1:8000", "http://10.0.0.8:8000"]
    assert overlay.ended(45.0, 45.0) == []
    assert overlay.renew(now_in_force, GPU, 30.0, 21.0) is None, "the old one takes its name back only as a new one"


def test_only_what_registered_itself_by_a_url_is_removed_by_it() -> None:
    """Not who took its name since, and what an operator or the file has by that name."""
    overlay, now_in_force = registered()
    overlay.check_registered(now_in_force, "gpu", "http://10.0.0.7:8000")
    other = GPU | {"url": "http://10.0.0.8:8000"}
    replaced, then, _ = overlay.register(now_in_force, other, Lease.begin(30.0, 20.0))
    added, and_added = Overlay().add(settings(FILE), GPU, keep=False)
    filed = settings("endpoints: [{url: http://10.0.0.7:8000, name: gpu}]")
    for one, where in ((replaced, then), (added, and_added), (Overlay(), filed)):
        with pytest.raises(NotLeasedError):
            one.check_registered(where, "gpu", "http://10.0.0.7:8000")
    with pytest.raises(UnknownEntryError):
        overlay.check_registered(now_in_force, "other", "http://10.0.0.7:8000")


def test_a_name_without_a_lease_is_not_taken_and_an_address_neither() -> None:
    overlay, now_in_force = registered()
    overlay, now_in_force = overlay.add(now_in_force, {"url": "http://10.0.0.9:8000", "name": "added"}, keep=False)
    for name in ("e1", "added"):
        with pytest.raises(NotLeasedError):
            overlay.register(now_in_force, {"url": "http://10.0.0.7:9", "name": name}, Lease.begin(30.0, 0.0))
    for url in ("http://10.0.0.1:8000", "http://10.0.0.7:8000"):
        with pytest.raises(ConfigError, match="another url"):
            overlay.register(now_in_force, {"url": url, "name": "new"}, Lease.begin(30.0, 0.0))
    with pytest.raises(ConfigError, match="no files"):
        overlay.register(now_in_force, {"url": "file:/etc/passwd", "name": "new"}, Lease.begin(30.0, 0.0))


def test_the_last_one_ends_too_but_an_endpoint_without_a_lease_is_not_removed_as_the_last() -> None:
    overlay, alone = registered(text="endpoints: []")
    assert names(alone) == ["gpu"]
    overlay, none = overlay.remove(alone, "gpu")
    assert names(none) == []
    with pytest.raises(UnknownEntryError):
        overlay.remove(none, "gpu")
    overlay, both = registered()
    with pytest.raises(ConfigError, match="at least one"):
        overlay.remove(both, "gpu", "e1")
    overlay, one = overlay.remove(both, "gpu")
    with pytest.raises(ConfigError, match="at least one"):
        overlay.remove(one, "e1")


def test_a_reload_keeps_it_with_its_time_unless_the_file_has_it() -> None:
    overlay, now_in_force = registered()
    after, fresh = overlay.over(now_in_force, settings("endpoints: [http://10.0.0.5:8000]"))
    assert names(fresh) == ["10.0.0.5:8000", "gpu"]
    assert after.rest_s("gpu", 10.0) == 20.0
    assert overlay.renew(fresh, GPU, 30.0, 10.0) == after.renew(fresh, GPU, 30.0, 10.0) == "gpu"
    after, fresh = overlay.over(now_in_force, settings("endpoints: [{url: http://10.0.0.7:8000, name: gpu}]"))
    assert (names(fresh), after.lease_of("gpu")) == (["gpu"], None)
    with pytest.raises(NotLeasedError):
        after.register(fresh, GPU, Lease.begin(30.0, 0.0))


def test_what_registered_and_does_not_fit_any_more_does_not_keep_a_reload_out(caplog: pytest.LogCaptureFixture) -> None:
    """It says so when it renews; what an operator added still does."""
    own = "\nengines: {own: {running: own_running}}"
    overlay, now_in_force = Overlay(), settings(FILE + own)
    for entry in (GPU, {"url": "http://10.0.0.8:8000", "engine": "own"}):
        overlay, now_in_force, _ = overlay.register(now_in_force, entry, Lease.begin(30.0, 5.0))
    after, fresh = overlay.over(now_in_force, settings())
    assert (names(fresh), after.rest_s("gpu", 10.0)) == (["e1", "gpu"], 25.0)
    assert "an endpoint that registered itself is left out: engine: expected" in caplog.text
    overlay, now_in_force = overlay.add(now_in_force, {"url": "http://10.0.0.9:1", "engine": "own"}, keep=True)
    with pytest.raises(ConfigError, match="engine: expected"):
        overlay.over(now_in_force, settings())


def test_a_process_after_this_one_begins_its_leases_anew() -> None:
    overlay, now_in_force = registered(now=100.0)
    overlay, now_in_force = overlay.add(now_in_force, {"url": "http://10.0.0.9:8000"}, keep=True)
    lines = overlay.leased
    assert len(lines) == 1
    assert "\n" not in lines[0]
    after, there = Overlay.inherited(settings(), lines, 7.0)
    assert (names(there), after.rest_s("gpu", 7.0)) == (["e1", "gpu"], 30.0)
    assert after.renew(there, GPU, 30.0, 8.0) == "gpu"


def test_of_what_is_handed_over_only_what_still_fits_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    """The settings may be others by then, and the version."""
    overlay, now_in_force = registered()
    other = {"url": "http://10.0.0.8:8000"}
    overlay, now_in_force, _ = overlay.register(now_in_force, other, Lease.begin(30.0, 0.0))
    lines = ["", "{}", "[1,2,3]", "nonsense", *overlay.leased]
    after, there = Overlay.inherited(settings("endpoints: [{url: http://10.0.0.2:8000, name: gpu}]"), lines, 0.0)
    assert names(there) == ["gpu", "10.0.0.8:8000"]
    assert list(after.added) == ["10.0.0.8:8000"]
    assert "another name than endpoints[0]" in caplog.text


def test_who_could_not_be_heard_did_not_fail_to_renew() -> None:
    """The process stood still for a minute: a renewal may wait to be read."""
    overlay, _ = registered()
    assert overlay.ended(60.0, 0.5) == []
    assert overlay.rest_s("gpu", 60.0) == pytest.approx(30.0 - 0.5 - 2 * LEASES_LOOK_S)
    assert overlay.ended(61.0, 60.0) == [], "no time is given twice"
    assert overlay.ended(89.0, 88.5) == ["gpu"]


def test_there_are_no_more_than_there_may_be_endpoints() -> None:
    many = "endpoints:\n" + "".join(f"  - http://h{n}\n" for n in range(MAX_ENDPOINTS))
    with pytest.raises(ConfigError, match="1 to 1024"):
        Overlay().register(settings(many), GPU, Lease.begin(30.0, 0.0))


OTHERS = (
    "endpoints: [{url: http://10.0.0.1:1, name: a}, {url: https://b:1, models: [x], model: m, kv_events: 'tcp://b:5'}]"
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "url": st.sampled_from(
            ["10.0.0.1:1", "10.0.0.1:8080", "127.0.0.1:8080", "b:1", "dns+http://b:1", "unix:/a"]
        ).map(lambda url: url if ":/" in url else f"http://{url}"),
        "name": st.sampled_from(["a", "b:1", "c", ""]),
        "models": st.just(["x"]),
        "model": st.sampled_from(["m", "n", 5]),
        "kv_events": st.sampled_from(["tcp://b:5", "tcp://c:5", "5"]),
        "tls": st.just({"verify": False}),
        "engine": st.sampled_from(["vllm", "nonsense"]),
    },
)


@given(ENTRY)
def test_one_more_endpoint_is_accepted_or_refused_as_if_all_were_read(entry: dict[str, object]) -> None:
    """Read alone, and compared with the others: of 1,000 endpoints to read all took 5 ms for each that registers."""

    def outcome(make: Callable[[], Settings]) -> object:
        try:
            return make()
        except ConfigError as error:
            return error.problems

    before = settings(OTHERS)
    whole = outcome(lambda: with_endpoints(before, [*before.endpoints, entry], source="x"))
    assert outcome(lambda: with_endpoint(before, entry, source="x")) == whole


@pytest.mark.parametrize("text", ["30s", 30, "30", 30.0, "500ms", "25h", "-1s", "", None, True, [], "1s1s"])
def test_a_time_to_live_is_a_duration(text: object) -> None:
    if text in ("30s", 30, "30"):
        assert read_ttl(text) == 30.0
    else:
        with pytest.raises(ConfigError, match="ttl: expected a duration"):
            read_ttl(text)


@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(0, 2)), max_size=30))
def test_exactly_those_end_that_were_not_renewed_for_their_time(steps: list[tuple[float, int]]) -> None:
    entries = [{"url": f"http://10.0.1.{n}:8000", "name": f"g{n}"} for n in range(3)]
    overlay, in_force = Overlay(), settings("endpoints: []")
    last: dict[str, float] = {}
    now = 0.0
    for passed_s, which in steps:
        now += passed_s
        ended = overlay.ended(now, now)
        assert sorted(ended) == sorted(name for name, at in last.items() if now >= at + 30.0)
        if ended:
            overlay, in_force = overlay.remove(in_force, *ended)
            for name in ended:
                del last[name]
        entry = entries[which]
        if overlay.renew(in_force, entry, 30.0, now) is None:
            assert entry["name"] not in last
            overlay, in_force, is_new = overlay.register(in_force, entry, Lease.begin(30.0, now))
            assert is_new
        last[entry["name"]] = now
        assert sorted(names(in_force)) == sorted(last)
