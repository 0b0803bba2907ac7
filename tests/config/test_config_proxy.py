# SPDX-License-Identifier: Apache-2.0
"""`endpoints[].proxy`: what is taken for one, and that its password shows nowhere."""

from __future__ import annotations

import base64
import random

import pytest

from lbproxy.config.parse import parse, with_endpoints, without_secrets
from lbproxy.config.text import ConfigError
from lbproxy.config.tree import Settings
from lbproxy.control.discovery.discovery import Discovery
from lbproxy.core.endpoints.credentials import ApiKey, ForwardProxy
from tests.support.aio import run

HIDDEN = "s3cretword"


def settings(entry: str) -> Settings:
    return parse(f"endpoints:\n  - {entry}\n", environ={"PASSWORD": HIDDEN})


def behind(proxy: str) -> ForwardProxy | None:
    async def main() -> ForwardProxy | None:
        discovery = Discovery(settings(f"{{url: 'https://api.test', proxy: '{proxy}'}}"), random.Random(0))
        try:
            return discovery.endpoints()[0].proxy
        finally:
            discovery.close()

    return run(main())


def basic(text: str) -> ApiKey:
    return ApiKey("Basic " + base64.b64encode(text.encode()).decode())


@pytest.mark.parametrize(
    ("written", "proxy"),
    [
        ("http://Proxy.test:3128", ForwardProxy("proxy.test", 3128)),
        ("http://10.0.0.1:3128/", ForwardProxy("10.0.0.1", 3128)),
        ("http://[fd00::0:1]:3128", ForwardProxy("fd00::1", 3128)),
        ("http://me:${PASSWORD}@proxy:8080", ForwardProxy("proxy", 8080, basic(f"me:{HIDDEN}"))),
        ("http://me@proxy:8080", ForwardProxy("proxy", 8080, basic("me:"))),
        ("http://m%40e:p%3A%2F%C3%A4@proxy:8080", ForwardProxy("proxy", 8080, basic("m@e:p:/ä"))),
        ("http://me:a:b@proxy:8080", ForwardProxy("proxy", 8080, basic("me:a:b"))),
    ],
)
def test_a_proxy_is_an_address_and_perhaps_credentials(written: str, proxy: ForwardProxy) -> None:
    assert behind(written) == proxy


@pytest.mark.parametrize(
    "written",
    [
        f"https://me:{HIDDEN}@proxy:8080",
        f"socks5://me:{HIDDEN}@proxy:1080",
        f"me:{HIDDEN}@proxy:8080",
        f"http://me:{HIDDEN}@proxy",
        f"http://me:{HIDDEN}@proxy:0",
        f"http://me:{HIDDEN}@proxy:8080/path",
        f"http://me:{HIDDEN} @proxy:8080",
        f"http://me:{HIDDEN}%0d%0aX: y@proxy:8080",
        f"http://me:{HIDDEN}%ff@proxy:8080",
        f"http://me:{HIDDEN}%g0@proxy:8080",
        f"http://a%3Ab:{HIDDEN}@proxy:8080",
        f"http://me:{HIDDEN * 200}@proxy:8080",
        f"http://:{HIDDEN}@:8080",
    ],
)
def test_what_is_no_proxy_is_refused_and_not_repeated(written: str) -> None:
    with pytest.raises(ConfigError) as raised:
        settings(f"{{url: 'https://api.test', proxy: '{written}'}}")
    (problem,) = raised.value.problems
    assert problem == "endpoints[0].proxy: expected http://[user:password@]host:port"


@pytest.mark.parametrize("value", ["[1]", "{a: b}", "true", "8080"])
def test_only_text_is_a_proxy(value: str) -> None:
    with pytest.raises(ConfigError, match=r"endpoints\[0\]\.proxy: expected http://\[user:password@\]host:port$"):
        settings(f"{{url: 'https://api.test', proxy: {value}}}")


def test_a_unix_socket_has_no_proxy() -> None:
    with pytest.raises(ConfigError, match="expected nothing here, since the url is a Unix socket"):
        settings("{url: unix:/run/a, proxy: 'http://p:1'}")


def test_the_password_shows_nowhere_and_survives_an_overlay() -> None:
    first = settings(f"{{url: 'https://api.test', proxy: 'http://me:{HIDDEN}@proxy:8080'}}")
    shown = f"{first!r} {first} {first.model_dump()} {first.model_dump_json()} {without_secrets(first)}"
    assert HIDDEN not in shown
    assert base64.b64encode(f"me:{HIDDEN}".encode()).decode() not in shown
    assert "'proxy': 'http://***@proxy:8080'" in str(without_secrets(first)["endpoints"])
    second = with_endpoints(first, [*first.endpoints, "http://b"], source="test")
    assert second.endpoints[0] == first.endpoints[0]
    proxy = behind(f"http://me:{HIDDEN}@proxy:8080")
    assert f"{proxy} {proxy!r}" == "proxy:8080 ForwardProxy(host='proxy', port=8080, credentials=ApiKey(***))"


def test_names_of_header_fields_are_known_by_their_lower_case() -> None:
    (entry,) = settings("{url: 'https://api.test', forward_headers: [OpenAI-Organization, x-a, X-A]}").endpoints
    assert entry.forward_headers == ("openai-organization", "x-a")


@pytest.mark.parametrize("names", ["['a b']", "['x:']", "[Authorization]", "[x-api-key]", "[1]", "x-a", "['é']"])
def test_what_is_no_name_of_a_field_or_is_a_key_is_refused(names: str) -> None:
    with pytest.raises(ConfigError):
        settings(f"{{url: 'https://api.test', forward_headers: {names}}}")
