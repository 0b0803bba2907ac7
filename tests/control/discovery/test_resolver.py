# SPDX-License-Identifier: Apache-2.0
"""Lookups against a nameserver of which the tests decide every answer."""

from __future__ import annotations

import asyncio
import threading

import pytest

from lbproxy.config.sections.endpoints import DnsSettings
from lbproxy.control.discovery.dns_answers import EMPTY, FAILED, NXDOMAIN, OK, TIMEOUT, Lookup
from lbproxy.control.discovery.resolver import Resolver, addresses_in
from tests.support.aio import run, until
from tests.support.dns import DnsServer, Says

NAME = "vllm.test"
THOUSAND = [f"10.0.{n // 250}.{n % 250 + 1}" for n in range(1000)]


async def lookup(
    server: DnsServer, *, timeout_s: float = 5.0, name: str = NAME, servers: tuple[str, ...] = ()
) -> Lookup:
    settings = DnsSettings(nameservers=servers or (server.address,), timeout=timeout_s)
    resolver = Resolver(settings, lambda: "")
    try:
        return await resolver.lookup(name)
    finally:
        resolver.close()


def ask(says: Says, *, timeout_s: float = 5.0, **more: Says) -> tuple[Lookup, list[str]]:
    async def main() -> tuple[Lookup, list[str]]:
        async with DnsServer({NAME: says, **{key.replace("_", "."): value for key, value in more.items()}}) as server:
            return await lookup(server, timeout_s=timeout_s), server.queries

    return run(main())


def test_both_families_are_asked_in_parallel() -> None:
    (v4, v6), queries = ask(Says(a=["10.0.0.1", "10.0.0.2"], aaaa=["fd00::1"]))
    assert (v4.result, v4.addresses) == (OK, ("10.0.0.1", "10.0.0.2"))
    assert (v6.result, v6.addresses) == (OK, ("fd00::1",))
    assert sorted(queries) == [f"udp A {NAME}", f"udp AAAA {NAME}"]


def test_only_ipv6() -> None:
    (v4, v6), _ = ask(Says(aaaa=["fd00::1"]))
    assert (v4.result, v6.addresses) == (EMPTY, ("fd00::1",))


@pytest.mark.parametrize(
    ("says", "result"),
    [
        (Says(), EMPTY),
        (Says(rcode="NXDOMAIN"), NXDOMAIN),
        (Says(rcode="SERVFAIL"), FAILED),
        (Says(rcode="REFUSED"), FAILED),
        (Says(rcode="FORMERR"), FAILED),
        (Says(cname=NAME), FAILED),
        (Says(cname="gone.test"), EMPTY),
    ],
    ids=str,
)
def test_what_is_no_address(says: Says, result: str) -> None:
    for answer in ask(says)[0]:
        assert (answer.result, answer.addresses) == (result, ())
        assert answer.detail


@pytest.mark.parametrize("says", [Says(silent=True), Says(garbage=True)], ids=str)
def test_silence_and_garbage_end_with_the_time_out(says: Says) -> None:
    """Garbage may be a forger's, so that the real answer is waited for."""
    (v4, _), queries = ask(says, timeout_s=1.0)
    assert v4.result == TIMEOUT
    assert len(queries) > 2, "each nameserver is asked again"


def test_a_cname_is_followed() -> None:
    (v4, _), _ = ask(Says(cname="other.test"), other_test=Says(a=["10.0.0.1"]))
    assert v4.addresses == ("10.0.0.1",)


def test_a_long_answer_comes_by_tcp() -> None:
    (v4, _), queries = ask(Says(a=THOUSAND))
    assert sorted(v4.addresses) == sorted(THOUSAND)
    assert f"tcp A {NAME}" in queries


def test_a_dead_nameserver_leaves_time_for_the_next() -> None:
    async def main() -> None:
        async with DnsServer({NAME: Says(silent=True)}) as dead, DnsServer({NAME: Says(a=["10.0.0.1"])}) as good:
            found = await lookup(good, servers=(dead.address, good.address), timeout_s=2.0)
            assert found.v4.addresses == ("10.0.0.1",)
            assert dead.queries

    run(main())


def test_a_name_too_long_for_dns_is_a_failure() -> None:
    async def main() -> None:
        async with DnsServer() as server:
            assert (await lookup(server, name=".".join(["a" * 63] * 4))).v4.result == FAILED

    run(main())


def test_lookups_do_not_wait_for_each_other_and_end_with_the_resolver() -> None:
    async def main() -> None:
        async with DnsServer({"hung.test": Says(silent=True), NAME: Says(a=["10.0.0.1"])}) as server:
            resolver = Resolver(DnsSettings(nameservers=(server.address,), timeout=3600.0), lambda: "")
            async with asyncio.TaskGroup() as group:
                hung = group.create_task(resolver.lookup("hung.test"))
                await until(lambda: server.queries)
                assert (await resolver.lookup(NAME)).v4.addresses == ("10.0.0.1",)
                hung.cancel()
            resolver.close()

    run(main())
    assert "lbproxy-dns" not in {thread.name for thread in threading.enumerate()}


# --- The machine's own way --------------------------------------------------------------------------------------------

HOSTS = """
127.0.0.1   localhost
10.0.0.1    GPU-1 gpu-1.example # vllm.test
::1         localhost
fd00::1     gpu-1
nonsense    gpu-1
"""


@pytest.mark.parametrize(
    ("name", "addresses"),
    [
        ("gpu-1", ["10.0.0.1", "fd00::1"]),
        ("gpu-1.example", ["10.0.0.1"]),
        ("localhost", ["127.0.0.1", "::1"]),
        ("gpu", []),
        (NAME, []),
    ],
)
def test_names_of_a_hosts_file(name: str, addresses: list[str]) -> None:
    assert list(addresses_in(HOSTS, name)) == addresses


def test_the_hosts_file_comes_first_and_is_not_asked_when_nameservers_are_set() -> None:
    async def main() -> None:
        hosts = "10.0.0.9 vllm.test\nfd00::9 vllm.test\n"
        own = Resolver(DnsSettings(), lambda: hosts)
        found = await own.lookup(NAME)
        assert (found.v4.addresses, found.v6.addresses) == (("10.0.0.9",), ("fd00::9",))
        own.close()
        async with DnsServer({NAME: Says(a=["10.0.0.1"])}) as server:
            told = Resolver(DnsSettings(nameservers=(server.address,)), lambda: hosts)
            assert (await told.lookup(NAME)).v4.addresses == ("10.0.0.1",)
            told.close()

    run(main())
