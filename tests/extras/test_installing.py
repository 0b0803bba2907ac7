# SPDX-License-Identifier: Apache-2.0
"""The command that a message names installs what the user has."""

from __future__ import annotations

from importlib import metadata

import pytest
from packaging.requirements import Requirement

from lbproxy.extras import installing

WHEEL = "https://example.org/lbproxy-0.2.0-cp311-cp311-linux_x86_64.whl"


@pytest.mark.parametrize(
    ("direct_url", "argument"),
    [
        (None, "lbproxy[otel]"),
        (f'{{"archive_info": {{}}, "url": "{WHEEL}"}}', f"lbproxy[otel] @ {WHEEL}"),
        ('{"dir_info": {"editable": true}, "url": "file:///home/me/lbproxy"}', "/home/me/lbproxy[otel]"),
        ('{"dir_info": {}, "url": "file:///home/a%20b"}', "/home/a b[otel]"),
    ],
)
def test_the_command_installs_from_where_this_came(
    monkeypatch: pytest.MonkeyPatch, direct_url: str | None, argument: str
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return direct_url

    monkeypatch.setattr(installing, "distribution", lambda _name: Installed())
    assert installing.needs("otel") == f"needs packages that are not installed: pip install '{argument}'"
    if "/home" not in argument:
        assert Requirement(argument).extras == {"otel"}


def test_where_nothing_is_installed_it_names_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(installing, "distribution", none)
    assert installing.needs("plots").endswith("pip install '.[plots]'")
