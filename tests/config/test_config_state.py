# SPDX-License-Identifier: Apache-2.0
"""Where what was learned is kept."""

from __future__ import annotations

import pytest

from lbproxy.config.parse import parse
from lbproxy.config.sections.routing import StateSettings
from lbproxy.config.text import ConfigError


def read(text: str) -> StateSettings:
    return parse(f"state: {text}\nendpoints: ['http://a']\n", environ={}).state


def test_nothing_is_kept_by_default() -> None:
    assert read("{}") == StateSettings(file=None, prefixes=True, interval=30.0)


def test_all_of_it() -> None:
    wanted = StateSettings(file="/var/lib/lbproxy/state", prefixes=False, interval=300.0)
    assert read("{file: /var/lib/lbproxy/state, prefixes: false, interval: 5m}") == wanted


@pytest.mark.parametrize(
    "text", ["{file: ''}", "{file: /var/lib/}", '{file: "a\\0b"}', "{interval: 1ms}", "{interval: 2h}"]
)
def test_what_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError):
        read(text)
