# SPDX-License-Identifier: Apache-2.0
"""What an endpoint is told of who asks, by `forwarded` and `trusted_proxies`; Via both ways, loops, Max-Forwards."""

from __future__ import annotations

import pytest

from lbproxy.config.parse import parse
from lbproxy.config.sections.proxies import LOOPBACK, MAX_TRUSTED, ForwardedMode, read_networks
from lbproxy.config.text import ConfigError
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.proxy.request.forwarding import MAX_HOPS, UNIX, Forwarding
from lbproxy.proxy.request.headers import RequestFields, read_request_fields
from tests.support.aio import run
from tests.support.endpoint import OK, ScriptedEndpoint
from tests.support.rig import post, rig

CHAIN = (b"X-Forwarded-For", b"192.0.2.1, 192.0.2.2"), (b"X-Forwarded-Proto", b"https"), (b"X-Real-IP", b"192.0.2.1")


def fields_of(*more: tuple[bytes, bytes]) -> RequestFields:
    return read_request_fields([(b"Host", b"lb:8080"), *more])


def told(
    address: str, *more: tuple[bytes, bytes], mode: ForwardedMode = "append", trusted: str = "10.0.0.0/8"
) -> dict[str, str]:
    """Fields by name; without Via."""
    forwarding = Forwarding(mode, read_networks([trusted, "fd00::/8"]), "me")
    lines = forwarding.peer(address, encrypted=False).lines(fields_of(*more)).decode().split("\r\n")
    assert lines[-2:] == ["Via: 1.1 lbproxy (me)", ""]
    return dict(line.split(": ", 1) for line in lines[:-2])


SEEN = {"X-Forwarded-For": "192.0.2.9", "X-Forwarded-Proto": "http", "X-Forwarded-Host": "lb:8080"}


@pytest.mark.parametrize("mode", ["append", "replace"])
def test_what_a_stranger_says_is_dropped(mode: ForwardedMode) -> None:
    assert told("192.0.2.9", *CHAIN, mode=mode) == SEEN
    assert told("192.0.2.9", mode=mode) == SEEN


@pytest.mark.parametrize("address", ["10.1.2.3", "::ffff:10.1.2.3", "fd00::7", "fd00::7%eth0"])
def test_what_a_trusted_proxy_says_stays_and_its_address_is_added(address: str) -> None:
    own = {"10.1.2.3": "10.1.2.3", "::ffff:10.1.2.3": "10.1.2.3"}.get(address, "fd00::7")
    assert told(address, *CHAIN) == {
        "X-Forwarded-For": f"192.0.2.1, 192.0.2.2, {own}",
        "X-Forwarded-Proto": "https",
        "X-Real-IP": "192.0.2.1",
        "X-Forwarded-Host": "lb:8080",
    }
    assert told(address, *CHAIN, mode="replace") == {**SEEN, "X-Forwarded-For": own}


def test_a_unix_socket_has_no_address_and_is_trusted() -> None:
    assert told(UNIX, *CHAIN)["X-Forwarded-For"] == "192.0.2.1, 192.0.2.2"
    assert "X-Forwarded-For" not in told(UNIX)


def test_who_is_unknown_is_not_trusted() -> None:
    """A client that left before it was asked for its address."""
    assert told("", *CHAIN) == {"X-Forwarded-Proto": "http", "X-Forwarded-Host": "lb:8080"}


def test_off_touches_nothing() -> None:
    assert told("192.0.2.9", *CHAIN, mode="off") == {name.decode(): value.decode() for name, value in CHAIN}


def test_the_settings() -> None:
    def forwarded(text: str) -> tuple[object, ...]:
        settings = parse(f"endpoints: [http://a:1]\n{text}", environ={})
        return settings.forwarded, settings.trusted_proxies

    assert forwarded("") == ("append", LOOPBACK)
    assert forwarded("forwarded: off\ntrusted_proxies: []") == ("off", ())
    assert forwarded("trusted_proxies: [10.1.2.3/8, '::1']")[1] == read_networks(["10.0.0.0/8", "::1/128"])
    for wrong in ("forwarded: on", "trusted_proxies: 10.0.0.0/8", "trusted_proxies: [10]", "trusted_proxies: [a]"):
        with pytest.raises(ConfigError):
            forwarded(wrong)
    with pytest.raises(ConfigError):
        forwarded(f"trusted_proxies: {['10.0.0.1'] * (MAX_TRUSTED + 1)}")


# --- Through sockets --------------------------------------------------------------------------------------------------


def test_via_both_ways() -> None:
    async def main() -> None:
        async with (
            ScriptedEndpoint(OK.replace(b"\r\n", b"\r\nVia: 1.0 inner\r\n", 1)) as endpoint,
            rig(endpoint.url) as it,
        ):
            reply = await it.ask(post(more="Via: 1.0 outer\r\n"))
            assert [line for line in reply.head.split(b"\r\n") if b"Via" in line] == [
                b"Via: 1.0 inner",
                b"Via: 1.1 lbproxy",
            ]
            (request,) = endpoint.requests
            vias = [line for line in request.head.split(b"\r\n") if line.lower().startswith(b"via:")]
            assert vias[0] == b"Via: 1.0 outer"
            assert vias[1].startswith(b"Via: 1.1 lbproxy (")
            assert len(vias) == 2

    run(main())


def test_a_loop_ends_at_its_second_turn() -> None:
    """An endpoint that is lbproxy itself, under a name that the settings cannot see through."""

    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            await it.ask(post())
            (request,) = endpoint.requests
            via = next(line for line in request.head.split(b"\r\n") if line.startswith(b"Via:"))
            reply = await it.ask(post(more=via.decode() + "\r\n"))
            assert reply.status == 508
            assert b'"code":"loop_detected"' in reply.body
            assert reply.field("x-should-retry") == "false"
            assert len(endpoint.requests) == 1
            chain = ", ".join(["1.1 lbproxy (other)"] * MAX_HOPS)
            assert (await it.ask(post(more=f"Via: {chain}\r\n"))).status == 200
            assert (await it.ask(post(more=f"Via: {chain}\r\nVia: 1.1 lbproxy\r\n"))).status == 508

    run(main())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/load_lora_adapter"])
def test_a_loop_through_another_process_ends_where_it_began(path: str) -> None:
    """Each process has its own word: two that lead to each other are found when the first is met again."""
    load = b'{"model":"m","lora_name":"a","lora_path":"/a"}'

    async def main() -> None:
        more = "lora_management: true\ntimeouts: {first_byte: 5s}"
        async with (
            rig("http://127.0.0.1:9", more=more) as first,
            rig(f"http://127.0.0.1:{first.port}", more=more) as second,
        ):
            there = EndpointSpec(name="second", base_url=f"http://127.0.0.1:{second.port}")
            first.endpoints = first.runtime.set_endpoints([there]).added
            first.bring_up()
            reply = await first.ask(post(load, path))
            assert reply.status == 508
            assert b"loop_detected" in reply.body
            assert [record.status for record in first.records.requests] == [508, 508]
            assert [record.status for record in second.records.requests] == [508]

    run(main())


def test_max_forwards() -> None:
    def options(value: str, method: str = "OPTIONS") -> bytes:
        return f"{method} /v1/completions/x HTTP/1.1\r\nHost: lb\r\nMax-Forwards: {value}\r\n\r\n".encode()

    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            reply = await it.ask(options("0"))
            assert (reply.status, endpoint.requests) == (200, [])
            assert "OPTIONS" in str(reply.field("allow"))
            assert (await it.ask(options("7"))).status == 200
            assert b"\r\nMax-Forwards: 6\r\n" in endpoint.requests[0].head
            for wrong in ("-1", "x", "1" * 10, ""):
                assert (await it.ask(options(wrong))).status == 400
            assert (await it.ask(options("0", "TRACE"))).status == 405
            assert (await it.ask(options("0", "GET"))).status == 200, "it is about these two methods alone"
            assert b"\r\nMax-Forwards: 0\r\n" in endpoint.requests[1].head
            assert len(endpoint.requests) == 2

    run(main())
