# SPDX-License-Identifier: Apache-2.0
"""Client libraries of agents and applications, on real vLLM servers: what tests/clients does on simulated ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.clients.environment import CLIENTS, Client, is_ready, run
from tests.real.servers import MODEL, Small

ABLE = [client for client in CLIENTS if client.package != "ollama"]
"""Ollama's API goes to its servers alone."""


@pytest.mark.parametrize("client", ABLE, ids=lambda client: client.package)
def test_a_client_does_all_that_it_can(client: Client, small: Small, found: Callable[[str], None]) -> None:
    if not is_ready(client.environment):
        pytest.skip(f"{client.environment} is not installed: make test-clients")
    report = run(client, small.url, MODEL)
    found(f"client: {report.row()}")
    assert report.failed == {}
