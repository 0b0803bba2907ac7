# SPDX-License-Identifier: Apache-2.0
"""What is believed of a name's answers, without sockets; and which set of endpoints follows."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import pytest

from lbproxy.config.parse import parse
from lbproxy.config.sections.endpoints import EndpointSettings
from lbproxy.config.tree import MAX_ENDPOINTS
from lbproxy.control.discovery.discovery import Discovery
from lbproxy.control.discovery.dns_answers import (
    EMPTY,
    FAILED,
    NXDOMAIN,
    OK,
    TIMEOUT,
    DnsAnswer,
    Lookup,
    answer,
    usable_address,
)
from lbproxy.control.discovery.known_names import KnownName
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.endpoints.health import Health
from tests.support.aio import run, until
from tests.support.pool import Pool, make_balancer


def says(*addresses: str) -> Lookup:
    """A good answer about both families."""
    v4 = tuple(one for one in addresses if ":" not in one)
    v6 = tuple(one for one in addresses if ":" in one)
    return Lookup(answer(v4), answer(v6))


def both(result: str) -> Lookup:
    return Lookup(DnsAnswer(result, detail=f"because {result}"), DnsAnswer(result, detail=f"because {result}"))


class Heard(KnownName):
    """A name that was told answers."""

    def __init__(self, *lookups: Lookup, down: Sequence[str] = ()) -> None:
        super().__init__(EndpointSettings(url="dns+http://vllm:8000"))
        for lookup in lookups:
            self.hear(lookup, lambda: down)

    @property
    def hosts(self) -> list[str]:
        return [authority.removesuffix(":8000") for authority in self.authorities]


# --- One name ---------------------------------------------------------------------------------------------------------


def test_an_answer_is_sorted_without_duplicates() -> None:
    """An answer's order rotates; an endpoint that is told twice would have its in-flight count split."""
    name = Heard(says("10.0.0.10", "fd00::2", "10.0.0.9", "10.0.0.10", "::ffff:10.0.0.9", "FD00:0::1"))
    assert name.hosts == ["10.0.0.9", "10.0.0.10", "[fd00::1]", "[fd00::2]"]
    assert name.problem is None
    assert name.results == {OK: 1}


def test_a_new_answer_replaces_the_old_at_once() -> None:
    assert Heard(says("10.0.0.1", "10.0.0.2"), says("10.0.0.2", "10.0.0.3")).hosts == ["10.0.0.2", "10.0.0.3"]


@pytest.mark.parametrize("result", [TIMEOUT, FAILED])
def test_failures_change_nothing_however_many(result: str) -> None:
    """Even if every endpoint is down: a nameserver that fails says nothing about them."""
    name = Heard(says("10.0.0.1"), *[both(result)] * 20, down=["10.0.0.1:8000"])
    assert name.hosts == ["10.0.0.1"]
    assert name.problem == f"because {result}"
    assert name.results == {OK: 1, result: 20}


@pytest.mark.parametrize("result", [EMPTY, NXDOMAIN])
def test_no_addresses_are_believed_at_the_third_time_of_endpoints_that_are_down(result: str) -> None:
    """The rule of two witnesses: DNS says it is gone, and its health check says so too."""
    first, down = says("10.0.0.1", "10.0.0.2"), ["10.0.0.1:8000"]
    assert Heard(first, *[both(result)] * 2, down=down).hosts == ["10.0.0.1", "10.0.0.2"]
    assert Heard(first, *[both(result)] * 3, down=down).hosts == ["10.0.0.2"]
    assert Heard(first, *[both(result)] * 20).hosts == ["10.0.0.1", "10.0.0.2"]
    assert Heard(first, *[both(result)] * 3, down=down).problem == f"because {result}"


@pytest.mark.parametrize("between", [says("10.0.0.1"), both(TIMEOUT)], ids=str)
def test_three_empty_answers_must_be_in_a_row(between: Lookup) -> None:
    lookups = [says("10.0.0.1"), both(EMPTY), both(EMPTY), between, both(EMPTY), both(EMPTY)]
    assert Heard(*lookups, down=["10.0.0.1:8000"]).hosts == ["10.0.0.1"]


def test_a_name_comes_back_from_an_empty_set() -> None:
    name = Heard(says("10.0.0.1"), *[both(NXDOMAIN)] * 3, down=["10.0.0.1:8000"])
    assert name.hosts == []
    name.hear(says("10.0.0.1"), tuple)
    assert name.hosts == ["10.0.0.1"]
    assert name.problem is None


def test_a_family_that_fails_keeps_what_was_known_of_it() -> None:
    """Some nameservers never answer about AAAA."""
    half = Lookup(answer(("10.0.0.2",)), DnsAnswer(TIMEOUT, detail="slow"))
    name = Heard(says("10.0.0.1", "fd00::1"), half)
    assert name.hosts == ["10.0.0.2", "[fd00::1]"]
    assert name.problem is None


def test_nothing_but_a_failure_and_an_empty_answer_is_a_failure() -> None:
    half = Lookup(DnsAnswer(EMPTY), DnsAnswer(TIMEOUT, detail="slow"))
    name = Heard(says("10.0.0.1", "fd00::1"), *[half] * 5, down=["10.0.0.1:8000", "[fd00::1]:8000"])
    assert name.hosts == ["10.0.0.1", "[fd00::1]"]
    assert (name.results, name.problem) == ({OK: 1, TIMEOUT: 5}, "slow")


def test_nxdomain_about_one_family_does_not_hide_the_other() -> None:
    """Some nameservers say so of a name without AAAA."""
    assert Heard(Lookup(answer(("10.0.0.1",)), DnsAnswer(NXDOMAIN))).hosts == ["10.0.0.1"]


@pytest.mark.parametrize(
    ("text", "usable"),
    [
        *((text, True) for text in ("10.0.0.1", "127.0.0.2", "8.8.8.8", "fd00::1", "::1", "2001:db8::1")),
        *((text, False) for text in ("0.0.0.0", "::", "224.0.0.1", "ff02::1", "255.255.255.255", "169.254.169.254")),
        *((text, False) for text in ("fe80::1", "fe80::1%eth0", "::ffff:169.254.169.254", "::ffff:0.0.0.0", "x", "")),
    ],
)
def test_addresses_where_no_server_can_be(text: str, usable: bool) -> None:
    assert (usable_address(text) is not None) is usable


def test_an_answer_of_unusable_addresses_is_a_failure() -> None:
    """What a filtering nameserver says of everything."""
    name = Heard(says("10.0.0.1"), *[says("0.0.0.0", "::")] * 5, down=["10.0.0.1:8000"])
    assert name.hosts == ["10.0.0.1"]
    assert (name.results, name.problem) == ({OK: 1, FAILED: 5}, "none of its addresses can be used: 0.0.0.0")


def test_a_hostile_answer_is_cut() -> None:
    many = [f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}" for n in range(1, 3000)]
    name = Heard(says(*reversed(many)))
    assert name.hosts == many[:MAX_ENDPOINTS]
    assert name.found == 2999


# --- The complete set -------------------------------------------------------------------------------------------------


class Answers:
    """A resolver that says what it is given."""

    def __init__(self, **lookups: Lookup) -> None:
        self.lookups = lookups
        self.asked = 0

    async def lookup(self, host: str) -> Lookup:
        self.asked += 1
        return self.lookups[host]

    def close(self) -> None:
        pass


def discovery(answers: Answers, *endpoints: str, more: str = "") -> Discovery:
    text = f"{more}\nendpoints:\n" + "".join(f"  - {one}\n" for one in endpoints)
    return Discovery(parse(text, environ={}), random.Random(1), answers)  # type: ignore[arg-type]


def complete(answers: Answers, *endpoints: str, more: str = "") -> list[EndpointSpec]:
    async def main() -> list[EndpointSpec]:
        it = discovery(answers, *endpoints, more=more)
        await it.resolve_once()
        return it.endpoints()

    return asyncio.run(main())


def test_each_address_is_an_endpoint_with_the_keys_of_its_entry() -> None:
    specs = complete(
        Answers(vllm=says("10.0.0.3", "fd00::3")),
        "http://gpu-1:8000",
        "{url: 'dns+http://vllm:8000', engine: vllm, metrics: /m, health: null, kv_cache_tokens: 99000}",
    )
    assert specs[1:] == [
        EndpointSpec(name=at, base_url=f"http://{at}", engine="vllm", metrics="/m", health=None, kv_cache_tokens=99_000)
        for at in ("10.0.0.3:8000", "[fd00::3]:8000")
    ]


def test_a_name_of_the_entry_stands_before_the_address() -> None:
    (spec,) = complete(Answers(vllm=says("10.0.0.3")), "{url: 'dns+http://vllm:8000', name: big}")
    assert (spec.name, spec.base_url) == ("big/10.0.0.3:8000", "http://10.0.0.3:8000")


def test_of_two_entries_with_one_address_the_first_counts_and_fixed_ones_before_all() -> None:
    specs = complete(
        Answers(a=says("10.0.0.1", "10.0.0.2"), b=says("10.0.0.2", "10.0.0.3")),
        *("{url: 'dns+http://a:8000', name: a}", "{url: 'dns+http://b:8000', name: b}"),
        "{url: 'http://10.0.0.1:8000', name: fixed}",
    )
    assert [spec.name for spec in specs] == ["fixed", "a/10.0.0.2:8000", "b/10.0.0.3:8000"]


def test_endpoint_names_stay_distinct() -> None:
    """Even if somebody calls one endpoint by another's address."""
    specs = complete(
        Answers(a=says("10.0.0.1")), "{url: 'http://gpu-1:8000', name: '10.0.0.1:8000'}", "dns+http://a:8000"
    )
    assert [spec.name for spec in specs] == ["10.0.0.1:8000", "a:8000/10.0.0.1:8000"]


def test_lbproxys_own_address_is_left_out() -> None:
    """A request would go round for ever."""
    specs = complete(Answers(a=says("127.0.0.1", "10.0.0.1")), "dns+http://a:8000", more="listen: 0.0.0.0:8000")
    assert [spec.name for spec in specs] == ["10.0.0.1:8000"]


def test_the_set_is_bounded_over_all_names() -> None:
    many = [f"10.0.{n >> 8}.{n & 255}" for n in range(1, 1025)]
    specs = complete(Answers(a=says(*many), b=says("10.1.0.1")), "http://gpu-1:1", "dns+http://a:1", "dns+http://b:1")
    assert len(specs) == MAX_ENDPOINTS
    assert specs[-1].name == many[-2] + ":1"


# --- The loop ---------------------------------------------------------------------------------------------------------


class Followed:
    """A pool that follows one name; every resolution is as fast as it can be."""

    def __init__(self, first: Lookup) -> None:
        self.answers = Answers(vllm=first)
        self.pool = Pool(make_balancer(), [])
        self.sets: list[list[str]] = []
        self.it = discovery(self.answers, "dns+http://vllm:8000", more="dns: {interval: 10ms}")

    def publish(self, complete: Callable[[], list[EndpointSpec]]) -> None:
        specs = complete()
        self.sets.append([spec.name for spec in specs])
        self.pool.endpoints = self.pool.runtime.set_endpoints(specs).added

    async def heard(self, lookup: Lookup, times: int = 3) -> None:
        """Say this until it was heard so often."""
        self.answers.lookups["vllm"] = lookup
        enough = self.answers.asked + times + 1
        await until(lambda: self.answers.asked >= enough)


def follow(steps: Sequence[tuple[Lookup, bool]]) -> Followed:
    """Say each lookup in turn; True: then its endpoints go down."""

    async def main() -> Followed:
        it = Followed(steps[0][0])
        async with asyncio.TaskGroup() as group:
            ((_, loop),) = it.it.loops(it.pool.runtime, it.publish)
            task: asyncio.Task[None] = group.create_task(loop())  # type: ignore[arg-type]
            for lookup, fall in steps:
                await it.heard(lookup)
                for one in it.pool.snapshots() if fall else ():
                    for _ in range(3):
                        it.pool.runtime.report_health(one.endpoint.uid, False, "test")
                    assert it.pool.seen(one.endpoint.name).health is Health.DOWN
            await it.heard(steps[-1][0])
            task.cancel()
        it.pool.connections.close()
        return it

    return run(main())


def test_a_set_is_published_once_for_each_change() -> None:
    one, two = "10.0.0.1:8000", "10.0.0.2:8000"
    it = follow([(says("10.0.0.1"), False), (says("10.0.0.1", "10.0.0.2"), False), (says("10.0.0.2"), False)])
    assert it.sets == [[one], [one, two], [two]]


def test_an_endpoint_that_dns_and_health_call_gone_leaves() -> None:
    up = follow([(says("10.0.0.1"), False), (both(EMPTY), False)])
    assert up.sets == [["10.0.0.1:8000"]]
    down = follow([(says("10.0.0.1"), True), (both(EMPTY), False)])
    assert down.sets == [["10.0.0.1:8000"], []]


def test_what_happens_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lbproxy")
    follow([(says("10.0.0.1"), False), (both(TIMEOUT), False), (both(FAILED), False), (says("10.0.0.2"), False)])
    assert [record.message for record in caplog.records] == [
        "vllm:8000 has 1 addresses: added 10.0.0.1:8000; removed none",
        "vllm:8000 cannot be resolved, so its addresses stay (1 addresses): because timeout",
        "vllm:8000 can be resolved again",
        "vllm:8000 has 1 addresses: added 10.0.0.2:8000; removed 10.0.0.1:8000",
    ]


# --- Other settings ---------------------------------------------------------------------------------------------------


def test_under_other_settings_what_is_known_stays_and_what_is_new_is_asked_first() -> None:
    """A pool whose servers are only written down otherwise must not be empty for a moment."""

    async def main() -> None:
        answers = Answers(old=says("10.0.0.1"), new=says("10.0.0.2"))
        it = discovery(answers, "dns+http://old:8000", "http://10.0.0.2:8000")
        await it.resolve_once()
        text = "endpoints: ['dns+http://old:8000', 'dns+http://new:8000']"
        after = await it.under(parse(text, environ={}))
        assert answers.asked == 2, "the old name was not asked again"
        assert [one.name for one in after.endpoints()] == ["10.0.0.1:8000", "10.0.0.2:8000"]
        assert after.names[0] is it.names[0]
        changed = await it.under(parse("endpoints: [{url: 'dns+http://old:8000', engine: vllm}]", environ={}))
        assert [one.engine for one in changed.endpoints()] == ["vllm"]

    run(main())


def test_a_silent_nameserver_empties_no_pool_that_is_written_down_otherwise() -> None:
    """What is known is known of the name, whatever else its entry says."""

    async def main() -> None:
        answers = Answers(old=says("10.0.0.1", "10.0.0.2"))
        it = discovery(answers, "dns+http://old:8000")
        await it.resolve_once()
        answers.lookups["old"] = both(TIMEOUT)
        text = "endpoints: [{url: 'dns+http://old:8000', engine: vllm, weight: 2}, 'dns+http://old:9000']"
        after = await it.under(parse(text, environ={}))
        assert [one.name for one in after.endpoints()] == [
            f"10.0.0.{n}:{port}" for port in (8000, 9000) for n in (1, 2)
        ]
        assert [one.weight for one in after.endpoints()] == [2.0, 2.0, 1.0, 1.0]
        answers.lookups["old"] = says("10.0.0.2")
        await after.resolve_once()
        assert [one.name for one in after.endpoints()] == ["10.0.0.2:8000", "10.0.0.2:9000"]

    run(main())


def test_a_resolver_is_closed_when_its_successor_has_another() -> None:
    closed: list[object] = []

    class Closing(Answers):
        def close(self) -> None:
            closed.append(self)

    async def main() -> None:
        answers = Closing(old=says("10.0.0.1"))
        it = discovery(answers, "dns+http://old:8000")
        same = await it.under(parse("endpoints: ['http://10.0.0.1:1']", environ={}))
        it.replaced_by(same)
        assert closed == []
        other = await same.under(parse("dns: {interval: 1s}\nendpoints: ['http://10.0.0.1:1']", environ={}))
        same.replaced_by(other)
        assert closed == [answers]
        other.close()

    run(main())
