# SPDX-License-Identifier: Apache-2.0
"""Unix sockets in the settings: where lbproxy listens, and where model servers do."""

from __future__ import annotations

import pytest

from lbproxy.config.sections.clients import Address
from lbproxy.config.tree import Settings
from tests.config.reading import MINIMAL, only_problem, read


def with_endpoints(text: str) -> str:
    return text if "endpoints" in text else f"{text}\n{MINIMAL}"


def settings(text: str) -> Settings:
    return read(with_endpoints(text))


def problem(text: str) -> str:
    return only_problem(with_endpoints(text))


@pytest.mark.parametrize(
    ("written", "path", "mode"),
    [
        ("unix:/run/lbproxy.sock", "/run/lbproxy.sock", 0o660),
        ("'unix:///run//a/../lbproxy.sock'", "/run/lbproxy.sock", 0o660),
        ("{unix: /run/lbproxy.sock}", "/run/lbproxy.sock", 0o660),
        ("{unix: /run/lbproxy.sock, mode: 0666}", "/run/lbproxy.sock", 0o666),
        ("{unix: /run/lbproxy.sock, mode: 600}", "/run/lbproxy.sock", 0o600),
        ("{unix: /run/lbproxy.sock, mode: '0o770'}", "/run/lbproxy.sock", 0o770),
    ],
)
@pytest.mark.parametrize("key", ["listen", "admin"])
def test_lbproxy_listens_on_a_path(key: str, written: str, path: str, mode: int) -> None:
    address = getattr(settings(f"{key}: {written}"), key)
    assert isinstance(address, Address)
    assert (address.unix, address.file_mode, str(address)) == (path, mode, f"unix:{path}")


@pytest.mark.parametrize(
    ("written", "wrong"),
    [
        ("unix:run/lbproxy.sock", "listen.unix: expected an absolute path of 2 to 107 visible ASCII characters"),
        ("'unix:'", "listen.unix: expected an absolute path"),
        ("unix:/", "listen.unix: expected an absolute path"),
        (f"unix:/{107 * 'x'}", "listen.unix: expected an absolute path"),
        ("'unix:/run/a b'", "listen.unix: expected an absolute path"),
        ("unix:/run/ä", "listen.unix: expected an absolute path"),
        ("{unix: /run/a, port: 80}", "listen: expected host and port, or unix, and not both"),
        ("{unix: /run/a, host: h}", "listen: expected host and port, or unix, and not both"),
        ("{host: h}", "listen: expected host and port, or unix"),
        ("{port: 1}", "listen: expected host and port, or unix"),
        ("{host: h, port: 1, mode: 600}", "listen: expected mode only with unix"),
        ("{unix: /run/a, mode: 888}", "listen.mode: expected three octal digits, such as 0660"),
        ("{unix: /run/a, mode: 06600}", "listen.mode: expected three octal digits, such as 0660"),
        ("{unix: /run/a, mode: true}", "listen.mode: expected three octal digits, such as 0660"),
        ("{host: '', port: 1}", "listen.host: expected an IP address or a host name"),
    ],
)
def test_a_listener_that_cannot_be(written: str, wrong: str) -> None:
    assert problem(f"listen: {written}").startswith(wrong)


def test_both_listeners_on_one_path_are_refused() -> None:
    """The second one would replace the first."""
    found = problem("{listen: 'unix:/run/a', admin: 'unix:/run//a', endpoints: ['http://gpu-1:8000']}")
    assert found.startswith("admin: expected another path: unix:/run/a is taken by listen")
    assert settings("{listen: 'unix:/run/a', admin: 'unix:/run/b', endpoints: ['http://gpu-1:8000']}").admin


def test_an_endpoint_is_a_path() -> None:
    one, two = settings("endpoints: [unix:/run/vllm.sock, {url: 'unix:///run/b.sock', name: b}]").endpoints
    assert (one.url, one.name, one.authority, one.scheme) == (
        *("unix:/run/vllm.sock", "vllm.sock", "unix:/run/vllm.sock", "unix"),
    )
    assert (two.url, two.name) == ("unix:/run/b.sock", "b")
    assert not one.is_name
    assert not one.is_file


@pytest.mark.parametrize(
    ("entries", "wrong"),
    [
        ("[unix:run/a.sock]", "endpoints[0].url: expected http://host:port, dns+http://name:port, srv+http://name"),
        ("[unix:/a.sock, {url: 'unix:/x/../a.sock', name: b}]", "endpoints[1].url: expected another url than"),
        ("[unix:/a/v.sock, unix:/b/v.sock]", "endpoints[1].name: expected another name than endpoints[0] has"),
        ("[{url: unix:/a, tls: {verify: false}}]", "endpoints[0].tls: expected nothing here, since the url is not htt"),
        ("[{url: unix:/a, metrics: ':8002/metrics'}]", "endpoints[0].metrics: expected auto, an absolute path, an ab"),
    ],
)
def test_an_endpoint_that_cannot_be(entries: str, wrong: str) -> None:
    assert problem(f"endpoints: {entries}").startswith(wrong)


def test_an_endpoint_on_a_listener_s_own_path_is_refused() -> None:
    """Such a request would go round for ever."""
    found = problem("{listen: 'unix:/run/a', endpoints: ['unix:/run/a']}")
    assert found.startswith("endpoints[0].url: expected another server than lbproxy's own listen")
