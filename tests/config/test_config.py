# SPDX-License-Identifier: Apache-2.0
"""Settings: every key has the default that the example says, and a wrong file is told all that is wrong with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from lbproxy.config.descriptions import descriptions
from lbproxy.config.parse import json_schema, parse, parse_endpoints
from lbproxy.config.sections.access import KeySettings, TlsSettings
from lbproxy.config.sections.clients import Address
from lbproxy.config.sections.endpoints import EndpointSettings, EndpointTls
from lbproxy.config.sections.routing import RoutingSettings
from lbproxy.config.text import ConfigError
from lbproxy.config.tree import Settings
from tests.config.reading import MINIMAL, problems, read

ROOT = Path(__file__).parents[2]
EXAMPLE = (ROOT / "config.example.yaml").read_text()


def endpoint(yaml_text: str) -> EndpointSettings:
    return read(f"endpoints:\n  - {yaml_text}\n").endpoints[0]


# --- The tree and its example -----------------------------------------------------------------------------------------


def keys(section: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all keys of the tree; an endpoint's keys stand under `endpoints`."""
    for name, field in section.model_fields.items():
        yield (*path, name)
        # The keys of a mapping are the user's, it is empty; what is null has no keys.
        if get_origin(field.annotation) is dict or field.default == () or field.default is None:
            continue
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel) and not issubclass(part, Address):
                yield from keys(part, (*path, name))


KEYS = list(keys(Settings))


def commented_keys(text: str) -> list[tuple[tuple[str, ...], bool]]:
    """The path of each key of a YAML text in block style, and whether a comment stands right above it."""
    found: list[tuple[tuple[str, ...], bool]] = []
    path: list[tuple[int, str]] = []
    comment = False
    for line in text.splitlines():
        match = re.fullmatch(r"( *(?:- )?)([a-z_]+):(?: .*)?", line)
        if match and not line.lstrip().startswith("#"):
            indent = len(match[1])
            path = [(depth, key) for depth, key in path if depth < indent] + [(indent, match[2])]
            found.append((tuple(key for _, key in path), comment))
        comment = bool(re.search(r"^\s*(- )?#", line))
    return found


def test_example_says_the_defaults() -> None:
    assert read(EXAMPLE) == read(MINIMAL)


def test_example_has_every_key_in_the_order_of_the_tree_with_a_comment() -> None:
    written = commented_keys(EXAMPLE)
    assert [path for path, _ in written] == KEYS
    assert [path for path, comment in written if not comment] == []


def test_every_key_has_a_description() -> None:
    def fields(section: type[BaseModel]) -> Iterator[tuple[str, str | None]]:
        for name in section.model_fields:
            yield f"{section.__name__}.{name}", descriptions(section).get(name)

    sections: set[type[BaseModel]] = {type(value) for _, value in read(MINIMAL) if isinstance(value, BaseModel)}
    sections |= {Settings, EndpointSettings, EndpointTls, KeySettings, TlsSettings}
    assert len(sections) == 28
    assert [name for section in sections for name, text in fields(section) if not text or len(text) < 8] == []


def test_defaults_are_those_of_the_failure_page() -> None:
    got = read(MINIMAL)
    assert (str(got.listen), str(got.admin)) == ("127.0.0.1:8080", "127.0.0.1:9901")
    assert (got.admission.queue_bytes, got.limits.json_body, got.scrape.page) == (256 << 20, 64 << 20, 2 << 20)
    assert (got.scrape.interval, got.health.down_interval, got.timeouts.first_byte) == (0.2, 0.5, 600.0)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        read(MINIMAL).scrape.interval = 1.0


# --- Values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        *(("250ms", 0.25), ("2s", 2.0), ("5m", 300.0), ("1h", 3600.0), ("1.5s", 1.5), ("9ms", 0.009), ("3 s", 3.0)),
        *(("2", 2.0), ("'2'", 2.0), ("0.5", 0.5), ("1e2", 100.0), ("010", 10.0), ("24h", 86400.0), ("1ms", 0.001)),
    ],
)
def test_duration(written: str, seconds: float) -> None:
    got = read(f"{MINIMAL}timeouts: {{connect: {written}}}").timeouts.connect
    assert got == seconds
    assert isinstance(got, float)


@pytest.mark.parametrize(
    "written",
    [
        *("0", "0s", "-1s", "-1", "25h", "0.9ms", ".nan", ".inf", "1e999", "9" * 400),
        *("1d", "1S", "s", "1 s s", "1m30s", "1_000", "0x10", "1:30", "2024-01-01", "'\u0663'"),
        *("true", "null", "''", "[1]", "{a: 1}"),
    ],
)
def test_bad_duration(written: str) -> None:
    (problem,) = problems(f"{MINIMAL}timeouts: {{connect: {written}}}")
    assert problem.startswith(
        "timeouts.connect: expected a duration (250ms, 2s, 5m, 1h, or seconds) from 1ms to 24h, got "
    )
    assert len(problem) < 200


@pytest.mark.parametrize(
    ("written", "size"),
    [("64KiB", 65536), ("2MiB", 2 << 20), ("1GiB", 1 << 30), ("1.5KiB", 1536), ("4096", 4096), ("'4096'", 4096)],
)
def test_size(written: str, size: int) -> None:
    got = read(f"{MINIMAL}limits: {{json_body: 1KiB, body: {written}}}").limits.body
    assert got == size
    assert isinstance(got, int)


@pytest.mark.parametrize("written", ["1023", "2GiB", "1GB", "1k", "0.3KiB", "1024.5", "-1MiB", "true", "null", "1s"])
def test_bad_size(written: str) -> None:
    (problem,) = problems(f"{MINIMAL}limits: {{json_body: 1KiB, body: {written}}}")
    assert problem.startswith("limits.body: expected a size (64KiB, 2MiB, 1GiB, or bytes) from 1KiB to 1GiB, got ")


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("127.0.0.1:0", "127.0.0.1:0"),
        ("'[::1]:8080'", "[::1]:8080"),
        ("'[0:0::1]:8080'", "[::1]:8080"),
        ("Gateway.example:80", "gateway.example:80"),
        ("{host: 0.0.0.0, port: 80}", "0.0.0.0:80"),
        ("{host: '::', port: '80'}", "[::]:80"),
    ],
)
def test_listen(written: str, shown: str) -> None:
    assert str(read(f"{MINIMAL}listen: {written}").listen) == shown


@pytest.mark.parametrize(
    "written",
    [
        *("':80'", "8080", "localhost", "a:b", "a:65536", "::1", "'::1:80'", "'[::g]:80'", "'*:80'", "-a:1"),
        *("1.2.3:80", "256.1.1.1:80", "a b:80", "null"),
        *("{host: a}", "{host: '', port: 1}", "{host: a, port: -1}", "{host: a, port: 1, x: 1}"),
    ],
)
def test_bad_listen(written: str) -> None:
    (problem,) = problems(f"{MINIMAL}listen: {written}")
    assert problem.startswith("listen")


def test_admin_can_be_off() -> None:
    assert read(f"{MINIMAL}admin: null").admin is None


# --- Endpoints --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ("http://gpu-1:8000", "http://gpu-1:8000"),
        ("HTTP://GPU-1/", "http://gpu-1:80"),
        ("http://10.0.0.1:08000", "http://10.0.0.1:8000"),
        ("http://[2001:DB8:0::1]:8000", "http://[2001:db8::1]:8000"),
        ("http://my_service.ns.svc.cluster.local.:1", "http://my_service.ns.svc.cluster.local.:1"),
        ("HTTPS://GPU-1/", "https://gpu-1:443"),
    ],
)
def test_url_is_normalised(written: str, url: str) -> None:
    """Two spellings of one address must be seen to be one: its in-flight count would be split."""
    got = endpoint(f'"{written}"')
    assert got.url == url
    assert got.name == url.rpartition("/")[2]


@pytest.mark.parametrize(
    "written",
    [
        *("", "gpu-1", "gpu-1:8000", "//a:1", "ftp://gpu-1:8000", "http://", "http://:80", "http://[::1"),
        *("http://a:0", "http://a:65536", "http://a:x", "http://a:1 ", "http://a b", "http://a\\\\b"),
        *(
            "http://a//v1",
            "http://a/../v1",
            "http://a/v1?x",
            "http://a?x",
            "http://a#x",
            "http://u@a",
            "http://u:p@a:1",
        ),
        *("http://1.2.3", "http://\u00fc", "http://a..b", "http://" + "a" * 300),
    ],
)
def test_bad_url(written: str) -> None:
    (problem,) = problems(f'endpoints: [{{url: "{written}"}}]')
    assert problem.startswith("endpoints[0].url: expected http://host:port, dns+http://name:port, srv+http://name ")


def test_password_in_a_url_is_not_repeated() -> None:
    """What is refused still goes to a terminal and a log."""
    (problem,) = problems("endpoints: ['http://user:p/ss@word@gpu-1:8000']")
    assert problem.endswith(", got 'http://***@gpu-1:8000'")


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ("dns+http://VLLM:8000", "dns+http://vllm:8000"),
        ("DNS+HTTP://vllm.example./", "dns+http://vllm.example.:80"),
        ("dns+https://vllm.example", "dns+https://vllm.example:443"),
    ],
)
def test_dns_url_is_normalised(written: str, url: str) -> None:
    got = endpoint(written)
    assert (got.url, got.is_name, got.name) == (url, True, url.rpartition("/")[2])
    assert not endpoint("http://vllm:8000").is_name


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ("srv+http://_vllm._tcp.Example", "srv+http://_vllm._tcp.example"),
        ("SRV+HTTPS://vllm.example./", "srv+https://vllm.example."),
    ],
)
def test_srv_url_is_normalised(written: str, url: str) -> None:
    got = endpoint(written)
    assert (got.url, got.is_name, got.is_srv, got.name) == (url, True, True, url.rpartition("/")[2])
    assert not endpoint("dns+http://vllm").is_srv


@pytest.mark.parametrize("written", ["_a._tcp.b:80", "10.0.0.1", "[::1]", "a/v1", "", "u@a", "a b"])
def test_srv_url_says_no_port(written: str) -> None:
    (problem,) = problems(f'endpoints: [{{url: "srv+http://{written}"}}]')
    assert problem.startswith("endpoints[0].url: expected http://host:port, dns+http://name:port, srv+http://name")


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("file:gpus.yaml", "/etc/lb/gpus.yaml"),
        ("file:/srv/gpus.yaml", "/srv/gpus.yaml"),
        ("file:///a/b.json", "/a/b.json"),
    ],
)
def test_a_file_is_relative_to_the_settings(written: str, path: str) -> None:
    got = parse(f"endpoints: ['{written}']", environ={}, folder="/etc/lb").endpoints[0]
    assert (got.path, got.is_file, got.name) == (path, True, path.rpartition("/")[2])


def test_a_files_entry_has_no_other_keys() -> None:
    (problem,) = problems("endpoints: [{url: 'file:a.yaml', name: x, engine: vllm}]")
    assert problem.startswith(
        "endpoints[0]: expected only url and name with a file (its entries have keys of their own)"
    )
    (problem,) = problems("endpoints: ['file:']")
    assert problem.startswith("endpoints[0].url: expected a path")


def in_file(text: str, settings: str = MINIMAL) -> tuple[EndpointSettings, ...]:
    return parse_endpoints(text, environ={"K": "v"}, source="gpus.yaml", folder="/f", settings=read(settings))


def test_a_files_endpoints_are_written_as_in_the_settings() -> None:
    text = "- http://a\n- {url: 'https://b', engine: mine, api_key: '${K}', tls: {ca: ca.pem}}\n- dns+http://c\n"
    first, second, third = in_file(text, MINIMAL + "engines: {mine: {queued: q}}")
    assert (first.url, third.is_name) == ("http://a:80", True)
    assert (second.engine, second.tls.ca) == ("mine", "/f/ca.pem")
    assert second.api_key is not None
    assert in_file('["http://a", {"url": "http://b"}]')[1].url == "http://b:80", "JSON is YAML"
    assert in_file("[]") == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the text: expected a list, got null"),
        ("endpoints: [http://a]", "the text: expected a list, got a mapping"),
        ("[gpu-1]", "[0].url: expected http://host:port"),
        ("[{url: 'http://a', nam: x}]", "[0].nam: unknown key, did you mean name?"),
        ("[{url: 'http://a', api_key: '${NO}'}]", "[0].api_key: environment variable NO is not set"),
        ("['http://a', 'http://a']", "[1].url: expected another url than endpoints[0] has"),
        ("['http://a', 'https://a:80']", "[1].url: expected another url than endpoints[0] has"),
        ("['http://127.0.0.1:8080']", "[0].url: expected another server than lbproxy's own listen"),
        ("['file:b.yaml']", "[0].url: expected no file in a file"),
        ("[", "line 1, column 2: "),
    ],
)
def test_bad_files(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        in_file(text)
    assert error.value.problems[0].startswith(problem)


@pytest.mark.parametrize("written", ["10.0.0.1:8000", "[::1]:8000", "a/v1", ":80", "a:0", "u@a"])
def test_dns_url_without_a_name_is_refused(written: str) -> None:
    for scheme in ("dns+http://", "dns+https://", "dns+"):
        (problem,) = problems(f'endpoints: [{{url: "{scheme}{written}"}}]')
        assert problem.startswith("endpoints[0].url: expected http://host:port, dns+http://name:port")


def test_a_name_has_no_metrics_elsewhere() -> None:
    """One page cannot speak for every address."""
    (problem,) = problems("endpoints: [{url: 'dns+http://a', metrics: 'http://a:1/m'}]")
    assert problem.startswith("endpoints[0].metrics: expected auto, an absolute path, :port/path, or null, got")
    assert endpoint("{url: 'dns+http://a', metrics: ':8002/m'}").metrics == ":8002/m"
    assert endpoint("{url: 'dns+http://a', metrics: /m}").metrics == "/m"


def test_a_name_is_not_also_an_endpoint_or_lbproxy_itself() -> None:
    (problem,) = problems("endpoints: ['http://a:1', 'dns+http://a:1']")
    assert problem.startswith("endpoints[1].name: expected another name")
    (problem,) = problems("endpoints: ['dns+http://localhost:8080']")
    assert problem.startswith("endpoints[0].url: expected another server than lbproxy's own listen")


def test_origins_are_written_as_browsers_do() -> None:
    good = {
        "https://Chat.Example": "https://chat.example",
        "https://a:443": "https://a",
        "http://a:80": "http://a",
        "http://localhost:3000": "http://localhost:3000",
        "http://[::1]:3000": "http://[::1]:3000",
        "app://obsidian.md": "app://obsidian.md",
        "*": "*",
    }
    for written, origin in good.items():
        assert read(f"cors: {{origins: ['{written}']}}\n{MINIMAL}").cors.origins == (origin,)
    assert read(MINIMAL).cors.origins == ()
    for written in (
        "chat.example",
        "https://a/",
        "https://a/b",
        "https://u@a",
        "null",
        "",
        "https://a b",
        "https://*.a",
    ):
        assert "cors.origins[0]: expected" in problems(f"cors: {{origins: ['{written}']}}\n{MINIMAL}")[0]
    assert "alone" in problems(f"cors: {{origins: ['*', 'https://a']}}\n{MINIMAL}")[0]
    assert "at most 100" in problems(f"cors: {{origins: {['http://a'] * 101}}}\n{MINIMAL}")[0]


def test_nameservers_are_normalised() -> None:
    text = "dns: {nameservers: [10.0.0.2, '10.0.0.2:53', '10.0.0.3:5353', 'fd00::0:1', '[fd00::1]:5353', '[fd00::2]']}"
    assert read(MINIMAL + text).dns.nameservers == (
        *("10.0.0.2:53", "10.0.0.3:5353", "[fd00::1]:53", "[fd00::1]:5353", "[fd00::2]:53"),
    )
    assert read(MINIMAL).dns.nameservers is None


def test_bad_nameservers() -> None:
    assert problems(
        f"{MINIMAL}dns: {{nameservers: [dns.example, 10.0.0.2, '1.2.3:53', '10.0.0.1:0', ':53', '']}}"
    ) == tuple(
        f"dns.nameservers[{n}]: expected ip or ip:port, such as 10.0.0.2 or [fd00::2]:53, got '{text}'"
        for n, text in ((0, "dns.example"), (2, "1.2.3:53"), (3, "10.0.0.1:0"), (4, ":53"), (5, ""))
    )
    assert problems(f"{MINIMAL}dns: {{nameservers: []}}") == (
        "dns.nameservers: expected 1 to 8 nameservers, or null, got a list of 0",
    )


@pytest.mark.parametrize(
    "metrics", ["auto", "/metrics", "'/a?b=c'", "http://gpu-1:8002/metrics", "https://a/m", "':8002/m'", "null"]
)
def test_metrics(metrics: str) -> None:
    assert endpoint(f"{{url: 'http://a', metrics: {metrics}}}").metrics == (
        None if metrics == "null" else metrics.strip("'")
    )


@pytest.mark.parametrize(
    "metrics",
    [
        "metrics",
        "''",
        "//evil/x",
        "':0/m'",
        "':65536/m'",
        "':8/m n'",
        "':8'",
        "http://u:p@a/m",
        "'/a b'",
        "'/a#b'",
        "'/a\\n'",
        "3",
        "/ü",
    ],
)
def test_bad_metrics_or_health(metrics: str) -> None:
    quoted = metrics.replace("'", '"')
    for key in ("metrics", "health"):
        (problem,) = problems(f"endpoints: [{{url: 'http://a', {key}: {quoted}}}]")
        assert problem.startswith(f"endpoints[0].{key}: expected ")


@pytest.mark.parametrize("name", ["a b", "ü", "a/b", "x" * 65, "a\\n"])
def test_bad_name(name: str) -> None:
    (problem,) = problems(f'endpoints: [{{url: "http://a", name: "{name}"}}]')
    assert problem.startswith("endpoints[0].name: expected 1 to 64 letters, digits or any of ._:[]-, got ")


def test_models_of_an_endpoint() -> None:
    assert endpoint("{url: 'http://a', models: [Qwen/Qwen3-8B, b, b]}").models == ("Qwen/Qwen3-8B", "b")
    assert endpoint("http://a").models is None
    for wrong in ("[]", "['']", f"['{'x' * 257}']", '["a\\n"]'):
        (problem,) = problems(f"endpoints: [{{url: 'http://a', models: {wrong}}}]")
        assert problem.startswith("endpoints[0].models: expected ")


def test_names_of_models() -> None:
    text = "models: {fast: {to: Qwen/Qwen3-8B}, Qwen/Qwen3-32B: {split: {Qwen/Qwen3-32B: 90, 'new.1': 0.5}}}\n"
    got = read(MINIMAL + text).models
    assert got["fast"].shares == {"Qwen/Qwen3-8B": 1.0}
    assert read(f"{MINIMAL}models: {{fast: Qwen/Qwen3-8B, 'a*': b}}").models["fast"] == got["fast"]
    assert got["Qwen/Qwen3-32B"].shares == {"Qwen/Qwen3-32B": 90.0, "new.1": 0.5}


def test_other_models_may_stand_beside_an_alias_or_alone_and_in_circles() -> None:
    """They are no chains."""
    text = "a: {fallback: [b, c, b], fallback_after: 10s}, b: {fallback: [a]}, x: {to: a, fallback: []}"
    got = read(f"{MINIMAL}models: {{{text}}}").models
    assert (got["a"].fallback, got["a"].fallback_after, got["a"].shares) == (("b", "c"), 10.0, {})
    assert (got["x"].to, got["x"].fallback) == ("a", ())


@pytest.mark.parametrize(
    ("models", "problem"),
    [
        (
            "a: {to: b}, b: {to: c}",
            "models.a.to: expected a model that endpoints serve, not an alias, got 'b'",
        ),
        ("a: {to: a}", "models.a.to: expected a model that endpoints serve"),
        ("x/y: {split: {b: 1, c: 1}}, b: {to: c}", "models['x/y'].split.b: expected a model that endpoints serve"),
        ("a: {}", "models.a: expected `to`, `split` or other settings of a model"),
        ("a: {to: null}", "models.a: expected `to`, `split` or other settings of a model"),
        ("a: {to: b, split: {c: 1}}", "models.a.split: expected either `to` or `split`"),
        ("a: {split: {}}", "models.a.split: expected 1 to 32 models, at least one with a weight above 0"),
        ("a: {split: {b: 0}}", "models.a.split: expected 1 to 32 models, at least one"),
        ("a: {split: {b: -1}}", "models.a.split.b: expected a weight from 0 to 1000000"),
        ("a: {to: ''}", "models.a.to: expected the name of a model"),
        ("a: 3", "models.a: expected a mapping"),
        ("'a*': 'b*'", "models['a*'].to: expected a model that endpoints serve"),
        ("'a*': {split: {'a*': 1}}", "models['a*'].split['a*']: expected a model that endpoints serve"),
        ("a: {too: b}", "models.a.too: unknown key, did you mean to?"),
        ("a: {continues: true}", "models.a.continues: unknown key, did you mean continue?"),
        ("a: {fallback: [a]}", "models.a.fallback[0]: expected another model that endpoints serve, not an alias"),
        ("a: {fallback: [b, c]}, c: {to: d}", "models.a.fallback[1]: expected another model that endpoints serve"),
        ("'a*': {fallback: ['b*']}", "models['a*'].fallback[0]: expected another model that endpoints serve"),
        (
            f"a: {{fallback: [{', '.join(f'm{n}' for n in range(1000))}]}}",
            "models.a.fallback: expected at most 32 models",
        ),
        ("a: {fallback: ['']}", "models.a.fallback: expected the name of a model"),
        ("a: {fallback: b}", "models.a.fallback: expected a list"),
        ("a: {fallback_after: -1}", "models.a.fallback_after: expected a duration"),
        ('"a\\nb": {to: b}', "models, line 2: expected a plain word as the key"),
    ],
)
def test_bad_names_of_models(models: str, problem: str) -> None:
    assert any(one.startswith(problem) for one in problems(f"{MINIMAL}models: {{{models}}}"))


def test_tls_of_an_endpoint() -> None:
    text = "endpoints: [{url: 'https://a', tls: {ca: %s, server_name: GPU.example.}}]"
    assert parse(text % "certs/ca.pem", environ={}, folder="/etc/lb").endpoints[0].tls == EndpointTls(
        ca="/etc/lb/certs/ca.pem", server_name="gpu.example"
    ), "a path is relative to the file that has it"
    assert parse(text % "/ca.pem", environ={}, folder="/etc/lb").endpoints[0].tls.ca == "/ca.pem"
    assert endpoint("https://a").tls.verify, "unless it is switched off by name"


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("url: 'http://a', tls: {verify: false}", "tls: expected nothing here, since the url is not https"),
        ("url: 'https://a', tls: {verify: false, ca: x}", "tls.verify: expected true with tls.ca"),
        ("url: 'https://a', tls: {server_name: 'a b'}", "tls.server_name: expected a host name"),
        ("url: 'https://a', tls: {ca: ''}", "tls.ca: expected a path"),
        ("url: 'https://a', tls: {cert: x}", "tls.cert: unknown key"),
        ("url: 'https://a', weight: 0", "weight: expected a number from 0.001 to 100000"),
        ("url: 'http://a', kv_cache_tokens: 0", "kv_cache_tokens: expected a whole number from 1000 to 1000000000"),
        ("url: 'http://a', kv_cache_tokens: 19.2", "kv_cache_tokens: expected a whole number from 1000 to"),
        ("url: 'http://a', kv_cache_tokens: 64GiB", "kv_cache_tokens: expected a whole number from 1000 to"),
    ],
)
def test_bad_keys_of_an_endpoint(more: str, problem: str) -> None:
    (got,) = problems(f"endpoints: [{{{more}}}]")
    assert got.startswith(f"endpoints[0].{problem}")


@pytest.mark.parametrize(
    "key", ["'sk secret'", "12345678", "[sk-secret]", "{sk-secret: 1}", "'sk-secret${'", "'sk-secret${X}'"]
)
def test_a_key_is_never_repeated(key: str) -> None:
    """What is refused goes to a terminal and a log."""
    with pytest.raises(ConfigError) as error:
        read(f"endpoints: [{{url: 'http://a', api_key: {key}}}]")
    assert error.value.problems[0].startswith("endpoints[0].api_key")
    assert "secret" not in str(error.value)
    assert "1234" not in str(error.value)


def test_a_good_key_is_in_no_repr() -> None:
    got = endpoint("{url: 'http://a', api_key: '${KEY:-sk-secret}'}")
    assert got.api_key is not None
    assert got.api_key.get_secret_value() == "sk-secret"
    assert "secret" not in f"{got!r} {got.model_dump_json()}".replace("SecretStr", "")


def test_number_of_endpoints() -> None:
    def text(count: int) -> str:
        return "endpoints:\n" + "".join(f"  - {{url: 'http://h{i}', engine: vllm, health: /h}}\n" for i in range(count))

    assert len(read(text(1024)).endpoints) == 1024
    assert problems(text(1025)) == ("endpoints: expected 1 to 1024 endpoints, got a list of 1025",)
    none = "endpoints: expected 1 to 1024 endpoints (none only with `admin`), got a list of 0"
    assert problems("{admin: null, endpoints: []}") == (none,)
    assert read("endpoints: []").endpoints == ()
    assert problems("") == ("endpoints: required, but not there",)


def test_a_smaller_body_is_one_for_json_too() -> None:
    """What is to be lowered is memory; it takes one key."""
    for written, both in (("8MiB", 8 << 20), ("1KiB", 1 << 10), (str(1 << 20), 1 << 20)):
        limits = read(f"{MINIMAL}limits: {{body: {written}}}").limits
        assert (limits.body, limits.json_body) == (both, both)
    limits = read(f"{MINIMAL}limits: {{body: 1GiB}}").limits
    assert (limits.body, limits.json_body) == (1 << 30, 64 << 20)
    limits = read(f"{MINIMAL}limits: {{body: 8MiB, json_body: 2MiB}}").limits
    assert (limits.body, limits.json_body) == (8 << 20, 2 << 20)


# --- Keys that contradict each other ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("limits: {json_body: 2MiB, body: 1MiB}", "limits.body: expected at least limits.json_body, got '1MiB'"),
        ("limits: {body: 1XiB}", "limits.body: expected a size "),
        ("limits: {json_body: 128MiB}", "limits.body: expected at least limits.json_body, got 67108864"),
        ("scrape: {interval: 3s}", "scrape.stale_after: expected at least scrape.interval (else "),
        ("listen: 127.0.0.1:9901", "admin: expected another port: 127.0.0.1:9901 is taken by listen, got "),
        ("listen: 0.0.0.0:9901", "admin: expected another port: "),
        ("listen: localhost:9901", "admin: expected another port: "),
        ("{listen: '[::]:1', admin: '[::1]:1'}", "admin: expected another port: "),
        ("listen: gpu-1:8000", "endpoints[0].url: expected another server than lbproxy's own listen, got "),
        (
            "routing: {policy: weighted}",
            "routing.scorers: expected scorer names with weights, because policy is weighted",
        ),
        ("routing: {policy: weighted, scorers: {}}", "routing.scorers: expected scorer names with weights"),
        ("routing: {scorers: {queue: 1}}", "routing.scorers: expected nothing: scorers are for policy weighted only"),
    ],
)
def test_contradiction(text: str, problem: str) -> None:
    body = text.strip("{}").replace("1, a", "1\na") if text.startswith("{") else text
    body = body.replace("', admin", "'\nadmin")
    (got,) = problems(f"{MINIMAL}{body}")
    assert got.startswith(problem)


@pytest.mark.parametrize(
    "text",
    [
        "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0",
        "listen: 127.0.0.2:9901",
        "listen: '[::]:9901'",
        "limits: {json_body: 1MiB, body: 1MiB}",
        "scrape: {interval: 2s}",
        "routing: {policy: weighted, scorers: {queue: 2, kv-utilization: 0.5, in-flight: 1}}",
    ],
)
def test_combination_that_works(text: str) -> None:
    read(MINIMAL + text)


def test_endpoint_that_is_lbproxy_itself_is_refused() -> None:
    """A request would go round for ever."""
    for url in ("http://localhost:8000", "http://127.0.0.1:8000"):
        (problem,) = problems(f"listen: 0.0.0.0:8000\nendpoints: ['{url}']")
        assert problem.startswith("endpoints[0].url: expected another server than lbproxy's own listen")
    read("listen: 0.0.0.0:8000\nendpoints: ['http://gpu-1:8000', 'http://localhost:8001']")


def test_names_and_urls_are_unique() -> None:
    text = "endpoints: ['http://a:80', 'http://A/', {url: 'http://b', name: 'a:80'}, {url: 'http://b', name: b}]"
    assert problems(text) == (
        "endpoints[1].url: expected another url than endpoints[0] has, got 'http://a:80'",
        "endpoints[2].name: expected another name than endpoints[0] has, got 'a:80'",
        "endpoints[3].url: expected another url than endpoints[2] has, got 'http://b:80'",
    )


def test_invariants_hold_for_settings_made_in_code() -> None:
    with pytest.raises(ValidationError):
        Settings.model_validate({"endpoints": ["http://a", "http://a"]})
    with pytest.raises(ValidationError):
        RoutingSettings(policy="weighted")


# --- The schema -------------------------------------------------------------------------------------------------------


def schema_of(path: str) -> list[dict[str, object]]:
    """The alternatives that the schema has for a key."""
    schema = json.loads(json.dumps(json_schema()))
    section, _, key = path.rpartition(".")
    properties = schema["$defs"][section]["properties"] if section else schema["properties"]
    return cast("list[dict[str, object]]", properties[key]["anyOf"])


def fits(value: object, alternatives: list[dict[str, object]]) -> bool:
    """What a validator would say, for the few words that number schemas use here."""
    for schema in alternatives:
        if isinstance(value, str) and schema["type"] == "string" and re.search(str(schema["pattern"]), value):
            return True
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, int | float) and (schema["type"] == "number" or (schema["type"] == "integer" and whole)):
            return float(str(schema["minimum"])) <= value <= float(str(schema["maximum"]))
    return False


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("TimeoutSettings.connect", ["250ms", "1.5s", "2", 2, 0.25, "${T}"], ["1d", "s", -1, 0, 90000, [1]]),
        ("ScrapeSettings.page", ["64KiB", "1.5MiB", "4096", 4096, "${P:-1MiB}"], ["1GB", 1.5, 12, "x"]),
        ("RetrySettings.attempts", [3, "3", "${N}"], ["3s", 0, 11, 2.5]),
    ],
)
def test_schema_takes_quantities_as_text_and_as_number(key: str, good: list[object], bad: list[object]) -> None:
    assert [value for value in good if not fits(value, schema_of(key))] == []
    assert [value for value in bad if fits(value, schema_of(key))] == []


def test_schema_has_every_key_and_takes_the_short_forms() -> None:
    schema = json.loads(json.dumps(json_schema()))
    assert set(schema["properties"]) == set(Settings.model_fields)
    assert schema["required"] == ["endpoints"]
    for short in ("ListenSettings", "AdminSettings", "EndpointSettings"):
        assert [form["type"] for form in schema["$defs"][short]["anyOf"]] == ["string", "object"]
