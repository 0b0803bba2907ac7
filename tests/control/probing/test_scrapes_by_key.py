# SPDX-License-Identifier: Apache-2.0
"""Where a scrape goes, by what, and who is shown the endpoint's key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lbproxy.control.probing.scraper import metrics_targets
from lbproxy.core.endpoints.credentials import ApiKey, Tls
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.engines.dialects import Engines
from tests.control.rig import page, rig, scraped, spec
from tests.support.aio import run, until
from tests.support.certificates import CA, server_context
from tests.support.endpoint import ScriptedEndpoint

PAGE = Path(__file__).parents[2] / "fixtures/metrics/vllm-0.32.0-busy-2-running-rejecting.prom"
KEY = ApiKey("sk-1")


@pytest.mark.parametrize(
    ("metrics", "places"),
    [
        ("auto", ["https://a:1/metrics +", "https://a:1/prometheus/metrics +", "https://a:8002/metrics"]),
        ("/m", ["https://a:1/m +"]),
        (":9/m?x=1", ["https://a:9/m?x=1"]),
        (":1/m", ["https://a:1/m +"]),
        ("https://a:1/m", ["https://a:1/m +"]),
        ("http://a:1/m", ["http://a:1/m"]),
        ("https://b:1/m", ["https://b:1/m"]),
    ],
)
def test_the_key_goes_to_the_endpoint_itself_only(metrics: str, places: list[str]) -> None:
    """Marked by +. Another program may listen at another port, and http shows the key to everybody."""
    endpoint = EndpointSpec(name="e", base_url="https://a:1", metrics=metrics, api_key=KEY, tls=Tls())
    targets = metrics_targets(endpoint, Engines())
    assert [f"{one}{' +' if one.key == KEY else ''}" for one in targets] == places
    assert {one.origin[2] for one in targets} == {None if metrics.startswith("http:") else Tls()}


def test_metrics_over_tls_on_another_port() -> None:
    async def main() -> None:
        scripts = {"/load": page(PAGE.read_bytes())}
        async with (
            ScriptedEndpoint({}, tls=server_context()) as server,
            ScriptedEndpoint(dict(scripts), tls=server_context()) as metrics,
        ):
            one = replace(spec(server, metrics=f":{metrics.port}/load"), api_key=KEY, tls=Tls(CA.read_text()))
            async with rig(one) as r, scraped(r):
                await until(lambda: r.seen().metrics)
            assert not server.requests
            assert metrics.requests[0].field("authorization") is None

    run(main())
