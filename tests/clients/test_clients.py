# SPDX-License-Identifier: Apache-2.0
"""Client libraries as they install: text, streams, a tool's round trip, and a typed error, through lbproxy."""

from __future__ import annotations

import pytest

from tests.clients.environment import CLIENTS, Client, Report, is_ready, run


@pytest.mark.timeout(360)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.package)
def test_a_client_does_all_that_it_can(client: Client, url: str, reports: list[Report]) -> None:
    if not is_ready(client.environment):
        pytest.skip(f"{client.environment} is not installed: make test-clients")
    report = run(client, url, "tiny")
    reports.append(report)
    assert report.failed == {}
