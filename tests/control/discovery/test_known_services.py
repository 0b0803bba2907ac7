# SPDX-License-Identifier: Apache-2.0
"""What is believed of SRV records and of their targets, without sockets."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from lbproxy.config.parse import parse
from lbproxy.config.sections.endpoints import EndpointSettings
from lbproxy.config.tree import MAX_ENDPOINTS
from lbproxy.control.discovery.dns_answers import (
    EMPTY,
    FAILED,
    NXDOMAIN,
    OK,
    TIMEOUT,
    DnsAnswer,
    Lookup,
    Services,
    SrvRecord,
    answer,
)
from lbproxy.control.discovery.known_names import MAX_TARGETS, KnownService, known_of

NAME = "srv+http://_vllm._tcp.llm.test"
NOBODY = Lookup(DnsAnswer(NXDOMAIN, detail="no such name"), DnsAnswer(NXDOMAIN, detail="no such name"))
SILENCE = Lookup(DnsAnswer(TIMEOUT, detail="silence"), DnsAnswer(TIMEOUT, detail="silence"))


def says(*records: str) -> Services:
    """Of records as `priority weight port target`."""
    read = [record.split() for record in records]
    return Services(OK, tuple(sorted(SrvRecord(int(p), int(w), int(port), t) for p, w, port, t in read)))


def at(*addresses: str) -> Lookup:
    """A good answer about both families."""
    v4 = [one for one in addresses if ":" not in one]
    v6 = [one for one in addresses if ":" in one]
    return Lookup(answer(v4), answer(v6))


class Service(KnownService):
    """One of a small zone that a test may change."""

    def __init__(self, text: str = NAME, more: str = "") -> None:
        super().__init__(parse(f"endpoints: [{{url: '{text}'{more}}}]", environ={}).endpoints[0])
        self.zone = {"a.llm.test": at("10.0.0.1"), "b.llm.test": at("10.0.0.2"), "c.llm.test": at("10.0.0.3")}
        self.down: Collection[str] = ()

    def told(self, services: Services) -> list[str]:
        lookups = {target: self.zone.get(target, NOBODY) for target in self.targets(services)}
        self.hear(services, lookups, lambda: self.down)
        return self.authorities


def test_port_and_weight_are_the_records() -> None:
    service = Service()
    service.zone["b.llm.test"] = at("10.0.0.9", "fd00::1")
    assert service.told(says("0 3 8000 a.llm.test", "0 0 8001 b.llm.test", "0 1 8002 a.llm.test")) == [
        *("10.0.0.9:8001", "[fd00::1]:8001", "10.0.0.1:8002", "10.0.0.1:8000"),
    ]
    assert {one.authority: one.weight for one in service.members} == {
        "10.0.0.1:8000": 3.0,
        "10.0.0.1:8002": 1.0,
        "10.0.0.9:8001": 1.0,
        "[fd00::1]:8001": 1.0,
    }
    assert (service.problem, service.results) == (None, {OK: 1})


TIERS = ("10 0 8000 a.llm.test", "20 0 8000 b.llm.test", "30 0 8000 c.llm.test")


def test_the_lowest_priority_that_answers_counts() -> None:
    service = Service()
    assert service.told(says(*TIERS)) == ["10.0.0.1:8000"]
    service.down = ["10.0.0.1:8000"]
    assert service.told(says(*TIERS)) == ["10.0.0.1:8000", "10.0.0.2:8000"], "the next one beside it, until it is back"
    service.down = ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert len(service.told(says(*TIERS))) == 3
    service.down = ["10.0.0.2:8000"]
    assert service.told(says(*TIERS)) == ["10.0.0.1:8000"]


def test_one_that_is_up_keeps_the_next_priority_away() -> None:
    service = Service()
    service.down = ["10.0.0.1:8000"]
    both = says("10 0 8000 a.llm.test", "10 0 8000 b.llm.test", "20 0 8000 c.llm.test")
    assert service.told(both) == ["10.0.0.1:8000", "10.0.0.2:8000"]


def test_a_priority_without_addresses_does_not_count() -> None:
    service = Service()
    del service.zone["a.llm.test"]
    assert service.told(says(*TIERS)) == ["10.0.0.2:8000"]
    assert service.problem is None


def test_a_target_that_vanishes_stays_while_it_is_up() -> None:
    """The same two witnesses as for a name's addresses."""
    service, records = Service(), says("0 0 8000 a.llm.test", "0 0 8000 b.llm.test")
    service.told(records)
    del service.zone["a.llm.test"]
    for _ in range(5):
        assert service.told(records) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    service.down = ["10.0.0.1:8000"]
    assert service.told(records) == ["10.0.0.2:8000"]


def test_a_target_that_cannot_be_asked_for_stays() -> None:
    service, records = Service(), says("0 0 8000 a.llm.test")
    service.told(records)
    service.zone["a.llm.test"], service.down = SILENCE, ["10.0.0.1:8000"]
    for _ in range(9):
        assert service.told(records) == ["10.0.0.1:8000"]
    assert service.problem == "a.llm.test: silence"
    assert service.results == {OK: 1, TIMEOUT: 9}


def test_a_record_that_is_gone_is_gone_at_once() -> None:
    service = Service()
    service.told(says("0 0 8000 a.llm.test", "0 0 8000 b.llm.test"))
    assert service.told(says("0 0 8000 b.llm.test")) == ["10.0.0.2:8000"]


def test_failures_change_nothing_but_targets_are_followed() -> None:
    service = Service()
    service.told(says("0 0 8000 a.llm.test"))
    service.zone["a.llm.test"] = at("10.0.0.7")
    for result in (TIMEOUT, FAILED):
        assert service.told(Services(result, detail="because")) == ["10.0.0.7:8000"]
    assert service.problem == "because"


@pytest.mark.parametrize("result", [EMPTY, NXDOMAIN])
def test_no_records_are_believed_at_the_third_time_of_those_that_are_down(result: str) -> None:
    service, nothing = Service(), Services(result, detail="none")
    service.told(says("0 0 8000 a.llm.test", "0 0 8000 b.llm.test"))
    service.down = ["10.0.0.1:8000"]
    assert len(service.told(nothing)) == 2
    assert len(service.told(nothing)) == 2
    assert service.told(nothing) == ["10.0.0.2:8000"]
    assert service.told(says("0 0 8000 a.llm.test")) == ["10.0.0.1:8000"]


def test_everything_is_bounded() -> None:
    service = Service()
    hosts = [f"h{n}.llm.test" for n in range(MAX_TARGETS + 50)]
    service.zone = {host: at(*(f"10.{n >> 8}.{n & 255}.{i}" for i in range(1, 21))) for n, host in enumerate(hosts)}
    authorities = service.told(says(*(f"0 0 8000 {host}" for host in hosts)))
    assert len(authorities) == len(set(authorities)) == MAX_ENDPOINTS
    assert service.found == 20 * MAX_TARGETS


def test_lbproxy_itself_is_no_target() -> None:
    settings = parse(f"listen: 10.0.0.1:8000\nendpoints: ['{NAME}']", environ={})
    service = Service()
    service._own = [settings.listen]
    assert service.told(says("0 0 8000 a.llm.test", "0 0 8001 a.llm.test")) == ["10.0.0.1:8001"]


def test_with_tls_targets_are_of_the_services_domain() -> None:
    """Else a forged answer could name any server that has a certificate of its own name."""
    records = says("0 0 8000 a.llm.test", "0 0 8000 b.evil.test", "0 0 8000 c.evilllm.test")
    service = Service("srv+https://_vllm._tcp.llm.test")
    service.zone["b.evil.test"] = at("10.6.6.6")
    assert service.targets(records) == ["a.llm.test"]
    assert service.told(records) == ["10.0.0.1:8000"]
    assert [one.found_by for one in service.members] == ["a.llm.test"]
    alone = Service("srv+https://_vllm._tcp.llm.test")
    assert alone.told(says("0 0 8000 b.evil.test")) == []
    assert alone.problem == "none of its records' targets is in llm.test, and tls.server_name is not set"
    assert alone.results == {FAILED: 1}
    named = Service("srv+https://_vllm._tcp.llm.test", ", tls: {server_name: llm.test}")
    assert named.targets(records) == ["a.llm.test", "b.evil.test", "c.evilllm.test"]


def test_what_is_known_outlives_other_settings_of_the_name() -> None:
    before = Service()
    assert before.told(says("0 0 8000 a.llm.test", "1 0 8001 b.llm.test"))
    after = known_of(EndpointSettings(url=NAME, weight=2.0), (), [before])
    assert after.entry.weight == 2.0
    assert after.members == before.members
    assert after.results == {}, "it is asked again"
    other = known_of(EndpointSettings(url="srv+http://other.test"), (), [before])
    assert other.members == []
