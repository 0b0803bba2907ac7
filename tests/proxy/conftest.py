"""Every test of the data path runs on both ways in: the fast lane, and aiohttp for everything."""

from __future__ import annotations

import pytest

from lbproxy.proxy import connection


@pytest.fixture(params=["lane", "aiohttp"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which way plain requests take."""
    if request.param == "aiohttp":
        monkeypatch.setattr(connection, "read_plain", lambda data, limit: None)
    return str(request.param)
