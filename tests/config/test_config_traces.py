# SPDX-License-Identifier: Apache-2.0
"""The settings of traces: which collectors and headers are taken, and that nothing shows what is secret."""

from __future__ import annotations

import copy
import json

import pytest

from lbproxy.config.parse import without_secrets
from lbproxy.config.tree import Settings
from tests.config.reading import MINIMAL, only_problem, read

SECRET = "Bearer sk-0123456789-abcdefghij"


def tracing(traces: str, environ: dict[str, str] | None = None) -> Settings:
    return read(f"traces: {{{traces}}}\n{MINIMAL}", environ)


def problem(traces: str) -> str:
    return only_problem(f"traces: {{{traces}}}\n{MINIMAL}")


@pytest.mark.parametrize(
    ("url", "read_as"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("HTTPS://Collector", "https://collector:443/v1/traces"),
        ("http://[::1]:4318/otlp/v1/traces", "http://[::1]:4318/otlp/v1/traces"),
    ],
)
def test_a_collectors_url_gets_the_usual_path_if_it_has_none(url: str, read_as: str) -> None:
    assert tracing(f"endpoint: '{url}'").traces.endpoint == read_as


@pytest.mark.parametrize(
    "url",
    [
        "collector:4318",
        "grpc://collector:4317",
        "http://u:p@collector",
        "http://c:4318/x?key=1",
        "http://c:4318/#x",
        "",
    ],
)
def test_what_is_no_collectors_url(url: str) -> None:
    assert problem(f"endpoint: '{url}'").startswith("traces.endpoint: expected the URL of a collector, such as http://")


@pytest.mark.parametrize("ratio", ["-0.1", "1.1", "all", "nan"])
def test_what_is_no_ratio(ratio: str) -> None:
    assert problem(f"sample_ratio: {ratio}").startswith("traces.sample_ratio: expected a number from 0 to 1")


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ("{'': x}", ""),
        ("{Content-Type: x}", "expected names of header fields"),
        ("{host: x}", "expected names of header fields"),
        (f"{{x-key: '{SECRET}\u00e9'}}", "expected values of 1 to 4096 visible ASCII characters"),
        (f'{{x-key: "{SECRET}\\r\\nx: y"}}', "expected values of 1 to 4096 visible ASCII characters"),
        ("{x-key: ''}", "expected values of 1 to 4096 visible ASCII characters"),
        (f"{{X-Key: '{SECRET}', x-key: y}}", "expected each header once"),
        (f"{{x-key: ['{SECRET}']}}", "expected text"),
        (f"'{SECRET}'", "expected a mapping"),
        ("{" + ", ".join(f"x-{n}: y" for n in range(33)) + "}", "expected at most 32 headers"),
    ],
)
def test_headers_that_cannot_be_sent_are_refused_and_not_repeated(headers: str, told: str) -> None:
    text = problem(f"headers: {headers}")
    assert told in text
    assert "0123456789" not in text


def test_no_form_of_the_settings_shows_a_header() -> None:
    settings = tracing("headers: {authorization: '${TOKEN}'}", {"TOKEN": SECRET})
    assert settings.traces.headers["authorization"].get_secret_value() == SECRET
    dumped = [repr(settings), str(settings), settings.model_dump_json(), json.dumps(without_secrets(settings))]
    assert not any("0123456789" in text for text in dumped)
    assert copy.deepcopy(settings) == settings != tracing("headers: {authorization: other}")
